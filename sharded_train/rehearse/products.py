"""FLOPs of one instruction of a compiled program, counted from its shapes: XLA's own cost analysis of it is empty.

A product of `[m, k]` by `[k, n]` is 2 m k n FLOPs, whether it stands as `dot`, within a fusion (Triton), or as a call
of cuBLAS or cuDNN, whose `backend_config` holds the dims. Attention by cuDNN, with heads of size D:

- forward 2 products of 2 D FLOPs a pair, backward 5, of which the first computes the scores again: flash attention
  keeps none (Dao 2023, arXiv:2307.08691, algorithm 2);
- under a causal mask T (T + 1) / 2 pairs, counted once as in `flops`; a mask that comes as a bias is unknown to the
  kernel, which works through all T^2 pairs;
- with neither, which is how queries meet another device's keys, all pairs, and none of them is hidden.

How rows fall into documents stands in arrays, not in the program: a row counts as one, as in `flops`; of several the
kernel computes less. Plain attention by XLA is dots or calls of cuBLAS in a scope "scores".

Everything else counts one FLOP for each element that an arithmetic operation gives, or that a reduction takes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from sharded_train.rehearse.hlo import Computation, Instruction, Module, Shape, bits_of, unquoted
from sharded_train.rehearse.opcodes import ARITHMETIC, CALLING, PRODUCTS, REDUCTIONS, WITHOUT_FLOPS
from sharded_train.rehearse.scopes import names_of

CUBLAS = ("__cublas$gemm", "__cublas$lt$matmul")  # and "...$f8"
BLOCK_SCALED = "__cudnn$blockScaledDot"  # [batch, m, k] by [batch, n, k], and their scales
CUDNN_ATTENTION = "__cudnn$fmha"
CUSTOM_WITHOUT_FLOPS = ("AllocateBuffer", "CreateBuffer", "Pin", "Unpin", "MoveToHost", "MoveToDevice", "__nop")
OPTIMIZERS = "sharded_train/optimizer/"  # in the source file, where the text tells it
UNARY = frozenset(["bitcast", "reshape", "copy", "convert", "transpose", "slice", "dynamic-slice", "get-tuple-element"])


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product, or a kernel of several that are attention. FLOPs are those of one execution.

    `dtype` is the widest of its factors, `from_dtype` the narrowest that one was before conversion, `precision` what
    it asks of fp32 factors ("highest" is full fp32, else TF32). Of a kernel of cuDNN, `hidden` are FLOPs on pairs that
    a causal mask hides, `again` those of visible scores computed again.
    """

    name: str
    scope: str
    by: str  # "XLA", "cuBLAS" or "cuDNN"
    factors: tuple[Shape, Shape]
    result: Shape
    dtype: str
    from_dtype: str
    flops: int
    precision: str = "default"
    attention: bool = False
    optimizer: bool = False  # of the update, such as Muon's: in the type that its own settings say
    hidden: int = 0
    again: int = 0

    @property
    def rematerialised(self) -> bool:
        """Whether it is computed a second time, for the backward pass, as jax.checkpoint has it."""
        return "rematted_computation" in self.scope

    @property
    def kind(self) -> str:
        """What it is counted as: the format that the tensor cores multiply in, attention, or the optimizer's."""
        if self.attention:
            return f"attention by {'cuDNN' if self.by == 'cuDNN' else 'XLA'}"
        words = f"products in {format_of(self.dtype, self.precision)}"
        return f"the optimizer's {words}" if self.optimizer else words


@dataclasses.dataclass(frozen=True)
class Work:
    """What one execution of an instruction computes; `unknown` names what is not understood in it."""

    products: tuple[Product, ...] = ()
    other_flops: int = 0
    unknown: tuple[str, ...] = ()


def format_of(dtype: str, precision: str = "default") -> str:
    """The name of the format of a product: "FP8", "bf16", "fp16", "TF32", "fp32"."""
    if dtype.startswith("f8"):
        return "FP8"
    if dtype == "f32":
        return "fp32" if precision == "highest" else "TF32"
    return {"f16": "fp16", "f64": "fp64", "s8": "int8", "u8": "int8"}.get(dtype, dtype)


def work_of(module: Module, computation: Computation, instruction: Instruction) -> Work:
    """What one execution of an instruction computes, with all that a fusion or a call holds; loops are `walk`'s."""
    if instruction.opcode in CALLING:
        return _sum(_in(module, called, (computation, instruction)) for called in module.called(instruction)[:1])
    return _one(module, computation, instruction, ())


Callers = tuple[tuple[Computation, Instruction], ...]


def _one(module: Module, computation: Computation, instruction: Instruction, callers: Callers) -> Work:
    """What an instruction that calls nothing computes."""
    opcode = instruction.opcode
    if opcode == "custom-call":
        return _custom_call(module, computation, instruction, callers)
    if opcode in PRODUCTS:
        return Work(products=(_dot(module, computation, instruction, callers),))
    if opcode in ARITHMETIC:
        return Work(other_flops=instruction.shapes[0].size)
    if opcode in REDUCTIONS:
        taken = computation.operands(instruction)[: len(instruction.shapes)]
        return Work(other_flops=sum(operand.shapes[0].size for operand in taken))
    return Work() if opcode in WITHOUT_FLOPS else Work(unknown=(opcode,))


def _in(module: Module, computation: Computation, *callers: tuple[Computation, Instruction]) -> Work:
    """All of a called computation; `callers` lead to it, the innermost last."""

    def each() -> Iterator[Work]:
        for instruction in computation:
            if instruction.opcode in CALLING:
                for called in module.called(instruction)[:1]:
                    yield _in(module, called, *callers, (computation, instruction))
            else:
                yield _one(module, computation, instruction, callers)

    return _sum(each())


def _sum(works: Iterator[Work]) -> Work:
    products: tuple[Product, ...] = ()
    unknown: tuple[str, ...] = ()
    other = 0
    for work in works:
        products, unknown, other = products + work.products, unknown + work.unknown, other + work.other_flops
    return Work(products, other, unknown)


def _dot(module: Module, computation: Computation, instruction: Instruction, callers: Callers) -> Product:
    attributes = instruction.attributes
    dims = {
        f"{side}_{kind}": _numbers(attributes.get(f"{side}_{kind}_dims", ""))
        for side in ("lhs", "rhs")
        for kind in ("contracting", "batch")
    }
    precision = "highest" if "highest" in attributes.get("operand_precision", "") else "default"
    precision = attributes.get("algorithm", precision)
    return _product(module, computation, instruction, callers, dims, "XLA", precision)


def _product(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    callers: Callers,
    dims: Mapping[str, tuple[int, ...]],
    by: str,
    precision: str,
) -> Product:
    operands = computation.operands(instruction)[:2]
    lhs, rhs = (operand.shapes[0] for operand in operands)
    taken = set(dims["rhs_contracting"]) | set(dims["rhs_batch"])
    free = math.prod(n for i, n in enumerate(rhs.dims) if i not in taken)
    sources = [_narrowest(module, computation, operand, callers) for operand in operands]
    outwards = (instruction, *(caller for _, caller in callers[::-1]))
    scope = next((each.scope for each in outwards if each.scope), "")
    source = next((each.source for each in outwards if each.source), "")
    return Product(
        name=instruction.name,
        scope=scope,
        by=by,
        factors=(lhs, rhs),
        result=instruction.shapes[0],
        dtype=max(lhs.dtype, rhs.dtype, key=bits_of),
        from_dtype=min(sources, key=bits_of),
        flops=2 * lhs.size * free,
        precision=precision,
        attention="scores" in names_of(scope),
        optimizer="optimizer" in names_of(scope) or OPTIMIZERS in source,
    )


def _narrowest(module: Module, computation: Computation, instruction: Instruction, callers: Callers) -> str:
    """The narrowest dtype that a factor had on its way to the product, through converts, scaling and parameters."""
    narrowest = instruction.shapes[0].dtype
    for _ in range(32):  # a chain is short; nothing is lost but a hint if it is not
        opcode = instruction.opcode
        if opcode == "parameter" and callers:
            computation, caller = callers[-1]
            callers = callers[:-1]
            instruction = computation.operands(caller)[int(instruction.literal)]
        elif opcode in UNARY:
            if len(computation.operands(instruction)[0].shapes) > 1:
                break  # a leaf of a tuple: of a loop, a collective
            instruction = computation.operands(instruction)[0]
        elif opcode == "multiply":
            factors = computation.operands(instruction)
            whole = [factor for factor in factors if factor.opcode not in ("broadcast", "constant")]
            if len(whole) != 1:
                break
            instruction = whole[0]
        elif opcode == "fusion" and len(instruction.shapes) == 1:
            callers = (*callers, (computation, instruction))
            computation = module.called(instruction)[0]
            instruction = computation.instructions[computation.root]
        else:
            break
        dtype = instruction.shapes[0].dtype
        if not re.match(r"b?f\d", dtype):
            break
        narrowest = min(narrowest, dtype, key=bits_of)
    return narrowest


def _custom_call(module: Module, computation: Computation, instruction: Instruction, callers: Callers) -> Work:
    target = unquoted(instruction.attributes.get("custom_call_target", ""))
    try:
        if target.startswith(CUBLAS):
            return Work(products=(_cublas(module, computation, instruction, callers),))
        if target == BLOCK_SCALED:
            dims = {f"{side}_{kind}": (i,) for side in ("lhs", "rhs") for kind, i in (("contracting", 2), ("batch", 0))}
            return Work(products=(_product(module, computation, instruction, callers, dims, "cuDNN", "default"),))
        if target.startswith(CUDNN_ATTENTION):
            return Work(products=(_cudnn_attention(computation, instruction, target),))
    except (KeyError, ValueError) as error:
        return Work(unknown=(f"custom-call {target} ({type(error).__name__}: {error})",))
    return Work() if target.startswith(CUSTOM_WITHOUT_FLOPS) else Work(unknown=(f"custom-call {target}",))


def _config(instruction: Instruction, key: str) -> Mapping[str, Any]:
    """A part of an instruction's `backend_config`. Raises KeyError or ValueError where it is not as expected."""
    return json.loads(instruction.attributes["backend_config"])[key]  # type: ignore[no-any-return]


def _cublas(module: Module, computation: Computation, instruction: Instruction, callers: Callers) -> Product:
    config = _config(instruction, "gemm_backend_config")
    numbers = config["dot_dimension_numbers"]
    dims = {
        f"{side}_{kind}": tuple(map(int, numbers[f"{side}_{kind}_dimensions"]))
        for side in ("lhs", "rhs")
        for kind in ("contracting", "batch")
    }
    asked = config.get("precision_config", {}).get("operand_precision", [])
    precision = "highest" if "HIGHEST" in asked else "default"
    return _product(module, computation, instruction, callers, dims, "cuBLAS", precision)


def _cudnn_attention(computation: Computation, instruction: Instruction, target: str) -> Product:
    config = _config(instruction, "cudnn_fmha_backend_config")
    batch, heads, queries, keys = (int(n) for n in config["intermediate_tensor_shape"]["dimensions"])
    q, k = (operand.shapes[0] for operand in computation.operands(instruction)[:2])
    masked, biased = "CAUSAL" in config.get("mask_type", ""), "Bias" in target
    causal = _seen(queries, keys, int(config.get("sliding_window_length", 0)))
    seen = causal if masked or biased else queries * keys
    backward = "Backward" in target
    num_products, of_pair = (5 if backward else 2), 2 * q.dims[-1] * batch * heads
    one, hidden = of_pair * seen, 0 if masked else of_pair * (queries * keys - seen)
    return Product(
        name=instruction.name,
        scope=instruction.scope,
        by="cuDNN",
        factors=(q, k),
        result=instruction.shapes[0],
        dtype=q.dtype,
        from_dtype=q.dtype,
        flops=(one + hidden) * num_products,
        attention=True,
        hidden=hidden * num_products,
        again=one if backward else 0,
    )


def _seen(queries: int, keys: int, window: int) -> int:
    """Pairs that a causal mask lets through, the first query seeing the first key; of a window, its last keys only."""
    most = min(window, keys) if window > 0 else keys
    growing = min(queries, most)  # query i sees i + 1 keys, at most `most`
    return growing * (growing + 1) // 2 + (queries - growing) * most


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))

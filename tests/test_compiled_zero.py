"""ZeRO in the compiled program: which collectives it has over which axes, how many bytes, how often, in which dtype.

A model of Llama 3 8B's structure, small, is compiled for 8 hosts of 8 H100, data 8 x tensor 8, 4 microbatches: data
lies between hosts, tensor within them. Bytes are counted, not instructions: how XLA combines collectives, which turns
of loops it peels off and where in the step a layer's weights are fetched is its and the scheduler's business.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from pathlib import Path

import pytest

from sharded_train import params, recipe
from sharded_train.errors import ConfigError
from sharded_train.rehearse import clusters, hlo
from sharded_train.rehearse.compile import Compiled, check_plugin, compile_for
from sharded_train.rehearse.wires import Collective, collectives
from sharded_train.rehearse.wires_places import Places
from sharded_train.sharding import is_placement

try:
    check_plugin()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)

ROOT = Path(__file__).parent.parent
SMALL = ROOT / "benchmarks" / "communication_config.py"
M, LAYERS, TENSOR, DATA = 4, 4, 8, 8
FEW = 64  # bytes: a sum of a few numbers, such as the loss or a norm


@functools.cache
def compiled(stage: int) -> Compiled:
    """Stage 3 works on two halves of a microbatch's rows; the others have one row, for half as much to compile."""
    return compile_stage(stage, SMALL, *([] if stage == 3 else [f"--config.train.global_batch_size={M * DATA}"]))


@functools.cache
def found(stage: int) -> tuple[Collective, ...]:
    return collectives_of(compiled(stage))


def compile_stage(stage: int, config: Path, *more: str) -> Compiled:
    overrides = [f"--config.zero.stage={stage}", *more]
    return compile_for(recipe.load(config, overrides), clusters.parse("h100:8x8"))


def collectives_of(program: Compiled) -> tuple[Collective, ...]:
    """All of a program; each must be understood, and how often it runs be certain."""
    those, unknown = collectives(hlo.parse(program.text), Places.of(program.program.mesh))
    assert not unknown
    assert all(each.certain and not each.note for each in those)
    return tuple(those)


def psi(*, layers: int = LAYERS, outside: int = 1) -> int:
    """Parameters of one tensor rank, by hand: so many layers, and the embedding, the head and the last norm or not."""
    d, heads, kv_heads, per_head, ff, vocab = 1024, 16, 8, 64, 2816, 4096  # SMALL
    layer = d * per_head * (2 * heads + 2 * kv_heads) // TENSOR + 3 * d * ff // TENSOR + 2 * d
    return layers * layer + outside * (2 * vocab * d // TENSOR + d)


def entries(those: list[Collective]) -> Counter[str]:
    """Entries of the whole arrays that these move in a step, by dtype, without sums of a few numbers."""
    count: Counter[str] = Counter()
    for each in those:
        for member in each.members:
            if member.bytes > FEW:
                count[member.dtype] += int(max(member.given.size, member.got.size) * each.times)
    return count


def over_data(stage: int, op: str) -> list[Collective]:
    return [each for each in found(stage) if each.op == op and "data" in each.axes]


def test_stage_0_only_sums_over_data() -> None:
    assert not over_data(0, "all-gather")
    assert not over_data(0, "reduce-scatter")
    (dtype, count), *others = entries(over_data(0, "all-reduce")).items()
    assert (dtype, others) == ("f32", [])
    assert is_psi_and_one_layer_at_most(count - count % 64)  # once a step; single numbers are summed along with them


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_from_stage_1_on_weights_are_gathered_in_bf16_and_gradients_scattered_in_fp32(stage: int) -> None:
    assert set(entries(over_data(stage, "all-gather"))) == {"bf16"}
    assert set(entries(over_data(stage, "reduce-scatter"))) == {"f32"}
    assert not entries(over_data(stage, "all-reduce"))
    for each in over_data(stage, "all-gather"):
        assert each.axes == ("data",)
        assert all(member.parameter for member in each.members)  # weights, each by its name
        assert all(member.got.size == DATA * member.given.size for member in each.members)


def test_stage_1_moves_everything_once_a_step() -> None:
    assert is_psi_and_one_layer_at_most(entries(over_data(1, "all-gather"))["bf16"])
    assert entries(over_data(1, "reduce-scatter"))["f32"] == psi()


def test_stage_2_scatters_in_every_microbatch() -> None:
    assert is_psi_and_one_layer_at_most(entries(over_data(2, "all-gather"))["bf16"])
    assert entries(over_data(2, "reduce-scatter"))["f32"] == M * psi()


def is_psi_and_one_layer_at_most(gathered: int) -> bool:
    """Where weights are fetched a layer ahead, the last one may fetch one that nothing needs; and a layer that stands
    outside of the loop may be summed both by itself and within the stack of all.
    """
    return gathered in (psi(), psi(layers=LAYERS + 1))


def test_stage_3_gathers_each_layer_forward_and_backward() -> None:
    """m (2 psi of the layers + psi of the rest), less what a pass takes over from the one before it."""
    gathered = entries(over_data(3, "all-gather"))["bf16"]
    most = M * psi(layers=2 * LAYERS) + psi(layers=1, outside=0)
    assert M * psi(layers=2 * (LAYERS - 1)) <= gathered <= most
    assert (most - gathered) % psi(layers=1, outside=0) == 0
    assert entries(over_data(3, "reduce-scatter"))["f32"] == M * psi()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gather_makes_one_layer_whole_where_layers_are_gathered_one_by_one(stage: int) -> None:
    """Local shapes: what a device gets is a tensor rank's part of the weight, never the whole of it."""
    plan = compiled(stage).program.plan
    leaves = dict(params.named_leaves(plan.placements, is_placement))
    for each in over_data(stage, "all-gather"):
        for member in each.members:
            leaf = leaves[member.parameter]
            ways = TENSOR if any("tensor" in (dim or ()) for dim in leaf.gathered) else 1
            whole = math.prod(leaf.spec.shape) // ways
            assert member.got.size in (
                {whole // LAYERS} if stage == 3 and leaf.spec.stacked else {whole, whole // LAYERS}
            )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tensor_stays_within_a_host_and_data_goes_between(stage: int) -> None:
    for each in found(stage):
        assert each.op in ("all-gather", "reduce-scatter", "all-reduce")  # no all-to-all, no permutation
        if each.axes == ("tensor",):
            assert each.link == "NVLink"
        elif each.axes == ("data",):
            assert each.link == "network"
        else:  # gradients of gains, whole over tensor, under stage 0; and the norm of all of them
            assert each.axes == ("data", "tensor")
            assert each.op == "all-reduce"
            assert stage == 0 or each.payload_bytes <= FEW


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_over_tensor_four_gathers_and_four_scatters_of_the_activation_in_each_layer(stage: int) -> None:
    """And one more of each for embedding and head together; rematerialisation gathers both inputs of a layer again,

    but for layers that XLA finds it need not compute again, since their backward pass follows at once.
    """
    train, model = compiled(stage).recipe.train, compiled(stage).recipe.model
    activation = train.global_batch_size // DATA // M * train.sequence_length * model.d_model
    gathered, scattered = (
        entries([each for each in found(stage) if each.op == op and each.axes == ("tensor",)])
        for op in ("all-gather", "reduce-scatter")
    )
    once = M * (4 * LAYERS + 2) * activation
    assert scattered == {"bf16": once}
    again, rest = divmod(gathered["bf16"] - once, 2 * activation)
    assert (set(gathered), rest) == ({"bf16"}, 0)
    assert M * (LAYERS - 1) <= again <= M * LAYERS


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_llama3_8b(stage: int) -> None:
    """The same on the real config: gathers in bf16, psi a step under stage 1, and the layers twice a pass under 3."""
    config, more = ROOT / "configs" / "llama3_8b.py", ("--config.mesh.tensor=8", "--config.train.num_microbatches=4")
    those = collectives_of(compile_stage(stage, config, *more))
    d, ff, layers, vocab = 4096, 14_336, 32, 128_256
    layer = d * 128 * (2 * 32 + 2 * 8) // TENSOR + 3 * d * ff // TENSOR + 2 * d
    outside = 2 * vocab * d // TENSOR + d
    gathered, scattered = (
        entries([each for each in those if each.op == op and each.axes == ("data",)])
        for op in ("all-gather", "reduce-scatter")
    )
    assert set(gathered) == {"bf16"}
    if stage == 1:
        assert gathered["bf16"] in (layers * layer + outside, (layers + 1) * layer + outside)
        assert scattered == {"f32": layers * layer + outside}
    else:
        assert abs(M * (2 * layers * layer + outside) - gathered["bf16"]) <= 2 * M * layer
        assert scattered == {"f32": M * (layers * layer + outside)}
    assert {each.op for each in those} == {"all-gather", "reduce-scatter", "all-reduce"}
    assert {each.link for each in those if each.axes == ("tensor",)} == {"NVLink"}

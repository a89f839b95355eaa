"""Context parallelism on virtual CPU devices: what attention costs, split over a sequence axis, beside one device.

    python benchmarks/context.py [--devices 4] [--tokens 2048 4096 8192 16384] [--window W] [--rounds 3]
        [--json OUT]

Forward and backward pass of one layer's attention, fp32, one row of so many tokens, one document or several. The
devices share the cores, so that CPU time is the work of all of them together: 1.0 is no more than one device does.
Rounds are run in turn, and what counts is the least time of each. FLOPs are those of the matrix products that are
traced, loops counted as often as they turn; tiles of queries compute some hidden pairs on one device too.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STRATEGIES = ("all_gather", "ring", "ulysses")
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
MEAN_DOCUMENT = 700  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--window", type=int, help="keys that a query sees; without it all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the results here too")
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.devices}"
    rows = [row for tokens in args.tokens for packed in (False, True) for row in measure(tokens, packed, args)]
    show(rows, args.devices)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


def measure(tokens: int, packed: bool, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each strategy and for one device."""
    import jax
    import numpy as np

    from sharded_train.ops import zigzag

    draw = np.random.default_rng(0)
    shape = lambda heads: (1, tokens, heads, HEAD_DIM)
    arrays = [draw.normal(size=shape(n)).astype(np.float32) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    starts = draw.random(tokens) < 1 / MEAN_DOCUMENT if packed else np.zeros(tokens, bool)
    given = [*arrays, 1 + np.cumsum(starts, dtype=np.int32)[None]]
    split = [zigzag.arrange(x, args.devices) for x in given]
    steps = {way: (step_of(way, args.devices, args.window), given if way == "one device" else split) for way in ways()}
    least = dict.fromkeys(steps, float("inf"))
    for round_ in range(args.rounds + 1):
        for way, (step, inputs) in steps.items():
            begun = time.process_time()
            jax.block_until_ready(step(*inputs))
            if round_:  # the first compiles
                least[way] = min(least[way], time.process_time() - begun)
    flops = {way: count(jax.make_jaxpr(step)(*inputs).jaxpr) for way, (step, inputs) in steps.items()}
    parts = lambda way: 1 if way == "one device" else args.devices
    return [
        {
            "tokens": tokens,
            "packed": packed,
            "way": way,
            "cpu_seconds": least[way],
            "flops": flops[way] * parts(way),
            "cpu_ratio": least[way] / least["one device"],
            "flops_ratio": flops[way] * parts(way) / flops["one device"],
        }
        for way in steps
    ]


def ways() -> tuple[str, ...]:
    return ("one device", *STRATEGIES)


def step_of(way: Any, devices: int, window: int | None) -> Callable[..., Any]:
    """Output and gradients, jitted."""
    import jax
    import numpy as np
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    from sharded_train.ops import attention, context

    if way == "one device":
        fn = functools.partial(attention.attention, implementation="xla", windows=(window,))
    else:
        fn = functools.partial(context.context_attention, implementation="xla", strategy=way, windows=(window,))

    def both(q: Any, k: Any, v: Any, d_out: Any, segments: Any) -> Any:
        out, pullback = jax.vjp(lambda q, k, v: fn(q, k, v, segments), q, k, v)
        return out, *pullback(d_out)

    if way == "one device":
        return jax.jit(both)
    mesh, spec = Mesh(np.array(jax.devices()[:devices]), ("sequence",)), P(None, "sequence")
    return jax.jit(jax.shard_map(both, mesh=mesh, in_specs=(spec,) * 5, out_specs=(spec,) * 4))


def count(jaxpr: Any) -> int:
    """FLOPs of the matrix products on one device."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += 2 * product(out) * product(left[dim] for dim in contracted)
        turns = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        total += turns * sum(count(getattr(inner, "jaxpr", inner)) for inner in inside(equation.params))
    return total


def inside(params: dict[str, Any]) -> list[Any]:
    return [value for value in params.values() if hasattr(value, "eqns") or hasattr(value, "jaxpr")]


def product(numbers: Any) -> int:
    return functools.reduce(lambda a, b: a * b, numbers, 1)


def show(rows: list[dict[str, Any]], devices: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("tokens", "rows", "attention", "CPU s", "CPU ratio", "FLOPs ratio", title=f"{devices} devices")
    for row in rows:
        numbers = (f"{row['cpu_seconds']:.2f}", f"{row['cpu_ratio']:.2f}", f"{row['flops_ratio']:.3f}")
        kind = "packed" if row["packed"] else "one document"
        table.add_row(f"{row['tokens']:,}", kind, row["way"], *numbers, end_section=row["way"] == STRATEGIES[-1])
    Console().print(table)


if __name__ == "__main__":
    main()

"""cuDNN's attention on a real GPU: is it right, and what do packed documents cost?

    python benchmarks/gpu_attention.py [--tokens 8192] [--rows 2] [--heads 32] [--kv-heads 8] [--head-dim 128]
        [--documents 1 8 32] [--window W] [--rounds 10] [--json OUT]

First `sharded_train.attention_check`, whose cases are printed with their errors; a wrong one ends the script with exit
code 1. Then milliseconds of a forward and backward pass, the least of the rounds, for rows of so many documents of one
length: the packed layout, the plain causal call (which ignores documents: what packing may cost at most is the
difference), and plain XLA. Work is told as TFLOP/s of the pairs that are seen; forward 2 products, backward 5.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sharded_train import attention_check
from sharded_train.ops import attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--documents", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--window", type=int, help="check sliding windows too")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the results here too")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit(f"cuDNN is of NVIDIA's GPUs, and JAX runs on {jax.default_backend()} here: install jax[cuda12]")
    device = jax.local_devices()[0]
    print(f"{device.device_kind}, compute capability {device.compute_capability}, jax {jax.__version__}")
    try:
        results = attention_check.check(args.head_dim, jnp.dtype(jnp.bfloat16), args.window)
    except RuntimeError as wrong:
        sys.exit(str(wrong))
    print("\n".join(map(str, results)))
    rows = [row for documents in args.documents for row in measure(documents, args)]
    for row in rows:
        print("{documents:4} documents  {way:8} {milliseconds:9.2f} ms  {tflops:7.1f} TFLOP/s".format(**row))
    if args.json:
        found = {"device": device.device_kind, "check": [result._asdict() for result in results], "times": rows}
        args.json.write_text(json.dumps(found, indent=2))


def measure(documents: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0).normal
    shape = lambda heads: (args.rows, args.tokens, heads, args.head_dim)
    heads = (args.heads, args.kv_heads, args.kv_heads, args.heads)
    arrays = [jnp.asarray(draw(size=shape(n)), jnp.bfloat16) for n in heads]
    row = 1 + np.arange(args.tokens) * documents // args.tokens
    segments = jnp.asarray(np.broadcast_to(row, (args.rows, args.tokens)), jnp.int32)
    pairs = args.rows * sum(int(n) * (int(n) + 1) // 2 for n in np.bincount(row))
    flops = 7 * 2 * pairs * args.heads * args.head_dim
    ways: dict[str, dict[str, Any]] = {
        "packed": {"implementation": "cudnn"},
        "causal": {"implementation": "cudnn", "max_documents": 1},
        "xla": {"implementation": "xla"},
    }
    found = []
    for way, settings in ways.items():
        seconds = least(jax.jit(functools.partial(both, settings=settings)), (*arrays, segments), args.rounds)
        found.append(
            {"documents": documents, "way": way, "milliseconds": seconds * 1e3, "tflops": flops / seconds / 1e12}
        )
    return found


def both(q: Any, k: Any, v: Any, d_out: Any, segments: Any, settings: dict[str, Any]) -> Any:
    out, pullback = jax.vjp(lambda q, k, v: attention.attention(q, k, v, segments, **settings), q, k, v)
    return out, *pullback(d_out)


def least(step: Callable[..., Any], args: tuple[Any, ...], rounds: int) -> float:
    """Seconds."""
    jax.block_until_ready(step(*args))
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        jax.block_until_ready(step(*args))
        times.append(time.perf_counter() - begun)
    return min(times)


if __name__ == "__main__":
    main()

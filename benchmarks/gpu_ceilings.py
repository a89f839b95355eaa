"""What a GPU can do at most, beside which a step's speed is to be read: a copy within its memory, and large products.

    python benchmarks/gpu_ceilings.py [--size 8192] [--gigabytes 1] [--json OUT]

The copy counts what is read and what is written. Products are square, `ops.dot` as the model uses it: bf16, and f8 with
sums that are fast (forward) and exact (backward). Best of several, after one that does not count.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from sharded_train.ops.dot import dot
from sharded_train.precision.formats import E4M3, E5M2

BF16 = jnp.dtype(jnp.bfloat16)
PRODUCTS = {"bf16": (BF16, None), "f8 forward": (E4M3, None), "f8 backward": (E5M2, "highest")}
AT_LEAST = 0.5  # seconds that each is repeated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192, help="rows and columns of the products' factors")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the copied array")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args()
    device = jax.devices()[0]
    found: dict[str, Any] = {"device": device.device_kind, "copy": copied(int(args.gigabytes * 1e9))}
    print(f"{device.device_kind}: copies {found['copy'] / 1e9:,.0f} GB/s, read and written")
    for name, (left, precision) in PRODUCTS.items():
        found[name] = multiplied(args.size, left, precision)
        print(f"{name:12} {found[name] / 1e12:,.2f} TFLOP/s", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def copied(size: int) -> float:
    """Bytes per second."""
    x = jnp.zeros(size, jnp.uint8)
    return 2 * size / best(jax.jit(lambda x: x ^ jnp.uint8(1)).lower(x).compile(), x)


def multiplied(size: int, left: jnp.dtype, precision: str | None) -> float:
    """FLOP/s. The right factor of f8 is always e4m3: cuBLAS takes no two of e5m2."""
    right = E4M3 if left.itemsize == 1 else left
    a, b = jnp.ones((size, size), left), jnp.ones((size, size), right)
    product = functools.partial(dot, out_dtype=BF16, precision=precision, transpose_b=True)
    return 2 * size**3 / best(jax.jit(product).lower(a, b).compile(), a, b)


def best(run: Callable[..., jax.Array], *args: jax.Array) -> float:
    """Seconds."""
    run(*args).block_until_ready()
    times: list[float] = []
    while len(times) < 5 or sum(times) < AT_LEAST:
        begun = time.perf_counter()
        run(*args).block_until_ready()
        times.append(time.perf_counter() - begun)
    return min(times)


if __name__ == "__main__":
    main()

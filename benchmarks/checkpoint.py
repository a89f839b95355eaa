"""What a checkpoint costs: beside a plain copy to the host, `dd` on the same disk, and Orbax used plainly.

    python benchmarks/checkpoint.py --folder=DIR_ON_THE_DISK [--megabytes=1024] [--devices=1] [--repeats=5]

Blocking is how long the loop stands still for an asynchronous save, beside copying the same arrays to the host. Saving
is until the checkpoint counts: digests, writing, fsync, reading back, record and rename; `dd` writes as many bytes with
fdatasync. Restoring checks files and digests; caches are emptied before it, and before `dd` reads. All are taken in
turn, since disks and machines drift; the first save compiles, and is shown by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    import jax

    if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    folder = args.folder / "benchmark-checkpoint"
    folder.mkdir(parents=True)
    try:
        times = measure(folder, args.megabytes, args.repeats)
    finally:
        shutil.rmtree(folder)
    report(times, args.megabytes * 2**20)


def measure(folder: Path, megabytes: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each thing, one after the other, `repeats` times."""
    import jax
    from orbax.checkpoint import v1 as ocp

    from sharded_train.checkpoint import Checkpointer

    times: dict[str, list[float]] = {}

    def timed(name: str, do: Callable[..., Any], *args: Any) -> Any:
        begun = time.perf_counter()
        found = do(*args)
        times.setdefault(name, []).append(time.perf_counter() - begun)
        return found

    changed = lambda state: jax.block_until_ready(jax.tree.map(lambda x: x * 1.0001, state))  # not on the host yet
    state = state_of(megabytes)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    with contextlib.closing(Checkpointer(folder / "ours", keep=1)) as ours:
        for turn in range(repeats + 1):
            plain, first = folder / f"plain-{turn}", "first save, " if turn == 0 else ""
            state = changed(state)
            timed("copy to the host", on_host, state)
            state = changed(state)
            os.sync()
            begun = time.perf_counter()
            timed(f"{first}blocking", ours.save, turn, state, {})
            ours.wait()
            times.setdefault(f"{first}save", []).append(time.perf_counter() - begun)
            os.sync()
            timed("dd write", dd, folder, megabytes)
            state = changed(state)
            begun = time.perf_counter()
            timed("Orbax blocking", ocp.save_async, plain, state).result()
            times.setdefault("Orbax save", []).append(time.perf_counter() - begun)
            drop(folder)
            timed("dd read", dd_read, folder)
            drop(folder)
            timed("restore", lambda found: jax.block_until_ready(ours.restore(found, abstract)[0]), turn)
            drop(folder)
            timed("Orbax restore", lambda path: jax.block_until_ready(ocp.load(path, abstract)), plain)
            shutil.rmtree(plain)
            print(f"turn {turn} of {repeats} is done", file=sys.stderr, flush=True)
    return times


def on_host(state: dict[str, Any]) -> list[Any]:
    """A copy of all shards."""
    import numpy as np

    return [np.array(shard.data) for x in state.values() for shard in x.addressable_shards]


def state_of(megabytes: int) -> dict[str, Any]:
    """Sixteen arrays, split over the devices."""
    import jax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(jax.devices(), ("data",))
    make = jax.jit(jax.random.normal, static_argnums=1, out_shardings=NamedSharding(mesh, P("data")))
    return {
        f"w{i}": make(jax.random.key(i), (64 * len(jax.devices()), megabytes * 256 // len(jax.devices())))
        for i in range(16)
    }


def dd(folder: Path, megabytes: int) -> None:
    command = ["dd", "if=/dev/zero", f"of={folder / 'dd'}", "bs=1M", f"count={megabytes}", "conv=fdatasync"]
    subprocess.run(command, check=True, capture_output=True)


def dd_read(folder: Path) -> None:
    subprocess.run(["dd", f"if={folder / 'dd'}", "of=/dev/null", "bs=1M"], check=True, capture_output=True)


def drop(folder: Path) -> None:
    """Takes the files below out of the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def report(times: dict[str, list[float]], num_bytes: int) -> None:
    """Medians, as Markdown; each ratio is the median of the turns' ratios."""
    print("| what | seconds (median) | least to most | MB/s |\n|---|---|---|---|")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"| {name} | {median:.2f} | {min(seconds):.2f} to {max(seconds):.2f} | {num_bytes / 1e6 / median:,.0f} |")
    print("\n| ratio | median | least to most |\n|---|---|---|")
    for name, over, under in (
        ("blocking / copy to the host", "blocking", "copy to the host"),
        ("throughput of a save / of dd", "dd write", "save"),
        ("throughput of Orbax's plain save / of dd", "dd write", "Orbax save"),
        ("throughput of a restore / of dd", "dd read", "restore"),
        ("throughput of Orbax's plain restore / of dd", "dd read", "Orbax restore"),
    ):
        # The first turn's save stands under a name of its own.
        count = min(len(times[over]), len(times[under]))
        ratios = [a / b for a, b in zip(times[over][-count:], times[under][-count:], strict=True)]
        print(f"| {name} | {statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |")


if __name__ == "__main__":
    main()

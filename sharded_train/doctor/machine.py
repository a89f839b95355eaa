"""Limits, memory and the disk of the workdir."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from sharded_train.doctor.finding import Finding, judged
from sharded_train.tables import bytes_in_words

OPEN_FILES = 4096  # sockets of gloo or NCCL, rows of data, a checkpoint's parts
SHARED_MEMORY = 2**30  # bytes in /dev/shm; NCCL takes some 10 MiB for each pair of GPUs, Grain rows in flight
TRIAL, SLOW, LITTLE = 64 * 2**20, 100e6, 10 * 2**30  # bytes written, bytes a second, bytes left


def limits(on_gpu: bool, has_infiniband: bool, shm: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """What the kernel allows this process."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = "" if files >= OPEN_FILES or files == resource.RLIM_INFINITY else f"ulimit -n {OPEN_FILES * 16}"
    yield judged("open files", f"{_number(files)} at most", warning=few)
    if on_gpu and has_infiniband:
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        bound = locked != resource.RLIM_INFINITY
        fix = "ulimit -l unlimited (in SLURM: PropagateResourceLimits): RDMA pins memory" if bound else ""
        yield judged("locked memory", f"{_number(locked)} bytes at most", failed=fix)
    if shm.is_dir():
        size = shutil.disk_usage(shm).total
        fix = "" if size >= SHARED_MEMORY else "more of it, in a container: --shm-size=16g"
        yield judged("shared memory", f"{shm} has {bytes_in_words(size)}", warning=fix)
    total, available = _memory()
    low = "end what else runs here: data and checkpoints need memory of the host" if available < 0.1 * total else ""
    cores = len(os.sched_getaffinity(0))
    words = f"{bytes_in_words(available)} of {bytes_in_words(total)} free, {cores} cores"
    yield judged("memory and cores", words, warning=low)


def _number(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _memory(meminfo: Path = Path("/proc/meminfo")) -> tuple[int, int]:
    """Bytes of the host's memory, and of it available."""
    found = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return tuple(1024 * int(found[name].split()[0]) for name in ("MemTotal", "MemAvailable"))  # type: ignore[return-value]


def disk(workdir: Path, needed: int | None = None) -> Iterator[Finding]:
    """Whether the workdir can be written, how fast, and what is left; `needed` are the bytes of a run's checkpoints.

    Makes the folder, and takes away what it wrote there.
    """
    file = workdir / f".doctor-{secrets.token_hex(8)}"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        write, read = _speeds(file)
    except OSError as error:
        fix = f"choose a folder that can be written ({error.strerror})"
        yield Finding("workdir", "failed", f"{workdir} cannot be written", fix)
        return
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
    free = shutil.disk_usage(workdir).free
    slow = "checkpoints will take long: a local or parallel file system" if write < SLOW else ""
    words = f"{workdir}: writes {write / 1e6:,.0f} MB/s to the disk, reads {read / 1e6:,.0f} MB/s (maybe cached)"
    yield judged("disk speed", words, warning=slow)
    wanted = f", the checkpoints of this config take {bytes_in_words(needed)}" if needed else ""
    full = "make room, or keep fewer checkpoints (checkpoint.keep)"
    failed, warning = (full if needed and free < needed else ""), (full if free < LITTLE else "")
    yield judged("disk space", f"{bytes_in_words(free)} left{wanted}", failed=failed, warning=warning)


def _speeds(file: Path) -> tuple[float, float]:
    """Bytes a second of writing to the disk itself, and of reading back."""
    data = secrets.token_bytes(2**20)
    start = time.perf_counter()
    with file.open("wb") as out:
        for _ in range(TRIAL // len(data)):
            out.write(data)
        out.flush()
        os.fsync(out.fileno())
    written = time.perf_counter()
    with file.open("rb") as back:
        while back.read(2**22):
            pass
    return TRIAL / (written - start), TRIAL / (time.perf_counter() - written)

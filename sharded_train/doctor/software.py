"""Versions, devices and links, as Python, JAX and the kernel see them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sharded_train import __version__
from sharded_train.doctor.finding import Finding, judged
from sharded_train.links import hosts_of
from sharded_train.tables import bytes_in_words

JAX = ((0, 10, 2), (0, 13))  # from, and below
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
INFINIBAND = Path("/sys/class/infiniband")
DRIVER = Path("/proc/driver/nvidia/version")
DEFAULT_MEMORY = "0.92"  # of a GPU, that we ask JAX for


def versions() -> Iterator[Finding]:
    """Python, JAX and what must fit together."""
    found = {name: _version(name) for name in ("jax", "jaxlib", *PLUGINS)}
    said = f"Python {platform.python_version()}, sharded_train {__version__}"
    said += "".join(f", {name} {version}" for name, version in found.items() if version)
    jax, jaxlib = found["jax"] or "", found["jaxlib"] or ""
    wrong = ""
    if not JAX[0] <= _numbers(jax) < JAX[1]:
        wrong = f"pip install 'jax>={'.'.join(map(str, JAX[0]))},<{'.'.join(map(str, JAX[1]))}'"
    elif _numbers(jax)[:2] != _numbers(jaxlib)[:2]:
        wrong = f"install both of one version: pip install jax=={jax} jaxlib=={jax}"
    else:
        for name in PLUGINS:
            if found[name] and found[name] != jaxlib:
                wrong = f"the plugin must have jaxlib's version: pip install {name}=={jaxlib}"
    yield judged("versions", said, failed=wrong)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


def devices(local: list[Any], every: list[Any], environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """What this process computes on, and what all have together."""
    first = local[0]
    words = f"{len(local)} × {first.device_kind} here, {len(every)} in all"
    driver = DRIVER.is_file()
    hidden = ""
    if first.platform == "cpu" and driver:
        hidden = "there is a driver of NVIDIA's, but JAX has no GPU: pip install 'sharded-train[cuda12]', unset "
        hidden += "JAX_PLATFORMS and CUDA_VISIBLE_DEVICES, and look whether nvidia-smi lists the GPUs"
    kinds = {device.device_kind for device in every}
    mixed = f"use hosts of one kind only; here are {', '.join(sorted(kinds))}" if len(kinds) > 1 else ""
    yield judged("devices", words, failed=hidden or mixed)
    counts = [list(hosts_of(_array(every))).count(host) for host in sorted(set(hosts_of(_array(every))))]
    uneven = "" if len(set(counts)) == 1 else "give each host the same number of devices: a mesh needs equal hosts"
    each = f"{counts[0]}" if not uneven else ", ".join(map(str, counts))
    yield judged("hosts", f"{len(counts)} with {each} devices", failed=uneven)
    if first.platform != "cpu":
        yield _memory(local, environ)


def _array(every: list[Any]) -> Any:
    import numpy as np

    array = np.empty(len(every), dtype=object)
    array[:] = every
    return array


def _memory(local: list[Any], environ: Mapping[str, str]) -> Finding:
    """Whether something else has part of the GPUs' memory, or JAX was told to take less of it."""
    stats = [device.memory_stats() or {} for device in local]
    limits, used = [s.get("bytes_limit", 0) for s in stats], [s.get("bytes_in_use", 0) for s in stats]
    words = f"JAX may use {bytes_in_words(min(limits))} of each, {bytes_in_words(max(used))} in use"
    uneven = max(limits) - min(limits) > 0.02 * max(limits)
    asked = environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", DEFAULT_MEMORY)
    warning = "something else uses a GPU: nvidia-smi says what" if uneven else ""
    if float(asked) < 0.8:
        warning = f"XLA_PYTHON_CLIENT_MEM_FRACTION={asked} keeps memory from training: unset it"
    return judged("device memory", words, warning=warning)


def links(num_hosts: int, on_gpu: bool, infiniband: Path = INFINIBAND) -> Iterator[Finding]:
    """The InfiniBand and RoCE ports that the kernel sees, which NCCL would use between hosts."""
    ports = {port.parts[-3]: _state(port) for port in sorted(infiniband.glob("*/ports/*"))}
    active = [f"{name} {rate}" for name, (state, rate) in ports.items() if state == "ACTIVE"]
    down = [name for name, (state, _) in ports.items() if state != "ACTIVE"]
    words = f"{len(active)} active InfiniBand or RoCE ports" + (f": {', '.join(active)}" if active else "")
    warning = ""
    if on_gpu and num_hosts > 1 and not active:
        warning = "between hosts NCCL would use TCP, many times slower: load the NICs' drivers, see `ibstat`"
    elif down and active:
        warning = f"ports that are down: {', '.join(down)}; check cables and `ibstat`"
    yield judged("links", f"{words}; measure them with `sharded-train collectives`", warning=warning)


def _state(port: Path) -> tuple[str, str]:
    """State and rate of a port, such as ("ACTIVE", "400 Gb/sec")."""
    read = lambda name: (port / name).read_text().strip() if (port / name).is_file() else "?"
    return read("state").rpartition(": ")[2], read("rate").partition(" (")[0]


def environment(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Variables that change what XLA and NCCL do; those of NCCL that are for debugging slow it."""
    said = {k: v for k, v in sorted(environ.items()) if k.startswith(("NCCL_", "XLA_", "JAX_")) or k == "PJRT_NPROC"}
    slow = [k for k in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE") if environ.get(k, "0") != "0"]
    words = ", ".join(f"{name}={value}" for name, value in said.items()) or "nothing set for XLA, JAX or NCCL"
    warning = f"{', '.join(slow)} turn{'s' * (len(slow) == 1)} off a fast path: unset unless meant" if slow else ""
    yield judged("environment", words, warning=warning)

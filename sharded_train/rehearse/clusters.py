"""Clusters that are not there: "h100:8x8", or a file that describes one.

A *host* is one NVLink domain, as everywhere in this project (`links.host_of`): a machine of 8 GPUs, a rack of 72 for
NVL72. What lies between hosts is the network. Constants and their sources stand in `sharded_train.devices`.

A file is TOML. It may start from a known kind and say what differs; keys are the fields of `devices.Device`:

    kind = "h100"
    hosts = 16
    devices_per_host = 8
    network_bandwidth = 12.5e9  # bytes per second and direction of one GPU
    [peaks]
    bf16 = 800e12

What `sharded-train collectives --json=FILE` found stands in for the links where `measured = "FILE"` names it (beside
the TOML); what the TOML says itself goes before. Such a JSON is itself a file that describes its own cluster.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sharded_train.devices import DEVICES, Device
from sharded_train.errors import ConfigError, did_you_mean

EXAMPLE = "h100:8x8"
MOST_DEVICES = 2**17
_FIELDS = {field.name: field.type for field in dataclasses.fields(Device)}
_DTYPES = ("fp8", "bf16", "fp16", "tf32", "fp32")
_PEAKS = (1e9, 1e18)
_BOUNDS: Mapping[str, tuple[float, float, str]] = {  # far beyond what is built, within what XLA and a double can take
    "memory": (2**20, 2**44, "bytes"),
    "memory_bandwidth": (1e6, 1e15, "bytes per second"),
    "nvlink_bandwidth": (1e6, 1e15, "bytes per second"),
    "network_bandwidth": (1e6, 1e15, "bytes per second"),
    "nvlink_devices": (1, MOST_DEVICES, "devices"),
    "core_count": (1, 10_000, "multiprocessors"),
    "fpus_per_core": (1, 10_000, "units"),
    "clock_ghz": (0.01, 100, "GHz"),
    "l2_cache": (2**10, 2**30, "bytes"),
    "shared_memory_per_core": (48 * 2**10, 2**24, "bytes"),
    "shared_memory_per_block": (48 * 2**10, 2**24, "bytes"),
    "nvlink_latency": (1e-12, 1, "seconds"),
    "network_latency": (1e-12, 1, "seconds"),
}
MEASURED = ("nvlink_bandwidth", "nvlink_latency", "network_bandwidth", "network_latency")
_CAPABILITIES = ((8, 0), (12, 1))  # what the compiler of the CUDA plugin has code for


@dataclasses.dataclass(frozen=True)
class Cluster:
    """So many hosts of so many equal devices."""

    kind: str  # "h100", or the file that describes it
    num_hosts: int
    devices_per_host: int
    device: Device

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host

    @property
    def words(self) -> str:
        hosts = "one host" if self.num_hosts == 1 else f"{self.num_hosts:,} hosts"
        return f"{self.num_devices:,} × {self.device.name}: {hosts} of {self.devices_per_host}"

    @property
    def remarks(self) -> list[str]:
        """What one may not have meant."""
        rack, here = self.device.nvlink_devices, self.devices_per_host
        if rack <= 8 or self.num_hosts == 1 or here == rack:
            return []
        hosts = f"{self.num_hosts:,} hosts of {here}"
        return [
            f"NVLink joins up to {rack} {self.device.name}, but here the network joins {hosts}: a host is an NVLink "
            f"domain; a whole rack is {self.kind}:1x{rack}"
        ]

    @property
    def target(self) -> str:
        """What XLA must know of the device to compile for it where there is none: text of a `GpuTargetConfigProto`.

        Without the versions XLA leaves FP8 products in bf16, and those in blocks before cuDNN 9.10 (whose version jax
        0.10 reads from a field of its own).
        """
        major, minor = self.device.compute_capability.split(".")
        minor_of_dnn = 10 if int(major) >= 10 else 8
        accelerated = "feature_extension: ACCELERATED_FEATURES" if int(major) >= 9 else ""
        return f"""
            gpu_device_info {{
              cuda_compute_capability {{ major: {major} minor: {minor} {accelerated} }}
              core_count: {self.device.core_count} fpus_per_core: {self.device.fpus_per_core}
              clock_rate_ghz: {self.device.clock_ghz}
              device_memory_size: {self.device.memory} memory_bandwidth: {self.device.memory_bandwidth:.0f}
              l2_cache_size: {self.device.l2_cache}
              shared_memory_per_core: {self.device.shared_memory_per_core}
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: {self.device.shared_memory_per_block}
              threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              runtime_version: "12.9.0" driver_version: "12.9.0" compile_time_toolkit_version: "12.9.0"
              dnn_version: "9.{minor_of_dnn}.0"
            }}
            dnn_version_info {{ major: 9 minor: {minor_of_dnn} }}
            platform_name: "CUDA"
            device_description_str: "{self.device.name}"
        """


def parse(text: str) -> Cluster:
    """The cluster of "KIND:HOSTSxDEVICES" or "file:SPEC.toml".

    Raises ConfigError: an unknown kind, sizes that are none, more devices in a host than NVLink joins, a wrong file.
    """
    kind, colon, rest = text.partition(":")
    if colon and kind == "file":
        return _of_file(Path(rest))
    if kind not in DEVICES:
        if re.fullmatch(r"[1-9]\d{0,8}x[1-9]\d{0,8}", text):
            raise ConfigError(
                f"--cluster={text}: of which GPUs? Did you mean h100:{text}? Known are {', '.join(DEVICES)}"
            )
        known = f"known are {', '.join(DEVICES)}, or file:SPEC.toml for another"
        hint = did_you_mean(kind, DEVICES) if kind else ""
        raise ConfigError(f"--cluster={text}: {kind or 'nothing'} is no kind of GPU{hint or ';'} {known}")
    match = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", rest)
    if match is None:
        raise ConfigError(f"--cluster={text}: wanted KIND:HOSTSxDEVICES, such as {EXAMPLE} for 8 hosts of 8 H100 each")
    return _checked(Cluster(kind, int(match[1]), int(match[2]), DEVICES[kind]), f"--cluster={text}")


def _checked(cluster: Cluster, origin: str) -> Cluster:
    most, devices = cluster.device.nvlink_devices, cluster.devices_per_host
    if devices > most:
        fit = max(n for n in range(1, most + 1) if cluster.num_devices % n == 0)
        raise ConfigError(
            f"{origin}: {devices} devices of one host, but NVLink joins at most {most} {cluster.device.name}; "
            f"as many devices on more hosts: {cluster.num_devices // fit}x{fit}"
        )
    if cluster.num_devices > MOST_DEVICES:
        sizes = f"{cluster.num_hosts} hosts x {devices} = {cluster.num_devices}"
        raise ConfigError(f"{origin}: {sizes} devices; at most {MOST_DEVICES} can be rehearsed")
    return cluster


def _values_of(path: Path) -> dict[str, Any]:
    """What a file says, with what was measured in place of what it leaves open."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return _measured(json.loads(text), path)
        values = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"--cluster=file:{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is no {path.suffix.lstrip('.').upper() or 'TOML'}: {error}") from error
    measured = values.pop("measured", None)
    if measured is None:
        return values
    if not isinstance(measured, str) or not measured.endswith(".json") or path.suffix == ".json":
        raise ConfigError(f"{path}: measured = {measured!r}: must be a file of `sharded-train collectives --json`")
    found = _values_of(path.parent / measured)
    return {**{key: found[key] for key in found if key in _FIELDS}, **values}


def _measured(facts: Any, path: Path) -> dict[str, Any]:
    """Of the result of `sharded-train collectives`: kind and sizes of its cluster, and its links' constants."""
    if not isinstance(facts, dict) or not isinstance(facts.get("device"), dict) or "collectives" not in facts:
        raise ConfigError(f"{path}: is no result of `sharded-train collectives --json`")
    links = {key: value for key, value in facts["device"].items() if key in MEASURED}
    known = {"kind": facts["kind"]} if facts.get("kind") is not None else {}
    return {**known, "hosts": facts.get("hosts"), "devices_per_host": facts.get("devices_per_host"), **links}


def _of_file(path: Path) -> Cluster:
    values = _values_of(path)
    kind = values.pop("kind", None)
    if kind is not None and (not isinstance(kind, str) or kind not in DEVICES):
        hint = did_you_mean(str(kind), DEVICES)
        raise ConfigError(f"{path}: kind = {kind!r}: no kind of GPU{hint or ';'} known are {', '.join(DEVICES)}")
    sizes = {key: values.pop(key, None) for key in ("hosts", "devices_per_host")}
    start = dataclasses.asdict(DEVICES[kind]) if kind else {}
    problems = [f"{key} = {n!r}: must be a whole number of at least 1" for key, n in sizes.items() if not _is_size(n)]
    problems += _problems(values, start)
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    peaks = {**start.get("peaks", {}), **values.get("peaks", {})}
    device = Device(**{**start, **values, "peaks": peaks})
    return _checked(Cluster(str(path), sizes["hosts"] or 0, sizes["devices_per_host"] or 0, device), str(path))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _problems(values: Mapping[str, Any], start: Mapping[str, Any]) -> list[str]:
    """What is wrong with the fields of a device, and which are missing."""
    found = []
    for key, value in values.items():
        if key not in _FIELDS:
            found.append(f"{key}: no such key{did_you_mean(key, [*_FIELDS, 'kind', 'hosts', 'devices_per_host'])}")
        elif key == "peaks":
            found += _peak_problems(value)
        elif wrong := _wrong(key, value):
            found.append(f"{key} = {value!r}: must be {wrong}")
    required = [f.name for f in dataclasses.fields(Device) if f.default is dataclasses.MISSING]
    missing = [key for key in required if key not in {**start, **values}]
    peaks = {**start.get("peaks", {}), **(values["peaks"] if isinstance(values.get("peaks"), dict) else {})}
    missing += [f"peaks.{dtype}" for dtype in _DTYPES if dtype not in peaks and "peaks" not in missing]
    if missing:
        found.append(f"missing: {', '.join(missing)}; or start from a kind: kind = {', '.join(map(repr, DEVICES))}")
    return found


def _peak_problems(peaks: Any) -> list[str]:
    if not isinstance(peaks, dict):
        return [f"peaks = {peaks!r}: must be a table of {', '.join(_DTYPES)} in FLOP/s"]
    found = []
    for key, value in peaks.items():
        if key not in _DTYPES:
            found.append(f"peaks.{key}: no such key{did_you_mean(key, _DTYPES)}")
        elif wrong := _outside(value, *_PEAKS, "FLOP/s"):
            found.append(f"peaks.{key} = {value!r}: must be a number {wrong}")
    return found


def _wrong(key: str, value: Any) -> str | None:
    """What a field must be, if it is not."""
    if key == "compute_capability":
        if not isinstance(value, str) or not re.fullmatch(r"\d{1,2}\.\d", value):
            return 'such as "9.0", in quotes'
        least, most = _CAPABILITIES
        within = least <= tuple(map(int, value.split("."))) <= most
        return None if within else f"from {least[0]}.{least[1]} to {most[0]}.{most[1]}"
    if key == "name":
        return None if isinstance(value, str) and re.fullmatch(r"[\w .:+/()-]+", value) else "a name"
    if key == "reserve_fraction":
        return None if _is_number(value) and 0 <= value < 1 else "at least 0 and below 1"
    whole = _FIELDS[key] == "int"
    wrong = _outside(value if not whole or _is_size(value) else None, *_BOUNDS[key])
    return wrong and f"a {'whole ' if whole else ''}number {wrong}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _outside(value: Any, least: float, most: float, unit: str) -> str | None:
    """The bounds in words, for what is no number within them."""
    if _is_number(value) and least <= value <= most:
        return None
    words = [f"{bound:,}" if isinstance(bound, int) else f"{bound:g}" for bound in (least, most)]
    return f"from {words[0]} to {words[1]} {unit}"

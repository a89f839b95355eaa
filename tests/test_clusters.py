"""Clusters that are not there: what names and files mean, what is refused, and that XLA reads every target."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from sharded_train import compat, launch
from sharded_train.devices import DEVICES, PEAKS
from sharded_train.errors import ConfigError
from sharded_train.rehearse.clusters import parse

FILE = """
kind = "h100"
hosts = 16
devices_per_host = 4
network_bandwidth = 12.5e9
[peaks]
bf16 = 8e14
"""


def refused(text: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        parse(text)
    return raised.value.problems


def test_a_kind_and_sizes() -> None:
    cluster = parse("h100:8x4")
    assert (cluster.num_hosts, cluster.devices_per_host, cluster.num_devices) == (8, 4, 32)
    assert cluster.words == "32 × NVIDIA H100 80GB HBM3: 8 hosts of 4"
    assert cluster.device is DEVICES["h100"]
    assert parse("gb200:1x72").words == "72 × NVIDIA GB200: one host of 72"
    assert parse("h100:8x4").remarks == parse("gb200:1x4").remarks == parse("gb200:2x72").remarks == []
    assert "a whole rack is gb200:1x72" in parse("gb200:18x4").remarks[0]


@pytest.mark.parametrize("kind", DEVICES)
def test_numbers_are_in_the_order_that_hardware_has(kind: str) -> None:
    device = DEVICES[kind]
    peaks = device.peaks
    assert peaks["fp32"] < peaks["tf32"] < peaks["bf16"] == peaks["fp16"] <= peaks["fp8"]
    assert device.network_bandwidth < device.nvlink_bandwidth < device.memory_bandwidth
    assert 0 < device.nvlink_latency < device.network_latency < 1e-4
    assert 0.05 * device.memory < device.reserve < 0.1 * device.memory
    assert device.name.partition("-")[0].split()[1] in PEAKS  # the same peak in training's MFU
    assert PEAKS[device.name.partition("-")[0].split()[1]] == peaks["bf16"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h10:8x8", "h10 is no kind of GPU; did you mean h100? known are h100, h200, a100, b200, gb200, or file:"),
        ("tpu:8x8", "tpu is no kind of GPU; known are"),
        ("", "known are"),
        ("h100", "wanted KIND:HOSTSxDEVICES, such as h100:8x8"),
        ("h100:8", "wanted KIND:HOSTSxDEVICES"),
        ("h100:0x8", "wanted KIND:HOSTSxDEVICES"),
        ("h100:8x8x8", "wanted KIND:HOSTSxDEVICES"),
        ("h100:1x16", "NVLink joins at most 8 NVIDIA H100 80GB HBM3; as many devices on more hosts: 2x8"),
        ("h100:1x14", "as many devices on more hosts: 2x7"),
        ("h100:100000x8", "100000 hosts x 8 = 800000 devices; at most"),
        ("file:no_such.toml", "no_such.toml: cannot be read: No such file"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    (problem,) = refused(text)
    assert words in problem


def test_a_file_that_starts_from_a_kind(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(FILE)
    cluster = parse(f"file:{path}")
    assert (cluster.kind, cluster.num_hosts, cluster.devices_per_host) == (str(path), 16, 4)
    assert cluster.device.network_bandwidth == 12.5e9
    assert cluster.device.peaks == {**DEVICES["h100"].peaks, "bf16": 8e14}
    assert cluster.device.memory == DEVICES["h100"].memory


def test_everything_wrong_in_a_file_is_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(
        'kind = "h100"\nhosts = 0\nmemry = 5\nmemory = -1\nnetwork_bandwidth = "fast"\nreserve_fraction = 1.5\n'
        'compute_capability = 9.0\nname = "a\\"b"\n[peaks]\nbf61 = 1.0\nfp8 = 0\n'
    )
    problems = refused(f"file:{path}")
    assert all(problem.startswith(f"{path}: ") for problem in problems)
    said = "\n".join(problems)
    for words in (
        "hosts = 0: must be a whole number of at least 1",
        "devices_per_host = None",
        "memry: no such key; did you mean memory?",
        "memory = -1: must be a whole number",
        "network_bandwidth = 'fast': must be a number from 1e+06 to 1e+15 bytes per second",
        "reserve_fraction = 1.5: must be at least 0 and below 1",
        'compute_capability = 9.0: must be such as "9.0", in quotes',
        "name = 'a\"b': must be a name",
        "peaks.bf61: no such key; did you mean bf16?",
        "peaks.fp8 = 0: must be a number from 1e+09 to 1e+18 FLOP/s",
    ):
        assert words in said
    assert len(problems) == 10


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("memory = 1", "memory = 1: must be a whole number from 1,048,576 to 17,592,186,044,416 bytes"),
        ("memory = 99999999999999999999999", "memory = "),
        ("memory = 8e10", "memory = 80000000000.0: must be a whole number"),
        ("core_count = 99999999999", "core_count = 99999999999: must be a whole number from 1 to 10,000"),
        ("core_count = true", "core_count = True: must be a whole number"),
        ("network_bandwidth = 1e-300", "network_bandwidth = 1e-300: must be a number from 1e+06"),
        ("memory_bandwidth = nan", "memory_bandwidth = nan: must be a number"),
        ("nvlink_bandwidth = inf", "nvlink_bandwidth = inf: must be a number"),
        ("peaks.bf16 = 1e-300", "peaks.bf16 = 1e-300: must be a number from 1e+09"),
        ("nvlink_latency = 1e9", "nvlink_latency = 1000000000.0: must be a number"),
        ('compute_capability = "99.9"', "compute_capability = '99.9': must be from 8.0 to 12.1"),
        ('compute_capability = "2.0"', "compute_capability = '2.0': must be from 8.0 to 12.1"),
    ],
)
def test_numbers_out_of_any_sensible_range_are_refused(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(f'kind = "h100"\nhosts = 1\ndevices_per_host = 2\n{line}\n')
    (problem,) = refused(f"file:{path}")
    assert words in problem


@pytest.mark.parametrize("kind", DEVICES)
def test_every_known_kind_is_within_the_bounds_of_a_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "spec.toml"
    device = dataclasses.asdict(DEVICES[kind])
    peaks = "".join(f"peaks.{dtype} = {peak!r}\n" for dtype, peak in device.pop("peaks").items())
    fields = "".join(f"{key} = {json.dumps(value)}\n" for key, value in device.items())
    path.write_text(f"hosts = 1\ndevices_per_host = 2\n{fields}{peaks}")
    assert parse(f"file:{path}").device == DEVICES[kind]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hosts = ", "is no TOML"),
        ('kind = ["h100"]\nhosts = 1\ndevices_per_host = 1', "kind = ['h100']: no kind of GPU; did you mean h100?"),
        ("kind = 3\nhosts = 1\ndevices_per_host = 1", "kind = 3: no kind of GPU; known are"),
        ('kind = "h10"\nhosts = 1\ndevices_per_host = 1', "kind = 'h10': no kind of GPU; did you mean h100?"),
        (
            "hosts = 1\ndevices_per_host = 1\nmemory = 5_000_000",
            "missing: name, memory_bandwidth, peaks, nvlink_bandwidth",
        ),
        ('kind = "h100"\nhosts = 1\ndevices_per_host = 16', "NVLink joins at most 8"),
    ],
)
def test_files_that_cannot_be(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(text)
    (problem,) = refused(f"file:{path}")
    assert words in problem


@pytest.mark.skipif(not launch.has_plugin(), reason="JAX's CUDA plugin is not installed: make setup-rehearse")
@pytest.mark.parametrize("kind", DEVICES)
def test_xla_makes_devices_of_every_kind(kind: str) -> None:
    devices = compat.compile_only_devices(parse(f"{kind}:3x2").target, 3, 2)
    assert [device.process_index for device in devices] == [0, 0, 1, 1, 2, 2]
    assert {device.device_kind for device in devices} == {DEVICES[kind].name}

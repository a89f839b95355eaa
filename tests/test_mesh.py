"""The mesh: sizes, which device stands where, what a host is, tensor within hosts, links."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from sharded_train.errors import ConfigError
from sharded_train.links import host_of, hosts_of, links
from sharded_train.mesh import AXES, MeshConfig, build_mesh, layout, resolve_sizes, stand_ins

NESTED = AXES  # the default order: pipeline outermost, tensor innermost


@dataclasses.dataclass(frozen=True)
class Bare:
    """A device that knows nothing of slices, like a CPU's."""

    id: int
    process_index: int


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A CUDA device of one of several processes: slice_index is its NVLink fabric, or its machine."""

    id: int
    process_index: int
    slice_index: int


def per_gpu_process(num_hosts: int, per_host: int) -> list[Gpu]:
    return [Gpu(i, i, i // per_host) for i in range(num_hosts * per_host)]


def sized(sizes: dict[str, Any]) -> MeshConfig:
    return MeshConfig(**sizes)


def size_problems(config: MeshConfig, num_devices: int) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve_sizes(config, num_devices)
    return caught.value.problems


def problem_of(config: MeshConfig, devices: list[Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        layout(config, devices)
    (problem,) = caught.value.problems
    return problem


# Sizes


@pytest.mark.parametrize("num_devices", [1, 2, 6, 8, 64])
def test_minus_one_takes_what_remains_on_any_axis(num_devices: int) -> None:
    for axis, tensor in itertools.product(AXES, [d for d in range(1, num_devices + 1) if num_devices % d == 0]):
        other = "data" if axis == "tensor" else "tensor"
        sizes = resolve_sizes(sized({"data": 1, axis: -1, other: tensor}), num_devices)
        assert sizes[axis] == num_devices // tensor
        assert math.prod(sizes.values()) == num_devices


def test_sizes_come_in_the_order_of_the_mesh() -> None:
    order = ("tensor", "sequence", "data", "pipeline")
    assert tuple(resolve_sizes(MeshConfig(order=order), 8)) == order


@pytest.mark.parametrize(
    ("sizes", "num_devices", "operands", "fixes"),
    [
        ({"data": 3, "tensor": 4}, 8, ["data 3", "tensor 4", "= 12", "8"], ["mesh.data = 2"]),
        ({"data": 4, "tensor": 4}, 8, ["= 16", "8"], ["mesh.data = 2", "mesh.tensor = 2"]),
        ({"data": 2, "tensor": 1}, 8, ["= 2,", "8"], ["mesh.data = 8"]),
        ({"data": -1, "tensor": 3}, 8, ["mesh.data = -1", "tensor 3", "8"], ["mesh.tensor = 4", "mesh.tensor = 2"]),
        ({"data": -1, "tensor": 16}, 8, ["mesh.data = -1", "tensor 16", "0.5"], ["mesh.tensor = 8"]),
        ({"data": 3, "tensor": 3}, 8, ["= 9"], ["mesh.data = 2 with mesh.tensor = 4"]),
    ],
)
def test_sizes_that_do_not_multiply_to_the_devices(
    sizes: dict[str, int], num_devices: int, operands: list[str], fixes: list[str]
) -> None:
    (problem,) = size_problems(sized(sizes), num_devices)
    assert all(text in problem for text in [*operands, *fixes])


def test_every_offered_fix_works() -> None:
    rng = random.Random(0)
    for _ in range(200):
        sizes = {axis: rng.choice([-1, 1, 2, 3, 4, 6, 8]) if axis == "data" else rng.randint(1, 6) for axis in AXES}
        num_devices = rng.choice([1, 2, 7, 8, 12, 16, 24, 64])
        try:
            resolve_sizes(sized(sizes), num_devices)
        except ConfigError as error:
            fixes = str(error).split("nearest that works: ")[1].split(" or ")
            assert fixes
            for fix in fixes:
                changed = {axis: int(n) for axis, n in re.findall(r"mesh\.(\w+) = (\d+)", fix)}
                resolve_sizes(sized({**sizes, **changed}), num_devices)
        else:
            assert -1 in sizes.values() or math.prod(sizes.values()) == num_devices


def test_all_violations_are_listed_at_once() -> None:
    config = MeshConfig(data=-1, tensor=-1, pipeline=0, order=("pipeline", "data", "sequnce", "data"))
    listed = size_problems(config, 8)
    assert len(listed) == 3
    assert "mesh.pipeline = 0" in listed[0]
    assert "mesh.data = -1 and mesh.tensor = -1" in listed[1]
    for fault in ("sequence is missing", "tensor is missing", "data stands 2 times", "did you mean 'sequence'?"):
        assert fault in listed[2]


# What a host is


def test_one_process_a_host() -> None:
    devices = [Gpu(i, i // 8, i // 8) for i in range(16)]
    assert [host_of(d) for d in devices] == [i // 8 for i in range(16)]


def test_one_process_a_gpu_on_several_hosts_and_on_one() -> None:
    assert [host_of(d) for d in per_gpu_process(2, 4)] == [0] * 4 + [1] * 4
    assert {host_of(d) for d in per_gpu_process(1, 8)} == {0}


def test_a_rack_of_several_machines_is_one_host() -> None:
    rack = [Gpu(i, i // 4, i // 72) for i in range(144)]  # 36 machines of 4 GPUs, NVLink over 18 of them
    array = layout(MeshConfig(tensor=72), rack)
    assert links(array, NESTED)["tensor"].kind == "host"
    assert len(set(hosts_of(array).flat)) == 2


def test_cpu_processes_are_hosts_even_on_one_machine() -> None:
    assert [host_of(Bare(2048 * p + i, p)) for p in range(2) for i in range(2)] == [0, 0, 1, 1]
    devices = [SimpleNamespace(id=i, process_index=i // 2, slice_index=0, platform="cpu") for i in range(4)]
    assert [host_of(d) for d in devices] == [0, 0, 1, 1]


TWO_PROCESSES = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from sharded_train.links import hosts_of, links
from sharded_train.mesh import MeshConfig, build_mesh
mesh = build_mesh(MeshConfig(tensor=4))
print(hosts_of(mesh.devices).ravel().tolist(), links(mesh.devices, mesh.axis_names)["data"].kind)
try:
    build_mesh(MeshConfig(tensor=8))
except ValueError as error:
    print(error)
"""


def test_two_real_processes_are_two_hosts() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    root = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", TWO_PROCESSES, address]
    processes = [
        subprocess.Popen([*command, str(i)], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for out, err in outputs:
        assert out.startswith("[0, 0, 0, 0, 1, 1, 1, 1] network\n"), err
        assert "lies across hosts (4 on host 0, 4 on host 1)" in out


def test_compile_only_devices_say_slice_0_and_are_told_by_process() -> None:
    client = SimpleNamespace(runtime_type="compile_only_runtime")
    devices = [SimpleNamespace(id=i, process_index=i // 8, slice_index=0, client=client) for i in range(16)]
    assert [host_of(d) for d in devices] == [i // 8 for i in range(16)]
    assert "host 1" in problem_of(MeshConfig(tensor=16), devices)


# Which device stands where


@pytest.mark.parametrize("make", [lambda: stand_ins("4x8"), lambda: per_gpu_process(4, 8)])
def test_the_layout_does_not_depend_on_ids_or_on_the_order_of_processes_in_the_list(make: Any) -> None:
    devices = make()
    config = MeshConfig(pipeline=2, tensor=4)
    straight = layout(config, devices)
    by_process = [list(group) for _, group in itertools.groupby(devices, key=lambda d: d.process_index)]
    random.Random(1).shuffle(by_process)
    renamed = {d: dataclasses.replace(d, id=5000 - 7 * d.id) for d in devices}
    shuffled = layout(config, [renamed[d] for group in by_process for d in group])
    assert [renamed[d] for d in straight.flat] == list(shuffled.flat)


def test_interleaved_processes_of_one_host_come_together() -> None:
    devices = [Gpu(i, i, i % 2) for i in range(8)]  # processes 0, 2, 4, 6 on one host, 1, 3, 5, 7 on the other
    array = layout(MeshConfig(tensor=4), devices)
    assert [d.process_index for d in array.flat] == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize("order", list(itertools.permutations(AXES)))
def test_the_array_has_the_sizes_in_the_order_asked_for(order: tuple[str, ...]) -> None:
    config = MeshConfig(data=2, tensor=2, pipeline=2, sequence=2, order=order, allow_tensor_across_hosts=True)
    array = layout(config, stand_ins("4x4"))
    assert array.shape == (2, 2, 2, 2)
    assert len({d.id for d in array.flat}) == 16
    assert list(links(array, order).values())[-1].kind == "host"  # the innermost axis has the nearest devices


# Tensor within hosts


@pytest.mark.parametrize("cluster", ["1x8", "2x8", "3x6", "8x8", "4x72", "5x1"])
def test_tensor_is_refused_exactly_when_a_group_leaves_its_host(cluster: str) -> None:
    devices = stand_ins(cluster)
    for tensor in (d for d in range(1, len(devices) + 1) if len(devices) % d == 0):
        config = MeshConfig(tensor=tensor)
        anyway = layout(dataclasses.replace(config, allow_tensor_across_hosts=True), devices)
        if links(anyway, NESTED)["tensor"].hosts == 1:
            assert np.array_equal(layout(config, devices), anyway)
        else:
            assert f"mesh.tensor = {tensor}" in problem_of(config, devices)


def test_hosts_of_six_with_tensor_four() -> None:
    problem = problem_of(MeshConfig(tensor=4), stand_ins("2x6"))
    assert "tensor group at data 1" in problem  # data 0 is whole on host 0
    assert "2 on host 0, 2 on host 1" in problem
    assert "tensor = 1, 2, 3, 6 " in problem
    assert "mesh.allow_tensor_across_hosts" in problem


def test_hosts_with_unequal_numbers_of_devices() -> None:
    devices = [Bare(i, process) for i, process in enumerate([0] * 8 + [1] * 6 + [2] * 2)]
    assert layout(MeshConfig(tensor=2), devices).shape == (1, 8, 1, 2)
    problem = problem_of(MeshConfig(tensor=4), devices)
    assert "tensor group at data 3 " in problem
    assert "2 on host 1, 2 on host 2" in problem
    assert "tensor = 1, 2 " in problem


def test_an_order_that_puts_data_innermost_is_caught_and_mended() -> None:
    order = ("pipeline", "tensor", "sequence", "data")
    problem = problem_of(MeshConfig(tensor=8, order=order), stand_ins("4x8"))
    mended = ("pipeline", "sequence", "data", "tensor")
    assert str(mended) in problem
    assert layout(MeshConfig(tensor=8, order=mended), stand_ins("4x8")).shape == (1, 1, 4, 8)


def test_the_sizes_offered_for_tensor_fit() -> None:
    for cluster, tensor in [("2x6", 4), ("2x8", 16), ("6x4", 8), ("3x5", 3)]:
        problem = problem_of(MeshConfig(tensor=tensor), stand_ins(cluster))
        offered = re.search(r"tensor = ([\d, ]+) \(with", problem)
        assert offered
        for size in offered[1].split(", "):
            layout(MeshConfig(tensor=int(size)), stand_ins(cluster))


# Links


def test_which_axis_rides_which_link() -> None:
    array = layout(MeshConfig(pipeline=2, tensor=4), stand_ins("4x8"))
    got = links(array, NESTED)
    assert got["sequence"].kind == "nothing"
    assert (got["tensor"].kind, got["tensor"].hosts) == ("host", 1)
    assert (got["data"].kind, got["data"].hosts, got["data"].per_host) == ("both", 2, 2)
    assert (got["pipeline"].kind, got["pipeline"].hosts, got["pipeline"].per_host) == ("network", 2, 1)
    assert "NVLink: 4 devices" in got["tensor"].words()
    assert "shared memory: 4 devices" in got["tensor"].words("cpu")
    assert "2 hosts, at most 2 on one" in got["data"].words()
    assert "network" in got["pipeline"].words()
    assert "NVLink" not in got["pipeline"].words()


def test_an_axis_with_some_groups_across_hosts_is_both() -> None:
    array = layout(MeshConfig(tensor=4, allow_tensor_across_hosts=True), stand_ins("2x6"))
    assert (links(array, NESTED)["tensor"].kind, links(array, NESTED)["tensor"].hosts) == ("both", 2)


# Real devices, and clusters that are not there


def test_a_mesh_of_real_devices_has_auto_axes_and_their_order() -> None:
    mesh = build_mesh(MeshConfig(data=-1, tensor=2), jax.devices())
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {"pipeline": 1, "data": jax.device_count() // 2, "sequence": 1, "tensor": 2}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert list(mesh.devices.flat) == jax.devices()
    assert build_mesh(MeshConfig(tensor=2)) == mesh
    assert links(mesh.devices, mesh.axis_names)["tensor"].kind == "host"


def test_stand_ins() -> None:
    devices = stand_ins("3x4")
    assert [d.process_index for d in devices] == [0] * 4 + [1] * 4 + [2] * 4
    assert stand_ins("h100:3x4") == devices
    for cluster in ("8", ":3x4", "h100:", "h100:8", "a:b:3x4", "0x8", "8x", "8x8x8", "eight"):
        with pytest.raises(ConfigError, match="HOSTSxDEVICES"):
            stand_ins(cluster)

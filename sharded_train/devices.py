"""The GPUs that are known here: what one of them holds, computes and sends, with sources. The one table of its kind.

All numbers are one device's; rates are per second and of one direction. They are what a device or a link could carry
at most, not what NCCL or a kernel reaches.

Sources:
- Memory and its bandwidth, cores, clock, caches, registers: as the driver reports them, in the device descriptions
  that XLA keeps for compiling without a GPU (they stand as text within jax-cuda12-plugin 0.12.0.1).
- Peaks, dense (data sheets print twice that for 2:4 sparsity), and NVLink (data sheets give both directions together):
  NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM, HGX B200 and GB200 NVL72 (a rack's numbers over its 72
  GPUs). A100 has no FP8: XLA multiplies in bf16 there.
- Network: one NIC a GPU as in NVIDIA's own machines: DGX A100 ConnectX-6 200 Gb/s, DGX H100, H200, B200 and GB200
  NVL72 ConnectX-7 400 Gb/s. Clouds differ: say what yours has with a file, see `rehearse.clusters`.
- Latencies: what a collective takes however small. The model by which NCCL chooses its algorithms (src/graph/tuning.cc
  of NVIDIA/nccl, its fastest protocol) has 6.6 us for the start and 0.6 us a hop over NVLink, 2.7 us over the
  network; here stands the start with one hop, which no algorithm is below.
- Reserve: of an 80 GB H100 about 0.6 GiB go to the CUDA context and kernels, NCCL's buffers take some 10 MiB for each
  channel of each communicator (1 to 4 GiB for three or four axes), and XLA's allocator loses some to fragmentation.
  8 % is taken for all of it. An estimate: not measured on several GPUs yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

MICROSECOND = 1e-6
RESERVE_FRACTION = 0.08  # of the memory


@dataclasses.dataclass(frozen=True)
class Device:
    """One GPU of a cluster. Bytes, bytes per second, FLOP/s and seconds, without prefixes."""

    name: str  # what CUDA calls it
    memory: int
    memory_bandwidth: float
    peaks: Mapping[str, float]  # of "fp8", "bf16", "fp16", "tf32", "fp32" (matrix products; fp32: outside tensor cores)
    nvlink_bandwidth: float
    network_bandwidth: float
    nvlink_devices: int  # that one NVLink domain joins at most
    # What the compiler wants to know:
    compute_capability: str
    core_count: int
    fpus_per_core: int
    clock_ghz: float
    l2_cache: int
    shared_memory_per_core: int
    shared_memory_per_block: int  # at most, when a kernel asks for it
    nvlink_latency: float = 7.2 * MICROSECOND
    network_latency: float = 9.3 * MICROSECOND
    reserve_fraction: float = RESERVE_FRACTION

    @property
    def reserve(self) -> int:
        """Bytes left to the CUDA context, NCCL and fragmentation."""
        return int(self.reserve_fraction * self.memory)


_HOPPER = Device(
    name="NVIDIA H100 80GB HBM3",
    memory=84_942_979_072,
    memory_bandwidth=3352e9,
    peaks={"fp8": 1979e12, "bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "fp32": 67e12},
    nvlink_bandwidth=450e9,  # 18 links of 25 GB/s
    network_bandwidth=50e9,
    nvlink_devices=8,
    compute_capability="9.0",
    core_count=132,
    fpus_per_core=128,
    clock_ghz=1.98,
    l2_cache=52_428_800,
    shared_memory_per_core=233_472,
    shared_memory_per_block=232_448,
)
_BLACKWELL = dataclasses.replace(
    _HOPPER,
    name="NVIDIA B200",
    memory=191_514_411_008,
    memory_bandwidth=7672e9,
    peaks={"fp8": 4500e12, "bf16": 2250e12, "fp16": 2250e12, "tf32": 1100e12, "fp32": 75e12},
    nvlink_bandwidth=900e9,  # 18 links of 50 GB/s
    compute_capability="10.0",
    core_count=148,
    clock_ghz=1.965,
    l2_cache=132_644_864,
)
DEVICES = {
    "h100": _HOPPER,
    "h200": dataclasses.replace(
        _HOPPER,
        name="NVIDIA H200",
        memory=151_397_597_184,
        memory_bandwidth=4800e9,
    ),
    "a100": Device(
        name="NVIDIA A100-SXM4-80GB",
        memory=85_100_068_864,
        memory_bandwidth=2039e9,
        peaks={"fp8": 312e12, "bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
        nvlink_bandwidth=300e9,  # 12 links of 25 GB/s
        network_bandwidth=25e9,
        nvlink_devices=8,
        compute_capability="8.0",
        core_count=108,
        fpus_per_core=64,
        clock_ghz=1.41,
        l2_cache=41_943_040,
        shared_memory_per_core=167_936,
        shared_memory_per_block=166_912,
    ),
    "b200": _BLACKWELL,
    "gb200": dataclasses.replace(
        _BLACKWELL,
        name="NVIDIA GB200",
        memory=197_897_748_480,
        memory_bandwidth=7928e9,
        peaks={"fp8": 5000e12, "bf16": 2500e12, "fp16": 2500e12, "tf32": 1250e12, "fp32": 80e12},
        nvlink_devices=72,
        core_count=152,
        clock_ghz=2.062,
        l2_cache=135_528_448,
    ),
}

# Peak dense bf16 FLOP/s by what JAX calls the device, the first that fits: those above, and others that one may train
# on. The V100 has no bf16, its number is fp16's.
PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": DEVICES["h100"].peaks["bf16"],
    "GH200": DEVICES["h200"].peaks["bf16"],
    "H200": DEVICES["h200"].peaks["bf16"],
    "GB200": DEVICES["gb200"].peaks["bf16"],
    "B200": DEVICES["b200"].peaks["bf16"],
    "A100": DEVICES["a100"].peaks["bf16"],
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
}


def kind_of(device_kind: str) -> str | None:
    """The key of `DEVICES` for what JAX calls a device, such as "h100" for "NVIDIA H100 80GB HBM3"; None if unknown."""
    return next((kind for kind, device in DEVICES.items() if device.name == device_kind), None)

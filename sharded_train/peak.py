"""What a device could do at most: the number that MFU divides by."""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp

from sharded_train.devices import PEAKS


@dataclasses.dataclass(frozen=True)
class Peak:
    """What a device could do at most, in FLOP/s, and in words where that number comes from."""

    per_device: float
    words: str


def peak_of(device: jax.Device, dtype: jnp.dtype) -> Peak:
    """Of the table, or measured with a product in `dtype` where the table says nothing, as on CPUs."""
    for name, peak in PEAKS.items():
        if name in device.device_kind:
            return Peak(peak, f"{_flops(peak)} a device, the data sheet's dense bf16 for {device.device_kind}")
    if device.platform != "cpu":
        peak = _measured(device, dtype, size=4096)
        return Peak(peak, f"{_flops(peak)} a device, measured here with a {dtype.name} product")
    peak = _measured(device, dtype, size=1024)
    sharing = jax.local_device_count()
    words = f"{_flops(peak)}, measured here with a {dtype.name} product on all cores"
    return Peak(peak / sharing, words if sharing == 1 else f"{words}, shared by {sharing} devices")


def _measured(device: jax.Device, dtype: jnp.dtype, size: int, at_least: float = 0.1) -> float:
    """FLOP/s of the fastest square matrix product, summed in fp32, of those within so many seconds."""
    a = jax.device_put(jnp.ones((size, size), dtype), device)
    product = jax.jit(lambda a: jax.lax.dot(a, a, preferred_element_type=jnp.float32)).lower(a).compile()
    product(a).block_until_ready()  # not counted: it may wait for what the device was given before
    times: list[float] = []
    while len(times) < 5 or sum(times) < at_least:
        start = time.perf_counter()
        product(a).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def _flops(flops: float) -> str:
    return f"{flops / 1e12:,.0f} TFLOP/s" if flops >= 1e13 else f"{flops / 1e9:,.0f} GFLOP/s"

"""The least that one instruction takes: a roofline of the device, and of the link for a collective.

A kernel takes max(FLOPs / peak of their format, bytes read and written / memory bandwidth), both at 100 % of what the
data sheet says, and nothing for its launch. A collective takes the latency of its link and the bytes that each device
sends over the link's bandwidth, as a ring or a tree sends them; sums within the switch (NVLink SHARP) could be faster.
Of a group that has `per_host` devices on each of several hosts, the traffic between hosts shares the NICs of those.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol

from sharded_train.devices import Device
from sharded_train.rehearse.hlo import Computation, Instruction, Module
from sharded_train.rehearse.products import Product, format_of, work_of
from sharded_train.rehearse.traffic import traffic_of

Kind = Literal["products", "attention", "other"]
LANES = ("NVLink", "network")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of one execution of a kernel, what it is, and what bounds it."""

    seconds: float
    kind: Kind
    bound: Literal["FLOPs", "memory"]
    flops: int
    bytes: int


class Sent(Protocol):
    """What must be known of a collective; `wires.Collective` is one."""

    @property
    def op(self) -> str: ...
    @property
    def link(self) -> str: ...
    @property
    def group_size(self) -> int: ...
    @property
    def per_host(self) -> int: ...
    @property
    def payload_bytes(self) -> int: ...
    @property
    def wire_bytes(self) -> float: ...


def cost_of(module: Module, computation: Computation, instruction: Instruction, device: Device) -> Cost:
    """The least that one execution takes, with what a fusion holds; loops and branches cost what they hold."""
    work = work_of(module, computation, instruction)
    moved = traffic_of(module, computation, instruction).total
    by_format = sum(product.flops / peak_of(product, device) for product in work.products)
    by_flops = max(by_format, work.other_flops / device.peaks["fp32"])  # tensor cores and the others work side by side
    by_memory = moved / device.memory_bandwidth
    return Cost(
        seconds=max(by_flops, by_memory),
        kind=_kind(work.products),
        bound="FLOPs" if by_flops > by_memory else "memory",
        flops=sum(product.flops for product in work.products) + work.other_flops,
        bytes=moved,
    )


def peak_of(product: Product, device: Device) -> float:
    """FLOP/s of the format that a product is done in; that of a format not in the table is bounded by the fastest."""
    return device.peaks.get(format_of(product.dtype, product.precision).lower(), max(device.peaks.values()))


def seconds_on_links(collective: Sent, device: Device) -> dict[str, float]:
    """Seconds that one run of a collective occupies each link; it takes as long as the longest."""
    link, sent = collective.link, collective.wire_bytes
    inside = sent / device.nvlink_bandwidth + device.nvlink_latency
    if link == "none" or collective.group_size == 1:
        return {}
    if link == "NVLink":
        return {"NVLink": inside}
    if link == "network":
        return {"network": sent / device.network_bandwidth + device.network_latency}
    assert link == "both", link
    if collective.op in ("all-to-all", "ragged-all-to-all"):
        share = collective.payload_bytes / collective.group_size  # goes from each device to each other
        inside = share * (collective.per_host - 1) / device.nvlink_bandwidth + device.nvlink_latency
        across = share * (collective.group_size - collective.per_host)
    else:
        across = sent / (1 if collective.op == "collective-permute" else collective.per_host)
    return {"NVLink": inside, "network": across / device.network_bandwidth + device.network_latency}


def _kind(products: tuple[Product, ...]) -> Kind:
    if not products:
        return "other"
    return "attention" if any(product.attention for product in products) else "products"

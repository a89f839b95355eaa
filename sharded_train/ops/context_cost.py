"""What attention sends over the sequence axis by each strategy, and which is taken where none is asked for."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from sharded_train.links import Link
from sharded_train.ops.attention import Windows

Strategy = Literal["all_gather", "ring", "ulysses"]
# FLOPs of attention in the time of a byte between hosts: 400 TFLOP/s, and 50 GB/s for each GPU (docs/context.md).
FLOPS_A_NETWORK_BYTE = 8000
MIB = 2**20


class Shape(NamedTuple):
    """A row's attention in one layer, on a device's heads."""

    size: int  # devices that the row is split over
    seq: int  # tokens of the whole row
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int  # bytes of a number


def wire_bytes(strategy: Strategy, of: Shape, window: int | None = None) -> tuple[int, int]:
    """Bytes that each device sends for a row in the forward and in the backward pass.

    A gather's or reduce-scatter's are those of the ring algorithm. Gradients of keys and values travel in fp32. What
    tells documents apart is left out: a number a chunk, with a window or ulysses 4 bytes a token.
    """
    if strategy == "ulysses":
        heads = of.heads + kv_copies(of.kv_heads, of.size) * of.kv_heads
        tokens = of.seq // of.size
        exchanged = 2 * tokens * of.head_dim * heads * of.itemsize * (of.size - 1) // of.size
        return exchanged, exchanged
    tokens = (of.size - 1) * (of.seq // of.size) if window is None else 2 * (window - 1)
    numbers = 2 * tokens * of.kv_heads * of.head_dim
    return numbers * of.itemsize, numbers * (of.itemsize + 4)


def cheapest(of: Shape, windows: Windows, link: Link) -> tuple[Strategy, str]:
    """The strategy to take over a link, and why in words.

    Inside a host it is what sends the fewest bytes. Across hosts it is what sends the fewest that nothing hides: a hop
    of the ring hides behind a block of attention when a device has tokens enough. The ring wins a draw.
    """
    sent = {s: sum(sum(wire_bytes(s, of, w)) for w in windows) / len(windows) for s in ("ring", "ulysses")}
    words = {s: f"{s} sends {bytes_ / MIB:.4g} MiB a row and layer" for s, bytes_ in sent.items()}
    where = "inside a host" if link.kind == "host" else f"across {link.hosts} hosts"
    if of.heads % of.size:
        return "ring", f"{words['ring']} {where}; ulysses would need {of.heads} heads to split over {of.size} devices"
    tokens, enough = of.seq // of.size, math.ceil(FLOPS_A_NETWORK_BYTE * of.itemsize * of.kv_heads / of.heads)
    hides = link.kind != "host" and tokens >= enough and None in windows
    shown = dict(sent)
    if hides:
        shown["ring"] = sum(sum(wire_bytes("ring", of, w)) for w in windows if w is not None) / len(windows)
    taken: Strategy = "ulysses" if shown["ulysses"] < shown["ring"] else "ring"
    other: Strategy = "ring" if taken == "ulysses" else "ulysses"
    why = f"{words[taken]}, {words[other]}, {where}"
    if hides:
        why += (
            f"; there the ring's hops hide behind its blocks of {tokens:,} tokens ({enough:,} are enough), ulysses' "
            "exchange behind nothing"
        )
    return taken, why


def kv_copies(kv_heads: int, size: int) -> int:
    """How often ulysses repeats each kv head so that `size` devices have the same number."""
    return math.lcm(kv_heads, size) // kv_heads

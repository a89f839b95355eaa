"""Which process is late. In a step all wait for the slowest, so only what each does by itself can tell.

Two times are compared over the processes: how long the host was busy in a step, that is, not waiting for its devices (a
slow disk, a loaded machine, swapping); and how long the devices take for a piece of work of their own (a chip that is
hot or shared).
"""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp

from sharded_train.faults.group import Group

_FACTOR = 1.5  # of the median is late,
_SHARE = 0.05  # if it is so much of a step more than the median
_SIZE = 512  # of the square matrices of the probe


class Lateness:
    """Of this process; all call `told` at the same step."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._waited = 0.0
        self._since, self._at = clock(), 0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """What is done inside is to wait for the devices, and so for the other processes."""
        begin = self._clock()
        yield
        self._waited += self._clock() - begin

    def restart(self, step: int) -> None:
        """Counts from `step` on."""
        self._since, self._at, self._waited = self._clock(), step, 0.0

    def told(self, group: Group, step: int) -> list[str]:
        """Who was late since the last call, in words. The devices must have nothing to do."""
        now, steps = self._clock(), max(1, step - self._at)
        seconds = now - self._since
        mine = [socket.gethostname(), max(0.0, seconds - self._waited) / steps, probe(), seconds / steps]
        told = [json.loads(text) for text in group.gather(json.dumps(mine))]
        self.restart(step)
        hosts, busy, probes, whole = zip(*told, strict=True)
        step_seconds = statistics.median(whole)
        return [
            *_late(hosts, busy, step_seconds, "its host is busy {:.3g} s a step, others {:.3g}"),
            *_late(hosts, probes, 0.0, "its devices take {:.3g} s for a piece of work that takes others {:.3g}"),
        ]


def _late(hosts: Sequence[str], seconds: Sequence[float], step_seconds: float, words: str) -> list[str]:
    found = []
    for process, (host, mine) in enumerate(zip(hosts, seconds, strict=True)):
        # Of two, the other one is the measure.
        others = statistics.median([other for i, other in enumerate(seconds) if i != process])
        if mine > _FACTOR * others and mine - others > max(_SHARE * step_seconds, 0.005):
            found.append(f"process {process} on {host} is late: {words.format(mine, others)}")
    return found


def probe() -> float:
    """Seconds that the slowest of this process's devices takes for a product of its own; the best of three."""
    product = _product()
    inputs = [jax.device_put(jnp.ones((_SIZE, _SIZE), jnp.float32), device) for device in jax.local_devices()]
    jax.block_until_ready([product(x) for x in inputs])  # compiles
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        jax.block_until_ready([product(x) for x in inputs])
        best = min(best, time.perf_counter() - begin)
    return best


@functools.cache
def _product() -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: (x @ x).sum())

"""Between the processes of a run: does each reach each, are their clocks together, does a collective come through.

Addresses are told through JAX's coordination service, which every process has reached or it would not be here. Each
then listens at a port of its own, and is asked for the time by all others; nothing here waits without end.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from sharded_train.doctor.finding import Finding, judged

WAIT = 20.0  # seconds for the others to say where they are
CONNECT = 5.0  # seconds for one of them to answer
SKEW = 1.0  # seconds between clocks, beyond which logs and tokens that expire become confusing
COLLECTIVE = 120.0  # seconds for the first collective, connections included


def all_processes(client: Any, index: int, count: int) -> Iterator[Finding]:
    """Reachability and clock skew, seen from this process; `client` is the coordination service's."""
    with contextlib.closing(_listen()) as listening:
        threading.Thread(target=_answer, args=(listening,), daemon=True).start()
        here = [socket.gethostname(), listening.getsockname()[1]]
        client.key_value_set(f"doctor/address/{index}", json.dumps(here))
        others: dict[int, list[Any]] = {}
        missing: list[str] = []
        for other in (i for i in range(count) if i != index):
            try:
                others[other] = json.loads(client.blocking_key_value_get(f"doctor/address/{other}", int(1000 * WAIT)))
            except Exception as error:  # jaxlib raises its own kinds
                missing.append(f"process {other} ({str(error).partition(':')[0]})")
        offsets, unreached = {}, []
        for other, (host, port) in others.items():
            try:
                offsets[other] = offset_of(host, port)
            except OSError as error:
                unreached.append(f"process {other} at {host}:{port} ({error.strerror or error})")
        client.wait_at_barrier("doctor/reached", int(1000 * (WAIT + CONNECT * count)))
    bad = missing + unreached
    fix = "open all TCP ports between the hosts, and make each host's name resolve to an address that the others reach"
    words = f"not reached: {', '.join(bad)}" if bad else f"all {len(others)} other processes answer"
    yield judged("reachability", words, failed=fix if bad else "")
    if offsets:
        worst = max(offsets, key=lambda other: abs(offsets[other]))
        skewed = "let a time service run on all hosts (chrony)" if abs(offsets[worst]) > SKEW else ""
        words = f"at most {1e3 * abs(offsets[worst]):,.1f} ms from here, process {worst}"
        yield judged("clocks", words, warning=skewed)


def collective(gather: Callable[[], int], count: int, wait: float = COLLECTIVE) -> Finding:
    """Whether a gather over all processes comes back with all of them, within so many seconds."""
    got: list[int | str] = []

    def run() -> None:
        try:
            got.append(gather())
        except Exception as error:
            got.append(str(error).splitlines()[0])

    start = time.perf_counter()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(wait)
    took = time.perf_counter() - start
    if got == [count]:
        return Finding("collective", "ok", f"a gather over {count} processes took {took:.1f} s, connections included")
    fix = "NCCL_DEBUG=INFO (GPUs) says which connection is missing; NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names the "
    fix += "network interface to use"
    words = f"no answer within {wait:.0f} s" if not got else f"came back with {got[0]} of {count}"
    return Finding("collective", "failed", words, fix)


def _listen() -> socket.socket:
    listening = socket.socket()
    listening.bind(("", 0))
    listening.listen(128)
    return listening


def _answer(listening: socket.socket) -> None:
    """The time, to whoever asks, until the socket is closed."""
    while True:
        try:
            asking, _ = listening.accept()
        except OSError:
            return
        with asking, contextlib.suppress(OSError):
            asking.recv(1)
            asking.sendall(repr(time.time()).encode())


def offset_of(host: str, port: int) -> float:
    """Seconds that another process' clock is ahead, to half of a round trip (as NTP has it). Raises OSError."""
    with socket.create_connection((host, port), timeout=CONNECT) as asked:
        before = time.time()
        asked.sendall(b"?")
        told = b""
        while chunk := asked.recv(64):
            told += chunk
        after = time.time()
    return float(told) - (before + after) / 2

"""What processes tell each other, over a service that is a dict here; threads stand in for processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest

from sharded_train.checkpoint import CheckpointError, peers
from sharded_train.checkpoint.peers import Peers

COUNT = 3


class Service:
    """As JAX's: a key is read when it is there, and what is deleted goes with all below it."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
        self.values[key] = value

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        deadline = time.monotonic() + milliseconds / 1000
        while key not in self.values:
            if time.monotonic() > deadline:
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            time.sleep(0.001)
        return self.values[key]

    def key_value_delete(self, key: str) -> None:
        for name in [name for name in self.values if f"{name}/".startswith(f"{key}/")]:
            del self.values[name]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    found = Service()
    monkeypatch.setattr(peers.compat, "coordination", lambda: found)
    monkeypatch.setattr(peers.jax, "process_index", lambda: here.index)
    monkeypatch.setattr(peers.jax, "process_count", lambda: COUNT)
    monkeypatch.setattr(peers, "_instances", iter([0] * COUNT))
    return found


here = threading.local()


def talking(talk: Callable[[Peers], list[Any]], timeout: float) -> list[list[Any]]:
    """What each process says of its talk with the others."""
    conversations = [Peers(timeout) for _ in range(COUNT)]

    def process(index: int) -> list[Any]:
        here.index = index
        return talk(conversations[index])

    with ThreadPoolExecutor(COUNT) as pool:
        return list(pool.map(process, range(COUNT)))


def test_all_hear_all_and_what_was_sent_to_process_0_does_not_add_up(service: Service) -> None:
    told = talking(lambda one: [one.all([one.index, turn, "x" * 1000]) for turn in range(20)], timeout=10)
    assert told == [[[[i, turn, "x" * 1000] for i in range(COUNT)] for turn in range(20)]] * COUNT
    assert len(service.values) == 20  # what process 0 told the others, once a turn


def test_what_process_0_misses_all_hear_of_alike_and_go_on_together(service: Service) -> None:
    """Process 2 answers after the others have given it up; process 1 began to wait long before process 0 did."""

    def talk(one: Peers) -> list[Any]:
        time.sleep([0.5, 0.0, 1.8][one.index])
        with pytest.raises(CheckpointError) as missed:
            one.all(one.index)
        time.sleep(1.0 if one.index < 2 else 0.0)
        return [str(missed.value), one.all(one.index)]

    told = talking(talk, timeout=1.0)
    assert told[0] == told[1] == told[2]
    assert "process 0 waited" in told[0][0]
    assert "for process 2, which did not answer" in told[0][0]
    assert told[0][1] == [0, 1, 2]

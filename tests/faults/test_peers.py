"""What processes tell each other, over a service that is a dict here; threads stand in for processes."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sharded_train.checkpoint import peers
from sharded_train.checkpoint.peers import Peers

COUNT = 3


class Service:
    """As JAX's: a key is read when it is there, and what is deleted goes with all below it."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
        self.values[key] = value

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        while key not in self.values:
            time.sleep(0.001)
        return self.values[key]

    def key_value_delete(self, key: str) -> None:
        for name in [name for name in self.values if f"{name}/".startswith(f"{key}/")]:
            del self.values[name]


def test_all_hear_all_and_what_was_sent_to_process_0_does_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    service, here = Service(), threading.local()
    monkeypatch.setattr(peers.compat, "coordination", lambda: service)
    monkeypatch.setattr(peers.jax, "process_index", lambda: here.index)
    monkeypatch.setattr(peers.jax, "process_count", lambda: COUNT)
    monkeypatch.setattr(peers, "_instances", iter([0] * COUNT))
    conversations = [Peers(10.0) for _ in range(COUNT)]

    def talk(index: int) -> list[Any]:
        here.index = index
        return [conversations[index].all([index, turn, "x" * 1000]) for turn in range(20)]

    with ThreadPoolExecutor(COUNT) as pool:
        told = list(pool.map(talk, range(COUNT)))
    assert told == [[[[i, turn, "x" * 1000] for i in range(COUNT)] for turn in range(20)]] * COUNT
    assert len(service.values) == 20  # what process 0 told the others, once a turn

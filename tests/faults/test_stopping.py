"""A signal comes to all processes of a run at one step, wherever its steps begin and however often it goes back."""

from __future__ import annotations

import jax
import pytest

from sharded_train import stopping
from sharded_train.stopping import StopRequest


class Service:
    """JAX's rule: a signal is heard at the number after the last that it was asked with, and at no other."""

    def __init__(self) -> None:
        self.asked = 0
        self.safe: int | None = None

    def signal(self) -> None:
        self.safe = self.asked + 1

    def reached(self, number: int) -> bool:
        self.asked = number
        return number == self.safe


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    """As one of several processes."""
    found = Service()
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(stopping.multihost_utils, "reached_preemption_sync_point", found.reached)
    monkeypatch.setattr(stopping.signal, "signal", lambda number, handler: None)
    return found


def test_a_signal_before_the_first_step_of_a_life_is_heard_after_it(service: Service) -> None:
    stop = StopRequest()
    service.signal()
    assert stop.agreed()


def test_a_signal_is_heard_after_the_next_step_and_not_forgotten(service: Service) -> None:
    """Where a roll-back comes in between, the run goes on for one step more."""
    stop = StopRequest()
    assert [stop.agreed() for _ in range(5)] == [False] * 5
    service.signal()
    assert [stop.agreed() for _ in range(3)] == [True] * 3

"""Steps that are skipped and losses that leap: what is told, when the run goes back, and when it gives up."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from sharded_train.faults.config import FaultsConfig
from sharded_train.faults.health import Diverged, Health, RollBack, zscore

NAN = float("nan")


def values(loss: float = 2.0, grad_norm: float = 1.0, **more: float) -> dict[str, float]:
    return {"loss": loss, "grad_norm": grad_norm, "learning_rate": 1e-3, **more}


def watcher(**options: object) -> tuple[Health, list[str]]:
    told: list[str] = []
    return Health(FaultsConfig(**options), told.append), told  # type: ignore[arg-type]


def test_so_many_skipped_in_a_row_go_back_to_before_the_first() -> None:
    health, told = watcher(max_skipped=3)
    for step in (1, 2):
        health.look(step, values())
    health.look(3, values(loss=NAN))
    health.look(4, values(grad_norm=float("inf")))
    with pytest.raises(RollBack) as caught:
        health.look(5, values(loss=NAN, grad_norm=NAN))
    assert (caught.value.before, caught.value.left_out) == (3, (3, 4, 5))
    assert "loss and grad_norm not finite, 3 steps in a row" in str(caught.value)
    assert "step 4 is skipped: grad_norm not finite" in told[1]
    assert "2 in a row, of at most 3" in told[1]


def test_a_good_step_in_between_begins_the_count_anew() -> None:
    health, _ = watcher(max_skipped=2)
    for step in range(1, 20):
        health.look(step, values(loss=NAN if step % 2 else 2.0))


def test_none_allowed_is_the_end_at_the_first() -> None:
    health, _ = watcher(max_skipped=0)
    with pytest.raises(Diverged, match=r"step 7: loss not finite \(loss = nan, grad_norm = 1.0"):
        health.look(7, values(loss=NAN))


def test_an_overflow_with_a_loss_scale_is_no_fault() -> None:
    health, told = watcher(max_skipped=1)
    for step in range(1, 5):
        health.look(step, values(grad_norm=NAN, loss_scale=1024.0))
    assert len(told) == 4
    with pytest.raises(RollBack):
        health.look(5, values(grad_norm=NAN, loss_scale=1.0))


def found_at(step: int) -> RollBack:
    return RollBack(step, step, (step,), "why")


def test_roll_backs_that_do_not_help_end_the_run() -> None:
    health, _ = watcher(max_rollbacks=2)
    health.rolled_back(found_at(9))
    health.rolled_back(found_at(8))
    with pytest.raises(Diverged, match="step 9: why; 2 roll-backs did not bring the run beyond this step"):
        health.rolled_back(found_at(9))


def test_roll_backs_further_on_are_counted_anew() -> None:
    health, _ = watcher(max_rollbacks=1)
    for step in (9, 10, 11):
        health.rolled_back(found_at(step))


def test_weights_that_are_not_finite_are_a_fault_too() -> None:
    health, _ = watcher()
    assert isinstance(health.weights_broken(4), RollBack)
    health, _ = watcher(max_skipped=0)
    assert isinstance(health.weights_broken(4), Diverged)


def losses_with_spike(size: float, seed: int = 0) -> np.ndarray:
    """A falling, noisy loss with one spike after step 60."""
    rng = np.random.default_rng(seed)
    losses = 3 - np.arange(100) / 300 + 0.05 * rng.standard_normal(100)
    losses[60] += size
    return losses


@pytest.mark.parametrize("seed", range(5))
def test_a_spike_is_told_and_noise_is_not(seed: int) -> None:
    health, told = watcher()
    for step, loss in enumerate(losses_with_spike(2.0, seed), 1):
        health.look(step, values(loss=float(loss)))
    assert len(told) == 1
    assert told[0].startswith("step 61: loss ")
    assert "robust deviations above the median of 60 before it" in told[0]


def test_a_spike_goes_back_where_that_is_wanted() -> None:
    health, _ = watcher(spike_action="roll_back")
    losses = losses_with_spike(2.0).tolist()
    for step, loss in enumerate(losses[:60], 1):
        health.look(step, values(loss=loss))
    with pytest.raises(RollBack) as caught:
        health.look(61, values(loss=losses[60]))
    assert (caught.value.before, caught.value.left_out) == (61, (61,))
    health.rolled_back(caught.value)
    health.look(51, values(loss=100.0))  # nothing to compare with yet


def test_a_loss_that_stays_high_is_told_once() -> None:
    health, told = watcher()
    for step in range(1, 60):
        health.look(step, values(loss=2 + step % 7 / 100 + 3 * (step > 40)))
    assert len(told) == 1


def test_spikes_can_be_left_alone() -> None:
    health, told = watcher(spike_window=0)
    for step, loss in enumerate(losses_with_spike(50.0), 1):
        health.look(step, values(loss=float(loss)))
    assert told == []


def test_the_score_of_normal_noise_is_that_of_a_normal_variable() -> None:
    sample = np.random.default_rng(1).normal(10, 2, 4001).tolist()
    before = collections.deque(sample[:-1], maxlen=4000)
    assert zscore(10 + 6.0, before) == pytest.approx(3, rel=0.05)
    assert zscore(1.0, before) < 0
    assert zscore(1e9, collections.deque([1.0] * 15)) == 0  # too few
    assert zscore(1.0005, collections.deque([1.0] * 16)) == pytest.approx(0.5)  # no spread at all

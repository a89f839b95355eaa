"""Whether a step's numbers are those of a run that goes well: finite, and without spikes.

All processes see the same numbers and come to the same answer.
"""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Callable, Mapping

from sharded_train.exits import Failure
from sharded_train.faults.config import FaultsConfig

_LEAST = 16  # losses that a spread can be told from
_FLOOR = 1e-3  # of the median: a spread smaller than that is rounding, not noise


class Diverged(Failure):
    """A loss, gradient norm or weight is not finite, and nothing that is allowed mends it."""

    def __init__(self, step: int, what: str):
        super().__init__(f"step {step}: {what}")
        self.step, self.what = step, what


class RollBack(Exception):
    """At `step` it was found that the run is to go back to before the step `before`, and why.

    The batches of the steps `left_out` are to be left out then.
    """

    def __init__(self, step: int, before: int, left_out: tuple[int, ...], why: str):
        super().__init__(f"step {step}: {why}")
        self.step, self.before, self.left_out, self.why = step, before, left_out, why


class Health:
    """Looks at the metrics of every step, in order. `tell` is given a line for people."""

    def __init__(self, config: FaultsConfig, tell: Callable[[str], None]):
        self._config, self._tell = config, tell
        self._skipped: list[int] = []
        self._losses: collections.deque[float] = collections.deque(maxlen=max(1, config.spike_window))
        self._in_spike = False
        self._rollbacks, self._furthest = 0, 0

    def look(self, step: int, values: Mapping[str, float]) -> None:
        """Raises RollBack, or Diverged when that is not wanted or has not helped.

        An overflow is no fault where there is a loss scale to be lowered.
        """
        broken = [key for key in ("loss", "grad_norm") if not math.isfinite(values[key])]
        if not broken:
            self._skipped.clear()
            self._look_for_spike(step, values["loss"])
            return
        what = f"{' and '.join(broken)} not finite"
        if values.get("loss_scale", 1) > 1:
            self._tell(f"step {step} is skipped: {what}, with a loss scale of {values['loss_scale']:,.0f}")
            return
        found = ", ".join(f"{key} = {values[key]}" for key in ("loss", "grad_norm", "learning_rate"))
        most = self._config.max_skipped
        if most == 0:
            raise Diverged(step, f"{what} ({found})")
        self._skipped.append(step)
        count = len(self._skipped)
        self._tell(f"step {step} is skipped: {what} ({found}); {count} in a row, of at most {most}")
        if count >= most:
            steps = tuple(self._skipped)
            raise RollBack(step, steps[0], steps, f"{what}, {count} steps in a row ({found})")

    def rolled_back(self, fault: RollBack) -> None:
        """The run goes on from an earlier step. Raises Diverged if that did not help so often that it will not."""
        if fault.step > self._furthest:
            self._furthest, self._rollbacks = fault.step, 0
        self._rollbacks += 1
        if self._rollbacks > self._config.max_rollbacks:
            tried = f"{self._config.max_rollbacks} roll-backs did not bring the run beyond this step"
            raise Diverged(fault.step, f"{fault.why}; {tried}")
        self._skipped.clear()
        self._losses.clear()
        self._in_spike = False

    def weights_broken(self, step: int) -> RollBack | Diverged:
        """What to raise where a state that is to be saved holds weights that are not finite."""
        what = "weights not finite after it"
        return RollBack(step, step, (step,), what) if self._config.max_skipped else Diverged(step, what)

    def _look_for_spike(self, step: int, loss: float) -> None:
        config, score = self._config, zscore(loss, self._losses)
        spike = config.spike_window > 0 and score > config.spike_zscore
        if spike and not self._in_spike:
            what = f"loss {loss:.4f} is {score:.1f} robust deviations above the median of {len(self._losses)} before it"
            self._tell(f"step {step}: {what}")
            if config.spike_action == "roll_back":
                raise RollBack(step, step, (step,), what)
        self._in_spike = spike
        self._losses.append(loss)


def zscore(loss: float, before: collections.deque[float]) -> float:
    """How far a loss lies above the median of those before it, in units of their spread; 0 of too few.

    z = (loss - median) / max(1.4826 MAD, 0.001 |median|), MAD the median of |loss_i - median|, which 1.4826 makes an
    estimate of the standard deviation (Rousseeuw and Croux, 1993): one spike more or less does not change it.
    """
    if len(before) < _LEAST:
        return 0.0
    median = statistics.median(before)
    spread = statistics.median(abs(other - median) for other in before)
    return (loss - median) / max(1.4826 * spread, _FLOOR * abs(median), 1e-12)

"""The watchdog: it barks when a phase is late, with the stacks, and at nothing else."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from sharded_train.exits import Exit
from sharded_train.faults.watchdog import Watchdog


def barks(deadlines: dict[str, float], act: object) -> list[int]:
    """The codes that it left with while `act` was done."""
    codes: list[int] = []
    with Watchdog(deadlines, codes.append) as watchdog:
        act(watchdog)  # type: ignore[operator]
    return codes


def test_it_barks_when_a_phase_is_late(capfd: pytest.CaptureFixture[str]) -> None:
    def late(watchdog: Watchdog) -> None:
        watchdog.enter("step", "step 7")
        time.sleep(0.6)

    assert barks({"step": 0.2, "save": 60}, late) == [Exit.WATCHDOG]
    said = capfd.readouterr().err
    assert "watchdog: step 7 has taken 0 s, more than watchdog.step = 0.2; all stacks:" in said
    assert "in late" in said  # where the main thread was


def test_it_is_silent_while_phases_change_in_time() -> None:
    def in_time(watchdog: Watchdog) -> None:
        for step in range(8):
            watchdog.enter("step", f"step {step}")
            time.sleep(0.05)
        watchdog.enter("evaluate")  # has no deadline
        time.sleep(0.4)

    assert barks({"step": 0.3}, in_time) == []


def test_zero_is_no_deadline() -> None:
    def late(watchdog: Watchdog) -> None:
        watchdog.enter("save")
        time.sleep(0.3)

    assert barks({"save": 0, "step": 0.1}, late) == []


def test_nothing_of_it_is_left_behind() -> None:
    barks({"step": 5}, lambda watchdog: watchdog.enter("step"))
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert "watchdog" not in {thread.name for thread in threading.enumerate()}


def ended(script: str) -> tuple[int, str]:
    """A process of its own: its exit code and stderr."""
    start = "import time\nfrom sharded_train.faults.watchdog import Watchdog\n"
    done = subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(script)], stderr=subprocess.PIPE, text=True, timeout=60
    )
    return done.returncode, done.stderr


def test_a_process_that_hangs_ends_with_its_code_and_all_stacks() -> None:
    code, said = ended("""
        import threading
        def waits_for_ever(): threading.Event().wait()
        with Watchdog({"restore": 0.3}) as watchdog:
            watchdog.enter("restore")
            threading.Thread(target=waits_for_ever, daemon=True).start()
            time.sleep(60)
    """)
    assert code == Exit.WATCHDOG
    assert "more than watchdog.restore = 0.3" in said
    assert "in waits_for_ever" in said
    assert "Current thread" in said


def test_a_process_whose_python_is_held_ends_too() -> None:
    """A call that keeps Python's lock, as a C extension may: no thread of Python runs any more."""
    code, said = ended("""
        import ctypes
        with Watchdog({"step": 1.5}) as watchdog:
            watchdog.enter("step")
            time.sleep(1.3)
            ctypes.PyDLL(None).sleep(30)
    """)
    assert code == -signal.SIGALRM
    assert "most recent call first" in said

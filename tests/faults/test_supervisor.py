"""The supervisor, with small scripts in place of training: what is started again, when, and how it all ends."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sharded_train.exits import Exit, in_words
from sharded_train.faults.progress import PROGRESS, Progress, read_step
from sharded_train.faults.supervisor import Policy, Supervisor

QUICK = Policy(max_restarts=5, same_step=3, backoff=0.01, grace=5.0, settle=0.2)
# A script sees `life` (of the folder, from 1), `process`, and step(n).
START = """
import os, pathlib, signal, sys, time
folder, process = pathlib.Path(sys.argv[1]), int(sys.argv[2])
lives = folder / f"lives-{process}"
life = len(lives.read_text()) + 1 if lives.exists() else 1
lives.write_text("x" * life)
def step(n): pathlib.Path(os.environ["SHARDED_TRAIN_PROGRESS"]).write_text(str(n))
def until_told(code, ready):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    (folder / ready).write_text("")
    time.sleep(60)
"""


def supervised(folder: Path, script: str, processes: int = 1, policy: Policy = QUICK) -> tuple[int, str]:
    """The exit code, and what was printed."""
    code = START + textwrap.dedent(script)
    terminal = io.StringIO()

    def command(attempt: int) -> list[list[str]]:
        return [[sys.executable, "-SE", "-c", code, str(folder), str(i)] for i in range(processes)]

    return Supervisor(command, folder / "logs", policy, terminal).run(), terminal.getvalue()


def lives(folder: Path, process: int = 0) -> int:
    return len((folder / f"lives-{process}").read_text())


def when(folder: Path, name: str, act: Callable[[], None]) -> threading.Thread:
    """Acts once a script has made the file `name`."""

    def wait() -> None:
        while not (folder / name).exists():
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("code", [0, 1, 2, 65, 69, 74, 75])
def test_what_ended_for_good_is_not_started_again(tmp_path: Path, code: int) -> None:
    assert supervised(tmp_path, f"sys.exit({code})")[0] == code
    assert lives(tmp_path) == 1


def test_what_is_printed_is_to_fit_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(io, "StringIO", Terminal)
    monkeypatch.setenv("COLUMNS", "80")  # which shutil.get_terminal_size goes by
    _, printed = supervised(tmp_path, "print(os.environ['COLUMNS'])")
    assert printed.startswith("[0] 76\n")


def test_noise_goes_to_the_log_alone(tmp_path: Path) -> None:
    gloo = "[Gloo] Rank 1 is connected to {} peer ranks. Expected number of connected peer ranks is : 7"
    # As it was seen: three threads at once.
    middle, last = " peer ranks. ", "Expected number of connected peer ranks is : "
    together = f"[Gloo] Rank [Gloo] Rank 3 is connected to [Gloo] Rank 172 is connected to 7 is connected to {middle}"
    noise = [
        f"{together}{middle}7{last}{last}{middle}77{last}",
        "",
        "7",
        gloo.format(7),
        "I0000 00:00:17 5 cudart_stub.cc:31] Could not find cuda drivers on your machine",
    ]
    digits = f"{10**60}x"  # to look for Gloo in it must not take for ever
    kept = [gloo.format(6), "E0000 00:00:17 5 gloo.cc:1] connection closed by peer", "", "7", digits, "a line"]
    _, printed = supervised(tmp_path, f"print(*{[*noise, *kept]!r}, sep=chr(10))")
    assert [line.removeprefix("[0] ") for line in printed.splitlines()[:-1]] == kept
    logged = (tmp_path / "logs/process-0.log").read_text().splitlines()
    assert logged[1:] == [*noise, *kept]


@pytest.mark.parametrize(
    ("death", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("os.abort()", "killed by SIGABRT"),
        ("os._exit(134)", "code 134: aborted in C++"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("sys.exit(70)", "code 70: a deadline passed"),
        ("sys.exit(71)", "code 71: a fault that a restart may cure"),
    ],
)
def test_what_died_is_started_again(tmp_path: Path, death: str, words: str) -> None:
    code, said = supervised(tmp_path, f"if life == 1: {death}")
    assert (code, lives(tmp_path)) == (Exit.DONE, 2)
    assert words in said


def test_one_dies_and_all_are_stopped_and_started_again(tmp_path: Path) -> None:
    script = """
        if life == 1:
            if process == 1: os.kill(os.getpid(), signal.SIGKILL)
            print("waits in a collective", flush=True)
            time.sleep(60)
    """
    begin = time.monotonic()
    code, said = supervised(tmp_path, script, processes=3)
    assert time.monotonic() - begin < 20
    assert (code, [lives(tmp_path, i) for i in range(3)]) == (Exit.DONE, [2, 2, 2])
    assert "process 1: killed by SIGKILL" in said


def test_the_reason_counts_and_not_the_abort_that_follows_from_it(tmp_path: Path) -> None:
    code, _ = supervised(tmp_path, "os.abort() if process == 0 else sys.exit(2)", processes=2)
    assert (code, lives(tmp_path)) == (Exit.CONFIG, 1)


def test_the_same_step_again_and_again_ends_it(tmp_path: Path) -> None:
    code, said = supervised(tmp_path, "step(7); os.abort()")
    assert (code, lives(tmp_path)) == (Exit.REPEATED, 3)
    assert "after step 7, for the third time: a restart does not cure it" in said


def test_a_fault_at_start_up_in_between_does_not_hide_the_same_step(tmp_path: Path) -> None:
    code, _ = supervised(tmp_path, "step(7) if life % 2 else None; os.abort()")
    assert (code, lives(tmp_path)) == (Exit.REPEATED, 5)


def test_progress_is_no_repetition_but_restarts_have_a_limit(tmp_path: Path) -> None:
    code, said = supervised(tmp_path, "step(life); os.abort()")
    assert (code, lives(tmp_path)) == (Exit.REPEATED, QUICK.max_restarts + 1)
    assert "after step 6: all of --max-restarts=5 are used up" in said


def test_back_off_grows_at_one_step_and_begins_anew_after_progress(tmp_path: Path) -> None:
    policy = Policy(max_restarts=5, same_step=9, backoff=0.02, max_backoff=0.05, settle=0.1)
    _, said = supervised(tmp_path, "step(1 if life < 5 else life); sys.exit(71 if life < 6 else 0)", policy=policy)
    assert [line.split(" in ")[1] for line in said.splitlines() if ": restart " in line] == [
        "0.02 s", "0.04 s", "0.05 s", "0.05 s", "0.02 s"
    ]  # fmt: skip


def test_sigterm_is_passed_on_and_what_is_saved_is_not_started_again(tmp_path: Path) -> None:
    stopper = when(tmp_path, "ready-1", lambda: os.kill(os.getpid(), signal.SIGTERM))
    code, said = supervised(tmp_path, "until_told(75, f'ready-{process}')", processes=2)
    stopper.join()
    assert (code, lives(tmp_path)) == (Exit.PREEMPTED, 1)
    assert "a second signal stops at once" in said


def test_sigterm_before_anything_listens_is_a_stop_too(tmp_path: Path) -> None:
    stopper = when(tmp_path, "lives-0", lambda: os.kill(os.getpid(), signal.SIGTERM))
    code, _ = supervised(tmp_path, "time.sleep(60)")
    stopper.join()
    assert (code, lives(tmp_path)) == (Exit.PREEMPTED, 1)


def test_a_second_sigterm_stops_at_once(tmp_path: Path) -> None:
    script = "signal.signal(signal.SIGTERM, lambda *_: (folder / 'told').write_text('')); (folder / 'on').touch()"
    script += "\nwhile True: time.sleep(1)"
    first = when(tmp_path, "on", lambda: os.kill(os.getpid(), signal.SIGTERM))
    second = when(tmp_path, "told", lambda: os.kill(os.getpid(), signal.SIGTERM))
    begin = time.monotonic()
    code, _ = supervised(tmp_path, script)
    first.join()
    second.join()
    assert (code, lives(tmp_path)) == (Exit.INTERRUPTED, 1)
    assert time.monotonic() - begin < 20


def test_one_that_does_not_end_with_the_others_is_killed_and_started_again(tmp_path: Path) -> None:
    script = "time.sleep(60 if process == 1 and life == 1 else 0)"
    code, said = supervised(tmp_path, script, processes=2, policy=Policy(backoff=0.01, grace=0.3))
    assert (code, lives(tmp_path, 1)) == (Exit.DONE, 2)
    assert "others did not end within 0.3 s" in said


def test_each_process_has_a_log_of_all_its_lives_and_a_prefix(tmp_path: Path) -> None:
    _, said = supervised(tmp_path, "print('life', life, 'of', process); sys.exit(71 if life == 1 else 0)", processes=2)
    for process in range(2):
        log = (tmp_path / f"logs/process-{process}.log").read_text()
        assert [line for line in log.splitlines() if line.startswith("life")] == [
            f"life 1 of {process}",
            f"life 2 of {process}",
        ]
        assert log.count("---- attempt ") == 2
        assert f"[{process}] life 2 of {process}\n" in said
    assert "restart 1 in" in (tmp_path / "logs/supervisor.log").read_text()


def test_logs_that_cannot_be_written_stop_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way")
    code, said = supervised(tmp_path, "print('x' * 1000000)")
    assert code == Exit.DONE
    assert len(said) > 1000000


def test_what_a_process_has_started_goes_with_it(tmp_path: Path) -> None:
    script = """
        import subprocess
        worker = subprocess.Popen([sys.executable, "-SE", "-c", "import time; time.sleep(60)"])
        (folder / "worker").write_text(str(worker.pid))
    """
    assert supervised(tmp_path, script)[0] == Exit.DONE
    pid = int((tmp_path / "worker").read_text())
    state = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 5
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_the_processes_die_with_their_supervisor(tmp_path: Path) -> None:
    """Killed by SIGKILL it can stop nobody: the kernel does."""
    child = textwrap.dedent("""
        import os, pathlib, sys, time
        from sharded_train.faults.progress import die_with_supervisor
        die_with_supervisor()
        pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
        time.sleep(60)
    """)
    script = textwrap.dedent(f"""
        import pathlib, sys
        from sharded_train.faults.supervisor import Policy, Supervisor
        command = [sys.executable, "-c", {child!r}, sys.argv[1]]
        Supervisor(lambda attempt: [command], pathlib.Path(sys.argv[2]), Policy()).run()
    """)
    pid = tmp_path / "pid"
    supervisor = subprocess.Popen([sys.executable, "-c", script, str(pid), str(tmp_path / "logs")])
    while not pid.exists() or not pid.read_text():
        assert supervisor.poll() is None
        time.sleep(0.05)
    supervisor.kill()
    supervisor.wait()
    deadline = time.monotonic() + 5
    state = Path(f"/proc/{pid.read_text()}/stat")
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_progress_is_written_where_the_supervisor_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "0"
    assert read_step(path) == -1
    progress = Progress({PROGRESS: str(path)})
    for step in (0, 123456, 7):
        progress.step(step)
        assert read_step(path) == step
    progress.close()
    Progress({}).step(1)  # without a supervisor it does nothing


def test_every_code_has_a_meaning() -> None:
    for code in Exit:
        assert in_words(code) == f"code {int(code)}: {code.meaning}"
    assert in_words(143) == "code 143: killed by SIGTERM"
    assert in_words(-64) == "killed by SIGRTMAX"
    assert in_words(3) == "code 3"

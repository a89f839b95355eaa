"""One supervised process: started in a session of its own, its output in a file and on the terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from sharded_train.noise import NoiseFilter

_terminal_lock = threading.Lock()


class Child:
    """A running process and the thread that copies what it prints, line by line, with `prefix` on the terminal.

    What is noise (see `noise`) goes to the log alone.
    """

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], log: Path, header: str, terminal: TextIO, prefix: str
    ):
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,  # the terminal's Ctrl-C comes to the supervisor alone
        )
        self._log, self._header, self._terminal, self._prefix = log, header, terminal, prefix
        self._copier = threading.Thread(target=self._copy, name=f"output of {prefix.strip()}", daemon=True)
        self._copier.start()

    def poll(self) -> int | None:
        """The exit code (negative: the signal), None while it runs.

        It is not reaped before `join`: until then its number belongs to it, and `kill` meets nobody else.
        """
        if self._process.returncode is not None or not hasattr(os, "waitid"):  # older Pythons on macOS lack it
            return self._process.poll()
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def terminate(self) -> None:
        """Asks it to finish the step, save and end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """At once, with all that it has started; what it started may be left even when it has ended itself."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def join(self) -> None:
        """Waits until it is gone and its output is copied; after `kill`."""
        self._process.wait()
        self._copier.join(timeout=5)

    def _copy(self) -> None:
        """A full disk or a closed terminal must not stop it: the process would wait for its pipe to be emptied."""
        assert self._process.stdout is not None
        self._to_log(self._header)
        noise = NoiseFilter()
        with self._process.stdout as output:
            for raw in output:
                line = raw.decode(errors="replace")
                self._to_log(line)
                if noise.drops(raw):
                    continue
                with _terminal_lock, contextlib.suppress(OSError, ValueError):
                    self._terminal.write(f"{self._prefix}{line}" if line.endswith("\n") else f"{self._prefix}{line}\n")
                    self._terminal.flush()

    def _to_log(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a") as log:
                log.write(text)

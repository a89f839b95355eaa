"""One run in a workdir at a time. What a killed owner leaves behind is no obstacle, and nobody has to clean up.

The kernel's lock on the file `lock` decides (flock): it goes with its owner, however that dies. On a network file
system it holds between hosts where the system's lock service does (NFS since Linux 2.6, Lustre mounted with flock,
GPFS). Where it may not, the file's content does: its owner counts it up every few seconds, and an owner on another host
whose count goes on is alive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
import weakref
from pathlib import Path

from sharded_train.errors import ConfigError

FILE = "lock"
_BEAT = 5.0  # seconds
_SILENT = 3  # beats that an owner elsewhere may miss
_SIZE = 512  # bytes of the record, always: a reader never sees half of a longer one
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class InUse(ConfigError):
    """Another run has the workdir; the message names its host and process."""


@dataclasses.dataclass(frozen=True)
class Owner:
    """Who holds a lock. `kernel` tells hosts apart that have one name; `born` two processes that had one number."""

    host: str
    pid: int
    kernel: str
    born: str
    since: float  # seconds since 1970
    token: str

    @property
    def words(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"


class WorkdirLock:
    """The lock of one workdir, for process 0 of a run."""

    def __init__(self, workdir: Path, beat: float = _BEAT):
        self._path, self._beat = workdir / FILE, beat
        self._file: int | None = None
        self._me = Owner(
            socket.gethostname(), os.getpid(), _kernel(), born(os.getpid()), time.time(), secrets.token_hex(8)
        )
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._taken_by: Owner | None = None

    def __enter__(self) -> WorkdirLock:
        return self

    def __exit__(self, *_: object) -> None:
        """Releases it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._file is not None:
            if self._thread is not None and self._taken_by is None:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = None

    def take_if_there(self) -> None:
        """Takes the lock of a workdir that has had a run, writing nothing. Raises InUse."""
        if self._file is None and self._path.exists():
            self._open(0)

    def take(self) -> None:
        """Takes it, if that is not done, and says so in the file. Raises InUse."""
        if self._file is None:
            self._open(os.O_CREAT)
        self._write(0)
        self._thread = threading.Thread(target=self._count, name="workdir lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises InUse if another run took it, as it may where this process was stopped for long."""
        if self._taken_by is not None:
            raise InUse(f"{self._path.parent} was taken over by another run, {self._taken_by.words}: this one ends")

    def _open(self, flags: int) -> None:
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | flags, 0o644)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            raise ConfigError(f"{self._path} cannot be opened to be written: {error.strerror}") from error
        try:
            held = _lock(file)
            owner, beat = _read(file)
            if held is False or (owner is not None and self._lives(file, owner, beat, held is True)):
                raise InUse(self._refusal(owner))
        except BaseException:
            os.close(file)
            raise
        self._file = file
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(this()))

    def _lives(self, file: int, owner: Owner, beat: int, held: bool) -> bool:
        """Whether the owner in the record still runs, where the kernel says that the lock is free, or says nothing."""
        if owner.kernel == self._me.kernel:
            return not held and born(owner.pid) == owner.born
        deadline = time.monotonic() + _SILENT * self._beat
        while time.monotonic() < deadline:
            if _read(file)[1] != beat:
                return True
            time.sleep(self._beat / 10)
        return False

    def _refusal(self, owner: Owner | None) -> str:
        who = "another run" if owner is None else f"another run: {owner.words}"
        return (
            f"{self._path.parent} is in use by {who}. Stop that one first, or choose another --workdir; the lock of a "
            "process that is gone goes by itself"
        )

    def _count(self) -> None:
        beat = 0
        while not self._stop.wait(self._beat):
            assert self._file is not None
            with contextlib.suppress(OSError):
                owner, _ = _read(self._file)
                if owner is not None and owner.token != self._me.token:
                    self._taken_by = owner
                    return
                beat += 1
                self._write(beat)

    def _write(self, beat: int) -> None:
        assert self._file is not None
        text = json.dumps({"beat": beat, **dataclasses.asdict(self._me)}) + "\n"
        os.pwrite(self._file, text.encode().rjust(_SIZE), 0)


def _lock(file: int) -> bool | None:
    """Whether the lock is ours now; None where the file system has none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS_HERE:
            return None
        raise
    return True


def _read(file: int) -> tuple[Owner | None, int]:
    """Who is named in the file, and the count. Nobody is where a run has released it, or the text is damaged."""
    try:
        record = json.loads(os.pread(file, _SIZE, 0))
        beat = int(record.pop("beat"))
        return Owner(**record), beat
    except (ValueError, TypeError, KeyError, AttributeError):
        return None, 0


def _forget(lock: WorkdirLock | None) -> None:
    """In a forked child: it would keep the lock when its parent is gone."""
    if lock is not None and lock._file is not None:
        os.close(lock._file)
        lock._file = None


def _kernel() -> str:
    """What one boot of one kernel has to itself."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def born(pid: int) -> str:
    """When a process of this host began, in its kernel's ticks; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""

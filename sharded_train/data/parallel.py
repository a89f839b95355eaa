"""Work on all cores: one function over many jobs, in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from sharded_train.errors import ConfigError

Job = TypeVar("Job")
Result = TypeVar("Result")
Advance = Callable[[int], None]
_LOOK_EVERY = 0.2  # seconds

_counter: Any = None  # in a worker: how much all workers have done
_stop: Any = None  # in a worker: whether nobody waits for it any more


def each(
    function: Callable[[Job, Advance], Result], jobs: Sequence[Job], *, num_workers: int, advance: Advance
) -> Iterator[Result]:
    """`function(job, advance)` of every job, in the order in which they come to their end.

    `advance` is told of the work done. With one worker all happens here, in the order of the jobs. The function and
    the jobs go to other processes, so the function must be one that a module has under its name (or a `partial`).
    """
    if num_workers <= 1 or len(jobs) <= 1:
        yield from (function(job, advance) for job in jobs)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy JAX's threads in the middle of what they do
    counter, stop = context.Value("q", 0), context.Event()
    pool = ProcessPoolExecutor(min(num_workers, len(jobs)), context, _begin, (counter, stop, os.getpid()))
    seen, finished = 0, False
    try:
        pending = {pool.submit(_work, function, job) for job in jobs}
        while pending:
            done, pending = wait(pending, _LOOK_EVERY, FIRST_COMPLETED)
            now = counter.value
            advance(now - seen)
            seen = now
            for future in done:
                yield future.result()
        finished = True
    except BrokenProcessPool as error:
        raise ConfigError(
            "data: a worker was killed, perhaps for want of memory; what is finished is kept. Start again, with fewer "
            "--workers if memory is short"
        ) from error
    finally:
        stop.set()
        # At the end all are waited for: one that is still starting looks for what it shares with this process.
        pool.shutdown(wait=finished, cancel_futures=True)


def _begin(counter: Any, stop: Any, parent: int) -> None:
    """A worker goes when its parent does, and without a word on Ctrl-C."""
    global _counter, _stop
    _counter, _stop = counter, stop
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker has one core

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(function: Callable[[Job, Advance], Result], job: Job) -> Result:
    return function(job, _advance)


class _Stopped(Exception):
    """Nobody waits for this work any more."""


def _advance(amount: int) -> None:
    if _stop.is_set():
        raise _Stopped
    with _counter.get_lock():
        _counter.value += amount

"""Work in other processes: errors come back, kills are told of, and what is done is counted."""

from __future__ import annotations

import os
import signal
import time

import pytest

from sharded_train.data.parallel import Advance, each
from sharded_train.errors import ConfigError


def killed(job: int, advance: Advance) -> int:
    if job == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return job


def test_a_worker_that_is_killed_is_told_of() -> None:
    with pytest.raises(ConfigError, match=r"a worker was killed.*fewer --workers"):
        list(each(killed, range(6), num_workers=2, advance=lambda _: None))


def refused(job: int, advance: Advance) -> int:
    advance(job)
    if job == 1:
        raise ConfigError(["one", "two"])
    time.sleep(0.01)
    return job


def test_an_error_in_a_worker_is_the_error_and_the_work_is_counted() -> None:
    done: list[int] = []
    with pytest.raises(ConfigError, match="one\ntwo"):
        list(each(refused, range(4), num_workers=2, advance=done.append))
    assert sorted(each(refused, [5, 2, 3], num_workers=2, advance=done.append)) == [2, 3, 5]
    assert sum(done) >= 10

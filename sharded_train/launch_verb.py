"""`sharded-train launch`: `train` as several processes of this host, supervised."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from sharded_train.errors import ConfigError
from sharded_train.faults.supervisor import Policy, Supervisor

LOGS = "logs"
_OURS = ("--coordinator", "--num-processes", "--process-id", "--distributed")


def launch(
    command: Sequence[str],
    policy: Policy,
    *,
    processes: int,
    hosts: int = 1,
    host_index: int = 0,
    coordinator: str | None = None,
) -> int:
    """Runs `command`, such as ["train", "--config=...", "--workdir=..."], and returns its exit code.

    With several `hosts` each has its own `launch`; `coordinator`, HOST:PORT, is then an address of host 0, where
    process 0 is.
    """
    if problems := [*_command_problems(command), *_host_problems(hosts, host_index, coordinator)]:
        raise ConfigError(problems)
    first, total = host_index * processes, hosts * processes

    def command_lines(attempt: int) -> list[list[str]]:
        start = [sys.executable, "-m", "sharded_train", *command]
        if total == 1:
            return [start]
        # Another port each time: the one of the life before may not be free yet.
        address = coordinator or f"localhost:{free_port()}"
        where = [f"--coordinator={address}", f"--num-processes={total}"]
        return [[*start, *where, f"--process-id={first + i}"] for i in range(processes)]

    return Supervisor(command_lines, workdir_of(command) / LOGS, policy, first_process=first).run()


def free_port() -> int:
    """A port of this host that nobody listens at just now."""
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return int(listening.getsockname()[1])


def workdir_of(command: Sequence[str]) -> Path:
    """What follows --workdir. Raises ConfigError if nothing does."""
    for argument, following in zip(command, [*command[1:], ""], strict=True):
        name, _, value = argument.partition("=")
        if name == "--workdir" and (value or following):
            return Path(value or following)
    raise ConfigError("launch: the command after -- needs --workdir=DIR: restarts go on from its checkpoints")


def _command_problems(command: Sequence[str]) -> list[str]:
    if not command:
        return ["launch needs a command after --, such as: sharded-train launch --processes=2 -- train --config=..."]
    problems = []
    if command[0] != "train":
        problems.append(f"launch supervises train, not {command[0]}: the command after -- begins with train")
    given = [argument for argument in command if argument.partition("=")[0] in _OURS]
    if given:
        problems.append(f"{', '.join(given)} after --: launch itself tells the processes where they are")
    try:
        workdir_of(command)
    except ConfigError as error:
        problems += error.problems
    return problems


def _host_problems(hosts: int, index: int, coordinator: str | None) -> list[str]:
    problems = []
    if not 0 <= index < hosts:
        problems.append(f"--host-index={index}: must be from 0 to --hosts - 1 = {hosts - 1}")
    if hosts > 1 and coordinator is None:
        problems.append(f"--hosts={hosts} needs --coordinator=HOST:PORT, the same on all: an address of host 0")
    if hosts == 1 and coordinator is not None:
        problems.append(f"--coordinator={coordinator} with one host: launch chooses a free port itself")
    return problems

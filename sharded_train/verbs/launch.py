"""`sharded-train launch`: `train` as several processes of this host, supervised."""

from __future__ import annotations

import itertools
import os
import socket
import sys
from collections.abc import Mapping, Sequence
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
    shares = shares_of_gpus(command, processes, os.environ)

    def command_lines(attempt: int) -> list[list[str]]:
        start = [sys.executable, "-m", "sharded_train", *command]
        if total == 1:
            return [start]
        # Another port each time: the one of the life before may not be free yet.
        address = coordinator or f"localhost:{free_port()}"
        where = [f"--coordinator={address}", f"--num-processes={total}"]
        return [[*start, *where, f"--process-id={first + i}"] for i in range(processes)]

    logs = workdir_of(command) / LOGS
    return Supervisor(command_lines, logs, policy, first_process=first, environ=shares).run()


def shares_of_gpus(command: Sequence[str], processes: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """Which GPUs of this host each process sees, as its variables: alike many, in order, none of them twice.

    JAX would take all of them in each process. Empty where there is nothing to share out: one process, no GPU, or a run
    on CPUs. Raises ConfigError where the GPUs cannot be shared alike.
    """
    on_cpu = any(argument.partition("=")[0] == "--cpu-devices" for argument in command)
    platforms = environ.get("JAX_PLATFORMS", "")
    gpus = _gpus(environ)
    if processes == 1 or on_cpu or not gpus or (platforms and not {"cuda", "gpu"} & set(platforms.split(","))):
        return []
    if twice := [name for name in dict.fromkeys(gpus) if gpus.count(name) > 1]:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES = {environ['CUDA_VISIBLE_DEVICES']} names {', '.join(twice)} more than once: two "
            "processes would have one GPU; name each once"
        )
    if len(gpus) % processes:
        raise ConfigError(
            f"launch --processes={processes}: the {len(gpus)} GPUs of this host cannot be shared alike, "
            f"{len(gpus)} mod {processes} = {len(gpus) % processes}: take a number of processes that divides it (1 "
            "drives all of them), or say with CUDA_VISIBLE_DEVICES which GPUs to take"
        )
    each = len(gpus) // processes
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * each : (i + 1) * each])} for i in range(processes)]


def _gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them; without it those that the driver has made files for."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(i) for i, _ in enumerate(path for path in devices.glob("nvidia*") if path.name[6:].isdecimal())]
    names = [name.strip() for name in visible.split(",")]
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))  # as CUDA reads it


def free_port() -> int:
    """A port of this host that nobody listens at just now."""
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return int(listening.getsockname()[1])


def workdir_of(command: Sequence[str]) -> Path:
    """What follows --workdir, the last of several. Raises ConfigError if nothing does, or nothing that is a path."""
    for argument, following in [*zip(command, [*command[1:], ""], strict=True)][::-1]:
        name, _, value = argument.partition("=")
        if name == "--workdir" and (found := value or following):
            if "://" in found:
                raise ConfigError(f"launch: --workdir={found} is an address; wanted a path, where logs can be written")
            return Path(found)
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

"""How a process joins the others of its run, and which devices it takes: decided before JAX starts."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from sharded_train.devices import RESERVE_FRACTION
from sharded_train.errors import ConfigError
from sharded_train.exits import Exit
from sharded_train.faults.config import DistributedConfig
from sharded_train.noise import has_driver, has_plugin, quiet_plugin


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say where a command runs."""
    add = parser.add_argument_group("where it runs").add_argument
    add("--cpu-devices", metavar="N", type=int, help="run on the CPU, as N virtual devices (of each process)")
    add("--coordinator", metavar="HOST:PORT", help="address of process 0, one of several processes")
    add("--num-processes", metavar="N", type=int, help="how many processes, with --coordinator")
    add("--process-id", metavar="I", type=int, help="which of them this is, from 0, with --coordinator")
    add(
        "--distributed",
        action="store_true",
        help="find the other processes as JAX can; by itself under srun and mpirun",
    )


def problems(args: argparse.Namespace) -> list[str]:
    """What is wrong with these options."""
    found = []
    three = {"--coordinator": args.coordinator, "--num-processes": args.num_processes, "--process-id": args.process_id}
    missing = [name for name, value in three.items() if value is None]
    if args.cpu_devices is not None and args.cpu_devices < 1:
        found.append(f"--cpu-devices={args.cpu_devices}: must be at least 1")
    if 0 < len(missing) < 3:
        given = ", ".join(name for name in three if name not in missing)
        found.append(f"{given} without {', '.join(missing)}: {', '.join(three)} go together")
    if args.coordinator is not None and args.distributed:
        found.append("--coordinator and --distributed: say where the processes are, or let JAX find them, not both")
    if args.coordinator is not None and not re.fullmatch(r".+:\d{1,5}", args.coordinator):
        found.append(f"--coordinator={args.coordinator}: wanted HOST:PORT, such as node0:8476")
    if not missing and not 0 <= args.process_id < args.num_processes:
        found.append(
            f"--process-id={args.process_id}: must be from 0 to --num-processes - 1 = {args.num_processes - 1}"
        )
    return found


def number_asked(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> int | None:
    """How many devices the options mean, of all processes; None where only JAX can tell."""
    if args.cpu_devices is None or args.distributed or launched_by(environ):
        return None
    return args.cpu_devices * (args.num_processes or 1)


def start(args: argparse.Namespace, waits: DistributedConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Choose the devices and join the other processes, if there are any. Nothing may have used a device before."""
    import jax

    # What a rehearsal leaves to NCCL and CUDA is left to them in training too; JAX itself would leave a quarter.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{1 - RESERVE_FRACTION:.2f}")
    if args.cpu_devices is not None:
        os.environ.setdefault("PJRT_NPROC", _threads_for(args.cpu_devices))
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    if args.cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    elif has_plugin() and not has_driver() and not platforms:
        jax.config.update("jax_platforms", "cpu")  # else JAX tries the plugin and tells at length why it cannot
    if args.coordinator is not None:
        _keep_stdout()
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id, **_seconds(waits))
        return
    launcher = launched_by(environ)
    if launcher is None and not args.distributed:
        with quiet_plugin():
            jax.devices()
        return
    _say(f"joining the other processes: {launcher or '--distributed'}", environ)
    _keep_stdout()
    try:
        jax.distributed.initialize(**_seconds(waits))
    except ValueError as error:
        raise ConfigError(
            f"{launcher or '--distributed'}: JAX cannot tell where the other processes are ({error}); give "
            "--coordinator, --num-processes and --process-id"
        ) from error


def _seconds(waits: DistributedConfig) -> dict[str, Any]:
    return {
        "heartbeat_timeout_seconds": waits.heartbeat_seconds,
        "initialization_timeout": waits.initialization_seconds,
        "shutdown_timeout_seconds": waits.shutdown_seconds,
    }


def leave(code: int) -> NoReturn:
    """Ends the process with `code`.

    One of several processes that has failed does not wait for the others at JAX's shutdown barrier: they are waiting
    for it in a collective.
    """
    jax = sys.modules.get("jax")
    if code not in (Exit.DONE, Exit.PREEMPTED) and jax is not None and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _threads_for(cpu_devices: int) -> str:
    """PJRT_NPROC: a collective holds a thread of XLA's CPU back end until all its devices are there, so one for each is
    needed, and some to work, however few the cores.
    """
    return str(cpu_devices + (os.cpu_count() or 1))


def virtual_devices(num_devices: int = 8) -> None:
    """Work on the CPU as so many virtual devices, in a notebook say. Nothing may have used a device before."""
    with quiet_plugin():
        import jax

    os.environ.setdefault("PJRT_NPROC", _threads_for(num_devices))
    jax.config.update("jax_num_cpu_devices", num_devices)
    without_gpu()
    if len(jax.devices()) != num_devices:
        raise ConfigError(f"virtual_devices({num_devices}): JAX has {len(jax.devices())} already; start anew")


def without_gpu() -> None:
    """Work on the CPU whatever there is. Nothing may have used a device before."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    with quiet_plugin():
        jax.devices()


def _keep_stdout() -> None:
    """What libraries print from C++ (Gloo greets every peer) goes to stderr, so that stdout is ours alone."""
    if sys.__stdout__ is None or sys.stdout is not sys.__stdout__:
        return  # already somebody else's
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(ours, "w", buffering=1, encoding=sys.stdout.encoding)


def launched_by(environ: Mapping[str, str]) -> str | None:
    """The launcher that started this process as one of several, in words; None when it is alone.

    SLURM_NTASKS alone is not enough: a batch script has it too, and there it runs once, outside of srun's step.
    """
    for launcher, name in (("srun", "SLURM_STEP_NUM_TASKS"), ("Open MPI", "OMPI_COMM_WORLD_SIZE")):
        if int(environ.get(name, 1)) > 1:
            return f"one of {environ[name]} that {launcher} started ({name})"
    if int(environ.get("SLURM_NTASKS", 1)) > 1 and "SLURM_STEP_NUM_TASKS" not in environ:
        _say(
            f"SLURM gave this job {environ['SLURM_NTASKS']} tasks, but srun did not start this one: it runs alone",
            environ,
        )
    return None


def _say(text: str, environ: Mapping[str, str]) -> None:
    """Once for all processes that a launcher started."""
    if environ.get("SLURM_PROCID", environ.get("OMPI_COMM_WORLD_RANK", "0")) == "0":
        print(f"note: {text}", file=sys.stderr)

"""How a process joins the others of its run, and which devices it takes: decided before JAX starts."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping

from sharded_train.errors import ConfigError


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


def start(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> None:
    """Choose the devices and join the other processes, if there are any. Nothing may have used a device before."""
    import jax

    if args.cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    if args.coordinator is not None:
        _keep_stdout()
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
        return
    launcher = launched_by(environ)
    if launcher is None and not args.distributed:
        return
    _say(f"joining the other processes: {launcher or '--distributed'}", environ)
    _keep_stdout()
    try:
        jax.distributed.initialize()
    except ValueError as error:
        raise ConfigError(
            f"{launcher or '--distributed'}: JAX cannot tell where the other processes are ({error}); give "
            "--coordinator, --num-processes and --process-id"
        ) from error


def without_gpu() -> None:
    """Work on the CPU whatever there is. Nothing may have used a device before."""
    import jax

    jax.config.update("jax_platforms", "cpu")


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

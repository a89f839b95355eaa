"""Faults in numbers: kills, damages and saves, as many as are asked for. Prints a table in Markdown.

    python benchmarks/soak.py kill --trials=200 --processes=1
    python benchmarks/soak.py kill --trials=20 --processes=2 --train      # a real run of the command
    python benchmarks/soak.py damage --trials=200
    python benchmarks/soak.py memory --saves=200

kill: a run is started, killed with SIGKILL (one of its processes; a supervisor would stop the others, as is done here)
at a random moment, or at one when something in its folder of checkpoints is being written, published or removed, and
started again, until it is done; then the next run begins. After every kill all that was verified before must be there;
at the end the last checkpoint must have the digests of one of a run that nobody has disturbed. A trial is one kill.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import checkpoint_faults  # noqa: E402
from sharded_train.checkpoint import files, record  # noqa: E402
from sharded_train.checkpoint.errors import Damage  # noqa: E402

CONFIG = """
def get_config():
    return {
        "model": {"vocab_size": 300, "d_model": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "d_ff": 64},
        "mesh": {"data": 4, "tensor": 1},
        "zero": {"stage": 3},
        "precision": {"recipe": "fp32"},
        "data": {"files": ["%s/*.txt"]},
        "train": {"num_steps": 40, "global_batch_size": 8, "sequence_length": 32},
        "checkpoint": {"every": 2, "keep": 2},
        "log": {"every": 5, "tensorboard": False},
    }
"""
TOY_STEPS = 60
MOMENTS = ("any time", "start", "writing", "publishing", "removing")


class Command:
    """How a run of several processes is started in a folder: the toy of checkpoint_child, or `sharded-train train`."""

    def __init__(self, num_processes: int, folder: Path, *, train: bool):
        self.num_processes, self._folder, self._train = num_processes, folder, train
        self.last_step = 40 if train else TOY_STEPS
        if train:
            (folder / "text").mkdir()
            rng = random.Random(0)
            for i in range(30):
                words = rng.choices(["mesh", "shard", "gather", "stage", "step", "tick", "loss", "norm"], k=200)
                (folder / "text" / f"{i}.txt").write_text(" ".join(words))
            (folder / "config.py").write_text(CONFIG % (folder / "text"))

    def checkpoints(self, workdir: Path) -> Path:
        return workdir / "checkpoints"

    def start(self, workdir: Path) -> list[subprocess.Popen[bytes]]:
        with socket.socket() as listening:
            listening.bind(("localhost", 0))
            address = f"localhost:{listening.getsockname()[1]}"
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "PJRT_NPROC": "1", "JAX_PLATFORMS": "cpu"}
        with (workdir.parent / "log").open("ab") as log:
            return [
                subprocess.Popen(self._words(workdir, address, i), env=environ, stdout=log, stderr=log, cwd=ROOT)
                for i in range(self.num_processes)
            ]

    def _words(self, workdir: Path, address: str, index: int) -> list[str]:
        count = self.num_processes
        if not self._train:
            others = [address, str(count), str(index)] if count > 1 else []
            script = str(ROOT / "benchmarks/checkpoint_child.py")
            return [sys.executable, script, str(self.checkpoints(workdir)), str(self.last_step), *others]
        where = [f"--coordinator={address}", f"--num-processes={count}", f"--process-id={index}"] if count > 1 else []
        where += [f"--cpu-devices={4 // count}"]
        config = [
            f"--config={self._folder}/config.py",
            f"--workdir={workdir}",
            "--config.distributed.heartbeat_seconds=10",
        ]
        return [sys.executable, "-m", "sharded_train", "train", *config, *where]


def verified_steps(directory: Path) -> list[int]:
    """Steps whose records and files are as they were verified."""
    found = []
    for step in files.numbered(directory):
        with contextlib.suppress(Damage, FileNotFoundError):
            record.check_files(directory / str(step), record.read(directory / str(step), step))
            found.append(step)
    return found


def kill(
    num_trials: int,
    num_processes: int,
    seconds: float,
    *,
    train: bool,
    rng: random.Random,
    counts: collections.Counter[str] | None = None,
) -> dict[str, Any]:
    """Trials until there are enough, or the time is over; those until an error are in `counts` all the same."""
    counts = collections.Counter() if counts is None else counts
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        command = Command(num_processes, folder, train=train)
        (folder / "undisturbed").mkdir()
        lifetime = -time.monotonic()
        wait_for(command.start(folder / "undisturbed/run"), folder / "undisturbed/log")
        lifetime += time.monotonic()
        directory = command.checkpoints(folder / "undisturbed/run")
        expected = record.read(directory / str(command.last_step)).leaves
        while counts["kills"] < num_trials and time.monotonic() - begun < seconds:
            workdir = folder / f"run-{counts['runs']}/run"
            workdir.parent.mkdir()
            in_a_row = 0
            while True:
                enough = counts["kills"] >= num_trials or in_a_row >= 12  # then it may come to its end
                moment = "never" if enough else rng.choice(MOMENTS)
                if not one_life(command, workdir, moment, lifetime, rng, counts):
                    break
                in_a_row += 1
            found = record.read(command.checkpoints(workdir) / str(command.last_step)).leaves
            assert found == expected, f"{workdir}: the final state is another"
            leftovers = [path.name for path in command.checkpoints(workdir).iterdir() if not files.is_step(path.name)]
            assert not leftovers, leftovers
            counts["runs"] += 1
            counts["most kills in a run"] = max(counts["most kills in a run"], in_a_row)
            shutil.rmtree(workdir.parent)
    return {**counts, "seconds": round(time.monotonic() - begun)}


def one_life(
    command: Command, workdir: Path, moment: str, lifetime: float, rng: random.Random, counts: collections.Counter[str]
) -> bool:
    """Whether a start of the run was killed, and not done before; what it had verified is looked for again."""
    directory = command.checkpoints(workdir)
    processes = command.start(workdir)
    latest = 0
    until = time.monotonic() + rng.uniform(0, lifetime if moment != "start" else lifetime / 2)
    seen = 0
    wanted = rng.randrange(1, 12)
    while all(process.poll() is None for process in processes):
        names = os.listdir(directory) if directory.is_dir() else []
        latest = max([latest, *(int(name) for name in names if files.is_step(name))])
        if moment in ("any time", "start"):
            if time.monotonic() >= until:
                break
        elif moment != "never" and (signs(names, moment, latest, seen) or time.monotonic() > until + lifetime):
            seen = latest
            wanted -= 1
            if wanted <= 0:
                time.sleep(rng.uniform(0, 0.03))
                break
        time.sleep(0.001)
    if moment == "never" or any(process.poll() == 0 for process in processes):
        wait_for(processes, workdir.parent / "log")
        return False
    died = [process.returncode for process in processes if process.poll() is not None]
    assert not died, f"a process ended by itself: {died}\n{(workdir.parent / 'log').read_text()[-3000:]}"
    victim = rng.choice(processes)
    victim.kill()
    victim.wait()
    time.sleep(rng.uniform(0, 0.05))  # the others go on for a moment
    for process in processes:
        process.kill()
        process.wait()
    there = verified_steps(directory)
    assert max(there, default=0) >= latest, f"step {latest} was verified, and now there are {there}"
    broken = set(files.numbered(directory)) - set(there)
    assert not broken, f"published and not whole: {broken}"
    counts["kills"] += 1
    counts[moment] += 1
    print(dict(counts), file=sys.stderr, flush=True)
    return True


def signs(names: list[str], moment: str, latest: int, seen: int) -> bool:
    """Whether what is waited for is going on in the folder."""
    if moment == "writing":
        return any(files.SAVING in name for name in names)
    if moment == "removing":
        return any(files.DELETING in name for name in names)
    return latest > seen


def wait_for(processes: list[subprocess.Popen[bytes]], log: Path) -> None:
    codes = [process.wait() for process in processes]
    assert codes == [0] * len(codes), f"{codes}\n{log.read_text()[-3000:]}"


def damage(num_trials: int, rng: random.Random) -> dict[str, Any]:
    """Of three checkpoints the newest, or the newest two, are damaged; the newest that is whole must be used."""
    jax, state_of = _toy()
    from sharded_train.checkpoint import Checkpointer

    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as temporary:
        with contextlib.closing(Checkpointer(Path(temporary, "saved"))) as saved:
            for step in (1, 2, 3):
                saved.save(step, state_of(step), {})
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0))
        kinds = list(checkpoint_faults.kinds_of_files(saved.path(3)))
        while counts["damages"] < num_trials:
            copy = Checkpointer(Path(shutil.copytree(saved.directory, Path(temporary, "copy"))))
            damaged = (3,) if rng.random() < 0.7 else (3, 2)
            done: dict[int, str] = {}
            for step in damaged:
                while step not in done:
                    kind = rng.choice(list(checkpoint_faults.DAMAGES))
                    name = kinds[counts["damages"] % len(kinds)]
                    if (what := checkpoint_faults.damage(copy.path(step), name, kind, rng)) is not None:
                        done[step] = what
                counts["damages"] += 1
                counts[kind] += 1
            step, state, _ = copy.resume(copy.choose("auto"), abstract, lambda path, run: None)
            expected = max({1, 2, 3} - set(done))
            assert step == expected, f"{done}: went on from {step}"
            assert all(map(bool, jax.tree.leaves(jax.tree.map(lambda a, b: (a == b).all(), state, state_of(step)))))
            named = [said for said in copy.remarks if "is damaged and set aside" in said]
            assert len(named) == len(done), (done, named)
            shutil.rmtree(copy.directory)
    return {**counts, "kinds of files": len(kinds)}


def memory(num_saves: int) -> dict[str, Any]:
    """Resident memory of the process over many saves of 16 MB."""
    _toy()
    import jax.numpy as jnp

    from sharded_train.checkpoint import Checkpointer

    sizes = {}
    state = {"w": jnp.zeros((16, 1 << 18), jnp.float32)}
    with tempfile.TemporaryDirectory() as temporary, contextlib.closing(Checkpointer(Path(temporary))) as saves:
        for step in range(1, num_saves + 1):
            saves.save(step, state, {})
            saves.wait()
            if step % (num_saves // 10) == 0 or step == 1:
                sizes[f"MB after {step}"] = _resident() >> 20
    return {**sizes, "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _toy() -> tuple[Any, Callable[[int], Any]]:
    import jax

    jax.config.update("jax_platforms", "cpu")
    import jax.numpy as jnp

    def state_of(step: int) -> Any:
        w = jax.random.normal(jax.random.key(step), (128, 64))
        return {"params": {"w": w, "b": jnp.full(3, step, jnp.bfloat16)}, "step": jnp.int32(step)}

    return jax, state_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kill", "damage", "memory"])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--saves", type=int, default=200)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--train", action="store_true", help="kill: the command itself, not a loop that only saves")
    parser.add_argument("--seconds", type=float, default=1e9, help="kill: begin no other run after so long")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    if args.what == "kill":
        counts: collections.Counter[str] = collections.Counter()
        begun = time.monotonic()
        try:
            kill(args.trials, args.processes, args.seconds, train=args.train, rng=rng, counts=counts)
        finally:  # what is found wrong at the hundredth kill does not undo the ninety-nine before
            show({**counts, "seconds": round(time.monotonic() - begun)})
        return
    show(damage(args.trials, rng) if args.what == "damage" else memory(args.saves))


def show(found: dict[str, Any]) -> None:
    print("| " + " | ".join(map(str, found)) + " |\n|" + "---|" * len(found))
    print("| " + " | ".join(map(str, found.values())) + " |", flush=True)


if __name__ == "__main__":
    main()

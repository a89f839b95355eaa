"""Command to first step: `sharded-train train` on configs/bench_20m.py beside the hand-written step, in turn.

    python benchmarks/startup.py [--rounds 3] [--json OUT]

Seconds from the start of the process to the line that says that the first step has ended. The text is tokenized before,
since the hand-written step has none to read; nothing is compiled before. `again` is a second start in the same workdir,
which finds its compiled program. The parts are those that `train` prints; what is not in them is Python's own start.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "bench_20m.py"
STICK = """
import sys; sys.path.insert(0, {folder!r})
import jax; jax.config.update("jax_platforms", "cpu")
import numpy as np, jax.numpy as jnp, hand_written
step, state, put = hand_written.train_step(jnp.float32, 1, 1)
tokens = np.random.default_rng(0).integers(0, hand_written.VOCAB, (hand_written.ROWS, hand_written.SEQ + 1))
float(step(state, put(tokens))[1]); print("start-up", flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args()
    found: dict[str, list[float]] = {"hand_written": [], "ours": [], "ours, again": []}
    parts: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        cache = f"--config.data.cache_dir={folder}/data"
        subprocess.run([*command("data"), cache], check=True, stdout=subprocess.DEVNULL)
        for number in range(args.rounds):
            found["hand_written"].append(until("start-up", [sys.executable, "-c", stick()])[0])
            run = [*command("train"), cache, f"--workdir={folder}/{number}", "--cpu-devices=1"]
            for who, steps in (("ours", 1), ("ours, again", 2)):
                seconds, line = until(
                    "start-up", [*run, "--config.train.num_steps=2", f"--config.train.stop_at={steps}"]
                )
                found[who].append(seconds)
                parts.append(f"{who}: {line}")
    for line in parts[-2:]:
        print(line)
    for who, seconds in found.items():
        print(f"{who:13} {statistics.median(seconds):5.1f} s   ({', '.join(f'{s:.1f}' for s in seconds)})")
    more = [ours - its for ours, its in zip(found["ours"], found["hand_written"], strict=True)]
    print(f"ours - hand_written {statistics.median(more):+.1f} s, median of {args.rounds} rounds")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def command(verb: str) -> list[str]:
    changes = ("train.num_steps=2", "evaluate.every=0", "schedule.warmup_steps=1") if verb == "train" else ()
    return [
        *(sys.executable, "-m", "sharded_train", verb, f"--config={CONFIG}"),
        *(f"--config.{change}" for change in changes),
    ]


def stick() -> str:
    return STICK.format(folder=str(ROOT / "benchmarks"))


def until(words: str, command: Sequence[str]) -> tuple[float, str]:
    """Seconds from the start of a command to its line with these words, and the line; the command is waited for."""
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if re.search(words, line):
                seconds, found = time.perf_counter() - begin, line.strip()
                process.stdout.read()
                break
        else:
            raise SystemExit(f"{' '.join(command)} never said {words!r}")
    return seconds, found


if __name__ == "__main__":
    main()

"""Our train step beside a hand-written one on configs/bench_20m.py, window by window in turn.

    python benchmarks/step_time.py [--layouts 1x1 8x1 4x2] [--dtypes fp32 bf16] [--windows 7] [--steps 3]

Each contender is a process of its own that works only when told to. After a warm-up they run windows of steps in turn,
so that a machine that slows down slows both; what counts is the median of the ratios of neighbouring windows, with the
interval that holds the middle 90 % of medians of resampled ratios. Seconds are shown for orientation only.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
CONTENDERS = ("ours", "hand_written")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=["1x1", "8x1", "4x2"], metavar="DATAxTENSOR")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps in a window")
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--worker", nargs=3, metavar=("WHO", "LAYOUT", "DTYPE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(*args.worker, steps=args.steps)
        return
    rows = []
    print("layout  dtype  wall ratio [90 % interval]   CPU ratio    ours s/step  stick s/step  memory  start-up")
    for layout in args.layouts:
        for dtype in args.dtypes:
            rows.append(compare(layout, dtype, args.windows, args.steps))
            print(in_words(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


def compare(layout: str, dtype: str, windows: int, steps: int) -> dict[str, Any]:
    """Both contenders' windows in turn, the order swapped every time."""
    workers = {who: start(who, layout, dtype, steps) for who in CONTENDERS}
    begun = {who: ask(worker) for who, worker in workers.items()}
    found: dict[str, list[dict[str, float]]] = {who: [] for who in CONTENDERS}
    for window in range(windows):
        for who in CONTENDERS if window % 2 else reversed(CONTENDERS):
            found[who].append(ask(workers[who]))
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    wall, cpu = (np.array([[w[kind] for w in found[who]] for who in CONTENDERS]) for kind in ("wall", "cpu"))
    ratios = wall[0] / wall[1]
    resampled = np.median(np.random.default_rng(0).choice(ratios, (2000, windows)), axis=1)
    return {
        "layout": layout,
        "dtype": dtype,
        "wall_ratio": float(np.median(ratios)),
        "interval": np.percentile(resampled, [5, 95]).tolist(),
        "cpu_ratio": float(np.median(cpu[0] / cpu[1])),
        "seconds": np.median(wall, axis=1).tolist(),
        "memory_ratio": found["ours"][-1]["memory"] / found["hand_written"][-1]["memory"],
        "startup": [begun[who]["startup"] for who in CONTENDERS],
    }


def in_words(row: dict[str, Any]) -> str:
    (low, high), (ours, stick), (our_start, its_start) = row["interval"], row["seconds"], row["startup"]
    return (
        f"{row['layout']:6}  {row['dtype']:5}  {row['wall_ratio']:.3f} [{low:.3f}, {high:.3f}]        "
        f"{row['cpu_ratio']:.3f}        {ours:9.2f}  {stick:12.2f}  {row['memory_ratio']:6.2f}  "
        f"{our_start:.1f}, {its_start:.1f}"
    )


def start(who: str, layout: str, dtype: str, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--steps", str(steps), "--worker", who, layout, dtype]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(worker: subprocess.Popen[str]) -> dict[str, Any]:
    """The worker's next answer: first of its start, then of one window for each line sent."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write("go\n")
    worker.stdin.flush()
    answer: dict[str, Any] = json.loads(worker.stdout.readline())
    return answer


def work(who: str, layout: str, dtype: str, *, steps: int) -> None:
    """One contender: a warm-up at the first line, then a window for each line."""
    sys.stdin.readline()
    begin = time.perf_counter()
    data, tensor = map(int, layout.split("x"))
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", data * tensor)
    rng = np.random.default_rng(0)
    step = _ours(dtype, data, tensor, rng) if who == "ours" else _hand_written(dtype, data, tensor, rng)
    step()
    report: dict[str, float] = {"startup": time.perf_counter() - begin}
    step()
    print(json.dumps(report), flush=True)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        report = {"wall": (time.perf_counter() - wall) / steps, "cpu": (time.process_time() - cpu) / steps}
        report["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps(report), flush=True)


def _ours(dtype: str, data: int, tensor: int, rng: np.random.Generator) -> Any:
    import jax

    from sharded_train import assemble, recipe
    from sharded_train.step import Batch

    changes = [f"--config.precision.recipe={dtype}", f"--config.mesh.tensor={tensor}"]
    changes.append(f"--config.zero.stage={3 if data > 1 else 0}")
    program = assemble.program_of(recipe.load(ROOT / "configs" / "bench_20m.py", changes))
    state = program.init(0)
    rows, seq = program.train.global_batch_size, program.train.sequence_length
    one = np.ones((rows, seq), np.int32)
    positions = np.broadcast_to(np.arange(seq, dtype=np.int32), (rows, seq))

    def step() -> None:
        nonlocal state
        tokens = rng.integers(0, program.model.vocab_size, (rows, seq + 1), dtype=np.int32)
        batch = jax.device_put(Batch(tokens[:, :-1], tokens[:, 1:], one, positions), program.batch_sharding)
        state, metrics = program.train_step(state, batch)
        float(metrics["loss"])

    return step


def _hand_written(dtype: str, data: int, tensor: int, rng: np.random.Generator) -> Any:
    import hand_written
    import jax.numpy as jnp

    jitted, state, put = hand_written.train_step({"fp32": jnp.float32, "bf16": jnp.bfloat16}[dtype], data, tensor)

    def step() -> None:
        nonlocal state
        tokens = rng.integers(0, hand_written.VOCAB, (hand_written.ROWS, hand_written.SEQ + 1), dtype=np.int32)
        state, loss = jitted(state, put(tokens))
        float(loss)

    return step


if __name__ == "__main__":
    main()

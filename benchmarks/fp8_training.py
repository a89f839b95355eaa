"""Training in FP8 on real text beside bf16: final losses, and what happens without scaling.

    python benchmarks/fp8_training.py [--recipes bf16 fp32 fp8_delayed fp8_current mxfp8 unscaled] [--seeds 0 1 2]
        [--steps 1000] [--width 256] [--rows 16] [--length 256] [--learning-rate 2e-3] [--json OUT] [--plots DIR]
    python benchmarks/fp8_training.py --curves JSON [JSON ...] [--plots DIR]
    python benchmarks/fp8_training.py --cost [--windows 9]

The model of configs/quickstart.py on one device, on the source code of Python's standard library; every recipe sees the
same batches in the same order, from the same initial weights. What is told is the mean loss of the last tenth of the
steps, relative to bf16's, of each seed and over seeds. `unscaled` is fp8_delayed with every scale held at 1; fp32,
if asked for, tells how far rounding alone takes a run from bf16's. `--curves` trains nothing: it takes what other runs
wrote with `--json`, which may have been side by side on a core each.

`--cost` times steps of bf16 and of the FP8 recipes in turn, in windows, and tells the median of their ratios: FP8 is
emulated on CPUs, and should cost at most 1.3 steps of bf16. `unscaled` quantises the same.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sharded_train import assemble, recipe
from sharded_train.calibrate import calibrated
from sharded_train.data.loader import Loader
from sharded_train.data.prepare import TextData
from sharded_train.step import Batch, Program

ROOT = Path(__file__).parent.parent
Curves = dict[str, dict[str, list[float]]]  # losses of the steps, by recipe and seed
RECIPES = ("bf16", "fp32", "fp8_delayed", "fp8_current", "mxfp8", "unscaled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=[name for name in RECIPES if name != "fp32"], choices=RECIPES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--width", type=int, default=256, help="d_model; d_ff follows")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="the highest; fewer tokens a step want less")
    parser.add_argument("--workdir", type=Path, default=Path("runs/fp8_training"), help="the tokenized text")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--windows", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write curves here, after every run")
    parser.add_argument("--curves", nargs="+", type=Path, help="files of --json: tell of these, train nothing")
    parser.add_argument("--plots", type=Path, help="a folder: draw fp8_loss.svg and fp8_beside.svg here")
    args = parser.parse_args()
    if args.cost:
        cost(args)
        return
    curves = read(args.curves) if args.curves else train(args)
    tell(curves)
    if args.plots:
        draw_into(args.plots, curves)


def train(args: argparse.Namespace) -> Curves:
    curves: Curves = {name: {} for name in args.recipes}
    for seed in args.seeds:
        for name in args.recipes:
            begun = time.perf_counter()
            curves[name][str(seed)] = trained(name, seed, args)
            last = mean_of_last(curves[name][str(seed)])
            print(f"seed {seed}  {name:11}  {last:.4f}  ({time.perf_counter() - begun:.0f} s)", flush=True)
            if args.json:
                settings = {k: str(v) for k, v in vars(args).items()}
                args.json.write_text(json.dumps({"settings": settings, "curves": curves}))
    return curves


def read(paths: list[Path]) -> Curves:
    """Of all files together, which must be of the same model, text and schedule."""
    curves: Curves = {}
    files = [json.loads(path.read_text()) for path in paths]
    for name in ("steps", "width", "rows", "length", "learning_rate"):
        found = {file["settings"][name] for file in files}
        if len(found) > 1:
            raise SystemExit(f"these runs cannot be compared: their {name} are {', '.join(sorted(found))}")
    for file in files:
        for name, seeds in file["curves"].items():
            curves[name] = curves.get(name, {}) | seeds
    return {name: curves[name] for name in RECIPES if name in curves}


def tell(curves: Curves) -> None:
    print(f"\n{'last tenth':11}  mean loss  beside bf16  (each seed)")
    reference = curves.get("bf16", {})
    for name, seeds in curves.items():
        paired = [seed for seed in seeds if seed in reference]
        each = [100 * (mean_of_last(seeds[seed]) / mean_of_last(reference[seed]) - 1) for seed in paired]
        beside = f"{np.mean(each):+10.3f} %" if each else f"{'':12}"
        loss = np.mean([mean_of_last(curve) for curve in seeds.values()])
        seed_by_seed = ", ".join(f"{seed}: {percent:+.3f} %" for seed, percent in zip(paired, each, strict=True))
        print(f"{name:11}  {loss:9.4f}  {beside}  ({seed_by_seed})")


def draw_into(folder: Path, curves: Curves, points: int = 20) -> None:
    """fp8_loss.svg and, beside bf16, fp8_beside.svg: means of each 20th of the steps, over the seeds that all have."""
    from sharded_train import draw

    seeds = set.intersection(*(set(those) for those in curves.values()))
    window = max(1, min(len(those[seed]) for those in curves.values() for seed in seeds) // points)
    binned = lambda curve: np.reshape(curve[: window * points], (points, window)).mean(1)
    means = {name: np.mean([binned(those[seed]) for seed in seeds], 0) for name, those in curves.items()}
    steps = [window * (i + 1) for i in range(points)]
    title = f"FP8 beside bf16, {len(seeds)} seed{'s' if len(seeds) > 1 else ''}, means of {window} steps"
    labels = {"title": title, "xlabel": "step"}
    folder.mkdir(parents=True, exist_ok=True)
    bare: Any = {"metadata": dict.fromkeys(("Creator", "Date", "Format", "Type"))}  # no date, no addresses
    losses = {name: list(values) for name, values in means.items()}
    draw.plot(losses, steps, ylabel="loss", **labels).savefig(folder / "fp8_loss.svg", **bare)
    if "bf16" in means:
        close = {name: list(100 * (values / means["bf16"] - 1)) for name, values in means.items() if name != "unscaled"}
        draw.plot(close, steps, ylabel="loss above bf16's, %", **labels).savefig(folder / "fp8_beside.svg", **bare)


def program_of(name: str, seed: int, args: argparse.Namespace) -> Program:
    settings = {
        "precision.recipe": "fp8_delayed" if name == "unscaled" else name,
        "mesh.tensor": 1,
        "mesh.data": 1,
        "zero.stage": 0,
        "model.d_model": args.width,
        "model.d_ff": args.width * 11 // 4,
        "train.seed": seed,
        "train.num_steps": args.steps,
        "train.global_batch_size": args.rows,
        "train.sequence_length": args.length,
        "schedule.learning_rate": args.learning_rate,
    }
    overrides = [f"--config.{key}={value}" for key, value in settings.items()]
    return assemble.program_of(recipe.load(ROOT / "configs" / "quickstart.py", overrides))


def batches_of(program: Program, args: argparse.Namespace, seed: int) -> Loader:
    overrides = [f"--config.train.sequence_length={args.length}", f"--config.train.num_steps={args.steps}"]
    overrides += [f"--config.train.global_batch_size={args.rows}", "--config.train.seed=0"]
    asked = recipe.load(ROOT / "configs" / "quickstart.py", overrides)
    data: TextData = assemble.text_of(asked, args.workdir, lambda words: None)
    shape = (args.rows, args.length)
    return Loader(data.train, batch_shape=shape, sharding=program.batch_sharding, seed=seed, start_step=0)


def stepper(name: str, program: Program, seed: int, first: Batch) -> Callable[[Batch], float]:
    """A function that makes one step after another and returns their losses."""
    state = program.init(seed)
    if name == "fp8_delayed":
        state = calibrated(program, state, first)

    def step(batch: Batch) -> float:
        nonlocal state
        if name == "unscaled":
            state = state.replace(scaling=jax.tree.map(jnp.ones_like, state.scaling))
        state, metrics = program.train_step(state, batch)
        return float(metrics["loss"])

    return step


def trained(name: str, seed: int, args: argparse.Namespace) -> list[float]:
    """The loss of every step."""
    program = program_of(name, seed, args)
    with batches_of(program, args, seed) as batches:
        first = Batch(**next(batches))
        step = stepper(name, program, seed, first)
        return [step(first), *(step(Batch(**next(batches))) for _ in range(args.steps - 1))]


def mean_of_last(curve: list[float]) -> float:
    return float(np.mean(curve[-max(1, len(curve) // 10) :]))


def cost(args: argparse.Namespace) -> None:
    steps: dict[str, Any] = {}
    for name in ("bf16", "fp8_delayed", "fp8_current", "mxfp8"):
        program = program_of(name, 0, args)
        with batches_of(program, args, 0) as batches:
            batch = Batch(**next(batches))
        steps[name] = stepper(name, program, 0, batch)
        steps[name](batch)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for window in range(args.windows):
        for name in list(steps)[:: 1 if window % 2 else -1]:
            begun = time.process_time()
            for _ in range(3):
                steps[name](batch)
            seconds[name].append(time.process_time() - begun)
    for name in steps:
        ratios = np.array(seconds[name]) / np.array(seconds["bf16"])
        low, high = np.percentile(ratios, [10, 90])
        print(
            f"{name:11}  {np.median(ratios):.3f} CPU seconds of a bf16 step  (80 % of windows: {low:.3f} to {high:.3f})"
        )


if __name__ == "__main__":
    main()

"""The verbs of the command: what each needs, an example, and the function that does it."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from sharded_train import launch
from sharded_train.config import to_dict

if TYPE_CHECKING:
    from sharded_train.recipe import Recipe


def _recipe(args: argparse.Namespace, overrides: list[str], *, start: bool = True, check: bool = True) -> Recipe:
    """The recipe of --config, else the one that the run in --workdir was started with; then the overrides.

    Checked as far as it can be without devices, where `check` does not leave all of it to the verb; JAX is started only
    after that, unless `start` says that no device is needed. The verbs check the rest.
    """
    with launch.quiet_plugin():
        from sharded_train import recipe, workdir

    if args.config is not None:
        asked = recipe.load(args.config, overrides)
    else:
        # Reading a model needs no certain number of devices: data takes what there is, unless it is told otherwise.
        any_data = [] if any(o.startswith("--config.mesh.") for o in overrides) else ["--config.mesh.data=-1"]
        asked = recipe.from_dict(to_dict(workdir.read_recipe(args.workdir)), [*any_data, *overrides])
    if check and recipe.problems_of(asked, None):
        recipe.check(asked, launch.number_asked(args))  # says more, where it is known how many devices are meant
    if start:
        launch.start(args, asked.distributed)
    return asked


def _train(args: argparse.Namespace, overrides: list[str]) -> int:
    recipe = _recipe(args, overrides)
    from sharded_train.initial_weights import InitialWeights
    from sharded_train.train import train

    initial = None if args.init_from is None else InitialWeights(args.init_from, args.init_only, args.init_except)
    return train(
        recipe, args.workdir, accept_config_change=args.accept_config_change, resume=args.resume, initial=initial
    )


def _generate(args: argparse.Namespace, overrides: list[str]) -> int:
    recipe = _recipe(args, overrides)
    from sharded_train.generate import generate

    return generate(
        recipe,
        args.workdir,
        prompt=args.prompt,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        num_samples=args.num_samples,
        seed=args.seed,
        json=args.json,
    )


def _evaluate(args: argparse.Namespace, overrides: list[str]) -> int:
    recipe = _recipe(args, overrides)
    from sharded_train.evaluate import evaluate

    return evaluate(recipe, args.workdir, json=args.json)


def _show(args: argparse.Namespace, overrides: list[str]) -> int:
    recipe = _recipe(args, overrides, check=args.cluster is None)
    from sharded_train.show import show

    return show(recipe, cluster=args.cluster, json=args.json)


def _data(args: argparse.Namespace, overrides: list[str]) -> int:
    recipe = _recipe(args, overrides, start=False)
    from sharded_train.verbs.data import data

    return data(recipe, args.workdir, num_workers=args.workers, show=args.show, json=args.json)


def _rehearse(args: argparse.Namespace, overrides: list[str]) -> int:
    variants = args.compare or {str(args.config): []}
    recipes = {name: _recipe(args, [*overrides, *more], start=False, check=False) for name, more in variants.items()}
    launch.without_gpu()
    from sharded_train.verbs.rehearse import rehearse

    outputs = {
        kind: getattr(args, kind) for kind in ("json", "html", "hlo", "trace") if getattr(args, kind) is not None
    }
    return rehearse(recipes, args.cluster, outputs)


def _schedule(args: argparse.Namespace, overrides: list[str]) -> int:
    from sharded_train.verbs.schedule import schedule

    return schedule(
        args.schedule,
        stages=args.stages,
        microbatches=args.microbatches,
        chunks=args.chunks,
        costs=args.costs,
        activation_bytes=args.activation_bytes,
        pictures={kind: getattr(args, kind) for kind in ("svg", "html", "png") if getattr(args, kind) is not None},
        json=args.json,
    )


def _collectives(args: argparse.Namespace, overrides: list[str]) -> int:
    with launch.quiet_plugin():
        from sharded_train import recipe

    asked = recipe.load(args.config, overrides) if args.config is not None else recipe.from_dict({}, overrides)
    launch.start(args, asked.distributed)
    from sharded_train.verbs.collectives import collectives

    outputs = {kind: getattr(args, kind) for kind in ("json", "svg") if getattr(args, kind) is not None}
    sizes = {"least": args.min, "most": args.max, "repeat": args.repeat}
    return collectives(asked.mesh, axis=args.axis, outputs=outputs, **sizes)


def _doctor(args: argparse.Namespace, overrides: list[str]) -> int:
    with launch.quiet_plugin():
        from sharded_train import recipe

    asked = None if args.config is None else recipe.load(args.config, overrides)
    launch.start(args, (asked or recipe.Recipe()).distributed)
    from sharded_train.verbs.doctor import doctor

    return doctor(asked, args.workdir, json=args.json)


def _launch(args: argparse.Namespace, overrides: list[str]) -> int:
    from sharded_train.faults.supervisor import Policy
    from sharded_train.verbs.launch import launch as supervise

    return supervise(
        getattr(args, "command", []),
        Policy(args.max_restarts, args.same_step, args.backoff, grace=args.grace),
        processes=args.processes,
        hosts=args.hosts,
        host_index=args.host_index,
        coordinator=args.coordinator,
    )


def _goodput(args: argparse.Namespace, overrides: list[str]) -> int:
    with launch.quiet_plugin():
        from sharded_train.verbs.goodput import goodput

    return goodput(args.workdir, json=args.json)


def _checkpoints(args: argparse.Namespace, overrides: list[str]) -> int:
    with launch.quiet_plugin():
        from sharded_train.verbs.checkpoints import checkpoints

    return checkpoints(
        args.action,
        args.steps,
        args.workdir,
        keep=args.keep,
        keep_every=args.keep_every,
        set_aside=args.set_aside,
        json=args.json,
    )


def _precision(args: argparse.Namespace, overrides: list[str]) -> int:
    with launch.quiet_plugin():
        from sharded_train.verbs.precision import precision

    return precision(args.workdir, html=args.html, json=args.json)


@dataclasses.dataclass(frozen=True)
class Verb:
    """One verb of the command. `needs` are its required options; one of several where they are joined by "or".

    One without a config takes numbers alone; one without devices is not told where it runs.
    """

    summary: str
    example: str
    needs: tuple[str, ...]
    run: Callable[[argparse.Namespace, list[str]], int]
    has_config: bool = True
    has_devices: bool = True


VERBS = {
    "train": Verb(
        "train a model; goes on from the last checkpoint when the workdir has one",
        "sharded-train train --config=configs/quickstart.py --workdir=runs/first --cpu-devices=8 "
        "--config.train.num_steps=100",
        ("--config", "--workdir"),
        _train,
    ),
    "generate": Verb(
        "write text with a trained model",
        "sharded-train generate --workdir=runs/quickstart --cpu-devices=8 --prompt='def main('",
        ("--workdir", "--prompt"),
        _generate,
    ),
    "evaluate": Verb(
        "loss and bits per byte of a trained model on the validation text",
        "sharded-train evaluate --workdir=runs/quickstart --cpu-devices=8",
        ("--workdir",),
        _evaluate,
    ),
    "show": Verb(
        "what a config means before it runs: mesh, parameters, bytes per device, FLOPs",
        "sharded-train show --config=configs/llama3_8b.py --cluster=1x8",
        ("--config or --workdir",),
        _show,
    ),
    "rehearse": Verb(
        "compile a config for a GPU cluster that is not there: does it fit, what is sent, how long at best",
        "sharded-train rehearse --config=configs/llama3_8b.py --cluster=h100:8x8 --config.mesh.tensor=8",
        ("--config", "--cluster"),
        _rehearse,
        has_devices=False,
    ),
    "data": Verb(
        "tokenize a run's text ahead and say what there is; --show=N prints rows as the model sees them",
        "sharded-train data --config=configs/quickstart.py --workdir=runs/quickstart",
        ("--config or --workdir",),
        _data,
    ),
    "schedule": Verb(
        "draw and time a pipeline schedule: bubble, microbatches in flight, sends, from numbers alone",
        "sharded-train schedule --stages=8 --microbatches=32 --schedule=interleaved --chunks=4 --costs=1,2,1",
        ("--stages", "--microbatches"),
        _schedule,
        has_config=False,
        has_devices=False,
    ),
    "collectives": Verb(
        "check and time the collectives over each axis of a mesh: what to run first on a new cluster",
        "sharded-train collectives --cpu-devices=8 --config.mesh.tensor=4 --max=256K",
        (),
        _collectives,
    ),
    "doctor": Verb(
        "look at versions, devices, links, other processes, clocks, limits and the disk: what is wrong, and its fix",
        "sharded-train doctor --workdir=runs/quickstart --cpu-devices=8",
        (),
        _doctor,
    ),
    "launch": Verb(
        "train as several supervised processes of this host: a fault stops all, and all go on from the last checkpoint",
        "sharded-train launch --processes=2 -- train --config=configs/quickstart.py --workdir=runs/two --cpu-devices=4",
        ("--processes",),
        _launch,
        has_config=False,
        has_devices=False,
    ),
    "checkpoints": Verb(
        "list, show, verify, diff, rollback or prune the checkpoints of a workdir",
        "sharded-train checkpoints verify --workdir=runs/quickstart",
        ("--workdir",),
        _checkpoints,
        has_config=False,
        has_devices=False,
    ),
    "goodput": Verb(
        "where a run's wall time went, over all its restarts",
        "sharded-train goodput --workdir=runs/quickstart",
        ("--workdir",),
        _goodput,
        has_config=False,
        has_devices=False,
    ),
    "precision": Verb(
        "what FP8 products saw, by layer and step: amax, scales, what saturates and what is lost",
        "sharded-train precision --workdir=runs/fp8 --html=precision.html",
        ("--workdir",),
        _precision,
        has_config=False,
        has_devices=False,
    ),
}

"""The command: `sharded-train VERB --config=FILE.py [--config.key=value ...]`, also `python -m sharded_train VERB`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from sharded_train import __version__, launch, options
from sharded_train.config import repeated, split_arguments, to_dict
from sharded_train.errors import ConfigError, did_you_mean
from sharded_train.exits import Exit
from sharded_train.faults import progress

if TYPE_CHECKING:
    from sharded_train.recipe import Recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code, see `exits.Exit`."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return Exit.CONFIG
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return Exit.INTERRUPTED


def command() -> NoReturn:
    """The command's process: `main`, and an end that waits for nobody."""
    progress.die_with_supervisor()
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = Exit.RETRYABLE
    launch.leave(code)


def _run(argv: list[str]) -> int:
    argv, launched = _after_dashes(argv)
    overrides, arguments = split_arguments(argv)
    if not arguments:
        raise ConfigError(f"which verb? One of {', '.join(VERBS)}; `sharded-train --help` tells them apart")
    name = arguments[0]
    if name.startswith("-") and name not in ("-h", "--help", "--version"):
        raise ConfigError(f"{name}: the verb comes first, as in: {VERBS['train'].example}")
    if not name.startswith("-") and name not in VERBS:
        raise ConfigError(f"{name}: no such verb{did_you_mean(name, VERBS)} The verbs are {', '.join(VERBS)}")
    parser, of_verb = _parsers()
    args, unknown = parser.parse_known_args(arguments)
    verb = VERBS[args.verb]
    problems = [*_unknown(unknown, of_verb[args.verb]), *_missing(args, verb), *options.problems(args)]
    problems += [] if verb.has_config else [f"{o}: {args.verb} has no config" for o in overrides]
    problems += launch.problems(args) if verb.has_devices else []
    if launched is not None:
        args.command = launched
        problems += [f"{args.verb}: takes no command after --"] if args.verb != "launch" else []
    if problems:
        raise ConfigError(problems)
    for note in repeated(overrides):
        print(f"note: {note}", file=sys.stderr)
    return verb.run(args, overrides)


def _after_dashes(argv: list[str]) -> tuple[list[str], list[str] | None]:
    """The arguments before a --, and those after it, if there is one."""
    if "--" not in argv:
        return argv, None
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


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
    if check:
        recipe.check(asked, None)
    if start:
        launch.start(args, asked.distributed)
    return asked


def _train(args: argparse.Namespace, overrides: list[str]) -> int:
    recipe = _recipe(args, overrides)
    from sharded_train.train import train

    return train(recipe, args.workdir, accept_config_change=args.accept_config_change)


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
    recipe = _recipe(args, overrides)
    from sharded_train.show import show

    return show(recipe, cluster=args.cluster, json=args.json)


def _data(args: argparse.Namespace, overrides: list[str]) -> int:
    recipe = _recipe(args, overrides, start=False)
    from sharded_train.data_verb import data

    return data(recipe, args.workdir, num_workers=args.workers, show=args.show, json=args.json)


def _rehearse(args: argparse.Namespace, overrides: list[str]) -> int:
    variants = args.compare or {str(args.config): []}
    recipes = {name: _recipe(args, [*overrides, *more], start=False, check=False) for name, more in variants.items()}
    launch.without_gpu()
    from sharded_train.rehearse_verb import rehearse

    outputs = {
        kind: getattr(args, kind) for kind in ("json", "html", "hlo", "trace") if getattr(args, kind) is not None
    }
    return rehearse(recipes, args.cluster, outputs)


def _schedule(args: argparse.Namespace, overrides: list[str]) -> int:
    from sharded_train.schedule_verb import schedule

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


def _launch(args: argparse.Namespace, overrides: list[str]) -> int:
    from sharded_train.faults.supervisor import Policy
    from sharded_train.launch_verb import launch as supervise

    return supervise(
        getattr(args, "command", []),
        Policy(args.max_restarts, args.same_step, args.backoff, grace=args.grace),
        processes=args.processes,
        hosts=args.hosts,
        host_index=args.host_index,
        coordinator=args.coordinator,
    )


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
    "launch": Verb(
        "train as several supervised processes of this host: a fault stops all, and all go on from the last checkpoint",
        "sharded-train launch --processes=2 -- train --config=configs/quickstart.py --workdir=runs/two --cpu-devices=4",
        ("--processes",),
        _launch,
        has_config=False,
        has_devices=False,
    ),
}


class _Parser(argparse.ArgumentParser):
    """Errors go the way of all others, without the usage before them."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    """The whole command's parser, and each verb's."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="sharded-train",
        description="Trains transformer language models on JAX, sharded over a named device mesh.",
        epilog="`sharded-train VERB --help` lists a verb's options. Example:\n  " + VERBS["train"].example,
        formatter_class=raw,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sharded_train {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    of_verb = {}
    for name, verb in VERBS.items():
        sub = verbs.add_parser(
            name,
            help=verb.summary,
            description=f"{verb.summary[0].upper()}{verb.summary[1:]}.",
            epilog=f"Example:\n  {verb.example}",
            formatter_class=raw,
            allow_abbrev=False,
        )
        if verb.has_config:
            options.add_common(sub, verb.needs, has_devices=verb.has_devices)
        options.add_own(sub, name)
        of_verb[name] = sub
    return parser, of_verb


def _unknown(arguments: list[str], parser: _Parser) -> list[str]:
    """A problem for each argument that is no option; a word after an unknown option is taken for its value."""
    known = [option for option in parser._option_string_actions if option.startswith("--")]
    problems, before = [], ""
    for argument in arguments:
        name = argument.partition("=")[0]
        if "." in name and not name.endswith(".py"):
            hint = f"; options of the config are written --config.KEY=VALUE{did_you_mean(name, ['--config.'])}"
        else:
            hint = did_you_mean(name, known)
        if argument.startswith("-"):
            problems.append(f"{argument}: no such option{hint}")
        elif not before.startswith("--") or "=" in before:
            problems.append(f"{argument}: not expected here{hint}")
        before = argument
    return problems


def _missing(args: argparse.Namespace, verb: Verb) -> list[str]:
    """The problem that required options were not given, or nothing."""
    missing = []
    for need in verb.needs:
        names = [name.lstrip("-") for name in need.split(" or ")]
        if all(getattr(args, name) is None for name in names):
            missing.append(need)
    return [f"{args.verb} needs {' and '.join(missing)}; for example: {verb.example}"] if missing else []


if __name__ == "__main__":
    command()

"""The command: `sharded-train VERB --config=FILE.py [--config.key=value ...]`, also `python -m sharded_train VERB`."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from sharded_train import __version__, launch, options
from sharded_train.commands import VERBS, Verb
from sharded_train.config import repeated, split_arguments
from sharded_train.errors import ConfigError, did_you_mean
from sharded_train.exits import Exit, Failure, Unanswered
from sharded_train.faults import progress


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code, see `exits.Exit`."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return Exit.CONFIG
    except Failure as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except Unanswered as error:
        print(f"error: {error}\n{error.ADVICE}", file=sys.stderr)
        return Exit.RETRYABLE
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
    if args.verb == "launch" and launched is None and "train" in unknown:
        problems = [f"launch: the command that it starts stands after --, as in: {verb.example}"]
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

"""The options of the verbs."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sharded_train import launch
from sharded_train.config import split_arguments
from sharded_train.devices import DEVICES
from sharded_train.errors import ConfigError

COSTS = (
    "time of a stage's forward, backward of inputs, of weights, and of both in one go if not the sum (default 1,1,1; "
    "1,2,1 with full rematerialisation)"
)

CHECKPOINT_ACTIONS = {
    "list": "the steps there are, their sizes, when and by what they were saved, and what is set aside",
    "show": "[STEP] the record of a checkpoint and its arrays, with shapes and shardings (default: the newest)",
    "verify": "[STEP ...] read everything and compare it with what was saved (default: all)",
    "diff": "STEP STEP how two differ, array by array; a step, or the directory of a checkpoint",
    "rollback": "STEP set aside the checkpoints after STEP, so that the run goes on from there",
    "prune": "delete all but the last --keep and the multiples of --keep-every; --set-aside: what was set aside too",
}


def add_common(parser: argparse.ArgumentParser, needs: Sequence[str], *, has_devices: bool = True) -> None:
    """The options of every verb that has a config; `needs` are those that the verb requires."""
    needed = " ".join(needs)
    from_workdir = "--workdir" in needed and "--config" not in needs
    default = "; default: the config of the run in --workdir" if from_workdir else ""
    parser.add_argument("--config", metavar="FILE.py", type=_path, help=f"config file with a get_config(){default}")
    parser.add_argument(
        "--config.KEY",
        metavar="VALUE",
        dest="_documented_only",
        help="change one option, such as --config.train.seed=1; given twice, the last counts",
    )
    if "--workdir" in needed:
        parser.add_argument("--workdir", metavar="DIR", type=_path, help="the run's checkpoints, config and metrics")
    if has_devices:
        launch.add_options(parser)


def add_own(parser: argparse.ArgumentParser, verb: str) -> None:
    """The options that one verb alone has, or gives a meaning of its own."""
    add = parser.add_argument
    if verb == "train":
        add("--accept-config-change", action="store_true", help="go on in a workdir that another config started")
        add(
            "--resume",
            metavar="HOW",
            type=_resume,
            default="auto",
            help="auto: from the newest verified checkpoint, if there is one (default); must: there has to be one; "
            "never: begin at step 0, set aside what there is; STEP: from that one, set aside those after it",
        )
        add("--init-from", metavar="DIR", type=_place, help="weights of step 0: a checkpoint, or a workdir's newest")
        add(
            "--init-only",
            metavar="NAMES",
            type=_names,
            help="of these weights only, such as layers/*",
        )
        add(
            "--init-except",
            metavar="NAMES",
            type=_names,
            help="of all weights but these, such as head*,embed*",
        )
    if verb == "launch":
        number = _at_least(int, 1)
        add("--processes", metavar="N", type=number, help="how many processes, on this host")
        add("--max-restarts", metavar="N", type=_at_least(int, 0), default=100, help="of them all (default 100)")
        add(
            "--same-step",
            metavar="N",
            type=number,
            default=3,
            help="failures at one step, with none beyond it in between, after which it is given up (default 3)",
        )
        add(
            "--backoff",
            metavar="S",
            type=_at_least(float, 0),
            default=1.0,
            help="seconds before the first restart (default 1)",
        )
        add(
            "--grace",
            metavar="S",
            type=_at_least(float, 0),
            default=120.0,
            help="seconds that others may take to end too",
        )
        add("--hosts", metavar="H", type=number, default=1, help="how many hosts there are, each with its own launch")
        add("--host-index", metavar="I", type=_at_least(int, 0), default=0, help="which of them this is, from 0")
        add("--coordinator", metavar="HOST:PORT", help="with several hosts: an address of host 0")
        parser.usage = f"{parser.format_usage().removeprefix('usage: ').rstrip()} -- train ..."
        return
    if verb == "generate":
        add("--prompt", metavar="TEXT", help="the text to go on from")
        add("--max-tokens", metavar="N", type=_at_least(int, 1), default=100, help="tokens to write (default 100)")
        add("--temperature", metavar="X", type=_at_least(float, 0), default=1.0, help="0: the likeliest (default 1)")
        add("--top-k", metavar="K", type=_at_least(int, 1), help="choose among the K likeliest tokens only")
        add("--num-samples", metavar="N", type=_at_least(int, 1), default=1, help="texts to write (default 1)")
        add("--seed", metavar="N", type=_at_least(int, 0, 2**32 - 1), default=0, help="of the sampling (default 0)")
    if verb == "show":
        add(
            "--cluster",
            metavar="[KIND:]HOSTSxDEVICES",
            help="lay out a cluster that is not there, such as 8x8; h100:8x8 is the same, as the kind changes nothing",
        )
    if verb == "data":
        add("--show", metavar="N", type=_at_least(int, 1), help="print the rows of the first N samples of training")
        add(
            "--workers",
            metavar="N",
            type=_at_least(int, 1),
            help="processes that tokenize (default: one for each core)",
        )
    if verb == "checkpoints":
        add_checkpoints(parser)
    if verb in ("goodput", "precision"):
        add("--workdir", metavar="DIR", type=_path, help="of the run")
    if verb == "precision":
        add("--html", metavar="OUT", type=_path, help="write heat maps by layer and step as one page")
    if verb == "schedule":
        number = _at_least(int, 1)
        add("--stages", metavar="P", type=number, help="devices along the pipeline axis")
        add("--microbatches", metavar="M", type=number, help="microbatches of a step")
        add("--schedule", metavar="NAME", default="1f1b", help="gpipe, 1f1b (default), interleaved or zero_bubble")
        add(
            "--chunks",
            metavar="V",
            type=number,
            help="chunks of layers a stage (default 1, or 2 of a schedule that uses them)",
        )
        add("--costs", metavar="F,B,W", type=_costs, default=(1.0, 1.0, 1.0), help=COSTS)
        add("--activation-bytes", metavar="N", type=number, help="bytes of one send, to count bytes as well")
        for kind in ("svg", "html", "png"):
            add(f"--{kind}", metavar="FILE", type=_path, help=f"write the picture as {kind.upper()}")
    if verb == "doctor":
        add("--workdir", metavar="DIR", type=_path, help="also: can it be written, how fast, how much room is left")
    if verb == "collectives":
        add("--axis", metavar="NAME", help="over this axis only (default: each that has several devices)")
        add("--min", metavar="BYTES", type=_bytes, default=2**12, help="smallest size, such as 4K (default)")
        add("--max", metavar="BYTES", type=_bytes, help="largest size (default 4M on CPUs, 1G on GPUs)")
        add("--repeat", metavar="N", type=_at_least(int, 1), default=20, help="times that each is timed (default 20)")
        add("--json", metavar="OUT", type=_path, help="write it as JSON, which rehearse can take; - is stdout")
        add("--svg", metavar="OUT", type=_path, help="draw bandwidth over size")
    elif verb == "rehearse":
        add(
            "--cluster", metavar="KIND:HOSTSxDEVICES", help=f"{', '.join(DEVICES)}, or file:SPEC.toml; such as h100:8x8"
        )
        add(
            "--compare",
            metavar="'A | B'",
            type=_variants,
            help="several sets of --config.KEY=VALUE, put side by side; of files --json alone",
        )
        add("--json", metavar="OUT", type=_path, help="write all that is found as JSON; - is stdout")
        add("--html", metavar="OUT", type=_path, help="write it as one page with the pictures; of one program")
        add("--hlo", metavar="OUT", type=_path, help="write the compiled program's text; of one program")
        add(
            "--trace",
            metavar="OUT",
            type=_path,
            help="write the timeline for Perfetto or chrome://tracing; of one program",
        )
    elif verb != "train":
        add("--json", action="store_true", help="print JSON")


def add_checkpoints(parser: argparse.ArgumentParser) -> None:
    """The actions of `checkpoints`, and what they want to know."""
    add, number = parser.add_argument, _at_least(int, 1)
    words = "; ".join(f"{action}: {text}" for action, text in CHECKPOINT_ACTIONS.items())
    add("action", metavar="ACTION", choices=list(CHECKPOINT_ACTIONS), help=words)
    add("steps", metavar="STEP", nargs="*", help="of the checkpoints that are meant")
    add("--workdir", metavar="DIR", type=_path, help="of the run")
    add("--keep", metavar="K", type=number, default=3, help="prune: keep the last K (default 3)")
    add("--keep-every", metavar="M", type=number, help="prune: keep those of steps that are multiples of M too")
    add("--set-aside", action="store_true", help="prune: delete what was set aside as damaged or rolled back too")


def problems(args: argparse.Namespace) -> list[str]:
    """What is wrong with a verb's own options by themselves, to be told with all else."""
    if args.verb == "train" and args.init_from is None and (args.init_only or args.init_except):
        return ["--init-only and --init-except say which weights of --init-from are taken: give --init-from too"]
    if args.verb != "schedule":
        return []
    from sharded_train.schedules.build import default_chunks, make  # brings numpy, which the others need not await

    try:
        make(args.schedule, 1, 1, default_chunks(args.schedule))
    except ConfigError as error:
        return error.problems
    return []


def _costs(text: str) -> tuple[float, ...]:
    """F,B,W or F,B,W,BW: positive, but a backward may be all in B."""
    number = _at_least(float, 0)
    costs = tuple(map(number, text.split(",")))
    if len(costs) not in (3, 4) or min(*costs[:2], *costs[3:]) == 0:
        raise argparse.ArgumentTypeError(f"wanted F,B,W or F,B,W,BW, numbers of which W alone may be 0, got {text!r}")
    return costs


def _variants(text: str) -> dict[str, list[str]]:
    """Overrides by a name of their own: "--config.zero.stage=3 | --config.zero.stage=1" is "zero.stage=3" and ..."""
    found = {}
    for part in text.split("|"):
        overrides, others = split_arguments(shlex.split(part))
        if others:
            raise argparse.ArgumentTypeError(f"{others[0]}: between the bars stand --config.KEY=VALUE only")
        found[" ".join(o.removeprefix("--config.") for o in overrides) or "as it is"] = overrides
    if len(found) < 2:
        raise argparse.ArgumentTypeError(f"wanted two or more different ones with | between them, got {text!r}")
    return found


def _resume(text: str) -> str:
    if text not in ("auto", "never", "must") and not (text.isascii() and text.isdecimal() and len(text) < 18):
        raise argparse.ArgumentTypeError(f"wanted auto, never, must or a step, got {text!r}")
    return text if not text.isdecimal() else str(int(text))


def _names(text: str) -> tuple[str, ...]:
    if not all(names := tuple(text.split(","))):
        raise argparse.ArgumentTypeError(f"wanted names with commas between them, got {text!r}")
    return names


def _bytes(text: str) -> int:
    """4096, 4K, 16M or 1G."""
    match = re.fullmatch(r"([1-9]\d{0,11})([KMG]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"wanted a number of bytes such as 4096, 4K, 16M or 1G, got {text!r}")
    return int(match[1]) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[match[2]]


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    if "://" in text:
        hint = "such as that of a mounted bucket; checkpoints alone may lie at gs://, by config.checkpoint.dir"
        raise argparse.ArgumentTypeError(f"{text} is an address; wanted a path, {hint}")
    return Path(text)


def _place(text: str) -> Path | str:
    """A path, or the address of a place in a bucket."""
    return text if text.startswith("gs://") else _path(text)


def _at_least(number: Callable[[str], Any], least: int, most: float = 3.4e38) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = number(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            limit = "" if most > 2**63 else f" and at most {most}"
            raise argparse.ArgumentTypeError(f"wanted {number.__name__} of at least {least}{limit}, got {text!r}")
        return value

    return parse

"""One paragraph in plain words, from the facts only: does it fit, what bounds the step, the worst link, what to try.

What to try is ranked by the seconds that it could save at most: waiting that could be hidden or not be there, FLOPs
that the model does not need. These are bounds, read from one schedule; what a change brings, another rehearsal says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from sharded_train.rehearse import computed
from sharded_train.rehearse.timeline import exposed_seconds, link_words, seconds_in_words
from sharded_train.tables import bytes_in_words, new_table

WORTH = 0.01  # of a step: what saves less is not worth a line
MOST = 5  # things to try
UNLIKE = (
    "These times are not those of a program that fits: for one that does not, XLA orders its work by memory alone and "
    "hides no communication."
)
MUCH = 2**20  # bytes sent in a step, below which their dtype does not matter


@dataclasses.dataclass(frozen=True)
class Try:
    """Something to try: what it could save at most, in seconds of a step, and why."""

    what: str
    seconds: float
    why: str


def describe(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The section as JSON values, from the other sections of the facts."""
    tries = sorted(_tries(facts), key=lambda each: -each.seconds)
    step = facts["time"]["step_seconds"]
    fits = facts["memory"]["verdict"] != "does not fit"
    worth = [each for each in tries if each.seconds >= WORTH * step][:MOST] if fits else []
    words = [_fits(facts["memory"]), _step(facts["time"])]
    words += of_time(facts["time"]) if fits else [UNLIKE]
    if remedies := _remedies(facts["memory"]):
        words.append(f"Try first what makes it fit: {remedies}.")
    elif not fits:
        words.append("It cannot be made to fit by a setting that is known here: take more devices or a smaller model.")
    elif worth:
        saved = f"at most {seconds_in_words(worth[0].seconds)} of the step, {_percent(worth[0].seconds, step)}"
        words.append(f"Try first: {worth[0].what} ({worth[0].why}; {saved}).")
    else:
        words.append(f"Nothing that is counted here would save {_percent(WORTH, 1)} of the step.")
    return {"words": " ".join(words), "tries": [dataclasses.asdict(each) for each in worth]}


def of_time(time: Mapping[str, Any]) -> list[str]:
    """What a run is made of, what bounds it, and the worst link, in sentences."""
    return [_shares(time), *_worst_link(time)]


def tables(section: Mapping[str, Any]) -> list[Any]:
    """The section for a terminal."""
    found: list[Any] = [section["words"]]
    if len(section["tries"]) > 1:
        table = new_table("to try", "saves at most", "why", right=["saves at most"])
        for each in section["tries"]:
            table.add_row(each["what"], seconds_in_words(each["seconds"]), each["why"])
        found.append(table)
    return found


def _fits(memory: Mapping[str, Any]) -> str:
    return sentence(memory["words"])


def _remedies(memory: Mapping[str, Any]) -> str:
    """What would make it fit, where it does not."""
    return "" if memory["verdict"] == "fits" else "; ".join(memory.get("remedies", [])[:2])


def _step(time: Mapping[str, Any]) -> str:
    step, tokens = time["step_seconds"], time["tokens_per_second_per_device"]
    return (
        f"A step takes at least {seconds_in_words(step)}: MFU is at most {100 * time['mfu']:.1f} %, and each device "
        f"trains at most {tokens:,.0f} tokens a second."
    )


def _shares(time: Mapping[str, Any]) -> str:
    """What a step is made of, and what bounds it."""
    step, compute = time["step_seconds"], time["compute"]
    useful = compute["products"] + compute["attention"]
    return (
        f"Of it {_percent(useful, step)} is matrix products and attention, {_percent(compute['other'], step)} other "
        f"kernels, {_percent(exposed_seconds(time), step)} waiting for communication: {_bounded_by(time)}."
    )


def _bounded_by(time: Mapping[str, Any]) -> str:
    """What the largest part of a step is, in words."""
    compute = time["compute"]
    parts = {
        "FLOPs bound the step": compute["products"] + compute["attention"],
        "the memory's bandwidth bounds the step": compute["other"],
        "communication bounds the step": exposed_seconds(time),
    }
    return max(parts, key=lambda words: parts[words])


def _worst_link(time: Mapping[str, Any]) -> Iterator[str]:
    worst = max(time["exposed"], key=lambda row: row["exposed"], default=None)
    if worst is None:
        yield "Nothing is sent between devices."
    elif worst["exposed"] < WORTH * time["step_seconds"]:
        yield "Nearly all communication is hidden behind computing."
    else:
        yield (
            f"The worst link is {link_words(worst['link'])}, for {worst['axes']}: {seconds_in_words(worst['exposed'])} "
            f"of its {seconds_in_words(worst['seconds'])} of collectives are not hidden."
        )


def _tries(facts: Mapping[str, Any]) -> Iterator[Try]:
    time, work = facts["time"], facts["computed"]
    for row in time["exposed"]:
        axes, link = row["axes"].split(" x "), link_words(row["link"])
        why = f"waiting for {row['axes']} over {link} takes {seconds_in_words(row['exposed'])}"
        yield Try(_less_of(axes, row["link"], facts), row["exposed"], why)
    peak = time["peak"]
    explained = work["explained"]
    again = explained[computed.REMATERIALISED]
    if again:
        yield Try("a lighter train.remat, if memory allows", again / peak, _flops_why(again, work, "rematerialised"))
    hidden = explained[computed.HIDDEN]
    if hidden:
        why = _flops_why(hidden, work, "on pairs that the causal mask hides, since the mask comes as a bias")
        yield Try("attention with a mask that its kernel knows (causal, packed offsets)", hidden / peak, why)
    for row in work["fallbacks"]:
        yield Try(
            f"{row['asked']} for the products of {row['part']} that run as {row['kind'].removeprefix('products in ')}",
            row["flops"] / peak,
            f"{row['runs']:,} products of {row['shapes']} fell back",
        )


def _less_of(axes: list[str], link: str, facts: Mapping[str, Any]) -> str:
    """What makes less of an axis's communication, or a faster link carry it."""
    if "tensor" in axes:
        return (
            "tensor inside a host (mesh.order)" if link != "NVLink" else "a smaller mesh.tensor, data taking the rest"
        )
    if "data" in axes:
        return ", or ".join(_less_of_data(facts))
    return f"a smaller mesh.{axes[0]}, or its neighbours inside a host (mesh.order)"


def _less_of_data(facts: Mapping[str, Any]) -> Iterator[str]:
    """What this config could change about what data parallelism sends."""
    zero, num_microbatches = facts["config"]["zero"], facts["config"]["train"]["num_microbatches"]
    wide = [row for row in facts["wires"]["totals"] if row["op"] != "all-gather" and row["dtype"] == "f32"]
    sums = sum(row["wire_bytes"] for row in wide if "data" in row["axes"])
    if zero["stage"] == 3:
        yield "zero.stage = 2 or lower"
    if zero["stage"] >= 2 and num_microbatches > 1:
        yield f"fewer microbatches than {num_microbatches:,}"
    if sums > MUCH and zero["reduce_dtype"] == "float32":
        yield f"zero.reduce_dtype = bfloat16 (half of {in_gib(sums)} of sums)"
    if zero["stage"] and zero["group_size"] is None and facts["mesh"]["links"]["data"]["kind"] == "both":
        yield f"zero.group_size = {facts['mesh']['links']['data']['per_host']}, inside a host"
    yield "a larger global batch"


def _flops_why(flops: int, work: Mapping[str, Any], what: str) -> str:
    return f"{_percent(flops, work['products'])} of the products' FLOPs are {what}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def in_gib(n: float) -> str:
    """Bytes in words, of a sum that may not be whole."""
    return bytes_in_words(round(n))


def sentence(words: str) -> str:
    """The words with a capital and a full stop."""
    return f"{words[:1].upper()}{words[1:].rstrip('.')}."

"""A rehearsal as one HTML page that needs nothing else: no network, no script, pictures drawn in place.

The page says what the terminal's tables say, with pictures, in the order in which one asks: the verdict, does it fit,
what crosses which wire, what is computed, how long. All text is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sharded_train.rehearse import computed, fp8, page_time, page_wires
from sharded_train.rehearse.memory import counted
from sharded_train.rehearse.page_bars import Part, bar, legend
from sharded_train.rehearse.page_parts import figure, heading, paragraph, table
from sharded_train.rehearse.page_style import STYLE, series
from sharded_train.rehearse.timeline import exposed_seconds, seconds_in_words
from sharded_train.rehearse.verdict import sentence
from sharded_train.show.pipeline import image
from sharded_train.tables import bytes_in_words, flops_in_words, pipeline_title

LOOKS = {"fits": "good", "does not fit": "bad"}  # of the verdict; anything else is close
LARGEST = 12  # arrays in the table of the largest
TINY = 0.005  # of the memory in use, below which a part has no colour of its own


def page(facts: Mapping[str, Any], title: str, command: str = "") -> str:
    """The whole page from the facts of a rehearsal.

    `title` is what was rehearsed, such as the config's file, `command` how it was asked for.
    """
    body = "\n".join(
        [
            *_head(facts, title, command),
            *_pipeline(facts.get("pipeline")),
            *memory_section(facts["memory"]),
            *page_wires.section(facts["wires"], facts["time"]),
            *computed_section(facts["computed"]),
            *([paragraph(words)] if (words := fp8.words(facts.get("fp8"))) else []),
            *page_time.section(facts["time"]),
            *foot(facts),
        ]
    )
    return document(f"Rehearsal: {title}", body)


def document(title: str, body: str) -> str:
    """An HTML document of ours around `body`."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        "</body>\n</html>\n"
    )


def _head(facts: Mapping[str, Any], title: str, command: str) -> Iterator[str]:
    sizes = " × ".join(f"{axis} {size:,}" for axis, size in facts["mesh"]["sizes"].items() if size > 1)
    yield f"<h1>Rehearsal: {html.escape(title)}</h1>"
    mesh = f", as {sizes}" if sizes else ""
    yield paragraph(
        f"The real train step, compiled for {facts['cluster']['words']}{mesh}. No GPU was there: all on this page is "
        "read from the compiled program.",
        css="lede",
    )
    yield paragraph(_settings(facts["config"]))
    if command:
        yield f"<p><code>{html.escape(command)}</code></p>"
    look = LOOKS.get(facts["memory"]["verdict"], "close")
    yield f'<div class="verdict {look}">{paragraph(facts["verdict"]["words"])}</div>'
    yield f'<div class="tiles">{"".join(_tiles(facts))}</div>'
    if len(facts["verdict"]["tries"]) > 1:
        rows = [(each["what"], seconds_in_words(each["seconds"]), each["why"]) for each in facts["verdict"]["tries"]]
        yield "<details><summary>What to try, and what it could save at most</summary>"
        yield table(("to try", "saves at most", "why"), rows, right=(1,))
        yield "</details>"
    for warning in facts["warnings"]:
        yield f'<div class="warning">{html.escape(warning)}</div>'


def _settings(config: Mapping[str, Any]) -> str:
    """What decides most about the program; the command has the rest."""
    train, microbatches = config["train"], config["train"]["num_microbatches"]
    return (
        f"ZeRO stage {config['zero']['stage']}; {microbatches:,} microbatch{'' if microbatches == 1 else 'es'}; "
        f"rematerialisation {train['remat']}; precision {config['precision']['recipe']}; "
        f"{train['global_batch_size']:,} rows of {train['sequence_length']:,} tokens a step."
    )


def _tiles(facts: Mapping[str, Any]) -> Iterator[str]:
    time, memory = facts["time"], facts["memory"]
    waiting = exposed_seconds(time) / time["step_seconds"] if time["step_seconds"] else 0.0
    too_big = memory["verdict"] == "does not fit"
    tiles = {
        f"a step, at least{'; of a program that does not fit' if too_big else ''}": seconds_in_words(
            time["step_seconds"]
        ),
        "model FLOPs utilisation (MFU), at most": f"{100 * time['mfu']:.1f} %",
        "tokens a second on each device, at most": f"{time['tokens_per_second_per_device']:,.0f}",
        f"of each device's {bytes_in_words(memory['device_bytes'])}": bytes_in_words(memory["total_bytes"]),
        "of the step waits for communication": f"{100 * waiting:.0f} %",
    }
    for name, value in tiles.items():
        yield f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'


def _pipeline(section: Mapping[str, Any] | None) -> Iterator[str]:
    """The schedule's picture; facts of runs without a pipeline, or from before there was one, have none."""
    if section is None:
        return
    yield heading("The pipeline, as its schedule has it")
    yield paragraph(f"{sentence(pipeline_title(section))} {100 * section['bubble']:.1f} % of the stages' time is idle.")
    yield figure(image(section), "Simulated: time goes right, in units of one layer's forward. Hover over a block.")


def memory_section(section: Mapping[str, Any]) -> Iterator[str]:
    """One device's memory as a bar and tables."""
    yield heading("Does it fit?")
    yield paragraph(sentence(section["words"]))
    parts = _shown(section["parts"], section["total_bytes"])
    device, reserve = section["device_bytes"], section["reserve_bytes"]
    marks = {f"usable {bytes_in_words(device - reserve)}": device - reserve}
    hatched = (
        " Hatched: what is left to NCCL, the CUDA context and fragmentation."
        if reserve and section["total_bytes"] < device
        else ""
    )
    pale = " Pale: free." if section["total_bytes"] < device - reserve else ""
    picture = bar(parts, device, reserve=reserve, marks=marks) + legend(parts)
    yield figure(picture, f"One device's memory, {bytes_in_words(device)}.{hatched}{pale}")
    rows = [
        (part["name"], bytes_in_words(part["bytes"]), f"{100 * part['bytes'] / device:.1f} %")
        for part in section["parts"]
    ]
    total = section["total_bytes"]
    rows.append(("together", bytes_in_words(total), f"{100 * total / device:.1f} %"))
    yield table(("what", "bytes", "of the device"), rows, right=(1, 2), total=True)
    if section["largest"]:
        yield "<h3>The largest live arrays</h3>"
        arrays = [
            (each["name"], counted(each), bytes_in_words(each["bytes"]), each["kind"], each["where"])
            for each in section["largest"][:LARGEST]
        ]
        yield table(("largest then", "arrays", "bytes", "kind", "where"), arrays, right=(2,))
    if section["remedies"]:
        yield "<h3>What would shrink it, what frees most first</h3>"
        yield f"<ul>{''.join(f'<li>{html.escape(words)}</li>' for words in section['remedies'])}</ul>"


def _shown(parts: Sequence[Mapping[str, Any]], total: int) -> list[Part]:
    """The parts of memory for the bar, the tiny ones as one."""
    large = [part for part in parts if part["bytes"] >= TINY * total]
    shown = [
        Part(part["name"], part["bytes"], bytes_in_words(part["bytes"]), series(i)) for i, part in enumerate(large)
    ]
    rest = total - sum(part["bytes"] for part in large)
    return [*shown, Part("small ones", rest, bytes_in_words(rest), "var(--soft)")] if rest else shown


COLOURS = {  # of the sum of FLOPs; the model's own is first
    computed.REMATERIALISED: "var(--data)",
    computed.AGAIN: "var(--attention)",
    computed.HIDDEN: "var(--wait)",
    computed.REST: "var(--other)",
}


def computed_section(section: Mapping[str, Any]) -> Iterator[str]:
    """FLOPs by kind and place, beside the model's where that is known."""
    yield heading("What is computed?")
    needs = f"; the model needs {flops_in_words(section['model'])} of them" if section["explained"] else ""
    all_products = flops_in_words(section["products"])
    yield paragraph(f"One step is {all_products} of matrix products and attention on each device{needs}.")
    parts = [
        Part(what, flops, flops_in_words(flops), COLOURS.get(what, "var(--products)"))
        for what, flops in section["explained"].items()
        if flops > 0
    ]
    if parts:
        total = sum(part.amount for part in parts)
        shares = page_time.with_shares(parts, total)
        yield figure(bar(parts, total) + legend(shares), "What the model needs, and what the program computes beyond.")
    kinds = [(kind, flops_in_words(n), _percent(n, section["products"])) for kind, n in section["by_kind"].items()]
    yield table(("kind", "FLOPs a step", "share"), kinds, right=(1, 2))
    places = [
        (row["part"], ", ".join(row["kinds"]), f"{row['runs']:,}", flops_in_words(row["flops"]))
        for row in section["by_part"]
    ]
    yield "<h3>Where</h3>"
    yield table(("part of the model", "as", "runs", "FLOPs a step"), places, right=(2, 3))
    if section["fallbacks"]:
        yield "<h3>Products in a wider type than asked for</h3>"
        wide = [
            (row["kind"], row["asked"], row["part"], row["shapes"], f"{row['runs']:,}", flops_in_words(row["flops"]))
            for row in section["fallbacks"]
        ]
        yield table(("computed in", "asked for", "where", "factors", "runs", "FLOPs a step"), wide, right=(4, 5))
    yield paragraph(section["convention"], css="soft")
    for remark in computed.remarks(section):
        yield f'<div class="warning">{html.escape(remark)}</div>'


def foot(facts: Mapping[str, Any]) -> Iterator[str]:
    """Versions, options, the device, and what words mean."""
    yield heading("How this was made")
    compile_facts = facts["compile"]
    rows = [(name, str(value)) for name, value in compile_facts["versions"].items()]
    rows += [(f"compiler option {name}", str(value)) for name, value in compile_facts["options"].items()]
    rows += [(f"seconds: {name}", f"{value:.1f}") for name, value in compile_facts["seconds"].items()]
    yield table(("", ""), rows)
    device = facts["cluster"]["device"]
    peaks = [(f"peak {name}", f"{flops_in_words(peak)}/s") for name, peak in device["peaks"].items()]
    rates = [
        ("memory bandwidth", _rate(device["memory_bandwidth"])),
        ("NVLink, each direction", _rate(device["nvlink_bandwidth"])),
        ("network, each direction", _rate(device["network_bandwidth"])),
        ("latency of a collective over NVLink", seconds_in_words(device["nvlink_latency"])),
        ("latency over the network", seconds_in_words(device["network_latency"])),
    ]
    yield f"<h3>One device: {html.escape(device['name'])}</h3>"
    yield table(("", "at most"), [*peaks, *rates], right=(1,))
    yield "<h3>Words on this page</h3>"
    words = (f"<dt>{html.escape(word)}</dt><dd>{html.escape(meaning)}</dd>" for word, meaning in WORDS.items())
    yield f"<dl>{''.join(words)}</dl>"
    yield "<footer>Made by sharded-train rehearse.</footer>"


WORDS = {
    "device": "One GPU. All numbers are one device's; all devices do alike.",
    "axis": "A way in which work is split over devices: data (rows of the batch), tensor (parts of each matrix), "
    "sequence (parts of a row), pipeline (groups of layers).",
    "all-gather": "Each device of a group has a part, and gets the whole.",
    "reduce-scatter": "Each has a whole, of which the sum over the group is wanted; each gets a part of the sum.",
    "all-reduce": "The same, but each gets the whole sum.",
    "to span": "What a collective in flight has beside it to compute: with nothing, it is waited for.",
    "waiting": "Communication that no computing hides, also called exposed.",
    "ZeRO stage": "What is split over the data axis instead of being held by all of it: 1 the optimizer's state, "
    "2 gradients too, 3 weights too.",
    "rematerialised": "Computed again for the backward pass, so that it need not be kept until then.",
    "microbatch": "A part of each device's rows that goes forward and backward by itself; their gradients are added.",
    "stage": "Of a pipeline: the devices that hold one group of the layers.",
    "tick": "Of a pipeline: the time in which a stage works on one microbatch, forward or backward.",
    "in flight": "Microbatches that a stage has taken forward and not yet backward: it keeps their activations.",
    "bubble": "The part of the stages' time in which they have nothing to work on.",
    "MFU": "FLOPs that the model needs, over what the device could do in the time of the step.",
    "bf16, fp32, TF32, FP8": "Formats of numbers, of 16, 32, 19 (within products) and 8 bits.",
}


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:,.0f} GB/s"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""

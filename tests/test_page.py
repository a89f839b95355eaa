"""The page, the verdict and the comparison: what they show is in the facts, and text is never markup."""

from __future__ import annotations

import copy
import dataclasses
import html.parser
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sharded_train.flops import Flops
from sharded_train.mesh import stand_ins
from sharded_train.recipe import from_dict
from sharded_train.rehearse import clusters, compare, computed, hlo, page, timeline, verdict, wires
from sharded_train.rehearse.wires_places import Places
from sharded_train.rehearse.wires_totals import totals
from sharded_train.show import describe
from sharded_train.tables import bytes_in_words
from tests.rehearsed import PIPELINE, tiny

SAVED = Path(__file__).parent / "hlo"
PLACES = Places({"data": 2, "sequence": 2, "tensor": 2}, np.repeat([0, 1], 4).reshape(2, 2, 2))
HEADINGS = ("Does it fit?", "What crosses which wire?", "What is computed?", "How long, at best?", "How this was made")
VOID = {"meta", "br"}
GIB = 2**30


def facts_of(name: str) -> dict[str, Any]:
    """Facts as `rehearse` finds them, of a saved program; what memory would say is made up."""
    module, cluster = hlo.parse((SAVED / f"{name}-0.10.2.txt").read_text()), clusters.parse("h100:2x4")
    found, _ = wires.collectives(module, PLACES)
    model = Flops({"all": 10**12}, 1024)
    facts: dict[str, Any] = {
        "config": {
            "zero": {"stage": 3, "reduce_dtype": "float32", "group_size": None},
            "train": {"num_microbatches": 2, "remat": "full", "global_batch_size": 8, "sequence_length": 64},
            "precision": {"recipe": "bf16"},
        },
        "cluster": {"words": cluster.words, "device": dataclasses.asdict(cluster.device)},
        "mesh": {"sizes": dict(PLACES.sizes), "links": {"data": {"kind": "network", "per_host": 1}}},
        "compile": {"seconds": {"compile": 1.5}, "options": {"xla_option": "5"}, "versions": {"jax": "0.10.2"}},
        "memory": {
            "verdict": "fits",
            "words": "fits: 10 GiB of 72.8 GiB",
            "device_bytes": 79 * GIB,
            "reserve_bytes": 6 * GIB,
            "total_bytes": 10 * GIB,
            "parts": [{"name": "moments", "bytes": 9 * GIB}, {"name": "batch", "bytes": GIB}],
            "largest": [{"name": "up", "shape": "bf16[2]", "count": 4, "bytes": 16, "kind": "moments", "where": "mlp"}],
            "remedies": ["config.train.remat=full"],
        },
        "wires": {
            "collectives": [wires._facts(each) for each in found],
            "totals": totals(found),
            "not_understood": [],
            "warnings": [],
        },
        "computed": computed.describe(module, model, "bf16"),
        "time": timeline.describe(module, cluster, found, model, "bf16"),
        "warnings": ["mind the gap"],
    }
    facts["verdict"] = verdict.describe(facts)
    return facts


class Tags(html.parser.HTMLParser):
    """Every tag closes the one that is open; texts, tags and attributes as the browser sees them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("name", ["loops", "mixed", "overlap", "products"])
def test_a_page_needs_nothing_else_and_has_all_sections(name: str) -> None:
    text = page.page(facts_of(name), "a config")
    tags = Tags(text)
    assert {tag for tag, _ in tags.tags}.isdisjoint({"script", "link", "img", "iframe", "object", "base", "form"})
    assert not any(key.startswith("on") or key in ("src", "href") for _, found in tags.tags for key in found)
    assert "http" not in text
    assert "@import" not in text
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    assert [words for words in tags.texts if words in HEADINGS] == list(HEADINGS)
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(picture)
        for width in re.findall(r'width="([^"]+)"', picture):
            assert float(width) >= 0


def test_the_numbers_of_the_page_are_those_of_the_facts() -> None:
    facts = facts_of("loops")
    text = " ".join(Tags(page.page(facts, "a config")).texts)
    assert timeline.seconds_in_words(facts["time"]["step_seconds"]) in text
    assert f"{100 * facts['time']['mfu']:.1f} %" in text
    assert bytes_in_words(facts["memory"]["total_bytes"]) in text
    for row in facts["time"]["exposed"]:
        assert timeline.seconds_in_words(row["seconds"]) in text
    assert facts["verdict"]["words"] in text
    assert "mind the gap" in text
    assert "4 × bf16[2]" in text


def test_the_page_says_what_was_rehearsed() -> None:
    text = " ".join(Tags(page.page(facts_of("loops"), "x", "sharded-train rehearse --config.zero.stage=3")).texts)
    assert "sharded-train rehearse --config.zero.stage=3" in text
    assert "ZeRO stage 3; 2 microbatches; rematerialisation full; precision bf16; 8 rows of 64 tokens" in text


def test_captions_explain_what_is_drawn_only() -> None:
    facts = facts_of("loops")
    assert "Hatched:" in page.page(facts, "x")
    full = {**facts["memory"], "total_bytes": 80 * GIB}
    assert "Hatched:" not in page.page({**facts, "memory": full}, "x"), "parts lie over all of it"
    assert "Overlapped" not in page.page(facts, "x"), "no column of that name is on the page"
    facts["memory"] |= {"reserve_bytes": 0, "total_bytes": 80 * GIB}
    for row in facts["time"]["exposed"]:
        row["exposed"] = 0.0
    text = page.page(facts, "x")
    for words in ("Hatched:", "Pale:", "Striped red:"):
        assert words not in text


def test_the_pipelines_picture_has_its_own_dark_looks() -> None:
    """Letters and paper change together: a rule of the page that sets letters alone must give way to the picture's."""
    facts = facts_of("products")
    shown = describe(from_dict(PIPELINE), stand_ins("2x2"))["pipeline"]
    text = page.page({**facts, "pipeline": shown}, "x")
    (picture,) = re.findall(r"<svg xmlns.*?</svg>", text, re.DOTALL)
    dark = picture.partition("prefers-color-scheme: dark")[2].partition("</style>")[0]
    assert {"gantt-paper", "gantt-ink"} <= set(re.findall(r"\.([\w-]+)", dark))
    letters = re.findall(r"<text ([^>]*)>", picture)
    assert all("gantt-ink" in each or 'style="fill:' in each for each in letters)
    plain = re.findall(r"([^{}]*\btext)\s*\{[^}]*fill:", page.STYLE)
    assert [words.strip() for words in plain] == ["svg text"], "a class of the picture is stronger than tags"


def strings(value: Any) -> Any:
    """The value with markup put into every text that a config, a file or a program's scope may decide."""
    if isinstance(value, dict):
        return {key: value[key] if key in KEPT else strings(value[key]) for key in value}
    if isinstance(value, list):
        return [strings(each) for each in value]
    return f"{value}<script>\"&'</script>" if isinstance(value, str) else value


KEPT = ("verdict", "lane", "link", "axes", "op", "members", "dtype", "shares", "by_kind", "peaks", "what")


def test_text_is_never_markup() -> None:
    facts = facts_of("loops")
    facts["verdict"] = strings(facts["verdict"])
    text = page.page(strings(facts), "<script>\"&'</script>", "rehearse --config='<script>'")
    tags = Tags(text)
    assert "script" not in {tag for tag, _ in tags.tags}
    assert sum("<script>" in words for words in tags.texts) > 30


def test_a_program_that_sends_nothing() -> None:
    facts = facts_of("products")
    assert not facts["wires"]["collectives"]
    assert "Nothing is sent between devices" in facts["verdict"]["words"]
    assert "Nothing: no collective" in page.page(facts, "x")


def test_the_verdict_says_what_bounds_and_what_to_try_first() -> None:
    facts = facts_of("loops")
    said = facts["verdict"]
    saved = [each["seconds"] for each in said["tries"]]
    assert saved == sorted(saved, reverse=True)
    assert all(each >= verdict.WORTH * facts["time"]["step_seconds"] for each in saved)
    assert said["tries"][0]["what"] in said["words"]
    time = copy.deepcopy(facts["time"])
    time["compute"] = {"products": 1.0, "attention": 0.5, "other": 0.2}
    time["exposed"] = [{"axes": "data", "link": "network", "seconds": 2.0, "exposed": 1.6}]
    time["step_seconds"] = 3.3
    words = verdict.describe({**facts, "time": time})["words"]
    assert "48 % waiting for communication: communication bounds the step" in words
    assert "The worst link is the network, for data: 1.600 s of its 2.000 s" in words
    time["exposed"][0]["exposed"] = 0.0
    assert "Nearly all communication is hidden" in verdict.describe({**facts, "time": time})["words"]


def test_what_does_not_fit_is_to_be_mended_first() -> None:
    facts = facts_of("loops")
    facts["memory"] |= {"verdict": "does not fit", "words": "does not fit: 90 GiB of 72.8 GiB", "total_bytes": 90 * GIB}
    section = verdict.describe(facts)
    said = section["words"]
    assert verdict.UNLIKE in said, "XLA hides nothing in a program that does not fit"
    assert section["tries"] == []
    assert "bounds the step" not in said
    assert said.startswith("Does not fit: 90 GiB of 72.8 GiB.")
    assert said.endswith("Try first what makes it fit: config.train.remat=full.")
    assert "verdict bad" in page.page({**facts, "verdict": verdict.describe(facts)}, "x")


def test_of_several_the_best_is_the_shortest_step_that_fits() -> None:
    long, short, big = (copy.deepcopy(facts_of("loops")) for _ in range(3))
    long["time"]["step_seconds"], big["time"]["step_seconds"] = 2.0, 1e-9
    big["memory"] |= {"verdict": "does not fit", "total_bytes": 90 * GIB}
    variants = {"long": long, "short": short, "too big": big}
    section = compare.describe(variants)
    assert section["best"] == "short"
    assert section["rows"]["step, at least"] == {name: each["time"]["step_seconds"] for name, each in variants.items()}
    row = next(each for each in compare.ROWS if each.name == "MFU, at most")
    assert compare.marked(row, [0.2, 0.5, 0.5]) == ["20.0 %", f"50.0 % {compare.BEST}", f"50.0 % {compare.BEST}"]
    assert compare.marked(row, [0.2, 0.2]) == ["20.0 %", "20.0 %"]
    assert compare.describe({"too big": big})["best"] is None
    table, note = compare.tables(section, 100)
    assert note == f"too big: {verdict.UNLIKE}"
    assert table.row_count >= 6
    assert [column.header for column in table.columns][1:] == ["long", "short", "too\nbig"]
    *legend, _, table, _ = compare.tables(section, 60)
    assert legend == ["(a) long", "(b) short", "(c) too big"], "no heading breaks inside a number"
    assert [column.header for column in table.columns][1:] == ["(a)", "(b)", "(c)"]


def test_the_page_of_a_train_step() -> None:
    facts = tiny().facts
    text = page.page(facts, "tiny")
    texts = " ".join(Tags(text).texts)
    assert "Close up: one layer, backward (" in texts
    assert "Close up: one layer, forward (" in texts
    assert "tensor over NVLink" in texts
    assert "data over the network" in texts
    assert len(text) < 10**6

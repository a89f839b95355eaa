"""Sources: the same documents in every format, texts made of fields, and bad input told in its place."""

from __future__ import annotations

import dataclasses
import gzip
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from sharded_train import config, recipe
from sharded_train.data import scan, shards
from sharded_train.data.config import DataConfig, Source, template_fields
from sharded_train.data.prepare import TextData, prepare
from sharded_train.data.records import BadText, Reading, read_records
from sharded_train.data.scan import FileScan, documents_of, scan_file
from sharded_train.data.statistics import num_duplicates, statistics
from sharded_train.errors import ConfigError

DOCUMENTS = [{"title": f"T{n}", "body": f"body {n} \u00e9\u6587 " * (1 + n % 7), "n": n} for n in range(60)]
TEMPLATE = "# {title}\n\n{body}\n"
TEXTS = [f"# {d['title']}\n\n{d['body']}\n" for d in DOCUMENTS]
Records = Sequence[Mapping[str, Any]]


def quiet(_: str) -> None:
    pass


def json_lines(records: Records) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def write_jsonl(path: Path, records: Records) -> None:
    path.write_bytes(json_lines(records))


def write_gzip(path: Path, records: Records) -> None:
    half = len(records) // 2  # two members, as `cat a.gz b.gz` makes them
    path.write_bytes(gzip.compress(json_lines(records[:half])) + gzip.compress(json_lines(records[half:])))


def write_zstd(path: Path, records: Records) -> None:
    half = len(records) // 2
    frames = [pa.compress(json_lines(part), codec="zstd", asbytes=True) for part in (records[:half], records[half:])]
    path.write_bytes(b"".join(frames))


def write_parquet(path: Path, records: Records) -> None:
    parquet.write_table(pa.Table.from_pylist([dict(record) for record in records]), path, row_group_size=7)


WRITERS: dict[str, Callable[[Path, Records], None]] = {
    ".jsonl": write_jsonl,
    ".json": write_jsonl,
    ".ndjson.gz": write_gzip,
    ".jsonl.zst": write_zstd,
    ".parquet": write_parquet,
}


def made(cache: Path, *sources: Source, sequence_length: int = 32, **changes: Any) -> TextData:
    said: list[str] = changes.pop("said", [])
    num_workers = changes.pop("num_workers", 1)
    settings = DataConfig(sources=sources, **{"validation_fraction": 0.2, **changes})
    arguments: dict[str, Any] = {"vocab_size": 300, "sequence_length": sequence_length, "seed": 0}
    return prepare(settings, **arguments, cache_dir=cache, progress=said.append, num_workers=num_workers)


def texts_of(data: TextData) -> list[str]:
    """What rows that are not masked predict, both sides together."""
    texts = []
    for side in (data.train, data.validation):
        for member in side.members:
            targets = np.concatenate(
                [member.rows[i]["targets"] for i in range(len(member.rows))] or [np.array([], int)]
            )
            targets = targets[targets >= 0]
            ends = np.flatnonzero(targets == data.tokenizer.end_of_text)
            texts += [data.tokenizer.decode(part) for part in np.split(targets, ends + 1)[:-1]]
    return sorted(texts)


@pytest.mark.parametrize("ending", WRITERS)
def test_every_format_gives_the_same_documents_and_the_same_fingerprint(ending: str, tmp_path: Path) -> None:
    for number in range(3):
        WRITERS[ending](tmp_path / f"{number}{ending}", DOCUMENTS[number * 20 : number * 20 + 20])
    (tmp_path / "plain").mkdir()
    data = made(tmp_path / "cache", Source((f"{tmp_path}/*{ending}",), text=TEMPLATE))
    assert texts_of(data) == sorted(TEXTS)
    for number in range(3):
        write_jsonl(tmp_path / "plain" / f"{number}.jsonl", DOCUMENTS[number * 20 : number * 20 + 20])
    plain = made(tmp_path / "other", Source((f"{tmp_path}/plain/*",), text=TEMPLATE))
    assert plain.fingerprint == data.fingerprint


@pytest.mark.parametrize(("ending", "pack"), [("", bytes), (".gz", gzip.compress), (".zst", pa.compress)])
def test_text_may_be_compressed(ending: str, pack: Callable[..., bytes], tmp_path: Path) -> None:
    arguments = {"codec": "zstd", "asbytes": True} if ending == ".zst" else {}
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.md{ending}").write_bytes(pack(text.encode(), **arguments))
    assert texts_of(made(tmp_path / "cache", Source((f"{tmp_path}/*.md*",)))) == sorted(TEXTS)


def test_a_field_is_a_text_and_a_template_takes_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [{"text": "a{b}", "n": 3}, {"text": None, "n": 4}, {"text": "", "n": None}])

    def read(text: str) -> list[str]:
        return ["".join(record.pieces) for record in read_records(path, Reading("auto", text, None))]

    assert read("text") == ["a{b}", "", ""]
    assert read("{n}: {text}{{}}") == ["3: a{b}{}", "4: {}", ": {}"]
    assert template_fields("{n}: {text}{{}}") == ["n", "text"]
    assert template_fields("text") == ["text"]


def test_prompts_are_read_and_not_predicted(tmp_path: Path) -> None:
    pairs = [{"q": f"Q{n}? ", "a": f"the answer is {n * n}."} for n in range(50)]
    write_jsonl(tmp_path / "a.jsonl", pairs)
    data = made(tmp_path / "cache", Source((f"{tmp_path}/*.jsonl",), prompt="q", completion="a"), sequence_length=64)
    assert texts_of(data) == sorted(pair["a"] for pair in pairs)
    seen = []
    for rows in (data.train, data.validation):
        for index in range(len(rows)):
            row = rows[index]
            for segment in range(1, row["segments"].max() + 1):
                own = row["segments"] == segment
                tokens, targets = row["tokens"][own], row["targets"][own]
                assert tokens[0] == data.tokenizer.end_of_text  # no row begins in the middle of a pair
                seen.append(data.tokenizer.decode(tokens))
                hidden = tokens[1:][targets[:-1] < 0]
                assert data.tokenizer.decode(hidden) == seen[-1][: seen[-1].index("? ") + 2]
    assert sorted(seen) == sorted(pair["q"] + pair["a"] for pair in pairs)
    num_masked = data.description["train"]["num_masked"] + data.description["validation"]["num_masked"]
    assert num_masked == sum(len(data.tokenizer.encode(pair["q"])) for pair in pairs)
    counted = data.baselines()
    assert 0 < counted["byte_bigram_bits_per_byte"] < 8


@pytest.mark.parametrize("ending", [".jsonl", ".parquet", ".jsonl.gz"])
def test_large_files_are_cut_in_parts_and_the_parts_are_the_file(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"a{ending}"
    {**WRITERS, ".jsonl.gz": write_gzip}[ending](path, [*DOCUMENTS, {"title": "", "body": "", "n": 0}])
    reading = Reading("auto", TEMPLATE, None)
    monkeypatch.setattr(scan, "PART_BYTES", 300)
    found = scan_file(path, reading)
    assert (len(found.parts) > 5) == (ending != ".jsonl.gz")  # a compressed file can be read from its start only
    texts = ["".join(document.pieces) for part in found.parts for document in documents_of(path, reading, part)]
    assert texts == [*TEXTS, "# \n\n\n"]
    cut = scan_file(path, reading, max_bytes=500)
    assert sum(part.num_documents for part in cut.parts) < len(TEXTS)
    assert 500 <= cut.num_bytes < 500 + max(len(text.encode()) for text in TEXTS)


def test_workers_parts_and_paths_do_not_change_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        write_jsonl(tmp_path / f"{number}.jsonl", DOCUMENTS[number * 15 : number * 15 + 15])
    source = Source((f"{tmp_path}/*.jsonl",), text=TEMPLATE)
    one = made(tmp_path / "one", source)
    two = made(tmp_path / "two", source, num_workers=2)
    assert one.fingerprint == two.fingerprint
    monkeypatch.setattr(shards, "PART_BYTES", 600)
    more = made(tmp_path / "more", source)
    assert len(more.notes) == 4
    for rows in (more.train, two.train):
        for index in range(len(one.train)):
            np.testing.assert_array_equal(rows[index]["tokens"], one.train[index]["tokens"])


def test_what_another_process_has_done_by_now_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    source = Source((f"{tmp_path}/a.jsonl",), text=TEMPLATE)
    data = made(tmp_path / "cache", source)
    (shard,) = data.shards["source 0"]
    monkeypatch.setattr(shards, "documents_of", None)
    done: list[int] = []
    assert shards.write_shard(data.tokenizer, shard, done.append) == (shard.key, data.notes[shard.key])
    assert done == [shard.num_bytes]


def test_a_file_that_is_added_makes_one_shard_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "PART_BYTES", 1000)
    for number in range(100):
        (tmp_path / f"{number}.txt").write_text(f"some words of text {number} " * (1 + number % 9))
    (tmp_path / "large.txt").write_text("a large one " * 200)
    source = Source((f"{tmp_path}/*.txt",))
    before = made(tmp_path / "cache", source)
    files = [len(shard.parts) for shard in before.shards["source 0"]]
    assert sum(files) == 101
    assert 10 < len(files) < 60
    assert all(len(shard.parts) == 1 for shard in before.shards["source 0"] if shard.num_bytes > 2000)
    (tmp_path / "new.txt").write_text("a new one")
    (tokenizer,) = (tmp_path / "cache").glob("tokenizer-*.json")
    again = made(tmp_path / "cache", source, tokenizer=str(tokenizer))
    assert len(again.notes.keys() - before.notes.keys()) == 1
    assert len(texts_of(again)) == 102


def test_files_that_are_gone_are_told_of(tmp_path: Path) -> None:
    for number in range(3):
        write_jsonl(tmp_path / f"{number}.jsonl", DOCUMENTS[number * 20 : number * 20 + 20])
    source = Source((f"{tmp_path}/*.jsonl",), text=TEMPLATE)
    made(tmp_path / "cache", source)
    (tmp_path / "1.jsonl").unlink()
    said: list[str] = []
    assert len(texts_of(made(tmp_path / "cache", source, said=said))) == 40
    assert said[0] == f"data: 1 files are gone since the text was last read: {tmp_path}/1.jsonl"


def test_a_mixture_keeps_its_sources_apart(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    write_parquet(tmp_path / "b.parquet", [{"text": f"other {n} " * 5} for n in range(40)])
    first = Source((f"{tmp_path}/a.jsonl",), name="first", text=TEMPLATE, weight=3.0)
    second = Source((f"{tmp_path}/b.parquet",), name="second", weight=1.0, num_epochs=2)
    data = made(tmp_path / "cache", first, second)
    rows = data.train.order(0, np.arange(40))
    members = [data.train.place_of(int(row))[0] for row in rows]
    assert members.count(1) == 10
    for row, member in zip(rows, members, strict=True):
        text = data.tokenizer.decode(data.train[int(row)]["tokens"])
        assert ("other" in text) == (member == 1)
    said = data.description["sources"]
    assert (said["first"]["share"], said["second"]["share"]) == (0.75, 0.25)
    assert made(tmp_path / "cache", first, dataclasses.replace(second, weight=2.0)).fingerprint != data.fingerprint
    json.dumps(data.description)


def test_statistics_count_documents_lengths_and_duplicates(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in ("one", "two", "two", "three " * 40)])
    write_jsonl(tmp_path / "b.jsonl", [{"text": text} for text in ("two", "five")])
    data = made(tmp_path / "cache", Source((f"{tmp_path}/a.jsonl",)), Source((f"{tmp_path}/b.jsonl",)))
    found = statistics(data)
    assert found["sources"]["source 0"]["num_documents"] == 4
    assert [found["sources"][f"source {n}"]["num_duplicates"] for n in (0, 1)] == [1, 0]
    total = found["total"]
    assert (total["num_documents"], total["num_duplicates"]) == (6, 2)
    assert total["num_bytes"] == len("one") + 3 * len("two") + 240 + len("five")
    assert sum(total["lengths"].values()) == 6
    tokens = [len(data.tokenizer.encode(text)) for text in ("one", "two", "two", "three " * 40, "two", "five")]
    assert total["num_tokens"] == sum(tokens)
    assert total["lengths"] == {
        str(longest): count
        for longest in (1, 3, 7, 15, 31, 63, 127, 255)
        if (count := sum((longest + 1) // 2 <= size <= longest for size in tokens))
    }


@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_duplicates_are_counted_in_parts_of_their_range(at_once: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    hashes = [rng.integers(0, 40, 30).astype("<u8") * np.uint64(2**58 + 12345) for _ in range(3)]
    paths = [tmp_path / str(number) for number in range(4)]
    for path, values in zip(paths, [*hashes, np.array([], "<u8")], strict=True):
        np.sort(values).tofile(path)
    assert num_duplicates(paths, at_once) == 90 - len(np.unique(np.concatenate(hashes)))


BAD: dict[str, tuple[str, bytes, str]] = {
    "broken JSON": ("a.jsonl", b'{"text": "x"}\n\n{"text": "y"\n', r"a\.jsonl, line 3: broken JSON: .* at column"),
    "no JSON lines at all": ("a.json", b"[\n 1]", r"a\.json, line 1: broken JSON: .*format = text"),
    "not an object": ("a.jsonl", b'["x"]\n', r"a\.jsonl, line 1: wanted a JSON object, got a list"),
    "no such field": ("a.jsonl", b'{"text": "x"}\n{"content": "y"}\n', r"line 2: no field 'text'; there is 'content'"),
    "a field of another type": ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', r"line 2: the field 'text' holds a number"),
    "undecodable line": (
        "a.jsonl",
        b'{"text": "x"}\n{"text": "caf\xe9"}\n',
        r"line 2: not UTF-8: .* byte 14 of the li",
    ),
    "half a character": ("a.jsonl", b'{"text": "\\ud83d"}\n', r"line 1: the field 'text' holds half a character"),
    "undecodable text": ("a.txt", b"one\ntwo\ncaf\xe9 and\n", r"a\.txt, line 3, byte 4 of the line: not UTF-8"),
    "no gzip": ("a.jsonl.gz", b'{"text": "x"}\n', r"a\.jsonl\.gz: cannot be read: Not a gzipped file"),
    "cut gzip": ("a.txt.gz", gzip.compress(bytes(range(65, 90)) * 99)[:-9], r"a\.txt\.gz: cannot be read: .*end"),
    "cut zstd": (
        "a.txt.zst",
        pa.compress(np.random.default_rng(0).bytes(5000).hex().encode(), codec="zstd", asbytes=True)[:-50],
        r"a\.txt\.zst: cannot be read: .*[Tt]runcated",
    ),
    "no zstd": ("a.txt.zst", b"plain", r"a\.txt\.zst: cannot be read: .*ZSTD"),
    "no Parquet": ("a.parquet", b"plain text, really", r"a\.parquet: broken Parquet"),
    "empty Parquet": ("a.parquet", b"", r"a\.parquet: broken Parquet"),
}


@pytest.mark.parametrize(("name", "contents", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_told_with_its_place_and_nothing_is_made(
    name: str, contents: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(contents)
    (tmp_path / "good.jsonl").write_bytes(b'{"text": "good"}\n{"text": "better"}\n')
    for num_workers in (1, 2) if name == "a.jsonl" and "content" in message else (1,):
        with pytest.raises(ConfigError, match=message) as error:
            made(tmp_path / "cache", Source((f"{tmp_path}/*.*",)), num_workers=num_workers)
        assert len(error.value.problems) == 2
        assert not (tmp_path / "cache").exists()


def test_bad_parquet_is_told_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, [{"text": "x", "n": 1}, {"text": "y", "n": 2}])
    with pytest.raises(BadText, match=r"a\.parquet: no field 'body'; there is 'text', 'n'"):
        list(read_records(path, Reading("auto", "{text}{body}", None)))
    with pytest.raises(BadText, match=r"a\.parquet, row 0: the field 'n' holds a number, wanted text"):
        list(read_records(path, Reading("auto", "n", None)))
    contents = path.read_bytes()
    path.write_bytes(contents[: len(contents) // 2])
    with pytest.raises(BadText, match=r"a\.parquet: broken Parquet"):
        list(read_records(path, Reading("auto", "text", None)))
    parquet.write_table(pa.table({"text": pa.array([b"caf\xe9"], pa.binary()).view(pa.string())}), path)
    with pytest.raises(BadText, match=r"a\.parquet, row 0 or one of the 256 after it: not UTF-8"):
        list(read_records(path, Reading("auto", "text", None)))


def test_many_bad_files_are_told_in_a_few_lines(tmp_path: Path) -> None:
    for number in range(15):
        (tmp_path / f"{number:02}.jsonl").write_text("{")
    with pytest.raises(ConfigError) as error:
        made(tmp_path / "cache", Source((f"{tmp_path}/*",)))
    assert len(error.value.problems) == 12
    assert error.value.problems[-1] == "  and 5 more"


def test_files_that_were_good_are_not_read_again_after_a_bad_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    (tmp_path / "b.jsonl").write_text("{")
    source = Source((f"{tmp_path}/*.jsonl",), text=TEMPLATE)
    with pytest.raises(ConfigError, match=r"b\.jsonl, line 1"):
        made(tmp_path / "cache", source)
    write_jsonl(tmp_path / "b.jsonl", [{"title": "now", "body": "good"}])
    read: list[str] = []

    def noting(path: Path, *rest: Any) -> FileScan:
        read.append(path.name)
        return scan_file(path, *rest)

    monkeypatch.setattr("sharded_train.data.corpus.scan_file", noting)
    assert len(texts_of(made(tmp_path / "cache", source))) == 61
    assert read == ["b.jsonl"]


def test_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}, {"text": ""}, {"text": None}, {"text": "y"}])
    (tmp_path / "b.jsonl").write_bytes(b"")
    said: list[str] = []
    data = made(tmp_path / "cache", Source((f"{tmp_path}/*.jsonl",), name="web"), said=said)
    assert texts_of(data) == ["x", "y"]
    assert any("left out 2 empty documents of web" in line for line in said)
    assert any("left out 1 empty files: " in line and "b.jsonl" in line for line in said)
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no text in web: 2 files, all of them empty"):
        made(tmp_path / "none", Source((f"{tmp_path}/*.jsonl",), name="web"))


def test_bad_sources_are_refused_together() -> None:
    sources = (
        Source(()),
        Source(("a",), prompt="q"),
        Source(("a",), text="t", prompt="q", completion="a"),
        Source(("a",), format="text", text="t"),
        Source(("a",), text="{a"),
        Source(("a",), text="{a!r}"),
        Source(("a",), name="same", weight=0.0),
        Source(("a",), name="same", num_epochs=0, max_bytes=0),
    )
    problems = DataConfig(files=("x",), num_epochs=2, sources=sources).problems()
    numbers = (0, 1, 2, 3, 4, 5, 6, 7, 7)
    starts = ["data.files ", "data.num_epochs ", *(f"data.sources.{number}." for number in numbers)]
    assert all(problem.startswith(start) for problem, start in zip(problems, starts, strict=False))
    assert "several are named same" in problems[11]
    assert "source 0, source 1, source 2, source 3, source 4, source 5, same have no weight" in problems[12]


def test_weights_that_cannot_be_are_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": str(n)} for n in range(30)])
    write_jsonl(tmp_path / "b.jsonl", [{"text": "x"}])
    few = Source((f"{tmp_path}/a.jsonl",), name="few", weight=1e-9)
    much = Source((f"{tmp_path}/a.jsonl",), name="much", weight=1.0)
    with pytest.raises(
        ConfigError, match=r"data\.sources\.0\.weight = 1e-09 is 1e-09 of the sum of all; .* multiples of 1/"
    ):
        made(tmp_path / "cache", few, much)
    one = Source((f"{tmp_path}/b.jsonl",), name="one", weight=1.0)
    with pytest.raises(ConfigError, match="all documents of one fell to validation, but its weight is 1"):
        made(tmp_path / "cache", much, one, validation_fraction=0.9)


def test_the_examples_of_the_page_are_configs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "data.md").read_text()
    examples = [part.partition("```")[0] for part in page.split("```python\n")[1:]]
    found = []
    for number, example in enumerate(examples):
        path = tmp_path / f"{number}.py"
        body = textwrap.indent(f"config = ConfigDict()\n{example}\nreturn config\n", "    ")
        path.write_text(f"from ml_collections import ConfigDict\n\n\ndef get_config():\n{body}")
        found.append(recipe.load(path).data)
        assert found[-1].problems() == []
    assert [len(settings.sources) for settings in found] == [0, 3]
    assert found[1].sources[2] == Source(("chat.jsonl",), "chat", prompt="question", completion="answer", weight=0.1)


def test_sources_are_given_in_the_config_and_changed_on_the_command_line() -> None:
    values = {"sources": [{"files": ["a"], "weight": 1}, {"files": ["b"], "text": "body"}]}
    overrides = ["--config.sources.1.weight=2", "--config.sources.0.files=c,d", "--config.sources.2.files=e"]
    built = config.build(DataConfig, values, overrides)
    assert built.sources == (
        Source(("c", "d"), weight=1.0),
        Source(("b",), text="body", weight=2.0),
        Source(("e",)),
    )
    assert config.build(DataConfig, config.to_dict(built)) == built
    json.dumps(config.to_dict(built))
    assert config.build(DataConfig, {}) == DataConfig()
    (line,) = config.differences(DataConfig(), dataclasses.replace(DataConfig(), sources=built.sources[:1]))
    assert line.startswith("config.sources: ")
    with pytest.raises(ConfigError) as error:
        config.build(
            DataConfig,
            {"sources": [{"fils": ["a"], "weight": "x"}, 3]},
            ["--config.sources.5.weight=1", "--config.sources.x.weight=1"],
        )
    words = "\n".join(error.value.problems)
    assert "config.sources.0.fils: no such option; did you mean files?" in words
    assert "config.sources.0.files: has no default and must be set" in words
    assert "config.sources.0.weight: wanted float or None, got 'x'" in words
    assert "config.sources.1: wanted a group of options, got 3" in words
    assert "config.sources.5: there are 2 of them, numbered from 0" in words
    assert "config.sources.x: there are 2 of them" in words
    for wrong, message in (
        ({"sources": 3}, "wanted a tuple of groups"),
        ({"sources": {"files": "a"}}, "wanted a tuple"),
    ):
        with pytest.raises(ConfigError, match=message):
            config.build(DataConfig, wrong)
    with pytest.raises(ConfigError, match=r"use --config\.sources\.0\.OPTION=VALUE"):
        config.build(DataConfig, {}, ["--config.sources=a"])

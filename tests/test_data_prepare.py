"""From files to rows: collecting, splitting, tokenizing, caching, baselines, and what bad input is told."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sharded_train.data.baselines import baselines
from sharded_train.data.cache import cached_file
from sharded_train.data.config import DataConfig
from sharded_train.data.corpus import collect
from sharded_train.data.mixture import Mixture
from sharded_train.data.prepare import TextData, prepare
from sharded_train.data.records import PIECE_CHARACTERS, Reading, read_records
from sharded_train.data.rows import ArrayStream, Rows
from sharded_train.data.scan import FileScan, documents_of, scan_file
from sharded_train.data.tokenizer import TextTokenizer, trained_tokenizer
from sharded_train.errors import ConfigError

TEXTS = [f"# text {n}\ndef f{n}(x):\n    return x + {n} * {'abc' * (n % 7)!r}\n" * (1 + n % 5) for n in range(40)]


def quiet(_: str) -> None:
    pass


@pytest.fixture
def corpus_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_bytes(text.encode())
    return folder


def prepared(
    folder: Path, cache: Path, seed: int = 0, sequence_length: int = 32, vocab_size: int = 300, **changes: Any
) -> TextData:
    said: list[str] = changes.pop("said", [])
    config = dataclasses.replace(DataConfig(files=(f"{folder}/*.txt",), validation_fraction=0.2), **changes)
    return prepare(
        config,
        vocab_size=vocab_size,
        sequence_length=sequence_length,
        seed=seed,
        cache_dir=cache,
        progress=said.append,
    )


def texts_of(rows: Mixture, tokenizer: TextTokenizer) -> list[str]:
    """The documents that the rows predict, put together again from the targets."""
    targets = np.concatenate([rows[index]["targets"] for index in range(len(rows))])
    ends = np.flatnonzero(targets == tokenizer.end_of_text)
    return [tokenizer.decode(part[part != tokenizer.end_of_text]) for part in np.split(targets, ends + 1)[:-1]]


def test_the_targets_of_an_epoch_are_the_texts(corpus_dir: Path, tmp_path: Path) -> None:
    data = prepared(corpus_dir, tmp_path / "cache")
    train, validation = texts_of(data.train, data.tokenizer), texts_of(data.validation, data.tokenizer)
    assert sorted(train + validation) == sorted(TEXTS)
    assert data.description["train"]["num_documents"] == len(train)
    for rows, texts in ((data.train, train), (data.validation, validation)):
        targets = np.concatenate([rows[index]["targets"] for index in range(len(rows))])
        counted = data.tokenizer.token_bytes[targets[targets >= 0]].sum()
        assert counted == sum(len(text.encode()) for text in texts)
    assert data.description["validation"]["num_bytes"] == sum(len(text.encode()) for text in validation)
    json.dumps(data.description)


def test_standard_library_is_the_default_and_is_in_the_fingerprint(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"vocab_size": 512, "sequence_length": 64, "seed": 0, "progress": quiet}
    config = DataConfig(max_bytes=200_000, validation_fraction=0.1)
    data = prepare(config, cache_dir=tmp_path, **arguments)
    assert "standard library of Python 3." in data.description["source"]
    assert 200_000 <= data.description["num_bytes"] < 500_000
    assert prepare(config, cache_dir=tmp_path, **arguments).fingerprint == data.fingerprint
    (source,) = collect(DataConfig(max_bytes=3_000_000), tmp_path, quiet).sources
    paths = {str(path) for path, _ in source.parts}
    assert not [path for path in paths if "site-packages" in path or "/test" in path or not path.endswith(".py")]


def test_fingerprint_follows_contents_and_settings_but_not_paths(corpus_dir: Path, tmp_path: Path) -> None:
    first = prepared(corpus_dir, tmp_path / "cache").fingerprint
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in corpus_dir.iterdir():
        (moved / f"renamed_{path.name}").write_bytes(path.read_bytes())
    assert prepared(moved, tmp_path / "other").fingerprint == first
    others = [
        prepared(corpus_dir, tmp_path / "cache", seed=1).fingerprint,
        prepared(corpus_dir, tmp_path / "cache", sequence_length=33).fingerprint,
        prepared(corpus_dir, tmp_path / "cache", validation_fraction=0.4).fingerprint,
        prepared(corpus_dir, tmp_path / "cache", max_bytes=1000).fingerprint,
    ]
    (corpus_dir / "0.txt").write_text("changed\n")
    others.append(prepared(corpus_dir, tmp_path / "cache").fingerprint)
    assert len({first, *others}) == 6


def test_split_keeps_duplicates_together_and_documents_on_their_side(corpus_dir: Path, tmp_path: Path) -> None:
    def sides() -> tuple[set[str], set[str]]:
        data = prepared(corpus_dir, tmp_path / "cache", validation_fraction=0.3)
        train, validation = (texts_of(rows, data.tokenizer) for rows in (data.train, data.validation))
        assert len(train) + len(validation) == len(list(corpus_dir.iterdir()))
        return set(train), set(validation)

    train, validation = sides()
    assert len(train) + len(validation) == len(TEXTS)
    for number, text in enumerate(TEXTS):
        (corpus_dir / f"again_{number}.txt").write_bytes(text.encode())
    (corpus_dir / "new.txt").write_text("a new one\n")
    more_train, more_validation = sides()
    assert more_train >= train
    assert more_validation >= validation
    assert not more_train & more_validation


@pytest.mark.parametrize(("fraction", "empty", "num_validation"), [(1e-9, "validation", 1), (1 - 1e-9, "training", 2)])
def test_split_of_a_few_documents_leaves_no_side_empty_and_says_so(
    tmp_path: Path, fraction: float, empty: str, num_validation: int
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("a", "b", "c"):
        (folder / f"{name}.txt").write_text(name)
    said: list[str] = []
    data = prepared(folder, tmp_path / "cache", validation_fraction=fraction, said=said)
    counts = [data.description[side]["num_documents"] for side in ("train", "validation")]
    assert counts == [3 - num_validation, num_validation]
    assert f"of 3 documents leaves {empty} empty" in said[0]


def test_pieces_are_the_text(tmp_path: Path) -> None:
    texts = [
        "é" * (3 * PIECE_CHARACTERS),
        "a\r\nb\rc\n\n" * (PIECE_CHARACTERS // 4),
        "\ufeffx",
        "文\n" * 5,
        "\0 \u2028",
    ]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
        pieces = [piece for record in read_records(tmp_path / f"{number}.txt", TEXT) for piece in record.pieces]
        assert "".join(pieces) == text
        assert max(len(piece) for piece in pieces) <= 2 * PIECE_CHARACTERS
    data = prepared(tmp_path, tmp_path / "cache", vocab_size=257, sequence_length=1000, validation_fraction=0.5)
    found = [*texts_of(data.train, data.tokenizer), *texts_of(data.validation, data.tokenizer)]
    assert sorted(found) == sorted(texts)


TEXT = Reading("text", "text", None)


def test_a_file_that_changes_under_our_hands_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    (part,) = scan_file(path, TEXT).parts
    path.write_text("after!")
    with pytest.raises(ConfigError, match=r"a\.txt changed while it was being read"):
        [list(document.pieces) for document in documents_of(path, TEXT, part)]


def test_a_changed_file_is_read_again_and_no_other(
    corpus_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(corpus_dir, tmp_path / "cache")
    (corpus_dir / "7.txt").write_text("quite another text\n")
    (corpus_dir / "8.txt").touch()
    read: list[str] = []

    def noting(path: Path, *rest: Any) -> FileScan:
        read.append(path.name)
        return scan_file(path, *rest)

    monkeypatch.setattr("sharded_train.data.corpus.scan_file", noting)
    data = prepared(corpus_dir, tmp_path / "cache")
    assert read == ["7.txt", "8.txt"]
    both = [*texts_of(data.train, data.tokenizer), *texts_of(data.validation, data.tokenizer)]
    assert "quite another text\n" in both


def test_bad_files_are_refused_in_words_and_nothing_is_written(tmp_path: Path) -> None:
    folder, cache = tmp_path / "corpus", tmp_path / "cache"
    folder.mkdir()
    with pytest.raises(ConfigError) as error:
        prepared(folder, cache, files=(f"{folder}/*.txt", f"{folder}/*.md"))
    assert [("matches no file" in problem) for problem in error.value.problems] == [True, True]
    (folder / "empty.txt").write_bytes(b"")
    with pytest.raises(ConfigError, match="no text in files: 1 files, all of them empty"):
        prepared(folder, cache)
    (folder / "one.txt").write_text("one")
    (folder / "same.txt").write_text("one")
    with pytest.raises(ConfigError, match="2 documents with 1 distinct text cannot be split"):
        prepared(folder, cache)
    (folder / "two.txt").write_bytes(b"caf\xe9")
    (folder / "three.txt").write_bytes("tr\u00e9s".encode()[:3])
    with pytest.raises(ConfigError) as error:
        prepared(folder, cache)
    assert "cannot be read" in error.value.problems[0]
    assert [Path(problem.split(", line 1, byte ")[0]).name for problem in error.value.problems[1:]] == [
        "three.txt",
        "two.txt",
    ]
    assert ["not UTF-8" in problem for problem in error.value.problems] == [False, True, True]
    assert not cache.exists()


def test_empty_files_are_left_out_and_counted(corpus_dir: Path, tmp_path: Path) -> None:
    (corpus_dir / "nothing.txt").write_bytes(b"")
    said: list[str] = []
    data = prepared(corpus_dir, tmp_path / "cache", said=said)
    assert data.description["num_empty_files"] == 1
    assert len([line for line in said if "left out 1 empty files" in line and "nothing.txt" in line]) == 1


def test_bad_settings_are_refused_together() -> None:
    config = DataConfig(validation_fraction=1.0, max_bytes=0, num_epochs=0, read_threads=-1)
    assert [problem.split(" = ")[0] for problem in config.problems()] == [
        "data.validation_fraction",
        "data.max_bytes",
        "data.num_epochs",
        "data.read_threads",
    ]
    assert DataConfig().problems() == []


def test_max_bytes_stops_by_path(corpus_dir: Path, tmp_path: Path) -> None:
    config = DataConfig(files=(f"{corpus_dir}/*.txt",))

    def sizes(config: DataConfig) -> dict[Path, int]:
        (source,) = collect(config, tmp_path, quiet).sources
        return {path: part.num_bytes for path, part in source.parts}

    every = sorted(sizes(config))
    for _ in range(2):  # read, and found in the notes
        some = sizes(dataclasses.replace(config, max_bytes=700))
        assert sorted(some) == every[: len(some)]
        assert sum(some.values()) - some[max(some)] < 700 <= sum(some.values())


def test_cache_is_used_checked_and_mended(corpus_dir: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    said: list[str] = []
    first = prepared(corpus_dir, cache, said=said)
    bits = first.baselines()
    assert sum("training a tokenizer" in line or "tokenizing" in line for line in said) == 2
    contents = {path.name: path.read_bytes() for path in cache.iterdir()}
    # Tokenizer and baselines with their checksums; a shard's note, hashes and two streams; what is in the files.
    assert len(contents) == 9
    said.clear()
    assert prepared(corpus_dir, cache, said=said).baselines() == bits
    assert said == []
    for path in sorted(path for path in cache.iterdir() if not path.name.endswith((".sha256", ".jsonl"))):
        damaged = bytearray(path.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        for harm in (bytes(damaged), bytes(damaged[:-1]), b""):
            path.write_bytes(harm)
            said.clear()
            again = prepared(corpus_dir, cache, said=said)
            assert (again.fingerprint, again.baselines()) == (first.fingerprint, bits)
            assert "damaged" in said[0]
            assert path.name.split(".")[0] in said[0]
            assert {file.name: file.read_bytes() for file in cache.iterdir()} == contents


def test_many_may_prepare_one_directory_at_once(corpus_dir: Path, tmp_path: Path) -> None:
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda: results.append(prepared(corpus_dir, tmp_path / "cache").fingerprint))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(set(results)) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 7


def test_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot write .*cache_dir"):
        cached_file(tmp_path / "file" / "data", Path.touch, quiet)


def test_a_tokenizer_sees_a_sample_of_a_document_longer_than_everything(tmp_path: Path) -> None:
    vocabularies = []
    for name in ("early", "later"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "long.txt").write_text("some words and words\n" * 30_000 + f"{name} " * 1_000)
        (folder / "short.txt").write_text("some words\n")
        data = prepared(folder, tmp_path / f"cache-{name}", vocab_size=270, validation_fraction=1e-9)
        vocabularies.append(data.tokenizer.token_text)
        long = max(texts_of(data.train, data.tokenizer) + texts_of(data.validation, data.tokenizer), key=len)
        assert long == (folder / "long.txt").read_text()
    assert b" words" in vocabularies[0]
    assert vocabularies[0] == vocabularies[1]


def test_text_beyond_the_sample_does_not_change_the_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"some words and words {number}\n" * 2_000)
    first = prepared(folder, tmp_path / "cache", vocab_size=270, validation_fraction=0.2)
    sources = collect(DataConfig(files=(f"{folder}/*.txt",)), tmp_path / "cache", quiet).sources
    last = max(sources[0].parts, key=lambda each: each[1].digest)[0]
    last.unlink()
    said: list[str] = []
    again = prepared(folder, tmp_path / "cache", vocab_size=270, validation_fraction=0.2, said=said)
    assert again.tokenizer.sha256 == first.tokenizer.sha256
    assert not any("training a tokenizer" in line for line in said)
    assert any("tokenizing 39 documents" in line for line in said)  # they are one shard


def test_config_cache_dir_wins(corpus_dir: Path, tmp_path: Path) -> None:
    prepared(corpus_dir, tmp_path / "unused", cache_dir=str(tmp_path / "wanted"))
    assert (tmp_path / "wanted").is_dir()
    assert not (tmp_path / "unused").exists()


def test_baselines_by_hand(tmp_path: Path) -> None:
    tokenizer = trained_tokenizer(lambda: iter(["ab", "ab", "abc"]), "", 258, tmp_path, quiet)
    assert b"ab" in tokenizer.token_text

    def rows(texts: Iterable[str], mask: str = "") -> list[Rows]:
        end = tokenizer.end_of_text
        stream = [
            token
            for text in texts
            for token in (end, *(t | 1 << 15 for t in tokenizer.encode(mask)), *tokenizer.encode(text))
        ]
        return [Rows(ArrayStream(np.array([*stream, end], np.uint16)), 8, end, 1 << 15)]

    # Training: start -> a, a -> b, b -> end, twice each. Validation: start a b c end. One is added to all 257 counts.
    bits = [(2 + 1) / (2 + 257), (2 + 1) / (2 + 257), (0 + 1) / (2 + 257), (0 + 1) / (0 + 257)]
    result = baselines(rows(["ab", "ab"]), rows(["abc"]), tokenizer)
    assert result["byte_bigram_bits_per_byte"] == pytest.approx(-sum(map(math.log2, bits)) / len("abc"), rel=1e-12)
    assert result["gzip_bits_per_byte"] == 8 * len(gzip.compress(b"abc", 9)) / len("abc")
    # A prompt is known, not predicted.
    result = baselines(rows(["ab", "ab"]), rows(["c"], mask="ab"), tokenizer)
    assert result["byte_bigram_bits_per_byte"] == pytest.approx(-sum(map(math.log2, bits[2:])) / len("c"), rel=1e-12)
    assert result["gzip_bits_per_byte"] == 8 * len(gzip.compress(b"c", 9)) / len("c")


def test_baselines_do_not_depend_on_the_parts_they_are_worked_out_in(
    corpus_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = prepared(corpus_dir, tmp_path / "cache")
    train, validation = ([member.rows for member in side.members] for side in (data.train, data.validation))
    whole = baselines(train, validation, data.tokenizer)
    text = "".join(texts_of(data.validation, data.tokenizer)).encode()
    assert whole["gzip_bits_per_byte"] == 8 * len(gzip.compress(text, 9)) / len(text)
    monkeypatch.setattr("sharded_train.data.rows._TOKENS_AT_ONCE", 100)
    monkeypatch.setattr("sharded_train.data.baselines._PARTS", 10**6)
    assert baselines(train, validation, data.tokenizer) == pytest.approx(whole, rel=1e-12)


def test_baselines_of_very_much_text_are_those_of_its_first_part(
    corpus_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = prepared(corpus_dir, tmp_path / "cache")
    train, validation = ([member.rows for member in side.members] for side in (data.train, data.validation))
    monkeypatch.setattr("sharded_train.data.rows._TOKENS_AT_ONCE", 100)
    monkeypatch.setattr("sharded_train.data.baselines._PARTS", 1)
    tokens = validation[0].stream.read(0, 100)
    text = b"".join(data.tokenizer.token_text[token] for token in tokens.tolist())
    found = baselines(train, validation, data.tokenizer)
    assert found["gzip_bits_per_byte"] == 8 * len(gzip.compress(text, 9)) / len(text)

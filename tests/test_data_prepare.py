"""From files to rows: collecting, splitting, tokenizing, caching, baselines, and what bad input is told."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from sharded_train.data.baselines import baselines
from sharded_train.data.cache import cached_file
from sharded_train.data.config import DataConfig
from sharded_train.data.corpus import PIECE_CHARACTERS, collect, split
from sharded_train.data.prepare import TextData, prepare
from sharded_train.data.rows import Rows, write_stream
from sharded_train.data.tokenizer import TextTokenizer, load_tokenizer, trained_tokenizer
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


def prepared(folder: Path, cache: Path, seed: int = 0, sequence_length: int = 32, **changes: Any) -> TextData:
    said: list[str] = changes.pop("said", [])
    config = dataclasses.replace(DataConfig(files=(f"{folder}/*.txt",), validation_fraction=0.2), **changes)
    return prepare(
        config,
        vocab_size=changes.pop("vocab_size", 300),
        sequence_length=sequence_length,
        seed=seed,
        cache_dir=cache,
        progress=said.append,
    )


def texts_of(rows: Rows, tokenizer: TextTokenizer) -> list[str]:
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
    paths = {str(document.path) for document in collect(DataConfig(max_bytes=3_000_000), quiet).documents}
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


def test_split_keeps_duplicates_together_and_documents_on_their_side(corpus_dir: Path) -> None:
    config = DataConfig(files=(f"{corpus_dir}/*.txt",))
    train, validation = split(collect(config, quiet), 0.3, quiet)
    assert len(train) + len(validation) == len(TEXTS)
    for number, text in enumerate(TEXTS):
        (corpus_dir / f"again_{number}.txt").write_bytes(text.encode())
    (corpus_dir / "new.txt").write_text("a new one\n")
    more_train, more_validation = split(collect(config, quiet), 0.3, quiet)
    assert {document.sha256 for document in more_train} >= {document.sha256 for document in train}
    assert {document.sha256 for document in more_validation} >= {document.sha256 for document in validation}
    assert not {d.sha256 for d in more_train} & {d.sha256 for d in more_validation}


@pytest.mark.parametrize(("fraction", "num_validation"), [(1e-9, 1), (1 - 1e-9, 2)])
def test_split_of_a_few_documents_leaves_no_side_empty_and_says_so(
    tmp_path: Path, fraction: float, num_validation: int
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    said: list[str] = []
    corpus = collect(DataConfig(files=(f"{tmp_path}/*.txt",)), quiet)
    train, validation = split(corpus, fraction, said.append)
    assert (len(train), len(validation)) == (3 - num_validation, num_validation)
    assert f"{3 - num_validation} for training, {num_validation} for validation" in said[0]


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
    documents = collect(DataConfig(files=(f"{tmp_path}/*.txt",)), quiet).documents
    assert {"".join(document.pieces()) for document in documents} == set(texts)
    assert max(len(piece) for document in documents for piece in document.pieces()) <= 2 * PIECE_CHARACTERS
    tokenizer = trained_tokenizer(documents, 257, tmp_path, quiet)
    write_stream(tmp_path / "stream", documents, tokenizer)
    rows = Rows.open(tmp_path / "stream", sequence_length=1000, tokenizer=tokenizer)
    assert sorted(texts_of(rows, tokenizer)) == sorted(texts)


def test_a_file_that_changes_under_our_hands_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    (document,) = collect(DataConfig(files=(str(path),)), quiet).documents
    path.write_text("after!")
    with pytest.raises(ConfigError, match=r"a\.txt changed while it was being read"):
        list(document.pieces())


def test_bad_files_are_refused_in_words_and_nothing_is_written(tmp_path: Path) -> None:
    folder, cache = tmp_path / "corpus", tmp_path / "cache"
    folder.mkdir()
    with pytest.raises(ConfigError) as error:
        prepared(folder, cache, files=(f"{folder}/*.txt", f"{folder}/*.md"))
    assert [("matches no file" in problem) for problem in error.value.problems] == [True, True]
    (folder / "empty.txt").write_bytes(b"")
    with pytest.raises(ConfigError, match="no text in 1 files, 1 of them empty"):
        prepared(folder, cache)
    (folder / "one.txt").write_text("one")
    (folder / "same.txt").write_text("one")
    with pytest.raises(ConfigError, match="2 documents with 1 distinct text cannot be split"):
        prepared(folder, cache)
    (folder / "two.txt").write_bytes(b"caf\xe9")
    (folder / "three.txt").write_bytes("tr\u00e9s".encode()[:3])
    with pytest.raises(ConfigError) as error:
        prepared(folder, cache)
    assert "not readable UTF-8" in error.value.problems[0]
    assert [Path(problem.split(": ")[0]).name for problem in error.value.problems[1:]] == ["three.txt", "two.txt"]
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


def test_max_bytes_stops_by_path(corpus_dir: Path) -> None:
    config = DataConfig(files=(f"{corpus_dir}/*.txt",))
    every = sorted(collect(config, quiet).documents, key=lambda document: document.path)
    some = collect(dataclasses.replace(config, max_bytes=700), quiet).documents
    assert {document.path for document in some} == {document.path for document in every[: len(some)]}
    sizes = [document.num_bytes for document in every[: len(some)]]
    assert sum(sizes[:-1]) < 700 <= sum(sizes)


def test_cache_is_used_checked_and_mended(corpus_dir: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    said: list[str] = []
    first = prepared(corpus_dir, cache, said=said)
    bits = first.baselines()
    assert sum("training a tokenizer" in line or "tokenizing" in line for line in said) == 3
    contents = {path.name: path.read_bytes() for path in cache.iterdir()}
    assert len(contents) == 8  # tokenizer, two streams, baselines, each with its checksum
    said.clear()
    assert prepared(corpus_dir, cache, said=said).baselines() == bits
    assert said == []
    for path in sorted(cache.glob("*[!6]")):
        damaged = bytearray(path.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        for harm in (bytes(damaged), bytes(damaged[:-1]), b""):
            path.write_bytes(harm)
            said.clear()
            again = prepared(corpus_dir, cache, said=said)
            assert (again.fingerprint, again.baselines()) == (first.fingerprint, bits)
            assert f"{path} is damaged" in said[0]
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
    assert len(list((tmp_path / "cache").iterdir())) == 6


def test_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot write .*cache_dir"):
        cached_file(tmp_path / "file" / "data", Path.touch, quiet)


def test_config_cache_dir_wins(corpus_dir: Path, tmp_path: Path) -> None:
    prepared(corpus_dir, tmp_path / "unused", cache_dir=str(tmp_path / "wanted"))
    assert (tmp_path / "wanted").is_dir()
    assert not (tmp_path / "unused").exists()


def saved(path: Path, backend: tokenizers.Tokenizer) -> Path:
    backend.save(str(path))
    return path


def byte_level(*specials: str, vocab_size: int = 270) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(specials), initial_alphabet=alphabet)
    backend.train_from_iterator(["one and two and three"] * 3, trainer)
    return backend


def test_given_tokenizer_is_used_as_it_is_but_for_what_would_lose_text(tmp_path: Path) -> None:
    backend = byte_level("<|begin|>", "<|endoftext|>")
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    backend.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    backend.add_tokens(["<tool>"])
    tokenizer = load_tokenizer(saved(tmp_path / "tokenizer.json", backend), 300, quiet)
    assert tokenizer.end_of_text == 1
    text = "one <|endoftext|> and <tool> tw\u00f6 <|begin|>\r\n\t"
    tokens = tokenizer.encode(text)
    assert not {0, 1} & set(tokens)
    assert len(tokenizer.encode("o")) == 1
    assert tokenizer.decode([0, *tokens, 1, 299]) == text
    assert tokenizer.token_bytes[tokens].sum() == len(text.encode())
    assert tokenizer.token_bytes[[0, 1]].tolist() == [0, 0]
    assert tokenizer.token_bytes.dtype == np.int32
    assert len(tokenizer.token_bytes) == tokenizer.vocab_size == backend.get_vocab_size()


def test_end_of_text_that_is_not_marked_special_is_special_all_the_same(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens(["<|endoftext|>"])
    tokenizer = load_tokenizer(saved(tmp_path / "tokenizer.json", backend), 300, quiet)
    assert tokenizer.end_of_text not in tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.decode([tokenizer.end_of_text]) == ""


def test_unusable_tokenizers_are_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a readable"):
        load_tokenizer(path, 300, quiet)
    path.write_text('{"model": 3}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a readable"):
        load_tokenizer(path, 300, quiet)
    with pytest.raises(ConfigError, match=r"no token for the end of a text.*its added tokens are <odd>"):
        load_tokenizer(saved(path, byte_level("<odd>")), 300, quiet)
    size = byte_level("<|endoftext|>").get_vocab_size()
    with pytest.raises(ConfigError, match=rf"has {size} tokens, more than model\.vocab_size = {size - 1}\."):
        load_tokenizer(saved(path, byte_level("<|endoftext|>")), size - 1, quiet)
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<|endoftext|>": 1}, unk_token="a"))
    with pytest.raises(ConfigError, match="not a byte-level tokenizer"):
        load_tokenizer(saved(path, words), 300, quiet)
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 256 is too small.* = 257 tokens"):
        trained_tokenizer([], 256, tmp_path, quiet)


def test_tokenizer_that_alters_text_is_said(tmp_path: Path) -> None:
    backend = byte_level("</s>")
    backend.normalizer = tokenizers.normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    said: list[str] = []
    load_tokenizer(saved(tmp_path / "tokenizer.json", backend), 300, said.append)
    assert "alters text" in said[0]


def test_the_smallest_vocabulary_is_the_bytes(corpus_dir: Path, tmp_path: Path) -> None:
    documents = collect(DataConfig(files=(f"{corpus_dir}/*.txt",)), quiet).documents
    tokenizer = trained_tokenizer(documents, 257, tmp_path, quiet)
    assert tokenizer.vocab_size == 257
    assert sorted(tokenizer.token_text) == [b"", *sorted(bytes([byte]) for byte in range(256))]


def test_a_tokenizer_sees_a_sample_of_a_document_longer_than_everything(tmp_path: Path) -> None:
    vocabularies = []
    for name in ("early", "later"):
        path = tmp_path / f"{name}.txt"
        path.write_text("some words and words\n" * 50_000 + f"{name} " * 10_000)
        documents = collect(DataConfig(files=(str(path),)), quiet).documents
        vocabularies.append(trained_tokenizer(documents, 270, tmp_path / name, quiet).token_text)
    assert b" words" in vocabularies[0]
    assert vocabularies[0] == vocabularies[1]


def test_baselines_by_hand(tmp_path: Path) -> None:
    for name, text in {"1": "ab", "2": "ab", "3": "abc"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    documents = {d.path.name: d for d in collect(DataConfig(files=(f"{tmp_path}/*.txt",)), quiet).documents}
    tokenizer = trained_tokenizer(list(documents.values()), 258, tmp_path, quiet)
    assert b"ab" in tokenizer.token_text

    def rows(*names: str) -> Rows:
        path = tmp_path / "-".join(names)
        write_stream(path, [documents[f"{name}.txt"] for name in names], tokenizer)
        return Rows.open(path, sequence_length=8, tokenizer=tokenizer)

    # Training: start -> a, a -> b, b -> end, twice each. Validation: start a b c end. One is added to all 257 counts.
    bits = [(2 + 1) / (2 + 257), (2 + 1) / (2 + 257), (0 + 1) / (2 + 257), (0 + 1) / (0 + 257)]
    result = baselines(rows("1", "2"), rows("3"), tokenizer)
    assert result["byte_bigram_bits_per_byte"] == pytest.approx(-sum(map(math.log2, bits)) / len("abc"), rel=1e-12)
    assert result["gzip_bits_per_byte"] == 8 * len(gzip.compress(b"abc", 9)) / len("abc")


def test_baselines_do_not_depend_on_the_parts_they_are_worked_out_in(
    corpus_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = prepared(corpus_dir, tmp_path / "cache")
    whole = baselines(data.train, data.validation, data.tokenizer)
    text = "".join(texts_of(data.validation, data.tokenizer)).encode()
    assert whole["gzip_bits_per_byte"] == 8 * len(gzip.compress(text, 9)) / len(text)
    monkeypatch.setattr("sharded_train.data.baselines._TOKENS_AT_ONCE", 100)
    monkeypatch.setattr("sharded_train.data.baselines._TRAIN_PARTS", 10**6)
    assert baselines(data.train, data.validation, data.tokenizer) == pytest.approx(whole, rel=1e-12)

"""From the config to rows: documents, tokenizer, token streams, and the fingerprint of it all."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sharded_train.data.baselines import cached_baselines
from sharded_train.data.cache import cached_file
from sharded_train.data.config import DataConfig
from sharded_train.data.corpus import Corpus, Document, collect, split
from sharded_train.data.rows import PACKING, Rows, write_stream
from sharded_train.data.tokenizer import TextTokenizer, load_tokenizer, trained_tokenizer
from sharded_train.errors import ConfigError

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class TextData:
    """A text ready for training.

    `fingerprint` is equal where the samples of every step are. `description` says in JSON's terms what the text is;
    `baselines()` gives `byte_bigram_bits_per_byte` and `gzip_bits_per_byte` of the validation text, worked out when
    first asked for.
    """

    tokenizer: TextTokenizer
    train: Rows
    validation: Rows
    fingerprint: str
    description: dict[str, Any]
    baselines: Callable[[], dict[str, float]]


def prepare(
    config: DataConfig, *, vocab_size: int, sequence_length: int, seed: int, cache_dir: Path, progress: Progress
) -> TextData:
    """Collect, split, tokenize and pack the text that `config` describes.

    What is built lies in `config.cache_dir`, else in `cache_dir`, and is found there the next time. Any number of
    processes may call this on one directory at the same time. Nothing is written before the settings and the files
    are found good; ConfigError says what is wrong with them.
    """
    if problems := config.problems():
        raise ConfigError(problems)
    folder = Path(config.cache_dir).expanduser() if config.cache_dir is not None else cache_dir
    corpus = collect(config, progress)
    train, validation = split(corpus, config.validation_fraction, progress)
    if config.tokenizer is None:
        tokenizer = trained_tokenizer(train, vocab_size, folder, progress)
    else:
        tokenizer = load_tokenizer(Path(config.tokenizer).expanduser(), vocab_size, progress)

    def rows(name: str, documents: Sequence[Document]) -> tuple[Rows, str]:
        key = _digest(PACKING, tokenizer.sha256, [document.sha256 for document in documents])
        path = folder / f"{name}-{key[:16]}.tokens"

        def build(temporary: Path) -> None:
            num_bytes = sum(document.num_bytes for document in documents)
            progress(f"data: tokenizing {len(documents)} documents for {name}, {num_bytes / 1e6:.1f} MB")
            write_stream(temporary, documents, tokenizer)

        digest = cached_file(path, build, progress)
        return Rows.open(path, sequence_length=sequence_length, tokenizer=tokenizer), digest

    train_rows, train_digest = rows("train", train)
    validation_rows, validation_digest = rows("validation", validation)
    streams = [train_digest, validation_digest]
    return TextData(
        tokenizer=tokenizer,
        train=train_rows,
        validation=validation_rows,
        fingerprint=_digest(
            PACKING, corpus.source, tokenizer.sha256, streams, sequence_length, seed, config.validation_fraction
        ),
        description={
            **_describe(corpus),
            "files": list(config.files),
            "max_bytes": config.max_bytes,
            "tokenizer": config.tokenizer or "trained here",
            "tokenizer_size": tokenizer.vocab_size,
            "train": _describe_side(train, train_rows),
            "validation": _describe_side(validation, validation_rows),
        },
        baselines=partial(
            cached_baselines,
            folder / f"baselines-{_digest(tokenizer.sha256, streams)[:16]}.json",
            train_rows,
            validation_rows,
            tokenizer,
            progress,
        ),
    )


def _describe(corpus: Corpus) -> dict[str, Any]:
    return {
        "source": corpus.source,
        "num_documents": len(corpus.documents),
        "num_duplicates": len(corpus.documents) - len({document.sha256 for document in corpus.documents}),
        "num_bytes": sum(document.num_bytes for document in corpus.documents),
        "num_empty_files": corpus.num_empty,
        "num_undecodable_files": corpus.num_undecodable,
    }


def _describe_side(documents: Sequence[Document], rows: Rows) -> dict[str, int]:
    return {
        "num_documents": len(documents),
        "num_bytes": sum(document.num_bytes for document in documents),
        "num_tokens": rows.num_targets - len(documents),
        "num_rows": len(rows),
    }


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

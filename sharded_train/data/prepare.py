"""From the config to rows: documents, tokenizer, token streams, and the fingerprint of it all."""

from __future__ import annotations

import dataclasses
import platform
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sharded_train.data.baselines import cached_baselines
from sharded_train.data.cache import cached_file, digest
from sharded_train.data.config import DataConfig
from sharded_train.data.corpus import TELL_EVERY, Corpus, SourceFiles, collect
from sharded_train.data.mixture import Member, Mixture
from sharded_train.data.parallel import Advance, each
from sharded_train.data.rows import PACKING, Rows, aligned_starts
from sharded_train.data.scan import Part, documents_of
from sharded_train.data.shards import SIDES, Shard, note_of, plan, write_shard
from sharded_train.data.token_files import ShardStream, mask_bit, token_dtype
from sharded_train.data.tokenizer import (
    SAMPLE_BYTES_PER_TOKEN,
    TextTokenizer,
    check_vocab_size,
    load_tokenizer,
    trained_tokenizer,
)
from sharded_train.errors import ConfigError

Progress = Callable[[str], None]
Notes = dict[str, dict[str, Any]]  # of shards, by their keys
_LARGE_BYTES = 1 << 30
_VERIFIED_BYTES = 1 << 28  # of text: at most so much is compared with its checksums at every start


@dataclasses.dataclass(frozen=True)
class TextData:
    """A text ready for training.

    `fingerprint` is equal where the samples of every step are. `description` says in JSON's terms what the text is;
    `baselines()` gives `byte_bigram_bits_per_byte` and `gzip_bits_per_byte` of the validation text, worked out when
    first asked for. `shards` are the files it lies in, by source.
    """

    tokenizer: TextTokenizer
    train: Mixture
    validation: Mixture
    fingerprint: str
    description: dict[str, Any]
    baselines: Callable[[], dict[str, float]]
    shards: dict[str, list[Shard]]
    notes: Notes


def prepare(
    config: DataConfig,
    *,
    vocab_size: int,
    sequence_length: int,
    seed: int,
    cache_dir: Path,
    progress: Progress,
    num_workers: int = 1,
    meter: Callable[[int, int], None] | None = None,
    verify: bool = False,
) -> TextData:
    """Collect, split, tokenize and pack the text that `config` describes.

    What is built lies in `config.cache_dir`, else in `cache_dir`, and is found there the next time; what was begun is
    gone on with. Any number of processes may call this on one directory at the same time. Nothing is written before
    the settings and the files are found good; ConfigError says what is wrong with them.

    `meter` is told how many bytes of text are tokenized, of how many; `verify` compares all that is there with its
    checksums, however much that is.
    """
    if problems := config.problems():
        raise ConfigError(problems)
    folder = Path(config.cache_dir).expanduser() if config.cache_dir is not None else cache_dir
    if config.tokenizer is None:
        check_vocab_size(vocab_size)
    given = None if config.tokenizer is None else load_tokenizer(config.tokenizer, vocab_size, progress)
    corpus = collect(config, folder, progress, num_workers=num_workers)
    tokenizer = given or _trained_tokenizer(corpus, vocab_size, folder, progress)
    shards = {source.name: plan(source, corpus, tokenizer, folder) for source in corpus.sources}
    every = [shard for of_source in shards.values() for shard in of_source]
    verify = verify or sum(shard.num_bytes for shard in every) <= _VERIFIED_BYTES
    notes = _build(every, tokenizer, progress, num_workers, meter, verify)
    sides = {side: _mixture(side, corpus, shards, notes, tokenizer, sequence_length, progress) for side in SIDES}
    train, validation = sides["train"], sides["validation"]
    _check(train)
    streams = [[notes[shard.key]["files"] for shard in of_source] for of_source in shards.values()]
    return TextData(
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        fingerprint=digest(
            PACKING,
            corpus.words,
            tokenizer.sha256,
            streams,
            [[source.weight, source.num_epochs] for source in config.all_sources()],
            [source.reading.prompt is not None for source in corpus.sources],
            sequence_length,
            seed,
            config.validation_fraction,
        ),
        description=_describe(config, corpus, tokenizer, shards, notes, train, validation),
        baselines=partial(
            cached_baselines,
            folder / f"baselines-{digest(tokenizer.sha256, streams)[:16]}.json",
            [member.rows for member in train.members],
            [member.rows for member in validation.members],
            tokenizer,
            progress,
        ),
        shards=shards,
        notes=notes,
    )


def _trained_tokenizer(corpus: Corpus, vocab_size: int, folder: Path, progress: Progress) -> TextTokenizer:
    """A tokenizer of the first of each source's text, of each by its weight, else by its size."""
    sizes = [source.source.weight or source.num_bytes for source in corpus.sources]
    wanted = [round(SAMPLE_BYTES_PER_TOKEN * vocab_size * size / sum(sizes)) for size in sizes]
    first = [_first_parts(source, num_bytes) for source, num_bytes in zip(corpus.sources, wanted, strict=True)]

    def sample() -> Iterator[str]:
        for source, num_bytes, parts in zip(corpus.sources, wanted, first, strict=True):
            yield from _first_text(source, parts, corpus.border, num_bytes)

    key = digest(corpus.border, wanted, [[part.digest for _, part in parts] for parts in first])
    return trained_tokenizer(sample, key, vocab_size, folder, progress)


def _first_parts(source: SourceFiles, num_bytes: int) -> list[tuple[Path, Part]]:
    """As many parts as hold so much text, in the order of their contents: text that is added seldom changes them."""
    parts = []
    for path, part in source.parts:
        if num_bytes > 0:
            parts.append((path, part))
        num_bytes -= part.num_bytes
    return parts


def _first_text(source: SourceFiles, parts: Sequence[tuple[Path, Part]], border: str, num_bytes: int) -> Iterator[str]:
    """The training text of parts, up to so many bytes, in pieces: one document may be larger than any sample."""
    for path, part in parts:
        for document in documents_of(path, source.reading, part):
            is_train = document.sha256 >= border
            for piece in (document.prompt, *document.pieces) if document.prompt else document.pieces:
                if is_train:
                    yield piece
                    num_bytes -= len(piece.encode())
                if num_bytes <= 0:
                    return


def _build(
    shards: Sequence[Shard],
    tokenizer: TextTokenizer,
    progress: Progress,
    num_workers: int,
    meter: Callable[[int, int], None] | None,
    verify: bool,
) -> Notes:
    """The notes of all shards, after those that are not there or not whole have been written."""
    notes, missing = {}, []
    for shard in {shard.key: shard for shard in shards}.values():
        note = note_of(shard, verify=verify)
        if note is not None:
            notes[shard.key] = note
            continue
        if shard.path("json").exists():
            progress(f"{shard.path('json')} or a file beside it is damaged: building them again")
            shard.path("json").unlink(missing_ok=True)
        missing.append(shard)
    if missing:
        advance = _teller(missing, progress, meter)
        # Hosts that share a folder begin in different places, and leave out what another has done by then.
        first = zlib.crc32(platform.node().encode()) % len(missing)
        missing = [*missing[first:], *missing[:first]]
        notes |= each(partial(write_shard, tokenizer), missing, num_workers=num_workers, advance=advance)
    return notes


def _teller(missing: Sequence[Shard], progress: Progress, meter: Callable[[int, int], None] | None) -> Advance:
    """What is told of bytes that are tokenized, and tells `meter`, or `progress` now and then."""
    total, done, told = sum(shard.num_bytes for shard in missing), 0, time.monotonic()
    num_documents = sum(part.num_documents for shard in missing for _, part in shard.parts)
    ahead = "; `sharded-train data` does it ahead, on all cores" if total > _LARGE_BYTES and meter is None else ""
    progress(f"data: tokenizing {num_documents:,} documents, {total / 1e6:,.1f} MB{ahead}")

    def advance(amount: int) -> None:
        nonlocal done, told
        done += amount
        if meter is not None:
            meter(done, total)
        elif time.monotonic() - told > TELL_EVERY:
            progress(f"data: tokenized {done / 1e6:,.0f} of {total / 1e6:,.0f} MB")
            told = time.monotonic()

    return advance


def _mixture(
    side: str,
    corpus: Corpus,
    shards: dict[str, list[Shard]],
    notes: Notes,
    tokenizer: TextTokenizer,
    sequence_length: int,
    progress: Progress,
) -> Mixture:
    members = []
    for source in corpus.sources:
        name, is_masked = source.name, source.reading.prompt is not None
        dtype = token_dtype(tokenizer, is_masked)
        files = [(shard.path(f"{side}.arrayrecord"), notes[shard.key][side]["length"]) for shard in shards[name]]
        stream = ShardStream(files, dtype, tokenizer.end_of_text)
        rows = Rows(stream, sequence_length, tokenizer.end_of_text, mask_bit(dtype, is_masked))
        if is_masked:
            key = digest(PACKING, sequence_length, side, [shard.key for shard in shards[name]])
            rows = _aligned(rows, shards[name][0].folder / f"rows-{key[:16]}.starts", progress)
        if side == "train":
            members.append(Member(name, rows, source.source.weight, source.source.num_epochs))
        else:
            members.append(Member(name, rows))
    return Mixture(tuple(members))


def _aligned(rows: Rows, path: Path, progress: Progress) -> Rows:
    """Rows that do not cut documents, by an index on disk."""

    def build(temporary: Path) -> None:
        np.fromiter(aligned_starts(rows), "<i8").tofile(temporary)

    cached_file(path, build, progress)
    starts = np.memmap(path, "<i8", mode="r") if path.stat().st_size else np.array([], "<i8")
    return dataclasses.replace(rows, starts=starts)


def _check(train: Mixture) -> None:
    """Raise ConfigError for sources that are to be trained on and have nothing for it."""
    problems = [
        f"data: all documents of {member.name} fell to validation, but its weight is {member.weight}; give it more "
        "documents, or lower data.validation_fraction"
        for member in train.members
        if member.weight is not None and not len(member.rows)
    ]
    if problems:
        raise ConfigError(problems)


def _describe(
    config: DataConfig,
    corpus: Corpus,
    tokenizer: TextTokenizer,
    shards: dict[str, list[Shard]],
    notes: Notes,
    train: Mixture,
    validation: Mixture,
) -> dict[str, Any]:
    every = [shard for of_source in shards.values() for shard in of_source]
    described: dict[str, Any] = {
        "source": corpus.words,
        "num_documents": sum(source.num_documents for source in corpus.sources),
        "num_bytes": sum(source.num_bytes for source in corpus.sources),
        "num_empty_files": sum(source.num_empty for source in corpus.sources),
        "num_undecodable_files": sum(source.num_undecodable for source in corpus.sources),
        "files": list(config.files),
        "max_bytes": config.max_bytes,
        "tokenizer": config.tokenizer or "trained here",
        "tokenizer_size": tokenizer.vocab_size,
        **{
            side: _describe_side(side, every, notes) | {"num_rows": len(rows)}
            for side, rows in (("train", train), ("validation", validation))
        },
    }
    if config.sources:
        described["sources"] = {
            source.name: {
                "files": list(source.source.files),
                "weight": source.source.weight,
                "num_epochs": source.source.num_epochs,
                "share": share,
                "train": _describe_side("train", shards[source.name], notes) | {"num_rows": len(member.rows)},
            }
            for source, member, share in zip(corpus.sources, train.members, train.shares, strict=True)
        }
    return described


def _describe_side(side: str, shards: Sequence[Shard], notes: Notes) -> dict[str, int]:
    keys = ("num_documents", "num_bytes", "num_tokens", "num_masked")
    return {key: sum(notes[shard.key][side][key] for shard in shards) for key in keys}

"""What a loss is worth: bits per byte of the validation text by two models that anyone can check."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sharded_train.data.cache import cached_file
from sharded_train.data.rows import Rows
from sharded_train.data.tokenizer import NUM_BYTES, TextTokenizer

NUM_SYMBOLS = NUM_BYTES + 1  # the bytes, and the end of a document
_PARTS = 64  # of a stream at most, each of 2^18 tokens: plenty for 257 x 257 counts, and for a figure to compare with
_GZIP_WINDOW = 31  # zlib's number for a window of 32 KiB in a gzip frame


def baselines(train: Sequence[Rows], validation: Sequence[Rows], tokenizer: TextTokenizer) -> dict[str, float]:
    """Bits per byte of the validation text by a byte-bigram model of the training text and by gzip -9.

    The bigram model predicts what our model does: every byte of every document and its end, but those of prompts,
    knowing where it begins. gzip is given all that is predicted as one text, in the order of the rows, and is not
    charged for where documents end. Of very much text, the first part of every source counts.
    """
    counts = np.zeros((NUM_SYMBOLS, NUM_SYMBOLS), np.int64)
    for rows in train:
        for symbols, _ in islice(_symbols(rows, tokenizer), max(1, _PARTS // len(train))):
            counts += bigram_counts(symbols)
    cost = bigram_bits(counts)
    bigram_sum, num_bytes, gzip_bytes = 0.0, 0, 0
    packer = zlib.compressobj(9, zlib.DEFLATED, _GZIP_WINDOW)
    for rows in validation:
        for symbols, is_target in islice(_symbols(rows, tokenizer), max(1, _PARTS // len(validation))):
            bigram_sum += float(cost[symbols[:-1], symbols[1:]][is_target[1:]].sum())
            text = symbols[1:][is_target[1:] & (symbols[1:] < NUM_BYTES)].astype(np.uint8).tobytes()
            num_bytes += len(text)
            gzip_bytes += len(packer.compress(text))
    gzip_bytes += len(packer.flush())
    return {
        "byte_bigram_bits_per_byte": bigram_sum / max(1, num_bytes),
        "gzip_bits_per_byte": 8 * gzip_bytes / max(1, num_bytes),
    }


def cached_baselines(
    path: Path,
    train: Sequence[Rows],
    validation: Sequence[Rows],
    tokenizer: TextTokenizer,
    progress: Callable[[str], None],
) -> dict[str, float]:
    """`baselines`, kept in a JSON file."""

    def build(temporary: Path) -> None:
        temporary.write_text(json.dumps(baselines(train, validation, tokenizer)))

    cached_file(path, build, progress)
    values: dict[str, float] = json.loads(path.read_text())
    return values


def bigram_counts(symbols: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[NUM_SYMBOLS, NUM_SYMBOLS] How often each symbol follows each."""
    pairs = symbols[:-1] * NUM_SYMBOLS + symbols[1:]
    return np.bincount(pairs, minlength=NUM_SYMBOLS**2).reshape(NUM_SYMBOLS, NUM_SYMBOLS)


def bigram_bits(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """[previous, next] -log2 p(next | previous), each count plus one (Laplace), so that nothing is impossible."""
    return np.log2(counts.sum(axis=1, keepdims=True) + NUM_SYMBOLS) - np.log2(counts + 1)


def _symbols(rows: Rows, tokenizer: TextTokenizer) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]]:
    """The stream's bytes, and NUM_BYTES for end of text, in parts, and which of them are predicted.

    Each part begins with the last symbol before it.
    """
    texts = [np.frombuffer(text, np.uint8).astype(np.uint16).tobytes() for text in tokenizer.token_text]
    texts[tokenizer.end_of_text] = np.array([NUM_BYTES], np.uint16).tobytes()
    sizes = np.array([len(text) // 2 for text in texts])
    last, last_is_target = np.array([], np.int64), np.array([], bool)
    for stored in rows.chunks():
        tokens = stored.astype(np.int64) & ~rows.mask_bit
        part = b"".join([texts[token] for token in tokens.tolist()])
        symbols = np.concatenate([last, np.frombuffer(part, np.uint16).astype(np.int64)])
        is_target = np.concatenate([last_is_target, np.repeat(stored & rows.mask_bit == 0, sizes[tokens])])
        yield symbols, is_target
        last, last_is_target = symbols[-1:], is_target[-1:]

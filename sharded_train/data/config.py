"""What text to train on."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where the documents come from and how they are split.

    `files` are globs of text files, each file one document; empty means the source code of this Python's own standard library, which
    is on every machine. `tokenizer` is None for a byte-level BPE of `model.vocab_size` trained on the spot.
    """

    files: tuple[str, ...] = ()
    max_bytes: int | None = None  # stop collecting documents when they hold this many bytes
    validation_fraction: float = 0.01
    tokenizer: str | None = None  # path of a tokenizer.json
    cache_dir: str | None = None  # None: the workdir's `data`
    num_epochs: int | None = None  # None: as many as the steps need
    read_threads: int = 2

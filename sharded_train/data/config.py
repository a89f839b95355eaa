"""What text to train on."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where the documents come from and how they are split.

    `files` are globs of UTF-8 text files, each file one document; empty means the source code of this Python's own
    standard library, which is on every machine. `tokenizer` is None for a byte-level BPE of `model.vocab_size`
    trained on the spot.
    """

    files: tuple[str, ...] = ()
    max_bytes: int | None = None  # stop collecting documents, by path, once they hold this many bytes
    validation_fraction: float = 0.01  # of the documents, by the hash of their contents
    tokenizer: str | None = None  # path of a byte-level tokenizer.json
    cache_dir: str | None = None  # None: the workdir's `data`
    num_epochs: int | None = None  # None: as many as the steps need
    read_threads: int = 2  # 0: read in the training thread

    def problems(self) -> list[str]:
        """What is wrong with these settings, in words; nothing is read from disk."""
        checks = [
            (
                0.0 < self.validation_fraction < 1.0,
                f"data.validation_fraction = {self.validation_fraction} must lie between 0 and 1, both excluded",
            ),
            (
                self.max_bytes is None or self.max_bytes > 0,
                f"data.max_bytes = {self.max_bytes} must be at least 1 (None: all documents)",
            ),
            (
                self.num_epochs is None or self.num_epochs > 0,
                f"data.num_epochs = {self.num_epochs} must be at least 1 (None: as many as the steps need)",
            ),
            (self.read_threads >= 0, f"data.read_threads = {self.read_threads} must be at least 0"),
        ]
        return [problem for holds, problem in checks if not holds]

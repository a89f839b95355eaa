"""What the functions of `draw` return."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sharded_train.rehearse.page import document
from sharded_train.rehearse.page_parts import fragment


@dataclasses.dataclass(frozen=True)
class Html:
    """A picture or tables as HTML, which a notebook shows; `text` says the same in words."""

    body: str
    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return fragment(self.body)

    def save(self, path: str | Path) -> None:
        """Write it as one HTML page that needs nothing else."""
        Path(path).write_text(document(self.text.partition("\n")[0], self.body), encoding="utf-8")

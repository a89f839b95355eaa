"""What `doctor` finds: one line each."""

from __future__ import annotations

import dataclasses
from typing import Literal

Status = Literal["ok", "warning", "failed"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """About `what` something is found, in words; what is not ok comes with what mends it."""

    what: str
    status: Status
    words: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert (self.status == "ok") != bool(self.fix), self


def judged(what: str, words: str, *, failed: str = "", warning: str = "") -> Finding:
    """A finding that is ok unless there is something to mend: `failed` and `warning` are fixes, the worse counts."""
    status: Status = "failed" if failed else "warning" if warning else "ok"
    return Finding(what, status, words, failed or warning)

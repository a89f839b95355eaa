"""The errors that are a person's to mend; everything else is a bug of ours and keeps its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class ConfigError(ValueError):
    """What was asked for cannot be done. Carries every violation found, so that all can be mended at once.

    The command line prints the problems one to a line and exits with code 2.
    """

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        assert self.problems, "a ConfigError needs at least one problem"
        super().__init__("\n".join(self.problems))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" when a known word is near, else nothing."""
    near = nearest_word(word, known)
    return f"; did you mean {near}?" if near else ""


def nearest_word(word: str, known: Iterable[str]) -> str:
    """The known word that is nearest, or nothing if none is near."""
    known = list(known)
    longer = [each for each in known if word and each.startswith(word)]  # fp8: fp8_delayed, not mxfp8
    return next(iter(longer or difflib.get_close_matches(word, known, n=1)), "")

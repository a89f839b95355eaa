"""Names of what lies in a directory of checkpoints, on disks and in buckets alike."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

VERIFIED = "VERIFIED"  # the record, without which nothing is a checkpoint
SAVING = "saving"  # ours while a checkpoint is written and verified
DELETING = "deleting"  # ours while one is removed
DAMAGED = "damaged"  # set aside, never deleted
ROLLED_BACK = "rolled_back"  # set aside by a roll-back to an earlier step
SCHEME = "gs://"
_ASIDE = re.compile(rf"\d+\.({DAMAGED}|{ROLLED_BACK})(-\d+)?")
_PROBE = re.compile(r"\.probe-\d+-\d+")


def is_step(name: str) -> bool:
    return name.isdecimal() and name.isascii() and len(name) <= 18 and str(int(name)) == name


def is_aside(name: str) -> bool:
    return _ASIDE.fullmatch(name) is not None


def asides(name: str, suffix: str) -> Iterator[str]:
    """Names for what is put aside, without end: 120.damaged, 120.damaged-2 and so on."""
    yield f"{name}.{suffix}"
    yield from (f"{name}.{suffix}-{i}" for i in itertools.count(2))


def is_probe(name: str) -> bool:
    """What a process leaves that was killed while it tried whether it can write."""
    return _PROBE.fullmatch(name) is not None


def misnamed(place: str) -> str:
    """What is wrong with the name of a directory, or of a place in a bucket; empty if it can be one."""
    wanted = f"wanted an absolute path, or {SCHEME}BUCKET/PREFIX"
    if not place.strip():
        return f"it is empty; {wanted}, or none"
    if place.startswith(SCHEME):
        bucket, _, prefix = place.removeprefix(SCHEME).partition("/")
        lacking = "prefix in the bucket" if bucket else "bucket"
        return "" if bucket and prefix.strip("/") else f"it names no {lacking}; {wanted}"
    if ":/" in place:
        return f"an address of another kind; {wanted}"
    return "" if place.startswith("/") else f"a relative path is another place from another working directory; {wanted}"

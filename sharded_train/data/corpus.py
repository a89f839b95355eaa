"""Which files there are, what is in them, and which of their documents are kept for validation."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import platform
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from sharded_train.data.cache import digest, write_whole
from sharded_train.data.config import DataConfig, Source
from sharded_train.data.parallel import Advance, each
from sharded_train.data.records import BadText, Reading
from sharded_train.data.scan import FileScan, Part, not_readable, scan_file
from sharded_train.errors import ConfigError

Progress = Callable[[str], None]
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"}
TELL_EVERY = 15.0  # seconds
_HASH_DIGITS = 16  # of a document's hash decide which side it is on


@dataclasses.dataclass(frozen=True)
class SourceFiles:
    """A source with what is in its files, ordered by their contents: no path, disk or machine has a say in it."""

    source: Source
    reading: Reading
    scans: tuple[FileScan, ...]
    num_empty: int  # files without text, left out
    num_undecodable: int  # files of the standard library that are not UTF-8, left out

    @property
    def name(self) -> str:
        assert self.source.name is not None
        return self.source.name

    @property
    def parts(self) -> list[tuple[Path, Part]]:
        return [(Path(scan.path), part) for scan in self.scans for part in scan.parts]

    @property
    def num_bytes(self) -> int:
        return sum(scan.num_bytes for scan in self.scans)

    @property
    def num_documents(self) -> int:
        return sum(part.num_documents for _, part in self.parts)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """All sources. A document is for validation when its hash is below `border`."""

    sources: tuple[SourceFiles, ...]
    border: str

    @property
    def words(self) -> str:
        """What the text is."""
        if any(source.source.files for source in self.sources):
            return "files" if len(self.sources) == 1 else f"{len(self.sources)} sources"
        return f"standard library of Python {platform.python_version()}"


def collect(config: DataConfig, folder: Path, progress: Progress, *, num_workers: int = 1) -> Corpus:
    """Read through all files that the config asks for; those that `folder` has notes of and that look as they did then
    are not read again. A source none of whose files is there any more is taken as it was noted.

    Raises ConfigError, listing the files, for globs without a match, files that cannot be read as what they are,
    and when there is no text, or too little of it to be split.
    """
    sources = config.all_sources()
    unmatched = [
        pattern
        for source in sources
        for pattern in source.files
        if not _match(pattern) and (_matches(source.files) or not _note_path(folder, source).exists())
    ]
    if unmatched:
        raise ConfigError([f"data: {pattern!r} matches no file (in {Path.cwd()})" for pattern in unmatched])
    notes: dict[Path, list[FileScan]] = {}
    is_good = False
    try:
        read = [_read_source(source, folder, notes, progress, num_workers) for source in sources]
        if problems := [problem for _, of_source in read for problem in of_source]:
            raise not_readable(problems)
        found = tuple(files for files, _ in read)
        corpus = Corpus(found, _border(found, config.validation_fraction, progress))
        is_good = True
    finally:
        if is_good or folder.exists():  # nothing is made for text that cannot be used, but what is read is kept
            for path, scans in notes.items():
                _note(path, scans)
    return corpus


def _read_source(
    source: Source, folder: Path, notes: dict[Path, list[FileScan]], progress: Progress, num_workers: int
) -> tuple[SourceFiles, list[str]]:
    """What is in a source, to be noted in `notes`, and what is wrong with its files."""
    reading, lenient = Reading.of(source), not source.files
    paths = _matches(source.files) if source.files else _standard_library()
    noted = _noted(_note_path(folder, source))
    if paths:
        results = _scan_files(paths, source.max_bytes, noted, reading, progress, num_workers)
    else:
        results = list(noted.values())
        progress(f"data: the files of {source.name} are not here; going on with what was tokenized from them")
    scans = [result for result in results if isinstance(result, FileScan)]
    notes[_note_path(folder, source)] = scans
    if changed := [scan.path for scan in scans if scan.path in noted and scan.parts != noted[scan.path].parts]:
        progress(f"data: {len(changed)} files changed since they were last read: {', '.join(listed(changed))}")
    if gone := sorted(noted.keys() - set(map(str, paths))) if paths and source.max_bytes is None else []:
        progress(f"data: {len(gone)} files are gone since the text was last read: {', '.join(listed(gone))}")
    problems = [result for result in results if isinstance(result, str)]
    if problems and lenient:
        progress(f"data: left out {len(problems)} files of the standard library that are not readable UTF-8")
    empty = [scan.path for scan in scans if not scan.parts]
    if empty and not lenient:
        progress(f"data: left out {len(empty)} empty files: {', '.join(listed(empty))}")
    if num_empty := sum(scan.num_empty for scan in scans if scan.parts):
        progress(f"data: left out {num_empty:,} empty documents of {source.name}")
    by_contents = sorted((scan for scan in scans if scan.parts), key=lambda scan: [part.digest for part in scan.parts])
    files = SourceFiles(source, reading, tuple(by_contents), len(empty), len(problems) if lenient else 0)
    refused = [] if lenient else problems
    if not refused and not by_contents:
        refused = [f"no text in {source.name}: {len(empty)} files, all of them empty. Give it globs of text"]
    return files, refused


def _scan_files(
    paths: Sequence[Path],
    max_bytes: int | None,
    noted: Mapping[str, FileScan],
    reading: Reading,
    progress: Progress,
    num_workers: int,
) -> list[FileScan | str]:
    """What is in each file, or what is wrong with it; as many files, in this order, as hold `max_bytes`."""

    def known(path: Path, max_bytes: int | None) -> FileScan | None:
        scan = noted.get(str(path))
        return scan if scan and scan.is_of(path, max_bytes) else None

    if max_bytes is None:
        found: dict[Path, FileScan | str] = {path: scan for path in paths if (scan := known(path, None))}
        jobs = [(path, None) for path in paths if path not in found]
        told = time.monotonic()
        scanned = each(partial(_scan, reading), jobs, num_workers=num_workers, advance=lambda _: None)
        for number, (path, result) in enumerate(scanned, 1):
            found[path] = result
            if time.monotonic() - told > TELL_EVERY:
                progress(f"data: read through {number:,} of {len(jobs):,} files")
                told = time.monotonic()
        return [found[path] for path in paths]
    results: list[FileScan | str] = []
    for path in paths:  # how far a file is read depends on those before it
        result = known(path, max_bytes) or _scan(reading, (path, max_bytes), lambda _: None)[1]
        results.append(result)
        max_bytes -= result.num_bytes if isinstance(result, FileScan) else 0
        if max_bytes <= 0:
            break
    return results


def _scan(reading: Reading, job: tuple[Path, int | None], _: Advance) -> tuple[Path, FileScan | str]:
    path, max_bytes = job
    try:
        return path, scan_file(path, reading, max_bytes)
    except BadText as error:
        return path, str(error)


def _note_path(folder: Path, source: Source) -> Path:
    """Where it is noted what is in the files of a source."""
    reading = dataclasses.astuple(Reading.of(source))
    return folder / f"scan-{digest(reading, source.files, source.max_bytes)[:16]}.jsonl"


def _noted(path: Path) -> dict[str, FileScan]:
    """What was found in files before, by their paths; a note that cannot be read is none."""
    noted = {}
    with contextlib.suppress(OSError, ValueError, TypeError), path.open(encoding="utf-8") as file:
        for line in file:
            scan = FileScan.from_json(json.loads(line))
            noted[scan.path] = scan
    return noted


def _note(path: Path, scans: Sequence[FileScan]) -> None:
    """Keep what was found in files, a line of JSON each; what is kept already is not written again."""
    if list(_noted(path).values()) != list(scans):
        lines = [json.dumps(dataclasses.asdict(scan)) + "\n" for scan in scans]
        write_whole(path, lambda temporary: temporary.write_text("".join(lines), encoding="utf-8"))


def _border(sources: Sequence[SourceFiles], validation_fraction: float, progress: Progress) -> str:
    """What the hashes of the documents for validation are below: the fraction, as a fraction of all hashes.

    So duplicates fall on one side, and a document stays on its side when others are added. Where this leaves a side
    empty, the document nearest to the border crosses over, and `progress` is told; one document alone cannot be
    split.
    """
    parts = [part for source in sources for _, part in source.parts]
    low, high = min(part.low for part in parts), max(part.high for part in parts)
    if low == high:
        count = sum(part.num_documents for part in parts)
        raise ConfigError(
            f"data: {count} document{'s' * (count > 1)} with 1 distinct text cannot be split into "
            "training and validation, which takes at least 2. Give data.files more files, or cut a large one in parts"
        )
    border = f"{int(validation_fraction * 16**_HASH_DIGITS):0{_HASH_DIGITS}x}"
    if low < border <= high:
        return border
    side, one = ("validation", low + "0") if low >= border else ("training", high)  # what is below low + "0" is low
    progress(
        f"data: validation_fraction = {validation_fraction} of {sum(part.num_documents for part in parts):,} documents "
        f"leaves {side} empty: it gets the one document that is nearest"
    )
    return one


def _matches(patterns: Sequence[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in _match(pattern)})


def _match(pattern: str) -> list[Path]:
    return [path for path in map(Path, glob.glob(os.path.expanduser(pattern), recursive=True)) if path.is_file()]


def _standard_library() -> list[Path]:
    """Python's own source: no tests, nothing that was installed, and nothing that names the machine it was built on."""
    root = sysconfig.get_paths()["stdlib"]
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("config-")]
        sources = [name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
        found += [Path(folder, name) for name in sources]
    if not found:
        raise ConfigError(f"data: this Python has no source of its standard library in {root}. Give data.files")
    return sorted(path for path in found if path.is_file())


def listed(things: Iterable[object], limit: int = 10) -> list[str]:
    """The things in words, the first of them if they are many."""
    words = [str(thing) for thing in things]
    return words[:limit] + ([f"and {len(words) - limit} more"] if len(words) > limit else [])

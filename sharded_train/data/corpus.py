"""Documents: which files they are, what is in them, and which of them are kept for validation."""

from __future__ import annotations

import codecs
import dataclasses
import glob
import hashlib
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from sharded_train.data.config import DataConfig
from sharded_train.errors import ConfigError

PIECE_CHARACTERS = 1 << 14  # documents are worked through in pieces of about this length, cut at line ends
_READ_BYTES = 1 << 20
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"}


@dataclasses.dataclass(frozen=True, order=True)
class Document:
    """A file of text, known by its contents; documents sort by the hash of them, wherever they lie."""

    sha256: str
    num_bytes: int
    path: Path = dataclasses.field(compare=False)

    def pieces(self) -> Iterator[str]:
        """The text in pieces that end where a line does (unless a line is longer than a piece), in constant memory."""
        digest = hashlib.sha256()
        with self.path.open(encoding="utf-8", newline="") as file:
            while piece := file.read(PIECE_CHARACTERS):
                if not piece.endswith("\n"):
                    piece += file.readline(PIECE_CHARACTERS)
                digest.update(piece.encode())
                yield piece
        if digest.hexdigest() != self.sha256:
            raise ConfigError(f"data: {self.path} changed while it was being read; start again when it is at rest")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """All documents, sorted by the hash of their contents: an order that no path, disk or machine has a say in."""

    source: str
    documents: tuple[Document, ...]
    num_empty: int  # files without a byte, left out
    num_undecodable: int  # files of the standard library that are not UTF-8, left out


def collect(config: DataConfig, progress: Callable[[str], None]) -> Corpus:
    """Read through the files that the config asks for, hash them and sort them.

    Raises ConfigError, listing the files, for globs without a match, files that cannot be read or are not UTF-8,
    and when no text is left.
    """
    paths = _matches(config.files) if config.files else _standard_library()
    documents: list[Document] = []
    empty: list[Path] = []
    undecodable: list[str] = []
    num_bytes = 0
    for path in paths:
        if config.max_bytes is not None and num_bytes >= config.max_bytes:
            break
        try:
            document = _examine(path)
        except (OSError, UnicodeDecodeError) as error:
            undecodable.append(f"{path}: {error}")
            continue
        if document.num_bytes:
            documents.append(document)
            num_bytes += document.num_bytes
        else:
            empty.append(path)
    if undecodable and config.files:
        raise ConfigError(["data.files: these are not readable UTF-8 text:", *_listed(undecodable)])
    if undecodable:
        progress(f"data: left out {len(undecodable)} files of the standard library that are not readable UTF-8")
    if empty and config.files:
        progress(f"data: left out {len(empty)} empty files: {', '.join(_listed(empty))}")
    if not documents:
        raise ConfigError(
            f"data: no text in {len(paths)} files, {len(empty)} of them empty. Give data.files globs of text"
        )
    source = "files" if config.files else f"standard library of Python {platform.python_version()}"
    return Corpus(source, tuple(sorted(documents)), len(empty), len(undecodable))


def split(
    corpus: Corpus, validation_fraction: float, progress: Callable[[str], None]
) -> tuple[Sequence[Document], Sequence[Document]]:
    """Training and validation documents: a document is for validation when its hash, as a fraction of all, is small.

    So duplicates fall on one side, and a document stays on its side when others are added. Where this leaves a side
    empty, the document nearest to the border crosses over, and `progress` is told; one document alone cannot be
    split.
    """
    documents = corpus.documents
    count = sum(int(document.sha256[:16], 16) < validation_fraction * 2**64 for document in documents)
    hashes = [document.sha256 for document in documents]
    border_if_none, border_if_all = hashes.count(hashes[0]), hashes.index(hashes[-1])
    if border_if_none == len(documents):
        raise ConfigError(
            f"data: {len(documents)} documents with 1 distinct text cannot be split into training and validation, "
            "which takes at least 2. Give data.files more files, or cut a large one in parts"
        )
    if count in (0, len(documents)):
        count = border_if_none if count == 0 else border_if_all
        progress(
            f"data: validation_fraction = {validation_fraction} of {len(documents)} documents leaves one side empty: "
            f"{len(documents) - count} for training, {count} for validation"
        )
    return documents[count:], documents[:count]


def _examine(path: Path) -> Document:
    digest, decoder, num_bytes = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            decoder.decode(block)
            digest.update(block)
            num_bytes += len(block)
    decoder.decode(b"", final=True)
    return Document(digest.hexdigest(), num_bytes, path)


def _matches(patterns: Sequence[str]) -> list[Path]:
    found: set[Path] = set()
    problems = []
    for pattern in patterns:
        files = [path for path in map(Path, glob.glob(os.path.expanduser(pattern), recursive=True)) if path.is_file()]
        if not files:
            problems.append(f"data.files: {pattern!r} matches no file (in {Path.cwd()})")
        found.update(files)
    if problems:
        raise ConfigError(problems)
    return sorted(found)


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


def _listed(things: Iterable[object], limit: int = 10) -> list[str]:
    words = [str(thing) for thing in things]
    return words[:limit] + ([f"and {len(words) - limit} more"] if len(words) > limit else [])

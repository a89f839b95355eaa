"""Files to documents: text, JSON lines and Parquet, compressed or not, one document at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from string import Formatter
from typing import IO, Any, Protocol, cast

from sharded_train.data.config import Source, template_fields

PIECE_CHARACTERS = 1 << 14  # documents are worked through in pieces of about this length, cut at line ends
_BUFFER_BYTES = 1 << 20
_ROWS_AT_ONCE = 256
_GZIP, _ZSTD = (".gz",), (".zst", ".zstd")
_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}


class BadText(Exception):
    """A file that cannot be read as what it should be: which, where in it, and what is wrong."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """How the files of a source become documents. Part of the key of what is made from them."""

    format: str  # "auto", "text", "jsonl" or "parquet"
    text: str  # a field or a template of fields: the document, or the completion after a prompt
    prompt: str | None

    @classmethod
    def of(cls, source: Source) -> Reading:
        return cls(source.format, source.completion or source.text or "text", source.prompt)

    def format_of(self, path: Path) -> str:
        """What a file is read as: what was asked for, else what its name says."""
        name = path.with_suffix("") if path.suffix.lower() in (*_GZIP, *_ZSTD) else path
        return _FORMATS.get(name.suffix.lower(), "text") if self.format == "auto" else self.format


@dataclasses.dataclass(frozen=True)
class Record:
    """A document that may be empty. `pieces` can be gone through once.

    `next_start` is where a reader may start to read what comes after this record; -1 where it cannot.
    """

    prompt: str
    pieces: Iterator[str]
    next_start: int = -1


def read_records(path: Path, reading: Reading, start: int = 0) -> Iterator[Record]:
    """The documents of a file, in its order, in memory that does not grow with the file: one JSON line and one batch of
    Parquet rows are held at a time, and text comes in pieces.

    This and the records' pieces raise BadText, naming the file, the line or row, and what is wrong.
    """
    kind = reading.format_of(path)
    if kind == "text" and reading.prompt is not None:
        raise BadText(f"{path}: a prompt and a completion are fields, but by its name this is plain text; set format")
    with _telling(path):
        if kind == "jsonl":
            yield from _json_lines(path, reading, start)
        elif kind == "parquet":
            yield from _parquet(path, reading, start)
        else:
            yield Record("", _text(path))


def _text(path: Path) -> Iterator[str]:
    with _telling(path), io.TextIOWrapper(_open(path), encoding="utf-8", newline="") as file:
        yield from pieces_of(file)


@contextlib.contextmanager
def _telling(path: Path) -> Iterator[None]:
    """Turns what reading raises into BadText."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise BadText(f"{path}{_bad_line(path)}: not UTF-8: {error.reason}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise BadText(f"{path}: cannot be read: {error}") from error


def _bad_line(path: Path) -> str:
    """Where a text stops being UTF-8, whose characters never reach over a line end."""
    with closing(_open(path)) as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f", line {number}, byte {error.start + 1} of the line"
    return ""


class _Text(Protocol):
    def read(self, size: int, /) -> str: ...
    def readline(self, size: int, /) -> str: ...


def pieces_of(file: _Text) -> Iterator[str]:
    """A text in pieces that end where a line does, unless a line is longer than a piece."""
    while piece := file.read(PIECE_CHARACTERS):
        if not piece.endswith("\n"):
            piece += file.readline(PIECE_CHARACTERS)
        yield piece


def _open(path: Path) -> IO[bytes]:
    """The decompressed bytes of a file."""
    suffix = path.suffix.lower()
    if suffix in _GZIP:
        return cast(IO[bytes], io.BufferedReader(cast(io.RawIOBase, gzip.open(path)), _BUFFER_BYTES))
    if suffix in _ZSTD:
        import pyarrow

        stream = pyarrow.input_stream(str(path), compression="zstd")
        return cast(IO[bytes], io.BufferedReader(stream, _BUFFER_BYTES))
    return path.open("rb", buffering=_BUFFER_BYTES)


def _json_lines(path: Path, reading: Reading, start: int) -> Iterator[Record]:
    """Blank lines are no records. Of a compressed file there is one place to start: its beginning."""
    can_start = path.suffix.lower() not in (*_GZIP, *_ZSTD)
    with closing(_open(path)) as file:
        if start:
            file.seek(start)
        place = start
        for number, line in enumerate(file, 1):
            place += len(line)
            if not line.strip():
                continue
            where = f"{path}, line {number}" if not start else f"{path}, line {number} after byte {start:,}"
            try:
                fields = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise BadText(f"{where}: not UTF-8: {error.reason} at byte {error.start + 1} of the line") from error
            except json.JSONDecodeError as error:
                hint = "; a file that is no JSON lines is read whole with format = text" if number == 1 else ""
                raise BadText(f"{where}: broken JSON: {error.msg} at column {error.colno}{hint}") from error
            if not isinstance(fields, dict):
                raise BadText(f"{where}: wanted a JSON object, got {_kind(fields)}")
            yield _record(fields, reading, where, place if can_start else -1)


def _parquet(path: Path, reading: Reading, start: int) -> Iterator[Record]:
    """A reader may start at each row group."""
    import pyarrow as pa
    from pyarrow import parquet

    names = [name for template in (reading.prompt, reading.text) if template for name in template_fields(template)]
    first = 0
    try:
        with parquet.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
            schema = file.schema_arrow
            if missing := [name for name in names if name not in schema.names]:
                raise BadText(_missing(str(path), missing, schema.names))
            first = sum(file.metadata.row_group(group).num_rows for group in range(start))
            for group in range(start, file.num_row_groups):
                left = file.metadata.row_group(group).num_rows
                for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=list(dict.fromkeys(names))):
                    for number, fields in enumerate(batch.to_pylist(), first):
                        left -= 1
                        yield _record(fields, reading, f"{path}, row {number}", -1 if left else group + 1)
                    first += len(batch)
    except pa.ArrowException as error:
        raise BadText(f"{path}: broken Parquet: {error}") from error
    except UnicodeDecodeError as error:
        raise BadText(
            f"{path}, row {first} or one of the {_ROWS_AT_ONCE} after it: not UTF-8: {error.reason}"
        ) from error


def _record(fields: Mapping[str, Any], reading: Reading, where: str, next_start: int) -> Record:
    prompt = _filled(reading.prompt, fields, where) if reading.prompt else ""
    return Record(prompt, pieces_of(io.StringIO(_filled(reading.text, fields, where), newline="")), next_start)


def _filled(template: str, fields: Mapping[str, Any], where: str) -> str:
    """A template with the fields in their places; a field that is null is nothing."""
    parts = list(Formatter().parse(template))
    is_field = all(name is None for _, name, _, _ in parts)
    if missing := [name for name in template_fields(template) if name not in fields]:
        raise BadText(_missing(where, missing, list(fields)))
    if is_field:
        return _text_of(template, fields[template], where, str)
    return "".join(
        literal + ("" if name is None else _text_of(name, fields[name], where, str | int | float))
        for literal, name, _, _ in parts
    )


def _text_of(name: str, value: Any, where: str, wanted: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, wanted) or (isinstance(value, bool)):
        raise BadText(f"{where}: the field {name!r} holds {_kind(value)}, wanted text")
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadText(f"{where}: the field {name!r} holds half a character (a lone surrogate)") from error
    return text


def _missing(where: str, missing: list[str], there: list[str]) -> str:
    return f"{where}: no field {', '.join(map(repr, missing))}; there is {', '.join(map(repr, there)) or 'none'}"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)

"""What text to train on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from string import Formatter
from typing import Literal

PERIOD = 1 << 16  # the shares of weighted sources are multiples of 1 / PERIOD


@dataclasses.dataclass(frozen=True)
class Source:
    """Files of one kind of text, how their documents are read, and how much of them a model sees.

    `files` are globs; names that end in .gz or .zst are decompressed. In `format` auto, .jsonl, .ndjson and .json
    hold one JSON object a line, .parquet holds rows, and every other file is one document of UTF-8 text. `text`,
    `prompt` and `completion` are a field's name, or a template of fields: "{title}\\n\\n{body}". With a prompt and a
    completion the loss is on the completion only.

    Without weights, a mixture goes through all its sources together, `num_epochs` times through each (None: once),
    and so comes to the end of all of them at the same time. With weights, which all or none of the sources must
    have, they are the shares of the rows, and `num_epochs` is the most that a run may ask of a source.
    """

    files: tuple[str, ...]  # globs
    name: str | None = None  # in reports; None: its number
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"  # auto: by the names of the files
    text: str | None = None  # None: the field `text`, unless there is a completion
    prompt: str | None = None  # what is read and not predicted; with a completion
    completion: str | None = None  # what the loss is on
    weight: float | None = None  # share of the rows; all sources have one, or none
    num_epochs: int | None = None  # how often it is gone through, or may be
    max_bytes: int | None = None  # stop collecting documents, by path, once they hold this many bytes

    def problems(self, key: str) -> Iterator[str]:
        """What is wrong with these settings, in words."""
        if not self.files:
            yield f"{key}.files is empty: give it globs, such as ('corpus/*.jsonl.gz',)"
        if (self.prompt is None) != (self.completion is None):
            yield f"{key}.prompt and {key}.completion go together: the loss is on the completion, after the prompt"
        if self.text is not None and self.completion is not None:
            yield f"{key}.text = {self.text!r} beside prompt and completion: give the one or the two"
        if self.format == "text" and (self.text, self.prompt, self.completion) != (None, None, None):
            yield f"{key}.format = text has no fields: leave out text, prompt and completion, or set jsonl or parquet"
        for name in ("text", "prompt", "completion"):
            if problem := template_problem(getattr(self, name) or ""):
                yield f"{key}.{name} = {getattr(self, name)!r}: {problem}"
        if self.weight is not None and not self.weight > 0:
            yield f"{key}.weight = {self.weight} must be above 0; leave out a source that is not wanted"
        for name in ("num_epochs", "max_bytes"):
            if (value := getattr(self, name)) is not None and value < 1:
                yield f"{key}.{name} = {value} must be at least 1 (None: no limit)"


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where the documents come from and how they are split.

    `files` are globs, read as in `Source`; `sources` is for fields, prompts and mixtures. Neither of them means the
    source code of this Python's own standard library, which is on every machine. `tokenizer` is None for a
    byte-level BPE of `model.vocab_size` trained on the spot, the path of a tokenizer.json or of SentencePiece's
    .model, or the name of one of tiktoken's encodings.
    """

    files: tuple[str, ...] = ()  # globs; none: the standard library's source
    sources: tuple[Source, ...] = ()
    max_bytes: int | None = None  # of `files`: stop collecting, by path, once they hold this many bytes
    validation_fraction: float = 0.01  # of the documents, by the hash of their contents
    tokenizer: str | None = None  # a tokenizer.json, a .model, a name of tiktoken's; None: one is trained
    cache_dir: str | None = None  # None: the workdir's `data`
    num_epochs: int | None = None  # of `files`; None: as many as the steps need
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
        return [*(problem for holds, problem in checks if not holds), *self._of_sources()]

    def all_sources(self) -> tuple[Source, ...]:
        """The sources; `files`, or the standard library, as the only one where there are none."""
        only = Source(self.files, name="files" if self.files else "standard library", max_bytes=self.max_bytes)
        return tuple(
            dataclasses.replace(source, name=source.name or f"source {number}")
            for number, source in enumerate(self.sources)
        ) or (only,)

    def _of_sources(self) -> Iterator[str]:
        if not self.sources:
            return
        for name in ("files", "max_bytes", "num_epochs"):
            if getattr(self, name):
                yield f"data.{name} = {getattr(self, name)} beside data.sources: each source has a {name} of its own"
        for number, source in enumerate(self.sources):
            yield from source.problems(f"data.sources.{number}")
        names = [source.name for source in self.all_sources()]
        if again := {str(name) for name in names if names.count(name) > 1}:
            yield f"data.sources: several are named {', '.join(sorted(again))}; names tell them apart in reports"
        total = sum(source.weight or 0.0 for source in self.sources)
        for number, source in enumerate(self.sources):
            if source.weight is not None and 0 < source.weight < total / PERIOD / 2:
                yield (
                    f"data.sources.{number}.weight = {source.weight} is {source.weight / total:.2g} of the sum of all; "
                    f"shares are multiples of 1/{PERIOD}"
                )
        without = [source.name for source in self.all_sources() if source.weight is None]
        if 0 < len(without) < len(names):
            yield f"data.sources: {', '.join(map(str, without))} have no weight, the others do; all must or none"


def template_fields(template: str) -> list[str]:
    """The fields that a template names in braces; a text without braces is the name of a field itself."""
    names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    return names or [template]


def template_problem(template: str) -> str:
    """What is wrong with a template, or nothing."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        return f"{error}; a literal brace is written twice, {{{{ or }}}}"
    if any(name == "" or spec or conversion for _, name, spec, conversion in parts if name is not None):
        return "a field in a template is its name in braces and nothing else, such as {title}"
    return ""

"""A row of training as the model sees it: its segments, their tokens, and which of them are predicted."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from sharded_train.data.prepare import TextData
from sharded_train.data.rows import KEYS
from sharded_train.data.tokenizer import TextTokenizer

COLORS = ("cyan", "magenta", "green", "yellow", "blue")  # of segments, in turn
_END = "<end>"


def row_facts(data: TextData, seed: int, sample: int) -> dict[str, Any]:
    """A training sample in values that JSON can hold."""
    index = int(data.train.order(seed, sample))
    member, row = data.train.place_of(index)
    arrays = data.train[index]
    return {
        "sample": sample,
        "source": data.train.members[member].name,
        "row": row,
        **{key: arrays[key].tolist() for key in KEYS},
    }


def print_row(facts: dict[str, Any], tokenizer: TextTokenizer, console: Console) -> None:
    """A heading for the row and each of its segments, then the segment's text.

    Every segment has a colour. Its tokens are by turns plain and underlined; those that are not predicted, of a prompt
    or because the row begins with them, are dim, and stand in brackets where there is no colour.
    """
    size = sum(segment > 0 for segment in facts["segments"])
    num_targets = sum(target >= 0 for target in facts["targets"])
    console.rule(
        Text(
            f"sample {facts['sample']}: row {facts['row']:,} of {facts['source']}, {size:,} of "
            f"{len(facts['segments']):,} places, {num_targets:,} predicted"
        ),
        align="left",
    )
    for segment in range(1, max(facts["segments"]) + 1):
        places = [place for place in range(size) if facts["segments"][place] == segment]
        targets = [facts["targets"][place] for place in places]
        color = COLORS[(segment - 1) % len(COLORS)]
        heading = (
            f"segment {segment}: places {places[0]} – {places[-1]}, positions {facts['positions'][places[0]]} – "
            f"{facts['positions'][places[-1]]}, {sum(target >= 0 for target in targets)} predicted"
        )
        console.print(Text(heading, style=f"bold {color}"))
        console.print(_text(facts, places, tokenizer, color, plain=console.color_system is None), soft_wrap=True)


def _text(facts: dict[str, Any], places: list[int], tokenizer: TextTokenizer, color: str, plain: bool) -> Text:
    """The tokens of a segment and, last, what its last token is to predict."""
    shown = [(facts["tokens"][places[0]], False)]
    for place in places:
        target = facts["targets"][place]
        if target >= 0:
            shown.append((target, True))
        elif place + 1 < len(facts["tokens"]) and facts["segments"][place + 1] == facts["segments"][place]:
            shown.append((facts["tokens"][place + 1], False))
    text = Text()
    was_predicted = True
    for number, (token, is_predicted) in enumerate(shown):
        if plain and was_predicted != is_predicted:
            text.append("]" if is_predicted else "[")
        was_predicted = is_predicted
        style = f"{color}{'' if is_predicted else ' dim'}{' underline' if number % 2 else ''}"
        text.append(_END if token == tokenizer.end_of_text else _printable(tokenizer, token), style=style)
    return text.append("" if was_predicted or not plain else "]")


def _printable(tokenizer: TextTokenizer, token: int) -> str:
    """A token's text; half a character, and what would move the cursor, as an escape."""
    text = tokenizer.token_text[token].decode("utf-8", errors="backslashreplace")
    return "".join(c if c.isprintable() or c == "\n" else "    " if c == "\t" else repr(c)[1:-1] for c in text)

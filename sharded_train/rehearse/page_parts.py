"""Pieces of HTML that the page is made of; what goes in as text comes out escaped."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence

from sharded_train.rehearse.page_style import IN_NOTEBOOK
from sharded_train.rehearse.timeline import link_words


def fragment(body: str) -> str:
    """`body` in our looks for a notebook's cell, which has looks of its own."""
    return f'<div class="sharded-train"><style>{IN_NOTEBOOK}</style>{body}</div>'


def heading(words: str) -> str:
    """A section's title."""
    return f"<h2>{html.escape(words)}</h2>"


def paragraph(words: str, css: str = "") -> str:
    """A paragraph of text."""
    return f"<p{_css(css)}>{html.escape(words)}</p>"


def figure(picture: str, caption: str) -> str:
    """A picture, which is HTML already, with what it shows."""
    return f'<figure><div class="wide">{picture}</div><figcaption>{html.escape(caption)}</figcaption></figure>'


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = (), total: bool = False
) -> str:
    """A table of text; columns of `right` are aligned to the right, `total` sets the last row apart."""

    def cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{_css('right' if i in right else 'name' if len(text) < 28 else '')}>{html.escape(text)}</{tag}>"
            for i, text in enumerate(texts)
        )

    head = f"<thead><tr>{cells('th', columns)}</tr></thead>" if any(columns) else ""
    body = "".join(
        f"<tr{_css('sum' if total and i == len(rows) - 1 else '')}>{cells('td', row)}</tr>"
        for i, row in enumerate(rows)
    )
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _css(name: str) -> str:
    return f' class="{name}"' if name else ""


def link_title(axes: str, link: str) -> str:
    """("data", "network") -> "data over the network"."""
    return f"{axes or 'no axis'} over {link_words(link)}"

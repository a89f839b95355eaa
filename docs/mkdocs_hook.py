"""What MkDocs needs to be told of pages that are written for a repository.

Links to files outside of docs/ lead to copies in the site, and lists are read as they are elsewhere: without an empty
line before them, and with two spaces before what belongs to a point. Pages that mkdocs.yml does not name come last.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")
POINT = re.compile(r" *([-*+]|\d+\.) ")


def on_config(config: Any) -> Any:
    """Puts the decisions last in the navigation, and before them every page that mkdocs.yml does not name."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    names = [str(page.relative_to(ROOT / "docs")) for page in pages]
    for title, under in (("More", ""), ("Decisions", "decisions/")):
        if rest := [n for n in names if n.rpartition("/")[0] == under.rstrip("/") and f"'{n}'" not in str(config.nav)]:
            config.nav.append({title: rest})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds a copy of every file outside of docs/ that a page links to, as text that browsers show."""
    from mkdocs.structure.files import File

    for page in files.documentation_pages():
        for link in OUTSIDE.findall(page.content_string):
            path = _outside(page.src_uri, link[0])
            copy = f"source/{path}.txt"
            if path and (ROOT / path).is_file() and files.get_file_from_path(copy) is None:
                files.append(File.generated(config, copy, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page's text with links to those copies, and lists as MkDocs wants them."""

    def to_copy(match: re.Match[str]) -> str:
        copy = f"source/{_outside(page.file.src_uri, match[1])}.txt"
        if files.get_file_from_path(copy) is None:
            return match[0]  # a page, or nothing: MkDocs will tell
        return f"]({posixpath.relpath(copy, posixpath.dirname(page.file.src_uri) or '.')})"

    return lists(OUTSIDE.sub(to_copy, markdown))


def lists(markdown: str) -> str:
    """Lists with an empty line before them and four spaces for each level."""
    out: list[str] = []
    fenced = in_list = several = False  # several: paragraphs in this point
    for line in markdown.split("\n"):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        point = not fenced and POINT.match(line) and (in_list or not line.startswith("    "))
        if point and (several or not in_list) and out and out[-1].strip():
            out.append("")
        several = in_list and not point and (several or not line.strip())
        if point:
            in_list = True
        elif line.strip() and not line.startswith(" "):
            in_list = False
        indent = len(line) - len(line.lstrip(" "))
        out.append(" " * (2 * indent) + line.lstrip(" ") if in_list and not fenced and 0 < indent < 4 else line)
    return "\n".join(out)


def _outside(page: str, link: str) -> str:
    """The path within the repository that a page's link leads to; empty where that is inside of docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return "" if path.startswith(("docs/", f"..{os.sep}")) else path

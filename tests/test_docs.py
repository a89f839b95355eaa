"""The documentation: every link leads somewhere, and MkDocs builds it without a complaint."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import config_reference
from tests.test_rooms import FILES, LEVEL, PACKAGE

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FENCE = re.compile(r"^( *)```.*?^\1```$", flags=re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")


def text_of(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as code hosts make them: lower case, dashes for spaces, no punctuation."""
    headings = re.findall(r"^#+ (.*)", FENCE.sub("", page.read_text()), flags=re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in plain}


@dataclasses.dataclass(frozen=True)
class _Options:
    """Options of a test."""

    first: int = 1  # of all
    # above,
    # in two lines
    second: tuple[int, ...] = (
        1,
        2,
    )
    third: str = "# none"


def test_the_order_of_reading_has_every_file_of_the_core_once() -> None:
    order = (ROOT / "docs/architecture.md").read_text().partition("## Reading it")[2].partition("Then the run")[0]
    core = [path for path in FILES if LEVEL[path.relative_to(PACKAGE).parts[0].removesuffix(".py")] <= 2]
    links = [PACKAGE / link.removeprefix("../sharded_train/") for link in LINK.findall(order)]
    for path in (path for path in core if path.stem != "__init__"):
        assert sum(path.is_relative_to(link) for link in links) == 1, path


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(text_of(page)):
        if link.startswith(("https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_relative_to(ROOT) or not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken, f"{page.name} links to what is not there"


def test_mkdocs_has_nothing_to_complain_about(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("MkDocs is not installed (make setup-dev brings it)")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site/index.html").read_text()
    assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="https?:[^"]*"', page), "it reads without a network"


def test_the_config_reference_is_in_step() -> None:
    assert config_reference.PAGE.read_text() == config_reference.page(), "run: python -m docs.config_reference"


def test_every_option_says_what_it_is() -> None:
    silent = re.findall(r"^\| `(config\.[\w.]+)` \|[^|]*\|[^|]*\| +\|$", config_reference.page(), flags=re.MULTILINE)
    groups = {"config.model.rope_scaling", "config.data.sources"}  # these say it below
    assert set(silent) <= groups, "put a comment behind it"


def test_a_comment_may_stand_above_or_behind() -> None:
    assert config_reference.comments(_Options) == {"first": "of all", "second": "above, in two lines", "third": ""}

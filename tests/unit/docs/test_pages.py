"""The pages hang together: links lead somewhere, all pages are listed, none quotes sources."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
INDEXED = ("benchmarks", "examples")
"""Folders of programs, each with a page that names all of them."""
FOLDERS = [ROOT / name for name in ("docs", ".github", *INDEXED)]
PAGES = sorted([*ROOT.glob("*.md"), *(page for top in FOLDERS for page in top.rglob("*.md"))])
LINK = re.compile(r"\]\(([^()\s]+)\)")


def prose(page: Path) -> str:
    """The page without code."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page: Path) -> set[str]:
    """What links can name after `#`: headings as GitHub spells them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_dead(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path) if path else page
    return not target.exists() or bool(anchor) and anchor not in anchors(target)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    # Kills: a page or a heading renamed, and a link to it left.
    links = [link for link in LINK.findall(prose(page)) if "://" not in link]
    assert [link for link in links if is_dead(page, link)] == []


def test_a_dead_link_is_noticed() -> None:
    page = DOCS / "README.md"
    assert not is_dead(page, "zero3.md#groups-of-ranks")
    assert is_dead(page, "zero3.md#groups-of-ranks-and-more")
    assert is_dead(page, "glossaries.md")


def test_every_page_is_listed() -> None:
    links = LINK.findall(prose(DOCS / "README.md"))
    listed = {(DOCS / link.partition("#")[0]).resolve() for link in links}
    others = [page for page in DOCS.rglob("*.md") if page.name != "README.md"]
    assert [page.name for page in others if page not in listed] == []


@pytest.mark.parametrize("folder", INDEXED)
def test_every_program_is_listed(folder: str) -> None:
    index = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    programs = [path.name for path in (ROOT / folder).iterdir() if path.suffix in (".py", ".json")]
    assert [name for name in sorted(programs) if f"`{name}`" not in index] == []


def test_sources_and_tests_name_pages_that_exist() -> None:
    named = {
        (source.relative_to(ROOT).as_posix(), name)
        for folder in ("deepspeed", "tests", "examples", "benchmarks", "csrc")
        for source in (ROOT / folder).rglob("*")
        if source.suffix in (".py", ".md", ".cpp", ".yaml") and "build" not in source.parts
        for name in re.findall(r"docs/[\w/-]+\.md", source.read_text(encoding="utf-8"))
    }
    assert named
    assert [pair for pair in sorted(named) if not (ROOT / pair[1]).is_file()] == []


def test_no_page_quotes_line_numbers_of_sources() -> None:
    quoting = re.compile(r"[\w/]+\.(?:py|cpp|h):\d+")
    texts = [(page.name, page.read_text(encoding="utf-8")) for page in PAGES]
    assert [f"{name}: {found}" for name, text in texts for found in quoting.findall(text)] == []

"""Documents: files, folders, functions and tests that they name exist, links lead somewhere, records have one form."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks import pictures
from benchmarks.form import RESULTS, read
from scripts import docs_pages
from tests.support import ROOT

FOLDERS = ("autotune", "benchmarks", "db", "docs", "examples", "scripts", "search_spaces", "tests")
_HISTORY = ("CHANGELOG.md", "decisions")
"""What names things as they were."""
EVERY = sorted(p for folder in ("", "docs", "benchmarks/notes", "benchmarks/recordings", ".github") for p in (
    (ROOT / folder).rglob("*.md") if folder else ROOT.glob("*.md")))  # fmt: skip
"""All documents, with those of the past."""
DOCUMENTS = sorted(p for p in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")) if not {*p.parts} & {*_HISTORY})
_FILE = re.compile(r"`((?:[\w.]+/)+[\w.]+\.(?:py|toml|sh))(?:::\w+)?`(?:,? `(\w+)`)?")
_FOLDER = re.compile(r"`((?:\w+/){2,})`")
_NAME = re.compile(r"`(\w+\.(?:py|toml|sh|cu))`")
_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
_TEST = re.compile(r"`(?:[\w/]*/)?(test_\w+)(?:\.py)?::(test_\w+)`")


@cache
def _files() -> tuple[str, ...]:
    found = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*.*")]
    return tuple(f"/{p.relative_to(ROOT)}" for p in found)


def _ending(name: str) -> list[Path]:
    return [ROOT / path[1:] for path in _files() if path.endswith(f"/{name}")]


def _stale(text: str) -> list[str]:
    """The names that are nowhere."""
    stale = []
    for file, function in _FILE.findall(text):
        texts = [path.read_text() for path in _ending(file)]
        if not any(re.search(rf"^\s*(?:(?:def|class) )?{function}\b", t, re.MULTILINE) for t in texts):
            stale.append(f"{file} {function}".strip())
    blocks = "".join(re.findall(r"```.*?```", text, re.DOTALL))  # a name in a block may be the reader's own file
    own = {name for name in _NAME.findall(text) if name in blocks or (ROOT / name).exists()}
    stale += [name for name in _NAME.findall(text) if name not in own and not _ending(name)]
    for folder in _FOLDER.findall(text):
        if not any(f"/{folder}" in path for path in _files()) and not (ROOT / folder).is_dir():
            stale.append(folder)
    for file, test in _TEST.findall(text):
        if not any(f"def {test}(" in path.read_text() for path in _ending(f"{file}.py")):
            stale.append(f"{file}::{test}")
    return stale


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_name_is_there(document: Path) -> None:
    assert _stale(document.read_text()) == []


@cache
def _anchors(document: Path) -> frozenset[str]:
    """The places of a document that a link may name, as GitHub and MkDocs call them."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    plain = (re.sub(r"[^\w\s-]", "", head).strip().lower() for head in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return frozenset(re.sub(r"\s+", "-", head) for head in plain)


def _dead(document: Path, text: str) -> list[str]:
    """Links to files that are missing, or to places that their document lacks."""
    dead = []
    code = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for link in (a or b for a, b in _LINK.findall(code)):
        path, _, place = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        file = (document.parent / path).resolve() if path else document
        wrong = place and not place.startswith("only-") and file.suffix == ".md" and place not in _anchors(file)
        if not file.exists() or wrong:
            dead.append(link)
    return dead


@pytest.mark.parametrize("document", EVERY, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    assert _dead(document, document.read_text()) == []


def test_a_dead_link_is_found() -> None:
    text = '[x](README.md#what-it-does) [y](nowhere.md) [z](README.md#nowhere) <img src="gone.svg"> [w](https://x.org)'
    assert _dead(ROOT / "CHANGELOG.md", text) == ["nowhere.md", "README.md#nowhere", "gone.svg"]


def test_documents_that_code_names_exist() -> None:
    texts = {
        p: p.read_text() for folder in ("autotune", "benchmarks", "scripts") for p in (ROOT / folder).rglob("*.py")
    }
    named = {
        (name, p) for p, text in texts.items() for name in re.findall(r"\b(?:docs|benchmarks)/[\w/-]+\.md\b", text)
    }
    assert len(named) > 5
    assert [(name, p.name) for name, p in named if not (ROOT / name).exists()] == []


DECISIONS = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))


@pytest.mark.parametrize("record", DECISIONS, ids=lambda p: p.name)
def test_a_decision_has_context_choice_and_consequence(record: Path) -> None:
    text = record.read_text()
    assert re.match(rf"# {record.name[:3]}: .+\n\n2\d\d\d-\d\d-\d\d\. .+\.\n\n", text)
    parts = [text.find(f"\n**{part}.**") for part in ("Context", "Decision", "Consequence")]
    assert min(parts) > 0


def test_the_readme_is_short_and_its_picture_is_of_its_figures() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 130
    assert f"<!-- summary: {pictures.PROGRAMS.relative_to(RESULTS)} -->" in text
    for picture in pictures.DRAWN.values():
        assert str(picture.relative_to(ROOT)) in text
        assert pictures.origin(read(pictures.PROGRAMS)) in picture.read_text(), "run: make figures"


def test_the_table_of_decisions_is_of_their_heads() -> None:
    page = docs_pages.DECISIONS.read_text()
    assert page == docs_pages.with_decisions(page, docs_pages.DECISIONS.parent), "run: make figures"


def test_the_first_page_of_the_site_links_every_page() -> None:
    linked = set(re.findall(r"\((\S+?\.md)\)", (ROOT / "docs/index.md").read_text()))
    pages = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").glob("[!n]*/*.md")}
    assert {page for page in pages if not page.startswith("decisions/0")} - linked == set()


def test_the_site_lists_every_page() -> None:
    settings = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    listed = set(re.findall(r"[\w/-]+\.md", settings))
    assert listed == {page for page in pages if not page.startswith(("decisions/0", "notes/"))}


def _tree(text: str) -> set[str]:
    """The folders of a tree in a document, one a line, indented by two blanks a level."""
    found: set[str] = set()
    above: list[str] = []
    for blanks, name in re.findall(r"^( *)(\w+)/(?: |$)", text, re.MULTILINE):
        above = [*above[: len(blanks) // 2], name]
        found.add("/".join(above))
    return found


def test_the_tree_of_the_architecture_has_every_folder() -> None:
    tree = _tree((ROOT / "ARCHITECTURE.md").read_text().split("## Folders")[1].split("```")[1])
    code = {
        p.parent.relative_to(ROOT).as_posix() for p in (ROOT / "autotune").rglob("*.*") if p.suffix in (".py", ".atdb")
    }
    assert {folder for folder in tree if folder.startswith("autotune")} == code
    assert {folder for folder in tree if not folder.startswith("autotune")} == {*FOLDERS} - {"autotune"}


def test_the_picture_of_the_architecture_names_code_that_exists() -> None:
    picture = (ROOT / "docs/pictures/flow.svg").read_text()
    names = [name for text in re.findall(r'class="code"[^>]*>([^<]+)<', picture) for name in text.split(", ")]
    assert len(names) > 10
    assert [name for name in names if not (ROOT / "autotune" / name).exists()] == []


def test_a_stale_name_is_found() -> None:
    here = "tests/unit/test_documents.py"
    fine = f"`{here}` `_stale` and (`{here}`, `_ending`), `test_documents::test_a_stale_name_is_found`, `{here}`"
    assert _stale(fine) == []
    stale = f"`tests/unit/gone.py`, `{here}` `_nowhere`, `test_documents::test_of_yesterday`"
    assert _stale(stale) == ["tests/unit/gone.py", f"{here} _nowhere", "test_documents::test_of_yesterday"]

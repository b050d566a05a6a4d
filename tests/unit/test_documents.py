"""Names in documents: files that are in the repository, functions that are in their files, tests that are in theirs."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.support import ROOT

FOLDERS = ("autotune", "benchmarks", "db", "docs", "examples", "scripts", "search_spaces", "tests")
_HISTORY = ("CHANGELOG.md", "decisions")
"""What names things as they were."""
DOCUMENTS = sorted(p for p in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")) if not {*p.parts} & {*_HISTORY})
_FILE = re.compile(r"`((?:[\w.]+/)+[\w.]+\.(?:py|toml|sh))(?:::\w+)?`(?:,? `(\w+)`)?")
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
    for file, test in _TEST.findall(text):
        if not any(f"def {test}(" in path.read_text() for path in _ending(f"{file}.py")):
            stale.append(f"{file}::{test}")
    return stale


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_name_is_there(document: Path) -> None:
    assert _stale(document.read_text()) == []


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

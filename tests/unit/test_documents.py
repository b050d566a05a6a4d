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


def test_a_stale_name_is_found() -> None:
    here = "tests/unit/test_documents.py"
    fine = f"`{here}` `_stale` and (`{here}`, `_ending`), `test_documents::test_a_stale_name_is_found`, `{here}`"
    assert _stale(fine) == []
    stale = f"`tests/unit/gone.py`, `{here}` `_nowhere`, `test_documents::test_of_yesterday`"
    assert _stale(stale) == ["tests/unit/gone.py", f"{here} _nowhere", "test_documents::test_of_yesterday"]

"""Result files are of one form, and the documents' tables are those of the files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.form import RESULTS, ROOT, problems, read, write
from benchmarks.table import geometric_mean, over_peers, refresh, render

COMMITTED = sorted(RESULTS.rglob("*.json"))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

GOOD: dict[str, Any] = {
    "device": "a GPU",
    "versions": {"python": "3.12.1", "torch": "2.11.0"},
    "commit": "0123abcd",
    "command": "python -m benchmarks.fusion",
    "when": "2026-01-02T03:04:05+00:00",
    "cases": [
        {"name": "a", "bytes": 8, "floor_us": 1, "eager_us": 9.0, "inductor_us": 4.0, "inductor_best_us": 3.0,
         "xla_us": None, "autotune_us": 2.0},
        {"name": "b", "bytes": 8, "floor_us": 1, "eager_us": 8.0, "inductor_us": None, "inductor_best_us": None,
         "xla_us": None, "autotune_us": 1.0},
    ],
}  # fmt: skip


@pytest.mark.parametrize("path", COMMITTED, ids=lambda p: str(p.relative_to(RESULTS)))
def test_committed_files_are_of_the_form(path: Path) -> None:
    read(path)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_tables_in_documents_are_those_of_the_files(path: Path) -> None:
    text = path.read_text()
    assert refresh(text) == text, f"run: python -m benchmarks.table --update {path.relative_to(ROOT)}"


def test_a_good_file_has_no_problems() -> None:
    assert problems(GOOD) == []


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("device",), "", "device"),
        (("versions",), {"python": "3.12"}, "torch"),
        (("versions",), "2.11", "versions"),
        (("commit",), "main", "commit"),
        (("when",), "2026-01-02", "when"),
        (("cases",), [], "cases"),
        (("cases", 0, "bytes"), 8.5, "bytes"),
        (("cases", 0, "bytes"), True, "bytes"),
        (("cases", 0, "autotune_us"), None, "autotune_us"),
        (("cases", 0, "floor_us"), 0, "floor_us"),
        (("cases", 0, "inductor_us"), "4", "inductor_us"),
        (("cases", 0, "eager_us"), -1.0, "eager_us"),
        (("cases", 0, "host_us"), 0.0, "host_us"),
        (("cases", 0, "xla_us"), float("nan"), "xla_us"),
        (("cases", 1, "name"), "a", "more than once"),
        (("cases", 1), 3, "not an object"),
    ],
)
def test_each_fault_is_named(where: tuple[Any, ...], value: object, said: str) -> None:
    data = copy.deepcopy(GOOD)
    at: Any = data
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    found = problems(data)
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize("key", sorted(GOOD))
def test_no_field_may_be_missing(key: str) -> None:
    assert problems({k: v for k, v in GOOD.items() if k != key}) == [f"{key} is missing"]


@pytest.mark.parametrize("key", sorted(GOOD["cases"][0]))
def test_no_field_of_a_case_may_be_missing(key: str) -> None:
    case = {k: v for k, v in GOOD["cases"][0].items() if k != key}
    assert problems({**GOOD, "cases": [case]}) == [f"case 0: {key} is missing"]


def test_written_result_files_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "gpu" / "x.json"
    write(path, "a GPU", GOOD["cases"], {"cuda": "13.0"})
    data = read(path)
    assert data["cases"] == GOOD["cases"]
    assert data["versions"]["cuda"] == "13.0"
    with pytest.raises(ValueError, match="name is missing"):
        write(path, "a GPU", [{k: v for k, v in GOOD["cases"][0].items() if k != "name"}])


def test_a_table_has_the_files_figures() -> None:
    text = render(GOOD)
    assert "| a | 1.0 | 9.0 | 4.0 | 3.0 | 2.0 | 1.50x | 50% |" in text
    assert "| b | 1.0 | 8.0 | – | – | 1.0 | 8.00x | 100% |" in text
    assert "XLA" not in text  # nothing ran it
    assert f"{geometric_mean([1.5, 8.0]):.2f}x" in text
    assert over_peers({**GOOD["cases"][0], "xla_us": 2.5}) == 1.25


def test_a_stale_table_is_found(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(GOOD))
    stale = "before\n<!-- results: x.json -->\n| a | 1.9 |\n<!-- end results -->\nafter\n"
    fresh = refresh(stale, tmp_path)
    assert fresh != stale
    assert refresh(fresh, tmp_path) == fresh
    assert fresh.startswith("before\n")
    assert fresh.endswith("<!-- end results -->\nafter\n")
    with pytest.raises(ValueError, match="no `<!-- end"):
        refresh("<!-- results: x.json -->\n", tmp_path)
    with pytest.raises(FileNotFoundError):
        refresh(stale.replace("x.json", "y.json"), tmp_path)

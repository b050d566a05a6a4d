"""The next process of a program that searched: it compiles nothing, whatever came of the search."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT


class Program:
    """A program's processes, which share a database and torch's caches."""

    def __init__(self, folder: Path) -> None:
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "AUTOTUNE_CACHE_DIR": str(folder / "kernels")}
        self._env = {**os.environ, **caches, "AUTOTUNE_DB": str(folder / "tuned.db")}

    def run(self, words: str) -> dict[str, Any]:
        """The JSON object that :mod:`search_job` prints."""
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.runtime.search_job", *words.split()],
            cwd=ROOT,
            env=self._env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


def assert_warm(process: dict[str, Any], *, hits: int, graphs: int = 1) -> None:
    """``graphs``: Dynamo's."""
    assert process["searched"] == []
    assert process["aot"] == {"autograd_cache_hit": graphs}
    assert process["counters"] == ({"hits": hits} if hits else {})
    assert process["warnings"] == []


@pytest.mark.parametrize(
    ("words", "hits", "graphs"),
    [("99 kept", 2, 1), ("99 left", 0, 1), ("1 kept", 1, 1), ("99 kept optimizer", 4, 2)],
    ids=["kept", "left to Inductor", "misses left", "several graphs"],
)
def test_it_is_warm_with_the_option_and_without(program: Program, words: str, hits: int, graphs: int) -> None:
    first = program.run(words)
    assert len(first["searched"]) == 2 * graphs
    again, plain = program.run(words), program.run(f"{words} plain")
    assert_warm(again, hits=hits, graphs=graphs)
    assert_warm(plain, hits=hits, graphs=graphs)
    assert again["losses"] == pytest.approx(first["losses"], rel=1e-3)


def test_a_graph_after_the_end_of_the_budget_is_searched_with_more_seconds(program: Program) -> None:
    """A second process with the same seconds searches nothing."""
    assert program.run("99 kept brief")["searched"] == []
    assert_warm(program.run("99 kept"), hits=0)
    third = program.run("99 kept more")
    assert len(third["searched"]) == 2
    assert third["aot"]["autograd_cache_hit"] == 1, "the code before the search"
    assert third["counters"] == {"graphs": 2, "hits": 2}, "the code after it"
    assert_warm(program.run("99 kept"), hits=2)


def test_another_program_in_the_same_database_changes_nothing(program: Program) -> None:
    program.run("99 kept")
    assert len(program.run("99 kept silu")["searched"]) == 2
    assert_warm(program.run("99 kept"), hits=2)
    assert_warm(program.run("99 kept silu"), hits=2)


@pytest.mark.parametrize("option", ["", " plain"], ids=["with the option", "without"])
def test_code_whose_schedules_changed_is_compiled_again_once(program: Program, option: str) -> None:
    """The region that was left has a schedule then. What other programs store changes nothing further."""
    program.run("1 kept")
    program.run("99 kept renamed")
    changed = program.run("1 kept")
    assert (changed["searched"], changed["counters"]) == ([], {"graphs": 2, "hits": 2})
    assert len(program.run("99 kept silu")["searched"]) == 2
    assert_warm(program.run(f"1 kept{option}"), hits=2)


def test_new_schedules_are_noticed(program: Program) -> None:
    program.run("1 kept")
    more = program.run("99 kept more")
    assert len(more["searched"]) == 1
    assert more["aot"]["autograd_cache_hit"] == 1
    assert_warm(program.run("99 kept more"), hits=2)
    assert_warm(program.run("99 kept plain"), hits=2)

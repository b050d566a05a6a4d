"""``--third``: of three commits one runs each case of a test of kernels, and small tests run whole."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.conftest import other_thirds

TESTS = Path(__file__).parent.parent


def _items(layer: str, name: str, cases: int) -> list[Any]:
    path = TESTS / layer / "compiler" / "test_x.py"
    return [SimpleNamespace(path=path, originalname=name, name=f"{name}[{k}]") for k in range(cases)]


def test_the_thirds_are_the_whole() -> None:
    many, more = _items("simulated", "many", 8), _items("compile", "more", 4)
    items = [*many, *_items("compile", "few", 2), *more, *_items("process", "elsewhere", 20)]
    left_out = [{item.name for item in other_thirds(items, own)} for own in range(3)]
    assert Counter(name for third in left_out for name in third) == {item.name: 2 for item in [*many, *more]}
    assert [len(third) for third in left_out] == [8, 8, 8]


def test_files_may_be_in_thirds() -> None:
    folder, files = TESTS / "endtoend" / "examples", ("test_example_models", "test_own_kernels")
    whole = [
        SimpleNamespace(path=folder / f"{f}.py", originalname="test", name=f"{f}{k}") for f in files for k in range(6)
    ]
    left_out = other_thirds(whole, 0)  # type: ignore[arg-type]
    assert [item.name for item in left_out] == [f"test_example_models{k}" for k in (1, 2, 4, 5)]


def test_every_test_has_a_case_in_every_third() -> None:
    tests = [_items("simulated", f"test_{n}", n) for n in range(3, 9)]
    for own in range(3):
        left_out = {item.name for item in other_thirds([item for cases in tests for item in cases], own)}
        assert all({item.name for item in cases} - left_out for cases in tests)


def test_tests_of_one_name_in_two_files_are_two() -> None:
    one, other = _items("simulated", "many", 2), _items("compile", "many", 2)
    assert other_thirds([*one, *other], 0) == []

"""``--half``: of two commits one runs each case of a test of kernels, and small tests run whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.conftest import other_half

TESTS = Path(__file__).parent.parent


def _items(layer: str, name: str, cases: int) -> list[Any]:
    path = TESTS / layer / "compiler" / "test_x.py"
    return [SimpleNamespace(path=path, originalname=name, name=f"{name}[{k}]") for k in range(cases)]


def test_the_halves_are_the_whole() -> None:
    many, few, elsewhere = _items("simulated", "many", 9), _items("compile", "few", 3), _items("unit", "many", 20)
    left_out = [other_half([*many, *few, *elsewhere], parity) for parity in (0, 1)]
    assert [len(half) for half in left_out] == [5, 4]
    assert {item.name for half in left_out for item in half} == {item.name for item in many}
    assert not {item.name for item in left_out[0]} & {item.name for item in left_out[1]}


def test_tests_of_one_name_in_two_files_are_two() -> None:
    one, other = _items("simulated", "many", 3), _items("compile", "many", 3)
    assert other_half([*one, *other], 0) == []

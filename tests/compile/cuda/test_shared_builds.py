"""The processes that compile for one search share what Numba makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.compiler.targets.cuda import compile as compiling
from autotune.compiler.targets.cuda.source import Listing
from autotune.task import SHARED_BUILDS

PTX = ".visible .entry numba_name(.param .u64 p0)\n.maxntid 64, 1, 1\n{\n}\n"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that Numba compiled."""
    texts: list[str] = []

    def compile_once(text: str, *_: Any) -> str:
        texts.append(text)
        return PTX

    monkeypatch.setattr(compiling, "_numba_ptx", compile_once)
    return texts


def listing(text: str, **changes: Any) -> Listing:
    return replace(Listing((), (text,), ("f32",), {"dynamic": False}, 64, 0, name="autotune_one"), **changes)


def test_a_text_is_compiled_once_under_any_name(
    made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARED_BUILDS, str(tmp_path))
    first = compiling.compile_ptx(listing("a"), "sm_90")
    second = compiling.compile_ptx(listing("a", name="autotune_two", max_registers=32), "sm_90")
    assert made == [listing("a").text]
    assert (first[1], second[1]) == ("autotune_one", "autotune_two")
    assert ".entry autotune_two" in second[0]
    assert ".maxnreg 32" in second[0]
    assert ".maxnreg" not in first[0]


@pytest.mark.parametrize(
    ("changes", "target"),
    [({"block": 128}, "sm_90"), ({"fast": False}, "sm_90"), ({}, "sm_80"), ({"params": ("f16",)}, "sm_90")],
)
def test_shared_builds_differ_by_all_inputs_of_the_code(
    changes: dict[str, Any], target: str, made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARED_BUILDS, str(tmp_path))
    compiling.compile_ptx(listing("a"), "sm_90")
    compiling.compile_ptx(listing("a", **changes), target)
    assert len(made) == 2


def test_without_a_folder_or_room_each_build_is_its_own(
    made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SHARED_BUILDS, raising=False)
    for folder in (None, str(tmp_path / "nothing")):
        if folder:
            monkeypatch.setenv(SHARED_BUILDS, folder)
        compiling.compile_ptx(listing("a"), "sm_90")
        compiling.compile_ptx(listing("a"), "sm_90")
    assert len(made) == 4

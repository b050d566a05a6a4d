"""Kernels that Numba has compiled once, for all tests of a process."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from autotune.compiler.targets.cuda import compile as compiling

_numba_ptx = compiling._numba_ptx


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> Iterator[None]:
    """Numba takes a second for a kernel; many tests look at the same one, or link it with other limits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "_numba_ptx", functools.cache(_numba_ptx))
        yield


@pytest.fixture
def compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba itself, for tests of what it makes of the same kernel twice."""
    monkeypatch.setattr(compiling, "_numba_ptx", _numba_ptx)

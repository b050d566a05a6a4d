"""Paths to the other tests' helpers, a kernel cache of our own, and how many programs to try.

``AUTOTUNE_PROPERTY_CASES=N`` tries N programs on the CPU (default 40), twice as many against eager, a third as many for
CUDA; ``AUTOTUNE_PROPERTY_FIRST=K`` begins at seed K.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "codegen"))


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """CPU kernels are compiled once for all tests here, and none come from the user's cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def forget_compiled() -> Iterator[None]:
    import torch

    yield
    torch._dynamo.reset()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that take ``seed`` run once for each of their share of the programs."""
    if "seed" not in metafunc.fixturenames:
        return
    share = getattr(metafunc.function, "share", 1.0)
    first = int(os.environ.get("AUTOTUNE_PROPERTY_FIRST", "0"))
    count = max(1, round(share * int(os.environ.get("AUTOTUNE_PROPERTY_CASES", "40"))))
    metafunc.parametrize("seed", range(first, first + count))

"""A launch of a collective's kernel is made once, and then only handed its pointers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from autotune.domains.c3.collectives import sm as module
from autotune.domains.c3.collectives.sm import emit_sum
from autotune.task import Kernel


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    seen: dict[str, list[Any]] = {"made": [], "launched": []}

    def make(kernel: Kernel, device: int, grid: int, extent0: int) -> Any:
        seen["made"].append((device, grid, extent0))

        def run(stream: int, pointers: Sequence[int]) -> None:
            seen["launched"].append((stream, list(pointers)))

        return run

    monkeypatch.setattr(module, "make_launch", make)
    monkeypatch.setattr(module, "_launches", {})
    return seen


def test_a_launch_is_made_once_for_a_size(calls: dict[str, list[Any]]) -> None:
    kernel = Kernel("autotune_kernel", b"code", emit_sum(3, "bf16").launch)
    for stream, count in ((5, 64), (6, 64), (5, 32)):
        module.launch(kernel, 1, 8, [16, 0, 32, 0], count, stream)
    assert calls["made"] == [(1, 8, 64), (1, 8, 32)]
    assert calls["launched"] == [(s, [16, 0, 32, 0]) for s in (5, 6, 5)]
    module.launch(Kernel("autotune_kernel", b"other", kernel.launch), 1, 8, [16, 0, 32, 0], 64, 5)
    assert len(calls["made"]) == 3


def test_a_wrong_number_of_pointers(calls: dict[str, list[Any]]) -> None:
    kernel = Kernel("autotune_kernel", b"code", emit_sum(2, "bf16").launch)
    with pytest.raises(ValueError, match="2 pointers for a kernel of 3"):
        module.launch(kernel, 0, 8, [16, 32], 64, 5)
    assert not calls["made"]

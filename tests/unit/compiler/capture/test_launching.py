"""Launches of kernels by sizes that vary: how many compiled kernels are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autotune.compiler.capture.attention import kernels


class Kernel:
    """Counts the launches through Triton, which returns the compiled kernel, and those of a kept one."""

    def __init__(self) -> None:
        self.by_triton, self.kept = 0, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*given: Any, stream: Any = None, **options: Any) -> Kernel:
            self.by_triton, self.kept = self.by_triton + (stream is None), self.kept + (stream is not None)
            return self

        return launch


def test_kernels_are_kept_by_sizes_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(kernels, "_MOST_COMPILED", 8)
    monkeypatch.setattr(kernels, "_compiled", {})
    kernel, x = Kernel(), torch.empty(4)
    for _ in range(3):
        kernels.launch(kernel, (1, 2), (x,), (5, 0.5, True))
    assert (kernel.by_triton, kernel.kept) == (1, 2)
    for length in range(40):
        for _ in range(2):  # as layers of one step
            kernels.launch(kernel, (length, 2), (x,), (length, 0.5, True))
        assert 0 < len(kernels._compiled) <= 8
    assert (kernel.by_triton, kernel.kept) == (40, 43), "the numbers of 5 were kept"

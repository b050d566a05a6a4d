"""The library of :mod:`autotune.runtime.launch.cublaslt` on a CPU, in torch, for tests without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autotune.compiler.regions import epilogues
from autotune.compiler.regions.formulas import reference
from autotune.errors import Unsupported
from autotune.runtime.launch import cublaslt

VERSION = "cublasLt for tests"


class Library:
    """Algorithms that compute in fp32, of which those named in ``wrong`` write zeros and those in ``broken`` fail.

    Attributes:
        calls: the epilogue and the algorithm of each call.
    """

    def __init__(self, *, wrong: tuple[int, ...] = (), broken: tuple[int, ...] = ()) -> None:
        self.wrong, self.broken = wrong, broken
        self.calls: list[tuple[str, int]] = []

    def plan(self, what: cublaslt.Matmul, device: int, algorithm: int) -> cublaslt.Run:
        """As :func:`autotune.runtime.launch.cublaslt.plan`."""
        if not 0 <= algorithm < cublaslt.ALGORITHMS:
            raise Unsupported("no such algorithm")

        def run(a: Any, b: Any, y: Any, bias: Any, other: Any, stream: int) -> None:
            if algorithm in self.broken:
                raise cublaslt.CublasError("the library refused")
            self.calls.append((what.epilogue, algorithm))
            rows, columns, terms = (what.m, what.n, what.k)
            first = a.as_strided((rows, terms), (1, what.lda) if what.ta else (what.lda, 1))
            second = b.as_strided((terms, columns), (1, what.ldb) if what.tb else (what.ldb, 1))
            x = first.float() @ second.float()
            result, before = reference(
                what.epilogue,
                x,
                None if bias is None else bias.float(),
                None if other is None else other.reshape(rows, columns).float(),
            )
            y.view(rows, columns).copy_(torch.zeros_like(result) if algorithm in self.wrong else result)
            if before is not None and what.epilogue == "gelu_aux":
                other.view(rows, columns).copy_(before)

        return run


def emulate(monkeypatch: pytest.MonkeyPatch, **faults: tuple[int, ...]) -> Library:
    """Put the emulated library in the place of cuBLASLt, for tensors of the CPU."""
    found = Library(**faults)
    monkeypatch.setattr(epilogues, "DEVICES", {"cpu"})
    monkeypatch.setattr(cublaslt, "version", lambda: VERSION)
    monkeypatch.setattr(cublaslt, "plan", found.plan)
    return found

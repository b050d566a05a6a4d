"""The assertion of an index check in Triton's code: lanes past the tensor's end never fail it.

No GPU is needed: Inductor's kernel is printed for one, and its text runs on NumPy arrays.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from autotune.runtime.inductor import index_check
from tests.support.triton_code import hopper, kernels

ROWS, EXTENT, BLOCK = 3, 1500, 1024


@pytest.fixture
def on_hopper() -> Iterator[None]:
    with hopper():
        yield


def run(kernel: str, given: np.ndarray, numel: int) -> None:
    """Run a kernel's text over all blocks; raises AssertionError where one of its assertions fails."""

    def device_assert(condition: Any, text: str) -> None:
        assert np.all(condition), text

    def load(at: Any, mask: Any, other: float = -1.0, **_: Any) -> Any:
        inside = np.broadcast_to(mask, at.shape)
        return np.where(inside, given[np.where(inside, at, 0)], int(other))

    program = [0]
    tl = SimpleNamespace(
        constexpr=None, int1=bool, int32=np.int32, int64=np.int64, where=np.where, device_assert=device_assert,
        program_id=lambda axis: program[0], arange=np.arange, load=load, store=lambda *_: None,
        full=lambda shape, value, dtype: np.full(shape, value, dtype),
    )  # fmt: skip
    names: dict[str, Any] = {"tl": tl}
    exec(re.sub(r"\.to\(tl\.(\w+)\)", r".astype(tl.\1)", kernel), names)
    (call,) = (value for name, value in names.items() if name.startswith("triton_"))
    known = {"xnumel": numel, "XBLOCK": BLOCK}
    arguments = [known.get(name, 0) for name in inspect.signature(call).parameters]  # a pointer is an offset
    for block in range(-(-numel // BLOCK)):
        program[0] = block
        call(*arguments)


def iota() -> Tensor:
    made: Tensor = torch.ops.prims.iota.default(
        EXTENT, start=0, step=1, dtype=torch.int64, device="cuda:0", requires_grad=False
    )
    return made


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("past", [0, 1])
@pytest.mark.parametrize(
    ("index", "first"),
    [
        pytest.param(lambda given: iota(), 0, id="positions"),
        pytest.param(lambda given: iota().expand(ROWS, EXTENT), 0, id="positions of rows"),
        pytest.param(lambda given: given + 0, 0, id="loaded"),
        pytest.param(lambda given: given - 1, 1, id="computed of what is loaded"),
    ],
)
def test_lanes_past_the_end_are_in_range(
    index: Callable[[Tensor], Tensor], first: int, past: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``first`` is the given tensor's first element. With ``past`` 1 one index is out of range, and is found."""
    index_check._register_lowering()
    monkeypatch.setitem(index_check._pending, "lanes", (index_check.Range(0, EXTENT - past, "the index of a test"),))
    numel: list[int] = []

    def compute(given: Tensor) -> Tensor:
        checked = index(given)
        numel.append(checked.numel())
        torch.ops.autotune.index_check([checked], "lanes")
        return given + 1

    asserting = [
        kernel for kernel in kernels(compute, torch.empty(EXTENT, dtype=torch.int64)) if "device_assert" in kernel
    ]
    assert len(asserting) == 1
    if past:
        with pytest.raises(AssertionError, match="the index of a test"):
            run(asserting[0], np.arange(first, first + EXTENT), numel[-1])
    else:
        run(asserting[0], np.arange(first, first + EXTENT), numel[-1])


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("wrong", [None, 0, 1, 2, 3])
def test_one_kernel_checks_several_indices(wrong: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three columns and a matrix, each with its own range; the last index of one of them is out of range."""
    index_check._register_lowering()
    ranges = tuple(index_check.Range(-k, EXTENT + k, f"the index {k} of a test") for k in range(4))
    monkeypatch.setitem(index_check._pending, "several", ranges)

    def compute(given: Tensor) -> Tensor:
        columns = [torch.ops.aten.select.int(given, 1, k) for k in range(4)]
        columns[3] = torch.ops.aten.view.default(columns[3], [ROWS, EXTENT // ROWS])
        torch.ops.autotune.index_check(columns, "several")
        return given + 1

    (kernel,) = (
        text for text in kernels(compute, torch.empty(EXTENT, 4, dtype=torch.int64)) if "device_assert" in text
    )
    given = np.arange(EXTENT)[:, None] + np.array([0, -1, 2, 3])
    if wrong is None:
        run(kernel, given.ravel(), EXTENT)
        return
    given[-1, wrong] = EXTENT + wrong
    with pytest.raises(AssertionError, match=rf"the index {wrong} of a test: not in \[-?{wrong}, {EXTENT + wrong}\)"):
        run(kernel, given.ravel(), EXTENT)

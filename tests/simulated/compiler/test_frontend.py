"""Numba's frontend without repeated work makes the same kernels, and leaves other code of Numba alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune.compiler.targets.cuda import compile as compiling
from autotune.compiler.targets.cuda import frontend
from autotune.domains.fusion.program_spec import workloads_of
from autotune.domains.fusion.task import FusionTask

F = torch.nn.functional


def dropped(x: Tensor, y: Tensor) -> Tensor:
    """A layer norm of random numbers, whose 64-bit constants are static operands."""
    return F.layer_norm(x + F.dropout(y, 0.1), (x.shape[-1],))


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "pointwise": (lambda x: F.gelu(x) * 2, (torch.randn(64, 256).bfloat16(),)),
    "rows": (dropped, (torch.randn(64, 256), torch.randn(64, 256))),
    "outer": (lambda x: torch.softmax(x, 0), (torch.randn(512, 256),)),
    "columns": (lambda x: (x * 2, x.sum(0)), (torch.randn(512, 256),)),
    "transposed": (lambda x: x.t().contiguous() + 1, (torch.randn(512, 256),)),
    "scatter": (
        lambda g, i: torch.ops.aten.embedding_dense_backward(g, i, 64, -1, False),
        (torch.randn(256, 32), torch.arange(256) % 64),
    ),
}


def codes(name: str) -> list[bytes]:
    """The cubins of a function's default schedule."""
    fn, args = FUNCTIONS[name]
    (work, _), *_ = workloads_of(fn, args)
    task = FusionTask(work, "cuda:0", target="sm_90", sms=132)
    return [kernel.code for kernel in task.build(task.default()).kernels]


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend, "_resolved", {})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls whose types Numba itself resolved."""
    calls: list[Any] = []
    real = frontend._asked

    def asked(*given: Any) -> Any:
        if given[0].__name__ == "get_call_type":
            calls.append(given)
        return real(*given)

    monkeypatch.setattr(frontend, "_asked", asked)
    return calls


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_kernels_are_the_same(
    name: str, compiled_anew: None, forgotten: None, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = codes(name)
    before = len(asked)
    assert codes(name) == first
    again = len(asked) - before
    del asked[:]
    monkeypatch.setattr(compiling, "without_repeated_work", contextlib.nullcontext)
    assert codes(name) == first
    assert len(asked) > 200
    assert 10 * again < len(asked), "a second build resolves little anew"


def test_variables_with_one_assignment_are_those_of_numba(
    compiled_anew: None, forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from numba.cuda.lowering import Lower

    own = getattr(Lower._find_singly_assigned_variable, "__wrapped__", Lower._find_singly_assigned_variable)
    assert frontend.digest_of(own) == frontend._KNOWN, "this version of numba-cuda keeps its own"
    real, seen = frontend._find_single, []

    def both(lower: Any) -> None:
        own(lower)
        expected = lower._singly_assigned_vars
        real(lower)
        seen.append(lower._singly_assigned_vars)
        assert lower._singly_assigned_vars == expected

    monkeypatch.setattr(frontend, "_find_single", both)
    codes("rows")
    assert any(seen)


def test_code_outside_of_autotune_is_resolved_by_numba(compiled_anew: None, forgotten: None, asked: list[Any]) -> None:
    from numba import cuda, types

    codes("pointwise")
    held = dict(frontend._resolved)
    assert held

    def add(out: Any, x: Any) -> None:
        out[0] = x[0] + 1.5

    array = types.float32[::1]
    before = len(asked)
    cuda.compile_ptx(add, (array, array), cc=(9, 0))
    assert len(asked) > before
    assert frontend._resolved == held


def test_an_error_is_that_of_numba_each_time(forgotten: None) -> None:
    from numba import types
    from numba.core.errors import TypingError
    from numba.cuda.descriptor import cuda_target

    function = types.Function(cuda_target.typing_context.resolve_value_type(abs).templates[0])
    said = []
    for active in (contextlib.nullcontext, frontend.without_repeated_work, frontend.without_repeated_work):
        with active(), pytest.raises(TypingError) as raised:
            function.get_call_type(cuda_target.typing_context, (types.unicode_type,), {})
        said.append(" ".join(str(raised.value).split()))  # Numba indents by the number of failures before
    assert len(set(said)) == 1


def test_no_more_is_remembered_than_the_limit(
    compiled_anew: None, forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = codes("pointwise")
    monkeypatch.setattr(frontend, "_MOST", 4)
    frontend._resolved.clear()
    assert codes("pointwise") == expected
    assert len(frontend._resolved) <= 4

"""Symbolic sizes of attention: comparisons add no guard, and thresholds take the sizes at compile time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autotune.compiler.capture.attention import kernels
from autotune.compiler.capture.attention.calls import at_hints, exceeds, fits, hint, is_bounded, same_length, same_shape

HEADS, SIZE = 8, 64


@pytest.fixture
def environment() -> ShapeEnv:
    return ShapeEnv()


@pytest.fixture
def mode(environment: ShapeEnv) -> Iterator[FakeTensorMode]:
    with FakeTensorMode(shape_env=environment) as found:
        yield found


def symbols(environment: ShapeEnv, mode: FakeTensorMode, batch: int, length: int) -> tuple[Any, Any]:
    """Symbols of these values at compile time."""
    with torch._C._DisableTorchDispatch():
        real = torch.empty(batch, length)
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)  # type: ignore[no-untyped-call]
    made = mode.from_tensor(real, source=ConstantSource("x"), symbolic_context=context)
    b, s = made.shape
    assert isinstance(b, torch.SymInt)
    assert isinstance(s, torch.SymInt)
    return b, s


def queries(batch: Any, length: Any, device: str = "cpu") -> Tensor:
    """[B, H, S, D] as a projection has them."""
    strides = length * HEADS * SIZE, SIZE, HEADS * SIZE, 1
    return torch.empty_strided((batch, HEADS, length, SIZE), strides, dtype=torch.bfloat16, device=device)


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "_has_triton", lambda: True)


def test_comparisons_add_no_guard(environment: ShapeEnv, mode: FakeTensorMode) -> None:
    batch, length = symbols(environment, mode, 3, 1500)
    assert same_length(length, length + 0)
    assert not same_length(length, batch)
    assert not same_length(length, 1500)
    assert same_shape((batch, 4, length * 2), (batch, 4, length + length))
    assert not same_shape((batch, 4), (batch, 4, length))
    assert exceeds(length, 1)
    assert not exceeds(length, 2)
    assert not exceeds(length - 2, 0)
    assert (hint(length), hint(batch * length), hint(7)) == (1500, 4500, 7)
    small = at_hints(queries(batch, length).requires_grad_())
    assert small is not None
    assert small.shape == (3, HEADS, 1500, SIZE)
    assert small.stride() == (1500 * HEADS * SIZE, SIZE, HEADS * SIZE, 1)
    assert all(type(n) is int for n in (*small.shape, *small.stride()))
    assert small.requires_grad
    assert environment.guards == []


def test_a_bound_becomes_a_guard_unless_the_user_gave_one(environment: ShapeEnv, mode: FakeTensorMode) -> None:
    batch, length = symbols(environment, mode, 3, 1500)
    assert fits(7, 7)
    assert not fits(8, 7)
    assert environment.guards == []
    assert fits(batch * HEADS, 65535)
    assert [str(guard.expr) for guard in environment.guards] == [f"{HEADS}*{batch} <= 65535"]
    torch._check(length <= 2000)
    assert is_bounded(length)
    count = len(environment.guards)
    assert fits(length, 2000)
    assert not fits(length, 1600)
    assert len(environment.guards) == count


@pytest.mark.parametrize(("length", "taken"), [(1024, True), (1023, False)])
def test_thresholds_take_the_sizes_at_compile_time(
    length: int, taken: bool, environment: ShapeEnv, mode: FakeTensorMode, h100: None
) -> None:
    q = queries(*symbols(environment, mode, 4, length), "cuda")
    assert kernels.has_spans(q, q, q, 0.0) is taken
    assert not kernels.has_spans(q, q, q, 0.1)
    assert len(environment.guards) == (2 if taken else 0), "the grid, and the mask's indices"
    assert all(str(length) not in str(guard.expr) for guard in environment.guards)
    assert isinstance(q.shape[2], torch.SymInt)


@pytest.mark.parametrize(("stride", "taken"), [(1, True), ("a symbol", False)])
def test_a_stride_that_is_1_at_compile_time_alone(
    stride: Any, taken: bool, environment: ShapeEnv, mode: FakeTensorMode, h100: None
) -> None:
    _, length = symbols(environment, mode, 3, 1500)
    strides = 4096 * HEADS * SIZE, 4096 * SIZE, SIZE, stride if taken else length - 1499
    q = torch.empty_strided((2, HEADS, 1500, SIZE), strides, dtype=torch.bfloat16, device="cuda")
    assert kernels.has_spans(q, q, q, 0.0) is taken

"""The oracle itself: hand-made graphs against arithmetic written out, chunks, guards, gathers, special inputs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune.ir import oracle as module
from autotune.ir.graph import Graph, Output, Value
from autotune.ir.inputs import make_inputs
from autotune.ir.oracle import interpret
from tests.unit.compiler.lower.test_products import regions_of


def graph(extents: tuple[int, ...], values: list[Value], inputs: tuple[str, ...], *outputs: Output) -> Graph:
    made = Graph(extents, tuple(values), inputs, outputs)
    made.check()
    return made


def unary(op: str, dtype: str = "float32", result: str = "float32", storage: str = "float32") -> Graph:
    load = Value("load", axes=(0,), slot=0, strides=(1,), dtype=dtype)
    return graph((8,), [load, Value(op, (0,), (0,), result)], (storage,), Output(1, (0,), (1,), result))


X = [-2.5, -0.5, -0.0, 0.0, 0.5, 1.5, math.inf, math.nan]


@pytest.mark.parametrize(
    ("op", "python"),
    [
        *[("neg", lambda x: -x), ("abs", abs), ("floor", math.floor), ("trunc", math.trunc), ("round", round)],
        *[("exp", math.exp), ("erf", math.erf), ("tanh", math.tanh), ("cos", math.cos), ("expm1", math.expm1)],
    ],
)
def test_unary(op: str, python: object) -> None:
    (got,) = interpret(unary(op), [torch.tensor(X)])
    assert got.dtype == torch.float64
    for x, y in zip(X[:6], got.tolist(), strict=False):
        assert y == pytest.approx(python(x), abs=1e-15)  # type: ignore[operator]
    assert math.isnan(got[7])


def test_twice_as_many_digits_as_float32() -> None:
    (got,) = interpret(unary("exp"), [torch.full((8,), 1.0)])
    assert got[0].item() == pytest.approx(math.e, abs=1e-15)


def test_the_range_is_that_of_float32() -> None:
    (got,) = interpret(unary("exp"), [torch.tensor([89.0, 88.0, -110.0, -80.0, -math.inf, math.inf, 0.0, math.nan])])
    assert got[0] == math.inf
    assert got[1] == pytest.approx(math.exp(88.0))
    assert got[2] == 0.0
    assert got[3] == pytest.approx(math.exp(-80.0))
    assert got[4:7].tolist() == [0.0, math.inf, 1.0]


def test_integers_are_exact_and_wrap() -> None:
    values = [
        Value("load", axes=(0,), slot=0, strides=(1,), dtype="int64"),
        Value("const", dtype="int64", number=3),
        Value("mul", (0, 1), (0,), "int64"),
        Value("floordiv", (0, 1), (0,), "int64"),
        Value("mod", (0, 1), (0,), "int64"),
    ]
    g = graph((3,), values, ("int64",), *[Output(k, (0,), (1,), "int64") for k in (2, 3, 4)])
    x = torch.tensor([2**62 + 1, -7, 7])
    times, div, mod = interpret(g, [x])
    assert times.tolist() == [(3 * (2**62 + 1) + 2**63) % 2**64 - 2**63, -21, 21]
    assert (div.tolist()[1:], mod.tolist()[1:]) == ([-3, 2], [2, 1])


def test_reductions_propagate_nan() -> None:
    x = torch.tensor([[1.0, math.nan, 3.0], [4.0, 5.0, -6.0]])
    load = Value("load", axes=(0, 1), slot=0, strides=(3, 1))
    reductions = [Value(op, (0,), (0,), over=(1,)) for op in ("sum", "max", "min", "prod")]
    g = graph((2, 3), [load, *reductions], ("float32",), *[Output(k, (0,), (1,), "float32") for k in (1, 2, 3, 4)])
    got = interpret(g, [x.reshape(-1)])
    assert all(math.isnan(r[0]) for r in got)
    assert [r[1].item() for r in got] == [3.0, 5.0, -6.0, -120.0]


def test_guards_do_not_touch_memory_outside() -> None:
    load = Value("load", axes=(0,), slot=0, strides=(1,), offset=-2, guards=((0, 2, 5),))
    g = graph((7,), [load], ("float32",), Output(0, (0,), (1,), "float32"))
    assert g.input_numel(0) == 3
    (got,) = interpret(g, [torch.tensor([1.0, 2.0, 3.0])])
    assert got.tolist() == [0, 0, 1, 2, 3, 0, 0]


def test_gather_and_its_bound() -> None:
    values = [
        Value("load", axes=(0,), slot=1, strides=(1,), dtype="int64"),
        Value("gather", (0,), (0, 1), slot=0, strides=(0, 1), index_stride=4, bound=3),
    ]
    g = graph((2, 4), values, ("float32", "int64"), Output(1, (0, 1), (4, 1), "float32"))
    table = torch.arange(12.0)
    (got,) = interpret(g, [table, torch.tensor([2, 0])])
    assert got.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    with pytest.raises(IndexError, match="outside"):
        interpret(g, [table, torch.tensor([3, 0])])
    assert all(0 <= int(i) < 3 for seed in range(5) for i in make_inputs(g, seed)[1])


def test_products_of_positions_stay_within_the_bound() -> None:
    """A place times a mask, and one more: neither factor is known to be the mask."""
    values = [
        Value("load", axes=(0,), slot=1, strides=(1,), dtype="int64"),
        Value("load", axes=(0,), slot=2, strides=(1,), dtype="int64"),
        Value("mul", (0, 1), (0,), dtype="int64"),
        Value("const", number=3, dtype="int64"),
        Value("mul", (2, 3), (0,), dtype="int64"),
        Value("const", number=1, dtype="int64"),
        Value("add", (4, 5), (0,), dtype="int64"),
        Value("gather", (6,), (0, 1), slot=0, strides=(0, 1), index_stride=2, bound=65),
    ]
    g = graph((512, 2), values, ("float32", "int64", "int64"), Output(7, (0, 1), (2, 1), "float32"))
    for seed in range(3):
        _, a, b = made = make_inputs(g, seed)
        assert int((a * b * 3 + 1).max()) < 65
        assert int((a * b).max()) > 0
        interpret(g, made)


def test_results_follow_the_order_of_the_outputs_axes() -> None:
    load = Value("load", axes=(0, 1), slot=0, strides=(3, 1))
    g = graph((2, 3), [load], ("float32",), Output(0, (1, 0), (2, 1), "float32"))
    (got,) = interpret(g, [torch.arange(6.0)])
    assert got.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_results_are_expanded_over_axes_they_do_not_vary_over() -> None:
    load = Value("load", axes=(1,), slot=0, strides=(1,))
    g = graph((2, 3), [load], ("float32",), Output(0, (0, 1), (3, 1), "float32"))
    (got,) = interpret(g, [torch.arange(3.0)])
    assert got.tolist() == [[0, 1, 2], [0, 1, 2]]


def softmax_like() -> Graph:
    """Row softmax over [6, 5] with an index along the rows and a guarded load, so that pieces can go wrong."""
    values = [
        Value("load", axes=(0, 1), slot=0, strides=(5, 1)),
        Value("max", (0,), (0,), over=(1,)),
        Value("sub", (0, 1), (0, 1)),
        Value("exp", (2,), (0, 1)),
        Value("sum", (3,), (0,), over=(1,)),
        Value("div", (3, 4), (0, 1)),
        Value("index", axes=(0,), dtype="float32", scale=2, shift=1),
        Value("mul", (5, 6), (0, 1)),
        Value("load", axes=(0,), slot=1, strides=(1,), offset=-1, guards=((0, 1, 5),)),
        Value("add", (7, 8), (0, 1)),
        Value("load", axes=(1,), slot=2, strides=(1,)),
    ]
    outputs = (
        Output(9, (0, 1), (5, 1), "float32"),
        Output(1, (0,), (1,), "float32"),
        Output(10, (1,), (1,), "float32"),
    )
    return graph((6, 5), values, ("float32", "float32", "float32"), *outputs)


def test_rows_in_pieces_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    g = softmax_like()
    inputs = make_inputs(g, 0)
    whole = interpret(g, inputs)
    monkeypatch.setattr(module, "_CHUNK", 12)
    pieces = interpret(g, inputs)
    for a, b in zip(whole, pieces, strict=True):
        assert torch.equal(a, b)
    x = inputs[0].double().view(6, 5)
    want = torch.softmax(x, 1) * (torch.arange(6.0)[:, None] * 2 + 1)
    want[1:5] += inputs[1].double()[:, None]
    torch.testing.assert_close(whole[0], want)


def test_inputs_are_the_same_for_a_seed_and_special_on_demand() -> None:
    g = unary("exp")
    assert torch.equal(make_inputs(g, 1)[0], make_inputs(g, 1)[0])
    assert not torch.equal(make_inputs(g, 1)[0], make_inputs(g, 2)[0])
    big = graph(
        (5000,), [Value("load", axes=(0,), slot=0, strides=(1,))], ("bfloat16",), Output(0, (0,), (1,), "bfloat16")
    )
    plain, special = make_inputs(big, 0)[0], make_inputs(big, 0, special=True)[0]
    assert plain.dtype == torch.bfloat16
    assert bool(plain.isfinite().all())
    assert not bool(special.isfinite().all())
    assert int((~special.isfinite()).sum()) < 50


@pytest.mark.parametrize(
    ("storage", "lowest"), [("uint8", 0), ("int8", -8), ("int16", -8), ("int32", -8), ("int64", -8)]
)
def test_integer_inputs(storage: str, lowest: int) -> None:
    kind = "int64" if storage == "int64" else "int32"
    load = Value("load", axes=(0,), slot=0, strides=(1,), dtype=kind)
    g = graph((1000,), [load], (storage,), Output(0, (0,), (1,), storage))
    (x,) = make_inputs(g, 0)
    assert (int(x.min()), int(x.max())) == (lowest, 7)
    (got,) = interpret(g, [x])
    assert got.dtype == x.dtype
    assert torch.equal(got, x)


def test_an_index_that_is_gathered_is_within_its_bound() -> None:
    """x[outer[inner]]: indices into ``outer``, and its elements, each below their own extent."""
    values = [
        Value("load", axes=(0,), slot=0, strides=(1,), dtype="int64"),
        Value("gather", (0,), (0,), "int64", slot=1, strides=(0,), index_stride=1, bound=4),
        Value("gather", (1,), (0,), slot=2, strides=(0,), index_stride=1, bound=100),
    ]
    g = graph((50,), values, ("int64", "int64", "float32"), Output(2, (0,), (1,), "float32"))
    inner, outer, x = make_inputs(g, 0)
    assert (int(inner.min()), int(inner.max())) == (0, 3)
    assert (outer.numel(), x.numel()) == (4, 100)
    assert bool(((outer >= 0) & (outer < 100)).all())
    assert int(outer.max()) > 8
    (got,) = interpret(g, [inner, outer, x])
    assert torch.equal(got, x[outer[inner]].double())


def _loss_backward(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of a vocabulary that is padded for the products that follow: both ways round, and a bias's gradient."""
    grad = torch.softmax(x, -1) - torch.nn.functional.one_hot(target, 10)
    padded = torch.nn.functional.pad(grad, (0, 2))
    return padded.t().contiguous(), padded * 1.5, grad.sum(0)


@pytest.mark.parametrize("chunk", [24, 32, 100])
def test_a_large_value_is_never_there_as_a_whole(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (region,) = regions_of(_loss_backward, torch.randn(24, 10), torch.zeros(24, dtype=torch.int64))
    assert region.workload is not None
    g = Graph.from_json(region.workload.spec)
    inputs = make_inputs(g, 3, special=True)
    whole = interpret(g, inputs)
    sizes: list[int] = []
    value = module._Frame.value

    def counted(self: Any, v: Value, values: dict[int, Tensor]) -> Tensor:
        sizes.append(value(self, v, values).numel())
        return value(self, v, values)

    monkeypatch.setattr(module._Frame, "value", counted)
    monkeypatch.setattr(module, "_CHUNK", chunk)
    for a, b in zip(whole, interpret(g, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15, equal_nan=True)
    assert max(sizes) <= chunk


def test_large_results_of_half_precision_are_told_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Value("load", axes=(0, 1), slot=0, strides=(3, 1))
    for dtype, told in (("bfloat16", torch.float32), ("float32", torch.float64)):
        g = graph((8, 3), [load], (dtype,), Output(0, (0, 1), (3, 1), dtype))
        assert interpret(g, make_inputs(g, 0))[0].dtype == torch.float64
        with monkeypatch.context() as patch:
            patch.setattr(module, "_CHUNK", 6)
            assert interpret(g, make_inputs(g, 0))[0].dtype == told

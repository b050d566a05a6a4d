"""Cutting graphs: order, writes, random numbers, cycles, and what is passed between the parts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from autotune.runtime.assemble import assemble, straight
from autotune.runtime.partition import Cut, Piece, extract, pieces

aten = torch.ops.aten


def graph_of(fn: Callable[..., Any], *args: torch.Tensor) -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(fn, tracing_mode="fake")(*args)


def nodes_of(gm: fx.GraphModule, *targets: Any) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.target in targets]


def cut_of(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> Cut:
    """A cut that computes the nodes as they are."""
    inside = set(nodes)
    inputs = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
    outputs = [n for n in nodes if any(u not in inside for u in n.users)]
    return Cut(nodes, inputs, outputs, extract(gm, nodes, inputs, outputs).forward)


def shape(order: Sequence[Cut | Piece]) -> list[str]:
    return ["cut" if isinstance(i, Cut) else "+".join(n.name for n in i.nodes) for i in order]


def test_levels() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = torch.mm(x, w)
        b = a.exp()
        c = torch.mm(b, w)
        d = c.sin()
        return torch.mm(d, w) + a

    gm = graph_of(fn, torch.randn(4, 4), torch.randn(4, 4))
    cuts = [cut_of(gm, nodes_of(gm, aten.exp.default)), cut_of(gm, nodes_of(gm, aten.sin.default))]
    assert shape(pieces(gm.graph, cuts)) == ["mm", "cut", "mm_1", "cut", "mm_2+add"]


def test_a_cycle_through_what_remains_is_refused() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x.exp(), x).sin() + x.exp()

    gm = graph_of(fn, torch.randn(4, 4))
    first, *_ = nodes_of(gm, aten.exp.default)
    cut = cut_of(gm, [first, *nodes_of(gm, aten.sin.default)])
    with pytest.raises(ValueError, match="need each other"):
        pieces(gm.graph, [cut])


def test_regions_may_not_overlap() -> None:
    gm = graph_of(lambda x: x.exp(), torch.randn(4))
    cut = cut_of(gm, nodes_of(gm, aten.exp.default))
    other = Cut(cut.nodes, cut.inputs, cut.outputs, cut.run)
    with pytest.raises(ValueError, match="two regions"):
        pieces(gm.graph, [cut, other])


def test_a_write_waits_for_readers_and_later_readers_wait_for_it() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = torch.mm(w, w).exp()  # level 1
        b = a * x  # reads x before the write, at level 1
        x.copy_(w)  # on its own it would be at level 0
        return b + x.sin()

    def run(fn: Callable[..., Any]) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        x, w = torch.randn(4, 4), torch.randn(4, 4)
        return fn(x, w), x

    gm = graph_of(fn, torch.randn(4, 4), torch.randn(4, 4))
    cuts = [cut_of(gm, nodes_of(gm, aten.exp.default)), cut_of(gm, nodes_of(gm, aten.sin.default))]
    assert shape(pieces(gm.graph, cuts))[:3] == ["mm", "cut", "mul+copy_"]
    # Dynamo's graphs read the copied value; here the written input itself is read again.
    boxed = assemble(gm, cuts, {})
    for a, b in zip(run(lambda *t: boxed(list(t))), run(fn), strict=True):
        torch.testing.assert_close(a, b)


def test_random_operators_keep_their_order() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.bernoulli(torch.mm(x, x).sigmoid()), torch.bernoulli(x)

    gm = graph_of(fn, torch.rand(8, 8))
    cut = cut_of(gm, nodes_of(gm, aten.sigmoid.default))
    assert shape(pieces(gm.graph, [cut])) == ["mm", "cut", "bernoulli+bernoulli_1"]


def test_views_within_a_region_are_not_computed_twice() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.exp().view(16).sin()

    gm = graph_of(fn, torch.randn(4, 4))
    exp, sin = nodes_of(gm, aten.exp.default, aten.sin.default)
    (x,) = gm.graph.find_nodes(op="placeholder")
    cut = Cut([exp, sin], [x], [sin], lambda x: (x.exp().view(16).sin(),))
    assert shape(pieces(gm.graph, [cut])) == ["cut"]
    value = torch.randn(4, 4)
    (got,) = [assemble(gm, [cut], {})([value])]
    torch.testing.assert_close(got, fn(value))


def test_pieces_take_and_give_only_what_is_needed() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = x.sin(), y.cos()
        return torch.mm(a, b).exp() + b

    gm = graph_of(fn, torch.randn(4, 4), torch.randn(4, 4))
    first, _, last = pieces(gm.graph, [cut_of(gm, nodes_of(gm, aten.exp.default))])
    assert isinstance(first, Piece)
    assert isinstance(last, Piece)
    assert [n.name for n in first.outputs] == ["cos", "mm"]
    assert [n.name for n in last.inputs] == ["exp", "cos"]


def test_library_calls_run_as_they_are_and_arguments_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.runtime import assemble as module

    def never(*args: Any) -> Any:
        raise AssertionError("nothing here is worth compiling")

    monkeypatch.setattr(module, "compile_piece", never)

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.mm(x, w.t()).exp().view(2, 8).t().reshape(4, 4), w)

    gm = graph_of(fn, torch.randn(4, 4), torch.randn(4, 4))
    clones = nodes_of(gm, aten.clone.default)
    boxed = assemble(gm, [cut_of(gm, [*nodes_of(gm, aten.exp.default)]), *([cut_of(gm, clones)] if clones else [])], {})
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    args = [x, w]
    torch.testing.assert_close(boxed(args), fn(x, w))
    assert args == []


def test_a_graph_that_is_one_region_is_one_call() -> None:
    """With its inputs and results in the graph's order, whatever the region's is."""
    x, y = torch.randn(4, 4), torch.randn(4, 4)

    def of(fn: Callable[..., Any], turned: bool) -> tuple[Cut, Callable[..., Any] | None]:
        gm = graph_of(fn, x, y)
        whole = cut_of(gm, [n for n in gm.graph.nodes if n.op == "call_function"])
        (output,) = gm.graph.find_nodes(op="output")
        given = output.args[0] if isinstance(output.args[0], (tuple, list)) else [output.args[0]]
        output.args = (tuple(given),)  # as AOTAutograd has it
        inputs, outputs = gm.graph.find_nodes(op="placeholder"), [n for n in whole.outputs if n in given]
        if turned:
            inputs.reverse()
            outputs.reverse()
        cut = Cut(whole.nodes, inputs, outputs, extract(gm, whole.nodes, inputs, outputs).forward)
        return cut, straight(gm, [cut])

    def two(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a.exp() - b, a * b.sin()

    for turned in (False, True):
        cut, run = of(two, turned)
        assert run is not None
        assert (run is cut.run) is not turned
        torch.testing.assert_close(tuple(run(x, y)), two(x, y))
    cut, run = of(lambda a, b: (a.exp(), b), False)
    assert run is None  # an input is a result
    gm = graph_of(two, x, y)
    parts = [cut_of(gm, nodes_of(gm, aten.exp.default)), cut_of(gm, nodes_of(gm, aten.sin.default))]
    assert straight(gm, parts) is None
    assert straight(gm, parts[:1]) is None


def test_tuples_stay_within_a_piece() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        values, indices = torch.sort(x.exp())
        return values.sin() + indices

    gm = graph_of(fn, torch.randn(4, 4))
    order = pieces(gm.graph, [cut_of(gm, nodes_of(gm, aten.sin.default))])
    for piece in order:
        if isinstance(piece, Piece):
            assert all(isinstance(n.meta["val"], torch.Tensor) for n in piece.outputs)
            assert any(n.target is operator.getitem for n in piece.nodes) or piece is order[-1]

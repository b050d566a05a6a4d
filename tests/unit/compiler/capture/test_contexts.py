"""The state that each node of a Dynamo graph runs in: equal where a program is in the same state, else not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autotune.compiler.capture.attention.effects import Contexts
from autotune.compiler.lower.nodes import stream_of


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def captured(program: Callable[..., Any], *args: Any) -> fx.Graph:
    kept: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        kept.append(fx.GraphModule(gm, gm.graph))
        return gm.forward

    torch.compile(program, backend=keep, fullgraph=True)(*args)
    return kept[0].graph


def marked(graph: fx.Graph) -> dict[float, fx.Node]:
    """The nodes that add a number, by that number."""
    found = (n for n in graph.nodes if n.op == "call_method" and n.target == "add")
    return {n.args[1]: n for n in found}  # type: ignore[misc]


def alike(program: Callable[[Tensor], Any], *args: Any) -> Callable[[int, int], bool]:
    graph = captured(program, *(args or (torch.ones(3, requires_grad=True),)))
    contexts, marks = Contexts(graph), marked(graph)
    return lambda a, b: contexts.alike(marks[a], marks[b])


def within(enter: Callable[[], Any]) -> Callable[[Tensor], Any]:
    """Adds 1 before a context, 2 inside, 3 between, 4 inside again, 5 after."""

    def program(x: Tensor) -> Any:
        first = x.add(1)
        with enter():
            second = x.add(2)
        third = x.add(3)
        with enter():
            fourth = x.add(4)
        return first, second, third, fourth, x.add(5)

    return program


ENTERED: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast_off": lambda: torch.autocast("cpu", enabled=False),
    "stream": lambda: torch.Stream("cpu"),
    "dual_level": torch.autograd.forward_ad.dual_level,
    "saved_tensors_hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here"),
    "sdpa_kernel": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
}


@pytest.mark.parametrize("name", ENTERED)
def test_inside_of_a_context_differs_from_outside(name: str) -> None:
    same = alike(within(ENTERED[name]))
    assert not any(same(inside, outside) for inside in (2, 4) for outside in (1, 3, 5))
    if name in ("autocast", "autocast_off", "stream", "no_grad"):
        assert same(1, 3)
        assert same(1, 5), "what is left leaves nothing"


def test_grad_mode_goes_by_its_value() -> None:
    same = alike(within(torch.no_grad))
    assert same(2, 4)

    def nested(x: Tensor) -> Any:
        first = x.add(1)
        with torch.no_grad():
            second = x.add(2)
            with torch.enable_grad():
                third = x.add(3)
            fourth = x.add(4)
        return first, second, third, fourth

    same = alike(nested)
    assert same(1, 3)
    assert same(2, 4)
    assert not same(1, 2)
    with torch.no_grad():
        torch._dynamo.reset()
        same = alike(nested)
    assert same(2, 4)
    assert same(1, 2), "where the graph is called"
    assert not same(1, 3)


def test_a_setting_that_outlasts_its_context() -> None:
    def program(x: Tensor) -> Any:
        first = x.add(1)
        with torch.autocast("cpu", torch.bfloat16):
            torch.set_grad_enabled(False)
            second = x.add(2)
        third = x.add(3)
        torch.set_grad_enabled(True)
        return first, second, third, x.add(4)

    same = alike(program)
    assert not any(same(a, b) for a, b in ((1, 2), (1, 3), (2, 3), (3, 4)))
    assert same(1, 4)


def test_inference_mode_sets_the_grad_mode() -> None:
    def program(x: Tensor) -> Any:
        with torch.no_grad(), torch.inference_mode(False):
            first = x.add(1)
            with torch.no_grad():
                return first, x.add(2)

    assert not alike(program)(1, 2)


def test_levels_of_transformations() -> None:
    def batched(x: Tensor) -> Any:
        first = x.add(1)
        inner = torch.vmap(lambda row: row.add(2) * row.add(3))(x)
        again = torch.vmap(lambda row: row.add(4))(x)
        return first, inner, again, x.add(5)

    same = alike(batched, torch.ones(3, 2))
    assert same(2, 3)
    assert not any(same(a, b) for a, b in ((1, 2), (2, 5), (4, 5), (2, 4)))

    def derived(x: Tensor) -> Any:
        first = torch.func.grad(lambda y: y.add(1).sum())(x)
        return first, torch.func.grad(lambda y: y.add(2).sum())(x), x.add(3)

    same = alike(derived, torch.ones(3))
    assert not any(same(a, b) for a, b in ((1, 2), (1, 3), (2, 3))), "a tensor of a level that has ended"

    def forward(x: Tensor) -> Any:
        return x.add(1), torch.func.jvp(lambda y: y.add(2), (x,), (x,)), x.add(3)

    same = alike(forward, torch.ones(3))
    assert not any(same(a, b) for a, b in ((1, 2), (2, 3)))


def test_an_unknown_device_and_unknown_calls() -> None:
    """As Dynamo writes ``with torch.cuda.device(1)``, and any other call that takes and makes no tensor."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.ones(3)
    marks = []

    def mark() -> None:
        marks.append(graph.call_function(torch.add, (x, len(marks))))
        marks[-1].meta["example_value"] = torch.ones(3)

    mark()
    left = graph.call_function(torch.cuda._exchange_device, (1,))
    mark()
    graph.call_function(torch.cuda._maybe_exchange_device, (left,))
    mark()
    graph.call_function(setattr, ("a new", "state", 1))
    mark()
    size = graph.call_function(torch.sym_max, (3, 4))
    size.meta["example_value"] = 4
    mark()
    graph.call_method("wait_stream", (graph.get_attr("one"), graph.get_attr("another")))
    mark()
    contexts = Contexts(graph)
    numbers = [next(k for k, other in enumerate(marks) if contexts.alike(mark, other)) for mark in marks]
    assert numbers == [0, 1, 0, 3, 3, 5]


def test_a_graph_inside_begins_where_it_is_called() -> None:
    def program(x: Tensor) -> Any:
        with torch.no_grad():
            return x.add(1)

    graph = captured(program, torch.ones(3, requires_grad=True))
    outer = Contexts(graph)
    where = outer.of(marked(graph)[1])
    inner = Contexts(graph, where)
    first = next(iter(graph.nodes))
    assert inner.of(first) == where
    assert outer.of(first) != where
    assert inner.alike(first, marked(graph)[1])


def test_a_new_node_runs_where_another_does() -> None:
    def program(x: Tensor) -> Any:
        with torch.Stream("cpu"):
            return x.add(1)

    graph = captured(program, torch.ones(3))
    contexts, node = Contexts(graph), marked(graph)[1]
    assert stream_of(node) is not None
    made = graph.call_function(torch.neg, (node,))
    assert stream_of(made) is None
    contexts.put(made, node)
    assert contexts.alike(made, node)
    assert stream_of(made) == stream_of(node)

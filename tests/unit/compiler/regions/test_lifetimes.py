"""Joined regions leave a graph's peak memory as it is."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autotune.compiler.capture.recording import capture
from autotune.compiler.lower.facts import GraphFacts
from autotune.compiler.regions.find import Finder, Region, find_regions
from autotune.compiler.regions.lifetimes import Lifetimes
from autotune.compiler.regions.symbols import concrete

ROWS = 4096
"""Tensors of 64 MiB."""


def found(fn: Callable[..., Any], *shapes: tuple[int, ...], rename: Callable[[str], str] = str) -> list[Region]:
    with FakeTensorMode(shape_env=ShapeEnv()):
        gm = make_fx(fn, core_aten_decompositions())(*map(torch.empty, shapes))
    for n in gm.graph.find_nodes(op="placeholder"):
        n.target = n.name = rename(n.name)
    return find_regions(concrete(gm)[0])


def layers(g: Tensor, w: Tensor, *saved: Tensor) -> Tensor:
    """A backward pass: each layer's activation is computed again before the products that read it."""
    for x in saved:
        g = g @ w + torch.tanh(x) @ w
    return g


def sizes(count: int, rows: int) -> list[tuple[int, ...]]:
    return [(rows, ROWS), (ROWS, ROWS), *[(rows, ROWS)] * count]


def test_activations_of_several_layers_are_not_computed_together() -> None:
    regions = found(layers, *sizes(6, ROWS))
    assert max(len(r.outputs) for r in regions if "tanh" in str(r.workload and r.workload.label)) == 1


def test_a_tensor_of_unknown_size_changes_nothing() -> None:
    def f(g: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        return layers(g, *more), torch.nonzero(g[:8, :8])

    regions = found(f, *sizes(6, ROWS))
    assert max(len(r.outputs) for r in regions if "tanh" in str(r.workload and r.workload.label)) == 1


def test_a_tensor_exists_until_the_last_region_that_computes_its_conversion() -> None:
    """Each region that reads a conversion of half precision computes it, from the tensor in half precision."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        wide = torch.mm(x, w).float()
        y = (wide * 2).sin().bfloat16()
        z = (wide + torch.mm(torch.mm(y, w), w).float()).cos().bfloat16()
        return torch.mm((wide - torch.mm(torch.mm(z, w), w).float()).bfloat16(), w)

    (captured,) = capture(f, [torch.randn(64, 64, dtype=torch.bfloat16) for _ in range(2)], grad=False)
    facts = GraphFacts(captured.module.graph)
    finder = Finder(facts)
    regions = [finder.region(nodes) for nodes in finder.groups()]
    assert finder.copied
    used = Lifetimes(facts, regions, finder.copied).used
    products = [facts.place[n] for n in facts.nodes if facts[n].operator == "mm"]
    assert [used[at] // (2 * 64 * 64) for at in products] == [1, 3, 3, 3, 3, 2], (
        "the first product and two more tensors"
    )


def test_small_activations_may_be_computed_together() -> None:
    regions = found(layers, *sizes(6, 16))
    assert max(len(r.outputs) for r in regions) == 6


def test_results_that_exist_until_the_end_may_be_computed_together() -> None:
    """A forward pass keeps them for its backward pass, so the peak is at its end in either order."""

    def f(g: Tensor, w: Tensor, *saved: Tensor) -> list[Tensor]:
        kept = []
        for x in saved:
            kept.append(torch.tanh(x))
            g = torch.mm(torch.mm(g, w), kept[-1])
        return [g, *kept]

    assert max(len(r.outputs) for r in found(f, *sizes(6, ROWS))) == 6


def test_a_backward_pass_frees_its_activations_and_a_forward_pass_does_not_free_its_arguments() -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(torch.mm(a, a), b)

    def used(*names: str) -> list[int]:
        with FakeTensorMode() as mode:
            made = [mode.from_tensor(torch.empty(32, 32)) for _ in range(2)]
            gm = make_fx(f, tracing_mode="fake")(*made)
        for n, name in zip(gm.graph.find_nodes(op="placeholder"), names, strict=True):
            n.target = name
        return [size // 4096 for size in Lifetimes(GraphFacts(gm.graph), []).used]

    assert used("primals_1", "primals_2") == [0, 0, 1, 2, 1]
    assert used("mm", "tangents_1") == [1, 2, 3, 3, 1]
    assert used("primals_1", "tangents_1") == [0, 1, 2, 3, 1]


def test_a_region_whose_results_nobody_reads_takes_no_memory() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    unused = graph.call_function(torch.ops.aten.neg.default, (x,))
    graph.output((x,))
    with FakeTensorMode() as mode:
        for n in (x, unused):
            n.meta["val"] = mode.from_tensor(torch.empty(4))
    region: Any = SimpleNamespace(nodes=(unused,), inputs=(x,), outputs=())
    lifetimes = Lifetimes(GraphFacts(graph), [region])
    assert lifetimes.used == [0, 0, 0]
    assert lifetimes.split([0], lambda part, k: True) == [[0]]


@pytest.mark.parametrize("seed", range(60))
def test_the_memory_of_joined_regions_is_that_of_a_simulation(seed: int) -> None:
    rng = random.Random(seed)
    graph, nodes = fx.Graph(), list[fx.Node]()
    with FakeTensorMode() as mode:
        for k in range(rng.randint(3, 14)):
            value = mode.from_tensor(torch.empty(rng.randint(1, 5) << 20))
            if k < 2:
                made = graph.placeholder(rng.choice(("tangents", "mm", "primals")) + f"_{k}")
            else:
                read = rng.sample(nodes, rng.randint(1, 2))
                made = graph.call_function(torch.ops.aten.add.Tensor, (read[0], read[-1]))
            made.meta["val"] = value
            nodes.append(made)
    graph.output(tuple(rng.sample(nodes[2:], 1)))
    facts = GraphFacts(graph)
    calls = [n for n in nodes if n.op == "call_function" and n.users]
    regions: list[Any] = [
        SimpleNamespace(nodes=(n,), inputs=tuple(dict.fromkeys(n.all_input_nodes)), outputs=(n,)) for n in calls
    ]
    before = {k: {regions[k].nodes[0], *_ancestors(regions[k].nodes[0])} for k in range(len(regions))}
    bundle: list[int] = []
    for k in rng.sample(range(len(regions)), len(regions)):
        if all(calls[k] not in before[m] and calls[m] not in before[k] for m in bundle):
            bundle.append(k)
    lifetimes = Lifetimes(facts, regions)
    limit = max(lifetimes.used)
    limit += limit // 200 + (4 << 20)
    parts = lifetimes.split(bundle, lambda part, k: True) if bundle else []
    assert sorted(k for part in parts for k in part) == sorted(bundle)
    assert lifetimes.used == _simulated(facts, [[calls[k] for k in part] for part in parts])
    assert max(lifetimes.used) <= limit


def _ancestors(node: fx.Node) -> set[fx.Node]:
    return {node, *(a for n in node.all_input_nodes for a in _ancestors(n))}


def _simulated(facts: GraphFacts, parts: list[list[fx.Node]]) -> list[int]:
    """The bytes at each node, by counting the tensors that exist there."""
    runs, begins = dict(facts.place), dict(facts.place)
    for part in parts:
        first = min(facts.place[n] for n in part)
        runs |= dict.fromkeys(part, first)
        begins |= {a: min(begins[a], first) for n in part for a in _ancestors(n)}
    backward = any(n.name.startswith("tangents") for n in facts.nodes)
    used = [0] * len(facts.nodes)
    for n in facts.nodes:
        if n.op == "output" or (n.op == "placeholder" and (not backward or n.name.startswith("primals"))):
            continue
        readers = [runs[r] for r in n.users] or [runs[n]]
        for at in range(begins[n], max(readers) + 1):
            used[at] += facts[n].bytes
    return used

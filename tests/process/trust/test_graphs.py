"""A graph from a database names no memory before a tensor, and nothing that 64 bits would wrap."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autotune.compiler.targets.cpu.kernel import load_group
from autotune.compiler.targets.cpu.schedule import CpuSchedule
from autotune.ir.graph import Graph
from autotune.ir.inputs import make_inputs
from tests.support.hostile import softmax, workload_of


def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A concatenation: guarded loads, one with an offset below its tensor."""
    return torch.cat([x, y], 1) * 2


def picked(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return table[rows] * 2


ARGUMENTS: dict[Callable[..., Any], tuple[torch.Tensor, ...]] = {
    softmax: (torch.ones(8, 16),),
    joined: (torch.ones(8, 16), torch.ones(8, 16)),
    picked: (torch.ones(32, 16), torch.zeros(8, dtype=torch.int64)),
}


@functools.cache
def _text_of(fn: Callable[..., Any]) -> str:
    return json.dumps(workload_of(fn, *ARGUMENTS[fn]).spec)


def spec_of(fn: Callable[..., Any]) -> dict[str, Any]:
    spec: dict[str, Any] = json.loads(_text_of(fn))
    return spec


def value(spec: dict[str, Any], op: str) -> dict[str, Any]:
    found: dict[str, Any] = next(v for v in spec["values"] if v["op"] == op)
    return found


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"offset": -1}, "1 elements before its tensor"),
        ({"offset": -(2**40)}, "before its tensor"),
        ({"strides": [-16, 1]}, "negative stride"),
        ({"strides": [2**62, 1]}, "out of range"),
        ({"strides": [2**61, 2**61]}, "63 bits"),
        ({"strides": [16.0, 1]}, "no integer"),
        ({"offset": 2**61, "strides": [2**60, 1]}, "63 bits"),
        ({"guards": [[5, 0, 4]]}, "bad guards"),
        ({"guards": [[1, 0, 4], [1, 2, 4]]}, "bad guards"),
        ({"args": [0]}, "argument"),
    ],
)
def test_loads_out_of_bounds_are_refused(change: dict[str, Any], why: str) -> None:
    spec = spec_of(softmax)
    value(spec, "load").update(change)
    with pytest.raises(ValueError, match=why):
        Graph.from_json(spec)


def test_an_offset_below_the_tensor_is_right_where_guards_make_up_for_it() -> None:
    loads = [v for v in spec_of(joined)["values"] if v["op"] == "load"]
    low = next(v for v in loads if v.get("offset", 0) < 0)
    Graph.from_json(spec_of(joined))
    spec = spec_of(joined)
    mine = next(v for v in spec["values"] if v == low)
    mine["guards"] = [[a, lo - 1, hi] for a, lo, hi in mine["guards"]]
    with pytest.raises(ValueError, match="before its tensor"):
        Graph.from_json(spec)


@pytest.mark.parametrize("change", [{"index_stride": -16}, {"index_stride": 0}, {"bound": -1}, {"bound": 2**61}])
def test_gathers_out_of_bounds_are_refused(change: dict[str, Any]) -> None:
    spec = spec_of(picked)
    Graph.from_json(spec)
    value(spec, "gather").update(change)
    with pytest.raises(ValueError, match="value"):
        Graph.from_json(spec)


@pytest.mark.parametrize("change", [{"offset": -1}, {"strides": [-16, 1]}, {"strides": [2**61, 1]}, {"axes": [0, 0]}])
def test_stores_out_of_bounds_are_refused(change: dict[str, Any]) -> None:
    spec = spec_of(softmax)
    spec["outputs"][0].update(change)
    with pytest.raises(ValueError, match="output"):
        Graph.from_json(spec)


@pytest.mark.parametrize("extents", [[2**62, 16], [2**40, 2**30], [-1, 16]])
def test_extents_that_cannot_be_counted_are_refused(extents: list[int]) -> None:
    with pytest.raises(ValueError, match=r"extent|63 bits"):
        Graph.from_json({**spec_of(softmax), "extents": extents})


_ODD: tuple[Any, ...] = (
    *(s * (1 << b) + o for b in (0, 4, 31, 32, 62, 63) for s in (1, -1) for o in (-1, 0)), 1.5, True, "x", None
)  # fmt: skip


def _changed(rng: random.Random, at: Any) -> Any:
    if isinstance(at, dict):
        key = rng.choice(sorted(at))
        return {**at, key: _changed(rng, at[key])}
    if isinstance(at, list) and at:
        k = rng.randrange(len(at))
        return [*at[:k], _changed(rng, at[k]), *at[k + 1 :]]
    return rng.choice(_ODD)


@pytest.mark.parametrize("seed", range(4))
def test_mutated_graphs_are_refused_or_stay_within_their_tensors(seed: int) -> None:
    """An accepted graph makes a kernel, or none, that reads no element before its inputs or behind ``input_numel``."""
    rng, refused, ran = random.Random(seed), 0, 0
    for _ in range(60):
        spec = _changed(rng, spec_of(rng.choice([softmax, joined, picked])))
        try:
            graph = Graph.from_json(spec)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            refused += 1
            continue
        sizes = [graph.input_numel(s) for s in range(len(graph.inputs))]
        sizes += [graph.output_numel(k) for k in range(len(graph.outputs))]
        if max((*sizes, graph.size(range(len(graph.extents))))) > 1 << 16:
            continue
        try:
            kernel = load_group(graph, CpuSchedule(wide=False))
        except Exception:  # it makes no kernel, which a search survives
            continue
        inputs = make_inputs(graph, 0)
        room = 1 << 12
        outputs = [
            torch.full((2 * room + graph.output_numel(k),), 77, dtype=getattr(torch, o.dtype))
            for k, o in enumerate(graph.outputs)
        ]
        addresses = [t.data_ptr() for t in inputs] + [t[room:].data_ptr() for t in outputs]
        kernel(addresses, graph.extents[0] if graph.extents else 1)
        for k, t in enumerate(outputs):
            if t.dtype != torch.bool:
                assert bool((t[:room] == 77).all())
                assert bool((t[room + graph.output_numel(k) :] == 77).all())
        ran += 1
    assert refused > 20
    assert ran

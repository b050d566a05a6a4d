"""Comparing region graphs with the aten calls they came from, both in float64."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, fx
from torch._functorch import config as aot_config

from autotune.compiler.capture.recording import capture
from autotune.compiler.regions.find import Region, find_regions
from autotune.ir.graph import Graph
from autotune.ir.inputs import make_inputs
from autotune.ir.oracle import interpret

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def rewritten_on_cpus(module: Any) -> Any:
    """An automatic fixture in which a module of rewrites for GPUs (``DEVICES``) rewrites graphs of CPUs."""

    @pytest.fixture(autouse=True)
    def also_on_cpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(module, "DEVICES", {"cpu"})
        torch.manual_seed(0)
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    return also_on_cpus


class InDouble(fx.Interpreter):
    """Runs a graph of aten calls with every float type replaced by float64."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        def widen(value: Any) -> Any:
            return torch.float64 if isinstance(value, torch.dtype) and value in FLOATS else value

        return super().call_function(target, tuple(widen(a) for a in args), {k: widen(v) for k, v in kwargs.items()})


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """While open, Inductor compiles every graph again: a cached graph runs no pass."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False), aot_config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


def regions_of(fn: Callable[..., Any], *args: Any, grad: bool | None = None) -> list[Region]:
    return [r for g in capture(fn, args, grad=grad) for r in find_regions(g.module)]


def only_region(fn: Callable[..., Any], *args: Any, grad: bool | None = False) -> Region:
    """The region of a function that is one region as a whole, and translated."""
    regions = regions_of(fn, *args, grad=grad)
    assert len(regions) == 1, [r.nodes for r in regions]
    assert regions[0].workload is not None, regions[0].reason
    return regions[0]


def graph_of(region: Region) -> Graph:
    assert region.workload is not None, region.reason
    return Graph.from_json(region.workload.spec)


def strided_numel(t: Tensor) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def region_inputs(region: Region, seed: int = 0, special: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """(flat inputs by slot of the canonical graph, inputs of the submodule that share their memory)."""
    graph = graph_of(region)
    flat: list[Tensor] = []
    shaped: list[Tensor | None] = [None] * len(region.inputs)
    for k, made in enumerate(make_inputs(graph, seed, "cpu", special)):
        like = region.inputs[region.binding.inputs[k]].meta["val"]
        memory = torch.zeros(max(strided_numel(like), made.numel()), dtype=made.dtype)
        memory[: made.numel()] = made
        flat.append(memory)
        shaped[region.binding.inputs[k]] = memory.as_strided(like.shape, like.stride())
    for k, node in enumerate(region.inputs):
        if shaped[k] is None:
            like = node.meta["val"]
            shaped[k] = torch.zeros(strided_numel(like), dtype=like.dtype).as_strided(like.shape, like.stride())
    return flat, shaped  # type: ignore[return-value]


def check(region: Region, seed: int = 0, special: bool = False) -> Graph:
    """The canonical graph gives what the submodule gives, at the addresses the submodule's strides say."""
    graph = graph_of(region)
    flat, shaped = region_inputs(region, seed, special)
    doubled = [t.double() if t.is_floating_point() else t for t in shaped]
    wanted = InDouble(region.submodule).run(*doubled)
    for k, got in enumerate(interpret(graph, flat)):
        position = region.binding.outputs[k]
        like, want = region.outputs[position].meta["val"], wanted[position]
        out = graph.outputs[k]
        memory = torch.zeros(max(strided_numel(like), graph.output_numel(k)), dtype=got.dtype)
        memory.as_strided(got.shape, out.strides, out.offset).copy_(got)
        there = memory.as_strided(like.shape, like.stride())
        assert out.dtype == str(like.dtype).removeprefix("torch.")
        if want.is_floating_point():  # the oracle has float32's range
            want = torch.where(want.abs() > torch.finfo(torch.float32).max, want * math.inf, want)
        torch.testing.assert_close(there.to(want.dtype), want, rtol=1e-7, atol=1e-9, equal_nan=True)
    return graph

"""Random programs through the product: their regions, and whether oracle, kernels and PyTorch agree on them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from autotune.compiler.capture.recording import capture
from autotune.compiler.lower.nodes import op_name
from autotune.compiler.lower.op_names import GENERATORS, VIEWS
from autotune.compiler.regions.find import Region, find_regions
from autotune.ir.graph import Graph
from autotune.ir.inputs import make_inputs
from autotune.ir.oracle import interpret
from tests.support.random_programs.programs import Program

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def aten_graphs(p: Program) -> list[fx.GraphModule]:
    """The graphs of aten calls that regions are looked for in: of a training program forward and backward."""
    return [g.module for g in capture(p.fn, p.arguments(), grad=p.train)]


@functools.lru_cache(maxsize=512)
def parts_of(p: Program) -> tuple[tuple[fx.GraphModule, tuple[Region, ...]], ...]:
    """Each graph of a program with its regions."""
    return tuple((gm, tuple(find_regions(gm))) for gm in aten_graphs(p))


def regions_of(p: Program) -> list[Region]:
    return [r for _, regions in parts_of(p) for r in regions]


def left_out(gm: fx.GraphModule, regions: Sequence[Region]) -> list[str]:
    """Names of the operators that are in no region, views and generators aside."""
    inside = {n for r in regions for n in r.nodes}
    free = VIEWS | GENERATORS | {"getitem"}
    return [
        op_name(n) or str(n.target)
        for n in gm.graph.nodes
        if n.op == "call_function" and n not in inside and op_name(n) not in free
    ]


class InDouble(fx.Interpreter):
    """Runs a graph of aten calls with every float type replaced by float64."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        def widen(value: Any) -> Any:
            return torch.float64 if isinstance(value, torch.dtype) and value in FLOATS else value

        return super().call_function(target, tuple(widen(a) for a in args), {k: widen(v) for k, v in kwargs.items()})


@contextmanager
def _double() -> Iterator[None]:
    """Integers divided are float64 too."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def eager_in_double(gm: fx.GraphModule, inputs: Sequence[Tensor]) -> list[Tensor]:
    """PyTorch's results in float64, with float32's range."""
    with _double(), torch.no_grad():
        out = InDouble(gm).run(*[t.double() if t.is_floating_point() else t for t in inputs])
    return [
        torch.where(t.abs() > torch.finfo(torch.float32).max, t * math.inf, t) if t.is_floating_point() else t
        for t in out
    ]


FUSED = frozenset(
    [
        "native_layer_norm",
        "native_layer_norm_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_functional",
        "native_batch_norm_backward",
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
        "_softmax_backward_data",
        "_log_softmax_backward_data",
        "hardswish_backward",  # of NaN: on a GPU torch has what we have
    ]
)
"""Operators that torch computes by other formulas (x * scale + shift), and which differ at infinities and NaN only."""


def has_fused(region: Region) -> bool:
    return any(op_name(n) in FUSED for n in region.nodes)


def span(t: Tensor) -> int:
    """Elements of memory from a tensor's first to its last."""
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def _inputs(region: Region, graph: Graph, seed: int, special: bool) -> tuple[list[Tensor], list[Tensor]]:
    """(flat inputs by slot of the canonical graph, inputs of the submodule that share their memory)."""
    flat: list[Tensor] = []
    shaped: dict[int, Tensor] = {}
    for k, made in enumerate(make_inputs(graph, seed, "cpu", special)):
        like = region.inputs[region.binding.inputs[k]].meta["val"]
        memory = torch.zeros(max(span(like), made.numel()), dtype=made.dtype)
        memory[: made.numel()] = made
        flat.append(memory)
        shaped[region.binding.inputs[k]] = memory.as_strided(like.shape, like.stride())
    for k, node in enumerate(region.inputs):
        if k not in shaped:
            like = node.meta["val"]
            shaped[k] = torch.zeros(span(like), dtype=like.dtype).as_strided(like.shape, like.stride())
    return flat, [shaped[k] for k in range(len(region.inputs))]


def oracle_against_eager(region: Region, seed: int, special: bool) -> str:
    """The difference between the canonical graph and the region's aten calls, both in float64; "" for none."""
    assert region.workload is not None
    graph = Graph.from_json(region.workload.spec)
    flat, shaped = _inputs(region, graph, seed, special)
    results = interpret(graph, flat)
    try:
        wanted = eager_in_double(region.submodule, shaped)
    except (IndexError, RuntimeError) as error:
        if "out of bounds" not in str(error):
            raise
        # Positions that the graph compares with other positions alone have no bound there: eager refuses some.
        return ""
    for k, got in enumerate(results):
        position = region.binding.outputs[k]
        like, want = region.outputs[position].meta["val"], wanted[position]
        out = graph.outputs[k]
        if out.dtype != str(like.dtype).removeprefix("torch."):
            return f"output {k} is {out.dtype}, torch has {like.dtype}"
        memory = torch.zeros(max(span(like), graph.output_numel(k)), dtype=got.dtype)
        memory.as_strided(got.shape, out.strides, out.offset).copy_(got)
        there = memory.as_strided(like.shape, like.stride()).to(want.dtype)
        finite = want[torch.isfinite(want)].abs() if want.is_floating_point() else want
        size = float(finite.max()) if finite.numel() else 0.0
        exact = not want.is_floating_point()
        try:
            torch.testing.assert_close(
                there, want, rtol=0 if exact else 1e-7, atol=0 if exact else 1e-9 * max(1.0, size), equal_nan=True
            )
        except AssertionError as error:
            return f"output {k}: {' '.join(str(error).split())}"
    return ""

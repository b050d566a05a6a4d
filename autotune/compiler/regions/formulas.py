"""The formulas of products' epilogues, and the regions that compute one of them.

Programs write GELU in many ways. So a region is recognized by its values: its graph and the epilogue's formula are
evaluated in float64 at random numbers, and must agree. The exact GELU and its tanh form differ by 5e-4, so neither
replaces the other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from autotune.compiler.regions.find import Region
from autotune.ir.graph import Graph, Value
from autotune.ir.nodes import POINTWISE
from autotune.ir.oracle import interpret
from autotune.workload import canonical_json

_CLOSE = 1e-6
"""Largest difference of a region from a formula, relative and absolute."""
_ROWS = 4
_ELEMENTS = 1 << 12
"""Rows of a region's graph that are evaluated, or elements if it has no rows."""


def _gelu(x: torch.Tensor) -> torch.Tensor:
    """The tanh form of GELU (Hendrycks and Gimpel, 2016, section 2), in the type of ``x``."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def reference(
    epilogue: str, x: torch.Tensor, bias: torch.Tensor | None, other: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The results ``y`` and ``kept`` of an epilogue.

    Args:
        epilogue: one of :data:`autotune.runtime.launch.cublaslt.EPILOGUES`.
        x: the product, of shape [..., n].
        bias: of shape [n], or None.
        other: a tensor with the shape of ``x``.
    """
    if epilogue == "dgelu":
        assert other is not None
        return torch.ops.aten.gelu_backward(x, other, approximate="tanh"), None
    before = x if bias is None else x + bias
    if epilogue in ("", "bias"):
        return before, None
    if epilogue in ("add", "bias_add"):
        assert other is not None
        return before + other, None
    return (torch.relu(before) if epilogue == "relu" else _gelu(before)), before if epilogue == "gelu_aux" else None


@dataclass(frozen=True)
class Fit:
    """An epilogue that computes a region's graph.

    Attributes:
        bias, other: the slots of the epilogue's inputs, or -1.
        y, kept: the graph's outputs that the epilogue computes, or -1.
        partial: True if the graph has further outputs.
    """

    epilogue: str
    bias: int
    other: int
    y: int
    kept: int
    partial: bool


def fit_of(region: Region, place: int, columns: int, kept: bool) -> Fit | None:
    """The epilogue that computes a region, or its first part; None if there is none.

    Args:
        place: the index of the product among the region's inputs.
        columns: the number of the product's columns.
        kept: True if the product has other readers.
    """
    assert region.workload is not None
    slots = region.binding.inputs
    if place not in slots or len(slots) > 2:
        return None
    return _fitting(canonical_json(region.workload.spec), slots.index(place), columns, kept)


@lru_cache(maxsize=1024)
def _fitting(spec: str, slot: int, columns: int, kept: bool) -> Fit | None:
    """The epilogue whose formula gives a graph's values; None if there is none.

    Args:
        slot: the slot of the product.
        columns: the number of the product's columns.
        kept: True if the product has other readers.
    """
    graph = Graph.from_json(json.loads(spec))
    values = [graph.values[i] for i in graph.live]
    loads = {v.slot: v for v in values if v.op == "load"}
    plain = all(v.op in ("const", "sum") or v.op in POINTWISE or (v.op == "load" and _is_plain(v)) for v in values)
    if not plain or slot not in loads or sum(v.op == "load" for v in values) != len(loads):
        return None
    product = loads[slot]
    order = sorted(product.axes, key=lambda a: -product.strides[product.axes.index(a)])
    dense = [math.prod(graph.extents[b] for b in order[k + 1 :]) for k in range(len(order))]
    if [product.strides[product.axes.index(a)] for a in order] != dense:
        return None
    # The axes that run along a row of the product; a graph that needs no rows has one axis for all.
    along = [a for k, a in enumerate(order) if dense[k] * graph.extents[a] <= columns]
    if along and math.prod(graph.extents[a] for a in along) != columns:
        return None
    down = [a for a in order if a not in along]
    most = _ROWS if along else _ELEMENTS
    extents = [min(n, most) if a in down else n for a, n in enumerate(graph.extents)]
    small = replace(graph, extents=tuple(extents))
    given = [_random(small, k) for k in range(len(graph.inputs))]
    found = interpret(small, given)
    shown = {k: _shown(small, given[k], v, product.axes) for k, v in loads.items()}
    second = next((k for k in loads if k != slot), -1)
    narrow = second >= 0 and set(loads[second].axes) == set(along) and loads[second].strides == _dense(graph, along)
    wide = second >= 0 and (loads[second].axes, loads[second].strides) == (product.axes, product.strides)
    if second >= 0 and not narrow and not wide:
        return None
    bias, other = (shown[second] if narrow else None), (shown[second] if wide else None)
    for epilogue in ("dgelu",) if wide else ("gelu_aux", "relu"):
        y, before = reference(epilogue, shown[slot], bias, other)
        places, partial = _places(small, found, {"y": y, "kept": before}, product)
        if places["y"] < 0 or (partial and epilogue != "dgelu"):
            continue
        if epilogue == "gelu_aux" and places["kept"] < 0 and not kept:
            epilogue = "gelu"
        if not kept or epilogue == "gelu_aux":
            return Fit(epilogue, second if narrow else -1, second if wide else -1, **places, partial=partial)
    return None


def _is_plain(v: Value) -> bool:
    return not v.guards and not v.offset


def _dense(graph: Graph, axes: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor over ``axes``, in the order of the axes' numbers."""
    found = {a: math.prod(graph.extents[b] for b in axes[k + 1 :]) for k, a in enumerate(axes)}
    return tuple(found[a] for a in sorted(found))


def _random(graph: Graph, slot: int) -> torch.Tensor:
    made = torch.randn(graph.input_numel(slot), generator=torch.Generator().manual_seed(slot)) * 2
    return made.to(getattr(torch, graph.inputs[slot]))


def _shown(graph: Graph, flat: torch.Tensor, load: Value, axes: Sequence[int]) -> torch.Tensor:
    """The elements that a load reads, in float64, with an extent for each of ``axes``."""
    found = torch.as_strided(flat.double(), [graph.extents[a] for a in load.axes], load.strides)
    return found.reshape([graph.extents[a] if a in load.axes else 1 for a in axes])


def _places(
    graph: Graph, found: Sequence[torch.Tensor], wanted: dict[str, torch.Tensor | None], product: Value
) -> tuple[dict[str, int], bool]:
    """The graph's output for each result, or -1; and True if the graph has an output that is no result."""
    places, partial = dict.fromkeys(wanted, -1), False
    for k, output in enumerate(graph.outputs):
        whole = (output.axes, output.strides) == (product.axes, product.strides)
        same_type = output.dtype == graph.inputs[product.slot]
        fits = [
            name
            for name, value in wanted.items()
            if value is not None
            and places[name] < 0
            and same_type
            and not output.offset
            and whole
            and found[k].shape == value.shape
            and torch.allclose(found[k].double(), value, rtol=_CLOSE, atol=_CLOSE)
        ]
        if fits:
            places[fits[0]] = k
        partial |= not fits
    return places, partial

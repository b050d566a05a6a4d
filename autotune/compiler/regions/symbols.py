"""Graphs with symbolic sizes: their regions at the traced sizes, and later at any other sizes.

Kernels take their number of rows at run time, so regions are found, searched and looked up with concrete sizes. A graph
that torch.compile traced with symbols is copied with the sizes of its first inputs (:func:`concrete`). Regions are
found in the copy. Each keeps its operators with the symbols (:func:`symbolic_program`), from which
:func:`autotune.compiler.regions.aten.at_sizes` makes the region for other sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._prims_common import compute_required_storage_length
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from autotune.compiler.regions import aten
from autotune.compiler.regions.aten import Size, expression_of

if TYPE_CHECKING:
    from autotune.compiler.regions.find import Region


def is_symbolic(graph: fx.Graph) -> bool:
    """True if a size in a graph is symbolic."""
    return any(_has_symbols(n.meta.get("val")) for n in graph.nodes)


def _has_symbols(value: Any) -> bool:
    if isinstance(value, torch.SymInt):
        return True
    if isinstance(value, torch.Tensor):
        return any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride()))
    return isinstance(value, (tuple, list)) and any(map(_has_symbols, value))


def concrete(gm: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A copy of a graph with the traced sizes instead of symbols, and a map of its nodes to the original nodes.

    A size without a traced value (in the result of ``nonzero``) stays symbolic, so its tensor is in no region.
    """
    graph, env, origin = fx.Graph(), dict[fx.Node, Any](), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        number = _hint(value) if isinstance(value, torch.SymInt) else None
        if node.op not in ("placeholder", "output") and number is not None:
            env[node] = number
            continue
        made = graph.node_copy(node, lambda a: env[a])
        made.meta = {**node.meta, "val": _at_hints(value)}
        # A size that is an input of the graph remains an input without readers.
        env[node], origin[made] = (made if number is None else number), node
    return fx.GraphModule(gm, graph), origin


def _hint(size: Any) -> int | None:
    if type(size) is int:
        return size
    found = getattr(size.node, "hint", None)
    return int(found) if isinstance(found, int) else None


def _at_hints(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_at_hints, value))
    if not isinstance(value, FakeTensor) or not _has_symbols(value):
        return value
    shape, strides = [_hint(n) for n in value.shape], [_hint(n) for n in value.stride()]
    offset = _hint(value.storage_offset())
    if None in shape or None in strides or offset is None:
        return value
    return fake(value.fake_mode, shape, strides, value.dtype, value.device, offset)  # type: ignore[arg-type]


def fake(
    mode: FakeTensorMode,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    offset: int = 0,
) -> torch.Tensor:
    """A fake tensor with a given layout (strides and offset in elements)."""
    span = compute_required_storage_length(tuple(shape), tuple(strides), offset)
    with mode:
        return torch.empty(span, dtype=dtype, device=device).as_strided(shape, strides, offset)


def symbolic_program(region: Region, origin: Mapping[fx.Node, fx.Node]) -> fx.GraphModule:
    """A region's submodule with the symbols of the original graph in its arguments.

    Args:
        region: a region of a :func:`concrete` copy.
        origin: the map from that copy's nodes to the original nodes.
    """
    graph, made, source = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
    for copied, n in zip(region.submodule.graph.find_nodes(op="placeholder"), region.inputs, strict=True):
        source[copied] = origin[n]
        made[copied] = graph.placeholder(origin[n].name)
        made[copied].meta = {"val": origin[n].meta["val"]}
    for copied in (n for n in region.submodule.graph.nodes if n.op == "call_function"):
        node = source[copied] = origin[copied.meta["origin"]]
        read = {source[n]: made[n] for n in copied.all_input_nodes}  # a generated tensor may have several copies

        def argument(n: fx.Node, read: Mapping[fx.Node, fx.Node] = read) -> Any:
            value = n.meta.get("val")
            return Size(expression_of(value)) if isinstance(value, torch.SymInt) else read[n]

        args, kwargs = fx.map_arg((node.args, node.kwargs), argument)
        made[copied] = graph.create_node("call_function", node.target, args, kwargs)
        made[copied].meta = {"val": node.meta["val"], "original_aten": node.meta.get("original_aten")}
    results: Any = region.submodule.graph.output_node().args[0]
    graph.output(tuple(made[n] for n in results))
    return fx.GraphModule(torch.nn.Module(), graph)


def places_of(symbols: Sequence[str], tensors: Sequence[torch.Tensor]) -> dict[str, tuple[int, int]] | None:
    """For each symbol, a (tensor, dimension) with that extent; None if a symbol is the extent of no dimension."""
    found: dict[str, tuple[int, int]] = {}
    for k, tensor in enumerate(tensors):
        for dim, extent in enumerate(tensor.shape):
            expression = expression_of(extent)
            if isinstance(expression, str):
                found.setdefault(expression, (k, dim))
    return {name: found[name] for name in symbols} if found.keys() >= set(symbols) else None


class _Bounded(FakeTensorProp):
    """Propagates fake tensors through a stored program, up to a number of tensors."""

    _left = aten.MOST_TENSORS

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._left -= parts_of(target, args, kwargs)
        if self._left < 0:
            raise ValueError(f"a program of aten calls makes more than {aten.MOST_TENSORS} tensors")
        return super().call_function(target, args, kwargs)


def parts_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The number of tensors that a call makes: one, unless it splits a tensor."""
    if not isinstance(target, torch._ops.OpOverload) or not str(target._schema.returns[0].type).startswith("List"):
        return 1
    given = {**dict(zip((a.name for a in target._schema.arguments), args, strict=False)), **kwargs}
    size = next((given[name] for name in ("split_size", "split_sizes", "split_size_or_sections") if name in given), 1)
    if isinstance(size, (list, tuple)):
        return len(size)
    return -(-int(given["self"].shape[given.get("dim", 0)]) // max(int(size), 1))


def traced(program: Mapping[str, Any], device: str) -> fx.GraphModule:
    """The graph of a JSON program with concrete sizes, with fake tensors in ``meta["val"]``; nothing is computed."""
    gm, mode, where = aten.from_json(program, device), FakeTensorMode(), torch.device(device)
    layouts = ((spec["shape"], spec["strides"], getattr(torch, spec["dtype"])) for spec in program["inputs"])
    _Bounded(gm, mode).propagate_dont_convert_inputs(*(fake(mode, *layout, where) for layout in layouts))
    return gm

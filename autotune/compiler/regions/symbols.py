"""Graphs with symbolic sizes: their regions at the sizes that they were traced with, and at any other sizes later.

Kernels take their rows at run time, so a region is found, searched and looked up by numbers. A graph that torch.compile
traced with symbols is copied with the numbers of its first inputs (:func:`concrete`), regions are found in the copy,
and each keeps its operators with the symbols in them (:func:`symbolic_program`), from which it is made anew for other
numbers (:func:`at_sizes`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autotune.errors import Unsupported

if TYPE_CHECKING:
    from autotune.compiler.regions.find import Region

Sizes = Mapping[str, int]
"""Symbol to number."""


@dataclass(frozen=True)
class Size:
    """A symbolic size as an argument of a program; ``expression`` as of :func:`expression_of`."""

    expression: Any


def is_symbolic(graph: fx.Graph) -> bool:
    """Whether sizes of a graph's tensors are symbols."""
    return any(_has_symbols(n.meta.get("val")) for n in graph.nodes)


def _has_symbols(value: Any) -> bool:
    if isinstance(value, torch.SymInt):
        return True
    if isinstance(value, torch.Tensor):
        return any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride()))
    return isinstance(value, (tuple, list)) and any(map(_has_symbols, value))


def concrete(gm: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A copy of a graph with the numbers that it was traced with in the symbols' places, and its nodes' originals.

    What has no such number (the result of ``nonzero``) keeps its symbols, and so takes part in no region.
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
        # A number that is an input of the graph stays one, which nothing reads.
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
    """A fake tensor of a layout (strides and offset in elements)."""
    span = offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else offset
    with mode:
        return torch.empty(span, dtype=dtype, device=device).as_strided(shape, strides, offset)


def symbolic_program(region: Region, origin: Mapping[fx.Node, fx.Node]) -> fx.GraphModule:
    """A region's submodule with the symbols of the graph that it comes from in its arguments.

    Args:
        region: found in a :func:`concrete` copy.
        origin: that copy's nodes to the graph's.
    """
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in (origin[n] for n in region.inputs):
        made[node] = graph.placeholder(node.name)
        made[node].meta = {"val": node.meta["val"]}

    def argument(node: fx.Node) -> Any:
        value = node.meta.get("val")
        return Size(expression_of(value)) if isinstance(value, torch.SymInt) else made[node]

    for copied in region.submodule.graph.nodes:
        if copied.op == "call_function":
            node = origin[copied.meta["origin"]]
            args, kwargs = fx.map_arg((node.args, node.kwargs), argument)
            made[node] = graph.create_node("call_function", node.target, args, kwargs)
            made[node].meta = {"val": node.meta["val"], "original_aten": node.meta.get("original_aten")}
    graph.output(tuple(made[origin[n]] for n in region.outputs))
    return fx.GraphModule(torch.nn.Module(), graph)


def places_of(symbols: Sequence[str], tensors: Sequence[torch.Tensor]) -> dict[str, tuple[int, int]] | None:
    """For each symbol which tensor has it as the extent of which dimension; None where one is nowhere to be read."""
    found: dict[str, tuple[int, int]] = {}
    for k, tensor in enumerate(tensors):
        for dim, extent in enumerate(tensor.shape):
            expression = expression_of(extent)
            if isinstance(expression, str):
                found.setdefault(expression, (k, dim))
    return {name: found[name] for name in symbols} if found.keys() >= set(symbols) else None


def symbols_of(program: Any) -> list[str]:
    """The symbols in a program as JSON (:func:`autotune.compiler.regions.aten.to_json`), sorted."""
    names: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, Mapping):
            if value.keys() == {"sym"}:
                names.update(_names(value["sym"]))
            else:
                for inner in value.values():
                    walk(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                walk(inner)

    walk(program)
    return sorted(names)


def _names(expression: Any) -> set[str]:
    if isinstance(expression, str):
        return {expression}
    return set().union(*map(_names, expression[1:])) if isinstance(expression, list) else set()


_FUNCTIONS: Mapping[str, Callable[..., int]] = {
    "Add": lambda *xs: sum(xs),
    "Mul": lambda *xs: math.prod(xs),
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": max,
    "Min": min,
}


def expression_of(size: Any) -> Any:
    """A size as JSON: a number, a symbol's name, or [function, *arguments].

    Raises:
        Unsupported: an expression of functions that are not known here.
    """
    expression = size.node.expr if isinstance(size, torch.SymInt) else size
    if isinstance(expression, (int, sympy.Integer)):
        return int(expression)
    if isinstance(expression, sympy.Symbol):
        return str(expression)
    name = type(expression).__name__
    if name == "Pow" and expression.args[1].is_Integer and expression.args[1] > 0:
        return ["Mul", *[expression_of(expression.args[0])] * int(expression.args[1])]
    if name not in _FUNCTIONS:
        raise Unsupported(f"a size that is {expression}")
    return [name, *map(expression_of, expression.args)]


def evaluate(expression: Any, sizes: Sizes) -> int:
    """The number that :func:`expression_of` tells, at given sizes.

    Raises:
        KeyError: a symbol without a number. ValueError: not such an expression.
    """
    if type(expression) is int:
        return expression
    if isinstance(expression, str):
        return sizes[expression]
    if not isinstance(expression, list) or not expression or expression[0] not in _FUNCTIONS:
        raise ValueError(f"not a size: {expression!r}")
    return _FUNCTIONS[expression[0]](*[evaluate(x, sizes) for x in expression[1:]])


def at_sizes(program: Any, sizes: Sizes) -> Any:
    """A program as JSON with numbers for its symbols."""
    if isinstance(program, Mapping):
        if program.keys() == {"sym"}:
            return evaluate(program["sym"], sizes)
        return {k: at_sizes(v, sizes) for k, v in program.items()}
    return [at_sizes(v, sizes) for v in program] if isinstance(program, (list, tuple)) else program


def traced(program: Mapping[str, Any], device: str) -> fx.GraphModule:
    """A program as JSON, of numbers, as a graph with fake tensors in ``meta["val"]``; nothing is computed."""
    from autotune.compiler.regions import aten

    gm, mode = aten.from_json(program, device), FakeTensorMode()
    specs = iter(program["inputs"])
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            spec = next(specs)
            dtype = getattr(torch, spec["dtype"])
            node.meta["val"] = fake(mode, spec["shape"], spec["strides"], dtype, torch.device(device))
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with mode:
                node.meta["val"] = node.target(*args, **kwargs)
    return gm


__all__ = [
    "Size", "at_sizes", "concrete", "evaluate", "expression_of", "fake", "is_symbolic", "places_of", "symbolic_program",
    "symbols_of", "traced",
]  # fmt: skip

"""Rewrites of maxima and minima: those of scaled softmaxes, and those whose gradients compare them with their elements.

From torch 2.13 on, Inductor's joint passes write a scaled softmax in two forms, one for rows of finite elements.
:func:`scale_before_maxima` keeps the other form, which eager mode has.

The gradient of ``amax(x)`` finds the largest elements by ``x == amax(x)``. AOTAutograd saves the maximum, which is
small, and computes ``x`` again in the backward pass. Kernels of autotune and of Inductor may round it in two ways. Then
no element is found, and the gradient is NaN. Such an ``x`` is saved too. The gradient of a norm of order infinity
compares ``abs(x)``, which it computes from ``x`` itself, and the gradient of ``scatter_reduce`` compares ``x`` with
gathered maxima.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from autotune.compiler.lower.nodes import op_name
from autotune.compiler.lower.op_names import CASTS, GENERATORS, PRODUCTS, VIEWS

aten, prims = torch.ops.aten, torch.ops.prims
_EXTREMES = (
    aten.amax.default, aten.amin.default, aten.max.default, aten.min.default, aten.median.default,
    aten.nanmedian.default,
)  # fmt: skip
_SCATTERS = (aten.scatter_reduce.two, aten.index_reduce.default)
_SIGNS = CASTS | {"abs", "neg"}
"""Operators of one element that the compared elements may have and the stored ones not."""
_GATHERS = CASTS | {"gather", "index", "index_select"}
"""Operators between an extreme and its comparison."""
_EXACT = VIEWS | {
    "abs", "neg", "sign", "relu", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "where", "amax", "amin",
    "getitem", "clone", "cat", "gather", "index", "index_select", "embedding",
    "constant_pad_nd", "convert_element_type", "_to_copy",
}  # fmt: skip
"""Operators whose results every kernel rounds alike."""
_SAVED = {*PRODUCTS, "convolution"}
"""Operators that no backward pass computes again."""


def scale_before_maxima(graph: fx.Graph) -> None:
    """Compute ``s * x - amax(s * x)`` in one form for all rows, in place.

    Inductor's form is ``where(all(isfinite(s * x)), s * (x - amax(x)), s * x - amax(s * x))``: two maxima and a test of
    each element. Its own softmax in one pass does not recognise that. The forms differ by rounding alone, since the
    first one serves finite rows only.

    Args:
        graph: a graph after Inductor's joint passes. ``s`` is a number or a tensor without the reduced axes.
    """
    for node in list(graph.find_nodes(op="call_function", target=aten.where.self)):
        finite, scaled, plain = node.args
        axes = _axes_below_maximum(plain)
        if axes and _tests_finite(finite, plain.args[0], axes) and _scales(scaled, plain.args[0], axes):
            node.replace_all_uses_with(plain)
            graph.erase_node(node)


def _calls(value: Any, *targets: Any) -> bool:
    return isinstance(value, fx.Node) and value.target in targets


def _unconverted(value: Any) -> Any:
    return value.args[0] if _calls(value, prims.convert_element_type.default) else value


def _axes_below_maximum(value: Any) -> list[int]:
    """The reduced axes if ``value`` is ``x - amax(x)``; none for other values."""
    if _calls(value, aten.sub.Tensor) and not value.kwargs:
        x, most = value.args
        if _calls(most, aten.amax.default) and most.args[0] is x and most.args[2:] == (True,):
            return list(most.args[1])
    return []


def _tests_finite(value: Any, x: Any, axes: list[int]) -> bool:
    """True for ``all(isfinite(x))`` over these axes, in the form that torch decomposes it to."""
    for targets in ([aten.logical_not.default], [aten.any.dim, aten.any.dims], [aten.logical_not.default]):
        if not _calls(value, *targets) or value.args[1:] not in ((), (axes, True), (*axes, True)):
            return False
        value = value.args[0]
    if not _calls(value, aten.mul.Tensor):
        return False
    equal, bounded = value.args
    if not _calls(equal, aten.eq.Tensor) or not _calls(bounded, aten.ne.Scalar):
        return False
    size, most = bounded.args
    return equal.args == (x, x) and most == math.inf and _calls(size, aten.abs.default) and size.args == (x,)


def _scales(value: Any, product: Any, axes: list[int]) -> bool:
    """True for ``abs(s) * (y - amax(y))`` with ``y = sign(s) * x``, where ``product`` is ``s * x``; for ``/`` alike."""
    product = _unconverted(product)
    if not _calls(product, aten.mul.Tensor, aten.div.Tensor) or not _calls(value, product.target):
        return False
    below, factor = value.args
    if _axes_below_maximum(below) != axes or not _calls(below.args[0], aten.mul.Tensor):
        return False
    x, sign = below.args[0].args
    orders = (product.args, product.args[::-1]) if product.target is aten.mul.Tensor else (product.args,)
    return any(scaled in (x, _unconverted(x)) and _is_magnitude(factor, sign, scale) for scaled, scale in orders)


def _is_magnitude(factor: Any, sign: Any, scale: Any) -> bool:
    """True if ``sign`` is the sign of ``scale`` and ``factor`` is ``sign * scale``: numbers, symbols or tensors."""
    if not isinstance(scale, fx.Node):
        return bool(sign == (1 if scale >= 0 else -1) and factor == abs(scale))
    if _calls(sign, aten.where.self):
        test, *numbers = sign.args
        if not _calls(test, aten.ge.Scalar) or test.args != (scale, 0) or list(map(_number, numbers)) != [1, -1]:
            return False
    elif sign not in (1, -1) or not isinstance(scale.meta.get("val"), (torch.SymInt, torch.SymFloat)):
        return False
    if factor is scale and sign == 1:
        return True
    return _calls(factor, aten.mul.Tensor, operator.mul) and {*factor.args} == {sign, scale}


def _number(value: Any) -> Any:
    """The number of a constant tensor; None for others."""
    if _calls(value, aten.neg.default):
        number = _number(value.args[0])
        return None if number is None else -number
    for constant, place in ((aten.scalar_tensor.default, 0), (aten.full.default, 1)):
        if _calls(value, constant):
            return value.args[place]
    return None


def save_compared(graph: fx.Graph) -> None:
    """Mark the elements that gradients of maxima and minima compare, so that the partition saves them.

    Elements in a part that the user's checkpointing computes again are left: there the maximum is computed again too.

    Args:
        graph: a joint graph of forward and backward.
    """
    compared = [
        (there, _chain(elements, _SIGNS))
        for node in graph.find_nodes(op="call_function", target=aten.eq.Tensor)
        for extreme, elements in (node.args, node.args[::-1])
        if (there := [x for reduced in _reduced(extreme) for x in _chain(reduced, _SIGNS)])
    ]
    equal = _numbered(graph) if compared else {}
    for there, here in compared:
        numbers = {equal[x] for x in there}
        common = [x for x in here if x in there] or [x for x in here if equal[x] in numbers]
        if not common:
            continue
        x = min(common, key=lambda x: x.meta["val"].dtype.itemsize)  # the first one of the narrowest
        if _is_exact(x):
            continue
        for one in equal:  # the partition keeps one of equal nodes
            if equal[one] == equal[x] and "recompute" not in one.meta:
                one.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _numbered(graph: fx.Graph) -> dict[fx.Node, int]:
    """A number for each node; nodes with equal calls have the same number."""
    found: dict[fx.Node, int] = {}
    known: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{found[n]}")
            found[node] = known.setdefault(f"{node.target} {args} {kwargs}", len(found))
        else:
            found[node] = len(found)
    return found


def _reduced(extreme: Any) -> list[Any]:
    """The values whose maxima or minima ``extreme`` has; none for other operators."""
    for found in _chain(extreme, _GATHERS)[-1:]:
        if found.target in _EXTREMES:
            return [found.args[0]]
        if found.target in _SCATTERS and found.args[4] in ("amax", "amin"):
            return [found.args[0], found.args[3]]
    return []


def _chain(value: Any, names: Collection[str]) -> list[fx.Node]:
    """The node of a value, views aside, and the nodes that it is made of by operators of these names."""
    made: list[fx.Node] = []
    while isinstance(value, fx.Node):
        name = op_name(value) if value.op == "call_function" else ""
        if name not in VIEWS and not _is_part(value):
            made.append(value)
            if name not in names:
                break
        value = value.args[0]
    return made


def _is_part(node: fx.Node) -> bool:
    """True for a part of a tensor that is split."""
    return node.target is operator.getitem and op_name(node.args[0]) in VIEWS  # type: ignore[arg-type]


def _is_exact(x: fx.Node) -> bool:
    """Return True if every kernel makes the same ``x`` of inputs and of results that are saved."""
    waiting, seen = [x], set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node in seen or node.op != "call_function" or op_name(node) in _SAVED | GENERATORS:
            continue
        if op_name(node) not in _EXACT:
            return False
        seen.add(node)
        waiting += node.all_input_nodes
    return True

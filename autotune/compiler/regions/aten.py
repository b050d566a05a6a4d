"""Serialisation of aten programs as JSON, without pickle, from which another process rebuilds baselines.

A program may come from a database that others write to. So it may call only ``operator.getitem`` and the operators that
have rules, in functional overloads from tensors and numbers to tensors. :mod:`autotune.domains.fusion.inspection`
checks that a program is the right one.

Symbolic sizes, and sizes computed from them, are expressions in a program. They are replaced by numbers before the
program is rebuilt.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autotune.errors import Unsupported

NAMESPACES = ("aten", "prims")
FORMAT = 1
MOST_TENSORS = 4096
"""Most inputs, calls and parts of tensors of a stored program; a region's kernel has hundreds at most."""
_MOST_ITEMS = 1 << 15
Sizes = Mapping[str, int]
"""The number for each symbol."""
_ENUMS: Mapping[str, type] = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def to_json(gm: fx.GraphModule) -> dict[str, Any]:
    """A JSON object for a graph of aten calls over placeholders.

    Each placeholder is listed with the shape, strides (elements), type and device type of ``meta["val"]``.

    Symbolic sizes become ``{"sym": expression}``, which must be replaced by numbers before the program is rebuilt.
    Raises Unsupported for a call from another namespace, an attribute, or an argument that is not plain data.
    """
    number: dict[fx.Node, int] = {}
    inputs: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    result: Any = None
    for node in gm.graph.nodes:
        if node.op == "output":
            result = _encode(node.args[0], number)
            continue
        if node.op == "placeholder":
            inputs.append(tensor_spec(node.meta["val"]))
        elif node.op == "call_function":
            call: dict[str, Any] = {"op": _target_name(node.target), "args": _encode(list(node.args), number)}
            whole = node.meta.get("original_aten")
            if whole is not None and whole is not node.target:
                call["of"] = str(whole)  # for names only
            if node.kwargs:
                call["kwargs"] = {k: _encode(v, number) for k, v in node.kwargs.items()}
            calls.append(call)
        else:
            raise Unsupported(f"{node.op} {node.target} in a program of aten calls")
        number[node] = len(number)
    return {"format": FORMAT, "inputs": inputs, "calls": calls, "result": result}


def tensor_spec(value: torch.Tensor) -> dict[str, Any]:
    """Shape, strides, type and device type of a tensor as JSON."""
    return {
        "shape": [_size(n) for n in value.shape],
        "strides": [_size(n) for n in value.stride()],
        "dtype": str(value.dtype).removeprefix("torch."),
        "device": value.device.type,
    }


def _size(size: Any) -> Any:
    """A number, or the :func:`expression_of` a symbolic size."""
    return {"sym": expression_of(size)} if isinstance(size, torch.SymInt) else int(size)


def _target_name(target: Any) -> str:
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, torch._ops.OpOverload) and target.namespace in NAMESPACES:
        return str(target)
    raise Unsupported(f"a call of {target} in a program of aten calls")


def _encode(value: Any, number: Mapping[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return {"node": number[value]}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Size):
        return {"sym": value.expression}
    if isinstance(value, (list, tuple)):
        return [_encode(v, number) for v in value]
    if isinstance(value, torch.device):
        return {"device": value.type}
    for name, kind in _ENUMS.items():
        if isinstance(value, kind):
            return {name: str(value).removeprefix("torch.")}
    raise Unsupported(f"an argument of type {type(value).__name__} in a program of aten calls")


def from_json(data: Mapping[str, Any], device: str | None = None) -> fx.GraphModule:
    """Rebuild the program, a module with the same inputs and results as the original graph.

    Calls with unused results are removed.

    Args:
        data: the result of :func:`to_json`.
        device: a replacement for every device in the calls ("cpu", "cuda:1"); None to keep them.

    Raises:
        ValueError: ``data`` is not such a program, or has a call that is not permitted.
    """
    try:
        return _from_json(data, device)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(f"not a program of aten calls ({type(error).__name__}: {error})") from error


def _from_json(data: Mapping[str, Any], device: str | None) -> fx.GraphModule:
    if data.get("format") != FORMAT:
        raise ValueError(f"a program of aten calls in format {data.get('format')!r}, expected {FORMAT}")
    _check_length(data)
    graph = fx.Graph()
    nodes: list[fx.Node] = [graph.placeholder(f"x{k}") for k in range(len(data["inputs"]))]
    for call in data["calls"]:
        args = tuple(_decode(list(call["args"]), nodes, device))
        kwargs = {str(k): _decode(v, nodes, device) for k, v in call.get("kwargs", {}).items()}
        nodes.append(graph.call_function(_target(str(call["op"])), args, kwargs))
    result = _decode(data["result"], nodes, device)
    graph.output(tuple(result) if isinstance(result, list) else result)
    graph.eliminate_dead_code()  # all are functional, and inputs stay
    return fx.GraphModule(torch.nn.Module(), graph)


def _check_length(data: Mapping[str, Any]) -> None:
    if len(data["inputs"]) + len(data["calls"]) > MOST_TENSORS:
        raise ValueError(f"a program of aten calls has more than {MOST_TENSORS} inputs and calls")
    items, rest = 0, [data["inputs"], data["calls"], data["result"]]
    while rest:
        value = rest.pop()
        if isinstance(value, (Mapping, list)):
            rest += value.values() if isinstance(value, Mapping) else value
        else:
            items += 1
        if items + len(rest) > _MOST_ITEMS:
            raise ValueError(f"a program of aten calls has more than {_MOST_ITEMS} arguments")


def _target(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    from autotune.compiler.lower.rules import RULES

    parts = name.split(".")
    if len(parts) != 3 or parts[0] not in NAMESPACES or parts[1] not in RULES:
        raise ValueError(f"a program of aten calls may not call {name!r}")
    if parts[0] == "prims":
        from torch._inductor import inductor_prims  # noqa: F401  # which adds operators of Inductor's own

    packet = getattr(getattr(torch.ops, parts[0]), parts[1], None)
    overload = getattr(packet, parts[2], None) if parts[2] in getattr(packet, "overloads", list)() else None
    if not isinstance(overload, torch._ops.OpOverload):
        raise ValueError(f"this torch has no operator {name!r}")
    if not is_functional(overload):
        raise ValueError(f"a program of aten calls may not call {name!r}, which does more than compute tensors")
    return overload


_PLAIN = frozenset(
    ["Tensor", "number", "int", "float", "bool", "Device", "Layout", "MemoryFormat", "ScalarType", "SymInt"]
)
"""Types of arguments that are plain data, as schemas print them, without ``Optional`` and ``List``."""
_WORDS = frozenset(["approximate", "rounding_mode"])
"""Arguments that are strings from a short list, which the operator itself checks."""


def _words(type_: object) -> set[str]:
    """The element types of a schema's type, without containers such as ``List``."""
    return set(re.findall(r"\w+", str(type_))) - {"Optional", "List"}


def is_functional(overload: torch._ops.OpOverload) -> bool:
    """True if an operator takes tensors and numbers, writes none of them in place, and returns tensors.

    It takes no file, generator, storage or dictionary.
    """
    schema = overload._schema
    if schema.is_mutable or any(r.alias_info is not None and r.alias_info.is_write for r in schema.returns):
        return False
    plain = all(a.name in _WORDS or _words(a.type) <= _PLAIN for a in schema.arguments)
    return plain and bool(schema.returns) and all(_words(r.type) == {"Tensor"} for r in schema.returns)


def _decode(value: Any, nodes: Sequence[fx.Node], device: str | None) -> Any:
    if isinstance(value, list):
        return [_decode(v, nodes, device) for v in value]
    if not isinstance(value, Mapping):
        return value
    ((kind, inner),) = value.items()
    if kind == "node":
        if type(inner) is not int or not 0 <= inner < len(nodes):
            raise ValueError(f"a program of aten calls refers to value {inner!r} of {len(nodes)}")
        return nodes[inner]
    if kind == "float":
        return float(inner)
    if kind == "device":
        return torch.device(device or str(inner))
    found = getattr(torch, str(inner), None)
    if kind in _ENUMS and isinstance(found, _ENUMS[kind]):
        return found
    raise ValueError(f"a program of aten calls has an argument {kind}: {inner!r}")


# Sizes ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """A symbolic size as an argument of a program; ``expression`` as of :func:`expression_of`."""

    expression: Any


def symbols_of(program: Any) -> list[str]:
    """The symbols in a program as JSON (:func:`to_json`), sorted."""
    names, rest = set[str](), [program]
    while rest:
        value = rest.pop()
        if isinstance(value, Mapping) and value.keys() == {"sym"}:
            names |= _names(value["sym"])
        elif isinstance(value, (Mapping, list, tuple)):
            rest += value.values() if isinstance(value, Mapping) else value
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

    Raises Unsupported for an expression with an unsupported function.
    """
    expression = size.node.expr if isinstance(size, torch.SymInt) else size
    if isinstance(expression, int) or expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        return str(expression)
    name = type(expression).__name__
    if name == "Pow" and expression.args[1].is_Integer and expression.args[1] > 0:
        return ["Mul", *[expression_of(expression.args[0])] * int(expression.args[1])]
    if name not in _FUNCTIONS:
        raise Unsupported(f"a size that is {expression}")
    return [name, *map(expression_of, expression.args)]


def evaluate(expression: Any, sizes: Sizes) -> int:
    """The value of an expression from :func:`expression_of` at given sizes.

    Raises KeyError for a symbol without a number, ValueError for any other expression.
    """
    if type(expression) is int:
        return expression
    if isinstance(expression, str):
        return sizes[expression]
    if not isinstance(expression, list) or not expression or expression[0] not in _FUNCTIONS:
        raise ValueError(f"not a size: {expression!r}")
    return _FUNCTIONS[expression[0]](*[evaluate(x, sizes) for x in expression[1:]])


def at_sizes(program: Any, sizes: Sizes) -> Any:
    """A JSON program with its symbols replaced by numbers."""
    if isinstance(program, Mapping):
        if program.keys() == {"sym"}:
            return evaluate(program["sym"], sizes)
        return {k: at_sizes(v, sizes) for k, v in program.items()}
    return [at_sizes(v, sizes) for v in program] if isinstance(program, (list, tuple)) else program

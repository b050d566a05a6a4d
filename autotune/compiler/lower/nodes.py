"""Single nodes of an FX graph: the operator, the value, the stream.

This module imports no rules, so a process that compiles nothing loads it fast. The facts of whole graphs are built on
it (:mod:`autotune.compiler.lower.facts`).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx


def op_name(node: fx.Node) -> str:
    """The aten or prims name without its overload ("layer_norm"), "getitem", or "" for anything else."""
    if node.op != "call_function":
        return ""
    return "getitem" if node.target is operator.getitem else aten_name(node.target)


def origin_name(node: fx.Node) -> str:
    """:func:`op_name` of the operator that a node was decomposed from ("native_layer_norm" for a "var_mean")."""
    name = op_name(node)
    return (aten_name(node.meta.get("original_aten")) if name else "") or name


def value_of(node: fx.Node) -> Any:
    """The fake tensor (or tuple of them) that a node computes, or None if the graph does not have it."""
    value = node.meta.get("val")
    if value is None and node.op == "get_attr":
        value = getattr(node.graph.owning_module, str(node.target), None)
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a node's value."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors_of(v)] if isinstance(value, (tuple, list)) else []


def used_results(node: fx.Node, value: Any) -> Any:
    """A node's value; for a tuple, the elements that are read (others may be empty placeholders)."""
    if not isinstance(value, (tuple, list)) or any(u.target is not operator.getitem for u in node.users):
        return value
    return [value[u.args[1]] for u in node.users]  # type: ignore[index]


def takes_gradients(graph: fx.Graph) -> bool:
    """True for a backward graph, or a joint one: AOTAutograd names the incoming gradients tangents."""
    return any(str(n.target).startswith("tangents") for n in graph.find_nodes(op="placeholder"))


def is_random(node: fx.Node) -> bool:
    """True if a node draws from a generator, whose state orders such nodes.

    Attention has the tag of such operators for its dropout, but draws nothing if the probability is 0.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    for k, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[k] if k < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return bool(given != 0)
    return True


def is_written_back(node: fx.Node) -> bool:
    """True if a node's result is copied into an input of its graph, for example as the new value of a parameter.

    Inductor writes such results in place; a kernel with a separate result would cost a copy.
    """
    return any(u.target is torch.ops.aten.copy_.default and u.args[1] is node for u in node.users)


def stream_of(node: fx.Node) -> Any:
    """The number of the stream that the program assigned to a node of a Dynamo or aten graph; None without one."""
    return node.meta.get("custom", {}).get("stream")


def aten_name(target: Any) -> str:
    """The name of an operator of aten or prims, without its overload; "" for another target."""
    if isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims"):
        return target._schema.name.partition("::")[2]
    return ""

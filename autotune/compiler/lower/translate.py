"""Translation of aten calls to a region graph.

The submodule of a region is an fx graph of aten calls over fake tensors. The rules of
:mod:`autotune.compiler.lower.rules.table` evaluate it with lazy tensors. Each output is then evaluated at plain axes
(:mod:`autotune.compiler.lower.lazy`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autotune.compiler.lower.facts import GraphFacts, NodeFacts
from autotune.compiler.lower.lazy import NARROW, Index, Lazy, Region, cast, source, storage_name
from autotune.compiler.lower.rules import RULES
from autotune.compiler.lower.rules.reductions import check_work
from autotune.errors import Unsupported
from autotune.ir.graph import Graph, Output
from autotune.ir.nodes import asked
from autotune.ir.simplify import drop_slots, simplify


@dataclass(frozen=True)
class Translation:
    """``graph``, and for each of its input slots the position of its placeholder."""

    graph: Graph
    slots: tuple[int, ...]


def translate(facts: GraphFacts, precision: str | None = None, *, once: bool = True) -> Translation:
    """The graph of a submodule whose placeholders and results are tensors with static shapes.

    Args:
        facts: the facts about the submodule's nodes.
        precision: the graph's precision; None for the current setting.
        once: False for a stored region, which may repeat sums, since an earlier version or other sizes permitted that.

    Raises:
        Unsupported: the program cannot be translated; attribute ``node`` is the responsible node, or None.
        Repeated: sums would be computed several times and should be stored.
    """
    region = Region()
    env: dict[fx.Node, Any] = {}
    placeholders: list[fx.Node] = []
    for node in facts.nodes:
        region.origin = node
        if node.op == "output":
            results = fx.node.map_arg(node.args[0], lambda n: n)
            outputs = _outputs(region, facts, results, env)
        elif node.op == "placeholder":
            value = _tensor(facts[node].value)
            strides = [0 if e == 1 else s for e, s in zip(value.shape, value.stride(), strict=True)]
            env[node] = source(region, len(placeholders), value.shape, strides, value.dtype)
            placeholders.append(node)
        else:
            env[node] = _blamed(node, lambda n=node: _apply(region, n, facts[n], env))
    if once:
        check_work(region)
    inputs = tuple(storage_name(facts[p].value.dtype) for p in placeholders)
    how = asked() if precision is None else precision
    whole = Graph(tuple(region.build.extents), tuple(region.build.values), inputs, tuple(outputs), how)
    graph, slots = drop_slots(simplify(whole))
    try:
        graph.check()
    except ValueError as problem:
        raise Unsupported(f"a malformed graph ({problem})") from problem
    return Translation(graph, slots)


def _blamed(node: fx.Node, work: Any) -> Any:
    try:
        return work()
    except Unsupported as error:
        error.node = error.node or node
        raise
    except (TypeError, AssertionError, AttributeError, ValueError) as problem:
        # The rule does not support this form of the operator (an overload, a dtype argument).
        raise Unsupported(f"{node.target} in this form ({problem})", node) from problem


def _tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise Unsupported("something that is not a tensor")
    if not all(type(n) is int for n in (*value.shape, *value.stride())):
        raise Unsupported("symbolic shapes")
    return value


def _apply(region: Region, node: fx.Node, facts: NodeFacts, env: dict[fx.Node, Any]) -> Any:
    args: Any = fx.node.map_arg(node.args, lambda n: env[n])
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: env[n])
    if facts.operator == "getitem":
        found = args[0][args[1]]
        if found is None:
            raise Unsupported(f"its result {args[1] + 1} of {len(args[0])} is read, which no kernel computes")
        return found
    found_rule = RULES.get(facts.operator)
    if found_rule is None:
        raise Unsupported(f"operator {node.target}")
    value = facts.value
    several = isinstance(value, (tuple, list))
    results = list(value) if several else [_tensor(value)]
    region.out = [(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else ((), torch.float32) for v in results]
    out: Any = found_rule(region, *args, **kwargs)
    if not several:
        return _checked(out, results[0])
    if not isinstance(out, tuple) or len(out) > len(results):
        raise Unsupported(f"{node.target} with {len(results)} results")
    return tuple(None if x is None else _checked(x, _tensor(v)) for x, v in zip(out, results, strict=False))


def _checked(x: Lazy, like: torch.Tensor) -> Lazy:
    if x.shape != tuple(like.shape):
        raise Unsupported(f"a result of shape {x.shape} where torch has {tuple(like.shape)}")
    return cast(x, like.dtype)


def _outputs(region: Region, facts: GraphFacts, results: Any, env: dict[fx.Node, Any]) -> list[Output]:
    out: list[Output] = []
    for node in results if isinstance(results, (tuple, list)) else [results]:
        x, like = env[node], _tensor(facts[node].value)
        region.origin = node
        used: set[int] = set()
        index = tuple([region.run_over(n, used) if e > 1 else Index() for n, e in zip(x.names, x.shape, strict=True)])
        value = _blamed(node, lambda x=x, index=index: x.at(index))
        if like.dtype in NARROW:
            value = region.build.bits_of(value)
        strides: dict[int, int] = {}
        for i, s in zip(index, like.stride(), strict=True):
            for axis, c in i.terms:
                strides[axis] = c * s
        if any(s <= 0 for s in strides.values()):
            raise Unsupported("a result whose elements overlap", node)
        axes = tuple(sorted(strides))
        out.append(Output(value, axes, tuple(strides[a] for a in axes), storage_name(like.dtype)))
    return out

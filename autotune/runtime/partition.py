"""Cutting an aten graph around the regions that run stored kernels, so that what remains stays in few large pieces.

Every region to be replaced is one node of a condensed graph. A remaining node's *level* is the number of regions on the
longest way to it; all remaining nodes of one level make one piece, which runs after the regions below it and before
those that need it. Levels only grow along edges, so this order has no cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

_RANDOM = torch.Tag.nondeterministic_seeded


@dataclass
class Cut:
    """A region to be replaced: its nodes, what it reads and what it gives, as nodes of the graph."""

    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    run: Callable[..., Sequence[Any]]
    """Takes the values of ``inputs`` in order and returns those of ``outputs`` in order."""


@dataclass
class Piece:
    """Remaining nodes of one level, in the graph's order."""

    level: int
    nodes: list[fx.Node] = field(default_factory=list)

    @property
    def inputs(self) -> list[fx.Node]:
        """Nodes outside whose values it reads, in order of first use; attributes are copied instead of passed."""
        inside = set(self.nodes)
        seen: dict[fx.Node, None] = {}
        for node in self.nodes:
            for arg in node.all_input_nodes:
                if arg not in inside and arg.op != "get_attr":
                    seen.setdefault(arg)
        return list(seen)

    @property
    def outputs(self) -> list[fx.Node]:
        """Nodes inside whose values are used outside, in the graph's order."""
        inside = set(self.nodes)
        return [n for n in self.nodes if any(user not in inside for user in n.users)]


def is_mutation(node: fx.Node) -> bool:
    """Whether a node writes to one of its arguments; what is not a known operator is taken to."""
    if node.op != "call_function":
        return node.op in ("call_method", "call_module")
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    return node.target.__module__ not in ("_operator", "operator", "math") and not isinstance(
        node.target, torch._ops.HigherOrderOperator
    )


def is_random(node: fx.Node) -> bool:
    """Whether a node draws from a generator, whose state orders it against the others that do."""
    return isinstance(node.target, torch._ops.OpOverload) and _RANDOM in node.target.tags


def levels(graph: fx.Graph, cuts: Sequence[Cut]) -> tuple[dict[int, int], dict[fx.Node, int]]:
    """Level of each cut (by its index) and of each remaining computing node.

    Writes keep their order with what reads the same memory, and random operators theirs among each other.

    Raises:
        ValueError: cuts overlap, or contracting them makes a cycle.
    """
    owner: dict[fx.Node, int] = {}
    for k, cut in enumerate(cuts):
        for node in cut.nodes:
            if owner.setdefault(node, k) != k:
                raise ValueError(f"{node} is in two regions")
    before = _orderings(graph)
    cut_level: dict[int, int] = {}
    node_level: dict[fx.Node, int] = {}
    needs: dict[int, set[fx.Node]] = {
        k: {a for n in cut.nodes for a in (*n.all_input_nodes, *before.get(n, ())) if owner.get(a) != k}
        for k, cut in enumerate(cuts)
    }
    # Depth-first with an explicit stack: graphs are deeper than Python's.
    done: set[Any] = set()
    active: set[Any] = set()
    for root in graph.nodes:
        if root.op in ("placeholder", "get_attr", "output"):
            continue
        stack: list[tuple[Any, bool]] = [(owner.get(root, root), False)]
        while stack:
            item, leaving = stack.pop()
            if item in done:
                continue
            wanted = needs[item] if isinstance(item, int) else {*item.all_input_nodes, *before.get(item, ())}
            sources = [owner.get(a, a) for a in wanted if a.op not in ("placeholder", "get_attr")]
            if leaving:
                level = 0
                for s in sources:
                    level = max(level, cut_level[s] + 1 if isinstance(s, int) else node_level[s])
                if isinstance(item, int):
                    cut_level[item] = level
                else:
                    node_level[item] = level
                done.add(item)
                active.discard(item)
                continue
            if item in active:
                continue
            active.add(item)
            stack.append((item, True))
            for s in sources:
                if s in active and s not in done:
                    raise ValueError("the regions cannot be run one after another: they need each other's results")
                if s not in done:
                    stack.append((s, False))
    return cut_level, node_level


def _orderings(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Order that no value carries: for each node, earlier nodes it must not overtake.

    A write waits for the earlier readers of that memory and is waited for by the later ones. A write to who knows what
    waits for everything, and everything later waits for it.
    """
    before: dict[fx.Node, list[fx.Node]] = {}
    memory: dict[fx.Node, frozenset[fx.Node]] = {}  # graph inputs whose memory a value may share
    readers: dict[fx.Node, list[fx.Node]] = {}
    written: dict[fx.Node, fx.Node] = {}  # last write to an input's memory
    since: list[fx.Node] = []  # computing nodes since the last write to who knows what
    barrier: fx.Node | None = None
    random: fx.Node | None = None
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            memory[node] = frozenset((node,))
            continue
        if node.op == "output":
            continue
        touched = frozenset(m for arg in node.all_input_nodes for m in memory[arg])
        memory[node] = touched if _may_alias(node) else frozenset()
        extra = [written[m] for m in touched if m in written]
        extra += [barrier] if barrier is not None else []
        if is_random(node):
            extra += [random] if random is not None else []
            random = node
        if is_mutation(node):
            if node.target is torch.ops.aten.copy_.default and memory[node.all_input_nodes[0]]:
                for m in memory[node.all_input_nodes[0]]:
                    extra += readers.get(m, ())
                    written[m] = node
            else:
                extra += since
                since, barrier = [], node
        if barrier is not node:
            since.append(node)
        for m in touched:
            readers.setdefault(m, []).append(node)
        if extra:
            before[node] = [n for n in dict.fromkeys(extra) if n is not node]
    return before


def _may_alias(node: fx.Node) -> bool:
    """Whether a node's result may share memory with an argument."""
    if isinstance(node.target, torch._ops.OpOverload):
        return any(r.alias_info is not None for r in node.target._schema.returns)
    return True


def pieces(graph: fx.Graph, cuts: Sequence[Cut]) -> list[Cut | Piece]:
    """Everything in an order that can be run: at each level its piece, then its cuts.

    Raises:
        ValueError: see :func:`levels`.
    """
    cut_level, node_level = levels(graph, cuts)
    out: list[Cut | Piece] = []
    by_level: dict[int, Piece] = {}
    for node in graph.nodes:
        if node in node_level:
            by_level.setdefault(node_level[node], Piece(node_level[node])).nodes.append(node)
    top = max([*cut_level.values(), *by_level], default=-1)
    for level in range(top + 1):
        if level in by_level:
            out.append(by_level[level])
        out += [cut for k, cut in enumerate(cuts) if cut_level[k] == level]
    return out


def extract(gm: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Any:
    """A module that computes ``outputs`` (returned as a tuple) from ``inputs`` by ``nodes``; metadata is kept."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)

    def value(node: fx.Node) -> fx.Node:
        if node not in env:
            if node.op != "get_attr":
                raise ValueError(f"{node} is neither computed here nor an input")
            env[node] = graph.node_copy(node)
        return env[node]

    for node in nodes:
        env[node] = graph.node_copy(node, value)
    graph.output(tuple(env[n] for n in outputs))
    return fx.GraphModule(gm, graph)

"""Cutting an aten graph around the regions that run stored kernels, so that what remains stays in few large pieces.

Every region to be replaced is one node of a condensed graph. A remaining node's *level* is the number of regions on the
longest way to it; all remaining nodes of one level make one piece, which runs after the regions below it and before
those that need it. Levels only grow along edges, so this order has no cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autotune.fusion.regions import is_random

_SOURCES = ("placeholder", "get_attr")


@dataclass(frozen=True, eq=False)
class Cut:
    """A region to be replaced.

    Attributes:
        nodes: the nodes of the graph that it stands for.
        inputs: nodes outside that it reads.
        outputs: those of ``nodes`` that are read outside.
        run: takes the values of ``inputs`` in order and returns those of ``outputs`` in order.
    """

    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    run: Callable[..., Sequence[Any]]


@dataclass(frozen=True, eq=False)
class Piece:
    """Remaining nodes of one level, in the graph's order.

    Attributes:
        inputs: nodes outside whose values it reads, in order of first use; attributes are copied instead of passed.
        outputs: those of ``nodes`` whose values are read outside, in the graph's order.
    """

    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]


class _Condensed:
    """The graph with each cut as one item; an item is a node or a cut."""

    def __init__(self, graph: fx.Graph, cuts: Sequence[Cut]) -> None:
        self.graph, self.cuts = graph, cuts
        self.owner: dict[fx.Node, Cut] = {}
        for cut in cuts:
            for node in cut.nodes:
                if self.owner.setdefault(node, cut) is not cut:
                    raise ValueError(f"{node} is in two regions")
        self.before = _orderings(graph)
        (self.output,) = graph.find_nodes(op="output")
        self.live = self._live()

    def item(self, node: fx.Node) -> fx.Node | Cut:
        return self.owner.get(node, node)

    def reads(self, item: fx.Node | Cut) -> Sequence[fx.Node]:
        """The nodes whose values an item takes. A region reads through the views at its border by itself."""
        return item.inputs if isinstance(item, Cut) else item.all_input_nodes

    def _live(self) -> set[fx.Node | Cut]:
        """Items that the graph's results or its writes need: views within regions only are not."""
        stack: list[fx.Node | Cut] = [self.output]
        stack += [self.item(n) for n in self.graph.nodes if is_mutation(n)]
        live: set[fx.Node | Cut] = set()
        while stack:
            item = stack.pop()
            if item not in live:
                live.add(item)
                stack += [self.item(n) for n in self.reads(item)]
        return live

    def waits(self, item: fx.Node | Cut) -> list[fx.Node | Cut]:
        """Computing items that must run before ``item``."""
        nodes = list(self.reads(item))
        for node in item.nodes if isinstance(item, Cut) else (item,):
            nodes += self.before.get(node, ())
        found = dict.fromkeys(self.item(n) for n in nodes if n.op not in _SOURCES)
        return [i for i in found if i is not item and i in self.live]

    def levels(self) -> dict[fx.Node | Cut, int]:
        """Level of each live item. Raises ValueError for a cycle."""
        level: dict[fx.Node | Cut, int] = {}
        active: set[fx.Node | Cut] = set()
        for root in self.graph.nodes:  # an explicit stack: graphs are deeper than Python's
            stack = [(self.item(root), False)] if root.op not in _SOURCES and self.item(root) in self.live else []
            while stack:
                item, leaving = stack.pop()
                if item in level:
                    continue
                waits = self.waits(item)
                if leaving:
                    level[item] = max((level[w] + isinstance(w, Cut) for w in waits), default=0)
                    active.discard(item)
                elif item not in active:
                    active.add(item)
                    stack.append((item, True))
                    if any(w in active and w not in level for w in waits):
                        raise ValueError("the regions cannot run one after another: they need each other's results")
                    stack += [(w, False) for w in waits if w not in level]
        return level

    def piece(self, nodes: Sequence[fx.Node], read: set[fx.Node]) -> Piece:
        inside = set(nodes)
        inputs = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside and a.op != "get_attr")
        outputs = [n for n in nodes if n in read or any(u not in inside and self._remains(u) for u in n.users)]
        return Piece(nodes, list(inputs), outputs)

    def _remains(self, node: fx.Node) -> bool:
        return node in self.live and node not in self.owner


def pieces(graph: fx.Graph, cuts: Sequence[Cut]) -> list[Cut | Piece]:
    """Everything that computes, in an order that can be run: at each level its piece, then its cuts.

    Writes keep their order with what reads the same memory, and random operators theirs among each other.

    Raises:
        ValueError: cuts overlap, or contracting them makes a cycle.
    """
    condensed = _Condensed(graph, cuts)
    level = condensed.levels()
    read_by_cuts = {n for cut in cuts if cut in condensed.live for n in cut.inputs}
    by_level: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node in level and node.op != "output":
            by_level.setdefault(level[node], []).append(node)
    live_cuts = [cut for cut in cuts if cut in level]
    out: list[Cut | Piece] = []
    for n in range(max([*(level[c] for c in live_cuts), *by_level], default=-1) + 1):
        if n in by_level:
            out.append(condensed.piece(by_level[n], read_by_cuts))
        out += [cut for cut in live_cuts if level[cut] == n]
    return out


def cuts_are_all(graph: fx.Graph, cuts: Sequence[Cut]) -> bool:
    """Whether cuts alone make every result of ``graph``, each a tensor of its own, and nothing is written beside."""
    (output,) = graph.find_nodes(op="output")
    results = output.args[0] if isinstance(output.args[0], (tuple, list)) else ()
    made = {n for cut in cuts for n in cut.outputs}
    given = made | set(graph.find_nodes(op="placeholder"))
    return (
        bool(results)
        and all(isinstance(n, fx.Node) and n in made for n in results)
        and len(set(results)) == len(results)
        and all(n in given for cut in cuts for n in cut.inputs)
        and not any(is_mutation(n) for n in graph.nodes if n.op not in ("placeholder", "output", "get_attr"))
    )


def is_mutation(node: fx.Node) -> bool:
    """Whether a node writes to one of its arguments; what is no operator of torch or Python is taken to."""
    if node.op != "call_function":
        return node.op in ("call_method", "call_module")
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return False  # AOTAutograd makes these functional
    return getattr(node.target, "__module__", "") not in ("_operator", "operator", "math", "builtins")


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
        if node.op in _SOURCES:
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
        unknown = is_mutation(node)
        if unknown and node.target is torch.ops.aten.copy_.default and memory[node.all_input_nodes[0]]:
            unknown = False
            for m in memory[node.all_input_nodes[0]]:
                extra += readers.get(m, ())
                written[m] = node
        if unknown:
            extra += since
            since, barrier = [], node
        else:
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


def extract(
    gm: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
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

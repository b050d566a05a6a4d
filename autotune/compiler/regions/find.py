"""Search for the regions of an aten graph: sets of nodes that become one unit of tuning.

Regions are connected sets of memory-intensive nodes (:mod:`autotune.compiler.lower.facts`) that can be contracted to
one node without a cycle. They are found in two steps (:mod:`autotune.compiler.regions.grouping`). First, nodes get
levels: the number of nodes outside of regions that must run before them. Adjacent nodes of one level form a region,
which makes no cycle. Second, adjacent regions are merged while no path between them leads through another node. Then
unrelated regions may be joined, so that their kernels share launches (:mod:`autotune.compiler.regions.grouping`).

Views and generators belong to no region. Those that a region needs are copied into its submodule, where they are free;
those that other nodes need remain in the graph.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from autotune.compiler.lower.facts import LIBRARY_CALL, GraphFacts, Kind
from autotune.compiler.lower.op_names import ALLOCATIONS, CASTS, GENERATORS, PRODUCTS, SCATTERS, VIEWS, describe
from autotune.compiler.lower.rules.reductions import read_again
from autotune.compiler.lower.translate import translate
from autotune.compiler.regions import aten
from autotune.compiler.regions.grouping import (
    Candidate,
    Flow,
    bundle_groups,
    candidate,
    copied_nodes,
    delays,
    may_join,
    merge_groups,
)
from autotune.compiler.regions.lifetimes import Lifetimes
from autotune.compiler.regions.programs import program_of
from autotune.errors import Repeated, Unsupported
from autotune.ir.canonical import canonicalize, to_workload
from autotune.ir.nodes import POINTWISE
from autotune.workload import Workload

_STORED_COST = 28
"""Fused multiply-adds that an H200 executes in the time that it takes to store and load an element of two bytes."""

_READ_AGAIN = 64
"""Times that a copy must be read to be worth a kernel of its own."""


@dataclass(frozen=True)
class Binding:
    """The map from a workload's canonical graph to a region's tensors.

    ``inputs[k]`` is the index in ``Region.inputs`` of input slot ``k``; ``outputs[k]`` is the index in
    ``Region.outputs`` of the graph's output ``k``. A region input that the graph does not read has no slot.
    """

    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Region:
    """A set of nodes that may run as one.

    Attributes:
        nodes: the nodes replaced, in graph order; views and generators between them are not among them.
        inputs: nodes outside whose tensors the region reads, each once, in order of first use.
        outputs: those of ``nodes`` that are used outside, in graph order.
        submodule: computes ``outputs`` (always a tuple) from ``inputs`` with aten calls: the baseline.
        workload: the workload to tune, or None if the region was not translated.
        binding: the map from the workload's inputs and outputs to the region's.
        reason: the reason why there is no workload.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    submodule: fx.GraphModule
    workload: Workload | None = None
    binding: Binding = field(default_factory=Binding)
    reason: str = ""


def find_regions(gm: fx.GraphModule, side: str | None = None) -> list[Region]:
    """The regions of an aten graph of AOTAutograd, in graph order.

    Args:
        gm: a graph with fake tensors in ``meta["val"]``.
        side: the ``side`` of :class:`autotune.compiler.lower.facts.GraphFacts`.
    """
    return regions_from(GraphFacts(gm.graph, side))


def regions_from(facts: GraphFacts) -> list[Region]:
    """The regions of a graph with these facts, in graph order.

    A node whose translation fails in its region gets a reason to be outside, and the search is repeated, so that one
    unsupported operator excludes only itself. The graph is not changed; the same graph gives the same regions.
    """
    finder = Finder(facts)
    done: dict[tuple[frozenset[fx.Node], frozenset[fx.Node]], Region] = {}
    while True:
        regions: list[Region] = []
        failed = False
        for nodes in finder.groups():
            key = frozenset(nodes), frozenset(finder.copied)
            if key not in done:
                try:
                    done[key] = finder.region(nodes)
                except Repeated as error:
                    finder.read_stored([n.meta["origin"] for n in error.nodes])
                except Unsupported as error:
                    finder.blame(nodes, error)
                if key not in done:
                    failed = True
                    continue
            regions.append(done[key])
        if not failed:
            return _side_by_side(finder, regions)


def outside(facts: GraphFacts, regions: Iterable[Region]) -> dict[fx.Node, str]:
    """The calls of a graph outside of its regions, in order, each with the reason.

    Views, generators and allocations are left out, since they move no data.
    """
    inside = {n for r in regions for n in (*r.nodes, *(m.meta.get("origin") for m in r.submodule.graph.nodes))}
    free = VIEWS | GENERATORS | ALLOCATIONS | {"getitem"}
    found = {}
    for n in facts.nodes:
        if n.op == "call_function" and n not in inside and facts[n].operator not in free:
            alone = LIBRARY_CALL if facts[n].operator in PRODUCTS else "nothing reads its result"
            found[n] = facts[n].reason or alone
    return found


class Finder:
    """A search for the regions of one graph.

    Attributes:
        kept: the products and index-adds whose results must be stored before they are read.
        picking: the nodes whose tables must be stored before they read them at computed indices.
        copied: the nodes that every region which reads them computes.
        once: the nodes that only their own region may compute.
    """

    def __init__(self, facts: GraphFacts) -> None:
        self.facts = facts
        self.kept: set[fx.Node] = set()
        self.picking: set[fx.Node] = set()
        self.copied: set[fx.Node] = set()
        self.once: set[fx.Node] = set()
        self._known: dict[str, tuple[Workload, Binding]] = {}

    def flow(self) -> Flow[fx.Node]:
        """The nodes that compute, the dependencies of each, and the nodes that may be in regions.

        A node depends on the nodes that it reads, also through views. A node that draws random numbers also depends on
        the previous one that does, so that joining independent branches preserves that order.
        """
        facts = self.facts
        real = [n for n in facts.nodes if not facts[n].is_free and n.op != "output"]
        before = {n: facts.producers(n) for n in real}
        for earlier, later in pairwise(n for n in real if facts[n].is_random):
            before[later] = list(dict.fromkeys([*before[later], earlier]))
        members = {n for n in real if facts[n].kind is Kind.COMPUTE}
        return Flow(real, before, members, self._stored(members))

    def groups(self) -> list[list[fx.Node]]:
        """The sets of nodes to become regions, in graph order. Single products, except by a vector, are left out."""
        self.copied = set()
        flow = self.flow()
        movable = {n for n in flow.members if n not in flow.stored and self._may_wait(n, flow.members)}
        late = delays(flow, movable, {n: self.facts[n].bytes for n in flow.order})
        products = {n for n in flow.members if self.facts[n].operator in PRODUCTS}
        alone = {n for n in products if all(read_again(*self.facts.factors(n)))}  # left to a library
        groups = [g for g in merge_groups(flow, late) if not alone.issuperset(g)]
        self.copied = copied_nodes(self.facts, groups, flow.stored, self.once)
        return [g for g in groups if not self.copied.issuperset(g)]

    def region(self, nodes: Sequence[fx.Node], parts: Mapping[fx.Node, int] | None = None) -> Region:
        """The region of a group. Raises Unsupported with the responsible node of this graph as ``node``.

        Args:
            parts: as of :func:`autotune.compiler.regions.programs.program_of`.
        """
        inputs, outputs, module = self.submodule(nodes, parts)
        self._check_float64(nodes, outputs)
        try:
            if not outputs:
                raise Unsupported("no results")
            if not inputs:
                raise Unsupported("it reads no tensors")
            workload, binding = self._workload(inputs, module)
        except Repeated:
            raise
        except Unsupported as error:
            origin = error.node and error.node.meta.get("origin")
            if origin is not None:
                error.node = origin
                raise
            return Region(tuple(nodes), tuple(inputs), tuple(outputs), module, reason=str(error))
        return Region(tuple(nodes), tuple(inputs), tuple(outputs), module, workload, binding)

    def submodule(
        self, nodes: Sequence[fx.Node], parts: Mapping[fx.Node, int] | None = None
    ) -> tuple[list[fx.Node], list[fx.Node], fx.GraphModule]:
        """(inputs, outputs, module) of a group, with copies of the free nodes between.

        A node is no output if other groups only read their own copies of it.

        Args:
            parts: as of :func:`autotune.compiler.regions.programs.program_of`.
        """
        members = set(nodes)
        outputs = [n for n in nodes if self._is_used_outside(n, members)]
        inputs, module = program_of(self.facts, members, outputs, self.copied, parts)
        return inputs, outputs, module

    def read_stored(self, nodes: Sequence[fx.Node]) -> None:
        """Keep sums apart that a region would repeat.

        Products and index-adds are stored before they are read, and so are the tables of nodes that read at computed
        indices. A marked node whose sums are still repeated stays outside.
        """
        for n in nodes:
            operator = self.facts[n].operator
            marked = self.kept if operator in PRODUCTS or operator in SCATTERS else self.picking
            if n in marked:
                self._leave_outside(n, LIBRARY_CALL if operator in PRODUCTS else "sums that a region would repeat")
            marked.add(n)

    def blame(self, nodes: Sequence[fx.Node], error: Unsupported) -> None:
        """Exclude or change the node that made a group's translation fail."""
        culprit: fx.Node = error.node
        body = {n.meta.get("origin") for n in self.submodule(nodes)[2].graph.nodes}
        if borrowed := self.copied.intersection(body).difference(nodes):
            self.once |= borrowed  # one of these may be the cause
        elif self.facts[culprit].operator in SCATTERS and culprit not in self.kept:
            self.kept.add(culprit)  # the translation may succeed if readers in other shapes read the stored result
        else:
            self._leave_outside(culprit, str(error))

    def _leave_outside(self, node: fx.Node, reason: str) -> None:
        self.facts.leave_outside(node, reason)
        self.once.clear()  # the groups change

    def _stored(self, members: set[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
        """For each node, the producers that it reads from memory only.

        For a matrix product, these are operands whose elements it reads repeatedly. (The matrix in a product with a
        vector is read once, so the product may dequantize it.) For an index-add, these are rows with other readers.
        For a node of ``picking``, it is the table. For a pad, it is a tensor that several pads shift. For any node,
        these are ``kept`` products, 8-bit floats, which must be rounded, and small transposed copies.
        """
        facts, shifted = self.facts, self._shifted(members)
        found: dict[fx.Node, set[fx.Node]] = {}
        for n in members:
            fact, producers = facts[n], facts.producers(n)
            apart = self.kept.intersection(producers)
            if fact.operator in PRODUCTS:
                again = zip(fact.factors, read_again(*facts.factors(n)), strict=True)
                apart |= {p for a, many in again if many for p in facts.makers(a)}
            elif fact.operator in SCATTERS:
                rows = n.args[SCATTERS[fact.operator]]
                if isinstance(rows, fx.Node):
                    apart |= {p for p in facts.makers(rows) if not self._is_read_by_one(p, members)}
            elif n in self.picking:
                apart |= set(facts.makers(n.all_input_nodes[0]))  # the table is its first argument
            elif fact.operator == "constant_pad_nd":
                apart |= shifted.intersection(producers)
            apart |= {p for p in producers if p in members and self._is_transposed_copy(p, n)}
            if not fact.is_float8:
                apart |= {p for p in producers if facts[p].is_float8}
            if apart or fact.operator in PRODUCTS or fact.operator in SCATTERS:  # of these none waits
                found[n] = apart
        return found

    def _shifted(self, members: set[fx.Node]) -> set[fx.Node]:
        """The nodes that several pads shift, to one shape, and that cost more to compute for each pad than to store."""
        pads = [n for n in members if self.facts[n].operator == "constant_pad_nd" and self.facts[n].is_tensor]
        made = ((p, str(self.facts[n].value.shape)) for n in pads for p in self.facts.producers(n) if p in members)
        count = Counter(made)
        return {p for (p, _), c in count.items() if c > 2 and c * self._cost(p, members) > _STORED_COST}

    def _is_transposed_copy(self, node: fx.Node, reader: fx.Node) -> bool:
        """True for a small transposed copy of a tensor in memory, of which ``reader`` reads one of several parts often.

        A thread loads vectors from the copy, and single elements from the original. The copy may also convert them.
        """
        fact = self.facts[node]
        if fact.operator != "clone" or _READ_AGAIN * fact.bytes > self.facts[reader].bytes:
            return False
        if len(node.users) < 2 or not all(self.facts[u].is_window for u in node.users):
            return False
        stack = self.facts.producers(node)
        while stack:
            n = stack.pop()
            if self.facts[n].kind is Kind.COMPUTE:
                if self.facts[n].operator not in CASTS:
                    return False
                stack += self.facts.producers(n)
        (x,) = node.all_input_nodes
        given = self.facts[x].value
        return isinstance(given, torch.Tensor) and given.shape == fact.value.shape and not given.is_contiguous()

    def _cost(self, node: fx.Node, members: set[fx.Node]) -> int:
        """Fused multiply-adds for an element of a node, by a group that computes it from tensors in memory.

        A reduction costs as much as it takes to store a node. From there on, the cost is a lower bound.
        """
        cost, seen, stack = 0, {node}, [node]
        while stack and cost < _STORED_COST:
            n = stack.pop()
            fact = self.facts[n]
            if fact.is_pointwise or fact.is_move:
                cost += POINTWISE[fact.operator].cost if fact.operator in POINTWISE else 1
            else:
                cost += _STORED_COST
            new = members.intersection(self.facts.producers(n)) - seen
            seen |= new
            stack += new
        return cost

    def _is_read_by_one(self, node: fx.Node, members: set[fx.Node]) -> bool:
        """True if only pointwise operators compute a node from tensors in memory, and each has one reader.

        An index-add may compute such rows itself, since it adds each row once.
        """
        stack = [node]
        while stack:
            n = stack.pop()
            if n not in members:
                continue
            if not self.facts[n].is_pointwise or len(self.facts.readers(n)) > 1:
                return False
            stack += self.facts.producers(n)
        return True

    def _may_wait(self, node: fx.Node, members: AbstractSet[fx.Node]) -> bool:
        """True if only nodes of regions read a tensor. (It is never true for elements of a tuple.)"""
        fact = self.facts[node]
        return fact.is_tensor and fact.operator != "getitem" and not self._is_used_outside(node, members)

    def _is_used_outside(self, node: fx.Node, inside: AbstractSet[fx.Node]) -> bool:
        """True if a node outside the region reads it, directly or through views."""
        if not self.facts[node].is_tensor or node in self.copied:
            return False  # a tuple: its getitems are nodes of the region themselves
        return not self.facts.readers(node, self.copied) <= inside

    def _check_float64(self, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> None:
        """Raises Unsupported if a region would read or write float64, which it supports in registers only."""
        facts, inside = self.facts, set(nodes)
        readers = [n for n in nodes if any(facts[p].is_float64 for p in facts.producers(n) if p not in inside)]
        for n in (*readers, *(n for n in outputs if facts[n].is_float64)):
            raise Unsupported("float64 that is not made and read in one region", n)

    def _workload(self, inputs: Sequence[fx.Node], module: fx.GraphModule) -> tuple[Workload, Binding]:
        """:func:`workload_of`, cached: equal programs, such as those of a model's layers, are translated once."""
        try:
            program = aten.to_json(module)
        except Unsupported:
            return workload_of(module)  # its error has the responsible node
        starts = [int(self.facts[n].value.storage_offset()) for n in inputs]
        key = json.dumps([program, starts])
        if key not in self._known:
            self._known[key] = workload_of(module, program=program)
        return self._known[key]


def workload_of(
    module: fx.GraphModule, precision: str | None = None, program: dict[str, Any] | None = None, *, once: bool = True
) -> tuple[Workload, Binding]:
    """The workload of a region's submodule, with the errors of :func:`autotune.compiler.lower.translate.translate`.

    Args:
        program: the result of ``aten.to_json`` for the submodule, if known.
        once: as of ``translate``.
    """
    facts = GraphFacts(module.graph)
    translation = translate(facts, precision, once=once)
    program = program or aten.to_json(module)
    graph, slots, order = canonicalize(translation.graph)
    binding = Binding(tuple(translation.slots[s] for s in slots), order)
    label = describe((facts[n].origin for n in facts.nodes), graph)
    # The program's input for each slot of the graph.
    return to_workload(graph, label, {**program, "slots": list(binding.inputs)}), binding


def _side_by_side(finder: Finder, regions: list[Region]) -> list[Region]:
    """The regions after remote fusion (:mod:`autotune.compiler.regions.grouping`), in graph order."""
    if len(regions) < 2:
        return regions
    facts, flow = finder.facts, finder.flow()
    level = flow.levels()
    known: list[Candidate | None] = []
    for r in regions:
        devices = {str(t.device) for n in r.nodes for t in facts[n].tensors}
        place = (*sorted(devices), max(level[n] for n in r.nodes))
        reads = {n: facts[n].bytes for n in r.inputs}
        known.append(None if r.workload is None else candidate(r.workload, place, reads))

    def joins(bundle: Sequence[int], k: int) -> bool:
        return may_join([known[n] for n in bundle], known[k])

    out: list[Region] = []
    lifetimes = Lifetimes(facts, regions, finder.copied)
    bundles = bundle_groups(flow, [r.nodes for r in regions], joins)
    for bundle in (part for every in bundles for part in lifetimes.split(every, joins)):
        alone = [regions[k] for k in bundle]
        out += alone if len(bundle) == 1 else _joined(finder, alone)
    return sorted(out, key=lambda r: facts.place[r.nodes[0]])


def _joined(finder: Finder, regions: list[Region]) -> list[Region]:
    """Several regions joined into one; the same regions if together they have no workload."""
    try:
        parts = {n: k for k, r in enumerate(regions) for n in r.nodes}
        made = finder.region(sorted(parts, key=finder.facts.place.__getitem__), parts)
    except Unsupported:
        return regions
    return regions if made.workload is None else [made]

"""Regions: which nodes of an aten graph become one unit of tuning.

A node is *memory-intensive* if a rule translates it, and *opaque* otherwise (mm, attention, random numbers, what the
rules do not know). Regions are connected sets of memory-intensive nodes that can be contracted to one node without a
cycle. They are found in two steps: nodes get levels (the number of opaque nodes that must run before them), and equal
levels that touch are one region, which can make no cycle (a node that is cheaper to compute where it is read waits for
the level of its readers: ``autotune.compiler.regions.delay``); then regions that touch are merged while no path
between them leads through anything else. Then regions that have nothing to do with each other may become one all the
same, so that their kernels can share launches: see ``autotune.compiler.regions.remote``.

Views and generators belong to no region: those that a region needs are copied into its submodule, where they are free,
and those that others need stay where they are.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from autotune.compiler.capture.contexts import stream_of
from autotune.compiler.capture.joint import is_written_back
from autotune.compiler.lower.op_names import GENERATORS, PRODUCTS, SCATTERS, VIEWS
from autotune.compiler.lower.rules.product import is_memory_intensive, read_again
from autotune.compiler.lower.rules.table import RULES
from autotune.compiler.lower.translate import meta, op_name, translate
from autotune.compiler.regions import aten
from autotune.compiler.regions.contraction import bundle_groups, levels, merge_groups
from autotune.compiler.regions.delay import delays
from autotune.compiler.regions.label import describe
from autotune.compiler.regions.narrow import copied_nodes
from autotune.compiler.regions.remote import Candidate, candidate, may_join
from autotune.compiler.regions.tensors import (
    bytes_of,
    factors,
    is_aligned,
    is_float8,
    is_pointwise,
    is_random,
    is_window,
    storable,
    tensors_of,
    used_results,
)
from autotune.compiler.regions.wide import is_wide, passing
from autotune.errors import Repeated, Unsupported
from autotune.ir.forms.canonical import canonicalize, to_workload
from autotune.workload import Workload


@dataclass(frozen=True)
class Binding:
    """How a region's tensors meet the workload's canonical graph.

    ``inputs[k]`` is the position in ``Region.inputs`` of input slot ``k``; ``outputs[k]`` the position in
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
        workload: what to tune, or None where the region was not translated.
        binding: how inputs and outputs map to the workload's.
        reason: why there is no workload.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    submodule: fx.GraphModule
    workload: Workload | None = None
    binding: Binding = field(default_factory=Binding)
    reason: str = ""


class Finder:
    """Regions of one graph. ``hard`` holds the nodes that turned out not to be translatable, ``kept`` the products
    whose results are to be stored before they are read, ``copied`` what every region that reads it computes, and
    ``once`` what none but its own may.
    """

    def __init__(self, gm: fx.GraphModule, side: str | None = None) -> None:
        self.gm, self.side = gm, side
        self.nodes = list(gm.graph.nodes)
        self.place = {n: k for k, n in enumerate(self.nodes)}
        self.hard: set[fx.Node] = set()
        self.kept: set[fx.Node] = set()
        self.copied: set[fx.Node] = set()
        self.once: set[fx.Node] = set()
        self._known: dict[str, tuple[Workload, Binding]] = {}
        self._passing = passing(self.nodes)
        self._sorts = {n: self._classify(n) for n in self.nodes}

    def _classify(self, node: fx.Node) -> str:
        name = op_name(node)
        if name == "getitem":
            owner = node.args[0]
            return self._classify(owner) if isinstance(owner, fx.Node) else "opaque"
        if name not in RULES or node.target._schema.is_mutable or is_written_back(node):  # type: ignore[union-attr]
            return "opaque"
        if stream_of(node) is not None:  # Inductor launches it there, a region's kernels run on the current stream
            return "opaque"
        made = tensors_of(used_results(node))
        read = [t for n in node.all_input_nodes for t in tensors_of(meta(n))]
        wide = self._passing.issuperset(n for n in (node, *node.all_input_nodes) if is_wide(n))
        if not made or not all(storable(t, wide) for t in (*made, *read)):
            return "opaque"
        if any(not tensors_of(meta(n)) for n in node.all_input_nodes) or len({t.device for t in (*made, *read)}) != 1:
            return "opaque"
        if any(is_float8(n) for n in (node, *node.all_input_nodes)) and not self._converts_float8(node):
            return "opaque"
        if (name in PRODUCTS and not self._may_hold(node)) or (name in SCATTERS and not self._on_cuda(node)):
            return "opaque"
        return "view" if name in VIEWS else "generator" if name in GENERATORS else "compute"

    def _on_cuda(self, node: fx.Node) -> bool:
        """Whether a node is to run on a GPU."""
        return (self.side or tensors_of(meta(node))[0].device.type) == "cuda"

    def _converts_float8(self, node: fx.Node) -> bool:
        """Whether the device of a node has instructions for floats of eight bits, as GPUs do from sm_89 on."""
        device = tensors_of(meta(node))[0].device
        here = device.type == "cuda" and torch.cuda.is_available()
        return not here or torch.cuda.get_device_capability(device) >= (8, 9)

    def _may_hold(self, product: fx.Node) -> bool:
        """Whether a matrix product may be in a region. None on a CPU, where a library's call costs next to nothing."""
        plain = getattr(product.target, "_overloadname", "") == "default"  # others name the result's type
        pair = factors(product)
        return self._on_cuda(product) and plain and len(pair) == 2 and is_memory_intensive(*map(meta, pair))

    def sort(self, node: fx.Node) -> str:
        """ "compute", "view", "generator" or "opaque"."""
        return "opaque" if node in self.hard else self._sorts[node]

    def free(self, node: fx.Node) -> bool:
        return self.sort(node) in ("view", "generator")

    def producers(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that ``node`` reads, looking through views and generators, in order, each once."""
        out: dict[fx.Node, None] = {}
        seen: set[fx.Node] = set()
        stack = list(reversed(node.all_input_nodes))
        while stack:
            n = stack.pop()
            if n in seen:
                continue
            seen.add(n)
            if self.free(n):
                stack.extend(reversed(n.all_input_nodes))
            else:
                out[n] = None
        return list(out)

    def condensed(self) -> tuple[list[fx.Node], dict[fx.Node, list[fx.Node]], set[fx.Node]]:
        """The nodes that compute, what each waits for, and those that may be in regions.

        A node waits for those that it reads, through views, and one that draws random numbers for the one that did so
        before it: two branches that have nothing else to do with each other are not joined against that order.
        """
        real = [n for n in self.nodes if not self.free(n) and n.op != "output"]
        before = {n: self.producers(n) for n in real}
        drawn = [n for n in real if is_random(n)]
        for earlier, later in pairwise(drawn):
            before[later] = list(dict.fromkeys([*before[later], earlier]))
        return real, before, {n for n in real if self.sort(n) == "compute"}

    def groups(self) -> list[list[fx.Node]]:
        """The sets of nodes to become regions, in graph order. Products alone, but a vector's, are a library's."""
        self.copied = set()
        order, before, members = self.condensed()
        stored = self.stored(members)
        movable = {n for n in members - set(stored) if self._may_wait(n, members)}
        size = {n: bytes_of(meta(n)) for n in order}
        late = delays(order, before, levels(order, before, members, stored=stored), movable, size, stored)
        groups = merge_groups(order, before, members, late, stored)
        groups = [g for g in groups if not all(map(self._is_the_library_s, g))]
        self.copied = copied_nodes(groups, self._readers, self.producers, stored, self.once)
        return [g for g in groups if not self.copied.issuperset(g)]

    def _is_the_library_s(self, node: fx.Node) -> bool:
        """Whether nothing is won by a node alone: a product but a vector's."""
        return op_name(node) in PRODUCTS and all(read_again(*map(meta, factors(node))))

    def stored(self, members: set[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
        """For each node what it reads from memory only: a matrix product the operands whose elements it reads again and
        again, sums at places rows that are more than theirs to compute, and any node the products that are ``kept`` and
        floats of eight bits, whose rounding is what they are for.

        The matrix that a vector is multiplied by is read once: where it is dequantized, that may be in the product.
        """
        found = {n: kept for n in members if (kept := self.kept.intersection(self.producers(n)))} if self.kept else {}
        for n in members:
            if op_name(n) in PRODUCTS:
                pair = factors(n)
                again = [a for a, many in zip(pair, read_again(*map(meta, pair)), strict=True) if many]
                operand = {p for a in again for p in (self.producers(a) if self.free(a) else [a])}
                found[n] = found.get(n, set()) | operand
            elif op_name(n) in SCATTERS:
                rows = n.args[SCATTERS[op_name(n)]]
                if isinstance(rows, fx.Node):
                    made = self.producers(rows) if self.free(rows) else [rows]
                    found[n] = found.get(n, set()) | {p for p in made if not self._read_by_one(p, members)}
            rounded = {p for p in self.producers(n) if is_float8(p)} if not is_float8(n) else set()
            if rounded:
                found[n] = found.get(n, set()) | rounded
        return found

    def _read_by_one(self, node: fx.Node, members: set[fx.Node]) -> bool:
        """Whether pointwise operators alone make a node from what lies in memory, and each is read by one node only.

        Sums at places may compute such rows where they add them: each is added once.
        """
        stack = [node]
        while stack:
            n = stack.pop()
            if n not in members:
                continue
            if not is_pointwise(n) or len(self._readers(n)) > 1:
                return False
            stack += self.producers(n)
        return True

    def _readers(self, node: fx.Node, copied: AbstractSet[fx.Node] = frozenset()) -> set[fx.Node]:
        """The nodes that read one, as it is or through views, and through what is ``copied``."""
        found, seen, stack = set(), set(), list(node.users)
        while stack:
            user = stack.pop()
            if user in seen:
                continue
            seen.add(user)
            if self.free(user) or user in copied:
                stack += user.users
            else:
                found.add(user)
        return found

    def _may_wait(self, node: fx.Node, members: set[fx.Node]) -> bool:
        """Whether nothing but nodes of regions reads a tensor. (A tuple's elements do not leave it.)"""
        alone = isinstance(meta(node), torch.Tensor) and node.target is not operator.getitem
        return alone and not self._used_outside(node, members)

    def submodule(self, nodes: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node], fx.GraphModule]:
        """(inputs, outputs, module) of a group; free nodes between are copied in.

        Nodes that only copies of theirs in other groups are read of are left out, as whoever reads the module does.
        """
        outputs = [n for n in nodes if self._used_outside(n, set(nodes))]
        inside, needed = set(outputs), set[fx.Node]()
        stack = list(outputs)
        while stack:
            for n in stack.pop().all_input_nodes:
                mine = inside if n in nodes else needed if self.free(n) or n in self.copied else None
                if mine is not None and n not in mine:
                    mine.add(n)
                    stack.append(n)
        needed = self._without_windows(inside, needed)
        body = sorted(inside | needed, key=lambda n: self.place[n])
        inputs: dict[fx.Node, None] = {}
        for n in body:
            for i in n.all_input_nodes:
                if i not in inside and i not in needed:
                    inputs[i] = None
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for k, n in enumerate(inputs):
            env[n] = graph.placeholder(f"x{k}")
            env[n].meta = {"val": meta(n)}
        for n in body:
            env[n] = graph.node_copy(n, lambda a: env[a])
            env[n].meta = {"val": meta(n), "origin": n, "original_aten": n.meta.get("original_aten")}
        graph.output(tuple(env[n] for n in outputs))
        return list(inputs), outputs, fx.GraphModule(torch.nn.Module(), graph)

    def borrowed(self, nodes: Sequence[fx.Node]) -> set[fx.Node]:
        """What a group computes of other groups' nodes."""
        body = (n.meta.get("origin") for n in self.submodule(nodes)[2].graph.nodes)
        return self.copied.intersection(body).difference(nodes)

    def _without_windows(self, inside: set[fx.Node], needed: set[fx.Node]) -> set[fx.Node]:
        """``needed`` less the views that cut a window out of a tensor which the region reads in no other way.

        The window is then the region's input, wherever it begins: the steps of an unrolled recurrence, each with its
        slice of one projection, are one workload.
        """
        out = set(needed)
        body = inside | needed
        sources = dict.fromkeys(i for n in body for i in n.all_input_nodes if i not in body)
        for source in sources:
            chain: list[fx.Node] = []
            window = 0
            node = source
            while True:
                users = [u for u in node.users if u in body]
                if len(users) != 1 or users[0] not in needed or users[0].all_input_nodes != [node]:
                    break
                if users[0] in self.copied:  # nobody else makes it
                    break
                node = users[0]
                chain.append(node)
                if is_window(node):
                    window = len(chain)
            if window and is_aligned(meta(chain[window - 1]), meta(source)):
                out -= set(chain[:window])
        return out

    def _check_narrow(self, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> None:
        """Raises Unsupported where a region would read or write float64, which it has in registers only."""
        inside = set(nodes)
        readers = [n for n in nodes if any(is_wide(p) for p in self.producers(n) if p not in inside)]
        for n in (*readers, *filter(is_wide, outputs)):
            raise Unsupported("float64 that is not made and read in one region", n)

    def _used_outside(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        """Whether a node that is not in the region reads it, as it is or through views."""
        if not isinstance(meta(node), torch.Tensor) or node in self.copied:
            return False  # a tuple: its getitems are nodes of the region themselves
        return not self._readers(node, self.copied) <= inside

    def region(self, nodes: Sequence[fx.Node]) -> Region:
        """The region of a group. Raises Unsupported with the responsible node of this graph as ``node``."""
        inputs, outputs, module = self.submodule(nodes)
        self._check_narrow(nodes, outputs)
        try:
            if not outputs:
                raise Unsupported("no results")
            if not inputs:
                raise Unsupported("it reads no tensors")
            workload, binding = self._workload(module)
        except Repeated:
            raise
        except Unsupported as error:
            origin = error.node and error.node.meta.get("origin")
            if origin is not None:
                error.node = origin
                raise
            return Region(tuple(nodes), tuple(inputs), tuple(outputs), module, reason=str(error))
        return Region(tuple(nodes), tuple(inputs), tuple(outputs), module, workload, binding)

    def _workload(self, module: fx.GraphModule) -> tuple[Workload, Binding]:
        """As :func:`workload_of`; equal programs, such as those of a model's layers, are translated once."""
        try:
            program = aten.to_json(module)
        except Unsupported:
            return workload_of(module)  # which tells the node to blame
        starts = [int(meta(n).storage_offset()) for n in module.graph.nodes if n.op == "placeholder"]
        key = json.dumps([program, starts])
        if key not in self._known:
            self._known[key] = workload_of(module, program=program)
        return self._known[key]


def workload_of(
    module: fx.GraphModule, precision: str | None = None, program: dict[str, Any] | None = None
) -> tuple[Workload, Binding]:
    """What the submodule of a region is tuned as. As :func:`autotune.compiler.lower.translate.translate`, whose
    errors it has too.

    Args:
        program: the submodule as ``aten.to_json`` makes it, where that is known already.
    """
    translation = translate(module, precision)
    program = program or aten.to_json(module)
    graph, slots, order = canonicalize(translation.graph)
    binding = Binding(tuple(translation.slots[s] for s in slots), order)
    # Which of the program's inputs each slot of the graph reads.
    return to_workload(graph, describe(module, graph), {**program, "slots": list(binding.inputs)}), binding


def find_regions(gm: fx.GraphModule, side: str | None = None) -> list[Region]:
    """The regions of an aten graph (as AOTAutograd hands it to a compiler), in graph order.

    A node that cannot be translated in its place becomes opaque and the search starts over, so that one odd operator
    costs only itself. The graph is not changed; the same graph gives the same regions.

    Args:
        gm: nodes carry fake tensors in ``meta["val"]``.
        side: "cpu" or "cuda", where the graph was captured on another device than it is meant for.
    """
    finder = Finder(gm, side)
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
                    _keep(finder, [n.meta["origin"] for n in error.nodes])
                except Unsupported as error:
                    culprit: fx.Node = error.node
                    if borrowed := finder.borrowed(nodes):
                        finder.once |= borrowed  # they may be what it cannot do in its place
                    elif op_name(culprit) in SCATTERS and culprit not in finder.kept:
                        finder.kept.add(culprit)  # it may do where those that read it in other shapes read it stored
                    else:
                        _harden(finder, culprit)
                if key not in done:
                    failed = True
                    continue
            regions.append(done[key])
        if not failed:
            return _side_by_side(finder, regions)


def _side_by_side(finder: Finder, regions: list[Region]) -> list[Region]:
    """Regions with those joined that remote fusion joins (``autotune.compiler.regions.remote``), in graph order."""
    order, before, members = finder.condensed()
    level = levels(order, before, members, stored=finder.stored(members))
    known: list[Candidate | None] = []
    for r in regions:
        devices = {str(t.device) for n in r.nodes for t in tensors_of(meta(n))}
        place = (*sorted(devices), max(level[n] for n in r.nodes))
        reads = {n: sum(t.numel() * t.element_size() for t in tensors_of(meta(n))) for n in r.inputs}
        known.append(None if r.workload is None else candidate(r.workload, place, reads))

    def joins(bundle: Sequence[int], k: int) -> bool:
        return may_join([known[n] for n in bundle], known[k])

    out: list[Region] = []
    for bundle in bundle_groups(order, before, [r.nodes for r in regions], joins):
        alone = [regions[k] for k in bundle]
        out += alone if len(bundle) == 1 else _joined(finder, alone)
    return sorted(out, key=lambda r: finder.place[r.nodes[0]])


def _joined(finder: Finder, regions: list[Region]) -> list[Region]:
    """One region of several, or the several where together they have no workload."""
    try:
        made = finder.region(sorted((n for r in regions for n in r.nodes), key=finder.place.__getitem__))
    except Unsupported:
        return regions
    return regions if made.workload is None else [made]


def _keep(finder: Finder, products: Sequence[fx.Node]) -> None:
    """Have products stored before they are read; those that are and are repeated all the same become opaque."""
    for n in products:
        if n in finder.kept:
            _harden(finder, n)
    finder.kept.update(products)


def _harden(finder: Finder, culprit: fx.Node) -> None:
    """Make a node opaque, together with what cannot be told apart from it: a tuple and its elements."""
    owner = culprit
    while owner.target is operator.getitem:
        owner = owner.args[0]  # type: ignore[assignment]
    finder.hard.update([owner, *(u for u in owner.users if u.target is operator.getitem)])
    finder.once.clear()  # groups are others now

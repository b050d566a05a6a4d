"""Memory of a graph over its run, and the joined regions that would raise its peak.

Joined regions run together, where the first of them would run. The results of the others then exist earlier than
needed. Activation checkpointing computes each layer's activations again just before the layer's backward pass. These
computations depend on stored tensors only, so the regions of all layers could run together, before the first backward
pass, with all activations in memory at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate
from typing import Protocol

from torch import fx

from autotune.compiler.lower.facts import UNKNOWN_BYTES, GraphFacts
from autotune.compiler.lower.nodes import takes_gradients
from autotune.compiler.planner.groups import SMALL_BYTES

_SLACK = 200
"""Inverse of the share of the peak by which joined regions may raise it, in addition to :data:`SMALL_BYTES`."""


class Block(Protocol):
    """A region: its nodes, the tensors that it reads, and the nodes whose results it stores."""

    @property
    def nodes(self) -> tuple[fx.Node, ...]: ...
    @property
    def inputs(self) -> tuple[fx.Node, ...]: ...
    @property
    def outputs(self) -> tuple[fx.Node, ...]: ...


class Lifetimes:
    """The bytes that a graph's tensors occupy at each of its nodes.

    Nodes run in the graph's order, which is autograd's for a backward pass. A region runs at its first result. A tensor
    exists from its node to its last reader. The caller holds a graph's arguments, but a backward pass frees the
    activations among them. Inductor may run nodes in another order. A tensor of unknown size has no bytes here.

    Args:
        regions: of the graph.
        copied: the nodes that every region which reads them computes.

    Attributes:
        used: bytes at each node, arguments of a forward pass left out.
    """

    def __init__(self, facts: GraphFacts, regions: Sequence[Block], copied: AbstractSet[fx.Node] = frozenset()) -> None:
        self._facts, self._regions, self._copied = facts, regions, copied
        self._runs = [min(facts.place[n] for n in region.outputs or region.nodes) for region in regions]
        self._home = {n: k for k, region in enumerate(regions) for n in region.nodes}
        stored = {n for region in regions for n in region.outputs}
        backward = takes_gradients(facts.graph)
        self._begins: dict[fx.Node, int] = {}
        self._ends: dict[fx.Node, int] = {}
        changes: Counter[int] = Counter()
        for n in facts.nodes:
            if not facts[n].is_tensor or facts[n].is_free or (n in self._home and n not in stored) or n in copied:
                continue
            if n.op == "get_attr" or (n.op == "placeholder" and (not backward or str(n.target).startswith("primals"))):
                continue
            self._begins[n] = self._run(n)
            self._ends[n] = max(map(self._run, self._readers(n)), default=self._run(n))
            changes[self._begins[n]] += self._bytes(n)
            changes[self._ends[n] + 1] -= self._bytes(n)
        self.used = list(accumulate(changes[at] for at in range(len(facts.nodes))))
        peak = max(self.used, default=0)
        self._limit = peak + peak // _SLACK + SMALL_BYTES

    def split(self, bundle: Sequence[int], joins: Callable[[Sequence[int], int], bool]) -> list[list[int]]:
        """Divide joined regions, in the order in which they run, so that no part raises the peak.

        Args:
            bundle: numbers of regions.
            joins: returns True if a part accepts another region, without regard to memory.
        """
        if len(bundle) == 1:
            return [list(bundle)]
        if self._fits(bundle):
            return [self._joined(bundle)]
        parts = list[list[int]]()
        part = list[int]()
        for k in sorted(bundle, key=lambda k: self._runs[k]):
            if part and not (joins(part, k) and self._fits([*part, k])):
                parts.append(self._joined(part))
                part = []
            part.append(k)
        return [*parts, self._joined(part)]

    def _run(self, node: fx.Node) -> int:
        """The place where a node runs."""
        return self._runs[self._home[node]] if node in self._home else self._facts.place[node]

    def _readers(self, node: fx.Node) -> set[fx.Node]:
        return self._facts.readers(node, self._copied)

    def _bytes(self, node: fx.Node) -> int:
        size = self._facts[node].bytes
        return size if size < UNKNOWN_BYTES else 0

    def _fits(self, part: Sequence[int]) -> bool:
        added = self._added(self._moved(part))
        return all(size <= 0 or self.used[at] + size <= self._limit for at, size in added)

    def _joined(self, part: Sequence[int]) -> list[int]:
        """A part, whose regions run together from now on."""
        moved = self._moved(part)
        for at, size in self._added(moved):
            self.used[at] += size
        self._begins |= {n: begin for n, (begin, _) in moved.items()}
        self._ends |= {n: end for n, (_, end) in moved.items()}
        first = min(self._runs[k] for k in part)
        for k in part:
            self._runs[k] = first
        return list(part)

    def _moved(self, part: Sequence[int]) -> dict[fx.Node, tuple[int, int]]:
        """The first and last place of tensors, if the regions that make or read them run together."""
        first = min(self._runs[k] for k in part)
        inside = {n for k in part for n in self._regions[k].nodes}
        made = [n for k in part for n in self._regions[k].outputs]
        found = {n: (first, self._ends[n]) for n in (*made, *self._early(part, first))}
        for n in self._read(part):
            others = [self._run(r) for r in self._readers(n) if r not in inside]
            found[n] = min(self._begins[n], first), max([first, *others])
        return found

    def _early(self, part: Sequence[int], first: int) -> list[fx.Node]:
        """The tensors outside of a part that have to be made for it before their place."""
        found: dict[fx.Node, None] = {}
        stack, seen = [n for k in part for n in self._regions[k].inputs], set[fx.Node]()
        while stack:
            for n in self._facts.makers(stack.pop()):
                if n in seen or self._begins.get(n, self._run(n)) <= first:
                    continue
                region = self._regions[self._home[n]] if n in self._home else None
                made, read = (region.outputs, region.inputs) if region else ((n,), n.all_input_nodes)
                seen.update(made)
                found.update(dict.fromkeys(m for m in made if m in self._ends))
                stack += read
        return list(found)

    def _added(self, moved: Mapping[fx.Node, tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Each place where the memory in use changes, with the bytes more."""
        changes: Counter[int] = Counter()
        for n, (begin, end) in moved.items():
            if (begin, end) == (self._begins[n], self._ends[n]):
                continue
            size = self._bytes(n)
            for at, more in ((self._begins[n], -size), (self._ends[n] + 1, size), (begin, size), (end + 1, -size)):
                changes[at] += more
        places = range(min(changes, default=0), min(max(changes, default=0), len(self.used)))
        return zip(places, accumulate(changes[at] for at in places), strict=True)

    def _read(self, part: Sequence[int]) -> list[fx.Node]:
        """The tensors outside of a part that it reads and that end."""
        makers = (m for k in part for n in self._regions[k].inputs for m in self._facts.makers(n))
        return [n for n in dict.fromkeys(makers) if n in self._ends]

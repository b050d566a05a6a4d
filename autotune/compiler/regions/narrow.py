"""Which nodes every region computes for itself, because what they read is fewer bytes than what they make.

A graph in half precision casts a residual to fp32 once, and reads the cast before a matrix product and after it. A
backward pass makes a sigmoid anew from what was saved in half precision, and reads it in two places. Inductor repeats
such work in every kernel that reads it. A region whose result it were would store twice the bytes, and keep them until
the last reader has run. (Where all readers come late, the node waits for them: :mod:`autotune.compiler.regions.delay`.
Casts to a narrower type need no rule: they are in the region of what they cast.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from torch import fx

from autotune.compiler.lower.op_names import PRODUCTS
from autotune.compiler.lower.translate import meta, op_name
from autotune.compiler.regions.tensors import bytes_of, is_float8, is_pointwise
from autotune.compiler.regions.wide import is_wide

MOST_REPEATED = 8
"""Operators that a region repeats for one tensor. A random number's hash, of twice as many, is read from memory."""

Nodes = AbstractSet[fx.Node]


def copied_nodes(
    groups: Sequence[Sequence[fx.Node]],
    readers: Callable[[fx.Node], Nodes],
    producers: Callable[[fx.Node], Sequence[fx.Node]],
    stored: Mapping[fx.Node, Nodes],
    once: Nodes = frozenset(),
) -> set[fx.Node]:
    """The pointwise nodes that each region which reads them computes: none of them is a region's result.

    Args:
        groups: the nodes of each region, in graph order.
        readers, producers: what reads a node and what it reads, as they are or through views.
        stored: what a node reads from memory only. A matrix product would repeat the work for each multiplication.
        once: what is not to be repeated.
    """
    home = {n: k for k, nodes in enumerate(groups) for n in nodes}
    copied: set[fx.Node] = set()
    inner: dict[fx.Node, tuple[Nodes, Nodes]] = {}  # of what is worth repeating: what that repeats and reads
    for n in home:
        if not is_pointwise(n) or is_wide(n) or is_float8(n) or n in once:
            continue
        others = {r for r in readers(n) if home.get(r) != home[n]}
        multiplied = any(op_name(r) in PRODUCTS and n in stored.get(r, ()) for r in others)
        if multiplied or not others <= home.keys():
            continue  # it is stored in any case
        work, reads = {n}, set[fx.Node]()
        for p in producers(n):
            more, theirs = inner.get(p, ((), (p,))) if home.get(p) == home[n] else ((), (p,))
            work.update(more)
            reads.update(theirs)
        if len(work) <= MOST_REPEATED and sum(bytes_of(meta(p)) for p in reads) < bytes_of(meta(n)):
            inner[n] = work, reads
            copied |= work if others else set()
    return copied

"""How the threads of the outer scheme join what they carry: in a warp, in a block, in a cluster.

Partial results meet by shuffles where a warp spans several places of the reduced axes, then in shared memory, then,
with a cluster, in each other's shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from autotune.compiler.kernel.nodes import Assign, Cast, Const, Expr, Item, Select, Stmt, Var, when
from autotune.compiler.program.program import Pass
from autotune.compiler.targets.cuda.device import (
    BARRIER,
    CLUSTER_ARRIVE,
    CLUSTER_BARRIER,
    CLUSTER_RANK,
    CLUSTER_WAIT,
    THREAD,
    Shared,
    remote_store,
    shuffle,
)
from autotune.compiler.targets.cuda.outer.exchange import Part, exchange, joined
from autotune.compiler.targets.cuda.outer.lanes import Lanes
from autotune.compiler.targets.cuda.outer.share import ALONG, LANE, SHARED_ALONG, WARP, Share, quotient

DEEP = Var("deep", "int32")
"""Place of the thread along the reduced axes."""
RANK = Var("rank", "int32")
"""Number of the block in its cluster."""
INSIDE = Var("inside", "bool")
"""Whether something that is read again where there is nothing more is there."""
_PART, _WITHIN = Var("part", "int32"), Var("within", "int32")
"""Number of the warp, or row of warps, along the reduced axes, and the thread's place there."""
_REGIONS = Var("region0", "int32"), Var("region1", "int32")
_LAST = Var("last", "int32")


class Joins:
    """The joins of one kernel, in the order of its passes."""

    def __init__(self, lanes: Lanes) -> None:
        schedule = lanes.schedule
        self.lanes, self.block = lanes, schedule.block
        self.threads, self.deep, self.cluster = schedule.threads_per_row, schedule.rows_per_block, schedule.cluster
        self.within = max(1, WARP // self.threads)  # places of the reduced axes within a warp
        self.parts = self.deep // self.within  # partial results a block has after its shuffles
        self.passes = [pas for pas in lanes.program.passes if pas.reduce or pas.online]
        # Joins take turns with two regions, of which one is always free.
        self.regions = 2 if len(self.passes) > 1 or schedule.blocks_per_sm else 1
        self.share = Share(self.threads, lanes.vec)
        self.cluster_words: dict[str, int] = {}

    def numbers(self) -> list[Stmt]:
        """Numbers the threads by warps."""
        if self.within == 1:
            return [Assign(_PART, DEEP)]
        within = Cast("int32", DEEP - _PART * self.within)
        return [Assign(_PART, quotient(DEEP, self.within)), Assign(_WITHIN, within)]

    def arrays(self) -> list[Stmt]:
        """Makes the arrays in shared memory, once all joins are known."""
        out: list[Stmt] = []
        if self.parts > 1:
            types = sorted({f.dtype for pas in self.passes for f in self.lanes.fields(pas)})
            out += [Shared(_array(t), self.regions * self._region(t), t) for t in types]
            if self.regions > 1:
                out += [Assign(region, Const(k, "int32")) for k, region in enumerate(_REGIONS)]
        if self.cluster > 1:
            out.append(Assign(RANK, CLUSTER_RANK))
            out += [Shared(_cluster_array(t), n, t) for t, n in self.cluster_words.items()]
            out.append(CLUSTER_ARRIVE)  # no block may write to one that has not begun: see _across()
        return out

    def next_strip(self) -> list[Stmt]:
        """What the last join left is still read where the next strip's first one is left."""
        if len(self.passes) % 2 == 0 or self.parts == 1:
            return []
        one, other = _REGIONS
        return [Assign(one, other), Assign(other, Cast("int32", 1 - one))]

    def in_warp(self, pas: Pass) -> list[Stmt]:
        """Joins the places of the reduced axes that a warp spans."""
        return self._shuffles(pas, [n for n in (16, 8, 4, 2, 1) if n >= self.threads])

    def leave(self, pas: Pass) -> list[Stmt]:
        """Each warp (or row of warps) leaves its part in shared memory."""
        writes = [Assign(self._slot(pas, f, _PART), f) for f in self.lanes.fields(pas)]
        return [*([when(_WITHIN.equals(0), writes)] if self.within > 1 else writes), BARRIER]

    def collect(self, pas: Pass) -> list[Stmt]:
        """Every thread joins all parts; a warp that spans several places reads a share and shuffles."""
        fields, shared = self.lanes.fields(pas), self._shares(pas)
        if shared:
            numbers, distances = self.share.turns(self.parts)
            heads = [*self.lanes.fields(pas, one=True)]
            parts = [Part((), {f: self._slot(pas, f, at, shared) for f in heads}) for at in numbers]
            out = [*self.share.begin(), *self._joined(pas, parts, one=True), *self._shuffles(pas, distances, one=True)]
            return out + (self.share.spread([*fields], heads) if self.cluster == 1 else [])
        parts = []
        for first in range(0, self.parts, self.within):
            at: Expr = _WITHIN + first if self.within > 1 else Const(first)
            if first + self.within <= self.parts:
                parts.append(Part((), {f: self._slot(pas, f, at) for f in fields}))
                continue
            last = Select(INSIDE, Cast("int32", at), Const(self.parts - 1, "int32"))
            reads = {f: Select(INSIDE, self._slot(pas, f, _LAST), nothing) for f, nothing in fields.items()}
            parts.append(Part((Assign(INSIDE, at < self.parts), Assign(_LAST, last)), reads))
        return self._joined(pas, parts) + self.in_warp(pas)

    def across(self, pas: Pass) -> list[Stmt]:
        """Joins the blocks of a cluster: some threads of each write its part to every block, in slots of this join."""
        first: dict[Var, int] = {}
        for f in self.lanes.fields(pas):
            first[f] = self.cluster_words.get(f.dtype, 0)
            self.cluster_words[f.dtype] = first[f] + self.cluster * self.threads
        shared, width = self._shares(pas), self.share.width
        numbers: list[Expr] = [Const(k) for k in range(self.cluster)]
        distances: list[int] = []
        to: Expr = Cast("int32", DEEP)
        senders = self.cluster > DEEP
        if shared:
            to, senders = quotient(THREAD, width), width * self.cluster > THREAD
            numbers, distances = self.share.turns(self.cluster)

        def slot(f: Var, block: Expr) -> Expr:
            begin: Expr = Const(first[f])
            if shared:
                begin = begin + LANE * (self.cluster * self.threads)
            return begin + block * self.threads + (SHARED_ALONG if shared else ALONG)

        fields = [*self.lanes.fields(pas, shared)]
        sends = [remote_store(_cluster_array(f.dtype), Cast("int64", slot(f, RANK)), to, f) for f in fields]
        parts = [Part((), {f: _cluster_array(f.dtype)[slot(f, k)] for f in fields}) for k in numbers]
        out: list[Stmt] = [CLUSTER_WAIT] if pas is self.passes[0] else []
        out += [when(senders, sends), CLUSTER_BARRIER, *self._joined(pas, parts, shared)]
        if shared:
            out += self._shuffles(pas, distances, one=True) + self.share.spread([*self.lanes.fields(pas)], fields)
        return out

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _shares(self, pas: Pass) -> bool:
        """Whether a join is shared out: not where the finish of partials has little to join anyway."""
        lanes, width = self.lanes, self.share.width
        values = [*pas.reduce, *(pair.peak for pair in pas.online)]
        whole = all(lanes.lanes(i) == lanes.vec for i in values)
        fits = self.parts > 1 and self.parts & (self.parts - 1) == 0 and lanes.vec > 1 and not lanes.tile
        much = self.cluster > 1 or bool(pas.online)
        return whole and fits and much and width <= WARP and width * self.cluster <= self.block

    def _shuffles(self, pas: Pass, distances: Iterable[int], one: bool = False) -> list[Stmt]:
        partners = [partial(shuffle, distance=n) for n in distances]
        return exchange(self.lanes.plain(pas, one), self.lanes.online(pas, one), partners)

    def _joined(self, pas: Pass, parts: list[Part], one: bool = False) -> list[Stmt]:
        return joined(self.lanes.plain(pas, one), self.lanes.online(pas, one), parts)

    def _region(self, type_: str) -> int:
        """Elements of a type that the partials of one join take, at most."""
        most = max(sum(f.dtype == type_ for f in self.lanes.fields(pas)) for pas in self.passes)
        return most * self.parts * self.threads

    def _slot(self, pas: Pass, f: Var, part: Expr, shared: bool = False) -> Item:
        """Where field ``f`` of a part lies.

        ``shared``: where that of this thread's column does, ``f`` being its first lane's.
        """
        same = [g for g in self.lanes.fields(pas) if g.dtype == f.dtype]
        column = part * len(same) + same.index(f)
        at = (column + LANE if shared else column) * self.threads
        if self.regions > 1:
            at = _REGIONS[self.passes.index(pas) % 2] * self._region(f.dtype) + at
        return _array(f.dtype)[at + (SHARED_ALONG if shared else ALONG)]


def _array(type_: str) -> Var:
    return Var(f"parts_{type_}")


def _cluster_array(type_: str) -> Var:
    return Var(f"cluster_{type_}")

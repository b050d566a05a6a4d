"""Reductions across the threads of a strip, many at a time, so that their exchanges overlap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from autotune.compiler.kernel.lower import OnlineSoftmax, Plain, finite, maximum, moved
from autotune.compiler.kernel.nodes import Assign, Cast, Const, Expr, Item, Select, Stmt, Var, when
from autotune.compiler.targets.cuda.device import (
    CLUSTER_ARRIVE,
    CLUSTER_RANK,
    THREAD,
    remote_store,
    shuffle,
    shuffle_from,
)
from autotune.compiler.targets.cuda.threads import WARP, Reductions, SharedArrays, StripThreads, quotient


@dataclass(frozen=True)
class StripPass:
    """Reductions that threads of a strip carry of one pass, one a lane; ``fields`` have their identities."""

    number: int
    plain: Sequence[Plain]
    online: Sequence[OnlineSoftmax]
    fields: Mapping[Var, Const]
    heads: StripPass | None = None
    """The same of the first lane alone."""


class StripReductions(Reductions[StripPass]):
    """Reductions across the threads at one index of the kept axes.

    If a strip has at most as many columns as a warp has threads, the threads of a warp share the work. Each combines
    one column, and the remaining groups of threads take the parts in turn. Meanwhile a column's results are in the
    variables of the thread's first lane; :meth:`spread` returns each thread the results of its columns.

    Args:
        passes: the passes with reductions.
        several: True if a block reduces more than once.
        share: True if threads may share the work.
    """

    regions = Var("region0", "int32"), Var("region1", "int32")
    """Reductions alternate between two regions, so that one is always free."""
    lane, column_along = Var("shared_lane", "int32"), Var("shared_along", "int32")
    """The column that a thread combines: its lane, and the index of its thread along the kept axes."""
    column, column_group = Var("shared_column", "int32"), Var("shared_group", "int32")

    def __init__(self, threads: StripThreads, passes: Sequence[StripPass], several: bool, share: bool) -> None:
        self.threads, self.passes, self.several = threads, passes, several
        group, types = threads.group, sorted({f.dtype for carried in passes for f in carried.fields})
        most = {t: max(sum(f.dtype == t for f in carried.fields) for carried in passes) for t in types}
        self.region = {t: n * group.parts * threads.across for t, n in most.items()}
        sizes = {t: n * (2 if several else 1) for t, n in self.region.items()}
        super().__init__(group, SharedArrays("parts_", sizes), SharedArrays("cluster_"))
        fits = group.parts > 1 and group.parts & (group.parts - 1) == 0 and threads.vec > 1
        block = threads.across * threads.down
        self.share = share and fits and threads.width <= WARP and threads.width * threads.cluster <= block

    def declared(self) -> list[Stmt]:
        """The arrays in shared memory, once all reductions are known."""
        out: list[Stmt] = []
        if self.group.parts > 1:
            out += self.of_warps.declared()
            if self.several:
                out += [Assign(region, Const(k, "int32")) for k, region in enumerate(self.regions)]
        if self.group.cluster > 1:
            out += [Assign(self.threads.rank, CLUSTER_RANK), *self.of_blocks.declared()]
            out.append(CLUSTER_ARRIVE)  # no block may write to one that has not begun: see reduce()
        return out

    def next_strip(self) -> list[Stmt]:
        """The last reduction's parts are still read while the next strip's first ones are written."""
        if len(self.passes) % 2 == 0 or self.group.parts == 1:
            return []
        one, other = self.regions
        return [Assign(one, other), Assign(other, Cast("int32", 1 - one))]

    def in_warp(self, carried: StripPass) -> list[Stmt]:
        return exchange(carried, self.group.distances)

    def store_parts(self, carried: StripPass) -> list[Stmt]:
        writes = [Assign(self.part_of(carried, f, self.threads.part), f) for f in carried.fields]
        return [when(self.threads.within.equals(0), writes)] if self.group.within > 1 else [*writes]

    def collect(self, carried: StripPass) -> list[Stmt]:
        """Every thread combines all parts; a warp that spans several places reads a share and shuffles."""
        threads, within, count = self.threads, self.group.within, self.group.parts
        if heads := self.shared(carried):
            numbers, distances = self.turns(count)
            read = [{f: self.part_of(carried, f, at, True) for f in heads.fields} for at in numbers]
            out = [*self.share_columns(), *combined(heads, read), *exchange(heads, distances)]
            return out + (self.spread([*carried.fields], [*heads.fields]) if self.group.cluster == 1 else [])
        last, parts, before = Var("last", "int32"), list[Mapping[Var, Expr]](), list[Stmt]()
        for first in range(0, count, within):
            at: Expr = threads.within + first if within > 1 else Const(first)
            if first + within <= count:
                parts.append({f: self.part_of(carried, f, at) for f in carried.fields})
                continue
            inside = threads.inside  # threads without a part read the last one, and drop it
            before = [Assign(inside, at < count)]
            before.append(Assign(last, Select(inside, Cast("int32", at), Const(count - 1, "int32"))))
            fields = carried.fields.items()
            parts.append({f: Select(inside, self.part_of(carried, f, last), nothing) for f, nothing in fields})
        return combined(carried, parts, before) + self.in_warp(carried)

    def in_cluster(self, carried: StripPass) -> tuple[Stmt, list[Stmt]]:
        threads, size, heads = self.threads, self.group.cluster, self.shared(carried)
        first = {f: self.of_blocks.take(f.dtype, size * threads.across) for f in carried.fields}
        numbers: list[Expr] = [Const(k) for k in range(size)]
        distances: list[int] = []
        to: Expr = Cast("int32", threads.line)
        senders = size > threads.line
        if heads:
            to, senders = quotient(THREAD, threads.width), threads.width * size > THREAD
            numbers, distances = self.turns(size)

        def slot(f: Var, block: Expr) -> Expr:
            begin: Expr = Const(first[f])
            if heads:
                begin = begin + self.lane * (size * threads.across)
            return begin + block * threads.across + (self.column_along if heads else threads.along)

        fields, array = (heads or carried).fields, self.of_blocks.array
        sends = [remote_store(array(f.dtype), Cast("int64", slot(f, threads.rank)), to, f) for f in fields]
        parts = [{f: array(f.dtype)[slot(f, k)] for f in fields} for k in numbers]
        out = combined(heads or carried, parts)
        if heads:
            out += exchange(heads, distances) + self.spread([*carried.fields], [*fields])
        return when(senders, sends), out

    def part_of(self, carried: StripPass, f: Var, part: Expr, shared: bool = False) -> Item:
        """The word of field ``f`` of a part; ``shared``: that of this thread's column, ``f`` being its first lane's."""
        same = [g for g in carried.fields if g.dtype == f.dtype]
        column = part * len(same) + same.index(f)
        at = (column + self.lane if shared else column) * self.threads.across
        if self.several:
            at = self.regions[carried.number % 2] * self.region[f.dtype] + at
        return self.of_warps.array(f.dtype)[at + (self.column_along if shared else self.threads.along)]

    # ---- work that the threads of a warp share ----------------------------------------------------------------------

    def shared(self, carried: StripPass) -> StripPass | None:
        """Reductions of a thread's one column, where threads share the work. The finish of partials has too little to
        combine."""
        heads = carried.heads
        much = self.group.cluster > 1 or bool(carried.online)
        whole = heads is not None and len(carried.fields) == self.threads.vec * len(heads.fields)
        return heads if self.share and whole and much else None

    def share_columns(self) -> list[Stmt]:
        """Numbers the thread's column, and its group of threads in the warp."""
        width, vec = self.threads.width, self.threads.vec
        return [
            Assign(self.column, Cast("int32", THREAD & (width - 1))),
            Assign(self.lane, Cast("int32", self.column & (vec - 1))),
            Assign(self.column_along, quotient(self.column, vec)),
            Assign(self.column_group, quotient(Cast("int32", THREAD & (WARP - 1)), width)),
        ]

    def turns(self, parts: int) -> tuple[list[Expr], list[int]]:
        """The numbers of the parts that a thread reads, and the shuffles' distances that combine what groups read."""
        whole = WARP // self.threads.width
        groups = min(whole, parts)
        per_group = parts // groups
        group: Expr = self.column_group if groups == whole else self.column_group & (groups - 1)
        numbers: list[Expr] = [group * per_group + k if groups > 1 else Const(k) for k in range(per_group)]
        return numbers, [self.threads.width << n for n in reversed(range(groups.bit_length() - 1))]

    def spread(self, fields: Sequence[Var], heads: Sequence[Var]) -> list[Stmt]:
        """Give each thread the results of its columns, for all ``fields`` from those of the first lane."""
        out: list[Stmt] = []
        of_lane = [(head, fields[fields.index(head) + e], e) for head in heads for e in range(self.threads.vec)]
        for head, var, lane in of_lane:
            own = Cast("int32", self.threads.along * self.threads.vec + lane)
            out.append(Assign(_named("own", var), shuffle_from(head, own)))
        return out + [Assign(var, _named("own", var)) for _, var, _ in of_lane]


def exchange(carried: StripPass, distances: Sequence[int]) -> list[Stmt]:
    """Combines each lane with those at these distances, one after the other.

    Online pairs find their maximum first and then rescale each sum to it once. This takes one exponential per sum;
    merging pair by pair takes two per step.
    """
    if not distances:
        return []
    best = {o: _named("best", o.peak) for o in carried.online}
    partners: list[Callable[[Expr], Expr]] = [partial(shuffle, distance=n) for n in distances]
    out: list[Stmt] = [Assign(b, o.peak) for o, b in best.items()]
    for partner in partners:
        out += [Assign(_named("other", b), partner(b)) for b in best.values()]
        out += [Assign(b, maximum(b, _named("other", b))) for b in best.values()]
    shift = Var("sm", "float32")
    for o, b in best.items():
        out += [Assign(shift, finite(b)), Assign(o.total, moved(o.total, o.peak, shift)), Assign(o.peak, b)]
    sums = [*carried.plain, *(Plain("sum", "float32", o.total, o.total) for o in carried.online)]
    for partner in partners:
        out += [Assign(_named("other", p.carried), partner(p.carried)) for p in sums]
        out += [s for p in sums for s in p.merge([_named("other", p.carried)])]
    return out


def combined(carried: StripPass, parts: Sequence[Mapping[Var, Expr]], before_last: Sequence[Stmt] = ()) -> list[Stmt]:
    """Sets each variable to the combination of several parts; ``before_last``: statements before the last is read."""
    plain, online, out = carried.plain, carried.online, list[Stmt]()
    before = [*((),) * (len(parts) - 1), before_last]
    if len(parts) == 1:
        return [*before_last, *(Assign(var, x) for var, x in parts[0].items())]
    for k, part in enumerate(parts if online else ()):
        peaks = [(o.peak, part[o.peak]) for o in online]
        out += [*before[k], *(Assign(peak, maximum(peak, x) if k else x) for peak, x in peaks)]
    shift = {o: _named("best", o.peak) for o in online}
    out += [Assign(shift[o], finite(o.peak)) for o in online]
    for k, part in enumerate(parts):
        out += before[k]
        out += [Assign(_named("other", p.carried) if k else p.carried, part[p.carried]) for p in plain]
        out += [s for p in plain if k for s in p.merge([_named("other", p.carried)])]
        for o in online:
            total = moved(part[o.total], part[o.peak], shift[o])
            out.append(Assign(o.total, o.total + total if k else total))
    return out


def _named(prefix: str, var: Var) -> Var:
    return Var(f"{prefix}_{var.name}", var.dtype)

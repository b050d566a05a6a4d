"""Joining the threads of a row: within a warp, across warps, across the blocks of a cluster.

The warps of a block leave their parts in its shared memory. The blocks of a cluster hold their own part in all threads;
some of these write it to each other block (distributed shared memory), a cluster barrier follows, and every thread
combines all parts in the order of the blocks, so that all come to the same number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autotune.compiler.kernel.lower import tree
from autotune.compiler.kernel.nodes import Assign, Cast, Const, Expr, Stmt, Var, when
from autotune.compiler.kernel.reducers import ZERO, PassReducers, Plain
from autotune.compiler.targets.cuda.device import BARRIER, CLUSTER_BARRIER, CLUSTER_WAIT, THREAD, remote_store, shuffle
from autotune.compiler.targets.cuda.rows.moments import COUNT, Elements
from autotune.compiler.targets.cuda.rows.pairs import Pairs
from autotune.compiler.targets.cuda.rows.shape import LANE, PART, RANK, WARP, Shape
from autotune.compiler.targets.cuda.rows.slots import Places, Slots


def _float(name: str) -> Var:
    return Var(name, "float32")


class Joins:
    """The joins of one kernel.

    Attributes:
        slots: where warps meet.
        places: where the blocks of a cluster meet. Each join has its own, so that no block writes to what another still
            reads.
        barriers: how many of the block's barriers they take.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.slots, self.places = Slots(shape), Places("q", shape.cluster)
        self.barriers = 0
        self.begun = False  # whether the cluster's other blocks are known to have begun

    def statements(self, reducers: PassReducers) -> list[Stmt]:
        """What joins the threads of a row once a pass is walked, and gives the results their names; of online softmax
        the fields stay as they are."""
        elements = Elements(self.shape)
        out = elements.begin() if reducers.moments else []
        pairs = Pairs(self.shape, self.slots, reducers.plain.values())
        for distance in (n for n in (16, 8, 4, 2, 1) if n < self.shape.threads_per_row):
            out += pairs.halve() if distance == 16 else []
            out += self._exchange(reducers, pairs.single if distance == 16 else pairs.carried, elements, distance)
        if self.shape.warps > 1:
            out += self._across_warps(reducers, pairs, elements)
        if self.shape.cluster > 1:
            out += self._across_blocks(reducers, elements)
        for m in reducers.moments:
            out += m.finish(self.shape.vec == 1)
        return out + [r.finish() for r in reducers.plain.values()]

    def _exchange(
        self, reducers: PassReducers, plain: Iterable[Plain], elements: Elements, distance: int
    ) -> list[Stmt]:
        """Join each lane with the one ``distance`` away."""
        out: list[Stmt] = []

        def other(name: str, x: Var) -> Var:
            read = Var(name, x.dtype)
            out.append(Assign(read, shuffle(x, distance)))
            return read

        for r in plain:
            out += r.merge([other("y" if r.carried.dtype == "float32" else f"y{r.carried.dtype}", r.carried)])
        for o in reducers.online:
            out += o.merge([other("ym", o.peak), other("yt", o.total)])
        if reducers.moments:
            count = other("yn", COUNT) if elements.uneven else COUNT
            for m in reducers.moments:
                parts = [other("ys", m.total), other("yq", m.square)]
                out += replace(m, sides=elements.sides(count)).merge(parts)
            out += elements.joined(count)
        return out

    def _across_warps(self, reducers: PassReducers, pairs: Pairs, elements: Elements) -> list[Stmt]:
        """Lane 0 of each warp leaves its part in shared memory; after one barrier every warp combines all parts."""
        self.barriers += 1
        parts = [
            (f, nothing, self.slots.take(f.dtype))
            for r in (*pairs.single, *reducers.online, *reducers.moments)
            for f, nothing in zip(r.fields, r.identity, strict=True)
        ]
        if reducers.moments and elements.uneven:
            parts.append((COUNT, ZERO, self.slots.take("float32")))
        out: list[Stmt] = []
        if parts:
            out.append(when(LANE.equals(0), [Assign(self.slots.at(f.dtype, n, WARP), f) for f, _, n in parts]))
        out += [*pairs.leave(), BARRIER]
        out += [Assign(f, self.slots.part(nothing, n, PART)) for f, nothing, n in parts]
        out += pairs.collect()
        distance = self.shape.whole_warps // 2
        while distance:
            out += self._exchange(reducers, pairs.single if distance == 16 else pairs.carried, elements, distance)
            distance //= 2
        return out + pairs.share()

    def _across_blocks(self, reducers: PassReducers, elements: Elements) -> list[Stmt]:
        size = self.shape.cluster
        fields = [*reducers.fields, *([COUNT] if reducers.moments and elements.uneven else [])]
        first = {f: self.places.take(f.dtype) * size for f in fields}

        def part(f: Var, block: int) -> Expr:
            return self.places.array(f.dtype)[first[f] + block]

        out: list[Stmt] = [] if self.begun else [CLUSTER_WAIT]
        self.begun = True
        sends = [
            remote_store(
                self.places.array(f.dtype), Cast("int64", Const(at)) + Cast("int64", RANK), Cast("int32", THREAD), f
            )
            for f, at in first.items()
        ]
        out += [when(THREAD < size, sends), CLUSTER_BARRIER]
        for r in reducers.plain.values():
            out.append(Assign(r.carried, tree(r.op, r.dtype, [part(r.carried, block) for block in range(size)])))
        for o in reducers.online:
            out += [Assign(f, part(f, 0)) for f in o.fields]
            for block in range(1, size):
                out += [Assign(_float("ym"), part(o.peak, block)), Assign(_float("yt"), part(o.total, block))]
                out += o.merge([_float("ym"), _float("yt")])
        before, own = _float("na"), _float("nb")
        for m in reducers.moments:
            out += [Assign(f, part(f, 0)) for f in m.fields]
            each = Const(elements.each, "float32")
            numbers = [part(COUNT, block) if elements.uneven else each for block in range(size)]
            out.append(Assign(before, numbers[0]))
            for block in range(1, size):
                out.append(Assign(own, numbers[block]))
                out += replace(m, sides=(before, own)).merge([part(f, block) for f in m.fields])
                out.append(Assign(before, before + own))
        return out

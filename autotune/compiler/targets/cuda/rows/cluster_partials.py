"""Partials over the rows joined by the blocks of a cluster before they go to memory: the finish reads so many fewer.

Each block sends what its threads hold to the blocks of its cluster, a slice of the columns to each (distributed shared
memory); after a cluster barrier every block combines all parts of its own slice, in the order of the blocks, and stores
them. One row of partials a cluster results.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from operator import add

from autotune.compiler.kernel.nodes import Assign, Cast, Const, Expr, Pointer, Stmt, Store, Var, both, when
from autotune.compiler.targets.cuda.counts import Counts
from autotune.compiler.targets.cuda.device import THREAD, ClusterBarrier, ClusterWait, RemoteStore, Shared
from autotune.compiler.targets.cuda.rows.columns import JOINED, PACK_COLUMN, TOTAL, Accumulators, Unit, merged
from autotune.compiler.targets.cuda.rows.shape import BLOCK_THREAD, FIRST_COLUMN, LEAD, RANK, ROW_GROUP
from autotune.errors import Unsupported

MOST_SHARED = 44 * 1024
"""Bytes of static shared memory for joining, the parts of others included; what takes more goes in rounds."""
BLOCK_COUNTS = Var("dc", "float32")
"""Rows of each block of the cluster, in shared memory."""
DESTINATION, POSITION = Var("dest", "int32"), Var("pos", "int32")
"""The block that joins the thread's columns, and the thread's place among those whose columns it joins."""


@dataclass(frozen=True)
class _Place:
    """A unit and the first element of its slots in the array of its type."""

    unit: Unit
    first: int


class Joint:
    """What follows the row loop of a kernel whose blocks join their partials in clusters; as :class:`Accumulators`."""

    def __init__(self, held: Accumulators) -> None:
        self.held, self.shape = held, held.shape
        self.room = MOST_SHARED - sum(array.bytes for array in held.arrays())
        self.size, threads = self.shape.joined, self.shape.threads_per_row
        if threads % self.size:
            raise Unsupported(f"columns of {threads} threads among {self.size} blocks")
        self.slice = threads // self.size  # threads whose columns one block joins
        self.counts: dict[str, int] = {}  # elements of each type's array
        self.rounds = self._rounds()

    def _slots(self, unit: Unit) -> int:
        """Elements that each variable of a unit takes: one from each thread, or one a block."""
        return self.size if unit.pack is None else self.shape.threads_per_row

    def _rounds(self) -> list[list[_Place]]:
        """The units in rounds that fit in shared memory at a time."""
        out: list[list[_Place]] = [[]]
        used: dict[str, int] = {}
        for unit in self.held.units():
            t, elements = unit.variables[0].dtype, len(unit.variables) * self._slots(unit)
            after = used | {t: used.get(t, 0) + elements}
            if out[-1] and _bytes(after) > self.room:
                out.append([])
                used, after = {}, {t: elements}
            if _bytes(after) > self.room:
                raise Unsupported(f"{_bytes(after)} bytes of partials of a pack")
            out[-1].append(_Place(unit, used.get(t, 0)))
            used = after
            for name, n in used.items():
                self.counts[name] = max(self.counts.get(name, 0), n)
        return out

    def arrays(self) -> list[Shared]:
        """Shared memory where row groups and blocks meet."""
        out = [*self.held.arrays(), *(Shared(_array(t), n, t) for t, n in self.counts.items())]
        return out + ([Shared(BLOCK_COUNTS, self.size, "float32")] if self.held.moments else [])

    def end(self) -> list[Stmt]:
        """After the row loop."""
        out: list[Stmt] = [
            *self.held.leave_counts(),
            Assign(DESTINATION, Counts().quotient(BLOCK_THREAD, self.slice)),
            Assign(POSITION, Cast("int32", BLOCK_THREAD - DESTINATION * self.slice)),
            ClusterWait(),
        ]
        if self.held.moments:
            send = RemoteStore(BLOCK_COUNTS, Cast("int64", RANK), Cast("int32", THREAD), TOTAL)
            out += [*self.held.total_count(), when(THREAD < self.size, [send])]
        for n, places in enumerate(self.rounds):
            for place in places:
                out += self.held.gather(place.unit) + self._send(place)
            out.append(ClusterBarrier())
            for k, place in enumerate(places):
                out.append(self._collect(place, k % self.size))
            if n + 1 < len(self.rounds):  # nobody writes to what another still reads
                out.append(ClusterBarrier())
        if self.held.moments:
            total = reduce(add, [BLOCK_COUNTS[block] for block in range(self.size)])
            store = Store("float32", "default", Pointer(self.held.first), Cast("int64", LEAD), (total,))
            out.append(when(self._lead, [store]))
        return out

    @property
    def _lead(self) -> Expr:
        """Whether the thread stores what the cluster has one number of."""
        return both(THREAD.equals(0), RANK.equals(0), self.shape.first_tile)

    def _send(self, place: _Place) -> list[Stmt]:
        """Threads of row group 0 send their lanes to the block that joins them; rows of threads keep banks apart."""
        unit = place.unit
        out: list[Stmt] = []
        for n, x in enumerate(unit.variables):
            first = Const(place.first + n * self._slots(unit))
            at, to = first + RANK * self.slice + POSITION, DESTINATION
            if unit.pack is None:
                out.append(RemoteStore(_array(x.dtype), Cast("int64", first + RANK), Const(0, "int32"), x))
            else:
                out.append(RemoteStore(_array(x.dtype), Cast("int64", at), to, x))
        if unit.pack is None:
            return [when(THREAD.equals(0), out)]
        return [when(ROW_GROUP.equals(0), out)] if self.shape.rows_per_block > 1 else out

    def _collect(self, place: _Place, worker: int) -> Stmt:
        """Slice ``worker`` of the threads combines all parts of a unit and stores them."""
        unit, shape = place.unit, self.shape
        c = self.held.columns[unit.column]
        first = {x: place.first + n * self._slots(unit) for n, x in enumerate(unit.variables)}

        def part(x: Var, block: int) -> Expr:
            if unit.pack is None:
                return _array(x.dtype)[first[x] + block]
            return _array(x.dtype)[Cast("uint32", Const(first[x] + block * self.slice) + POSITION)]

        out: list[Stmt] = [Assign(x, part(x, 0)) for x in first]
        if c.kind == "moments":
            out.append(Assign(JOINED, BLOCK_COUNTS[0]))
        for block in range(1, self.size):
            out += merged(c, unit.parts, partial(part, block=block), BLOCK_COUNTS[block])
        lead: Expr = Cast("int64", LEAD)
        if unit.pack is None:
            return when(self._lead, [*out, *self.held.stores(unit, lead)])
        thread = Const(unit.pack) * shape.threads_per_row + RANK * self.slice + POSITION
        out.append(Assign(PACK_COLUMN, shape.number(thread * shape.vec + FIRST_COLUMN)))
        out.append(when(PACK_COLUMN < shape.columns, self.held.stores(unit, lead * shape.columns + PACK_COLUMN)))
        own = DESTINATION.equals(worker)
        return when(both(own, ROW_GROUP.equals(0) if shape.rows_per_block > 1 else None), out)


def _array(dtype: str) -> Var:
    return Var(f"d{dtype}", dtype)


def _bytes(elements: dict[str, int]) -> int:
    return sum(Shared(_array(t), n, t).bytes for t, n in elements.items())

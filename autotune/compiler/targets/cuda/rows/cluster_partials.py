"""Partials over the rows joined by the blocks of a cluster before they go to memory: the finish reads so many fewer.

Each block sends what its threads hold to the blocks of its cluster, a slice of the columns to each (distributed shared
memory); after a cluster barrier every block combines all parts of its own slice, in the order of the blocks, and stores
them. One row of partials a cluster results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.compiler.targets.cuda.operators import accumulator, combine
from autotune.compiler.targets.cuda.rows.columns import SHORT, Accumulators, Unit, join_moments
from autotune.errors import Unsupported

if TYPE_CHECKING:
    from autotune.compiler.targets.cuda.rows.kernel import Rows

MOST_SHARED = 44 * 1024
"""Bytes of static shared memory for joining, the parts of others included; what takes more goes in rounds."""


@dataclass(frozen=True)
class _Place:
    """A unit and the first element of its slots in the array of its type."""

    unit: Unit
    first: int


class Joint:
    """The lines after the row loop of a kernel whose blocks join their partials in clusters."""

    def __init__(self, held: Accumulators, taken: int) -> None:
        """``taken``: bytes of static shared memory that are set aside for other things."""
        self.h: Accumulators = held
        self.room = MOST_SHARED - taken
        self.r: Rows = held.r
        self.size = self.r.joined
        if self.r.T % self.size:
            raise Unsupported(f"columns of {self.r.T} threads among {self.size} blocks")
        self.slice = self.r.T // self.size  # threads whose columns one block joins
        self.arrays: dict[str, int] = {}  # elements of each type's array

    def type_of(self, unit: Unit) -> str:
        return accumulator(self.h.p.columns[unit.column].dtype)

    def slots(self, unit: Unit) -> int:
        """Elements a unit takes: one from each thread and lane, or one a block."""
        width = sum(len(names) for names in unit.names.values())
        return width * (self.size if unit.pack is None else self.r.T)

    def rounds(self) -> list[list[_Place]]:
        """The units in rounds that fit in shared memory at a time."""
        out: list[list[_Place]] = [[]]
        used: dict[str, int] = {}
        for unit in self.h.units():
            t = self.type_of(unit)
            after = used | {t: used.get(t, 0) + self.slots(unit)}
            if out[-1] and _bytes(after) > self.room:
                out.append([])
                used, after = {}, {t: self.slots(unit)}
            if _bytes(after) > self.room:
                raise Unsupported(f"{_bytes(after)} bytes of partials of a pack")
            out[-1].append(_Place(unit, used.get(t, 0)))
            used = after
            for name, n in used.items():
                self.arrays[name] = max(self.arrays.get(name, 0), n)
        return out

    def lines(self) -> tuple[list[str], list[str], int]:
        """(lines that make shared arrays, lines after the row loop, bytes of static shared memory)."""
        rounds = self.rounds()
        pre = [f"d{t} = cuda.shared.array({n}, {t})" for t, n in self.arrays.items()]
        size = _bytes(self.arrays)
        out = [f"dest = udiv(t, {self.slice})", f"pos = int32(t - dest * {self.slice})", "cluster_wait()"]
        if self.h.moments:
            pre.append(f"dc = cuda.shared.array({self.size}, float32)")
            size += 4 * self.size
            out += self.h.total_count()
            out += [f"if tid < {self.size}:", "    rs_float32(dc, int64(rank), int32(tid), total)"]
        for n, places in enumerate(rounds):
            for place in places:
                out += self.h.gather(place.unit) + self.send(place)
            out.append("cluster_sync()")
            for k, place in enumerate(places):
                out += self.collect(place, k % self.size)
            if n + 1 < len(rounds):  # nobody writes to what another still reads
                out.append("cluster_sync()")
        if self.h.moments:
            total = " + ".join(f"dc[{j}]" for j in range(self.size))
            first = self.h.first
            out += [f"if tid == 0 and rank == 0 and {self.r.first_tile}:"]
            out.append(f"    st_f32_1_d(p{first}, int64(lead), {total})")
        return pre, out, size

    def send(self, place: _Place) -> list[str]:
        """Threads of row group 0 send their lanes to the block that joins them; rows of threads keep banks apart."""
        unit, t = place.unit, self.type_of(place.unit)
        out = []
        names = [x for part in unit.names.values() for x in part]
        for n, x in enumerate(names):
            if unit.pack is None:
                at, to = f"int64({place.first + n * self.size} + rank)", "int32(0)"
            else:
                at, to = f"int64({place.first + n * self.r.T} + rank * {self.slice} + pos)", "dest"
            out.append(f"rs_{t}(d{t}, {at}, {to}, {x})")
        cond = "tid == 0" if unit.pack is None else "rb == 0"
        return [f"if {cond}:", *("    " + x for x in out)] if self.r.R > 1 or unit.pack is None else out

    def collect(self, place: _Place, worker: int) -> list[str]:
        """Slice ``worker`` of the threads combines all parts of a unit and stores them."""
        unit, c = place.unit, self.h.p.columns[place.unit.column]
        t = self.type_of(unit)
        where: dict[str, int] = {}
        for n, x in enumerate(x for part in unit.names.values() for x in part):
            where[x] = place.first + n * (self.size if unit.pack is None else self.r.T)

        def part(x: str, j: int) -> str:
            if unit.pack is None:
                return f"d{t}[{where[x] + j}]"
            return f"d{t}[uint32({where[x] + j * self.slice} + pos)]"

        out = [f"{x} = {part(x, 0)}" for x in where]
        if c.kind == "moments":
            out.append("na = dc[0]")
        for j in range(1, self.size):
            if c.kind == "moments":
                out += [f"nb = dc[{j}]", "nt = na + nb", "wb = sel(nt > float32(0), nb / nt, float32(0))"]
                for m, s in zip(unit.names["m"], unit.names["s"], strict=True):
                    out += join_moments(m, s, part(m, j), part(s, j))
                out.append("na = nt")
            else:
                out += [f"{x} = {combine(c.kind, c.dtype, x, part(x, j))}" for x in where]
        short = SHORT[c.storage]
        stores = []
        for p, xs in enumerate(unit.names.values()):
            value = xs[0] if len(xs) == 1 else f"({', '.join(xs)})"
            at = "int64(lead)" if unit.pack is None else f"int64(lead) * {self.h.p.n_cols} + cp"
            stores.append(f"st_{short}_{len(xs)}_d(p{self.h.planes[unit.column] + p}, {at}, {value})")
        if unit.pack is None:
            return [f"if tid == 0 and rank == 0 and {self.r.first_tile}:", *("    " + x for x in [*out, *stores])]
        first = f"({unit.pack} * {self.r.T} + rank * {self.slice} + pos) * {self.r.vec}"
        out.append(f"cp = {self.r.count}({first} + c0)")
        out += [f"if cp < {self.h.p.n_cols}:", *("    " + x for x in stores)]
        guard = [f"dest == {worker}"] + (["rb == 0"] if self.r.R > 1 else [])
        return [f"if {' and '.join(guard)}:", *("    " + x for x in out)]


def _bytes(elements: dict[str, int]) -> int:
    return sum(n * (8 if t == "int64" else 4) for t, n in elements.items())

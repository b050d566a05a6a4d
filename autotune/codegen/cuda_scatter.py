"""The scatter skeleton: sums of rows at places that other data tell, each result written once and nothing atomically.

A block owns ``owned`` neighbouring places (rows of the result) and a chunk of the columns. It *scans* where all terms
go, and lists those that go to its own: counts by a warp's shuffles and the warps' totals make each one's number in the
list, so their order is the same every time. The list is *sorted* by place, a warp a place. Then threads lie as
``rows_per_block`` *match lanes* by ``threads_per_row`` threads on the columns. A match lane takes a place, adds its
terms in registers and stores what is made of the sum; a place of many terms is left to all match lanes together, whose
sums join in shared memory. Where more terms go to a block's places than the sorted list holds (padding, a column of
two), the block takes place by place and scans again for each.

What is read: the terms once, and the places once by each block, from the L2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autotune.codegen.counts import LIMIT, check_launch
from autotune.codegen.cuda import CudaEmitter
from autotune.codegen.cuda_access import narrowest
from autotune.codegen.cuda_names import NAMES, tuple_of
from autotune.codegen.cuda_rows import alignments
from autotune.codegen.cuda_source import GENERATOR, CudaSchedule, CudaSource
from autotune.codegen.program import Program
from autotune.codegen.scattered import Scattered, scattered
from autotune.errors import Unsupported
from autotune.fusion.graph import Graph

MOST_SORTED = 2048
"""Terms of a block's places that it sorts; of more, it takes place by place."""
MOST_PACKS = 4
"""Packs of places that a thread reads at a time."""
MANY = 8
"""Terms of one place, for each match lane, from which on all match lanes share them."""
FLIGHT = 4
"""Terms that a thread has in flight where match lanes share a place; half of them where it has a place by itself."""


def _indent(lines: Sequence[str], by: int = 1) -> list[str]:
    return ["    " * by + line for line in lines]


def _emitter(program: Program, schedule: CudaSchedule, vec: int) -> CudaEmitter:
    loads = [i for i, v in enumerate(program.graph.values) if v.op == "load"]
    own = replace(schedule, rows_per_block=1, vector_bytes=vec * narrowest(program))
    return CudaEmitter(program, own, apart=loads)


class _Kernel:
    """The lines of one kernel."""

    def __init__(self, s: Scattered, schedule: CudaSchedule, owned: int) -> None:
        self.s, self.schedule, self.owned = s, schedule, owned
        self.lanes, self.match, self.block = schedule.threads_per_row, schedule.rows_per_block, schedule.block
        if not 32 <= self.block <= 1024 or self.block % 32:
            raise Unsupported("a block is a multiple of 32 up to 1024 threads")
        if self.match & (self.match - 1) or owned & (owned - 1):
            raise Unsupported("match lanes and owned places are powers of two")
        self.vec = s.vector(schedule.vector_bytes)
        if not self.vec:
            raise Unsupported(f"vectors of {schedule.vector_bytes} bytes do not divide the columns")
        self.terms = _emitter(s.terms, schedule, self.vec)
        self.results = _emitter(s.results, schedule, self.vec)
        self.results.ok_needed = True
        self.pick = s.place_vector
        self.places = _emitter(s.places, schedule, self.pick)
        self.tokens = s.n_tokens
        if max(s.n_places, self.tokens * owned, s.n_cols) >= LIMIT:
            raise Unsupported("more places or terms than 32-bit counters hold")
        self.packs = max(1, min(MOST_PACKS, -(-self.tokens // (self.block * self.pick))))
        self.step = self.block * self.pick * self.packs
        self.chunk = self.lanes * self.vec
        self.chunks = -(-s.n_cols // self.chunk)
        self.partial = self.chunks * self.chunk > s.n_cols  # threads without columns
        self.warps = self.block // 32
        self.unroll = max(1, min(schedule.unroll, owned // self.match))
        # Words of shared memory: totals of warps, where each place begins, the list, the sorted list. Sums of the
        # match lanes take the place of the list.
        self.sorted_most = min(self.step, MOST_SORTED) if owned > 1 else 0
        self.begin = self.warps
        self.list = self.begin + (owned + 1 if owned > 1 else 0)
        self.sorted = self.list + max(self.step, self.block * self.vec if self.match > 1 else 0)
        self.words = self.sorted + self.sorted_most
        self.names = {
            "place": self.places.pass_function(0, s.places.passes[0]),
            "term": self.terms.pass_function(0, s.terms.passes[0]),
            "result": self.results.pass_function(1, s.results.passes[1]),
        }

    # ---- device functions -------------------------------------------------------------------------------------------

    def call(self, number: int, part: str, given: Mapping[str, str]) -> str:
        return f"f{number}({', '.join(given.get(n, n) for n in self.names[part][1])})"

    def functions(self) -> list[str]:
        """``f0``: a pack of places; ``f1``: a pack of a term; ``f2``: what is made of a pack of sums; ``f3``: adds a
        term to sums where ``on``; ``f4``: sums of nothing."""
        place, term, result = (self.names[n][0] for n in ("place", "term", "result"))
        zeros = tuple_of(["float32(0)"] * self.vec)
        add = ["def f3(a, x, on):"]
        kept = self.s.graph.values[self.s.total].args[0]
        if self.terms.packed(kept):
            short = NAMES[self.s.graph.inputs[self.s.graph.values[kept].slot]]
            add.append(f"    x = un_{short}_{self.vec}(x)")
        sums = [f"a[{e}] + sel(on, x[{e}], float32(0))" for e in range(self.vec)]
        add.append(f"    return {tuple_of(sums)}")
        return [
            place,
            term.replace("def f0(", "def f1(", 1),
            result.replace("def f1(", "def f2(", 1),
            "\n".join(add),
            f"def f4():\n    return {zeros}",
        ]

    # ---- pieces -----------------------------------------------------------------------------------------------------

    def before(self, part: CudaEmitter, program: Program, q: int) -> list[str]:
        """Lines with the row values and offsets that a pass function of ``part`` takes, of row number ``row``."""
        out = list(part.row_indices())
        for i in program.passes[q].row_values:
            out += part.row_value(i)
        touched = {i for i in program.passes[q].compute if i in part.access}
        wanted = {f"b{i}" for i in touched} | {f"o{k}" for k in program.passes[q].stores}
        return out + [line for line in part.bases() if line.partition(" ")[0] in wanted]

    def add(self, first: int, scale: int, flight: int, stride: int, end: str) -> list[str]:
        """Lines that add the terms listed at ``k``, ``k + stride`` and so on before ``end`` to the sums ``a``.

        What lies behind the end is read as the last one is, and not added.

        Args:
            first: word of the list; an entry is a token's number times ``scale``.
        """
        out = []
        for u in range(flight):
            at = f"k + {u * stride}" if u else "k"
            out.append(f"row = si[uint32({first} + least(int32({at}), int32({end} - 1)))]")
            out += [f"row = udiv(row, {scale})"] if scale > 1 else []
            out += self.before(self.terms, self.s.terms, 0)
            out.append(f"x{u} = {self.call(1, 'term', {'c': 'col'})}")
        for u in range(flight):
            on = f"k + {u * stride} < {end}" if u else f"k < {end}"
            out.append(f"a = f3(a, x{u}, {on})")
        return out

    def store(self, place: str, sums: str, ok: str) -> list[str]:
        """Lines that store what is made of the sums of place number ``place`` of the block's where ``ok``. That of
        another place is computed all the same, at the last one there is."""
        lines = [f"row = least(int32(first + {place}), int32({self.s.n_places - 1}))"]
        lines += self.before(self.results, self.s.results, 1)
        return [*lines, self.call(2, "result", {"c": "col", "z0": sums, "ok": ok})]

    def scan(self) -> list[str]:
        """Lines of one step of the scan: of the places from ``base`` on, those in ``[low, low + count)`` are put into
        the list from number ``total`` on, as far as the number ``room``, and ``found`` is how many there are.

        An entry is a token's number times ``owned`` plus the number of the place.
        """
        out = []
        packed = self.places.packed(self.s.graph.values[self.s.total].args[1])
        assert not packed  # places have 32 bits or more
        for p in range(self.packs):
            out.append(f"t{p} = int32(base + ({p * self.block} + tid) * {self.pick})")
            out.append(f"g{p} = {self.call(0, 'place', {'c': f'least(t{p}, int32({self.tokens - self.pick}))'})}")
        hits = [(p, e) for p in range(self.packs) for e in range(self.pick)]
        for p in range(self.packs):
            out.append(f"on{p} = t{p} < {self.tokens}")
            for e in range(self.pick):
                out.append(f"d{p}_{e} = int64(g{p}[{e}]) - low")
                inside = f"sel(d{p}_{e} >= 0, d{p}_{e} < count, False)"
                out.append(f"h{p}_{e} = sel(on{p}, {inside}, False)")
        ones = " + ".join(f"sel(h{p}_{e}, int32(1), int32(0))" for p, e in hits)
        out += [f"own = int32({ones})", "upto = own"]
        for d in (1, 2, 4, 8, 16):
            out.append(f"other = cuda.shfl_sync(0xffffffff, upto, int32(sel(lane >= {d}, int32(lane - {d}), lane)))")
            out.append(f"upto = int32(upto + sel(lane >= {d}, other, int32(0)))")
        out += ["if lane == 31:", "    si[uint32(warp)] = upto", "cuda.syncthreads()"]
        out += ["at = int32(total + upto - own)", "found = int32(0)", f"for w in range({self.warps}):"]
        out += ["    other = si[uint32(w)]", "    if w < warp:", "        at = int32(at + other)"]
        out += ["    found = int32(found + other)", "if own > 0:"]
        for p, e in hits:
            entry = f"(t{p} + {e}) * {self.owned} + (low - first) + d{p}_{e}"
            out += [f"    if h{p}_{e}:", "        if at < room:"]
            out += [f"            si[uint32({self.list} + at)] = int32({entry})", "        at = int32(at + 1)"]
        return [*out, "cuda.syncthreads()"]

    def sort(self) -> list[str]:
        """Lines that sort the list of ``total`` entries by place: a warp a place, in the order of the list."""
        entry = [
            "k = int32(k0 + lane)",
            f"e = si[uint32({self.list} + least(k, int32(total - 1)))]",
            f"token = udiv(e, {self.owned})",
            f"r0 = int32(e - token * {self.owned})",
            "on = k < total",
            "here = sel(on, r0 == r, False)",
        ]
        count = [
            *entry,
            "start = int32(start + cuda.popc(cuda.ballot_sync(0xffffffff, sel(on, r0 < r, False))))",
            "n = int32(n + cuda.popc(cuda.ballot_sync(0xffffffff, here)))",
        ]
        put = [
            *entry,
            "votes = cuda.ballot_sync(0xffffffff, here)",
            "if here:",
            f"    si[uint32({self.sorted} + start + cuda.popc(votes & below))] = token",
            "start = int32(start + cuda.popc(votes))",
        ]
        return [
            f"for r in range(warp, {self.owned}, {self.warps}):",
            "    start = int32(0)",
            "    n = int32(0)",
            "    for k0 in range(0, total, 32):",
            *_indent(count, 2),
            "    if lane == 0:",
            f"        si[uint32({self.begin} + r)] = start",
            "    if n > 0:",
            "        for k0 in range(0, total, 32):",
            *_indent(put, 3),
            "if tid == 0:",
            f"    si[uint32({self.begin + self.owned})] = total",
            "cuda.syncthreads()",
        ]

    def join(self) -> list[str]:
        """Lines that bring the sums ``a`` of all match lanes together in those of the first, two by two."""
        out: list[str] = []
        step = self.match // 2
        at = [f"{self.list + e * self.block} + tid" for e in range(self.vec)]
        while step:
            out += [f"if match >= {step} and match < {2 * step}:"]
            out += [f"    sf[uint32({at[e]})] = a[{e}]" for e in range(self.vec)]
            sums = [f"a[{e}] + sf[uint32({at[e]} + {step * self.lanes})]" for e in range(self.vec)]
            out += ["cuda.syncthreads()", f"if match < {step}:", f"    a = {tuple_of(sums)}"]
            step //= 2
        return [*out, "cuda.syncthreads()"] if out else []

    # ---- the ways through a block's places --------------------------------------------------------------------------

    def alone(self) -> list[str]:
        """A match lane takes places by itself, ``unroll`` at a time so that what is read beside the sums is in flight
        together; those of many terms are left out."""
        flight = max(1, FLIGHT // 2)
        out = []
        for q in range(self.unroll):
            out += [
                f"r{q} = int32(r + {q * self.match})",
                f"start = si[uint32({self.begin} + r{q})]",
                f"stop = si[uint32({self.begin} + r{q} + 1)]",
                f"ok{q} = sel(r{q} < rows, stop - start <= {self.many}, False)",
                f"stop = sel(ok{q}, stop, start)",
                "a = f4()",
                f"for k in range(start, stop, {flight}):",
                *_indent(self.add(self.sorted, 1, flight, 1, "stop")),
                f"a{q} = a",
            ]
        for q in range(self.unroll):
            out += self.store(f"r{q}", f"a{q}", f"sel(inside, ok{q}, False)" if self.partial else f"ok{q}")
        return [f"for r in range(match, {self.owned}, {self.match * self.unroll}):", *_indent(out)]

    @property
    def many(self) -> int:
        """Terms of a place above which all match lanes share them."""
        return MANY * self.match if self.match > 1 else self.sorted_most

    def together(self) -> list[str]:
        """Lines that add up the terms of place number ``r`` of the block's, which all match lanes share as they are
        found, and store the result."""
        step = self.match * FLIGHT
        loop = [*self.scan(), f"for k in range(match, found, {step}):"]
        loop += _indent(self.add(self.list, self.owned, FLIGHT, self.match, "found"))
        store = self.store("r", "a", "inside" if self.partial else "True")
        return [
            "low = int64(first + r)",
            "count = int32(1)",
            f"room = int32({self.step})",
            "total = int32(0)",
            "a = f4()",
            f"for base in range(0, {self.tokens}, {self.step}):",
            *_indent(loop),
            "cuda.syncthreads()",
            *self.join(),
            *(["if match == 0:", *_indent(store)] if self.match > 1 else store),
        ]

    def body(self) -> list[str]:
        s = self.s
        out = [
            "tid = int32(cuda.threadIdx.x)",
            "lane = int32(tid & 31)",
            "warp = udiv(tid, 32)",
            "below = int32((int32(1) << lane) - 1)",
            f"match = udiv(tid, {self.lanes})",
            f"group = udiv(blk, {self.chunks})",
            f"first = int32(group * {self.owned})",
            f"rows = least(int32({self.owned}), int32({s.n_places} - first))",
            f"col = int32((blk - group * {self.chunks}) * {self.chunk} + (tid - match * {self.lanes}) * {self.vec})",
            "si = cuda.shared.array(0, int32)",
        ]
        if self.partial:
            out += [f"inside = col < {s.n_cols}", f"col = least(col, int32({s.n_cols - self.vec}))"]
        if self.match > 1:
            out.append("sf = cuda.shared.array(0, float32)")
        out += self.before(self.places, s.places, 0)
        if self.owned == 1:
            return [*out, "r = int32(0)", *self.together()]
        out += ["low = int64(first)", "count = rows", f"room = int32({self.sorted_most})", "total = int32(0)"]
        out += [f"for base in range(0, {self.tokens}, {self.step}):"]
        out += _indent([*self.scan(), "total = int32(total + found)"])
        out += ["all = total", f"if all <= {self.sorted_most}:"]
        out += _indent([*self.sort(), *self.alone()])
        most = [
            f"many = all > {self.sorted_most}",
            "if not many:",
            f"    many = si[uint32({self.begin + 1} + r)] - si[uint32({self.begin} + r)] > {self.many}",
            "if many:",
            *_indent(self.together()),
        ]
        return [*out, "for r in range(rows):", *_indent(most)]

    def source(self) -> CudaSource:
        groups = -(-self.s.n_places // self.owned)
        parts = [self.places, self.terms, self.results]
        launch: dict[str, Any] = {
            "dynamic": False,
            "inner": groups * self.chunks,
            "per_block": 1,
            "blocks_per_sm": 0,
            "block": self.block,
            "shared": 4 * self.words,
            "align": [max(need) for need in zip(*map(alignments, parts), strict=True)],
            "multiple": 1,
            "generator": GENERATOR,
        }
        check_launch(launch, self.s.graph.extents[0])
        params = self.results.params()
        return CudaSource(
            tuple(self.functions()), tuple(self.body()), params, launch, self.block, self.schedule.max_registers
        )


def emit_scatter(graph: Graph, schedule: CudaSchedule, owned: int) -> CudaSource:
    """The kernel of a group with sums at places.

    Args:
        schedule: ``threads_per_row`` threads lie along the columns, ``rows_per_block`` are the match lanes, ``unroll``
            places are stored at a time.
        owned: places a block.

    Raises:
        Unsupported: it is no such group, or the schedule does not fit it.
    """
    if any(n == 0 for n in graph.extents):
        raise Unsupported("an empty axis")
    return _Kernel(scattered(graph), schedule, owned).source()

"""The scatter skeleton: sums of rows at places that other data tell, each result written once and nothing atomically.

A block owns ``owned`` neighbouring places (rows of the result) and a chunk of the columns. It *scans* where all terms
go, and lists those that go to its own: counts by a warp's shuffles and the warps' totals make each one's number in the
list, so their order is the same every time. The list is *sorted* by place, a warp a place. Then threads lie as
``rows_per_block`` *match lanes* by ``threads_per_row`` threads on the columns. A match lane takes a place, adds its
terms in registers and stores what is made of the sum; a place of many terms is left to all match lanes together, whose
sums join in shared memory. Where more terms go to a block's places than the sorted list holds (padding, a column of
two), the block takes place by place and scans again for each.

What is read: the terms once, and the places once by each block, from the L2. What is read beside the sums may be
brought into the L2 while the places are scanned (``prefetch``), so that memory is busy then too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autotune.compiler.program.program import Program, stride_of
from autotune.compiler.program.scattered import Scattered, Sum, scattered
from autotune.compiler.targets.cuda.access import narrowest
from autotune.compiler.targets.cuda.counts import LIMIT, check_launch
from autotune.compiler.targets.cuda.names import NAMES, tuple_of
from autotune.compiler.targets.cuda.rows import legacy
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
from autotune.compiler.targets.cuda.rows.kernel import alignments
from autotune.compiler.targets.cuda.source import GENERATOR, CudaSchedule, CudaSource
from autotune.errors import Unsupported
from autotune.ir.graph import STORAGE_BYTES, Graph

MOST_SORTED = 2048
"""Terms of a block's places that it sorts; of more, it takes place by place."""
MOST_PACKS = 4
"""Packs of places that a thread reads at a time."""
MANY = 8
"""Terms of one place, for each match lane, from which on all match lanes share them."""
FLIGHT = 2
"""Terms that a thread has in flight where it has a place by itself, of few terms mostly."""
FLIGHT_TOGETHER = 6
"""The same where match lanes share a place of many: such a block may be the last one (a quarter of all terms is padding
in a translator's batches, and took 110 us of 164 with 4)."""


LINE = 128
"""Bytes that are brought into the L2 at a time."""


def fetchable(s: Scattered) -> tuple[int, ...]:
    """The loads beside the sums that may be fetched during the scan: by places, neighbours along the columns."""
    found = []
    for i in s.results.passes[1].compute:
        v = s.graph.values[i]
        if v.op == "load" and not v.guards and stride_of(v, s.cols[-1]) == 1 and stride_of(v, s.at):
            found.append(i)
    return tuple(found)


def _indent(lines: Sequence[str], by: int = 1) -> list[str]:
    return ["    " * by + line for line in lines]


def _emitter(program: Program, schedule: CudaSchedule, vec: int) -> CudaEmitter:
    loads = [i for i, v in enumerate(program.graph.values) if v.op == "load"]
    own = replace(schedule, rows_per_block=1, vector_bytes=vec * narrowest(program))
    return CudaEmitter(program, own, apart=loads)


def _call(number: int, params: Sequence[str], **given: str) -> str:
    return f"f{number}({', '.join(given.get(n, n) for n in params)})"


class _Adder:
    """One sum as a kernel sees it: how its places are read, and its terms; its part of shared memory.

    Attributes:
        number: of the sum; ``f<2 number>`` reads a pack of places, ``f<2 number + 1>`` one of a term.
        step: tokens that a block scans at a time; ``packs`` of each thread.
        begin: word where it is written where the terms of each place begin in the sorted list.
        sorted: word where the sorted list begins.
    """

    def __init__(self, one: Sum, number: int, schedule: CudaSchedule, vec: int) -> None:
        self.one, self.number, self.tokens, self.pick = one, number, one.n_tokens, one.place_vector
        self.places = _emitter(one.places, schedule, self.pick)
        self.terms = _emitter(one.terms, schedule, vec)
        self.packs = max(1, min(MOST_PACKS, -(-self.tokens // (schedule.block * self.pick))))
        self.step = schedule.block * self.pick * self.packs
        self.begin = self.sorted = 0
        self.place_text, self.place_params = legacy.function(
            self.places.pass_function(0, one.places.passes[0])[0], f"f{2 * number}"
        )
        self.term_text, self.term_params = legacy.function(
            self.terms.pass_function(0, one.terms.passes[0])[0], f"f{2 * number + 1}"
        )


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
        self.results = _emitter(s.results, schedule, self.vec)
        self.results.ok_needed = True
        made, _ = self.results.pass_function(1, s.results.passes[1])
        self.result_text, self.result_params = legacy.function(made, f"f{2 * len(s.sums)}")
        self.sums = [_Adder(one, n, schedule, self.vec) for n, one in enumerate(s.sums)]
        if max(s.n_places, s.n_cols, *(one.tokens * owned for one in self.sums)) >= LIMIT:
            raise Unsupported("more places or terms than 32-bit counters hold")
        self.chunk = self.lanes * self.vec
        self.chunks = -(-s.n_cols // self.chunk)
        self.partial = self.chunks * self.chunk > s.n_cols  # threads without columns
        self.warps = self.block // 32
        self.unroll = max(1, min(schedule.unroll, owned // self.match))
        # Words of shared memory: totals of warps, the list, and for each sum where the places begin and the sorted
        # list. Sums of the match lanes take the place of the list.
        step = max(one.step for one in self.sums)
        self.list = self.warps
        self.words = self.list + max(step, self.block * self.vec if self.match > 1 else 0)
        self.most_sorted = min(step, MOST_SORTED) if owned > 1 else 0
        for one in self.sums if owned > 1 else ():
            one.begin, one.sorted = self.words, self.words + owned + 1
            self.words = one.sorted + self.most_sorted

    # ---- device functions -------------------------------------------------------------------------------------------

    def functions(self) -> list[str]:
        """Those of each sum (:class:`_Adder`); then ``f<n>`` and on, with n twice the number of sums: what is made of
        a pack of sums, sums of nothing, for each sum what adds a term where ``on``, and for each a step of the scan:
        the compiler's front takes most of its time for that, so it is there once."""
        first = 2 * len(self.sums)
        out = []
        for one in self.sums:
            out.append(one.place_text)
            out.append(one.term_text)
        out.append(self.result_text)
        out.append(f"def f{first + 1}():\n    return {tuple_of(['float32(0)'] * self.vec)}")
        for one in self.sums:
            add = [f"def f{first + 2 + one.number}(a, x, on):"]
            if one.terms.packed(one.one.term):
                short = NAMES[self.s.graph.inputs[self.s.graph.values[one.one.term].slot]]
                add.append(f"    x = un_{short}_{self.vec}(x)")
            sums = [f"a[{e}] + sel(on, x[{e}], float32(0))" for e in range(self.vec)]
            out.append("\n".join([*add, f"    return {tuple_of(sums)}"]))
        for one in self.sums:
            head = self.scanned(one).replace("found = ", "def ") + ":"
            out.append("\n".join([head, *_indent([*self.scan(one), "return found"])]))
        return out

    @property
    def zeros(self) -> str:
        return f"a = f{2 * len(self.sums) + 1}()"

    # ---- pieces -----------------------------------------------------------------------------------------------------

    def before(self, part: CudaEmitter, program: Program, q: int) -> list[str]:
        """Lines with the row values and offsets that a pass function of ``part`` takes, of row number ``row``."""
        out = list(part.row_indices())
        for i in program.passes[q].row_values:
            out += part.row_value(i)
        return legacy.lines(out + part.bases(program.passes[q].compute, program.passes[q].stores))

    def add(self, one: _Adder, first: int, scale: int, flight: int, stride: int, end: str) -> list[str]:
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
            out += self.before(one.terms, one.one.terms, 0)
            out.append(f"x{u} = {_call(2 * one.number + 1, one.term_params, c='col')}")
        for u in range(flight):
            on = f"k + {u * stride} < {end}" if u else f"k < {end}"
            out.append(f"a = f{2 * len(self.sums) + 2 + one.number}(a, x{u}, {on})")
        return out

    def store(self, place: str, sums: str, ok: str) -> list[str]:
        """Lines that store what is made of the sums of place number ``place`` of the block's where ``ok``. That of
        another place is computed all the same, at the last one there is."""
        lines = [f"row = least(int32(first + {place}), int32({self.s.n_places - 1}))"]
        lines += self.before(self.results, self.s.results, 1)
        return [*lines, _call(2 * len(self.sums), self.result_params, c="col", z0=sums, ok=ok)]

    def fetch(self) -> list[str]:
        """Lines that have what is read beside the sums brought into the L2, each match lane its places."""
        e, chosen = self.results, fetchable(self.s)
        if not self.schedule.prefetch or not chosen:
            return []
        bases = e.bases(chosen, ())
        out = ["row = int32(first + r)", *legacy.lines(e.row_indices() + bases)]
        for i in chosen:
            v = self.s.graph.values[i]
            lanes = max(1, LINE // (self.vec * STORAGE_BYTES[self.s.graph.inputs[v.slot]]))
            line = f"to_l2(p{v.slot}, {legacy.text(e.address(e.access[i], e.base(i), 0))})"
            out += [f"if across % {lanes} == 0:", f"    {line}"] if lanes > 1 else [line]
        loop = [f"for r in range(match, rows, {self.match}):", *_indent(out)]
        return [f"across = int32(tid - match * {self.lanes})", "c = col", *legacy.lines(e.column_indices()), *loop]

    def scanned(self, one: _Adder) -> str:
        """The line that scans a step."""
        known = ["si", "tid", "lane", "warp", "first", "base", "low", "count", "room", "total"]
        given = ", ".join([*known, *(n for n in one.place_params if n != "c")])
        return f"found = f{3 * len(self.sums) + 2 + one.number}({given})"

    def scan(self, one: _Adder) -> list[str]:
        """Lines of one step of the scan: of the places from ``base`` on, those in ``[low, low + count)`` are put into
        the list from number ``total`` on, as far as the number ``room``, and ``found`` is how many there are.

        An entry is a token's number times ``owned`` plus the number of the place.
        """
        out = []
        for p in range(one.packs):
            out.append(f"t{p} = int32(base + ({p * self.block} + tid) * {one.pick})")
            inside = f"least(t{p}, int32({one.tokens - one.pick}))"
            out.append(f"g{p} = {_call(2 * one.number, one.place_params, c=inside)}")
        hits = [(p, e) for p in range(one.packs) for e in range(one.pick)]
        for p in range(one.packs):
            out.append(f"on{p} = t{p} < {one.tokens}")
            for e in range(one.pick):
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

    def sort(self, one: _Adder) -> list[str]:
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
            f"    si[uint32({one.sorted} + start + cuda.popc(votes & below))] = token",
            "start = int32(start + cuda.popc(votes))",
        ]
        return [
            f"for r in range(warp, {self.owned}, {self.warps}):",
            "    start = int32(0)",
            "    n = int32(0)",
            "    for k0 in range(0, total, 32):",
            *_indent(count, 2),
            "    if lane == 0:",
            f"        si[uint32({one.begin} + r)] = start",
            "    if n > 0:",
            "        for k0 in range(0, total, 32):",
            *_indent(put, 3),
            "if tid == 0:",
            f"    si[uint32({one.begin + self.owned})] = total",
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
        out = []
        for q in range(self.unroll):
            out += [f"r{q} = int32(r + {q * self.match})", f"ok{q} = r{q} < rows"]
            for n, one in enumerate(self.sums):
                out += [
                    f"start{n} = si[uint32({one.begin} + r{q})]",
                    f"stop{n} = si[uint32({one.begin + 1} + r{q})]",
                    f"ok{q} = sel(stop{n} - start{n} <= {self.many}, ok{q}, False)",
                ]
            for n, one in enumerate(self.sums):
                out += [
                    f"stop{n} = sel(ok{q}, stop{n}, start{n})",
                    self.zeros,
                    f"for k in range(start{n}, stop{n}, {FLIGHT}):",
                    *_indent(self.add(one, one.sorted, 1, FLIGHT, 1, f"stop{n}")),
                    f"a{q}_{n} = a",
                ]
        for q in range(self.unroll):
            sums = " + ".join(f"a{q}_{n}" for n in range(len(self.sums)))
            out += self.store(f"r{q}", sums, f"sel(inside, ok{q}, False)" if self.partial else f"ok{q}")
        return [f"for r in range(match, {self.owned}, {self.match * self.unroll}):", *_indent(out)]

    @property
    def many(self) -> int:
        """Terms of a place above which all match lanes share them."""
        return MANY * self.match if self.match > 1 else self.most_sorted

    def together(self) -> list[str]:
        """Lines that add up the terms of place number ``r`` of the block's, which all match lanes share as they are
        found, and store the result."""
        step = self.match * FLIGHT_TOGETHER
        out = ["low = int64(first + r)", "count = int32(1)", "total = int32(0)"]
        for n, one in enumerate(self.sums):
            loop = [self.scanned(one), f"for k in range(match, found, {step}):"]
            loop += _indent(self.add(one, self.list, self.owned, FLIGHT_TOGETHER, self.match, "found"))
            out += [f"room = int32({one.step})", self.zeros, f"for base in range(0, {one.tokens}, {one.step}):"]
            out += [*_indent(loop), "cuda.syncthreads()", *self.join(), f"a_{n} = a"]
        sums = " + ".join(f"a_{n}" for n in range(len(self.sums)))
        store = self.store("r", sums, "inside" if self.partial else "True")
        return [*out, *(["if match == 0:", *_indent(store)] if self.match > 1 else store)]

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
        for one in self.sums:
            out += self.before(one.places, one.one.places, 0)
        out += self.fetch()
        if self.owned == 1:
            return [*out, "r = int32(0)", *self.together()]
        out += ["low = int64(first)", "count = rows", f"room = int32({self.most_sorted})", "over = False"]
        for one in self.sums:
            out += ["total = int32(0)", f"for base in range(0, {one.tokens}, {one.step}):"]
            out += _indent([self.scanned(one), "total = int32(total + found)"])
            out += [f"if total > {self.most_sorted}:", "    over = True", "else:", *_indent(self.sort(one))]
        out += ["if not over:", *_indent(self.alone())]
        most = ["many = over", "if not over:"]
        for one in self.sums:
            terms = f"si[uint32({one.begin + 1} + r)] - si[uint32({one.begin} + r)]"
            most.append(f"    many = sel({terms} > {self.many}, True, many)")
        return [*out, "for r in range(rows):", *_indent([*most, "if many:", *_indent(self.together())])]

    def source(self) -> CudaSource:
        groups = -(-self.s.n_places // self.owned)
        parts = [self.results, *(e for one in self.sums for e in (one.places, one.terms))]
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

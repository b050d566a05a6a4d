"""The outer skeleton: reductions over outer axes, threads side by side on the unit-stride axis that is kept.

A block has ``threads_per_row`` threads along the kept axes (each takes a vector of neighbours) and ``rows_per_block``
along the reduced ones. Partial results meet by shuffles where a warp spans several places of the reduced axes, then in
shared memory, then, with a cluster, in each other's shared memory. What a pass leaves for later ones stays in
registers, in shared memory, or is read again; so softmax over dim 0 reads its input once where the block (or the
cluster) can hold a strip of columns.

The same kernel finishes the partials of the columns scheme, where latency is all: narrow strips give enough blocks, the
loads of a thread are independent of each other (the last, incomplete step repeats the last place instead of branching),
and once only results are left to be stored, only the warps that store them go on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from autotune.compiler.program.program import Pass, Program
from autotune.compiler.targets.cuda.counts import check_launch
from autotune.compiler.targets.cuda.names import NAMES
from autotune.compiler.targets.cuda.operators import LOG2E
from autotune.compiler.targets.cuda.outer import share
from autotune.compiler.targets.cuda.outer.lanes import Access, Field, Lanes
from autotune.compiler.targets.cuda.rows.kernel import MAX_PACK_LANES
from autotune.compiler.targets.cuda.source import GENERATOR, CudaSchedule, CudaSource
from autotune.errors import Unsupported
from autotune.ir.graph import REDUCTIONS, STORAGE_BYTES

MAX_STATIC = 48 * 1024
_ARRAY = re.compile(r"= cuda\.shared\.array\((\d+), (\w+)\)")


@dataclass(frozen=True)
class Part:
    """Partial results in shared memory: lines to run before they are read, and how each accumulator is read."""

    lines: list[str]
    values: dict[Field, str]


class Outer:
    def __init__(self, program: Program, schedule: CudaSchedule) -> None:
        self.e = Lanes(program, schedule)
        self.count = self.e.count.type  # of packs along the kept axes and of places of the reduced ones
        self.p, self.s, self.g = program, schedule, program.graph
        self.X, self.Y, self.C = schedule.threads_per_row, schedule.rows_per_block, schedule.cluster
        self.step = self.Y * self.C  # places of the reduced axes that all threads take at a time
        self.packs = -(-program.n_cols // self.step)
        self.full = program.n_cols // self.step
        self.outer = [a for a in program.rows if a != self.e.x]
        self.line = self.g.extents[self.e.x] // self.e.vec  # packs along the kept axis
        self.dynamic = program.dynamic == 0 and self.e.x != 0
        self.inner = self.line * self.g.size(a for a in self.outer if not (self.dynamic and a == 0))
        self.sub = max(1, 32 // self.X)  # places of the reduced axes within a warp
        self.parts = self.Y // self.sub  # partial results a block has after its shuffles
        self.joins = [pas for pas in program.passes if pas.reduce or pas.online]
        self.kept_from = {i: q for q, pas in enumerate(program.passes) for i in pas.kept_out}
        self.functions: list[str] = []
        self.cluster_words: dict[str, int] = {}
        self.prepare()
        self.check()

    def prepare(self) -> None:
        """For other ways of keeping: what :meth:`check` has to know."""

    def check(self) -> None:
        s = self.s
        if self.X & (self.X - 1):
            raise Unsupported("threads_per_row must be a power of two")
        if self.X % self.e.across:
            raise Unsupported(f"fewer than {self.e.across} threads_per_row on a tile")
        if s.block > 1024 or s.block % 32:
            raise Unsupported("a block must be a multiple of 32 up to 1024 threads")
        if self.C > 1 and (s.blocks_per_sm or self.Y < self.C):
            raise Unsupported("a cluster works on one strip, and has at least as many rows_per_block as blocks")
        if self.C > 1 and self.packs == 1:
            raise Unsupported("reduced axes that one block holds need no cluster")
        kept = {i for pas in self.p.passes for i in pas.kept_out} - set(self.e.ahead)
        if s.keep == "shared" and any(self.g.values[i].dtype != "float32" for i in kept):
            raise Unsupported("keeping integers in shared memory")
        if s.held and not s.prefetch:
            raise Unsupported("places held in registers beside copies that are not asynchronous")
        if s.keep == "registers":
            values = max(1, *(len(pas.compute) for pas in self.p.passes), 1)
            if self.packs * self.e.vec * values > MAX_PACK_LANES:
                raise Unsupported(f"too much for {self.Y} threads to keep in registers")

    # ---- a walk -----------------------------------------------------------------------------------------------------

    @property
    def ok_needed(self) -> bool:
        """Whether a block may have threads beyond the last pack."""
        return self.dynamic or self.inner % self.X != 0

    def walk(self, q: int, pas: Pass) -> list[str]:
        """Lines of the walk of pass ``q``, its reductions not yet joined."""
        guarded = self.ok_needed or self.packs > self.full
        text, params = self.e.pass_function(q, pas, self.kept_from, guarded)
        self.functions.append(text)
        out = [f"{f.name} = {f.nothing}" for f in self.e.fields(pas)]
        loop = self.s.keep != "registers"
        unroll = self.s.unroll if loop else self.packs
        steps = self.full // unroll if loop else 0
        begin = 0
        if steps > 1:
            out += [f"for step in range({steps}):", f"    k = int32(step) * {unroll}"]
            for u in range(unroll):
                out += ["    " + line for line in self.pack(q, pas, params, f"(k + {u})", masked=False)]
            begin = steps * unroll
        for k in range(begin, self.packs):
            out += self.pack(q, pas, params, str(k), masked=k >= self.full)
        return out + self.e.settle(pas)

    def pack(self, q: int, pas: Pass, params: list[str], k: str, masked: bool) -> list[str]:
        """One place of the reduced axes. A masked one may lie beyond the last: its threads repeat the last one, and
        what it adds is dropped, so that its loads need not wait for a branch."""
        shared = self.s.keep == "shared"
        held = self.s.keep == "registers"  # each pack's result has a name of its own where later passes take it
        where = f"({k} * {self.C} + rank)" if self.C > 1 else k
        out = [f"j = {self.count}({where} * {self.Y} + ty)"]
        live = "ok" if self.ok_needed else "True"
        if masked:
            out += [f"inside = j < {self.p.n_cols}", f"j = sel(inside, j, {self.count}({self.p.n_cols - 1}))"]
            live = "sel(inside, ok, False)" if self.ok_needed else "inside"
        if shared:
            out += [line for z in params if z[0] == "z" for line in self.fetch(int(z[1:]), k)]
        args = [f"{n}_{k if held else 'x'}" if n[0] == "z" else live if n == "live" else n for n in params]
        call = f"f{q}({', '.join(args)})"
        fields = self.e.fields(pas)
        if not fields and not pas.kept_out:
            return [*out, call]
        z = f"z{q}_{k if held and pas.kept_out else 'x'}"
        out.append(f"{z} = {call}")
        for n, f in enumerate(fields):
            out.append(f"{f.name} = sel(inside, {z}[{n}], {f.name})" if masked else f"{f.name} = {z}[{n}]")
        return out + (self.put(q, k) if shared else [])

    # ---- keeping in shared memory: each thread its own words, so no barrier and no bank conflict --------------------

    def views(self, q: int) -> list[str]:
        """For each kept word of pass ``q``, the view of shared memory of its type."""
        return [
            "su" if self.e.packed(i) else "sf"
            for i in self.p.passes[q].kept_out
            for _ in range(self.e.kept_words(i))
        ]  # fmt: skip

    def place(self, q: int, k: str, w: int) -> str:
        first = sum(self.e.pass_words(pas) for pas in self.p.passes[:q]) * self.packs
        return f"({first} + {k} * {self.e.pass_words(self.p.passes[q])} + {w}) * {self.s.block} + tid"

    def put(self, q: int, k: str) -> list[str]:
        first = len(self.e.fields(self.p.passes[q]))
        return [f"{view}[{self.place(q, k, w)}] = z{q}_x[{first + w}]" for w, view in enumerate(self.views(q))]

    def fetch(self, q: int, k: str) -> list[str]:
        skipped = [f.nothing for f in self.e.fields(self.p.passes[q])]
        words = [f"{view}[{self.place(q, k, w)}]" for w, view in enumerate(self.views(q))]
        return [f"z{q}_x = ({', '.join(skipped + words)},)"]

    def words(self) -> int:
        """Words of shared memory that each thread has for one place of the reduced axes."""
        return sum(self.e.pass_words(pas) for pas in self.p.passes)

    def ahead_of_walks(self) -> list[str]:
        """Lines between the indices of a strip and its first walk."""
        return []

    def ahead_of_loop(self) -> list[str]:
        """Lines before the first strip of a persistent grid."""
        return []

    # ---- joining ----------------------------------------------------------------------------------------------------

    def shuffles(self, pas: Pass, offsets: list[int] | None = None) -> list[str]:
        """Join the places of the reduced axes that a warp spans; with ``offsets``, those of the first lane alone.

        Online pairs find their maximum first and then move each sum to it once: an exponential a sum, where joining
        pair by pair takes two a step.
        """
        one = offsets is not None
        offsets = [o for o in (16, 8, 4, 2, 1) if o >= self.X] if offsets is None else offsets
        pairs = self.e.pairs(pas, one)
        if not offsets:
            return []
        out = [f"m{m} = {m}" for m, _ in pairs]
        for offset in offsets:
            out += [f"ym{m} = cuda.shfl_xor_sync(0xffffffff, m{m}, {offset})" for m, _ in pairs]
            out += [f"m{m} = fmax(m{m}, ym{m})" for m, _ in pairs]
        for m, t in pairs:
            out += [f"sm = {self.e.finite(f'm{m}')}", f"{t} = {t} * ex2(({m} - sm) * {LOG2E})", f"{m} = m{m}"]
        peaks = {m for m, _ in pairs}
        added = [f.name for f in self.e.fields(pas, one) if f.name not in peaks]
        for offset in offsets:
            out += [f"y{a} = cuda.shfl_xor_sync(0xffffffff, {a}, {offset})" for a in added]
            out += self.e.merge(pas, lambda name: f"y{name}", one) + [f"{t} = {t} + y{t}" for _, t in pairs]
        return out

    def combined(self, pas: Pass, parts: list[Part], one: bool = False) -> list[str]:
        """Lines that give each accumulator (``one``: of the first lane) what several parts make together; online maxima
        first, as above."""
        pairs, out = self.e.pairs(pas, one), []
        online = {name for pair in pairs for name in pair}
        if pairs and len(parts) > 1:
            for k, part in enumerate(parts):
                peaks = [f for f in part.values if f.name in {m for m, _ in pairs}]
                out += part.lines
                out += [f"{f.name} = {f'fmax({f.name}, {part.values[f]})' if k else part.values[f]}" for f in peaks]
            out += [f"m{m} = {self.e.finite(m)}" for m, _ in pairs]
        for k, part in enumerate(parts):
            read = {f.name: x for f, x in part.values.items()}
            single = [name for name in read if len(parts) == 1 or name not in online]
            out += [*part.lines, *(f"{'y' if k else ''}{name} = {read[name]}" for name in single)]
            if k:
                out += self.e.merge(pas, lambda name: f"y{name}", one)
            if len(parts) > 1:
                for m, t in pairs:
                    moved = f"{read[t]} * ex2(({read[m]} - m{m}) * {LOG2E})"
                    out.append(f"{t} = {t} + {moved}" if k else f"{t} = {moved}")
        return out

    def region(self, t: str) -> int:
        """Elements of type ``t`` that the partials of one join take, at most."""
        most = max(sum(f.type == t for f in self.e.fields(pas)) for pas in self.joins)
        return most * self.parts * self.X

    def slot(self, n: int, fields: list[Field], f: Field, part: str, shared: bool = False) -> str:
        """Where field ``f`` of a part lies; joins take turns with two regions, of which one is always free.

        ``shared``: where that of this thread's column does, ``f`` being its first lane's (``cuda_outer_share``).
        """
        same = [g.name for g in fields if g.type == f.type]
        region = f"r{n % 2} * {self.region(f.type)} + " if len(self.joins) > 1 or self.s.blocks_per_sm else ""
        lane, thread = (" + ce", "cx") if shared else ("", "tx")
        return f"x{f.type}[{region}({part} * {len(same)} + {same.index(f.name)}{lane}) * {self.X} + {thread}]"

    def leave(self, n: int, pas: Pass) -> list[str]:
        """Each warp (or row of warps) leaves its part in shared memory."""
        fields = self.e.fields(pas)
        writes = [f"{self.slot(n, fields, f, 'part')} = {f.name}" for f in fields]
        if self.sub > 1:
            writes = ["if ts == 0:", *(f"    {line}" for line in writes)]
        return [*writes, "cuda.syncthreads()"]

    def collect(self, n: int, pas: Pass) -> list[str]:
        """Every thread combines all parts; a warp that spans several places reads a share and shuffles."""
        fields, parts = self.e.fields(pas), []
        if share.shares(self, pas):
            numbers, offsets = share.turns(self, self.parts)
            for at in numbers:
                parts.append(Part([], {f: self.slot(n, fields, f, at, True) for f in share.heads(self, pas)}))
            joined = [*share.begin(self), *self.combined(pas, parts, True), *self.shuffles(pas, offsets)]
            return joined + (share.spread(self, pas) if self.C == 1 else [])
        for k in range(-(-self.parts // self.sub)):
            at, lines = f"(ts + {k * self.sub})" if self.sub > 1 else str(k), []
            masked = (k + 1) * self.sub > self.parts
            if masked:
                lines = [f"inside = {at} < {self.parts}", f"last = sel(inside, int32{at}, int32({self.parts - 1}))"]
                at = "last"
            reads = {f: self.slot(n, fields, f, at) for f in fields}
            if masked:
                reads = {f: f"sel(inside, {read}, {f.nothing})" for f, read in reads.items()}
            parts.append(Part(lines, reads))
        return self.combined(pas, parts) + self.shuffles(pas)

    def across(self, pas: Pass) -> list[str]:
        """Join the blocks of a cluster: some threads of each write its part to every block, in slots of this join."""
        first: dict[str, int] = {}
        for f in self.e.fields(pas):
            first[f.name] = self.cluster_words.get(f.type, 0)
            self.cluster_words[f.type] = first[f.name] + self.C * self.X
        shared = share.shares(self, pas)
        lane, thread, to, senders = "", "tx", "int32(ty)", f"ty < {self.C}"
        numbers, offsets = [str(k) for k in range(self.C)], list[int]()
        if shared:  # see ``cuda_outer_share``
            lane, thread = f" + ce * {self.C * self.X}", "cx"
            to, senders = f"udiv(tid, {share.width(self)})", f"tid < {share.width(self) * self.C}"
            numbers, offsets = share.turns(self, self.C)
        fields = self.e.fields(pas, shared)
        sends = [
            f"    rs_{f.type}(q{f.type}, int64({first[f.name]}{lane} + rank * {self.X} + {thread}), {to}, {f.name})"
            for f in fields
        ]
        parts = [
            Part([], {f: f"q{f.type}[{first[f.name]}{lane} + {k} * {self.X} + {thread}]" for f in fields})
            for k in numbers
        ]
        joined = self.combined(pas, parts, shared)
        if shared:
            joined += self.shuffles(pas, offsets) + share.spread(self, pas)
        begun = ["cluster_wait()"] if pas is self.joins[0] else []
        return [*begun, f"if {senders}:", *sends, "cluster_sync()", *joined]

    # ---- the kernel -------------------------------------------------------------------------------------------------

    def body(self) -> list[str]:
        """Lines for one set of packs, indices known."""
        out: list[str] = []
        done: set[int] = set()
        indent = ""

        def add(lines: list[str]) -> None:
            out.extend(indent + line for line in lines)

        def kept_axis_values(ids: list[int]) -> list[str]:
            lines = []
            for i in ids:
                if i not in done and self.g.values[i].op not in REDUCTIONS:
                    done.add(i)
                    lines += self.e.value(i, lambda name: name)
            return lines

        for q, pas in enumerate(self.p.passes):
            add(kept_axis_values(list(pas.row_values)))
            if pas.row_stores:
                lines = [line for k in pas.row_stores for line in self.e.store(k, lambda name: name, "d")]
                add([f"if {self.storing()}:", *(f"    {line}" for line in lines)])
            if not pas.walks:
                continue
            add(self.walk(q, pas))
            if not (pas.reduce or pas.online):
                continue
            n = self.joins.index(pas)
            add(self.shuffles(pas))
            if self.parts > 1:
                add(self.leave(n, pas))
                if self.C == 1 and not any(later.walks for later in self.p.passes[q + 1 :]):
                    # Nothing but the kept axes' results is left: the warps that store them go on alone.
                    add([f"if tid < {max(32, self.X)}:"])
                    indent = "    "
                add(self.collect(n, pas))
            if self.C > 1:
                add(self.across(pas))
            add(self.e.results(pas))
            for o in pas.online:
                add(kept_axis_values(self.e.shift_chain(o.shift)))
                add(self.e.totals(o))
        return out

    def storing(self) -> str:
        conds = ["ty == 0"] if self.Y > 1 else []
        conds += ["ok"] if self.ok_needed else []
        conds += ["rank == 0"] if self.C > 1 else []
        return " and ".join(conds) or "True"

    def indices(self) -> list[str]:
        """Lines that take the number ``row`` of a pack apart, and the bases of all tensors there."""
        e, out, rest = self.e, [], "row"
        udiv, urem = e.count.udiv, e.count.urem
        if self.outer:
            out += [f"line = {udiv}(row, {self.line})", f"i{e.x} = int64((row - line * {self.line}) * {e.vec})"]
            rest = "line"
            for a in reversed(self.outer[1:]):
                n = self.g.extents[a]
                out += [f"i{a} = int64({urem}({rest}, {n}))", f"q{a} = {udiv}({rest}, {n})"]
                rest = f"q{a}"
            out.append(f"i{self.outer[0]} = int64({rest})")
        else:
            out.append(f"i{e.x} = int64(row * {e.vec})")
        live = set(self.g.live)
        out += [f"b{i} = {acc.base()}" for i, acc in e.access.items() if i in live]
        return out + [f"o{k} = {acc.base()}" for k, acc in enumerate(e.out_access)]

    def kernel(self) -> CudaSource:
        body = self.body()
        X, s = self.X, self.s
        pre = ["tid = int32(cuda.threadIdx.x)"]
        pre += [f"ty = udiv(tid, {X})", f"tx = int32(tid - ty * {X})"]
        if self.sub > 1:
            pre += [f"part = udiv(ty, {self.sub})", f"ts = int32(ty - part * {self.sub})"]
        else:
            pre.append("part = ty")
        if self.e.tile:
            pre.append(f"lx = int32(tx & {self.e.across - 1})")
        static = 0
        if self.parts > 1:
            regions = 2 if len(self.joins) > 1 or s.blocks_per_sm else 1
            for t in sorted({f.type for pas in self.joins for f in self.e.fields(pas)}):
                pre.append(f"x{t} = cuda.shared.array({regions * self.region(t)}, {t})")
                static += regions * self.region(t) * (8 if t == "int64" else 4)
            if regions > 1:
                pre += ["r0 = int32(0)", "r1 = int32(1)"]
        if self.C > 1:
            pre.append("rank = cluster_rank()")
            for t, n in self.cluster_words.items():
                pre.append(f"q{t} = cuda.shared.array({n}, {t})")
                static += n * (8 if t == "int64" else 4)
            pre.append("cluster_arrive()")  # no block may write to one that has not begun: see across()
        if static > MAX_STATIC:
            raise Unsupported(f"{static} bytes of static shared memory")
        shared = 4 * self.words() * (self.packs - s.held) * s.block if s.keep == "shared" else 0
        if shared:
            pre += ["sf = cuda.shared.array(0, float32)", "su = cuda.shared.array(0, uint32)"]
        rows = f"n0 * {self.inner}" if self.dynamic else f"{self.inner}"
        pre.append(f"rows = {self.count}({rows})")
        loop = [f"row = {self.count}(group * {X} + tx)"]
        if self.ok_needed:
            loop += ["ok = row < rows", f"row = sel(ok, row, {self.count}(rows - 1))"]
        loop += self.indices() + self.ahead_of_walks() + body
        if s.blocks_per_sm:
            if len(self.joins) % 2 and self.parts > 1:
                loop += ["r0 = r1", "r1 = int32(1 - r0)"]
            text = [f"for group in range(blk, (rows + {X - 1}) // {X}, nblk):", *("    " + line for line in loop)]
            text = [*self.ahead_of_loop(), *text]
        else:
            text = [f"group = udiv(blk, {self.C})" if self.C > 1 else "group = blk", *loop]
        launch: dict[str, Any] = {
            "dynamic": self.dynamic,
            "inner": self.inner,
            "per_block": X,
            "blocks_per_sm": s.blocks_per_sm,
            "block": s.block,
            "shared": shared,
            "align": self.alignments(),
            "multiple": 1,
            "generator": GENERATOR,
        }
        launch |= self.e.count.launch()
        if self.C > 1:
            launch["cluster"] = self.C
        check_launch(launch, self.g.extents[0])
        return CudaSource(
            tuple(self.functions), (*pre, *text), self.params(), launch, s.block, s.max_registers, self.C
        )  # fmt: skip

    def params(self) -> tuple[str, ...]:
        return tuple(NAMES[d] for d in (*self.g.inputs, *(o.dtype for o in self.g.outputs)))

    def alignments(self) -> list[int]:
        """Bytes every pointer must be aligned to, inputs first."""
        need = [STORAGE_BYTES[d] for d in self.g.inputs]

        def of(acc: Access, size: int) -> int:
            return min(16, self.e.vec * size) if acc.vector else size

        for i, acc in self.e.access.items():
            v = self.g.values[i]
            if v.op == "load":
                need[v.slot] = max(need[v.slot], of(acc, STORAGE_BYTES[self.g.inputs[v.slot]]))
        outs = zip(self.g.outputs, self.e.out_access, strict=True)
        return need + [of(acc, STORAGE_BYTES[o.dtype]) for o, acc in outs]


def static_bytes(source: CudaSource) -> int:
    """Shared memory of fixed size that a block takes beside ``launch["shared"]``: what its partial results need."""
    arrays = (_ARRAY.search(line) for line in source.body)
    return sum(int(m.group(1)) * (8 if m.group(2) == "int64" else 4) for m in arrays if m)


def emit_outer(program: Program, schedule: CudaSchedule) -> CudaSource:
    """The kernel of a program whose reductions run over axes other than the unit-stride one.

    Raises:
        Unsupported: the schedule does not fit the program.
    """
    if any(e == 0 for e in program.graph.extents):
        raise Unsupported("an empty axis")
    if schedule.prefetch:
        from autotune.compiler.targets.cuda.outer.copied import CopiedOuter

        return CopiedOuter(program, schedule).kernel()
    return Outer(program, schedule).kernel()

"""The row-wise skeleton: threads share a row, passes walk it, reductions join the threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autotune.compiler.program.one_pass import Online
from autotune.compiler.program.program import Pass, power_of_two
from autotune.compiler.targets.cuda.counts import check_launch
from autotune.compiler.targets.cuda.names import tuple_of
from autotune.compiler.targets.cuda.operators import LOG2E, accumulator, combine, identity
from autotune.compiler.targets.cuda.rows import legacy
from autotune.compiler.targets.cuda.rows.cluster import join_cluster
from autotune.compiler.targets.cuda.rows.columns import Accumulators, beginnings
from autotune.compiler.targets.cuda.rows.early import Early
from autotune.compiler.targets.cuda.rows.emitter import accumulators_of
from autotune.compiler.targets.cuda.rows.moments import Joining
from autotune.compiler.targets.cuda.rows.pairs import Pairs
from autotune.compiler.targets.cuda.rows.prefetch import Ahead
from autotune.compiler.targets.cuda.source import GENERATOR, CudaSource
from autotune.errors import Unsupported
from autotune.ir.graph import REDUCTIONS, STORAGE_BYTES

if TYPE_CHECKING:
    from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter

MAX_PACK_LANES = 4096
"""packs * elements * values that a thread's straight-line code may hold: beyond it compiling crawls."""


class Rows:
    def __init__(self, e: CudaEmitter) -> None:
        self.e, self.p, self.s, self.g, self.vec = e, e.program, e.schedule, e.graph, e.vec
        self.count = e.count.type  # of rows and columns
        self.T = self.s.threads_per_row
        self.R = self.s.rows_per_block
        self.C = 1 if self.p.columns else self.s.cluster  # blocks that share a row
        self.joined = self.s.cluster if self.p.columns else 1  # blocks that join their partials over the rows
        self.TT = self.T * self.C  # threads of a row in all blocks that share it
        cols = self.p.n_cols
        self.per_step = self.TT * self.vec
        self.packs = -(-cols // self.per_step)  # packs a thread has, the last of which may lie outside the row
        self.full = cols // self.per_step  # packs that every thread has
        self.tiles = 1
        if self.p.columns and self.p.pointwise:
            # Nothing is reduced along the row, so that a block need not have all of it: unroll packs a thread.
            self.packs = min(self.packs, self.s.unroll)
            self.tiles = -(-cols // (self.per_step * self.packs))
            self.full = self.packs if cols % (self.per_step * self.packs) == 0 else 0
        self.warps = max(1, self.T // 32)
        # Packs a constant number of bytes apart, which the compiler shall see: it does through 64-bit columns, and if
        # the first one is a number it knows nothing of. Then a tensor's packs have one address.
        self.apart = len(self.p.cols) == 1 and self.packs > 1 and self.s.keep == "registers" and not self.p.columns
        self.column_type = "int64" if self.apart else self.count
        e.wide_columns = self.apart
        self.body: list[str] = []
        self.functions: list[str] = []
        self.syncs = 0
        self.shared_static = 0

    # ---- keeping in shared memory -----------------------------------------------------------------------------------

    def words(self, q: int) -> int:
        return sum(self.e.kept_words(i) for i in self.e.kept_of[q])

    def shared_base(self, q: int) -> int:
        return sum(self.words(k) for k in range(q)) * self.packs * self.T * self.R

    def shared_words(self) -> int:
        return self.shared_base(len(self.p.passes))

    def check(self) -> None:
        s = self.s
        if self.T % 32 if self.T > 32 else self.T & (self.T - 1):
            raise Unsupported("threads_per_row must be a power of two up to 32 or a multiple of 32")
        if s.block > 1024:
            raise Unsupported("more than 1024 threads a block")
        if self.C > 1 and (self.R > 1 or s.blocks_per_sm):
            raise Unsupported("a cluster works on one row, and not on row after row")
        if self.C > 1 and self.packs == 1 and self.per_step // self.C >= self.p.n_cols:
            raise Unsupported("a row that one block holds needs no cluster")
        if s.block < 32:
            raise Unsupported("less than a warp a block")
        kept = {i for ks in self.e.kept_of.values() for i in ks}
        if s.keep == "shared" and any(self.g.values[i].dtype != "float32" for i in kept):
            raise Unsupported("keeping integers in shared memory")
        if s.keep == "shared" and self.p.columns:
            raise Unsupported("keeping in shared memory beside accumulators over the rows")
        if s.keep == "registers" or self.p.columns:
            lanes = self.packs * self.vec * max(1, max(len(q.compute) for q in self.p.passes))
            if lanes > MAX_PACK_LANES:
                raise Unsupported(f"a row is too long for {self.T} threads to keep in registers")

    # ---- one pass ---------------------------------------------------------------------------------------------------

    def emit_pass(self, q: int, pas: Pass) -> list[str]:
        """Lines of the walk of pass ``q``, its reductions not yet joined."""
        made, accumulators = self.e.pass_function(q, pas)
        text, params = legacy.function(made, f"f{q}")
        accs = [a.name for a in accumulators]
        self.functions.append(text)
        if accs or self.e.kept_of[q] or beginnings(self.e, q):
            self.functions.append(legacy.function(self.e.empty_function(q, accumulators), f"e{q}")[0])
        out = []
        for r in pas.reduce:
            v = self.g.values[r]
            out.append(f"a{r} = {identity(v.op, v.dtype)}")
        for o in pas.online:
            out.append(f"a{o.peak} = float32(-inf)")
            out.append(f"a{o.total} = float32(0)")
        for m in pas.moments:
            out += [f"a{m.total} = float32(0)", f"a{m.square} = float32(0)"]
        loop = self.s.keep != "registers" and not self.p.columns
        unroll = self.s.unroll if loop else self.packs
        steps = self.full // unroll if loop else 0
        if loop and steps > 1:
            out.append(f"for step in range({steps}):")
            out.append(f"    j = int32(step) * {unroll}")
            for u in range(unroll):
                out += ["    " + x for x in self.emit_pack(q, pas, params, accs, f"(j + {u})", guarded=False)]
            begin = steps * unroll
        else:
            begin = 0
        for k in range(begin, self.packs):
            out += self.emit_pack(q, pas, params, accs, str(k), guarded=k >= self.full)
        return out

    def column(self, k: str) -> str:
        """The first column of a thread's pack number ``k``."""
        if self.apart:
            return f"(tv + {int(k) * self.TT * self.vec})"
        offset = " + c0" if self.tiles > 1 else ""
        return f"{self.count}(({k} * {self.TT} + tg) * {self.vec}{offset})"

    def row_of(self, group: str) -> str:
        """The row of this thread in row set ``group``; the last one where there are no more."""
        if self.R == 1:
            return f"{self.count}({group})"
        at = f"{self.count}({group} * {self.R} + rb)"
        return f"sel({at} < rows, {at}, {self.count}(rows - 1))"

    def emit_pack(self, q: int, pas: Pass, params: list[str], accs: list[str], k: str, guarded: bool) -> list[str]:
        e = self.e
        out = []
        out.append(f"c = {self.column(k)}")
        if guarded:  # loads that do not depend on the row leave the row loop, and the branch in it: see intrinsics
            least = "least64" if self.column_type == "int64" else "least"
            out.append(f"cl = {least}(c, {self.column_type}({self.p.n_cols - self.vec}))")
        if pas.moments:
            out += Joining(self).weights(k)
        unrolled = self.s.keep == "registers" or bool(self.p.columns)
        suffix = k if k.isdigit() and unrolled else "x"
        shared = self.s.keep == "shared"
        pre: list[str] = []
        for name in params:
            if name.startswith("z") and name[1:].isdigit() and shared:
                pre += self.fetch_shared(int(name[1:]), k)
        args = []
        for name in params:
            if name.startswith("z") and name[1:].isdigit():
                args.append(f"z{name[1:]}_{suffix}")
            elif name == "x":
                args.append(f"x_{suffix}")
            elif name.startswith("g") and name[1:].isdigit():
                args.append(f"{name}_{suffix}")
            elif name == "c" and guarded:
                args.append("cl")
            else:
                args.append(name)
        call = f"f{q}({', '.join(args)})"
        held = beginnings(e, q)
        returns = bool(accs or e.kept_of[q] or held)
        take = [f"{a} = z{q}_{suffix}[{n}]" for n, a in enumerate(accs)]
        at = len(accs) + sum(e.kept_words(i) for i in e.kept_of[q])
        taken = [f"z{q}_{suffix}[{at + n}]" for n in range(len(held))]
        hold = [f"g{q}_{suffix} = {tuple_of(taken)}"] if held else []
        post = self.put_shared(q, k) if shared else []
        if not guarded:
            out += pre + ([f"z{q}_{suffix} = {call}"] if returns else [call]) + take + hold + post
        elif returns:
            out.append(f"z{q}_{suffix} = e{q}({', '.join(accs)})")
            out.append(f"if c < {self.p.n_cols}:")
            out += ["    " + x for x in [*pre, f"z{q}_{suffix} = {call}", *hold, *post]]
            out += take
        else:
            out.append(f"if c < {self.p.n_cols}:")
            out += ["    " + x for x in [*pre, call]]
        return out

    def put_shared(self, q: int, k: str) -> list[str]:
        """Each thread stores its own words and later fetches the same ones: no barrier, no bank conflict."""
        if not self.e.kept_of[q]:
            return []
        first = accumulators_of(self.p.passes[q])
        out, w = [], 0
        for i in self.e.kept_of[q]:
            view = "su" if self.e.packed(i) else "sf"
            for n in range(self.e.kept_words(i)):
                out.append(f"{view}[{self.shared_at(q, k, w + n)}] = z{q}_x[{first + w + n}]")
            w += self.e.kept_words(i)
        return out

    def fetch_shared(self, q: int, k: str) -> list[str]:
        pas = self.p.passes[q]
        skipped = [identity(self.g.values[r].op, self.g.values[r].dtype) for r in pas.reduce]
        skipped += ["float32(0)"] * (2 * len(pas.online) + 2 * len(pas.moments))
        items, w = [], 0
        for i in self.e.kept_of[q]:
            view = "su" if self.e.packed(i) else "sf"
            items += [f"{view}[{self.shared_at(q, k, w + n)}]" for n in range(self.e.kept_words(i))]
            w += self.e.kept_words(i)
        return [f"z{q}_x = ({', '.join(skipped + items)},)"]

    def shared_at(self, q: int, k: str, w: int) -> str:
        per_pack = self.words(q) * self.T
        return f"uint32({self.shared_base(q)} + (rb * {self.packs} + {k}) * {per_pack} + {w * self.T} + t)"

    # ---- joining the threads of a row -------------------------------------------------------------------------------

    def join(self, pas: Pass) -> list[str]:
        self.joining = Joining(self)
        out: list[str] = self.joining.begin() if pas.moments else []
        pairs = Pairs(self, pas)
        offsets = [o for o in (16, 8, 4, 2, 1) if o < self.T]
        for o in offsets:
            out += pairs.halve() if o == 16 else []
            out += self.exchange(pas, o, pairs.single if o == 16 else pairs.carried)
        if self.warps > 1:
            out += self.join_warps(pas, pairs)
        if self.C > 1:
            out += join_cluster(self, pas, self.joining)
        for m in pas.moments:
            out += [f"v{m.total} = a{m.total}", f"v{m.square} = {self.joining.squares(m)}"]
        for r in pas.reduce:
            v = self.g.values[r]
            out.append(f"v{r} = (a{r} != 0)" if v.dtype == "bool" else f"v{r} = a{r}")
        return out

    def exchange(self, pas: Pass, offset: int, reduce: Sequence[int]) -> list[str]:
        """Lines that join each lane with the one ``offset`` away; of the pass's reductions those in ``reduce``."""
        out = []
        for r in reduce:
            v = self.g.values[r]
            other = f"cuda.shfl_xor_sync(0xffffffff, a{r}, {offset})"
            out.append(f"y = {other}" if accumulator(v.dtype) == "float32" else f"y{accumulator(v.dtype)} = {other}")
            y = "y" if accumulator(v.dtype) == "float32" else f"y{accumulator(v.dtype)}"
            out.append(f"a{r} = {combine(v.op, v.dtype, f'a{r}', y)}")
        for o in pas.online:
            m, t = f"a{o.peak}", f"a{o.total}"
            out.append(f"ym = cuda.shfl_xor_sync(0xffffffff, {m}, {offset})")
            out.append(f"yt = cuda.shfl_xor_sync(0xffffffff, {t}, {offset})")
            out += self.merge_online(o, "ym", "yt")
        return out + self.joining.exchange(pas, offset)

    def merge_online(self, o: Online, ym: str, yt: str) -> list[str]:
        m, t = f"a{o.peak}", f"a{o.total}"

        def scale(x: str) -> str:
            return f"sel({x} == mm, float32(1), ex2(({x} - sm) * {LOG2E}))"

        return [
            f"mm = fmax({m}, {ym})",
            "sm = sel(abs(mm) == float32(inf), float32(0), mm)",
            f"{t} = {t} * {scale(m)} + {yt} * {scale(ym)}",
            f"{m} = mm",
        ]

    def join_warps(self, pas: Pass, pairs: Pairs) -> list[str]:
        """Lane 0 of each warp leaves its part in shared memory; after one barrier every warp combines all parts."""
        out = []
        self.syncs += 1
        slots = []
        left, paired = pairs.leave(self.slot_at)
        for r in pairs.single:
            t = accumulator(self.g.values[r].dtype)
            v = self.g.values[r]
            slots.append((f"a{r}", f"x{t}", self.slot(t), identity(v.op, v.dtype)))
        for o in pas.online:
            slots.append((f"a{o.peak}", "xfloat32", self.slot("float32"), "float32(-inf)"))
            slots.append((f"a{o.total}", "xfloat32", self.slot("float32"), "float32(0)"))
        for m in pas.moments:
            slots.append((f"a{m.total}", "xfloat32", self.slot("float32"), "float32(0)"))
            slots.append((f"a{m.square}", "xfloat32", self.slot("float32"), "float32(0)"))
        if pas.moments and self.joining.uneven:
            slots.append(("nc", "xfloat32", self.slot("float32"), "float32(0)"))
        if slots:
            out.append("if lane == 0:")
        for name, array, slot, _ in slots:
            out.append(f"    {array}[{self.slot_at(slot, 'warp')}] = {name}")
        out += [*left, "cuda.syncthreads()"]
        whole = power_of_two(self.warps)
        for name, array, slot, nothing in slots:
            part = f"{array}[{self.slot_at(slot, 'part')}]"
            out.append(f"{name} = {part if whole == self.warps else f'sel(mine, {part}, {nothing})'}")
        out += pairs.collect(paired, self.slot_at)
        o2 = whole // 2
        while o2:
            out += self.exchange(pas, o2, pairs.single if o2 == 16 else pairs.carried)
            o2 //= 2
        return out + pairs.share()

    slot_counts: dict[str, int]
    joining: Joining

    @property
    def first_tile(self) -> str:
        """Condition that this block has the first columns of its rows."""
        return "tile == 0" if self.tiles > 1 else "True"

    def slot(self, t: str) -> int:
        n = self.slot_counts.get(t, 0)
        self.slot_counts[t] = n + 1
        return n

    def slot_at(self, slot: int, part: str) -> str:
        """Unsigned, as all indices of shared memory: Numba wraps a negative index round, five instructions each."""
        return f"uint32(par + {slot * self.R * self.warps} + rb * {self.warps} + {part})"

    # ---- the kernel -------------------------------------------------------------------------------------------------

    def kernel(self) -> CudaSource:
        self.check()
        self.slot_counts = {}
        self.cluster_slots: dict[str, int] = {}
        self.cluster_begun = False
        e, p, g = self.e, self.p, self.g
        main: list[str] = []
        held = Accumulators(self) if p.columns else None
        ahead: Ahead | None = None
        early: Early | None = None
        if self.s.prefetch:
            if not held and self.s.keep != "registers":
                raise Unsupported("loading ahead is for kernels that keep rows in registers")
            if held or self.s.blocks_per_sm:
                ahead = Ahead(self)
                self.functions.append(ahead.function())
            else:
                early = Early(self)
                main += early.begin()
        done: set[int] = set(ahead.row_loads) if ahead else set()
        main += ahead.take() if ahead else []

        def row_values(ids: list[int]) -> list[str]:
            out = []
            for i in ids:
                if i not in done and g.values[i].op not in REDUCTIONS:
                    done.add(i)
                    out += legacy.lines(e.row_value(i))
            return out

        for q, pas in enumerate(p.passes):
            main += row_values(list(pas.row_values))
            for k in pas.row_stores:
                main += legacy.lines(e.row_store(k))
            if held:
                main += held.add_row(pas)
            if not pas.walks:
                continue
            main += self.emit_pass(q, pas)
            if ahead and q == ahead.pass_number:
                main.append("#ahead")
            if pas.reduce or pas.online or pas.moments:
                main += early.end() if early and q == early.first else []
                main += self.join(pas)
            for o in pas.online:
                main.append(f"v{o.peak} = a{o.peak}")
                main += row_values(self.row_chain(o.shift))
                main.append(f"sh = sel(abs(v{o.peak}) == float32(inf), float32(0), v{o.peak})")
                main.append(f"v{o.total} = a{o.total} * ex2((sh - {legacy.text(e.name(o.shift, 0))}) * {LOG2E})")
        inner_rows = e.inner_rows()
        dynamic = p.dynamic == 0
        persistent = self.s.blocks_per_sm > 0 or held is not None
        pre = ["tid = int32(cuda.threadIdx.x)"]
        pre.append(f"rb = udiv(tid, {self.T})" if self.R > 1 else "rb = int32(0)")
        pre.append(f"t = int32(tid - rb * {self.T})" if self.R > 1 else "t = tid")
        if self.C > 1:
            pre.append("cluster_arrive()")
            pre.append("rank = cluster_rank()")
            pre.append(f"tg = int32(rank * {self.T} + t)")
        else:
            pre += ["cluster_arrive()", "rank = cluster_rank()"] if self.joined > 1 else []
            pre.append("tg = t")
        pre.append("lane = int32(tid & 31)")
        pre.append("warp = int32(t >> 5)")
        if self.apart:
            pre.append(f"tv = int64(pin(int32(tg * {self.vec})))")
        if self.warps > 1:  # lanes that hold no warp's part read the first one's and ignore it
            pre.append(f"part = int32(lane & {power_of_two(self.warps) - 1})")
            pre.append(f"mine = part < {self.warps}")
            pre.append("part = sel(mine, part, int32(0))")
        pre.append(f"rows = {self.count}(n0 * {inner_rows})" if dynamic else f"rows = {self.count}({inner_rows})")
        parity = self.warps > 1 and persistent and self.syncs == 1
        sizes: dict[str, int] = {}
        for t, n in self.slot_counts.items():
            sizes[t] = n * self.R * self.warps * (2 if parity else 1)
            pre.append(f"x{t} = cuda.shared.array({sizes[t]}, {t})")
            self.shared_static += sizes[t] * (8 if t == "int64" else 4)
        span = max((n * self.R * self.warps for n in self.slot_counts.values()), default=0)
        if self.slot_counts:
            pre.append("par = int32(0)")
        for t, n in self.cluster_slots.items():
            pre.append(f"q{t} = cuda.shared.array({n * self.C}, {t})")
            self.shared_static += n * self.C * (8 if t == "int64" else 4)
        dynamic_shared = 0
        if self.s.keep == "shared" and self.shared_words():
            dynamic_shared = 4 * self.shared_words()
            pre.append("sf = cuda.shared.array(0, float32)")
            pre.append("su = cuda.shared.array(0, uint32)")
        loop: list[str] = []
        loop.append(f"row = {self.count}(group * {self.R} + rb)" if self.R > 1 else f"row = {self.count}(group)")
        if self.R > 1:
            loop.append("ok = row < rows")
            loop.append(f"row = sel(ok, row, {self.count}(rows - 1))")
        loop += held.each_row() if held else []
        loop += legacy.lines(e.row_indices() + e.bases()) + main
        if parity:
            loop.append(f"par = int32({span} - par)")
        text: list[str] = []
        pre.append(f"sets = {self.count}((rows + {self.R - 1}) // {self.R})")
        sets, first, step = "sets", "chunk" if held else "blk", "step" if held else "nblk"
        if ahead:
            at = loop.index("#ahead")
            loop[at : at + 1] = ahead.next_row(step, sets)
        if held:
            place = "blk"
            if self.joined > 1:  # the blocks of a cluster have different rows of the same tile
                place = "team"
                text.append(f"team = udiv(blk, {self.joined})")
            text.append(f"lead = udiv({place}, {self.tiles})" if self.tiles > 1 else f"lead = {place}")
            text.append(f"tile = int32({place} - lead * {self.tiles})")
            text.append(f"chunk = int32(lead * {self.joined} + rank)" if self.joined > 1 else "chunk = lead")
            text.append(f"c0 = {self.count}(tile * {self.per_step * self.packs})")
            text.append(f"step = udiv(nblk, {self.tiles})" if self.tiles > 1 else "step = nblk")
            text += held.begin()
            text += ahead.begin(first, sets) if ahead else []
            text.append(f"for group in range(chunk, {sets}, step):")
            text += ["    " + x for x in loop]
            shared, after, size = held.end()
            text += after
            pre += shared
            self.shared_static += size
        elif persistent:
            text += ahead.begin(first, sets) if ahead else []
            text.append(f"for group in range(blk, {sets}, nblk):")
            text += ["    " + x for x in loop]
        else:
            text.append(f"group = udiv(blk, {self.C})" if self.C > 1 else "group = blk")
            text += loop
        if self.shared_static > 48 * 1024:
            raise Unsupported(f"{self.shared_static} bytes of static shared memory")
        launch: dict[str, Any] = {
            "dynamic": dynamic,
            "inner": inner_rows,
            "per_block": self.R,
            "blocks_per_sm": self.s.blocks_per_sm,
            "block": self.s.block,
            "shared": dynamic_shared,
            "align": alignments(e),
            "multiple": 1,
            "generator": GENERATOR,
        }
        launch |= e.count.launch()
        cluster = max(self.C, self.joined)
        if cluster > 1:
            launch["cluster"] = cluster
        check_launch(launch, g.extents[0])
        params = e.params()
        if held:
            params += held.params()
            launch["align"] += [16] * len(held.params())
            launch["tiles"] = self.tiles
        return CudaSource(
            tuple(self.functions), (*pre, *text), params, launch, self.s.block, self.s.max_registers, cluster
        )

    def row_chain(self, i: int) -> list[int]:
        """Row values that value ``i`` is made from, in order, ``i`` included."""
        seen: set[int] = set()
        stack = [i]
        while stack:
            j = stack.pop()
            if j in seen or self.p.domain(j) != "row" or self.g.values[j].op in REDUCTIONS:
                continue
            seen.add(j)
            stack.extend(self.g.values[j].args)
        return sorted(seen)


def alignments(e: CudaEmitter) -> list[int]:
    """Bytes every pointer must be aligned to, inputs first."""
    g = e.graph
    need = [STORAGE_BYTES[d] for d in g.inputs]
    for i, acc in e.access.items():
        v = g.values[i]
        if acc.vector and (v.op == "load" or e.gathers_packs(i)):
            need[v.slot] = max(need[v.slot], min(16, e.vec * STORAGE_BYTES[g.inputs[v.slot]]))
    for o, acc in zip(g.outputs, e.out_access, strict=True):
        size = STORAGE_BYTES[o.dtype]
        need.append(min(16, e.vec * size) if acc.vector else size)
    return need


def emit_rows(e: CudaEmitter) -> CudaSource:
    """The row-wise kernel of ``e``'s program."""
    return Rows(e).kernel()

"""The outer skeleton with strips copied to shared memory ahead of their walks (``keep = shared`` with ``prefetch``).

What later passes read again of the inputs goes to shared memory by asynchronous copies, which take no registers: so
few are left that several blocks fit an SM, and one of them loads while another one stores. All copies of a strip begin
at once and are awaited in groups. In a persistent grid the last walk begins to copy the next strip to each place that
it has done with, so that a block loads while it stores.

A strip for which shared memory is too small has its first places (``held`` of each thread) in registers: loads that are
issued before the copies, and are taken first. So all strips of a tensor may be on the device at the same time, and no
block waits for another one to end.

Each thread copies what it will read itself, so that no barrier stands between a strip's copies and its walks. What is
computed and kept takes the place of what is not read any more: softmax without ``online`` writes its exponentials over
its input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from autotune.compiler.program.program import Pass
from autotune.compiler.targets.cuda.names import HINTS, NAMES
from autotune.compiler.targets.cuda.outer.kernel import Outer
from autotune.compiler.targets.cuda.outer.lanes import Lanes
from autotune.errors import Unsupported
from autotune.ir.graph import STORAGE_BYTES

GROUPS = 32
"""Groups of copies that may be under way at a time; the hardware counts to 63."""
Place = Callable[[str, int, bool], list[str]]
_OF_THIS_STRIP = re.compile(r"\b(row|line|i\d+|q\d+|b\d+)\b")


def copied(e: Lanes) -> tuple[int, ...]:
    """The loads that asynchronous copies can make: kept by the first walk, in whole vectors of 4 bytes or more."""
    first = next(pas for pas in e.p.passes if pas.walks)
    out = []
    for i in first.kept_out:
        v = e.g.values[i]
        if v.op != "load" or v.guards or e.lanes(i) != e.vec or not (e.access[i].vector or e.vec == 1):
            continue
        if e.vec * STORAGE_BYTES[e.g.inputs[v.slot]] >= 4:
            out.append(i)
    return tuple(out)


class CopiedOuter(Outer):
    """See the module."""

    def prepare(self) -> None:
        if self.s.keep != "shared":
            raise Unsupported("copying ahead without keeping in shared memory")
        e = self.e
        e.handing, e.ahead = True, copied(e)
        if not e.ahead:
            raise Unsupported("no loads that can be copied ahead")
        self.walked = [q for q, pas in enumerate(self.p.passes) if pas.walks]
        self.firsts: dict[int, int] = {}  # the first word of each kept value, for a thread and a place
        self.most = 0
        self.lay_out()
        self.held = self.s.held
        if self.held and (self.s.blocks_per_sm or self.held >= self.packs):
            raise Unsupported("holding in registers in a persistent grid, or everything")
        self.e.scoring = True
        self.steps = (self.full - self.held) // self.s.unroll  # whole groups of places in shared memory
        self.rest = self.held + self.steps * self.s.unroll
        self.groups = self.steps + (self.rest < self.packs)
        if self.groups > GROUPS:
            raise Unsupported(f"{self.groups} groups of copies: a larger unroll makes fewer")

    # ---- what lies where --------------------------------------------------------------------------------------------

    def kept(self, i: int) -> int:
        """Words that value ``i`` takes."""
        if i in self.e.ahead:
            return self.e.vec * STORAGE_BYTES[self.e.g.inputs[self.g.values[i].slot]] // 4
        return self.e.lanes(i)

    def lay_out(self) -> None:
        """Give each kept value its words; what a pass reads for the last time makes room for what it leaves."""
        last = {i: q for q, pas in enumerate(self.p.passes) for i in pas.kept_in}
        free: dict[int, list[int]] = {}
        for q, pas in enumerate(self.p.passes):
            for i in pas.kept_in:
                if last[i] == q:
                    free.setdefault(self.kept(i), []).append(self.firsts[i])
            for i in pas.kept_out:
                n = self.kept(i)
                if free.get(n):
                    self.firsts[i] = free[n].pop()
                else:
                    self.firsts[i] = self.most
                    self.most += n

    def words(self) -> int:
        return self.most

    def spot(self, i: int, k: str) -> str:
        """The arguments that say where this thread's value ``i`` of place ``k`` lies: its first word, and how far on
        each further piece of 16 bytes is."""
        wide, first = min(4, self.kept(i)), self.firsts[i] - self.held * self.most
        return f"({k} * {self.most} + {first}) * {self.s.block} + tid * {wide}, {4 * self.s.block}"

    # ---- copies -----------------------------------------------------------------------------------------------------

    def place_lines(self, k: str, masked: bool) -> list[str]:
        """The number ``j`` of the place of the reduced axes; beyond the last one, the last one."""
        where = f"({k} * {self.C} + rank)" if self.C > 1 else k
        out = [f"j = {self.count}({where} * {self.Y} + ty)"]
        if masked:
            out += [f"inside = j < {self.p.n_cols}", f"j = sel(inside, j, {self.count}({self.p.n_cols - 1}))"]
        return out

    def copies(self, k: str, masked: bool, suffix: str = "") -> list[str]:
        """Begin to copy place ``k`` of the strip whose bases end in ``suffix``; ``j`` is known where it has one."""
        e = self.e
        out = [] if suffix else self.place_lines(k, masked)
        out += e._columns(lambda name: name)
        for i in e.ahead:
            v = e.g.values[i]
            hint = e.load_hint(i) if self.s.load_hint in ("prefetch", "evict_first") else HINTS["default"]
            name = f"copy_{NAMES[e.g.inputs[v.slot]]}_{e.vec}_{hint}"
            out.append(f"{name}(su, {self.spot(i, k)}, p{v.slot}, int64({e.access[i].at(f'b{i}{suffix}', 0)}))")
        return out

    def loads(self) -> list[str]:
        """Load the places that are held in registers, as they lie in memory."""
        e, out = self.e, []
        for k in range(self.held):
            out += [*self.place_lines(str(k), masked=False), *e._columns(lambda name: name)]
            for i in e.ahead:
                v = e.g.values[i]
                name = f"lr_{NAMES[e.g.inputs[v.slot]]}_{e.vec}_{e.load_hint(i)}"
                out.append(f"h{i}_{k} = {name}(p{v.slot}, int64({e.access[i].at(f'b{i}', 0)}))")
        return out

    def strip(self) -> list[str]:
        """Begin to load and to copy a whole strip."""
        return self.loads() + self.each(
            lambda k, _, masked: self.copies(k, masked), after=lambda n: ["commit_copies()"]
        )

    def each(
        self, lines: Place, before: Sequence[str] = (), after: Callable[[int], list[str]] = lambda _: []
    ) -> list[str]:
        """``lines(k, u, masked)`` for every place in shared memory, ``unroll`` of them a group, in which their numbers
        ``u`` are 0 to ``n - 1``; ``before`` and ``after(n)`` around each group.

        A loop stays one in the machine code: unrolled, what is executed but once would not fit the instruction cache,
        and values of several groups would be in registers at the same time.
        """
        out: list[str] = []
        unroll, first = self.s.unroll, self.held
        if self.steps > 1:
            body = [f"k = int32({first} + step * {unroll})", *before]
            body += [line for u in range(unroll) for line in lines(f"(k + {u})", u, False)]
            out += [f"for step in range(rounds(int32({self.steps}))):"]
            out += ["    " + line for line in (*body, *after(unroll))]
            first = self.rest
        for begin in range(first, self.packs, unroll):
            n = min(unroll, self.packs - begin)
            out += before
            out += [line for u in range(n) for line in lines(str(begin + u), u, begin + u >= self.full)]
            out += after(n)
        return out

    def ahead_of_walks(self) -> list[str]:
        if not self.s.blocks_per_sm:
            return self.strip()
        sets = f"(rows + {self.X - 1}) // {self.X}"
        return [f"more = group + nblk < {sets}", *self.following("sel(more, int32(group + nblk), int32(group))")]

    def ahead_of_loop(self) -> list[str]:
        first = [f"row = {self.count}(blk * {self.X} + tx)"]
        if self.ok_needed:
            first.append(f"row = sel(row < rows, row, {self.count}(rows - 1))")
        lines = [*first, *self.indices(), *self.strip()]
        return [f"if blk < (rows + {self.X - 1}) // {self.X}:", *("    " + line for line in lines)]

    def following(self, group: str) -> list[str]:
        """The indices and bases of another strip, under names of their own."""
        out = [f"row = {self.count}({group} * {self.X} + tx)"]
        if self.ok_needed:
            out.append(f"row = sel(row < rows, row, {self.count}(rows - 1))")
        others = {f"b{i}" for i in self.e.access} - {f"b{i}" for i in self.e.ahead}
        own = [x for x in self.indices() if x[0] != "o" and x.partition(" ")[0] not in others]
        return [_OF_THIS_STRIP.sub(r"\1n", line) for line in (*out, *own)]

    # ---- walks ------------------------------------------------------------------------------------------------------

    def walk(self, q: int, pas: Pass) -> list[str]:
        guarded = self.ok_needed or self.packs > self.full
        text, params = self.e.pass_function(q, pas, self.kept_from, guarded)
        self.functions.append(text)
        out = [f"{f.name} = {f.nothing}" for f in self.e.fields(pas)]

        def place(k: str, u: int, masked: bool) -> list[str]:
            return self.place_of_walk(q, pas, params, k, u, masked)

        def after(n: int) -> list[str]:
            ahead = q == self.walked[-1] and self.s.blocks_per_sm
            return self.e.online_group(pas, n) + (["commit_copies()"] if ahead else [])

        for begin in range(0, self.held, self.s.unroll):
            n = min(self.s.unroll, self.held - begin)
            out += [line for u in range(n) for line in place(str(begin + u), u, False)] + after(n)
        # An empty group a step: what may not be there yet then has one number for all steps.
        awaited = ["commit_copies()", f"await_copies_{self.groups}()"] if q == self.walked[0] else []
        out += self.each(place, awaited, after)
        return out + self.e.settle(pas)

    def place_of_walk(self, q: int, pas: Pass, params: list[str], k: str, u: int, masked: bool) -> list[str]:
        """One place of the walk of pass ``q``, the ``u``-th of its group; what a masked one adds is dropped, as in
        :meth:`Outer.pack`."""
        e = self.e
        out = self.place_lines(k, masked)
        held = k.isdecimal() and int(k) < self.held
        live = "ok" if self.ok_needed else "True"
        if masked:
            live = "sel(inside, ok, False)" if self.ok_needed else "inside"
        for i in (int(name[1:]) for name in params if re.fullmatch(r"s\d+", name)):
            short = NAMES[e.g.inputs[e.g.values[i].slot]] if i in e.ahead else "f32"
            if not held:
                out.append(f"s{i} = take_{short}_{e.lanes(i)}(su, {self.spot(i, k)})")
            else:
                out.append(f"s{i} = un_{short}_{e.vec}(h{i}_{k})" if i in e.ahead else f"s{i} = h{i}_{k}")
        call = f"f{q}({', '.join(live if name == 'live' else name for name in params)})"
        online = [name for pair in e.pairs(pas) for name in pair]
        fields = [f for f in e.fields(pas) if f.name not in online]
        left = [i for i in pas.kept_out if i not in e.ahead]
        out.append(f"z{q}_x = {call}" if e.fields(pas) or left else call)
        for n, f in enumerate(fields):
            out.append(f"{f.name} = sel(inside, z{q}_x[{n}], {f.name})" if masked else f"{f.name} = z{q}_x[{n}]")
        at = len(fields)
        for i in left:
            values = ", ".join(f"z{q}_x[{at + w}]" for w in range(e.lanes(i)))
            out.append(
                f"h{i}_{k} = ({values},)" if held else f"put_f32_{e.lanes(i)}(su, {self.spot(i, k)}, ({values},))"
            )
            at += e.lanes(i)
        for n, (peak, _) in enumerate(e.pairs(pas)):
            score = f"z{q}_x[{at + n}]"
            out.append(f"x{peak}_{u} = {f'sel(inside, {score}, float32(-inf))' if masked else score}")
        if q == self.walked[-1] and self.s.blocks_per_sm:
            out += ["if more:", *("    " + line for line in self.copies(k, masked, "n"))]
        return out

"""The outer skeleton with strips copied to shared memory ahead of their walks (``keep = shared`` with ``prefetch``).

Asynchronous copies, which need no registers, bring the inputs that later passes read again to shared memory. So few
registers are needed that several blocks fit an SM, and one of them loads while another one stores. All copies of a
strip are issued at once and are awaited in groups.

If shared memory is too small for a strip, its first indices (``held`` per thread) are in registers. Their loads are
issued before the copies and are used first. So all strips of a tensor can be on the device at the same time, and no
block waits for the end of another one.

Each thread copies the elements that it reads, so that a strip's copies and its walks need no barrier. Computed values
overwrite values that are no longer read: softmax without ``online`` writes its exponentials over its input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autotune.compiler.kernel.nodes import (
    Assign,
    Cast,
    Const,
    Do,
    Expr,
    Function,
    Load,
    Operand,
    Pointer,
    Select,
    Stmt,
    Tuple,
    Unpack,
    Var,
    expr,
    loop,
)
from autotune.compiler.program.program import Pass
from autotune.compiler.targets.cuda.device import (
    COMMIT_COPIES,
    THREAD,
    Words,
    await_copies,
    copy_ahead,
    put,
    rounds,
    take,
)
from autotune.compiler.targets.cuda.outer.kernel import Outer
from autotune.errors import Superseded, Unsupported
from autotune.ir.graph import STORAGE_BYTES

GROUPS = 32
"""Groups of copies that may be under way at a time; the hardware counts to 63."""
Place = Callable[[Operand, int, bool], list[Stmt]]


class CopiedOuter(Outer):
    """The outer kernel with strips in shared memory; see the module docstring."""

    copies = True

    def prepare(self) -> None:
        schedule = self.schedule
        if schedule.keep != "shared":
            raise Unsupported("copying ahead without keeping in shared memory")
        if schedule.blocks_per_sm:
            raise Superseded("strips copied ahead in a persistent grid, which this autotune lacks")
        if not self.lanes.prefetched:
            raise Unsupported("no loads that can be copied ahead")
        self.first_walk = min(q for q, pas in enumerate(self.program.passes) if pas.walks)
        self.firsts: dict[int, int] = {}  # the first word of each kept value, for a thread and a place
        self.words = 0
        self.lay_out()
        self.held = schedule.held
        if self.held and self.held >= self.packs:
            raise Unsupported("holding everything in registers")
        self.steps = (self.full - self.held) // schedule.unroll  # whole groups of places in shared memory
        self.rest = self.held + self.steps * schedule.unroll
        self.groups = self.steps + (self.rest < self.packs)
        if self.groups > GROUPS:
            raise Unsupported(f"{self.groups} groups of copies: a larger unroll makes fewer")

    # ---- layout --------------------------------------------------------------------------------------------

    def kept(self, i: int) -> int:
        """Words that value ``i`` takes."""
        lanes = self.lanes
        return lanes.vec * STORAGE_BYTES[lanes.storage(i)] // 4 if i in lanes.prefetched else lanes.lanes(i)

    def lay_out(self) -> None:
        """Give each kept value its words; a value that is read for the last time makes room for others."""
        last = {i: q for q, pas in enumerate(self.program.passes) for i in pas.kept_in}
        free: dict[int, list[int]] = {}
        for q, pas in enumerate(self.program.passes):
            for i in pas.kept_in:
                if last[i] == q:
                    free.setdefault(self.kept(i), []).append(self.firsts[i])
            for i in pas.kept_out:
                n = self.kept(i)
                if free.get(n):
                    self.firsts[i] = free[n].pop()
                else:
                    self.firsts[i] = self.words
                    self.words += n

    def spot(self, i: int, k: Operand) -> Words:
        """The words of this thread's value ``i`` of place ``k``."""
        wide, first = min(4, self.kept(i)), self.firsts[i] - self.held * self.words
        at = (expr(k) * self.words + first) * self.schedule.block + THREAD * wide
        return self.kept_words, at, Const(4 * self.schedule.block)

    def in_registers(self, i: int, k: int) -> Var:
        """Value ``i`` of place ``k``, one of those held in registers."""
        return Var(f"held{i}_{k}")

    # ---- copies -----------------------------------------------------------------------------------------------------

    def copies_of(self, k: Operand) -> list[Stmt]:
        """Begin to copy place ``k``, whose number is known."""
        lanes, out = self.lanes, self.lanes.place_indices()
        # No evict_first: ptxas 13.0 gives the second of two copies with a cache policy a uniform register offset and
        # the policy's descriptor, which no instruction can hold ("illegal instruction").
        for i in lanes.prefetched:
            hint = lanes.load_hint(i) if self.schedule.load_hint == "prefetch" else "default"
            out.append(copy_ahead(lanes.storage(i), lanes.vec, hint, self.spot(i, k), *self.place_in_memory(i)))
        return out

    def place_in_memory(self, i: int) -> tuple[Pointer, Expr]:
        """The tensor of load ``i``, and the first element of a pack."""
        at = self.lanes.access[i].at(self.lanes.base(i), 0)
        return Pointer(self.graph.values[i].slot), Cast("int64", at)

    def before_walks(self) -> list[Stmt]:
        """Begin to load a whole strip: raw words of the places in registers, and copies of the rest."""
        lanes, out = self.lanes, list[Stmt]()
        for k in range(self.held):
            out += [*self.place(k, masked=False), *lanes.place_indices()]
            for i in lanes.prefetched:
                load = Load(lanes.storage(i), lanes.vec, lanes.load_hint(i), *self.place_in_memory(i), "words")
                out.append(Assign(self.in_registers(i, k), load))
        copies = self.each(
            lambda k, _, masked: [*self.place(k, masked), *self.copies_of(k)], after=lambda n: [COMMIT_COPIES]
        )
        return out + copies

    def each(
        self, place: Place, before: Sequence[Stmt] = (), after: Callable[[int], list[Stmt]] = lambda _: []
    ) -> list[Stmt]:
        """``place(k, u, masked)`` for every place in shared memory, in groups of ``unroll``.

        The places of a group have the numbers ``u`` from 0 to ``n - 1``; ``before`` and ``after(n)`` enclose a group.
        The machine code has a loop over the groups. Unrolled code, executed only once, would not fit the instruction
        cache, and values of several groups would be in registers at the same time.
        """
        out: list[Stmt] = []
        unroll, first = self.schedule.unroll, self.held
        if self.steps > 1:
            body = [Assign(self.number, Cast("int32", first + self.step * unroll)), *before]
            body += [s for u in range(unroll) for s in place(self.number + u, u, False)]
            out.append(loop(self.step, rounds(self.steps), [*body, *after(unroll)]))
            first = self.rest
        for begin in range(first, self.packs, unroll):
            n = min(unroll, self.packs - begin)
            out += before
            out += [s for u in range(n) for s in place(begin + u, u, begin + u >= self.full)]
            out += after(n)
        return out

    # ---- walks ------------------------------------------------------------------------------------------------------

    def walk(self, number: int, pas: Pass) -> list[Stmt]:
        lanes = self.lanes
        function = lanes.pass_function(pas, self.threads.partial or self.packs > self.full)
        out: list[Stmt] = [Assign(var, nothing) for var, nothing in lanes.carried[pas].fields.items()]

        def place(k: Operand, u: int, masked: bool) -> list[Stmt]:
            return self.place_of_walk(number, pas, function, k, u, masked)

        def after(n: int) -> list[Stmt]:
            return [s for x in lanes.carried[pas].online for s in x.take_group([_score(x.peak, u) for u in range(n)])]

        for begin in range(0, self.held, self.schedule.unroll):
            n = min(self.schedule.unroll, self.held - begin)
            out += [s for u in range(n) for s in place(begin + u, u, False)] + after(n)
        # An empty group a step: then the number of groups to await is the same for all steps.
        awaited = [COMMIT_COPIES, await_copies(self.groups)] if number == self.first_walk else []
        out += self.each(place, awaited, after)
        return out + [x.settle() for x in lanes.carried[pas].online]

    def place_of_walk(self, number: int, pas: Pass, function: Function, k: Operand, u: int, masked: bool) -> list[Stmt]:
        """One place of the walk of pass ``number``, the ``u``-th of its group."""
        lanes, result = self.lanes, self.result(number, 0)
        out = self.place(k, masked)
        for i in (*pas.kept_in, *(i for i in pas.compute if i in lanes.prefetched)):
            out.append(Assign(lanes.handed(i), self.taken(i, k)))
        call = function({lanes.live.name: self.live(masked)})
        left = [i for i in pas.kept_out if i not in lanes.prefetched]
        out.append(Assign(result, call) if lanes.carried[pas].fields or left else Do(call))
        out += self.carried(pas, result, masked)
        at = len(lanes.returned(pas))
        for i in left:
            values = tuple(result[at + n] for n in range(lanes.lanes(i)))
            if isinstance(k, int) and k < self.held:
                out.append(Assign(self.in_registers(i, k), Tuple(values)))
            else:
                out.append(put(self.spot(i, k), values))
            at += lanes.lanes(i)
        for n, x in enumerate(lanes.carried[pas].online):
            score = result[at + n]
            out.append(
                Assign(_score(x.peak, u), Select(self.threads.inside, score, x.identity[0]) if masked else score)
            )
        return out

    def taken(self, i: int, k: Operand) -> Expr:
        """Kept value ``i`` of place ``k``, as it is handed to a pass function."""
        lanes, ahead = self.lanes, i in self.lanes.prefetched
        storage = lanes.storage(i) if ahead else "float32"
        if isinstance(k, int) and k < self.held:
            return Unpack(storage, lanes.vec, self.in_registers(i, k)) if ahead else self.in_registers(i, k)
        return take(storage, lanes.lanes(i), self.spot(i, k))


def _score(peak: Var, u: int) -> Var:
    """The score of an online pair at the ``u``-th place of a group."""
    return Var(f"score_{peak.name}_{u}", "float32")

"""A pass over the columns of a row: its packs one after the other, its reductions not yet joined."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.compiler.kernel.nodes import Assign, Const, Do, Expr, Function, Operand, Stmt, Tuple, Var, loop, when
from autotune.compiler.kernel.reducers import reducers_of
from autotune.compiler.program.program import Pass
from autotune.compiler.targets.cuda.memory.access import COLUMN
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
from autotune.compiler.targets.cuda.rows.moments import weights
from autotune.compiler.targets.cuda.rows.prefetch import MOST_WORDS, Ahead, load_function, loads_apart
from autotune.compiler.targets.cuda.rows.shape import CLAMPED, Shape

Functions = tuple[Function, Function]
"""What a pass does with one pack, and what it has of one outside the row."""


def held(n: int) -> Var:
    """The words that were loaded for the pack number ``n`` of those at hand."""
    return Var(f"held_{n}")


def kept(q: int, pack: str) -> Var:
    """What the function of pass ``q`` returned for a pack."""
    return Var(f"z{q}_{pack}")


class Walks:
    """Prints the passes of one kernel."""

    def __init__(self, emitter: CudaEmitter, shape: Shape, ahead: Ahead | None = None) -> None:
        """``ahead``: the loads that its pass finds done."""
        self.emitter, self.shape, self.ahead = emitter, shape, ahead

    def statements(self, q: int, pas: Pass) -> list[Stmt]:
        """The walk of pass ``q``."""
        shape, emitter = self.shape, self.emitter
        unroll = emitter.schedule.unroll
        steps = 0 if shape.unrolled else shape.full // unroll
        first = steps * unroll if steps > 1 else 0
        row_ahead = self.ahead.loads if self.ahead and q == self.ahead.number else ()
        held = () if row_ahead else self._held(pas, max(unroll if first else 0, shape.packs - first))
        function, fields = emitter.pass_function(q, pas, row_ahead or held)
        functions = function, emitter.empty_function(q, fields)
        out = [s for reducer in reducers_of(emitter.graph, pas).all for s in reducer.begin()]
        if first:
            step, begin = Var("step"), Var("j")
            body: list[Stmt] = [Assign(begin, emitter.count.number(step) * unroll)]
            body += self._packs(q, pas, functions, held, [begin + u for u in range(unroll)])
            out.append(loop(step, steps, body))
        out += self._packs(q, pas, functions, held, range(first, shape.packs))
        return out

    def _held(self, pas: Pass, packs: int) -> tuple[int, ...]:
        """The loads of slots that the pass may write over, where registers hold ``packs`` packs of them. These loads
        stay behind stores before them, so that they come before all stores here."""
        emitter = self.emitter
        slots = emitter.overwritten if pas.stores and packs > 1 else ()
        loads = tuple(i for i in loads_apart(emitter, pas) if emitter.graph.values[i].slot in slots)
        return loads if sum(map(emitter.raw_words, loads)) * packs <= MOST_WORDS else ()

    def _packs(
        self, q: int, pas: Pass, functions: Functions, loads: Sequence[int], packs: Sequence[Operand]
    ) -> list[Stmt]:
        """Packs one after the other, ``loads`` of all of them first. Those from number ``full`` on may lie outside the
        row."""
        emitter, shape, out = self.emitter, self.shape, list[Stmt]()
        guarded = [isinstance(pack, int) and pack >= shape.full for pack in packs]
        if loads:
            nothing = Tuple((Const(0, "uint32"),) * sum(map(emitter.raw_words, loads)))
            function = load_function(emitter, loads)
            for n, pack in enumerate(packs):
                load = Assign(held(n), function())
                out.append(Assign(COLUMN, shape.column(pack)))
                out += [Assign(held(n), nothing), when(COLUMN < shape.columns, [load])] if guarded[n] else [load]
        for n, pack in enumerate(packs):
            out += self._pack(q, pas, functions, pack, guarded[n], held(n) if loads else None)
        return out

    def _pack(
        self, q: int, pas: Pass, functions: Functions, pack: Operand, guarded: bool, words: Var | None
    ) -> list[Stmt]:
        """One pack. A ``guarded`` one may lie outside the row; its loads that do not depend on the row leave the row
        loop, and the branch in it, so that their column is one of the row's all the same. ``words``: loaded before."""
        emitter, shape = self.emitter, self.shape
        name = str(pack) if shape.unrolled else "x"
        out: list[Stmt] = [Assign(COLUMN, shape.column(pack))]
        given: dict[str, Expr] = {"x": words or Var(f"x_{name}")}
        if guarded:
            out.append(Assign(CLAMPED, shape.clamped(COLUMN)))
            given["c"] = CLAMPED
        if pas.moments:
            out += weights(pack, shape.vec)
        for n in range(len(emitter.all_passes)):
            given |= {f"z{n}": kept(n, name), f"g{n}": Var(f"g{n}_{name}")}
        fields, held, result = reducers_of(emitter.graph, pas).fields, len(emitter.beginnings(q)), kept(q, name)
        first_held = len(fields) + sum(emitter.kept_words(i) for i in emitter.kept_of[q])
        returns = first_held + held > 0
        take: list[Stmt] = [Assign(f, result[n]) for n, f in enumerate(fields)]
        hold: list[Stmt] = []
        if held:
            hold = [Assign(Var(f"g{q}_{name}"), Tuple(tuple(result[first_held + n] for n in range(held))))]
        call = functions[0](given)
        made: Stmt = Assign(result, call) if returns else Do(call)
        if not guarded:
            return [*out, made, *take, *hold]
        if returns:
            out.append(Assign(result, functions[1]()))
        return [*out, when(COLUMN < shape.columns, [made, *hold]), *take]

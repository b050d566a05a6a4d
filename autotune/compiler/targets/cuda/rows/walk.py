"""A pass over the columns of a row: its packs one after the other, its reductions not yet joined."""

from __future__ import annotations

from autotune.compiler.kernel.nodes import Assign, Do, Expr, Function, Operand, Stmt, Tuple, Var, loop, when
from autotune.compiler.kernel.reducers import reducers_of
from autotune.compiler.program.program import Pass
from autotune.compiler.targets.cuda.memory.access import COLUMN
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
from autotune.compiler.targets.cuda.rows.moments import weights
from autotune.compiler.targets.cuda.rows.shape import CLAMPED, Shape

Functions = tuple[Function, Function]
"""What a pass does with one pack, and what it has of one outside the row."""


def kept(q: int, pack: str) -> Var:
    """What the function of pass ``q`` returned for a pack."""
    return Var(f"z{q}_{pack}")


class Walks:
    """Prints the passes of one kernel."""

    def __init__(self, emitter: CudaEmitter, shape: Shape) -> None:
        self.emitter, self.shape = emitter, shape

    def statements(self, q: int, pas: Pass) -> list[Stmt]:
        """The walk of pass ``q``."""
        shape = self.shape
        function, fields = self.emitter.pass_function(q, pas)
        functions = function, self.emitter.empty_function(q, fields)
        out = [s for reducer in reducers_of(self.emitter.graph, pas).all for s in reducer.begin()]
        unroll = self.emitter.schedule.unroll
        steps = 0 if shape.unrolled else shape.full // unroll
        first = 0
        if steps > 1:
            step, begin = Var("step"), Var("j")
            body: list[Stmt] = [Assign(begin, self.emitter.count.number(step) * unroll)]
            for u in range(unroll):
                body += self._pack(q, pas, functions, begin + u, guarded=False)
            out.append(loop(step, steps, body))
            first = steps * unroll
        for pack in range(first, shape.packs):
            out += self._pack(q, pas, functions, pack, guarded=pack >= shape.full)
        return out

    def _pack(self, q: int, pas: Pass, functions: Functions, pack: Operand, guarded: bool) -> list[Stmt]:
        """One pack. A ``guarded`` one may lie outside the row; its loads that do not depend on the row leave the row
        loop, and the branch in it, so that their column is one of the row's all the same."""
        emitter, shape = self.emitter, self.shape
        name = str(pack) if shape.unrolled else "x"
        out: list[Stmt] = [Assign(COLUMN, shape.column(pack))]
        given: dict[str, Expr] = {"x": Var(f"x_{name}")}
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

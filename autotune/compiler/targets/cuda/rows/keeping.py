"""How what a pass keeps of its packs travels to later passes: in registers, in shared memory, or not at all."""

from __future__ import annotations

from autotune.compiler.kernel.nodes import Assign, Cast, Const, Expr, Item, Operand, Stmt, Tuple, Var
from autotune.compiler.kernel.reducers import ZERO, reducers_of
from autotune.compiler.targets.cuda.device import Shared
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
from autotune.compiler.targets.cuda.rows.shape import BLOCK_THREAD, ROW_GROUP, Shape


def kept(q: int, pack: str) -> Var:
    """What the function of pass ``q`` returned for a pack."""
    return Var(f"z{q}_{pack}")


class Registers:
    """Each pack's results have variables of their own, and passes are unrolled.

    Attributes:
        loops: whether a pass may walk its packs in a loop.
    """

    loops = False

    def name(self, pack: Operand) -> str:
        """How the variables of a pack end."""
        return str(pack)

    def fetch(self, q: int, pack: Operand) -> list[Stmt]:
        """What brings the results of pass ``q`` for a pack into its variable."""
        return []

    def put(self, q: int, pack: Operand) -> list[Stmt]:
        """What leaves the results of pass ``q`` for later ones."""
        return []

    def arrays(self) -> list[Stmt]:
        """Shared memory that it takes, at the kernel's beginning."""
        return []

    bytes = 0


class Reload(Registers):
    """Nothing is kept: every pass loads what it needs."""

    loops = True

    def name(self, pack: Operand) -> str:
        return "x"


class SharedMemory(Reload):
    """Each thread stores its own words and later fetches the same ones: no barrier, no bank conflict."""

    def __init__(self, emitter: CudaEmitter, shape: Shape) -> None:
        self.emitter, self.shape = emitter, shape
        threads = shape.threads_per_row * shape.rows_per_block
        self.first = [0]  # the first word of each pass, and how many there are
        for q in range(len(emitter.program.passes)):
            self.first.append(self.first[q] + len(self._views(q)) * shape.packs * threads)
        self.bytes = 4 * self.first[-1]

    def _views(self, q: int) -> list[Var]:
        """The view of shared memory of each word's type."""
        return [
            Var("su" if self.emitter.packed(i) else "sf")
            for i in self.emitter.kept_of[q]
            for _ in range(self.emitter.kept_words(i))
        ]

    def _words(self, q: int, pack: Operand) -> list[Item]:
        """Where the words of a pack lie."""
        views, threads = self._views(q), self.shape.threads_per_row
        first = Const(self.first[q]) + (ROW_GROUP * self.shape.packs + pack) * (len(views) * threads)
        return [view[Cast("uint32", first + w * threads + BLOCK_THREAD)] for w, view in enumerate(views)]

    def put(self, q: int, pack: Operand) -> list[Stmt]:
        first = len(reducers_of(self.emitter.graph, self.emitter.program.passes[q]).fields)
        return [Assign(word, kept(q, "x")[first + w]) for w, word in enumerate(self._words(q, pack))]

    def fetch(self, q: int, pack: Operand) -> list[Stmt]:
        reducers = reducers_of(self.emitter.graph, self.emitter.program.passes[q])
        skipped: list[Expr] = [x for r in reducers.plain.values() for x in r.identity]
        skipped += [ZERO] * (len(reducers.fields) - len(skipped))
        return [Assign(kept(q, "x"), Tuple((*skipped, *self._words(q, pack))))]

    def arrays(self) -> list[Stmt]:
        return [Shared(Var("sf"), 0, "float32"), Shared(Var("su"), 0, "uint32")] if self.bytes else []

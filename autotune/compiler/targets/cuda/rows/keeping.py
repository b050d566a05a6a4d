"""How what a pass keeps of its packs travels to later passes: in registers, in shared memory, or not at all."""

from __future__ import annotations

from itertools import count

from autotune.compiler.kernel.nodes import Assign, Cast, Expr, Item, Operand, Stmt, Tuple, Var
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
    """Each thread stores its own words and later fetches the same ones: no barrier, no bank conflict. What a pass reads
    for the last time makes room for what it leaves, pack by pack."""

    def __init__(self, emitter: CudaEmitter, shape: Shape) -> None:
        self.emitter, self.shape = emitter, shape
        self.places: dict[int, list[int]] = {}  # of each kept value's words among those of a pack
        last = {i: q for q, pas in enumerate(emitter.program.passes) for i in pas.kept_in}
        free: dict[Var, list[int]] = {}
        fresh = count()
        for q, pas in enumerate(emitter.program.passes):
            for i in pas.kept_in:
                if last[i] == q:
                    free.setdefault(self._view(i), []).extend(self.places[i])
            for i in pas.kept_out:
                room = free.get(self._view(i), [])
                self.places[i] = [room.pop(0) if room else next(fresh) for _ in range(emitter.kept_words(i))]
        self.words = next(fresh)  # of a pack and a thread
        self.bytes = 4 * self.words * shape.packs * shape.threads_per_row * shape.rows_per_block

    def _view(self, i: int) -> Var:
        """Shared memory as words of the value's type: no word changes its type, which compilers take for granted."""
        return Var("su" if self.emitter.packed(i) else "sf")

    def _words(self, q: int, pack: Operand) -> list[Item]:
        """Where the words of a pack lie."""
        threads = self.shape.threads_per_row
        first = (ROW_GROUP * self.shape.packs + pack) * (self.words * threads)
        return [
            self._view(i)[Cast("uint32", first + w * threads + BLOCK_THREAD)]
            for i in self.emitter.kept_of[q]
            for w in self.places[i]
        ]

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

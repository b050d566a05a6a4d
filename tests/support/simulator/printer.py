"""Prints kernels as plain Python: a generator that gives way where a thread waits for others.

Barriers, shuffles and ballots are ``yield``s of a tuple that begins with a name of :data:`WAITING`. Functions that wait
are called by ``yield from``. A construct that depends on a node's fields, such as a load, is a name, bound to a
function that the machine makes from those fields. Operators and arithmetic are CUDA's text, which is Python too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType

from autotune.compiler.kernel import nodes
from autotune.compiler.kernel.nodes import expressions_of
from autotune.compiler.targets.cuda import device
from autotune.compiler.targets.cuda.device import BLOCK, BLOCKS, EXTENT
from autotune.compiler.targets.cuda.printer import CudaPrinter
from autotune.compiler.targets.cuda.source import CudaSource
from tests.support.simulator import intrinsics

SHUFFLES = frozenset({"shfl_xor_sync", "shfl_sync", "ballot_sync", "syncwarp"})
WAITING = SHUFFLES | {"syncthreads", "cluster_sync", "cluster_wait"}
_EVERY_LANE = nodes.Const(0xFFFFFFFF)

Making = tuple[str | int | bool, ...]
"""What the machine makes a function, or a number, from: its kind and the arguments of that kind."""


@dataclass(frozen=True)
class Program:
    """A kernel that can be run: ``kernel(blk, nblk, p0, p1, ..., n0)`` is its generator for one thread."""

    text: str
    bound: Mapping[str, Making]

    @property
    def code(self) -> CodeType:
        return _compiled(self.text)


@functools.lru_cache(maxsize=64)
def _compiled(text: str) -> CodeType:
    """Tests run the same kernel often."""
    return compile(text, "<kernel>", "exec")


def program_of(source: CudaSource) -> Program:
    """The kernel as plain Python."""
    printer = PlainPrinter(strict=not source.fast)
    functions = printer.functions(source.body)
    pointers = [f"p{k}" for k in range(len(source.params))]
    params = [BLOCK.name, BLOCKS.name, *pointers, *([EXTENT.name] if source.launch["dynamic"] else [])]
    lines = [f"def kernel({', '.join(params)}):", *printer.block(source.body, 1)]
    lines += ["    if False:", "        yield"]  # a generator, also where nobody waits
    bound = {name: making for making, name in printer.bound.items()}
    return Program("\n\n".join([*functions, "\n".join(lines)]), bound)


class PlainPrinter(CudaPrinter):
    """Prints one kernel.

    Attributes:
        bound: names of functions and numbers, each by its arguments.
    """

    def __init__(self, strict: bool = False) -> None:
        super().__init__(strict)
        self.bound: dict[Making, str] = {}
        self._arrays = 0
        self._waits: dict[nodes.Function, bool] = {}

    def bind(self, *making: str | int | bool) -> str:
        """The name of the bound object; no variable of a kernel begins with an underscore."""
        return self.bound.setdefault(making, f"_{making[0]}_{len(self.bound)}")

    # ---- numbers ----------------------------------------------------------------------------------------------------

    def for_Const(self, x: nodes.Const) -> str:
        if x.dtype == "float32":
            return self.bind("number", repr(float(x.value)))
        if x.dtype in ("int32", "int64"):
            return str(getattr(intrinsics, x.dtype)(int(x.value)))
        return super().for_Const(x)

    def for_Select(self, x: nodes.Select) -> str:
        """Both sides are evaluated, which only a name or a number spares."""
        if not all(isinstance(side, nodes.Var | nodes.Const) for side in (x.then, x.other)):
            return super().for_Select(x)
        return f"({self.text(x.then)} if {self.text(x.test)} else {self.text(x.other)})"

    # ---- memory -----------------------------------------------------------------------------------------------------

    def for_Load(self, x: nodes.Load) -> str:
        name = self.bind("load", x.storage, x.lanes, x.form, x.hint == "coherent", x.guard is not None)
        return self.call(name, (x.pointer, x.index, *_there(x.guard)))

    def for_Unpack(self, x: nodes.Unpack) -> str:
        return self.call(self.bind("unpack", x.storage, x.lanes), (x.words,))

    def put_Store(self, s: nodes.Store) -> None:
        name = self.bind("store", s.storage, len(s.values), s.guard is not None)
        value = s.values[0] if len(s.values) == 1 else nodes.Tuple(s.values)
        self.put(self.call(name, (s.pointer, s.index, value, *_there(s.guard))))

    def put_Shared(self, s: device.Shared) -> None:
        """An array is one, however often its statement runs; all views of dynamic memory are of one array."""
        self._arrays += 1
        self.put(f"{self.text(s.name)} = {self.bind('array', self._arrays if s.count else 0, s.bytes, s.type)}()")

    # ---- threads ----------------------------------------------------------------------------------------------------

    def for_ThreadIndex(self, x: device.ThreadIndex) -> str:
        return f"{self.bind('thread_index')}()"

    def for_Intrinsic(self, x: nodes.Intrinsic) -> str:
        kind = _kind(x)
        if kind in intrinsics.PLAIN and not x.of:
            return self.call(kind, x.args)
        if kind not in WAITING:
            return self.call(self.bind(kind, *x.of), x.args)
        every, args = x.args[:1], x.args[1:]
        assert every == ((_EVERY_LANE,) if kind in SHUFFLES - {"syncwarp"} else ()), f"{kind} of some lanes"
        return f"(yield ({', '.join([repr(kind), *map(self.text, args)])},))"

    def for_Invoke(self, x: nodes.Invoke) -> str:
        call = super().for_Invoke(x)
        return f"(yield from {call})" if self._waiting(x) else call

    def _waiting(self, x: nodes.Expr) -> bool:
        """Return True for a call in which a thread waits for others."""
        if not isinstance(x, nodes.Invoke):
            return isinstance(x, nodes.Intrinsic) and _kind(x) in WAITING
        if x.function not in self._waits:
            self._waits[x.function] = any(map(self._waiting, expressions_of(x.function.body)))
        return self._waits[x.function]


def _kind(x: nodes.Intrinsic) -> str:
    return x.name.removeprefix("cuda.")


def _there(guard: nodes.Expr | None) -> tuple[nodes.Expr, ...]:
    return () if guard is None else (guard,)

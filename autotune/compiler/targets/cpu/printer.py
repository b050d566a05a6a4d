"""Printer of kernels as Numba CPU source, and the nodes of CPU kernels only.

Functions that kernels call are defined once, as constants of the module.

Short loops that store integers are printed with ends that LLVM cannot see (:func:`hide_ends`). LLVM makes one vector of
a loop with fewer iterations than ``_TINY``, and masks the lanes beyond its end. If the mask is constant and leaves one
lane (the last of 9 elements in vectors of 8), its code for processors with AVX-512 is wrong (LLVM 22): for an integer
that is truncated before the store, it stores all bits. The last uint8 of a tensor then zeroes the three following
bytes, which belong to another tensor, or to a row of another thread. With an unknown end, a loop without masks
processes the elements beyond whole vectors. LLVM itself turns a comparison with 0 into a shift that keeps one bit, so
the source does not show which integers are truncated. All stores of integers narrower than the widest compute type
count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from autotune.compiler.kernel.nodes import (
    Body,
    Cast,
    Const,
    Expr,
    For,
    If,
    Intrinsic,
    Load,
    Op,
    Operand,
    Select,
    Stmt,
    Store,
    Var,
    expr,
    walk,
)
from autotune.compiler.kernel.printer import Printer

COLUMNS = Var("columns", "int64")
"""The columns of a row, hidden from LLVM."""


@dataclass(frozen=True, slots=True)
class Memory(Var):
    """A variable that holds an address. Accesses of different spaces do not alias: see ``intrinsics.memory``."""

    space: str = "in"

    def load(self, storage: str, index: Operand) -> Load:
        return Load(storage, 1, "default", self, expr(index))

    def store(self, storage: str, index: Operand, value: Expr) -> Store:
        return Store(storage, "default", self, expr(index), (value,))


def source(slot: int) -> Memory:
    return Memory(f"x{slot}", "int64", "in")


def output(k: int) -> Memory:
    return Memory(f"y{k}", "int64", f"out{k}")


def plane(n: int) -> Memory:
    """An array of partial results."""
    return Memory(f"z{n}", "int64", f"part{n}")


def buffer(name: str) -> Memory:
    """A private buffer of the kernel."""
    return Memory(f"s_{name}", "int64", name)


@dataclass(frozen=True, slots=True)
class Named(Expr):
    """A constant that the module defines under a name."""

    like = ("value",)
    name: str
    value: Const


@dataclass(frozen=True, slots=True)
class Choice(Expr):
    """``then`` if ``test``, else ``other``; only one of the two is evaluated."""

    like = ("then",)
    test: Expr
    then: Expr
    other: Expr


@dataclass(frozen=True, slots=True)
class Accumulate(Expr):
    """``carried`` with one more term of the reduction ``op``; floats may be reassociated."""

    like = ("carried",)
    op: str
    carried: Expr
    term: Expr


@dataclass(frozen=True, slots=True)
class Increase(Stmt):
    """``target += value``."""

    target: Var
    value: Expr


@dataclass(frozen=True, slots=True)
class Loop(Stmt):
    """``body`` until a :class:`Break` in it."""

    body: Body


@dataclass(frozen=True, slots=True)
class Break(Stmt):
    """Leaves the innermost loop."""


@dataclass(frozen=True, slots=True)
class Fetch(Stmt):
    """Prefetches ``count`` elements from ``index`` on."""

    storage: str
    memory: Memory
    index: Expr
    count: Expr


@dataclass(frozen=True, slots=True)
class Stream(Stmt):
    """Copies ``count`` elements from address ``source`` to ``index`` of output ``number``, bypassing the caches.

    The source is in the buffer ``stream<number>``.
    """

    storage: str
    number: int
    index: Expr
    source: Expr
    count: Expr

    @property
    def output(self) -> Memory:
        return output(self.number)


_TINY = 16  # LLVM's vectorizer-min-trip-count
_WHOLE = ("float32", "float16", "int64")
"""Storage types whose stores do not truncate; the narrower floats are assembled as integers."""
_NUMPY = {"float32": "np.float32", "int32": "np.int32", "int64": "np.int64", "bool": "bool"}
_OF_OPERATORS = ("clamp", "erf_by", "inverse")
"""Intrinsics of ``intrinsics.operators`` that are no operators."""


class CpuPrinter(Printer):
    """Printer of one kernel, which collects its module's constants in ``definitions``."""

    def __init__(self) -> None:
        super().__init__()
        self.definitions: dict[str, str] = {}

    def define(self, name: str, definition: str) -> str:
        self.definitions[name] = definition
        return name

    def defined_call(self, name: str, definition: str, *args: Expr) -> str:
        return self.call(self.define(name, definition), args)

    # ---- numbers and operators --------------------------------------------------------------------------------------

    def for_Const(self, x: Const) -> str:
        if x.dtype == "":
            return str(x.value)
        text = repr(x.value) if math.isfinite(x.value) else f'"{x.value}"'
        return f"{_NUMPY[x.dtype]}({text})"

    def for_Named(self, x: Named) -> str:
        return self.define(x.name, self.text(x.value))

    def for_Op(self, x: Op) -> str:
        return self.defined_call(f"{x.name}_", f'OPS["{x.name}"]', *x.args)

    def for_Select(self, x: Select) -> str:
        return self.defined_call("where_", 'OPS["where"]', *x.expressions())

    def for_Cast(self, x: Cast) -> str:
        return self.defined_call(f"to_{x.dtype}", f'CASTS["{x.dtype}"]', x.value)

    def for_Accumulate(self, x: Accumulate) -> str:
        return self.defined_call(f"add_{x.op}", f'ACCUMULATE["{x.op}"]', *x.expressions())

    def for_Intrinsic(self, x: Intrinsic) -> str:
        if x.name in _OF_OPERATORS:
            self.define(x.name, f"cpu_ops.{x.name}")
        return super().for_Intrinsic(x)

    def for_Choice(self, x: Choice) -> str:
        return f"{self.text(x.then)} if {self.text(x.test)} else {self.text(x.other)}"

    def put_Increase(self, s: Increase) -> None:
        self.put(f"{s.target.name} += {self.text(s.value)}")

    def put_Loop(self, s: Loop) -> None:
        self.put("while True:")
        self.inside(s.body)

    def put_Break(self, s: Break) -> None:
        self.put("break")

    # ---- memory -----------------------------------------------------------------------------------------------------

    for_Memory = Printer.for_Var

    def for_Load(self, x: Load) -> str:
        return self._access("load", x.storage, x.pointer, x.index)

    def put_Store(self, s: Store) -> None:
        self.put(self._access("store", s.storage, s.pointer, s.index, *s.values))

    def _access(self, kind: str, storage: str, memory: Expr, *args: Expr) -> str:
        assert isinstance(memory, Memory)
        maker = {"load": "loader", "store": "storer"}[kind]
        name, space = f"{kind}_{storage}_{memory.space}", memory.space
        return self.defined_call(name, f'{maker}("{storage}", "{space}", SPACES)', memory, *args)

    def put_Fetch(self, s: Fetch) -> None:
        args = (s.memory, s.index, s.count)
        self.put(self.defined_call(f"fetch_{s.storage}", f'fetcher("{s.storage}")', *args))

    def put_Stream(self, s: Stream) -> None:
        maker = f'streamer("{s.storage}", "stream{s.number}", "out{s.number}", SPACES)'
        args = (s.output, s.index, s.source, s.count)
        self.put(self.defined_call(f"stream_{s.storage}_{s.number}", maker, *args))


def hide_ends(body: Iterable[Stmt]) -> Body:
    """``body`` with hidden ends of all loops that may look tiny to LLVM and that store values that may be cut.

    ``columns`` is hidden already, except for a divisor.
    """
    return tuple(_hidden(s) for s in body)


def _hidden(s: Stmt) -> Stmt:
    if isinstance(s, For):
        inside = hide_ends(s.body)
        stop = s.stop if _long(s) or s.stop == COLUMNS or not _cuts(s.body) else Intrinsic("hidden", (s.stop,), "int64")
        return replace(s, stop=stop, body=inside)
    if isinstance(s, If):
        return replace(s, then=hide_ends(s.then), other=hide_ends(s.other))
    return replace(s, body=hide_ends(s.body)) if isinstance(s, Loop) else s


def _long(s: For) -> bool:
    ends: list[Expr] = [s.start, s.stop, s.step]
    start, stop, step = (int(x.value) if isinstance(x, Const) else None for x in ends)
    return start is not None and stop is not None and step is not None and stop - start >= _TINY * step


def _cuts(body: Body) -> bool:
    return any(isinstance(s, Store) and s.storage not in _WHOLE for s in walk(body))

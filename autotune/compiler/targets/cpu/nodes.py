"""Nodes of CPU kernels only: memory of a known space, constants of the module, and accesses that bypass the caches."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.compiler.kernel.nodes import Body, Const, Expr, Load, Operand, Stmt, Store, Var, expr

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

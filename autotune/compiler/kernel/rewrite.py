"""Passes over the kernel IR: one traversal, which rebuilds changed nodes and keeps the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from autotune.compiler.kernel.nodes import Body, Expr, Function, Invoke, Pointer, Stmt, Var, parts, subexpressions, walk

Change = Callable[[Expr], Expr]


class Rewriter:
    """Rewriter of statements and the functions that they call.

    Args:
        change: returns the replacement of an expression, whose parts are rewritten already.
        inside: True to rewrite functions too. An unchanged function remains the same object.
    """

    def __init__(self, change: Change, inside: bool = True) -> None:
        self.change, self.inside = change, inside
        self.functions: dict[Function, Function] = {}

    def body(self, statements: Iterable[Stmt]) -> Body:
        return tuple(self._node(s) for s in statements)

    def function(self, function: Function) -> Function:
        if not self.inside:
            return function
        if function not in self.functions:
            body = self.body(function.body)
            same = all(new is old for new, old in zip(body, function.body, strict=True))
            self.functions[function] = function if same else Function(function.params, body)
        return self.functions[function]

    def expression(self, x: Expr) -> Expr:
        x = self._node(x)
        if isinstance(x, Invoke):
            called = self.function(x.function)
            x = x if called is x.function else Invoke(called, x.args)
        return self.change(x)

    def _node(self, node: Any) -> Any:
        changed = {}
        for field in dataclasses.fields(node):
            old = getattr(node, field.name)
            new = self._field(old)
            if new is not old:
                changed[field.name] = new
        return dataclasses.replace(node, **changed) if changed else node

    def _field(self, old: Any) -> Any:
        if isinstance(old, Expr):
            return self.expression(old)
        if isinstance(old, Stmt):
            return self._node(old)
        if isinstance(old, tuple):
            new = tuple(self._field(x) for x in old)
            return old if all(a is b for a, b in zip(old, new, strict=True)) else new
        return old


def functions_of(body: Iterable[Stmt]) -> list[Function]:
    """The functions that statements call, directly or not, each once, callees first."""
    found: dict[Function, None] = {}

    def visit(statements: Iterable[Stmt]) -> None:
        for x in expressions_of(statements):
            if isinstance(x, Invoke) and x.function not in found:
                visit(x.function.body)
                found.setdefault(x.function)

    visit(body)
    return list(found)


def expressions_of(body: Iterable[Stmt]) -> Iterator[Expr]:
    """Every expression of statements and nested statements, in order, without those of functions."""
    for stmt in walk(body):
        yield from subexpressions(stmt)


def free(body: Iterable[Stmt]) -> list[Var | Pointer]:
    """The pointers of statements, and the variables that they read before they set them, in the order of first use."""
    found: dict[str, Var | Pointer] = {}
    known: set[str] = set()
    for stmt in walk(body):
        new = stmt.defines
        for x in parts(stmt.expressions()[1:] if new else stmt.expressions()):
            if isinstance(x, Var | Pointer) and x.name not in known:
                found.setdefault(x.name, x)
        if isinstance(new, Var):
            known.add(new.name)
    return list(found.values())


def closed(body: Iterable[Stmt]) -> Function:
    """A function of statements whose parameters are their free variables and pointers."""
    made = tuple(body)
    return Function(tuple(free(made)), made)

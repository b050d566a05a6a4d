"""Kernels that are changed, to show that a mistake in them is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from autotune.compiler.kernel.nodes import Body, Const, Do, Function, Node, Stmt
from autotune.compiler.targets.cuda.source import CudaSource, Listing

Kernel = TypeVar("Kernel", CudaSource, Listing)


class _Edit:
    """Rewrites statements, expressions, and the functions that they call. An unchanged function is the same object."""

    def __init__(self, change: Callable[[Node], Node]) -> None:
        self.change = change
        self.functions: dict[Function, Function] = {}

    def body(self, statements: Iterable[Stmt]) -> Body:
        return tuple(self.part(s) for s in statements)

    def part(self, old: Any) -> Any:
        if isinstance(old, Function):
            if old not in self.functions:
                body = self.body(old.body)
                self.functions[old] = old if body == old.body else Function(old.params, body)
            return self.functions[old]
        if isinstance(old, tuple):
            return tuple(map(self.part, old))
        if not isinstance(old, Node):
            return old
        return self.change(replace(old, **{name: self.part(getattr(old, name)) for name in old.__match_args__}))  # type: ignore[type-var]


def changed(source: CudaSource, change: Callable[[Node], Node]) -> CudaSource:
    """A copy of ``source`` with its statements and expressions changed, in its functions too."""
    made = replace(source, body=_Edit(change).body(source.body))
    assert made.body != source.body
    return made


def without(statement: Do) -> Callable[[Node], Node]:
    """Does nothing where the kernel does ``statement``."""
    return lambda node: Do(Const(0)) if node == statement else node


def with_text(source: Kernel, text: str) -> Kernel:
    """A copy of the kernel with another text, for compilation or listings."""
    made = replace(source)
    made.__dict__["text"] = text
    return made


def edited(source: CudaSource, change: Callable[[str], str]) -> CudaSource:
    """A copy of ``source`` with its text changed, line by line; a line that becomes empty goes."""
    lines = source.text.splitlines()
    changed = [change(line) for line in lines]
    assert changed != lines
    return with_text(source, "\n".join(new for new, old in zip(changed, lines, strict=True) if new or not old) + "\n")

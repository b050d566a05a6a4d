"""Kernels that are changed, to show that a mistake in them is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from autotune.compiler.kernel.nodes import Const, Do, Node
from autotune.compiler.kernel.rewrite import Rewriter
from autotune.compiler.targets.cuda.source import CudaSource, Listing

Kernel = TypeVar("Kernel", CudaSource, Listing)


class _Edit(Rewriter):
    """Rewrites statements as well as expressions."""

    def __init__(self, change: Callable[[Node], Node]) -> None:
        super().__init__(lambda x: x)
        self.edit = change

    def _node(self, node: Any) -> Any:
        return self.edit(super()._node(node))


def changed(source: CudaSource, change: Callable[[Node], Node]) -> CudaSource:
    """A copy of ``source`` with its statements and expressions changed, in its functions too."""
    made = replace(source, body=_Edit(change).body(source.body))
    assert made.body != source.body
    return made


def without(statement: Do) -> Callable[[Node], Node]:
    """Does nothing where the kernel does ``statement``."""
    return lambda node: Do(Const(0)) if node == statement else node


def with_text(source: Kernel, text: str) -> Kernel:
    """A copy of the kernel with another text, for who compiles it or reads a listing."""
    made = replace(source)
    made.__dict__["text"] = text
    return made


def edited(source: CudaSource, change: Callable[[str], str]) -> CudaSource:
    """A copy of ``source`` with its text changed, line by line; a line that becomes empty goes."""
    lines = source.text.splitlines()
    changed = [change(line) for line in lines]
    assert changed != lines
    return with_text(source, "\n".join(new for new, old in zip(changed, lines, strict=True) if new or not old) + "\n")

"""Text of what is built as statements, for the skeletons that still write lines; it goes with the last of them."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.compiler.kernel.nodes import Expr, Function, Stmt
from autotune.compiler.targets.cuda.printer import CudaPrinter


def lines(body: Iterable[Stmt]) -> list[str]:
    return CudaPrinter().block(body)


def text(x: Expr) -> str:
    return CudaPrinter().text(x)


def function(made: Function, name: str) -> tuple[str, list[str]]:
    """A function's text under a name, and its parameters' names."""
    params = [p.name for p in made.params]
    head = f"def {name}({', '.join(params)}):"
    return "\n".join([head, *CudaPrinter().block(made.body, 1)]), params

"""Sizes as JSON: numbers, symbols and what is computed from them, and programs with numbers in the symbols' places."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from autotune.errors import Unsupported

Sizes = Mapping[str, int]
"""Symbol to number."""


@dataclass(frozen=True)
class Size:
    """A symbolic size as an argument of a program; ``expression`` as of :func:`expression_of`."""

    expression: Any


def symbols_of(program: Any) -> list[str]:
    """The symbols in a program as JSON (:func:`autotune.compiler.regions.aten.to_json`), sorted."""
    names: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, Mapping):
            if value.keys() == {"sym"}:
                names.update(_names(value["sym"]))
            else:
                for inner in value.values():
                    walk(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                walk(inner)

    walk(program)
    return sorted(names)


def _names(expression: Any) -> set[str]:
    if isinstance(expression, str):
        return {expression}
    return set().union(*map(_names, expression[1:])) if isinstance(expression, list) else set()


_FUNCTIONS: Mapping[str, Callable[..., int]] = {
    "Add": lambda *xs: sum(xs),
    "Mul": lambda *xs: math.prod(xs),
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": max,
    "Min": min,
}


def expression_of(size: Any) -> Any:
    """A size as JSON: a number, a symbol's name, or [function, *arguments].

    Raises:
        Unsupported: an expression of functions that are not known here.
    """
    expression = size.node.expr if isinstance(size, torch.SymInt) else size
    if isinstance(expression, (int, sympy.Integer)):
        return int(expression)
    if isinstance(expression, sympy.Symbol):
        return str(expression)
    name = type(expression).__name__
    if name == "Pow" and expression.args[1].is_Integer and expression.args[1] > 0:
        return ["Mul", *[expression_of(expression.args[0])] * int(expression.args[1])]
    if name not in _FUNCTIONS:
        raise Unsupported(f"a size that is {expression}")
    return [name, *map(expression_of, expression.args)]


def evaluate(expression: Any, sizes: Sizes) -> int:
    """The number that :func:`expression_of` tells, at given sizes.

    Raises:
        KeyError: a symbol without a number. ValueError: not such an expression.
    """
    if type(expression) is int:
        return expression
    if isinstance(expression, str):
        return sizes[expression]
    if not isinstance(expression, list) or not expression or expression[0] not in _FUNCTIONS:
        raise ValueError(f"not a size: {expression!r}")
    return _FUNCTIONS[expression[0]](*[evaluate(x, sizes) for x in expression[1:]])


def at_sizes(program: Any, sizes: Sizes) -> Any:
    """A program as JSON with numbers for its symbols."""
    if isinstance(program, Mapping):
        if program.keys() == {"sym"}:
            return evaluate(program["sym"], sizes)
        return {k: at_sizes(v, sizes) for k, v in program.items()}
    return [at_sizes(v, sizes) for v in program] if isinstance(program, (list, tuple)) else program

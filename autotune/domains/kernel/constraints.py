"""Constraints between parameters: an expression's text, or a callable of the user's code.

``BLOCK_M * BLOCK_N <= 16384`` may stand in a file, so nothing of it is handed to ``eval``: the syntax tree is walked
here, and what is not arithmetic, comparison or logic on numbers and texts is refused.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import UserError, first_line

_LONGEST = 500
_DEEPEST = 40
_LARGEST_BITS = 256

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_CALLS: Mapping[str, Callable[..., Any]] = {"min": min, "max": max, "abs": abs, "cdiv": lambda a, b: -(-a // b)}
_ALLOWED = (
    "numbers, texts, + - * / // % ** << >> & | ^, comparisons, in, and, or, not, x if c else y, min, max, abs, cdiv"
)


@dataclass(frozen=True)
class Constraint:
    """A condition on configurations.

    Attributes:
        text: as the user wrote it, or the callable's name.
        names: the parameters, and entries of the key, that it reads.
        holds: from their values to whether it is fulfilled. Raises UserError where it cannot be told.
    """

    text: str
    names: frozenset[str]
    holds: Callable[[Mapping[str, Any]], bool]


def constraint(given: object, where: str) -> Constraint:
    """A constraint from what the user gave: a text, or a callable that takes parameters by their names.

    Args:
        where: how messages begin.

    Raises:
        UserError: it is neither, or its text is no expression of the allowed kind.
    """
    if isinstance(given, Constraint):
        return given
    if isinstance(given, str):
        return _parsed(given, where)
    if callable(given):
        return _called(given, where)
    raise UserError(f"{where}: the constraint {given!r} is neither a text such as 'A * B <= 1024' nor a callable")


def _called(function: Callable[..., Any], where: str) -> Constraint:
    name = getattr(function, "__qualname__", type(function).__name__)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise UserError(f"{where}: the constraint {name} has no signature: write it as a function or a text") from None
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY) for p in parameters):
        raise UserError(f"{where}: the constraint {name} has to name the parameters that it reads, without * and **")
    names = frozenset(p.name for p in parameters)

    def holds(values: Mapping[str, Any]) -> bool:
        try:
            return bool(function(**{n: values[n] for n in names}))
        except Exception as error:
            raise UserError(f"{where}: the constraint {name} failed: {first_line(error)}") from error

    return Constraint(name, names, holds)


def _parsed(text: str, where: str) -> Constraint:
    try:
        if len(text) > _LONGEST:
            raise UserError(f"{where}: a constraint of more than {_LONGEST} characters: write several")
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise UserError(f"{where}: the constraint {text!r} is no expression, such as 'A * B <= 1024'") from None
    names: set[str] = set()
    _check(tree, names, text, where, 0)

    def holds(values: Mapping[str, Any]) -> bool:
        try:
            return bool(_value(tree, values))
        except ArithmeticError as error:
            raise UserError(f"{where}: the constraint {text!r} cannot be computed: {error}") from None
        except (TypeError, ValueError) as error:
            raise UserError(f"{where}: the constraint {text!r} does not fit its values: {error}") from None

    return Constraint(text, frozenset(names), holds)


def _check(node: ast.expr, names: set[str], text: str, where: str, depth: int) -> None:
    """Refuse what is not on the list, and collect the names that are read."""
    fine = depth < _DEEPEST
    match node:
        case ast.Constant(value=bool() | int() | float() | str()):
            parts: Iterable[ast.expr] = ()
        case ast.Name(id=name):
            names.add(name)
            parts = ()
        case ast.BinOp(left=left, op=op, right=right):
            fine, parts = fine and type(op) in _BINARY, (left, right)
        case ast.UnaryOp(op=sign, operand=operand):
            fine, parts = fine and type(sign) in _UNARY, (operand,)
        case ast.BoolOp(values=values):
            parts = values
        case ast.Compare(left=left, ops=ops, comparators=others):
            fine, parts = fine and all(type(op) in _COMPARE for op in ops), (left, *others)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            parts = (test, body, orelse)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            parts = elements
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            fine, parts = fine and name in _CALLS, arguments
        case _:
            fine, parts = False, ()
    if not fine:
        raise UserError(f"{where}: the constraint {text!r} has {_shown(node)}; it may have {_ALLOWED}")
    for part in parts:
        _check(part, names, text, where, depth + 1)


def _shown(node: ast.expr) -> str:
    return ast.unparse(node)[:60]


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return values[name]
        case ast.BinOp(left=left, op=op, right=right):
            return _computed(op, _value(left, values), _value(right, values))
        case ast.UnaryOp(op=sign, operand=operand):
            return _UNARY[type(sign)](_value(operand, values))
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_value(part, values) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_value(part, values) for part in parts)
        case ast.Compare(left=left, ops=ops, comparators=others):
            found = [_value(n, values) for n in (left, *others)]
            return all(_COMPARE[type(op)](a, b) for op, a, b in zip(ops, found, found[1:], strict=False))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body if _value(test, values) else orelse, values)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return [_value(e, values) for e in elements]
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _CALLS[name](*(_value(a, values) for a in arguments))
    raise AssertionError(node)


def _computed(op: ast.operator, a: Any, b: Any) -> Any:
    """Arithmetic on numbers alone, and none whose result would take long to make."""
    for value in (a, b):
        if not isinstance(value, (int, float)):
            raise TypeError(f"{value!r} is no number")
        if isinstance(value, int) and value.bit_length() > _LARGEST_BITS:
            raise ValueError(f"a number of more than {_LARGEST_BITS} bits")
    if isinstance(op, (ast.Pow, ast.LShift)) and abs(b) > _LARGEST_BITS:
        raise ValueError(f"{b} is too large beside ** or <<")
    return _BINARY[type(op)](a, b)

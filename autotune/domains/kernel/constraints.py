"""Constraints between parameters: an expression as text, or a callable.

``BLOCK_M * BLOCK_N <= 16384`` may come from a file, so it is never passed to ``eval``. This module walks the syntax
tree, and accepts only arithmetic, comparisons and logic on numbers and strings.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import UserError, first_line

_Value = Callable[[Mapping[str, Any]], Any]
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
        text: the expression as written by the user, or the callable's name.
        names: parameters and key entries that the constraint reads.
        holds: returns True if the given values fulfil the constraint; raises UserError if it cannot be computed.
    """

    text: str
    names: frozenset[str]
    holds: Callable[[Mapping[str, Any]], bool]


def constraint(given: object, where: str) -> Constraint:
    """Make a constraint from an expression, or from a callable that takes parameters by name.

    Args:
        where: prefix of messages.

    Raises:
        UserError: ``given`` is neither, or the expression has unsupported parts.
    """
    if isinstance(given, Constraint):
        return given
    if isinstance(given, str):
        return _parsed(given, where)
    if callable(given):
        return _called(given, where)
    raise UserError(f"{where}: the constraint {given!r} is not a string such as 'A * B <= 1024' or a callable")


def _called(function: Callable[..., Any], where: str) -> Constraint:
    name = getattr(function, "__qualname__", type(function).__name__)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise UserError(
            f"{where}: the constraint {name} has no signature: write it as a function or a string"
        ) from None
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY) for p in parameters):
        raise UserError(f"{where}: the constraint {name} must name its parameters, without * and **")
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
            raise UserError(f"{where}: a constraint has more than {_LONGEST} characters: write several")
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise UserError(f"{where}: the constraint {text!r} is not an expression such as 'A * B <= 1024'") from None
    names: set[str] = set()

    def refuse(node: ast.expr) -> UserError:
        return UserError(f"{where}: the constraint {text!r} has {ast.unparse(node)[:60]}; it may have {_ALLOWED}")

    value = _compiled(tree, names, refuse, 0)

    def holds(values: Mapping[str, Any]) -> bool:
        try:
            return bool(value(values))
        except ArithmeticError as error:
            raise UserError(f"{where}: the constraint {text!r} cannot be computed: {error}") from None
        except (TypeError, ValueError) as error:
            raise UserError(f"{where}: the constraint {text!r} cannot be applied to its values: {error}") from None

    return Constraint(text, frozenset(names), holds)


def _compiled(node: ast.expr, names: set[str], refuse: Callable[[ast.expr], UserError], depth: int) -> _Value:
    """Compile an expression to a function of its names, which are added to ``names``.

    Raises the exception that ``refuse`` returns for an unsupported node.
    """

    def inner(part: ast.expr) -> _Value:
        return _compiled(part, names, refuse, depth + 1)

    if depth >= _DEEPEST:
        raise refuse(node)
    match node:
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return lambda v: value
        case ast.Name(id=name):
            names.add(name)
            return lambda v: v[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = inner(left), inner(right)
            return lambda v: _computed(op, a(v), b(v))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            apply, a = _UNARY[type(sign)], inner(operand)
            return lambda v: apply(a(v))
        case ast.BoolOp(op=logic, values=values):
            joined, parts = all if isinstance(logic, ast.And) else any, list(map(inner, values))
            return lambda v: joined(part(v) for part in parts)
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(o) in _COMPARE for o in ops):
            terms, compared = list(map(inner, (left, *others))), [_COMPARE[type(o)] for o in ops]

            def chain(v: Mapping[str, Any]) -> bool:
                found = [term(v) for term in terms]
                return all(holds(a, b) for holds, a, b in zip(compared, found, found[1:], strict=False))

            return chain
        case ast.IfExp(test=test, body=body, orelse=orelse):
            decide, yes, no = inner(test), inner(body), inner(orelse)
            return lambda v: (yes if decide(v) else no)(v)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            items = list(map(inner, elements))
            return lambda v: [item(v) for item in items]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _CALLS:
            called, given = _CALLS[name], list(map(inner, arguments))
            return lambda v: called(*(one(v) for one in given))
    raise refuse(node)


def _computed(op: ast.operator, a: Any, b: Any) -> Any:
    """Arithmetic restricted to numbers, and to results that are cheap to compute."""
    for value in (a, b):
        if not isinstance(value, (int, float)):
            raise TypeError(f"{value!r} is no number")
        if isinstance(value, int) and value.bit_length() > _LARGEST_BITS:
            raise ValueError(f"a number of more than {_LARGEST_BITS} bits")
    if isinstance(op, (ast.Pow, ast.LShift)) and abs(b) > _LARGEST_BITS:
        raise ValueError(f"{b} is too large beside ** or <<")
    return _BINARY[type(op)](a, b)

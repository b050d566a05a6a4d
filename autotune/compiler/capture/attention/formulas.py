"""Formulas for the elements of a Dynamo graph's tensors, for lengths that are symbolic when the graph is compiled.

``arange(s)[None, :] <= arange(s)[:, None]`` holds ``r0 <= r1`` at ``[..., r1, r0]`` for any ``s``. Attention masks are
such tensors. With static sizes, :mod:`.constants` evaluates a mask; with symbolic sizes, this module derives its
formula. Axes are counted from the last one, as in broadcasting.

A sliding window wider than the sequence has a formula as well, up to that sequence length. A rewrite that uses it calls
:meth:`Formulas.rely_on`, which adds a guard to Dynamo: a longer sequence causes a recompilation.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from autotune.compiler.capture.attention.calls import is_bounded, torch_name
from autotune.compiler.capture.attention.effects import Writes

Number: TypeAlias = Any
"""A sympy integer expression (sympy has no types): sums of numbers, lengths and indices."""


@dataclass(frozen=True)
class AtMost:
    """The condition ``value <= 0``, which depends on the indices."""

    value: Number


Element: TypeAlias = Any
"""A number; for a bool tensor, True, False or :class:`AtMost`."""


@dataclass(frozen=True)
class Formula:
    """The elements of an integer or bool tensor, or of small whole numbers in another type.

    Attributes:
        shape: the tensor's shape.
        element: an expression in the symbols of :func:`axis`. It has no symbol for an axis of extent 1, so that
            broadcasting does not change it.
        assumes: expressions that must be at most 0 for the formula to hold.
    """

    shape: tuple[Number, ...]
    element: Element
    assumes: frozenset[Number] = frozenset()


class _Unknown(Exception):
    """Raised for an operator without a formula, and for a comparison that is neither constant nor an AtMost."""


def axis(place: int) -> sympy.Symbol:
    """The index along the axis ``place`` positions before the last."""
    return sympy.Symbol(f"r{place}", integer=True, nonnegative=True)


def is_not_later() -> AtMost:
    """The condition of a causal mask ``[..., queries, keys]``: the key is no later than the query."""
    return AtMost(axis(0) - axis(1))  # the first sum in a process imports much of sympy


def distance(condition: AtMost) -> tuple[int, int] | None:
    """A bound on the difference of two indices: ``sign * (query - key) <= most``; None for another condition."""
    for sign in (1, -1):
        rest = sympy.expand(condition.value - sign * (axis(1) - axis(0)))
        if rest.is_Integer:
            return sign, -int(rest)
    return None


class Formulas:
    """The formulas of one graph's nodes.

    Args:
        writes: the in-place writes of that graph, or of one that calls it.
        given: formulas of placeholders.
    """

    def __init__(self, writes: Writes, given: Mapping[fx.Node, Formula] | None = None) -> None:
        self._writes = writes
        self._known: dict[fx.Node, Formula | None] = dict(given or {})
        self._lengths: dict[Number, torch.SymInt] = {}
        self._assumed: set[Number] = set()
        """Assumptions for the node that :meth:`of` is processing."""

    def of(self, node: fx.Node) -> Formula | None:
        """The formula of ``node``'s elements; None if it is unknown."""
        if node not in self._known:
            self._known[node] = None  # until it is found
            outer, self._assumed = self._assumed, set()
            with contextlib.suppress(_Unknown, TypeError, IndexError, ValueError):
                self._known[node] = self._read(node)
            self._assumed = outer
        return self._known[node]

    def inside(self, given: Mapping[fx.Node, Formula]) -> Formulas:
        """The formulas of a graph that this one calls."""
        found = Formulas(self._writes, given)
        found._lengths = self._lengths
        return found

    def assume(self, *formulas: Formula) -> None:
        """Add the assumptions of formulas to those of the node that :meth:`of` is processing."""
        for formula in formulas:
            self._assumed |= formula.assumes

    def rely_on(self, formula: Formula) -> None:
        """Add guards to Dynamo, so that it recompiles for lengths for which the formula does not hold."""
        for value in formula.assumes:
            if not self._at_lengths(value, lambda length: length) <= 0:
                raise AssertionError(f"{value} <= 0 was found to hold")

    def seems_at_most_0(self, value: Number) -> bool:
        """True if a sum of lengths is at most 0 at compile time; it then becomes an assumption.

        A length with a range from the user is never part of an assumption: PyTorch refuses to narrow that range.
        """
        if any(is_bounded(self._lengths[length]) for length in value.free_symbols if length in self._lengths):
            return False
        try:
            holds = bool(self._at_lengths(value, lambda length: length.node.hint) <= 0)
        except (KeyError, TypeError):
            return False
        if holds:
            self._assumed.add(value)
        return holds

    def _at_lengths(self, value: Number, of: Callable[[torch.SymInt], Any]) -> Any:
        """An affine expression of lengths, evaluated with ``of(length)`` for each length."""
        factors = value.as_coefficients_dict()
        return sum(int(n) * (1 if of_what == 1 else of(self._lengths[of_what])) for of_what, n in factors.items())

    def _read(self, node: fx.Node) -> Formula:
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or self._writes.touch(node):
            raise _Unknown
        shape = tuple(map(_extent, value.shape))
        sizes: tuple[Any, ...] = tuple(value.shape)
        self._lengths |= {extent: size for extent, size in zip(shape, sizes, strict=True) if extent.is_Symbol}
        name = torch_name(node)
        if name.startswith("__"):  # torch 2.12 traces ``a == b`` as ``a.__eq__(b)``
            name = name.strip("_")
        if name not in _READERS:
            raise _Unknown
        element = _READERS[name](self, node, shape)
        if (value.dtype == torch.bool) != isinstance(element, AtMost | bool):
            raise _Unknown  # a type was changed on the way
        if value.dtype not in _WHOLE and not (value.is_floating_point() and _is_small(element)):
            raise _Unknown  # it may be rounded
        ones = {k: sympy.Integer(0) for k, extent in enumerate(reversed(shape)) if extent == 1}
        return Formula(shape, _moved(element, ones), frozenset(self._assumed))

    def operand(self, given: Any) -> Formula:
        """The formula of an argument: a tensor, a number, or a length."""
        if isinstance(given, fx.Node) and isinstance(given.meta.get("example_value"), torch.Tensor):
            found = self.of(given)
            if found is None:
                raise _Unknown
            self.assume(found)
            return found
        return Formula((), given if type(given) is bool else _number(given))


_WHOLE = (torch.bool, torch.int64, torch.int32)


def _is_small(element: Element) -> bool:
    """True for a whole number that every floating-point type represents exactly."""
    return isinstance(element, sympy.Integer) and abs(element) <= 256


def _extent(size: Any) -> Number:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _number(given: Any) -> Number:
    value = given.meta.get("example_value") if isinstance(given, fx.Node) else given
    if isinstance(value, float) and value.is_integer() and abs(value) <= 256:
        value = int(value)
    if type(value) is not int and not isinstance(value, torch.SymInt):
        raise _Unknown
    return _extent(value)


def _moved(element: Element, to: dict[int, Number]) -> Element:
    if isinstance(element, bool):
        return element
    if isinstance(element, AtMost):
        return AtMost(_moved(element.value, to))
    return element.subs({axis(a): place for a, place in to.items()}, simultaneous=True)


def _bounds(value: Number, shape: Sequence[Number]) -> tuple[Number, Number]:
    """The minimum and maximum of an affine expression of indices."""
    least = greatest = value = sympy.expand(value)
    for place, extent in enumerate(reversed(shape)):
        slope = value.coeff(axis(place))
        if not (value - slope * axis(place)).has(axis(place)) and slope.is_number:
            low, high = (0, extent - 1) if slope > 0 else (extent - 1, 0)
            least, greatest = least.subs(axis(place), low), greatest.subs(axis(place), high)
    return sympy.expand(least), sympy.expand(greatest)


# Operators: each reader returns the element of a result from the formulas of the arguments.

Reader = Callable[[Formulas, fx.Node, tuple[Number, ...]], Element]


def _arange(formulas: Formulas, node: fx.Node, shape: tuple[Number, ...]) -> Element:
    given = [*node.args, *(node.kwargs[k] for k in ("start", "end", "step") if k in node.kwargs)]
    if len(given) > 2:
        raise _Unknown
    begin = _number(given[0]) if len(given) == 2 else sympy.Integer(0)
    return begin + axis(0)


def _filled(place: int, value: bool | None = None) -> Reader:
    def read(formulas: Formulas, node: fx.Node, shape: tuple[Number, ...]) -> Element:
        given = value if value is not None else (node.args[place] if len(node.args) > place else None)
        number = formulas.operand(node.kwargs.get("fill_value", given)).element
        dtype = node.meta["example_value"].dtype
        if dtype != torch.bool:
            return sympy.Integer(int(number)) if isinstance(number, bool) else number
        return bool(number)

    return read


def _arithmetic(of: Callable[[Any, Any], Any]) -> Reader:
    def read(formulas: Formulas, node: fx.Node, shape: tuple[Number, ...]) -> Element:
        if node.kwargs or len(node.args) != 2:
            raise _Unknown
        left, right = (formulas.operand(a).element for a in node.args)
        if not isinstance(left, sympy.Expr) or not isinstance(right, sympy.Expr):
            raise _Unknown
        return sympy.expand(of(left, right))

    return read


def _compared(of: Callable[[Number, Number], Number]) -> Reader:
    """A reader of comparisons; ``of`` makes a value that is at most 0 exactly if the comparison holds."""
    difference = _arithmetic(of)

    def read(formulas: Formulas, node: fx.Node, shape: tuple[Number, ...]) -> Element:
        value = difference(formulas, node, shape)
        least, greatest = _bounds(value, shape)
        if greatest.is_nonpositive or formulas.seems_at_most_0(greatest):
            return True
        return False if least.is_positive else AtMost(value)

    return read


def _equal(holds: bool) -> Reader:
    difference = _arithmetic(operator.sub)

    def read(formulas: Formulas, node: fx.Node, shape: tuple[Number, ...]) -> Element:
        apart = difference(formulas, node, shape)
        if apart == 0:
            return holds
        least, greatest = _bounds(apart, shape)
        if least.is_positive or greatest.is_negative:
            return not holds
        raise _Unknown

    return read


def _both(decides: bool) -> Reader:
    """A reader of ``and`` (``decides`` is False) or ``or`` (True); an operand of that value decides the result."""

    def read(formulas: Formulas, node: fx.Node, shape: tuple[Number, ...]) -> Element:
        if node.kwargs or len(node.args) != 2:
            raise _Unknown
        known = [formulas.of(a) for a in node.args if isinstance(a, fx.Node)]
        found = [formula for formula in known if formula is not None]
        for formula in found:
            if formula.element is decides:
                formulas.assume(formula)
                return decides
        if len(found) != 2:
            raise _Unknown
        left, right = (formula.element for formula in found)
        formulas.assume(*found)
        if left is (not decides) or left == right:
            return right
        if right is (not decides):
            return left
        raise _Unknown

    return read


def _negated(formulas: Formulas, node: fx.Node, shape: tuple[Number, ...]) -> Element:
    element = formulas.operand(node.args[0]).element
    if isinstance(element, AtMost):
        return AtMost(sympy.expand(1 - element.value))
    if isinstance(element, bool):
        return not element
    raise _Unknown


def _same(formulas: Formulas, node: fx.Node, shape: tuple[Number, ...]) -> Element:
    """The element of an operator that keeps elements and their indices, counted from the last axis.

    A number may become a bool and a bool a number.
    """
    element = formulas.operand(node.args[0]).element
    is_bool = node.meta["example_value"].dtype == torch.bool
    if is_bool and isinstance(element, sympy.Integer):
        return bool(element != 0)
    return sympy.Integer(int(element)) if isinstance(element, bool) and not is_bool else element


def _repeated(formulas: Formulas, node: fx.Node, shape: tuple[Number, ...]) -> Element:
    """``repeat`` along axes on which the elements do not depend."""
    times = node.args[1] if isinstance(node.args[1], tuple | list) else node.args[1:]
    element = formulas.operand(node.args[0]).element
    read = element.value if isinstance(element, AtMost) else element
    for place, count in enumerate(reversed(times)):
        if count != 1 and isinstance(read, sympy.Expr) and read.has(axis(place)):
            raise _Unknown
    return element


def _unsqueezed(formulas: Formulas, node: fx.Node, shape: tuple[Number, ...]) -> Element:
    (place,) = (*node.args[1:], *node.kwargs.values())
    if type(place) is not int:
        raise _Unknown
    inserted = len(shape) - 1 - place if place >= 0 else -1 - place
    # The axes before the inserted one are one position farther from the last.
    return _moved(formulas.operand(node.args[0]).element, {k: axis(k + 1) for k in range(inserted, len(shape) - 1)})


def _indexed(formulas: Formulas, node: fx.Node, shape: tuple[Number, ...]) -> Element:
    """``x[...]`` by slices from the start, None and numbers; or by a tensor for each axis."""
    source = formulas.operand(node.args[0])
    places = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if places and all(isinstance(p, fx.Node) for p in places):
        return _gathered(formulas, source, places)
    if Ellipsis in places:
        raise _Unknown
    left, out = len(source.shape), len(shape)
    to: dict[int, Number] = {}
    for place in places:
        if place is None:
            out -= 1
            continue
        left -= 1
        if isinstance(place, slice) and place.step in (None, 1) and place.start in (None, 0):
            out -= 1
            to[left] = axis(out)
        elif type(place) is int and place >= 0:
            to[left] = sympy.Integer(place)
        else:
            raise _Unknown
    if left != out:
        raise _Unknown
    return _moved(source.element, to)


def _gathered(formulas: Formulas, source: Formula, places: Sequence[Any]) -> Element:
    indices = [formulas.operand(p).element for p in places]
    if len(indices) != len(source.shape):
        raise _Unknown
    to = {}
    for place, index in enumerate(reversed(indices)):
        if not isinstance(index, sympy.Expr) or not index.is_nonnegative:
            raise _Unknown  # a negative index counts from the end
        to[place] = index
    return _moved(source.element, to)


def _differences(formulas: Formulas, node: fx.Node, shape: tuple[Number, ...]) -> Element:
    """``diff(x, prepend=first)`` along the last axis, if all differences, including the first, are the same number."""
    options = dict(zip(("n", "dim", "prepend"), node.args[1:], strict=False)) | node.kwargs
    source = formulas.operand(node.args[0]).element
    begin = formulas.operand(options.pop("prepend", None))
    first = begin.element
    if options not in ({}, {"dim": -1}, {"n": 1}, {"n": 1, "dim": -1}) or begin.shape[-1:] != (1,):
        raise _Unknown
    if not isinstance(source, sympy.Expr) or not isinstance(first, sympy.Expr):
        raise _Unknown
    step = sympy.expand(source - source.subs(axis(0), axis(0) - 1))
    if sympy.expand(source.subs(axis(0), 0) - first - step) != 0 or step.has(axis(0)):
        raise _Unknown
    return step


def _summed_up(formulas: Formulas, node: fx.Node, shape: tuple[Number, ...]) -> Element:
    """``cumsum`` of zeros."""
    if formulas.operand(node.args[0]).element not in (0, False):
        raise _Unknown
    return sympy.Integer(0)


_READERS: dict[str, Reader] = {
    "arange": _arange,
    "ones": _filled(0, True), "new_ones": _filled(0, True), "ones_like": _filled(0, True),
    "zeros": _filled(0, False), "new_zeros": _filled(0, False), "zeros_like": _filled(0, False),
    "full": _filled(1), "new_full": _filled(2), "full_like": _filled(1),
    "add": _arithmetic(operator.add), "sub": _arithmetic(operator.sub),
    "le": _compared(operator.sub), "ge": _compared(lambda a, b: b - a),
    "lt": _compared(lambda a, b: a - b + 1), "gt": _compared(lambda a, b: b - a + 1),
    "eq": _equal(True), "ne": _equal(False),
    **dict.fromkeys(("and_", "and", "bitwise_and", "logical_and"), _both(False)),
    **dict.fromkeys(("or_", "or", "bitwise_or", "logical_or"), _both(True)),
    **dict.fromkeys(("invert", "bitwise_not", "logical_not"), _negated),
    **dict.fromkeys(("to", "bool", "int", "long", "float"), _same),
    **dict.fromkeys(("contiguous", "clone", "expand", "expand_as", "broadcast_to"), _same),
    "repeat": _repeated, "unsqueeze": _unsqueezed, "getitem": _indexed, "diff": _differences, "cumsum": _summed_up,
}  # fmt: skip

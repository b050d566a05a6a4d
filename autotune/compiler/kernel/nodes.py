"""Expressions and statements of a kernel.

A scheme builds them, and a target's printer turns them into source. A row's sum of squares::

    total, x = Var("total", "float32"), Var("x", "float32")
    [Assign(total, total + x * x), If(Var("row", "int32") < 8, (Return((total,)),))]

Expressions are values: equal ones are interchangeable. A :class:`Function` is compared by identity, so that two
functions with the same text remain distinct. Nodes of a single target (a shuffle, shared memory) are subclasses next to
its printer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any, ClassVar, TypeVar, overload

from autotune.ir.graph import compute_type

COMPARISONS = frozenset({"<", "<=", ">", ">=", "==", "!=", "and", "or"})


class Node:
    """Base of expressions and statements: the fields of a node are its parts."""

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]] = ()  # a dataclass names its fields here

    def expressions(self) -> list[Expr]:
        """The expressions in its fields, in order; for a statement, without those of nested statements."""
        found: list[Expr] = []
        for name in self.__match_args__:
            part = getattr(self, name)
            if isinstance(part, Expr):
                found.append(part)
            elif isinstance(part, tuple):
                found += [x for x in part if isinstance(x, Expr)]
        return found


Changed = TypeVar("Changed", bound=Node)


def _infix(op: str) -> Callable[[Expr, Operand], Binary]:
    return lambda self, other: Binary(op, self, expr(other))


def _swapped(op: str) -> Callable[[Expr, Operand], Binary]:
    return lambda self, other: Binary(op, expr(other), self)


class Expr(Node):
    """A value.

    Attributes:
        dtype: its arithmetic type; "" for tuples, and for numbers with the type of the other operand.
        like: fields from which it takes its type: the first that has one.
    """

    __slots__ = ()
    like: ClassVar[tuple[str, ...]] = ()

    @property
    def dtype(self) -> str:
        return next((t for name in self.like if (t := getattr(self, name).dtype)), "")

    __add__, __radd__ = _infix("+"), _swapped("+")
    __sub__, __rsub__ = _infix("-"), _swapped("-")
    __mul__, __rmul__ = _infix("*"), _swapped("*")
    __truediv__, __floordiv__, __mod__ = _infix("/"), _infix("//"), _infix("%")
    __and__, __or__, __xor__ = _infix("&"), _infix("|"), _infix("^")
    __rshift__, __lshift__ = _infix(">>"), _infix("<<")
    __lt__, __le__, __gt__, __ge__ = _infix("<"), _infix("<="), _infix(">"), _infix(">=")
    # ``==`` and ``!=`` themselves compare nodes; these are the kernel's.
    equals, differs = _infix("=="), _infix("!=")

    def __neg__(self) -> Unary:
        return Unary("-", self)

    def __getitem__(self, index: Operand) -> Item:
        return Item(self, expr(index))


Operand = Expr | int


def expr(x: Operand) -> Expr:
    """``x`` as an expression; a Python number becomes an untyped integer constant."""
    return x if isinstance(x, Expr) else Const(x)


class Leaf(Expr):
    """An expression without expressions in its fields."""

    __slots__ = ()

    def expressions(self) -> list[Expr]:
        return []


@dataclass(frozen=True, slots=True)
class Var(Leaf):
    """A variable of a kernel or a function."""

    name: str
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Pointer(Leaf):
    """The kernel's tensor ``number``; in a function, its parameter for that tensor."""

    number: int

    @property
    def name(self) -> str:
        return f"p{self.number}"


@dataclass(frozen=True, slots=True)
class Const(Leaf):
    """A number of arithmetic type ``dtype``; without one, an integer in index arithmetic."""

    value: float | int | bool
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Binary(Expr):
    """``left op right`` in Python syntax; ``and`` and ``or`` short-circuit."""

    op: str
    left: Expr
    right: Expr

    @property
    def dtype(self) -> str:
        return "bool" if self.op in COMPARISONS else self.left.dtype or self.right.dtype


@dataclass(frozen=True, slots=True)
class Unary(Expr):
    like = ("value",)
    op: str
    value: Expr


@dataclass(frozen=True, slots=True)
class Cast(Expr):
    """``value`` as a number of arithmetic type ``dtype``."""

    dtype: str = field()  # without a default: not the property of that name
    value: Expr


@dataclass(frozen=True, slots=True)
class Op(Expr):
    """An operator of ``autotune.ir.nodes`` on arguments of arithmetic type ``of``; a target computes it."""

    name: str
    args: tuple[Expr, ...]
    of: str
    dtype: str = field()


@dataclass(frozen=True, slots=True)
class Select(Expr):
    """``then`` if ``test``, else ``other``; both are evaluated."""

    like = ("then", "other")
    test: Expr
    then: Expr
    other: Expr


@dataclass(frozen=True, slots=True)
class Item(Expr):
    """Element ``index`` of a tuple or an array."""

    base: Expr
    index: Expr


@dataclass(frozen=True, slots=True)
class Tuple(Expr):
    items: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Intrinsic(Expr):
    """A call of a target's intrinsic by name; ``of`` is a suffix of the name, such as ``f32`` and 4 in
    ``take_f32_4``."""

    name: str
    args: tuple[Expr, ...]
    dtype: str = ""
    of: tuple[str | int, ...] = ()


@dataclass(frozen=True, slots=True)
class Invoke(Expr):
    """A call of one of the kernel's functions; its result is a tuple."""

    function: Function
    args: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Load(Expr):
    """Elements of a tensor in arithmetic type: a tuple of ``lanes``, or one number if ``lanes`` is 1.

    Attributes:
        storage: the tensor's storage type.
        hint: the cache hint, by its name in ``search_spaces``; "default" for none.
        pointer: a :class:`Pointer`, or a variable that holds a selected one.
        index: the index of the first element.
        form: One of ``plain``, ``words`` (raw, 32 bits a word), ``fixed`` (never moved out of its branch)
            and ``partial``. A ``partial`` load is an aligned vector of at most 16 bytes, whose elements beyond the
            tensor are undefined.
        guard: a condition; if it is false, the result is zeros and memory is not accessed.
    """

    storage: str
    lanes: int
    hint: str
    pointer: Expr
    index: Expr
    form: str = "plain"
    guard: Expr | None = None

    @property
    def dtype(self) -> str:
        return compute_type(self.storage) if self.lanes == 1 and self.form in ("plain", "fixed", "partial") else ""


@dataclass(frozen=True, slots=True)
class Unpack(Expr):
    """A tuple of ``lanes`` numbers from the words of a load of form ``words``."""

    storage: str
    lanes: int
    words: Expr


class Stmt(Node):
    """A statement."""

    __slots__ = ()

    @property
    def defines(self) -> Expr | None:
        """The variable that it sets, the first of its expressions."""
        return None

    def blocks(self) -> list[Body]:
        """The statements inside."""
        fields = (getattr(self, name) for name in self.__match_args__)
        return [x for x in fields if isinstance(x, tuple) and x and isinstance(x[0], Stmt)]


Body = tuple[Stmt, ...]


@dataclass(frozen=True, slots=True)
class Assign(Stmt):
    """``target = value``; the target is a variable, or an element of an array."""

    target: Var | Item
    value: Expr

    @property
    def defines(self) -> Expr | None:
        return self.target if isinstance(self.target, Var) else None


@dataclass(frozen=True, slots=True)
class Do(Stmt):
    """An expression evaluated for its side effect."""

    value: Expr


@dataclass(frozen=True, slots=True)
class Store(Stmt):
    """A store of elements in arithmetic type, one of ``values`` for each lane, with the fields of :class:`Load`."""

    storage: str
    hint: str
    pointer: Expr
    index: Expr
    values: tuple[Expr, ...]
    guard: Expr | None = None


@dataclass(frozen=True, slots=True)
class If(Stmt):
    test: Expr
    then: Body
    other: Body = ()


@dataclass(frozen=True, slots=True)
class For(Stmt):
    """A loop of ``body`` with ``var`` from ``start`` to ``stop`` (exclusive)."""

    var: Var
    start: Expr
    stop: Expr
    step: Expr
    body: Body

    @property
    def defines(self) -> Expr | None:
        return self.var


@dataclass(frozen=True, slots=True)
class Return(Stmt):
    """The results of a function as a tuple; the single result itself if ``alone``."""

    values: tuple[Expr, ...]
    alone: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Function:
    """A function of a kernel, which can access only its parameters; it is compared by identity."""

    params: tuple[Var | Pointer, ...]
    body: Body

    def __call__(self, given: Mapping[str, Expr] | None = None) -> Invoke:
        """A call with the caller's variables of the same names, except arguments ``given`` by name."""
        return Invoke(self, tuple((given or {}).get(p.name, p) for p in self.params))


def loop(var: Var, stop: Operand, body: Iterable[Stmt], start: Operand = 0, step: Operand = 1) -> For:
    """A :class:`For`, with its usual bounds left out."""
    return For(var, expr(start), expr(stop), expr(step), tuple(body))


def when(test: Expr, then: Iterable[Stmt], other: Iterable[Stmt] = ()) -> If:
    """An :class:`If` of lists."""
    return If(test, tuple(then), tuple(other))


@overload
def conjunction(first: Expr, /, *tests: Expr | None) -> Expr: ...
@overload
def conjunction(*tests: Expr | None) -> Expr | None: ...
def conjunction(*tests: Expr | None) -> Expr | None:
    """The conjunction of the tests that are not None, evaluated from the left until one is false."""
    there = [t for t in tests if t is not None]
    return reduce(lambda both, t: Binary("and", both, t), there) if there else None


def sum_of(terms: Iterable[tuple[Expr, int]], constant: int = 0) -> Expr:
    """``a * 3 + b + 7`` from terms with factors, without factors of 0."""
    parts: list[Expr] = [x if factor == 1 else x * factor for x, factor in terms if factor]
    return reduce(add, [*parts, Const(constant)] if constant or not parts else parts)


# ---- traversals -----------------------------------------------------------------------------------------------------


def walk(body: Iterable[Stmt]) -> Iterator[Stmt]:
    """Every statement in order; nested statements follow their parent."""
    for stmt in body:
        yield stmt
        for block in stmt.blocks():
            yield from walk(block)


def parts(expressions: Iterable[Expr]) -> Iterator[Expr]:
    """Expressions and all their subexpressions, outermost first."""
    stack = list(expressions)[::-1]
    while stack:
        x = stack.pop()
        yield x
        stack.extend(reversed(x.expressions()))


def expressions_of(body: Iterable[Stmt]) -> Iterator[Expr]:
    """Every expression of statements and nested statements, in order, without those of functions."""
    for stmt in walk(body):
        yield from parts(stmt.expressions())


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


def changed(node: Changed, change: Callable[[Expr], Expr]) -> Changed:
    """A node with ``change`` applied to each of its expressions, whose parts are changed already."""

    def part(x: Any) -> Any:
        if isinstance(x, Node):
            return changed(x, change)
        return tuple(map(part, x)) if isinstance(x, tuple) else x

    made: Any = replace(node, **{name: part(getattr(node, name)) for name in node.__match_args__})  # type: ignore[type-var]
    return change(made) if isinstance(made, Expr) else made  # type: ignore[return-value]


def closed(body: Iterable[Stmt]) -> Function:
    """A function of statements.

    Its parameters are their pointers, and the variables that they read before they set them, in the order of first use.
    """
    made, known = tuple(body), set[str]()
    free: dict[str, Var | Pointer] = {}
    for stmt in walk(made):
        new = stmt.defines
        for x in parts(stmt.expressions()[1:] if new else stmt.expressions()):
            if isinstance(x, Var | Pointer) and x.name not in known:
                free.setdefault(x.name, x)
        if isinstance(new, Var):
            known.add(new.name)
    return Function(tuple(free.values()), made)

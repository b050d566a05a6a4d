"""Printer of the kernel IR in Python syntax, which all current targets use; a target's printer extends it.

``for_<Node>`` methods return the text of an expression, and ``put_<Node>`` methods add the lines of a statement. A
target adds methods for its nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autotune.compiler.kernel import nodes

_PRECEDENCE = (
    ("or",),
    ("and",),
    ("<", "<=", ">", ">=", "==", "!="),
    ("|",),
    ("^",),
    ("&",),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "//", "%"),
)
PRECEDENCE = {op: level for level, ops in enumerate(_PRECEDENCE) for op in ops}
_UNARY = len(_PRECEDENCE)
ATOM = _UNARY + 1
_MOST_ITEMS = 16
"""Most items of one tuple display: Python builds one of over 30 through a list, which Numba does not always support."""


class Printer:
    """Printer of one kernel, whose functions get names in order of first use."""

    def __init__(self) -> None:
        self.names: dict[nodes.Function, str] = {}
        self.lines: list[str] = []
        self.depth = 0

    # ---- whole kernels ----------------------------------------------------------------------------------------------

    def functions(self, body: Iterable[nodes.Stmt]) -> list[str]:
        """The texts of all functions that ``body`` needs."""
        out = []
        for function in nodes.functions_of(body):
            self.names[function] = f"step{len(self.names)}"
            params = ", ".join(p.name for p in function.params)
            out.append("\n".join([f"def {self.names[function]}({params}):", *self.block(function.body, 1)]))
        return out

    def block(self, body: Iterable[nodes.Stmt], depth: int = 0) -> list[str]:
        """The lines of statements, indented ``depth`` times."""
        outer = self.lines, self.depth
        self.lines, self.depth = [], depth
        for stmt in body:
            getattr(self, f"put_{type(stmt).__name__}")(stmt)
        lines = self.lines
        self.lines, self.depth = outer
        return lines

    def put(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def inside(self, body: Sequence[nodes.Stmt]) -> None:
        self.lines += self.block(body, self.depth + 1)

    # ---- statements -------------------------------------------------------------------------------------------------

    def put_Assign(self, s: nodes.Assign) -> None:
        self.put(f"{self.text(s.target)} = {self.text(s.value)}")

    def put_Do(self, s: nodes.Do) -> None:
        self.put(self.text(s.value))

    def put_If(self, s: nodes.If) -> None:
        self.put(f"if {self.text(s.test)}:")
        self.inside(s.then)
        if s.other:
            self.put("else:")
            self.inside(s.other)

    def put_For(self, s: nodes.For) -> None:
        bounds = [self.text(x) for x in (s.start, s.stop, s.step)]
        if s.step == nodes.Const(1):
            bounds = bounds[1:2] if s.start == nodes.Const(0) else bounds[:2]
        self.put(f"for {s.var.name} in range({', '.join(bounds)}):")
        self.inside(s.body)

    def put_Return(self, s: nodes.Return) -> None:
        self.put(f"return {self.text(s.values[0]) if s.alone else self.tuple_of(s.values)}")

    # ---- expressions ------------------------------------------------------------------------------------------------

    def text(self, x: nodes.Expr) -> str:
        """The expression by itself, as an argument or a right-hand side."""
        found: str = getattr(self, f"for_{type(x).__name__}")(x)
        return found

    def operand(self, x: nodes.Expr, least: int) -> str:
        """The expression as an operand of an operator that binds as tightly as ``least``."""
        text = self.text(x)
        level = PRECEDENCE[x.op] if isinstance(x, nodes.Binary) else _UNARY if isinstance(x, nodes.Unary) else ATOM
        return text if level >= least else f"({text})"

    def for_Var(self, x: nodes.Var) -> str:
        return x.name

    def for_Pointer(self, x: nodes.Pointer) -> str:
        return x.name

    def for_Const(self, x: nodes.Const) -> str:
        return str(x.value)

    def for_Binary(self, x: nodes.Binary) -> str:
        level = PRECEDENCE[x.op]
        chained = level == PRECEDENCE["<"]  # Python reads a < b < c as a < b and b < c
        return f"{self.operand(x.left, level + chained)} {x.op} {self.operand(x.right, level + 1)}"

    def for_Unary(self, x: nodes.Unary) -> str:
        return f"{x.op}{self.operand(x.value, _UNARY)}"

    def for_Item(self, x: nodes.Item) -> str:
        return f"{self.operand(x.base, ATOM)}[{self.text(x.index)}]"

    def for_Tuple(self, x: nodes.Tuple) -> str:
        text = self.tuple_of(x.items)
        return f"({text})" if len(x.items) > _MOST_ITEMS else text

    def for_Intrinsic(self, x: nodes.Intrinsic) -> str:
        return self.call("_".join(map(str, (x.name, *x.of))), x.args)

    def for_Invoke(self, x: nodes.Invoke) -> str:
        return self.call(self.names[x.function], x.args)

    def for_Select(self, x: nodes.Select) -> str:
        return self.call("sel", (x.test, x.then, x.other))

    def call(self, name: str, args: Iterable[nodes.Expr]) -> str:
        return f"{name}({', '.join(self.text(a) for a in args)})"

    def tuple_of(self, items: Sequence[nodes.Expr]) -> str:
        return tuple_of([self.text(x) for x in items])


def tuple_of(texts: Sequence[str]) -> str:
    """Source of a tuple, in displays of at most 16 items."""
    parts = [texts[k : k + _MOST_ITEMS] for k in range(0, len(texts), _MOST_ITEMS)] or [[]]
    return " + ".join(f"({', '.join(part)},)" if part else "()" for part in parts)

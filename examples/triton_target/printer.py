"""Prints the kernel IR as Triton source: a variable, one number in the IR, holds a block of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from autotune.compiler.kernel import nodes
from autotune.compiler.kernel.printer import ATOM, Printer
from autotune.errors import Unsupported
from autotune.ir.graph import compute_type

TYPES = {"float32": "tl.float32", "int32": "tl.int32", "int64": "tl.int64", "bool": "tl.int1"}


@dataclass(frozen=True, slots=True)
class ProgramId(nodes.Expr):
    """Number of the program."""

    dtype: ClassVar[str] = "int32"


@dataclass(frozen=True, slots=True)
class Range(nodes.Expr):
    """The numbers below ``count``; ``shape`` is an index such as ``[:, None]``, which selects the axis of a block."""

    dtype: ClassVar[str] = "int32"
    count: int
    shape: str


@dataclass(frozen=True, slots=True)
class Full(nodes.Expr):
    """A block of one number."""

    like = ("value",)
    shape: tuple[int, ...]
    value: nodes.Const


@dataclass(frozen=True, slots=True)
class Reduce(nodes.Expr):
    """``value`` reduced over the columns of a block by ``sum``, ``prod``, ``max`` or ``min``."""

    like = ("value",)
    op: str
    value: nodes.Expr


_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_ANY = {name: f"({{0}} {op} {{1}})" for name, op in _COMPARE.items()}
_ANY |= {name: f"({{0}} {op} {{1}})" for name, op in {"add": "+", "sub": "-", "mul": "*"}.items()}
_ANY |= {"neg": "(-{0})", "abs": "tl.abs({0})", "sign": "tl.where({0} > 0, 1, tl.where({0} < 0, -1, 0)).to({0}.dtype)"}
_OPERATORS = {
    "float32": _ANY
    | {name: f"tl.{name}({{0}})" for name in ("sqrt", "rsqrt", "exp", "exp2", "log", "log2", "erf", "sin", "cos")}
    | {name: f"tl.{name}({{0}})" for name in ("sigmoid", "floor", "ceil")}
    | {name: f"tl.{name}({{0}}, {{1}}, tl.PropagateNan.ALL)" for name in ("maximum", "minimum")}
    | {
        "div": "({0} / {1})",
        "reciprocal": "(1.0 / {0})",
        "tanh": "tanh({0})",
        "trunc": "tl.where({0} < 0, tl.ceil({0}), tl.floor({0}))",
        # Adding 1.5 * 2**23 rounds to a whole number, half to even; larger numbers are whole.
        "round": "tl.where(tl.abs({0}) < 4194304.0, ({0} + 12582912.0) - 12582912.0, {0})",
        "floordiv": "tl.floor({0} / {1})",
        "mod": "({0} - tl.floor({0} / {1}) * {1})",
        "isnan": "({0} != {0})",
        "isinf": "(tl.abs({0}) == float('inf'))",
    },
    "int32": _ANY
    | {name: f"tl.{name}({{0}}, {{1}})" for name in ("maximum", "minimum")}
    | {name: f"({{0}} {op} {{1}})" for name, op in {"and": "&", "or": "|", "xor": "^", "shr": ">>"}.items()}
    | {"not": "(~{0})", "floor": "{0}", "ceil": "{0}", "trunc": "{0}", "round": "{0}"}
    # Triton's division of integers rounds towards 0.
    | {"mod": "({0} % {1} + {1}) % {1}", "floordiv": "(({0} - ({0} % {1} + {1}) % {1}) // {1})"},
    "bool": {"and": "({0} & {1})", "or": "({0} | {1})", "xor": "({0} ^ {1})", "ne": "({0} ^ {1})"}
    | {"not": "({0} == 0)", "eq": "({0} == {1})", "maximum": "({0} | {1})", "minimum": "({0} & {1})"},
}
_OPERATORS["int64"] = _OPERATORS["int32"]
PRELUDE = """import triton
import triton.language as tl


@triton.jit
def tanh(x):
    t = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - t) / (1.0 + t)
    return tl.where(x < 0, -y, y)


@triton.jit
def product(x, y):
    return x * y
"""


class TritonPrinter(Printer):
    def kernel(self, pointers: Sequence[str], body: Sequence[nodes.Stmt]) -> str:
        """A module that defines ``kernel``."""
        lines = [f"@triton.jit\ndef kernel({', '.join(pointers)}):", *self.block(body, 1)]
        return "\n\n".join([PRELUDE, "\n".join(lines)]) + "\n"

    def for_Const(self, x: nodes.Const) -> str:
        if x.dtype == "int64":
            return f"tl.full((), {int(x.value)}, tl.int64)"
        if x.dtype != "float32":
            return str(x.value)
        return repr(float(x.value)) if math.isfinite(x.value) else f"float('{float(x.value)}')"

    def for_Cast(self, x: nodes.Cast) -> str:
        return f"tl.cast({self.text(x.value)}, {TYPES[x.dtype]})"

    def for_Op(self, x: nodes.Op) -> str:
        found = _OPERATORS[x.of].get(x.name)
        if found is None:
            raise Unsupported(f"operator {x.name} on {x.of}")
        return found.format(*(self.operand(a, ATOM) for a in x.args))

    def for_Select(self, x: nodes.Select) -> str:
        return self.call("tl.where", x.expressions())

    def for_Load(self, x: nodes.Load) -> str:
        place = f"{self.text(x.pointer)} + {self.operand(x.index, ATOM)}"
        mask = f", {self.text(x.guard)}, 0" if x.guard is not None else ""
        return f"tl.load({place}{mask}).to({TYPES[compute_type(x.storage)]})"

    def put_Store(self, s: nodes.Store) -> None:
        place = f"{self.text(s.pointer)} + {self.operand(s.index, ATOM)}"
        mask = f", {self.text(s.guard)}" if s.guard is not None else ""
        self.put(f"tl.store({place}, {self.text(s.values[0])}{mask})")

    def for_ProgramId(self, x: ProgramId) -> str:
        return "tl.program_id(0)"

    def for_Range(self, x: Range) -> str:
        return f"tl.arange(0, {x.count}){x.shape}"

    def for_Full(self, x: Full) -> str:
        return f"tl.full({x.shape}, {self.text(x.value)}, {TYPES[x.dtype]})"

    def for_Reduce(self, x: Reduce) -> str:
        value = self.text(x.value)
        if x.op == "prod":
            return f"tl.reduce({value}, 1, product, keep_dims=True)"
        found = f"tl.{x.op}({value}, 1, keep_dims=True)"
        if x.op == "sum" or x.dtype != "float32":
            return found
        # A maximum of Triton's leaves NaN out.
        return f"tl.where(tl.sum(tl.cast({value} != {value}, tl.int32), 1, keep_dims=True) > 0, float('nan'), {found})"

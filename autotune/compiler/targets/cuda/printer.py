"""Printer of kernels as Numba CUDA source, with intrinsics of ``operation_intrinsics`` and ``memory_intrinsics``.

Arithmetic is fp32. Division, square root and exponential are the hardware's approximations (as in Triton and with
``--use_fast_math``), whose error is a few units in the last place. ``tanh`` and ``erf`` are functions of
``operation_intrinsics``; ``sin``, ``pow`` and the like call libdevice. Strict precision takes libdevice for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.compiler.kernel import lower
from autotune.compiler.kernel.nodes import Cast, Const, Expr, Load, Op, Store, Tuple, Unpack
from autotune.compiler.kernel.printer import ATOM, Printer
from autotune.compiler.targets.cuda import device
from autotune.compiler.targets.cuda.device import HINTS
from autotune.errors import Unsupported
from autotune.ir.graph import SHORT, Value
from autotune.ir.nodes import LIBRARY

CTOR = {"float32": "float32", "int32": "int32", "int64": "int64", "bool": "boolean"}
LOG2E = "float32(1.4426950408889634)"
_FLOAT = {name: f"libdevice.{name}f({{0}})" for name in (*LIBRARY, "floor", "ceil", "trunc")} | {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "neg": "(-{0})",
    "abs": "abs({0})",
    "sign": "sel({0} > float32(0), float32(1), sel({0} < float32(0), float32(-1), float32(0)))",
    "maximum": "fmax({0}, {1})",
    "minimum": "fmin({0}, {1})",
    "sqrt": "sqrt({0})",
    "rsqrt": "rsqrt({0})",
    "reciprocal": "rcp({0})",
    "exp": "ex2({0} * " + LOG2E + ")",
    "exp2": "ex2({0})",
    "log": "math.log({0})",
    "log2": "math.log2({0})",
    "erf": "erf_({0})",
    "tanh": "tanh_({0})",
    "sigmoid": "sigmoid_({0})",
    "pow": "libdevice.powf({0}, {1})",
    "round": "rint({0})",
    "floordiv": "libdevice.floorf({0} / {1})",
    "mod": "mod_({0}, {1})",
    "isnan": "({0} != {0})",
    "isinf": "(abs({0}) == float32(inf))",
}
_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "floordiv": "//",
    "mod": "%",
    "and": "&",
    "or": "|",
    "xor": "^",
    "shr": ">>",
}
_INT = {name: f"{{T}}({{0}} {symbol} {{1}})" for name, symbol in _INFIX.items()} | {
    "neg": "{T}(-{0})",
    "abs": "{T}(abs({0}))",
    "sign": "sel({0} > {T}(0), {T}(1), sel({0} < {T}(0), {T}(-1), {T}(0)))",
    "maximum": "sel({0} > {1}, {0}, {1})",
    "minimum": "sel({0} < {1}, {0}, {1})",
    "shr": "{T}({0} >> {1})",
    "not": "{T}(~{0})",
    **dict.fromkeys(("isnan", "isinf"), "False"),
    **dict.fromkeys(("floor", "ceil", "trunc", "round"), "{0}"),
}
_BOOL = {
    "and": "sel({0}, {1}, False)",
    "or": "sel({0}, True, {1})",
    "xor": "({0} != {1})",
    "ne": "({0} != {1})",
    "eq": "({0} == {1})",
    "not": "sel({0}, False, True)",
    "maximum": "sel({0}, True, {1})",
    "minimum": "sel({0}, {1}, False)",
}
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_STRICT = {
    "exp": "libdevice.expf({0})",
    "exp2": "libdevice.exp2f({0})",
    "reciprocal": "rcp_rn({0})",
    "sqrt": "sqrt_rn({0})",
    "rsqrt": "rsqrt_rn({0})",
    "erf": "libdevice.erff({0})",
    "tanh": "libdevice.tanhf({0})",
    "sigmoid": "sigmoid_rn({0})",
}
"""Operators whose fast version has an error of more than 2 units in the last place."""


def operator_text(name: str, of: str, args: list[str], strict: bool = False) -> str:
    """Source of operator ``name`` on arguments of arithmetic type ``of``. Raises Unsupported where there is no such
    operator on that type."""
    if of == "bool" and name in _BOOL:
        return _BOOL[name].format(*args)
    if name in _COMPARE:
        return f"({args[0]} {_COMPARE[name]} {args[1]})"
    table = _FLOAT if of == "float32" else _INT
    if of == "bool" or name not in table:
        raise Unsupported(f"operator {name} on {of}")
    if strict and of == "float32" and name in _STRICT:
        return _STRICT[name].format(*args)
    return table[name].format(*args, T=CTOR[of])


def computed(v: Value, args: Sequence[Expr]) -> Expr:
    """A pointwise value from its arguments. Raises Unsupported where there is no such operator on their type."""
    if v.op not in ("where", "cast"):
        operator_text(v.op, args[0].dtype, ["x", "y"])
    return lower.pointwise(v, args)


_LOADS = {"plain": "ld", "words": "lr", "fixed": "lk", "partial": "ld"}
_GUARDED = {"plain": "lg", "words": "lw", "partial": "lg"}


class CudaPrinter(Printer):
    """Prints one kernel.

    Args:
        strict: every operator within 2 units in the last place, for a kernel compiled without fast math.
    """

    def __init__(self, strict: bool = False) -> None:
        super().__init__()
        self.strict = strict

    # ---- numbers and operators --------------------------------------------------------------------------------------

    def for_Const(self, x: Const) -> str:
        if x.dtype == "":
            return str(x.value)
        if x.dtype == "bool":
            return "True" if x.value else "False"
        if x.dtype != "float32":
            return f"{x.dtype}({int(x.value)})"
        number = float(x.value)
        return f"float32({number!r})" if math.isfinite(number) else f"float32({number})"

    def for_Cast(self, x: Cast) -> str:
        return self.call(CTOR.get(x.dtype, x.dtype), (x.value,))

    def for_Op(self, x: Op) -> str:
        return operator_text(x.name, x.of, [self.operand(a, ATOM) for a in x.args], self.strict)

    # ---- memory -----------------------------------------------------------------------------------------------------

    def for_Load(self, x: Load) -> str:
        guarded = x.guard is not None
        kind = (_GUARDED if guarded else _LOADS)[x.form]
        name = f"{kind}_{SHORT[x.storage]}_{x.lanes}_{HINTS[x.hint]}"
        return self.call(name, (x.pointer, x.index, *([x.guard] if x.guard is not None else [])))

    def for_Unpack(self, x: Unpack) -> str:
        return self.call(f"un_{SHORT[x.storage]}_{x.lanes}", (x.words,))

    def put_Store(self, s: Store) -> None:
        lanes = len(s.values)
        name = f"{'st' if s.guard is None else 'sg'}_{SHORT[s.storage]}_{lanes}_{HINTS[s.hint]}"
        value: Expr = s.values[0] if lanes == 1 else Tuple(s.values)
        guard = [] if s.guard is None else [s.guard]
        self.put(self.call(name, (s.pointer, s.index, value, *guard)))

    # ---- threads ----------------------------------------------------------------------------------------------------

    def for_ThreadIndex(self, x: device.ThreadIndex) -> str:
        return "int32(cuda.threadIdx.x)"

    def put_Shared(self, s: device.Shared) -> None:
        self.put(f"{self.text(s.name)} = cuda.shared.array({s.count}, {s.type})")

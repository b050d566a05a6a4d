"""The operators of a generated CPU kernel, as Numba intrinsics.

Arithmetic types are Numba's float32, int32, int64 and boolean. Pointers are plain 64-bit integers: a kernel gets raw
addresses, and every access names its *space* (the inputs, one output, one scratch buffer). Accesses of different
spaces are marked as not aliasing, without which LLVM would check every pair of pointers before a loop and, beyond a
few, give up vectorising it.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic as numba_intrinsic

from autotune.compiler import targets
from autotune.compiler.targets.cpu.intrinsics import math as cpu_math
from autotune.compiler.targets.cpu.intrinsics.math import F32, I32, Builder, Ir, call

_I1, _I8, _I16, _I64 = ir.IntType(1), ir.IntType(8), ir.IntType(16), ir.IntType(64)
NUMBA_TYPES: dict[str, Any] = {
    "float32": types.float32,
    "int32": types.int32,
    "int64": types.int64,
    "bool": types.boolean,
}
_REASSOCIATE = ("reassoc",)
"""Enough to vectorise a sum. With ``nsz`` LLVM also takes a common factor out, sum(x * s) = s * sum(x), which is
something else where x or s is infinite."""
Emit = Callable[..., Ir]
written = partial(targets.intrinsic_of, numba_intrinsic)


def _make(name: str, arity: int, result: str | None, emit: Callable[[Builder, Any, Sequence[Ir]], Ir]) -> Any:
    """An intrinsic of ``arity`` arguments; ``result`` is a compute type or None for the type of the last argument.

    ``emit(builder, type, args)`` gets the Numba type of the first argument.
    """

    def typed(*args: Any) -> Any:
        plain = [types.unliteral(a) for a in args]
        sig = (plain[-1] if result is None else NUMBA_TYPES[result])(*plain)
        return sig, lambda context, b, sig, values: emit(b, plain[0], values)

    return targets.make_intrinsic(numba_intrinsic, arity, typed, name)


def _is_float(t: Any) -> bool:
    return bool(t == types.float32)


# --- integers and booleans ------------------------------------------------------------------------


def _safe_divisor(b: Builder, y: Ir) -> tuple[Ir, Ir]:
    """``y`` with 0 and -1 replaced by 1, and True if it was -1.

    Those two trap the processor (division by zero, overflow of the least number by -1). A division by zero, which torch
    reports as an error, gives the quotient by 1 here; kernels cannot raise.
    """
    minus = b.icmp_signed("==", y, ir.Constant(y.type, -1))
    zero = b.icmp_signed("==", y, ir.Constant(y.type, 0))
    return b.select(b.or_(minus, zero), ir.Constant(y.type, 1), y), minus


def _floordiv(b: Builder, x: Ir, y: Ir) -> Ir:
    safe, minus = _safe_divisor(b, y)
    q = b.sdiv(x, safe)
    r = b.sub(x, b.mul(q, safe))
    zero = ir.Constant(x.type, 0)
    down = b.and_(b.icmp_signed("!=", r, zero), b.icmp_signed("<", b.xor(r, safe), zero))
    return b.select(minus, b.neg(x), b.sub(q, b.zext(down, x.type)))


def _int_mod(b: Builder, x: Ir, y: Ir) -> Ir:
    safe, minus = _safe_divisor(b, y)
    r = b.srem(x, safe)
    zero = ir.Constant(x.type, 0)
    up = b.and_(b.icmp_signed("!=", r, zero), b.icmp_signed("<", b.xor(r, safe), zero))
    return b.select(minus, zero, b.select(up, b.add(r, safe), r))


def _int_pow(b: Builder, x: Ir, y: Ir) -> Ir:
    """x ** y by libm in fp64, exact while the result fits 53 bits."""
    double = ir.DoubleType()
    return b.fptosi(call(b, "llvm.pow.f64", b.sitofp(x, double), b.sitofp(y, double)), x.type)


def _int_sign(b: Builder, x: Ir) -> Ir:
    zero = ir.Constant(x.type, 0)
    return b.sub(b.zext(b.icmp_signed(">", x, zero), x.type), b.zext(b.icmp_signed("<", x, zero), x.type))


def _instruction(name: str) -> Emit:
    return lambda b, *args: getattr(b, name)(*args)


_INT_UNARY: dict[str, Emit] = {
    "neg": lambda b, x: b.neg(x),
    "abs": lambda b, x: x if x.type == _I1 else b.select(b.icmp_signed("<", x, x.type(0)), b.neg(x), x),
    "sign": lambda b, x: x if x.type == _I1 else _int_sign(b, x),
    "not": lambda b, x: b.not_(x),
    **{name: lambda b, x: x for name in ("floor", "ceil", "round", "trunc")},
}
_INT_BINARY: dict[str, Emit] = {
    "add": lambda b, x, y: b.or_(x, y) if x.type == _I1 else b.add(x, y),
    "maximum": lambda b, x, y: b.or_(x, y) if x.type == _I1 else b.select(b.icmp_signed(">", x, y), x, y),
    "minimum": lambda b, x, y: b.and_(x, y) if x.type == _I1 else b.select(b.icmp_signed("<", x, y), x, y),
    "floordiv": _floordiv,
    "mod": _int_mod,
    "pow": _int_pow,
    **{name: _instruction(name) for name in ("sub", "mul", "xor")},
    **{name: _instruction(f"{name}_") for name in ("and", "or")},
    "shr": _instruction("ashr"),
}
_FLOAT_UNARY: dict[str, Emit] = {**cpu_math.UNARY, "neg": lambda b, x: b.fneg(x)}
_FLOAT_BINARY: dict[str, Emit] = {
    **cpu_math.BINARY,
    **{name: _instruction(f"f{name}") for name in ("add", "sub", "mul", "div")},
    "floordiv": lambda b, x, y: call(b, "llvm.floor.f32", b.fdiv(x, y)),
}
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


def _pointwise(name: str, arity: int) -> Any:
    floats, ints = (_FLOAT_UNARY, _INT_UNARY) if arity == 1 else (_FLOAT_BINARY, _INT_BINARY)
    return _make(name, arity, None, lambda b, t, args: (floats if _is_float(t) else ints)[name](b, *args))


def _compare(name: str) -> Any:
    symbol = _COMPARE[name]

    def emit(b: Builder, t: Any, args: Sequence[Ir]) -> Ir:
        if _is_float(t):
            return b.fcmp_unordered("!=", *args) if name == "ne" else b.fcmp_ordered(symbol, *args)
        return (b.icmp_unsigned if t == types.boolean else b.icmp_signed)(symbol, *args)

    return _make(name, 2, "bool", emit)


def _is_inf(b: Builder, t: Any, args: Sequence[Ir]) -> Ir:
    if not _is_float(t):
        return ir.Constant(_I1, 0)
    return b.fcmp_ordered("==", cpu_math.fabs(b, args[0]), cpu_math.const(float("inf")))


_X86 = platform.machine() in ("x86_64", "AMD64")


def _truncated(b: Builder, x: Ir, target: Ir) -> Ir:
    """A float as a signed integer, with the results of the host's own instruction, which eager mode uses.

    On x86, NaN and numbers out of range become the type's smallest number. On other processors numbers out of range
    saturate, and NaN becomes 0. LLVM's plain conversion has no defined result for either.
    """
    if not _X86:
        name = f"llvm.fptosi.sat.i{target.width}.f32"
        fn = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(target, [F32]), name)
        return b.call(fn, [x])
    bound = 2.0 ** (target.width - 1)
    held = b.fcmp_ordered("<", cpu_math.fabs(b, x), cpu_math.const(bound))
    return b.select(held, b.fptosi(x, target), target(-(2 ** (target.width - 1))))


def _convert(b: Builder, x: Ir, to: str) -> Ir:
    if to == "bool":
        if x.type == _I1:
            return x
        return b.fcmp_unordered("!=", x, cpu_math.const(0.0)) if x.type == F32 else b.icmp_signed("!=", x, x.type(0))
    if to == "float32":
        if x.type == F32:
            return x
        return b.uitofp(x, F32) if x.type == _I1 else b.sitofp(x, F32)
    target = I32 if to == "int32" else _I64
    if x.type == F32:
        return _truncated(b, x, target)
    if x.type.width == target.width:
        return x
    if x.type == _I1:
        return b.zext(x, target)
    return b.sext(x, target) if x.type.width < target.width else b.trunc(x, target)


OPS: dict[str, Any] = {name: _pointwise(name, 1) for name in {**_FLOAT_UNARY, **_INT_UNARY}}
OPS.update({name: _pointwise(name, 2) for name in {**_FLOAT_BINARY, **_INT_BINARY}})
OPS.update({name: _compare(name) for name in _COMPARE})
OPS["isnan"] = _make(
    "isnan", 1, "bool", lambda b, t, args: cpu_math.is_nan(b, *args) if _is_float(t) else ir.Constant(_I1, 0)
)
OPS["isinf"] = _make("isinf", 1, "bool", _is_inf)
OPS["where"] = _make("where", 3, None, lambda b, t, args: b.select(*args))
"""Graph operator to intrinsic; what ``autotune.ir.nodes`` names, but for ``cast``, which is :data:`CASTS`."""


def _cast(to: str) -> Any:
    return _make(f"to_{to}", 1, to, lambda b, t, args: _convert(b, args[0], to))


CASTS: dict[str, Any] = {to: _cast(to) for to in NUMBA_TYPES}
"""Compute type to the intrinsic that converts to it."""


def _accumulate(name: str) -> Any:
    """acc (+) x. Float sums and products may be reassociated, so that LLVM can keep several accumulators."""

    def emit(b: Builder, t: Any, args: Sequence[Ir]) -> Ir:
        acc, x = args
        if name == "sum":
            return b.fadd(acc, x, flags=_REASSOCIATE) if _is_float(t) else _INT_BINARY["add"](b, acc, x)
        if name == "prod":
            if _is_float(t):
                return b.fmul(acc, x, flags=_REASSOCIATE)
            return b.and_(acc, x) if acc.type == _I1 else b.mul(acc, x)
        op = {"max": "maximum", "min": "minimum"}[name]
        return (_FLOAT_BINARY if _is_float(t) else _INT_BINARY)[op](b, acc, x)

    return _make(f"add_{name}", 2, None, emit)


ACCUMULATE: dict[str, Any] = {name: _accumulate(name) for name in ("sum", "prod", "max", "min")}
"""Reduction to the intrinsic that takes one more element into its accumulator."""


def _clamp(b: Builder, t: Any, args: Sequence[Ir]) -> Ir:
    i, bound = args
    i = b.sext(i, _I64) if i.type.width < 64 else i
    zero = ir.Constant(_I64, 0)
    i = b.select(b.icmp_signed("<", i, zero), zero, i)
    top = b.sub(bound, ir.Constant(_I64, 1))
    return b.select(b.icmp_signed(">", i, top), top, i)


clamp = _make("clamp", 2, "int64", _clamp)
"""clamp(index, bound): the index as int64, brought into [0, bound), so that no gather leaves its table."""


def _inverse(b: Builder, t: Any, args: Sequence[Ir]) -> Ir:
    y = args[0]
    d = b.fdiv(cpu_math.const(1.0), y)
    too_large = b.and_(_is_inf(b, t, [d]), b.fcmp_ordered("!=", y, cpu_math.const(0.0)))
    return b.select(too_large, cpu_math.copysign(b, cpu_math.const(3.4028234663852886e38), y), d)


inverse = _make("inverse", 1, None, _inverse)
"""1 / y as a factor: finite for denormal y, so that 0 / y stays 0 when it is computed as 0 * inverse(y)."""

erf_by = _make("erf_by", 2, None, lambda b, t, args: cpu_math.erf_by(b, *args))
"""erf_by(x, exp(-x * x)); see ``intrinsics.math.erf_by``."""

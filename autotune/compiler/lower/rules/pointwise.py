"""Rules of the pointwise aten operators, with torch's type promotion made explicit by casts."""

from __future__ import annotations

import math
from typing import Any

import torch

from autotune.compiler.lower import views
from autotune.compiler.lower.lazy import (
    NARROW,
    Lazy,
    Number,
    Operand,
    Region,
    cast,
    fitting,
    held,
    kind,
    pointwise,
    scalar,
)
from autotune.compiler.lower.rules.table import alike, rule, rules
from autotune.errors import Unsupported
from autotune.ir.nodes import LIBRARY


def promote(*operands: Operand) -> torch.dtype:
    """The type torch computes an operator of these operands in (tensors with dimensions outrank scalars)."""
    dtype: torch.dtype | None = None
    sample: Any = None
    for x in operands:
        one = torch.empty((1,) * min(x.ndim, 1), dtype=x.dtype) if isinstance(x, Lazy) else x
        if sample is None:
            sample = one
            dtype = x.dtype if isinstance(x, Lazy) else torch.result_type(torch.empty((), dtype=torch.bool), x)
            continue
        dtype = torch.result_type(sample, one)
        ranked = [v for v in (sample, one) if isinstance(v, torch.Tensor) and v.ndim]
        sample = torch.empty((1,) if ranked else (), dtype=dtype)
    assert dtype is not None
    return dtype


def to_float(x: Lazy) -> Lazy:
    """Convert integers and booleans to the default float type; floats do not change."""
    return x if x.kind == "float32" else cast(x, torch.float32)


def same(*operands: Operand, dtype: torch.dtype) -> list[Operand]:
    """The tensors among the operands, cast to ``dtype``; numbers as that type's numbers."""
    out: list[Operand] = []
    for x in operands:
        if isinstance(x, Lazy):
            out.append(cast(x, dtype) if kind(x.dtype) != kind(dtype) or dtype in NARROW else x)
        else:
            out.append(x)
    region = next(x for x in operands if isinstance(x, Lazy)).region
    return [x if isinstance(x, Lazy) else scalar(region, x, dtype) for x in out]


def arithmetic(op: str, *operands: Operand) -> Lazy:
    """An operator whose result has the promoted type of its operands."""
    dtype = promote(*operands)
    if dtype in NARROW and op not in ("maximum", "minimum", "and", "or", "xor"):
        raise Unsupported(f"{op} in {dtype} (it may wrap)")
    if dtype == torch.bool:
        op = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and"}.get(op, op)
        if op not in ("and", "or", "xor"):
            raise Unsupported(f"{op} of booleans")
    return pointwise(op, *same(*operands, dtype=dtype), dtype=dtype)


def _with_alpha(op: str, self: Lazy, other: Operand, *, alpha: Number = 1) -> Lazy:
    if alpha != 1:
        other = arithmetic("mul", other, alpha) if isinstance(other, Lazy) else other * alpha
    return arithmetic(op, self, other)


@rule("div")
def _div(region: Region, self: Lazy, other: Operand, *, rounding_mode: str | None = None) -> Lazy:
    dtype = promote(self, other)
    if kind(dtype) != "float32":
        if rounding_mode == "floor":
            if isinstance(other, Lazy) or other == 0:
                raise Unsupported("division that rounds down by other than a whole number")
            return arithmetic("floordiv", self, other)
        if rounding_mode is not None:
            raise Unsupported("integer division that truncates")
        dtype = torch.float32
    if rounding_mode == "floor":
        raise Unsupported("float division that rounds down")
    out = pointwise("div", *same(self, other, dtype=dtype), dtype=dtype)
    return out if rounding_mode is None else pointwise("trunc", out)


@rule("remainder")
def _remainder(region: Region, self: Lazy, other: Operand) -> Lazy:
    if kind(promote(self, other)) != "float32" and (isinstance(other, Lazy) or other == 0):
        raise Unsupported("an integer remainder by other than a whole number")
    return arithmetic("mod", self, held(other, promote(self, other)))


@rule("fmod")
def _fmod(region: Region, self: Lazy, other: Operand) -> Lazy:
    if kind(promote(self, other)) == "float32" or isinstance(other, Lazy) or other <= 0:
        raise Unsupported("a remainder that has the dividend's sign, of other than whole numbers by a positive one")
    rest, dtype = arithmetic("mod", self, other), promote(self, other)  # in [0, other)
    signs = [pointwise(op, *same(x, 0, dtype=dtype), dtype=torch.bool) for op, x in (("lt", self), ("ne", rest))]
    below = pointwise("and", *signs, dtype=torch.bool)
    return pointwise("where", below, *same(arithmetic("sub", rest, other), rest, dtype=dtype), dtype=dtype)


@rule("bitwise_right_shift", "__rshift__")
def _shift_right(region: Region, self: Lazy, other: Operand) -> Lazy:
    width = {"int32": 32, "int64": 64}.get(self.kind, 0)
    if isinstance(other, Lazy) or self.dtype in NARROW or not 0 <= other < width:
        raise Unsupported("a shift by other than a number below the width of int32 or int64")
    return pointwise("shr", self, int(other))


def compare(op: str, a: Operand, b: Operand) -> Lazy:
    dtype = promote(a, b)
    for x in (a, b):
        if not isinstance(x, Lazy):
            fitting(x, dtype)
    if dtype == torch.bool:
        dtype = torch.int32 if op not in ("eq", "ne") else dtype
    elif dtype in NARROW:
        dtype = torch.int32
    return pointwise(op, *same(held(a, dtype), held(b, dtype), dtype=dtype), dtype=torch.bool)


@rule("logical_not", "bitwise_not")
def _not(region: Region, self: Lazy) -> Lazy:
    if region.out[0][1] in NARROW:
        raise Unsupported("a bitwise complement of narrow integers")
    return pointwise("not", cast(self, region.out[0][1]))


def _keeping(op: str, x: Lazy) -> Lazy:
    """An operator that returns integers unchanged."""
    if x.kind != "float32" and op in ("floor", "ceil", "trunc"):
        return x
    if x.dtype in NARROW or x.dtype == torch.bool:
        raise Unsupported(f"{op} of {x.dtype}")
    return pointwise(op, x)


@rule("round")
def _round(region: Region, self: Lazy, *, decimals: int = 0) -> Lazy:
    if decimals:
        raise Unsupported("rounding to decimals")
    return self if self.kind != "float32" else pointwise("round", self)


@rule("pow")
def _pow(region: Region, self: Operand, exponent: Operand) -> Lazy:
    dtype = promote(self, exponent)
    if isinstance(self, Lazy) and not isinstance(exponent, Lazy) and exponent in (1, 2, 3):
        base = cast(self, dtype)
        out = base
        for _ in range(int(exponent) - 1):
            out = arithmetic("mul", out, base)
        return out
    if kind(dtype) != "float32":
        raise Unsupported("integer powers")
    if isinstance(self, Lazy) and not isinstance(exponent, Lazy):
        base = cast(self, dtype)
        if exponent == 0:
            return views.full(region, base.shape, 1, dtype)
        # sqrt(-0.0) is -0.0 and pow(-0.0, 0.5) is 0.0; torch itself takes the square root here.
        named = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}.get(exponent)
        if named is not None:
            return pointwise(named, base)
    return pointwise("pow", *same(self, exponent, dtype=dtype), dtype=dtype)


@rule("where")
def _where(region: Region, condition: Lazy, self: Operand, other: Operand) -> Lazy:
    dtype = promote(self, other)
    tensors = [x if isinstance(x, Lazy) else scalar(region, x, dtype) for x in (self, other)]
    return pointwise("where", cast(condition, torch.bool), *[cast(x, dtype) for x in tensors], dtype=dtype)


@rule("glu")
def _glu(region: Region, self: Lazy, dim: int = -1) -> Lazy:
    a, b = views.split(self, self.shape[self.dim(dim)] // 2, dim)
    return a * pointwise("sigmoid", b)


rule("log10")(lambda region, x: pointwise("mul", pointwise("log2", to_float(x)), math.log10(2)))
rule("convert_element_type")(lambda region, a, dtype: cast(a, dtype))
rule("fma")(lambda region, x, y, z: arithmetic("add", arithmetic("mul", x, y), z))
rule("addcmul")(lambda region, x, a, b, *, value=1: _with_alpha("add", x, arithmetic("mul", a, b), alpha=value))
rule("addcdiv")(lambda region, x, a, b, *, value=1: _with_alpha("add", x, _div(region, a, b), alpha=value))
rule("relu")(lambda region, x: arithmetic("maximum", x, 0))
rules(_with_alpha, alike("add", "sub"))
rules(arithmetic, alike("mul", "maximum", "minimum") | {"clamp_min": "maximum", "clamp_max": "minimum"})
rules(arithmetic, {f"bitwise_{op}": op for op in ("and", "or", "xor")})
rules(
    lambda op, a, b: pointwise(op, *same(a, b, dtype=torch.bool), dtype=torch.bool),
    {f"logical_{op}": op for op in ("and", "or", "xor")},
)
rules(compare, alike("lt", "le", "gt", "ge", "eq", "ne"))
rules(
    lambda op, x: pointwise(op, to_float(x)),
    alike("sqrt", "rsqrt", "reciprocal", "exp", "exp2", "log", "log2", "erf", "tanh", "sigmoid", *LIBRARY),
)
rules(lambda op, x: pointwise(op, to_float(x), dtype=torch.bool), alike("isnan", "isinf"))
rules(_keeping, alike("neg", "abs", "sign", "floor", "ceil", "trunc"))

"""fp32 functions as LLVM IR that the loop vectoriser can widen.

Calls into libm stop vectorisation (Numba's wheels come without SVML), so the common functions are polynomials here,
built from multiply-adds, bit operations and selects only. Range reduction and exponent tricks follow the Cephes
library's single precision routines (S. Moshier, 1992); the two polynomials of ``erf`` were fitted by Lawson-weighted
least squares.

Errors against fp64, in units in the last place over the whole range (``tests/compile/cpu/test_cpu_math.py`` measures
them): at most 2 for exp, exp2, log, rsqrt; 3 for log2, log1p, expm1, sigmoid, erf; 4 for tanh. 0, infinities and NaN
give what torch gives.
``pow`` and the other functions in ``autotune.ir.nodes.LIBRARY`` are those of libm: right for every argument, but not
vectorised.

Results of exp and exp2 that are denormal in fp32 are 0. Every function takes an llvmlite builder and fp32 values and
returns one.

Kernels are compiled without fast-math flags; only the accumulators of sums may be reassociated, which their
vectorisation requires. In other code, ``reassoc`` would undo the range reductions. ``arcp`` makes LLVM replace
1 / sqrt(x) by an estimate that is NaN for 0 and infinity. ``contract`` lets a softmax subtract its rounded maximum from
an unrounded score, which gives exp(1e30) instead of exp(0).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from autotune.ir.nodes import LIBRARY

Builder = Any
Ir = Any

F32 = ir.FloatType()
I32 = ir.IntType(32)

_MAGIC = 12582912.0  # 1.5 * 2**23: after adding it, the low mantissa bits hold the nearest integer.
_MAGIC_BITS = struct.unpack("<i", struct.pack("<f", _MAGIC))[0]
_LN2_HIGH = 0.693359375  # few bits, so that n * _LN2_HIGH is exact
_LN2_LOW = -2.12194440e-4
_LOG2E = 1.44269504088896341
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOG = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)
# erf(x) = x + x P(x^2) for |x| <= 1, and 1 - exp(Q(|x|)) up to 4, where it rounds to 1.
_ERF_SMALL = (
    *(7.853902934584767e-05, -0.0008010207675397396, 0.005188329610973597, -0.026853812858462334),
    *(0.1128358542919159, -0.3761262595653534, 0.12837916612625122),
)
_ERF_LARGE = (
    *(0.00019718184194061905, -0.0030556085985153913, 0.022277090698480606, -0.10403736680746078),
    *(-0.63705974817276, -1.1277495622634888, -0.00017749311518855393),
)
# 1 - erf(x) = exp(-x^2) t P(t) with t = 1 / (1 + 0.39 x), x >= 0 (the form of Abramowitz and Stegun 7.1.26), to 9e-9.
_ERF_SCALE = 0.39
_ERF_TAIL = (
    *(-0.22753693235291844, 0.8866635814469294, -0.6353989968992803),
    *(0.6495583633209433, 0.09138882990674424, 0.23532515288139008),
)


def const(x: float) -> Ir:
    """The fp32 number nearest to ``x`` (LLVM requires exact literals)."""
    try:
        return ir.Constant(F32, struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return ir.Constant(F32, float("inf") if x > 0 else float("-inf"))


def call(b: Builder, name: str, *args: Ir, flags: tuple[str, ...] = ()) -> Ir:
    """Call an LLVM intrinsic (or libm function) whose arguments and result have one type."""
    fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(args[0].type, [a.type for a in args]), name)
    return b.call(fn, args, fastmath=flags)


def fma(b: Builder, x: Ir, y: Ir, z: Ir) -> Ir:
    """x * y + z, in one rounding where the processor has it (never a libm call)."""
    return call(b, "llvm.fmuladd.f32", x, y, z)


def horner(b: Builder, x: Ir, coefficients: Sequence[float]) -> Ir:
    """Polynomial in ``x``, highest power first."""
    y = const(coefficients[0])
    for c in coefficients[1:]:
        y = fma(b, y, x, const(c))
    return y


def _bits(b: Builder, x: Ir) -> Ir:
    return b.bitcast(x, I32)


def _from_bits(b: Builder, i: Ir) -> Ir:
    return b.bitcast(i, F32)


def _int(i: int) -> Ir:
    return ir.Constant(I32, i)


def is_nan(b: Builder, x: Ir) -> Ir:
    return b.fcmp_unordered("uno", x, x)


def fabs(b: Builder, x: Ir) -> Ir:
    return call(b, "llvm.fabs.f32", x)


def copysign(b: Builder, x: Ir, sign: Ir) -> Ir:
    return call(b, "llvm.copysign.f32", x, sign)


def _at_most(b: Builder, x: Ir, limit: float) -> Ir:
    """min(x, limit); NaN stays NaN, which LLVM's own minnum would not keep."""
    return b.select(b.fcmp_ordered(">", x, const(limit)), const(limit), x)


def _at_least(b: Builder, x: Ir, limit: float) -> Ir:
    return b.select(b.fcmp_ordered("<", x, const(limit)), const(limit), x)


def _round(b: Builder, x: Ir) -> tuple[Ir, Ir]:
    """Nearest integer to ``x`` (|x| < 2**22) as float and int; rubbish but no undefined behaviour for NaN."""
    z = b.fadd(x, const(_MAGIC))
    return b.fsub(z, const(_MAGIC)), b.sub(_bits(b, z), _int(_MAGIC_BITS))


def _power_of_two(b: Builder, n: Ir) -> Ir:
    """2**n for -127 < n < 128."""
    return _from_bits(b, b.shl(b.add(n, _int(127)), _int(23)))


def _exponential(b: Builder, x: Ir, y: Ir, n: Ir, low: float, high: float) -> Ir:
    """y * 2**n (1/2 < y < 2) where low <= x <= high; 0 below, infinity above, NaN for NaN.

    The exponent is added as an integer, which cannot overflow between the bounds. Results that would be denormal are 0:
    making them takes a processor a hundred cycles, and masked softmax scores are all of that sort.
    """
    y = _from_bits(b, b.add(_bits(b, y), b.shl(n, _int(23))))
    y = b.select(b.fcmp_unordered(">", x, const(high)), b.fadd(x, const(float("inf"))), y)
    return b.select(b.fcmp_ordered("<", x, const(low)), const(0.0), y)


def _reduce(b: Builder, x: Ir) -> tuple[Ir, Ir]:
    """(r, n) with x = n ln 2 + r and |r| <= ln 2 / 2."""
    nf, n = _round(b, b.fmul(x, const(_LOG2E)))
    r = fma(b, nf, const(-_LN2_HIGH), x)
    return fma(b, nf, const(-_LN2_LOW), r), n


def _expm1_core(b: Builder, r: Ir) -> Ir:
    """exp(r) - 1 for |r| <= ln 2 / 2."""
    return fma(b, b.fmul(r, r), horner(b, r, _EXP), r)


def exp(b: Builder, x: Ir) -> Ir:
    r, n = _reduce(b, x)
    return _exponential(b, x, b.fadd(_expm1_core(b, r), const(1.0)), n, -87.33654, 88.72283)


def exp2(b: Builder, x: Ir) -> Ir:
    nf, n = _round(b, x)
    r = b.fmul(b.fsub(x, nf), const(0.6931471805599453))
    return _exponential(b, x, b.fadd(_expm1_core(b, r), const(1.0)), n, -126.0, 127.99999)


def expm1(b: Builder, x: Ir) -> Ir:
    r, n = _reduce(b, _at_least(b, _at_most(b, x, 89.0), -30.0))
    half = _power_of_two(b, b.sub(n, _int(1)))  # 2**(n-1): 2**128 would not fit
    y = fma(b, _expm1_core(b, r), half, b.fsub(half, const(0.5)))
    y = b.fadd(y, y)
    tiny = b.fcmp_ordered("<", fabs(b, x), const(1e-20))  # r * r would lose the sign of zero and denormals
    return b.select(tiny, x, y)


def _split(b: Builder, x: Ir) -> tuple[Ir, Ir]:
    """(m - 1, e) with x = m 2**e and sqrt(1/2) <= m < sqrt(2), for x > 0."""
    denormal = b.fcmp_ordered("<", x, const(1.17549435e-38))
    x = b.select(denormal, b.fmul(x, const(8388608.0)), x)
    i = _bits(b, x)
    e = b.ashr(b.sub(i, _int(0x3F3504F3)), _int(23))
    m = _from_bits(b, b.sub(i, b.shl(e, _int(23))))
    ef = b.fsub(b.sitofp(e, F32), b.select(denormal, const(23.0), const(0.0)))
    return b.fsub(m, const(1.0)), ef


def _log_special(b: Builder, x: Ir, y: Ir) -> Ir:
    """log's values where the formula does not hold: x <= 0, infinity and NaN."""
    inf = const(float("inf"))
    y = b.select(b.fcmp_unordered("<", x, inf), y, x)  # infinity (NaN is taken next)
    y = b.select(b.fcmp_unordered("<=", x, const(0.0)), const(float("nan")), y)
    return b.select(b.fcmp_ordered("==", x, const(0.0)), const(float("-inf")), y)


def _log_core(b: Builder, x: Ir) -> tuple[Ir, Ir, Ir]:
    """(f, c, e): log(x) = e ln 2 + f + c, where c is small against f."""
    f, e = _split(b, x)
    z = b.fmul(f, f)
    c = fma(b, z, const(-0.5), b.fmul(b.fmul(f, z), horner(b, f, _LOG)))
    return f, c, e


def _log_finite(b: Builder, x: Ir) -> Ir:
    f, c, e = _log_core(b, x)
    y = b.fadd(fma(b, e, const(_LN2_LOW), c), f)
    return fma(b, e, const(_LN2_HIGH), y)


def log(b: Builder, x: Ir) -> Ir:
    return _log_special(b, x, _log_finite(b, x))


def log2(b: Builder, x: Ir) -> Ir:
    f, c, e = _log_core(b, x)
    # log2(e) = 1 + 0.4427: the product by 1 is exact, so only the small parts round.
    low = const(_LOG2E - 1.0)
    y = fma(b, c, low, b.fmul(f, low))
    y = b.fadd(b.fadd(b.fadd(y, c), f), e)
    return _log_special(b, x, y)


def log1p(b: Builder, x: Ir) -> Ir:
    u = b.fadd(x, const(1.0))
    # What the addition rounded away, to first order: log(1 + x) = log(u) + (x - (u - 1)) / u.
    lost = b.fdiv(b.fsub(x, b.fsub(u, const(1.0))), u)
    y = b.fadd(_log_finite(b, u), lost)
    y = b.select(b.fcmp_ordered("<", fabs(b, x), const(1e-8)), x, y)
    return _log_special(b, u, y)


def sigmoid(b: Builder, x: Ir) -> Ir:
    return b.fdiv(const(1.0), b.fadd(exp(b, b.fneg(x)), const(1.0)))


def tanh(b: Builder, x: Ir) -> Ir:
    t = expm1(b, _at_most(b, b.fmul(fabs(b, x), const(2.0)), 20.0))
    return copysign(b, b.fdiv(t, b.fadd(t, const(2.0))), x)


def erf(b: Builder, x: Ir) -> Ir:
    a = fabs(b, x)
    small = fma(b, horner(b, b.fmul(a, a), _ERF_SMALL), a, a)
    r, n = _reduce(b, horner(b, _at_most(b, a, 4.0), _ERF_LARGE))
    tail = b.fmul(b.fadd(_expm1_core(b, r), const(1.0)), _power_of_two(b, n))
    y = b.select(b.fcmp_ordered("<=", a, const(1.0)), small, b.fsub(const(1.0), tail))
    return copysign(b, y, x)


def erf_by(b: Builder, x: Ir, e: Ir) -> Ir:
    """erf(x), given ``e`` = exp(-x^2): a quarter of the work of :func:`erf`, right to 4e-7 absolute.

    For sums with 1, as the derivative of gelu has it; near 0 the relative error is large.
    """
    t = b.fdiv(const(1.0), fma(b, fabs(b, x), const(_ERF_SCALE), const(1.0)))
    tail = b.fmul(horner(b, t, _ERF_TAIL), t)
    return copysign(b, fma(b, b.fneg(tail), e, const(1.0)), x)


def sqrt(b: Builder, x: Ir) -> Ir:
    return call(b, "llvm.sqrt.f32", x)


def rsqrt(b: Builder, x: Ir) -> Ir:
    return b.fdiv(const(1.0), sqrt(b, x))


def reciprocal(b: Builder, x: Ir) -> Ir:
    return b.fdiv(const(1.0), x)


def sign(b: Builder, x: Ir) -> Ir:
    """-1, 0 or 1; 0 for NaN, as torch."""
    one, zero = const(1.0), const(0.0)
    negative = b.select(b.fcmp_ordered("<", x, zero), const(-1.0), zero)
    return b.select(b.fcmp_ordered(">", x, zero), one, negative)


def maximum(b: Builder, x: Ir, y: Ir) -> Ir:
    """The maximum; NaN if either is NaN. The sign of a zero result is undefined: it would take three instructions."""
    return call(b, "llvm.maximum.f32", x, y, flags=("nsz",))


def minimum(b: Builder, x: Ir, y: Ir) -> Ir:
    return call(b, "llvm.minimum.f32", x, y, flags=("nsz",))


def remainder(b: Builder, x: Ir, y: Ir) -> Ir:
    """Remainder with the divisor's sign."""
    r = b.frem(x, y)
    zero = const(0.0)
    differ = b.xor(b.fcmp_ordered("<", r, zero), b.fcmp_ordered("<", y, zero))
    return b.select(b.and_(b.fcmp_unordered("!=", r, zero), differ), b.fadd(r, y), r)


def _named(name: str) -> Callable[..., Ir]:
    return lambda b, *args: call(b, name, *args)


def _libm(name: str) -> Callable[..., Ir]:
    """The C library's function for floats: right for every argument, but not vectorised."""

    def emit(b: Builder, x: Ir) -> Ir:
        fn = b.module.globals.get(f"{name}f") or ir.Function(b.module, ir.FunctionType(F32, [F32]), f"{name}f")
        return b.call(fn, [x])

    return emit


UNARY: dict[str, Callable[[Builder, Ir], Ir]] = {
    **{name: _libm(name) for name in LIBRARY},
    "abs": fabs,
    "sign": sign,
    "sqrt": sqrt,
    "rsqrt": rsqrt,
    "reciprocal": reciprocal,
    "exp": exp,
    "exp2": exp2,
    "log": log,
    "log2": log2,
    "log1p": log1p,
    "expm1": expm1,
    "erf": erf,
    "tanh": tanh,
    "sigmoid": sigmoid,
    "sin": _named("llvm.sin.f32"),
    "cos": _named("llvm.cos.f32"),
    "floor": _named("llvm.floor.f32"),
    "ceil": _named("llvm.ceil.f32"),
    "round": _named("llvm.rint.f32"),
    "trunc": _named("llvm.trunc.f32"),
}
BINARY: dict[str, Callable[[Builder, Ir, Ir], Ir]] = {
    "maximum": maximum,
    "minimum": minimum,
    "pow": _named("llvm.pow.f32"),
    "mod": remainder,
}

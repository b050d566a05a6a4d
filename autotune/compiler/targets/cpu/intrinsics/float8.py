"""Floats of eight bits in LLVM IR, by whole numbers: few processors convert them, and loops of these are vectorised.

What is too large becomes the largest number (e4m3fn, as in torch 2.13 and Inductor's GPU code) or an infinity (e5m2).
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from autotune.compiler.targets.cpu.intrinsics.math import F32, I32, Builder, Ir, is_nan

_I8 = ir.IntType(8)
_NAN = 0x7F


@dataclass(frozen=True)
class _Form:
    """``mantissa``: its bits; ``bias``: of the exponent; ``beyond``: the byte of all that is too large; ``special``:
    the first that is no finite number."""

    mantissa: int
    bias: int
    beyond: int
    special: int

    @property
    def least(self) -> float:
        """The smallest number above zero: what is below the smallest normal one is so many of these."""
        return 2.0 ** (1 - self.bias - self.mantissa)


_FORMS = {"float8_e4m3fn": _Form(3, 7, 0x7E, _NAN), "float8_e5m2": _Form(2, 15, 0x7C, 0x7C)}


def widen(b: Builder, x: Ir, storage: str) -> Ir:
    """A stored byte as float32."""
    f = _FORMS[storage]
    byte = b.zext(x, I32)
    size = b.and_(byte, I32(0x7F))
    moved = b.shl(size, I32(23 - f.mantissa))
    normal = b.bitcast(b.add(moved, I32(127 - f.bias << 23)), F32)
    small = b.fmul(b.uitofp(size, F32), F32(f.least))
    value = b.bitcast(b.select(b.icmp_unsigned("<", size, I32(1 << f.mantissa)), small, normal), I32)
    # The exponent of what is not finite is all ones; e4m3fn has one such number, a NaN.
    value = b.select(b.icmp_unsigned("<", size, I32(f.special)), value, b.or_(moved, I32(0x7F800000)))
    return b.bitcast(b.or_(value, b.shl(b.and_(byte, I32(0x80)), I32(24))), F32)


def narrow(b: Builder, x: Ir, storage: str) -> Ir:
    """float32 as a byte to store, rounded to nearest even."""
    f = _FORMS[storage]
    bits = b.bitcast(x, I32)
    size = b.and_(bits, I32(0x7FFFFFFF))
    cut = 23 - f.mantissa
    even = b.and_(b.lshr(size, I32(cut)), I32(1))
    rounded = b.lshr(b.add(size, b.add(even, I32((1 << cut - 1) - 1))), I32(cut))
    normal = b.sub(rounded, I32(127 - f.bias << f.mantissa))
    # Adding a number whose last bit is the smallest one's rounds to as many of these.
    magic = F32(f.least * 2.0**23)
    small = b.sub(b.bitcast(b.fadd(b.bitcast(size, F32), magic), I32), b.bitcast(magic, I32))
    is_small = b.icmp_unsigned("<", size, I32(128 - f.bias << 23))
    code = b.select(is_small, small, normal)
    code = b.select(b.icmp_unsigned(">", code, I32(f.beyond)), I32(f.beyond), code)
    code = b.select(is_nan(b, x), I32(_NAN), code)
    return b.trunc(b.or_(code, b.and_(b.lshr(bits, I32(24)), I32(0x80))), _I8)

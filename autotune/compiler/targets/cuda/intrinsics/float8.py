"""Floats of eight bits as a CUDA kernel loads and stores them (sm_89 on).

The processor turns what is too large into the largest number. So do torch 2.13 and Inductor's code for GPUs with
e4m3fn; of e5m2 torch makes infinities, whose bytes follow those of the largest numbers.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir

F32 = ir.FloatType()
I16, I32 = ir.IntType(16), ir.IntType(32)
NAMES = ("e4m3", "e5m2")
_INFINITE = 61440.0
"""The magnitude from which on e5m2 is infinite: halfway from its largest number to the next power of two."""


def _asm(b: Any, result: Any, operands: list[Any], text: str, constraints: str) -> Any:
    return b.call(ir.InlineAsm(ir.FunctionType(result, [o.type for o in operands]), text, constraints), operands)


def decode(b: Any, words: list[Any], short: str, n: int) -> list[Any]:
    """Words as loaded -> ``n`` float32 values."""
    out: list[Any] = []
    for k in range(0, n, 2):
        word = words[k // 4]
        pair = b.lshr(word, I32(16)) if k % 4 else word
        if short == "e4m3":
            two = _asm(b, I32, [b.trunc(pair, I16)], "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h")
        else:  # the upper half of a float16
            low, high = b.shl(b.and_(pair, I32(0xFF)), I32(8)), b.shl(b.and_(pair, I32(0xFF00)), I32(16))
            two = b.or_(low, high)
        halves = [two, b.lshr(two, I32(16))][: n - k]
        out += [_asm(b, F32, [b.trunc(h, I16)], "cvt.f32.f16 $0, $1;", "=f,h") for h in halves]
    return out


def encode(b: Any, vals: list[Any], short: str) -> list[Any]:
    """float32 values -> words to store, rounded to nearest even."""
    out: list[Any] = []
    for k in range(0, len(vals), 4):
        word = I32(0)
        for q in range(k, min(k + 4, len(vals)), 2):
            low, high = vals[q], vals[q + 1] if q + 1 < len(vals) else F32(0.0)
            pair = b.zext(_asm(b, I16, [high, low], f"cvt.rn.satfinite.{short}x2.f32 $0, $1, $2;", "=h,f,f"), I32)
            for x, one in ((low, 1), (high, 1 << 8)) if short == "e5m2" else ():
                size = _asm(b, F32, [x], "abs.f32 $0, $1;", "=f,f")
                more = b.fcmp_ordered(">=", size, F32(_INFINITE))
                pair = b.add(pair, b.select(more, I32(one), I32(0)))
            word = b.or_(word, b.shl(pair, I32(8 * (q - k))))
        out.append(word)
    return out

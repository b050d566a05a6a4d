"""Inline assembly and instructions of LLVM as Numba intrinsics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.cuda.extending import intrinsic as numba_intrinsic

from autotune.compiler.targets import intrinsic

F32 = ir.FloatType()
I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
made, written = partial(intrinsic.made, numba_intrinsic), partial(intrinsic.written, numba_intrinsic)
"""As those of ``intrinsic``, without the decorator."""


def asm(builder: Any, result: Any, operands: Sequence[Any], text: str, constraints: str, effect: bool = False) -> Any:
    """Inline assembly; ``effect`` keeps it where it is."""
    fty = ir.FunctionType(result, [o.type for o in operands])
    return builder.call(ir.InlineAsm(fty, text, constraints, side_effect=effect), operands)


def barred(builder: Any, operands: Sequence[Any], text: str, constraints: str = "") -> None:
    """Inline assembly that other memory accesses are not moved across."""
    clobber = f"{constraints},~{{memory}}" if constraints else "~{memory}"
    asm(builder, ir.VoidType(), operands, text, clobber, True)


_REGISTER = {types.float32: (F32, "f"), types.int32: (I32, "r"), types.int64: (I64, "l")}


def instruction(text: str, result: Any, *operands: Any) -> Any:
    """An intrinsic that is one instruction without side effects, on arguments of these Numba types."""
    llvm, letter = _REGISTER[result]
    constraints = ",".join(["=" + letter, *(_REGISTER[t][1] for t in operands)])
    return written(result, *operands)(lambda b, *values: asm(b, llvm, values, text, constraints))


def statement(text: str) -> Any:
    """An intrinsic without arguments that other memory accesses are not moved across."""
    return written(types.void)(lambda b: barred(b, [], text))

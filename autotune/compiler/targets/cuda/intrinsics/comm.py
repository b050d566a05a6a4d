"""What kernels of collectives need beside ``intrinsics``: addresses as numbers, and sums in the order they are written.

Names that generated code uses; ``intrinsics.resolve`` finds them.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.cuda.extending import intrinsic

_I64, _F32 = ir.IntType(64), ir.FloatType()


@intrinsic
def _addr(typingctx, ptr):  # type: ignore[no-untyped-def]
    """The address that a pointer holds."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return builder.ptrtoint(args[0], _I64)

    return types.int64(ptr), codegen


@intrinsic
def _add_rn(typingctx, a, b):  # type: ignore[no-untyped-def]
    """``a + b``, rounded to nearest and with subnormals; fast math would add in an order of its own."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        fty = ir.FunctionType(_F32, [_F32, _F32])
        return builder.call(ir.InlineAsm(fty, "add.rn.f32 $0, $1, $2;", "=f,f,f", side_effect=False), list(args))

    return types.float32(types.float32, types.float32), codegen


PLAIN: dict[str, Any] = {"addr": _addr, "add_rn": _add_rn}

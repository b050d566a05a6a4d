"""What kernels of collectives need beside the rest: addresses as numbers, and sums in the order they are written."""

from __future__ import annotations

from typing import Any

from numba import types

from autotune.compiler.targets.cuda.intrinsics.base import I64, instruction, made

PLAIN: dict[str, Any] = {
    # The address that a pointer holds.
    "addr": made(1, lambda ptr: (types.int64(ptr), lambda c, b, sig, args: b.ptrtoint(args[0], I64))),
    # ``a + b``, rounded to nearest and with subnormals; fast math would add in an order of its own.
    "add_rn": instruction("add.rn.f32 $0, $1, $2;", types.float32, types.float32, types.float32),
}

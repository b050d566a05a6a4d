"""Prints kernels as Numba CUDA source. Intrinsics are named after what they do; see ``intrinsics``."""

from __future__ import annotations

import math

from autotune.compiler.kernel.nodes import Cast, Const, Expr, Load, Op, Store, Tuple, Unpack
from autotune.compiler.kernel.printer import ATOM, Printer
from autotune.compiler.targets.cuda import device
from autotune.compiler.targets.cuda.names import HINTS
from autotune.compiler.targets.cuda.printing import operators
from autotune.ir.graph import SHORT

_LOADS = {"plain": "ld", "words": "lr", "fixed": "lk", "touch": "touch", "partial": "ld"}
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
        return self.call(operators.CTOR.get(x.dtype, x.dtype), (x.value,))

    def for_Op(self, x: Op) -> str:
        return operators.text(x.name, x.of, [self.operand(a, ATOM) for a in x.args], self.strict)

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

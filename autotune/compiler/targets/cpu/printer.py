"""Prints kernels as Numba CPU source. What kernels call is defined once, as a constant of the module."""

from __future__ import annotations

import math

from autotune.compiler.kernel.nodes import Cast, Const, Expr, Intrinsic, Load, Op, Select, Store
from autotune.compiler.kernel.printer import Printer
from autotune.compiler.targets.cpu.nodes import Accumulate, Break, Choice, Fetch, Increase, Loop, Memory, Named, Stream

_NUMPY = {"float32": "np.float32", "int32": "np.int32", "int64": "np.int64", "bool": "bool"}
_OF_OPERATORS = ("clamp", "erf_by", "inverse")
"""Intrinsics of ``intrinsics.ops`` that are no operators."""


class CpuPrinter(Printer):
    """Prints one kernel, and collects its module's constants in ``definitions``."""

    def __init__(self) -> None:
        super().__init__()
        self.definitions: dict[str, str] = {}

    def define(self, name: str, definition: str) -> str:
        self.definitions[name] = definition
        return name

    def defined_call(self, name: str, definition: str, *args: Expr) -> str:
        return self.call(self.define(name, definition), args)

    # ---- numbers and operators --------------------------------------------------------------------------------------

    def for_Const(self, x: Const) -> str:
        if x.dtype == "":
            return str(x.value)
        text = repr(x.value) if math.isfinite(x.value) else f'"{x.value}"'
        return f"{_NUMPY[x.dtype]}({text})"

    def for_Named(self, x: Named) -> str:
        return self.define(x.name, self.text(x.value))

    def for_Op(self, x: Op) -> str:
        return self.defined_call(f"{x.name}_", f'OPS["{x.name}"]', *x.args)

    def for_Select(self, x: Select) -> str:
        return self.defined_call("where_", 'OPS["where"]', *x.expressions())

    def for_Cast(self, x: Cast) -> str:
        return self.defined_call(f"to_{x.dtype}", f'CASTS["{x.dtype}"]', x.value)

    def for_Accumulate(self, x: Accumulate) -> str:
        return self.defined_call(f"add_{x.op}", f'ACCUMULATE["{x.op}"]', *x.expressions())

    def for_Intrinsic(self, x: Intrinsic) -> str:
        if x.name in _OF_OPERATORS:
            self.define(x.name, f"cpu_ops.{x.name}")
        return super().for_Intrinsic(x)

    def for_Choice(self, x: Choice) -> str:
        return f"{self.text(x.then)} if {self.text(x.test)} else {self.text(x.other)}"

    def put_Increase(self, s: Increase) -> None:
        self.put(f"{s.target.name} += {self.text(s.value)}")

    def put_Loop(self, s: Loop) -> None:
        self.put("while True:")
        self.inside(s.body)

    def put_Break(self, s: Break) -> None:
        self.put("break")

    # ---- memory -----------------------------------------------------------------------------------------------------

    for_Memory = Printer.for_Var

    def for_Load(self, x: Load) -> str:
        return self._access("load", x.storage, x.pointer, x.index)

    def put_Store(self, s: Store) -> None:
        self.put(self._access("store", s.storage, s.pointer, s.index, *s.values))

    def _access(self, kind: str, storage: str, memory: Expr, *args: Expr) -> str:
        assert isinstance(memory, Memory)
        maker = {"load": "loader", "store": "storer"}[kind]
        name, space = f"{kind}_{storage}_{memory.space}", memory.space
        return self.defined_call(name, f'{maker}("{storage}", "{space}", SPACES)', memory, *args)

    def put_Fetch(self, s: Fetch) -> None:
        args = (s.memory, s.index, s.count)
        self.put(self.defined_call(f"fetch_{s.storage}", f'fetcher("{s.storage}")', *args))

    def put_Stream(self, s: Stream) -> None:
        maker = f'streamer("{s.storage}", "stream{s.number}", "out{s.number}", SPACES)'
        args = (s.output, s.index, s.source, s.count)
        self.put(self.defined_call(f"stream_{s.storage}_{s.number}", maker, *args))

"""Hand-made graphs for the CPU target's tests, and how to run them: a builder, poisoned outputs, the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autotune.compiler.program.passes import build_program
from autotune.compiler.targets.cpu.kernel import load
from autotune.compiler.targets.cpu.schedule import CpuSchedule
from autotune.ir.graph import Graph, Output, Value, compute_type
from autotune.ir.nodes import POINTWISE
from autotune.ir.oracle import interpret

TORCH = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
POISON = 77  # in every type's range
MARGIN = 64  # elements behind each output that must stay poisoned


class Build:
    """A graph, value by value; methods return the value's number."""

    def __init__(self, *extents: int) -> None:
        self.extents = extents
        self.values: list[Value] = []
        self.inputs: list[str] = []
        self.outputs: list[Output] = []

    def add(self, op: str, args: Sequence[int] = (), **fields: Any) -> int:
        self.values.append(Value(op, tuple(args), **fields))
        return len(self.values) - 1

    def slot(self, storage: str) -> int:
        self.inputs.append(storage)
        return len(self.inputs) - 1

    def strides(self, axes: Sequence[int]) -> tuple[int, ...]:
        out, step = [], 1
        for a in reversed(axes):
            out.append(step)
            step *= self.extents[a]
        return tuple(reversed(out))

    def load(
        self, storage: str, *axes: int, strides: Sequence[int] | None = None, slot: int | None = None, **f: Any
    ) -> int:
        """A load of a new slot (dense unless ``strides`` are given)."""
        slot = self.slot(storage) if slot is None else slot
        s = self.strides(axes) if strides is None else tuple(strides)
        return self.add("load", axes=axes, slot=slot, strides=s, dtype=compute_type(storage), **f)

    def const(self, number: float, dtype: str = "float32") -> int:
        return self.add("const", number=number, dtype=dtype)

    def __getattr__(self, op: str) -> Callable[..., int]:
        if op.rstrip("_") not in POINTWISE:
            raise AttributeError(op)
        return lambda *args, **f: self.point(op.rstrip("_"), *args, **f)

    def point(self, op: str, *args: int, dtype: str | None = None) -> int:
        axes = tuple(sorted({a for i in args for a in self.values[i].axes}))
        kinds = {"bool": "bool", "where": self.values[args[-1]].dtype}
        dtype = dtype or kinds.get(POINTWISE[op].result, self.values[args[0]].dtype)
        return self.add(op, args, axes=axes, dtype=dtype)

    def reduce(self, op: str, arg: int, *over: int) -> int:
        axes = tuple(a for a in self.values[arg].axes if a not in over)
        return self.add(op, (arg,), axes=axes, dtype=self.values[arg].dtype, over=over)

    def out(
        self, value: int, storage: str, axes: Sequence[int] | None = None, strides: Sequence[int] | None = None
    ) -> None:
        axes = self.values[value].axes if axes is None else tuple(axes)
        self.outputs.append(Output(value, axes, self.strides(axes) if strides is None else tuple(strides), storage))

    def graph(self) -> Graph:
        g = Graph(self.extents, tuple(self.values), tuple(self.inputs), tuple(self.outputs))
        g.check()
        return g


def layer_norm(rows: int, cols: int, storage: str = "float32") -> Graph:
    b = Build(rows, cols)
    x, w, c = b.load(storage, 0, 1), b.load(storage, 1), b.load(storage, 1)
    inv = b.const(1 / max(cols, 1))
    mean = b.mul(b.reduce("sum", x, 1), inv)
    d = b.sub(x, mean)
    r = b.rsqrt(b.add_(b.mul(b.reduce("sum", b.mul(d, d), 1), inv), b.const(1e-5)))
    b.out(b.add_(b.mul(b.mul(d, r), w), c), storage)
    b.out(mean, "float32")
    return b.graph()


def layer_norm_backward(rows: int, cols: int) -> Graph:
    """dx of a layer norm, and the gradients of weight and bias."""
    b = Build(rows, cols)
    dy, x = b.load("float32", 0, 1), b.load("float32", 0, 1)
    w, mean, rstd = b.load("float32", 1), b.load("float32", 0), b.load("float32", 0)
    n = b.mul(b.sub(x, mean), rstd)
    g = b.mul(dy, w)
    c = b.const(1 / cols)
    inner = b.add_(b.mul(b.reduce("sum", g, 1), c), b.mul(n, b.mul(b.reduce("sum", b.mul(g, n), 1), c)))
    b.out(b.mul(b.sub(g, inner), rstd), "float32")
    b.out(b.reduce("sum", b.mul(dy, n), 0), "float32")
    b.out(b.reduce("sum", dy, 0), "float32")
    return b.graph()


def softmax(rows: int, cols: int, storage: str = "float32", *, masked: bool = False) -> Graph:
    b = Build(rows, cols)
    s = b.mul(b.load(storage, 0, 1), b.const(0.7))
    if masked:
        s = b.add_(s, b.load("float32", 1))
    e = b.exp(b.sub(s, b.reduce("max", s, 1)))
    b.out(b.div(e, b.reduce("sum", e, 1)), storage)
    return b.graph()


def softmax_of_everything(rows: int, cols: int) -> Graph:
    """The maximum and the sum over both axes."""
    b = Build(rows, cols)
    x = b.load("float32", 0, 1)
    e = b.exp(b.sub(x, b.reduce("max", x, 0, 1)))
    b.out(b.div(e, b.reduce("sum", e, 0, 1)), "float32")
    return b.graph()


def logsumexp(rows: int, cols: int, storage: str = "float32") -> Graph:
    """torch's formula: the maximum counts as 0 where it is infinite."""
    b = Build(rows, cols)
    x = b.load(storage, 0, 1)
    peak = b.reduce("max", x, 1)
    shift = b.where(b.isinf(peak), b.const(0.0), peak)
    b.out(b.add_(b.log(b.reduce("sum", b.exp(b.sub(x, shift)), 1)), shift), "float32")
    return b.graph()


def cross_entropy(rows: int, cols: int, storage: str = "bfloat16") -> Graph:
    b = Build(rows, cols)
    x, t = b.load(storage, 0, 1), b.load("int64", 0)
    peak = b.reduce("max", x, 1)
    lse = b.add_(b.log(b.reduce("sum", b.exp(b.sub(x, peak)), 1)), peak)
    picked = b.add("gather", (t,), axes=(0,), slot=0, strides=(cols,), index_stride=1, bound=cols)
    b.out(b.sub(lse, picked), "float32")
    return b.graph()


def gelu_layer_norm(rows: int, cols: int, storage: str = "float32") -> Graph:
    """bias, gelu, residual and layer_norm: something expensive to keep, two reductions, column values."""
    b = Build(rows, cols)
    x, bias, res = b.load(storage, 0, 1), b.load(storage, 1), b.load(storage, 0, 1)
    h = b.add_(x, bias)
    y = b.add_(b.mul(b.mul(h, b.const(0.5)), b.add_(b.erf(b.mul(h, b.const(2**-0.5))), b.const(1.0))), res)
    inv = b.const(1 / max(cols, 1))
    d = b.sub(y, b.mul(b.reduce("sum", y, 1), inv))
    var = b.mul(b.reduce("sum", b.mul(d, d), 1), inv)
    b.out(b.mul(d, b.rsqrt(b.add_(var, b.const(1e-5)))), storage)
    return b.graph()


def random_inputs(graph: Graph, seed: int = 0) -> list[Tensor]:
    """One flat tensor for each slot. Integers that index a gather are in its bound."""
    g = torch.Generator().manual_seed(seed)
    bounds = {graph.values[v.args[0]].slot: v.bound for v in graph.values if v.op == "gather"}
    out = []
    for slot, storage in enumerate(graph.inputs):
        n = graph.input_numel(slot)
        if storage in ("float32", "float16", "bfloat16"):
            out.append(torch.randn(n, generator=g).to(TORCH[storage]))
        elif storage == "bool":
            out.append(torch.rand(n, generator=g) < 0.5)
        else:
            low, high = (0, bounds[slot]) if slot in bounds else (0 if storage == "uint8" else -100, 100)
            out.append(torch.randint(low, max(high, 1), (n,), generator=g).to(TORCH[storage]))
    return out


def run(graph: Graph, inputs: Sequence[Tensor], schedule: CpuSchedule, n0: int | None = None) -> list[Tensor]:
    """Run the compiled kernel over poisoned outputs; check that nothing behind them was written."""
    kernel = load(build_program(graph), schedule)
    buffers = [
        torch.full((graph.output_numel(k) + MARGIN,), POISON, dtype=TORCH[o.dtype]) for k, o in enumerate(graph.outputs)
    ]
    kernel([t.data_ptr() for t in (*inputs, *buffers)], graph.extents[0] if n0 is None else n0)
    for b in buffers:
        assert bool((b[-MARGIN:] == torch.tensor(POISON).to(b.dtype)).all()), "wrote behind an output"
    return [
        torch.as_strided(b, [graph.extents[a] for a in o.axes], o.strides, o.offset)
        for b, o in zip(buffers, graph.outputs, strict=True)
    ]


def check(graph: Graph, schedule: CpuSchedule, inputs: Sequence[Tensor] | None = None, tolerance: float = 2e-5) -> None:
    """Compare the kernel with the oracle; floats within ``tolerance`` plus one rounding of the storage type."""
    inputs = random_inputs(graph) if inputs is None else inputs
    got = run(graph, inputs, schedule)
    want = interpret(graph, inputs)
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        storage = graph.outputs[k].dtype
        if not TORCH[storage].is_floating_point:
            assert torch.equal(g, w.to(g.dtype)), f"output {k}"
            continue
        unit = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8}[storage]
        torch.testing.assert_close(
            g.double(), w.to(torch.float32).double(), rtol=tolerance + unit, atol=tolerance, equal_nan=True
        )

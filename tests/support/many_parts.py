"""Graphs of several unrelated parts, and packed launches run in plain Python against the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from autotune.compiler.assemble import draft, packed
from autotune.compiler.planner.groups import group_configs
from autotune.compiler.planner.plan import make_plan
from autotune.domains.fusion.task import FusionTask
from autotune.ir.canonical import canonicalize, to_workload
from autotune.ir.graph import REDUCTIONS, Graph, Output, Value
from autotune.ir.inputs import make_inputs
from autotune.ir.oracle import interpret
from autotune.ir.simplify import remap_output, remap_value, simplify
from autotune.measure.verify import compare
from autotune.task import Config
from tests.support.cpu_graphs import Build
from tests.support.simulator.errors import KernelError
from tests.support.simulator.groups import grid_of
from tests.support.simulator.machine import Machine
from tests.support.simulator.tensors import Pointer


def beside(*graphs: Graph, shared: Mapping[tuple[int, int], tuple[int, int]] | None = None) -> Graph:
    """The graphs in one, as translation would leave them. ``shared``: (graph, slot) that is another's slot."""
    extents: list[int] = []
    values: list[Value] = []
    outputs: list[Output] = []
    slots: dict[tuple[int, int], int] = {}
    inputs: list[str] = []
    for n, g in enumerate(graphs):
        where = {i: i + len(values) for i in range(len(g.values))}
        axes = {a: a + len(extents) for a in range(len(g.extents))}
        for s, dtype in enumerate(g.inputs):
            one = (shared or {}).get((n, s))
            if one is None:
                slots[n, s] = len(inputs)
                inputs.append(dtype)
            else:
                slots[n, s] = slots[one]
        for v in g.values:
            moved = remap_value(v, where, axes)
            values.append(replace(moved, slot=slots[n, v.slot]) if v.slot >= 0 else moved)
        outputs += [remap_output(o, where, axes) for o in g.outputs]
        extents += g.extents
    made = Graph(tuple(extents), tuple(values), tuple(inputs), tuple(outputs))
    made.check()
    return made


def update(*shape: int, storage: str = "float32", rate: bool = False) -> Graph:
    """A step of momentum on one tensor: two inputs, two outputs; ``rate``: the step size is an input."""
    b = Build(*shape)
    axes = range(len(shape))
    p, g = b.load(storage, *axes), b.load("float32", *axes)
    m = b.add_(b.mul(p, b.const(0.9)), b.mul(g, b.const(0.1)))
    step = b.load("float32") if rate else b.const(0.01)
    b.out(m, "float32")
    b.out(b.sub(p, b.mul(step, b.sqrt(b.mul(m, m)))), storage)
    return b.graph()


def row_sums(rows: int, cols: int) -> Graph:
    b = Build(rows, cols)
    b.out(b.reduce("sum", b.load("float32", 0, 1), 1), "float32")
    return b.graph()


def task_of(graph: Graph, device: str = "cuda:0") -> FusionTask:
    """The task of a graph as a region, for a device of three multiprocessors."""
    return FusionTask(to_workload(canonicalize(simplify(graph))[0]), device, target="sm_90", sms=3)


def run_packed(task: FusionTask, config: Config | None = None, seed: int = 0, special: bool = False) -> list[int]:
    """Run every launch of a region without scratch by the simulator, and compare its outputs with the oracle.

    Returns:
        Blocks of each launch.

    Raises:
        KernelError: an output is wrong or written twice, or what the machine finds.
    """
    graph, parts = task.graph, group_configs(task.plan, config or task.default())
    assert not task.plan.scratch
    inputs = make_inputs(graph, seed=seed, special=special)
    memory: dict[str, Sequence[Pointer]] = {
        "input": [Pointer.reading(t, graph.inputs[k]) for k, t in enumerate(inputs)],
        "output": [Pointer.poisoned(o.dtype, graph.output_numel(k), once=True) for k, o in enumerate(graph.outputs)],
    }
    grids = []
    for numbers in task.plan.launches:
        source, refs = packed(task.plan, numbers, parts, 3)
        assert len(refs) == len(set(refs)) == len(source.params) == len(source.launch["align"])
        pointers = [memory[kind][n] for kind, n in refs]
        for p, short, need in zip(pointers, source.params, source.launch["align"], strict=True):
            p.check(short, int(need))
        Machine(source, int(source.launch["grid"]), seed).run(pointers, 1)
        grids.append(int(source.launch["grid"]))
    check_outputs(graph, inputs, [p.tensor() for p in memory["output"]])
    return grids


def run_plan(
    task: FusionTask, text: str, seed: int = 0, special: bool = False, over: Sequence[tuple[int, int]] = ()
) -> list[int]:
    """Run a plan's kernels one after the other by the simulator, and compare the region's outputs with the oracle.

    Args:
        over: inputs and outputs that are one tensor.

    Returns:
        Blocks of each kernel.

    Raises:
        KernelError: as :func:`run_packed`.
    """
    graph, plan = task.graph, make_plan(task.graph, "cuda", text)
    config = task.joined(plan, [on.default(g.graph) for on, g in task.sides(plan)])
    drafts, scratch = draft(graph, plan, group_configs(plan, config), 3)
    inputs = make_inputs(graph, seed=seed, special=special)
    memory: dict[str, list[Pointer]] = {
        "input": [Pointer.reading(t, graph.inputs[k]) for k, t in enumerate(inputs)],
        "output": [Pointer.poisoned(o.dtype, graph.output_numel(k), once=True) for k, o in enumerate(graph.outputs)],
        "scratch": [Pointer.poisoned(dtype, n) for dtype, n in scratch],
    }
    for slot, k in over:
        given = memory["input"][slot]
        memory["input"][slot] = memory["output"][k] = Pointer(given.short, given.data, once=True)
    grids = []
    for d in drafts:
        extents = plan.groups[d.group].graph.extents
        pointers = [memory[kind][n] for kind, n in d.refs]
        for p, short, need in zip(pointers, d.source.params, d.source.launch["align"], strict=True):
            p.check(short, int(need))
        grids.append(grid_of(d.source, extents[0] if extents else 1, 3))
        Machine(d.source, grids[-1], seed).run(pointers, extents[0] if extents else 1)
    check_outputs(graph, inputs, [p.tensor() for p in memory["output"]])
    return grids


def check_outputs(graph: Graph, inputs: Sequence[Tensor], got: Sequence[Tensor]) -> None:
    """Compare outputs, flat, with the oracle's. Raises KernelError."""
    length = max((graph.size(v.over) for v in graph.values if v.op in REDUCTIONS), default=1)
    for k, (o, want) in enumerate(zip(graph.outputs, interpret(graph, list(inputs)), strict=True)):
        flat = got[k].as_strided([graph.extents[a] for a in o.axes], o.strides, o.offset)
        verdict = compare(flat, want, o.dtype, length)
        if not verdict.ok:
            raise KernelError(f"output {k}: {verdict.detail}")

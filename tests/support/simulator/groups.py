"""Runs the kernels of a group, one after the other, and compares what comes out with the oracle."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autotune.compiler.targets.cuda.source import CudaSource, GroupKernels
from autotune.domains.fusion.program_spec import workloads_of
from autotune.domains.fusion.task import FusionTask
from autotune.ir.graph import REDUCTIONS, Graph
from autotune.ir.inputs import make_inputs
from autotune.ir.oracle import from_float, interpret
from autotune.measure.verify import compare
from autotune.runtime.launch import prepared
from tests.support.simulator.errors import KernelError
from tests.support.simulator.machine import Machine
from tests.support.simulator.tensors import Pointer


def task_of(fn: object, *args: Tensor) -> FusionTask:
    """The task of a function of one region, for a device of three multiprocessors."""
    (work, _), *_ = workloads_of(fn, args)  # type: ignore[arg-type]
    return FusionTask(work, "cuda:0", target="sm_90", sms=3)


def grid_of(source: CudaSource, extent0: int, sms: int) -> int:
    """Blocks of a launch; a persistent grid is one block an SM."""
    return prepared.grid_of({**source.launch, "cap": sms if source.launch["blocks_per_sm"] else 0}, extent0)


def run_group(
    graph: Graph,
    made: GroupKernels,
    inputs: Sequence[Tensor],
    sms: int = 3,
    seed: int = 0,
    over: Sequence[tuple[int, int]] = (),
) -> list[Tensor]:
    """A group's kernels on the CPU, one after the other; its outputs as flat tensors.

    Args:
        over: slots and outputs that are one tensor.

    Raises:
        KernelError: see the machine.
    """
    walked = {a for a, extent in enumerate(graph.extents) if extent > 1}
    outputs = [  # the threads along an axis that an output does not vary over all write it
        Pointer.poisoned(o.dtype, graph.output_numel(k), once=True, again=not walked.issubset(o.axes))
        for k, o in enumerate(graph.outputs)
    ]
    reading = [Pointer.reading(t, graph.inputs[k]) for k, t in enumerate(inputs)]
    for slot, k in over:
        reading[slot] = outputs[k] = Pointer(reading[slot].short, reading[slot].data, once=True)
    memory = {
        "input": reading,
        "output": outputs,
        "private": [Pointer.poisoned(*one) for one in made.private],
    }
    extent0 = graph.extents[0] if graph.extents else 1
    for source, refs in zip(made.sources, made.args, strict=True):
        assert len(refs) == len(source.params) == len(source.launch["align"])
        pointers = [memory[kind][n] for kind, n in refs]
        for p, short, need in zip(pointers, source.params, source.launch["align"], strict=True):
            p.check(short, int(need))
        Machine(source, grid_of(source, extent0, sms), seed).run(pointers, extent0)
    return [p.tensor() for p in outputs]


def check_group(graph: Graph, made: GroupKernels, seed: int = 0, special: bool = False, sms: int = 3) -> None:
    """Run a group's kernels on random inputs and compare every output with the oracle.

    Raises:
        KernelError: an output is wrong, or see the machine.
    """
    check_inputs(graph, made, make_inputs(graph, seed=seed, special=special), seed, sms)


def check_inputs(
    graph: Graph,
    made: GroupKernels,
    inputs: Sequence[Tensor],
    seed: int = 0,
    sms: int = 3,
    over: Sequence[tuple[int, int]] = (),
) -> None:
    """As :func:`check_group`, on inputs of the caller's, one flat tensor a slot; ``over`` as of :func:`run_group`."""
    outputs = run_group(graph, made, inputs, sms, seed, over)
    length = max((graph.size(v.over) for v in graph.values if v.op in REDUCTIONS), default=1)
    for k, (o, want) in enumerate(zip(graph.outputs, interpret(graph, inputs), strict=True)):
        got = outputs[k].as_strided([graph.extents[a] for a in o.axes], o.strides, o.offset)
        floats = o.dtype in ("float32", "float16", "bfloat16")
        verdict = compare(got, want, o.dtype, length, off_by_one=not floats and from_float(graph, k))
        if not verdict.ok:
            raise KernelError(f"output {k}: {verdict.detail}")

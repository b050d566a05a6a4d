"""The launches of a stored schedule, checked against the actual region before anything is loaded.

The executor loads them into this process. :mod:`autotune.runtime.inductor.region_cpp` writes them into Inductor's C++.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from autotune.errors import BuildError, Unsupported
from autotune.runtime.launch.cuda import check_rule
from autotune.store.records import Schedule
from autotune.task import Kernel

if TYPE_CHECKING:
    from autotune.compiler.planner.groups import Plan
    from autotune.ir.graph import Graph


@dataclass(frozen=True)
class TensorSpec:
    """Shape, strides (elements) and type of an executor's input or output."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, t: torch.Tensor) -> TensorSpec:
        """The layout of a tensor, real or fake, with static sizes."""
        return cls(tuple(int(n) for n in t.shape), tuple(int(n) for n in t.stride()), t.dtype)

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def span(self) -> int:
        """Elements from the first to the last in memory."""
        if self.numel == 0:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))


class RegionTensors(NamedTuple):
    """The tensors of a region, and those of its graph among them.

    Attributes:
        slots: for each of the graph's input slots, the index of the region's input that it reads.
        results: for each of the graph's outputs, the index of the region's output that it writes.
        inputs: expected layouts of the region's inputs; an executor also handles other strides.
        outputs: layouts in which the region's outputs are allocated.
    """

    slots: Sequence[int]
    results: Sequence[int]
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]


@dataclass(frozen=True)
class CudaLaunch:
    """One launch of a stored kernel.

    Attributes:
        grid: number of blocks, at least one.
        extent0: extent of axis 0, which a kernel with "dynamic" in its launch data takes after its pointers.
        pointers: its arguments by index: the graph's inputs, then its outputs, then scratch.
    """

    kernel: Kernel
    grid: int
    extent0: int
    pointers: tuple[int, ...]

    @property
    def dynamic(self) -> bool:
        return bool(self.kernel.launch.get("dynamic"))


@dataclass(frozen=True)
class Prepared:
    """A schedule that fits a region.

    Attributes:
        plan: None for launches from an earlier process.
        config: the schedule's.
        scratch: type and elements of each scratch buffer.
        aligned: required alignment of each of the graph's inputs, in bytes.
        launches: on a GPU, in order.
        nothing: True if a tensor is empty, so that there is no work.
    """

    plan: Plan | None
    config: Mapping[str, Any]
    scratch: tuple[tuple[torch.dtype, int], ...]
    aligned: tuple[int, ...]
    launches: tuple[CudaLaunch, ...]
    nothing: bool


def prepare(graph: Graph, schedule: Schedule, tensors: RegionTensors, side: str) -> Prepared:
    """Check a schedule against a region; ``side`` is "cpu" or "cuda", the rest as for ``executor.load_executor``.

    Raises:
        BuildError, Unsupported, RuntimeError: the schedule does not fit the region, or is damaged.
    """
    # A warm start finds prepared launches, and imports no planner.
    from autotune.compiler.planner.plan import make_plan
    from autotune.compiler.schedules.configurations import improper

    config, artifact = schedule.config, schedule.artifact
    if config is None or artifact is None:
        raise BuildError("the schedule has no kernels: a baseline won")
    if why := improper(config, side):
        raise BuildError(f"the configuration is damaged: {why}")
    plan = make_plan(graph, side, str(config.get("plan", "")))
    if side == "cpu" and len(artifact.kernels) != len(plan.groups):
        raise BuildError(f"the artifact has {len(artifact.kernels)} kernels and the plan {len(plan.groups)} groups")
    own = artifact.scratch[len(plan.scratch) :]
    if len(artifact.scratch) < len(plan.scratch) or not all(map(_is_scratch, own)):
        raise BuildError("the artifact is of another plan")
    _check_reach(graph, tensors)
    scratch = tuple((getattr(torch, dtype), n) for dtype, n in (*plan.scratch_numel(graph), *own))
    aligned = [1] * len(graph.inputs)
    launches: list[CudaLaunch] = []
    nothing = any(n == 0 for n in graph.extents)
    if nothing and any(spec.numel for spec in tensors.outputs):
        raise Unsupported("a reduction over no elements")
    if side == "cuda" and not nothing:
        launches = _launches(graph, plan, len(scratch), artifact.kernels, aligned)
    return Prepared(plan, config, scratch, tuple(aligned), tuple(launches), nothing)


def _launches(
    graph: Graph, plan: Plan, n_scratch: int, kernels: Sequence[Kernel], aligned: list[int]
) -> list[CudaLaunch]:
    """The launches on a GPU; increases the alignment of inputs in ``aligned``."""
    start = {"input": 0, "output": len(graph.inputs), "scratch": len(graph.inputs) + len(graph.outputs)}
    limit = {"input": len(graph.inputs), "output": len(graph.outputs), "scratch": n_scratch}
    launches = []
    for kernel in kernels:
        rule = kernel.launch
        check_rule(kernel)
        pointers = []
        for (kind, k), align in zip(rule["args"], rule["align"], strict=True):
            if not (type(k) is int and kind in limit and 0 <= k < limit[kind] and _is_alignment(align)):
                raise BuildError("the artifact's launch data does not fit its workload")
            pointers.append(start[kind] + k)
            if kind == "input":
                aligned[k] = max(aligned[k], int(align))
        # The extent argument of a kernel is that of its group's axis 0.
        own = plan.groups[int(rule.get("group", 0))].graph
        extent0 = own.extents[0] if own.extents else 1
        grid = grid_of(rule, extent0)
        if grid:
            launches.append(CudaLaunch(kernel, grid, extent0, tuple(pointers)))
    return launches


def _is_alignment(align: object) -> bool:
    return type(align) is int and 0 < align <= 256 and align & (align - 1) == 0


def grid_of(rule: Mapping[str, Any], extent0: int) -> int:
    """Blocks of a CUDA launch: work units over units a block, at most ``cap`` for a persistent grid."""
    if "grid" in rule:
        return int(rule["grid"])
    units = (extent0 if rule.get("dynamic") else 1) * int(rule["inner"])
    grid = -(-units // int(rule["per_block"])) * int(rule.get("cluster", 1))
    cap = int(rule.get("cap", 0))
    return min(grid, cap) if cap > 0 else grid


_MOST_SCRATCH = 1 << 40
"""Upper limit of the elements of scratch."""


def _is_scratch(described: tuple[str, int]) -> bool:
    from autotune.ir.graph import STORAGE_BYTES

    storage, elements = described
    return storage in STORAGE_BYTES and type(elements) is int and 0 <= elements < _MOST_SCRATCH


def _check_reach(graph: Graph, tensors: RegionTensors) -> None:
    """Refuse a graph that would touch memory outside its tensors: a damaged database must not corrupt a process."""
    slots, results, inputs, outputs = tensors
    if len(slots) != len(graph.inputs) or len(results) != len(graph.outputs):
        raise BuildError("the region's tensors are not those of its graph")
    if any(n == 0 for n in graph.extents):
        return
    for slot, i in enumerate(slots):
        if graph.input_numel(slot) > inputs[i].span or str(inputs[i].dtype) != f"torch.{graph.inputs[slot]}":
            raise BuildError(f"input {i} does not hold what the graph reads")
    for k, i in enumerate(results):
        if graph.output_numel(k) > outputs[i].span or str(outputs[i].dtype) != f"torch.{graph.outputs[k].dtype}":
            raise BuildError(f"output {i} does not hold what the graph writes")
    if sorted(results) != list(range(len(outputs))):
        raise BuildError("the graph does not write every output of the region")

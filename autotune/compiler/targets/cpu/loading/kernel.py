"""The CPU target: the source of a kernel program, and the compiled kernel."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Sequence

from autotune.compiler.program.columns import Split, finish_graph, main_program
from autotune.compiler.program.program import Program, build_program, once_a_row
from autotune.compiler.targets.cpu.columns import (
    column_split,
    parts_of,
    plane_bytes,
    planes_of,
)
from autotune.compiler.targets.cpu.emit import emit_columns, emit_source
from autotune.compiler.targets.cpu.schedule import CpuSchedule
from autotune.ir.graph import Graph
from autotune.ir.ops import POINTWISE

_PARALLEL_WORK = 1 << 16  # element-operations worth waking another thread for: about 10 us of one core


def load(program: Program, schedule: CpuSchedule) -> Callable[[Sequence[int], int], None]:
    """A compiled kernel ``kernel(addresses, n0)``.

    ``addresses`` are the data pointers of the group's inputs in slot order, then of its outputs; ``n0`` is the extent
    of axis 0, which is read where ``program.dynamic >= 0``. Outputs must not overlap inputs or one another. The call
    returns when the work is done, holds no GIL meanwhile, and may be made from any number of threads at once.
    """
    from autotune.compiler.targets.cpu.loading.launcher import launcher

    return launcher(emit_source(program, schedule), schedule.threads, _serial_below(program), _rows(program))


def load_group(graph: Graph, schedule: CpuSchedule, parts: int = 0) -> Callable[[Sequence[int], int], None]:
    """As :func:`load`, for a group, whatever its form: with ``schedule.parts``, reductions over all rows leave partial
    results that a second kernel finishes.

    Args:
        parts: that the rows are cut into; 0 for as many as the schedule has for them.

    Raises:
        Unsupported: the group has no kernel.
    """
    split = column_split(graph) if schedule.parts else None
    if split is None:
        program = build_program(graph, keep=schedule.keep == "scratch", online=schedule.online)
        once_a_row(program)
        return load(program, schedule)
    return _load_columns(graph, split, schedule, parts or parts_of(split, schedule))


def _load_columns(
    graph: Graph, split: Split, schedule: CpuSchedule, parts: int
) -> Callable[[Sequence[int], int], None]:
    from autotune.compiler.targets.cpu.loading.launcher import launcher

    source, pieces = emit_columns(split, schedule, parts)
    program = main_program(split, unit_rows=True)
    main = launcher(source, schedule.threads, _serial_below(program), lambda n0: pieces)
    own, slots, results = finish_graph(split, parts)
    threads = schedule.threads if own.bytes_moved >= 1 << 20 else 1
    finish = load(build_program(own), CpuSchedule(row_block=256, threads=threads, wide=schedule.wide))
    at = plane_bytes(planes_of(split, parts))
    n_inputs, extent0 = len(graph.inputs), own.extents[0] if own.extents else 1
    outputs = [n_inputs + k for k in split.outputs]
    writes = [n_inputs + k for k in results]
    local = threading.local()

    def run(addresses: Sequence[int], n0: int) -> None:
        # The buffer belongs to the calling thread, which is here until all is done.
        buffer = getattr(local, "buffer", None)
        if buffer is None:
            buffer = local.buffer = (ctypes.c_char * (at[-1] + 64))()
        base = (ctypes.addressof(buffer) + 63) & -64
        main([*addresses[:n_inputs], *[addresses[k] for k in outputs], *[base + b for b in at[:-1]]], n0)
        reads = [base + at[n] if kind == "partial" else addresses[n] for kind, n in slots]
        finish([*reads, *[addresses[k] for k in writes]], extent0)

    return run


def _rows(program: Program) -> Callable[[int], int] | None:
    """Rows of a group with reductions as a function of ``n0``; a pointwise group can be cut anywhere."""
    if program.pointwise:
        return None
    rest = program.graph.size(a for a in program.rows if a != program.dynamic)
    return (lambda n0: n0 * rest) if program.dynamic >= 0 else (lambda n0: rest)


def _serial_below(program: Program) -> int:
    """The extent of axis 0 under which one thread does the work sooner than several."""
    graph = program.graph
    per_element = sum(POINTWISE[v.op].cost if v.op in POINTWISE else 2 for v in graph.values if v.axes) / 4 + 1
    used = {a for v in graph.values for a in v.axes} | {a for o in graph.outputs for a in o.axes}
    if program.dynamic < 0:
        return 0 if graph.size(used) * per_element >= _PARALLEL_WORK else 1 << 62
    rest = max(1, graph.size(used - {program.dynamic}))
    return math.ceil(_PARALLEL_WORK / (rest * per_element))

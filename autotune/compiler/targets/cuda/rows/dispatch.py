"""Which skeleton a program takes: row-wise or flat."""

from __future__ import annotations

from autotune.compiler.program.program import Program
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
from autotune.compiler.targets.cuda.rows.flat import emit_flat
from autotune.compiler.targets.cuda.rows.kernel import emit_rows
from autotune.compiler.targets.cuda.source import CudaSchedule, CudaSource
from autotune.errors import Unsupported


def emit(program: Program, schedule: CudaSchedule) -> CudaSource:
    """Source of ``program`` under ``schedule``.

    Raises:
        Unsupported: the schedule does not fit the program.
    """
    if not program.cols:
        raise Unsupported("a group with a single element a row")
    if any(program.graph.extents[a] == 0 for a in range(len(program.graph.extents))):
        raise Unsupported("an empty axis")
    emitter = CudaEmitter(program, schedule)
    return emit_flat(emitter) if program.pointwise else emit_rows(emitter)

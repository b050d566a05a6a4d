"""The outer skeleton's kernel of a program, under one schedule."""

from __future__ import annotations

from autotune.compiler.program.program import Program
from autotune.compiler.targets.cuda.outer.copied import CopiedOuter
from autotune.compiler.targets.cuda.outer.kernel import Outer
from autotune.compiler.targets.cuda.source import CudaSource, OuterSchedule
from autotune.errors import Unsupported


def emit_outer(program: Program, schedule: OuterSchedule) -> CudaSource:
    """The kernel of a program whose reductions run over axes other than the unit-stride one.

    Raises:
        Unsupported: the schedule does not fit the program.
    """
    if any(e == 0 for e in program.graph.extents):
        raise Unsupported("an empty axis")
    return (CopiedOuter if schedule.prefetch else Outer)(program, schedule).kernel()

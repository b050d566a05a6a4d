"""How many elements of a row a thread takes at a time."""

from __future__ import annotations

from autotune.compiler.program.program import Program
from autotune.ir.graph import STORAGE_BYTES


def narrowest(program: Program) -> int:
    """Bytes of the narrowest storage type among the full-size tensors: the unit of ``vector_bytes``."""
    g = program.graph
    sizes = [
        STORAGE_BYTES[g.inputs[v.slot]]
        for i, v in enumerate(g.values)
        if v.op == "load" and program.domain(i) == "full" and program.col_stride(v) == 1
    ]
    sizes += [STORAGE_BYTES[o.dtype] for o in g.outputs if any(a in program.cols for a in o.axes)]
    return min(sizes, default=4)


def vector_length(program: Program, vector_bytes: int) -> int:
    """Elements a thread takes at a time; 0 if ``vector_bytes`` does not fit this program."""
    size = narrowest(program)
    if vector_bytes % size:
        return 0
    n = vector_bytes // size
    if n == 1:
        return 1
    if not program.cols or n > 16:
        return 0
    # A row of elements of any length is walked in vectors, and what is left over one by one.
    return n if open_row(program) or program.graph.extents[program.cols[-1]] % n == 0 else 0


def open_row(program: Program) -> bool:
    """Whether a group is one row of independent elements, their number an argument of the kernel."""
    return program.pointwise and not program.rows and program.dynamic == 0

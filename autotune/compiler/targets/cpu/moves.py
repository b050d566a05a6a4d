"""What a CPU kernel may write by streaming stores, and what it may fetch ahead; see ``intrinsics.stream``.

Apart from the intrinsics: what is deployed asks, and loads no Numba for it.
"""

from __future__ import annotations

from autotune.compiler.program.program import Program, stride_of
from autotune.ir.graph import STORAGE_BYTES

LINE = 64
"""Bytes of a cache line, and of what is streamed at a time."""
STRETCH = 4096
"""Bytes of an output between two copies, where a walk has more: they stay in the first-level cache."""
AHEAD = 8
"""Columns from the one in hand to the one that a kernel of lanes asks for."""
_SHORTEST = 4 * LINE  # neighbours in memory below which a run has hardly a whole line


def streamed(program: Program, lanes: bool = False) -> tuple[int, ...]:
    """Outputs (indices into ``graph.outputs``) that a kernel can stream.

    Those whose neighbours along the innermost column axis, or row axis for a kernel of ``lanes``, are neighbours in
    memory, in runs of a few lines at least.
    """
    graph = program.graph
    if not program.cols:
        return ()
    inner = program.rows[-1] if lanes else program.cols[-1]
    stored = {k for p in program.passes for k in p.stores}
    return tuple(
        k
        for k, o in enumerate(graph.outputs)
        if k in stored
        and dict(zip(o.axes, o.strides, strict=True)).get(inner) == 1
        and graph.extents[inner] * STORAGE_BYTES[o.dtype] >= _SHORTEST
    )


def fetched(program: Program, lanes: bool = False) -> tuple[int, ...]:
    """Loads whose next row a kernel can ask for while it finishes a row: rows of many neighbours in memory.

    There are none where rows are walked once only: the processor's own prefetchers see no pause then. A kernel of
    ``lanes`` asks for columns instead, each a jump in memory.
    """
    graph = program.graph
    walks = [p for p in program.passes if p.walks]
    loads = [(i, graph.values[i]) for i in sorted({i for p in program.passes for i in p.compute})]
    loads = [(i, v) for i, v in loads if v.op == "load"]
    if not program.rows or not program.cols:
        return ()
    row, inner = program.rows[-1], program.cols[-1]
    if lanes:
        if graph.extents[inner] < 2 * AHEAD:
            return ()  # the end of a walk is reached before what was asked for
        return tuple(i for i, v in loads if stride_of(v, row) == 1 and any(stride_of(v, a) for a in program.cols))
    if len(walks) < 2 or walks[-1].online:
        return ()
    return tuple(
        i
        for i, v in loads
        if stride_of(v, inner) == 1
        and stride_of(v, row) > 0
        and graph.extents[inner] * STORAGE_BYTES[graph.inputs[v.slot]] >= _SHORTEST
    )


def streamed_bytes(program: Program, lanes: bool = False) -> int:
    """Bytes of what can be streamed."""
    outputs = [program.graph.outputs[k] for k in streamed(program, lanes)]
    return sum(program.graph.size(o.axes) * STORAGE_BYTES[o.dtype] for o in outputs)


def fetched_bytes(program: Program, lanes: bool = False) -> int:
    """Bytes of what can be asked for ahead."""
    loads = [program.graph.values[i] for i in fetched(program, lanes)]
    return sum(program.graph.size(v.axes) * STORAGE_BYTES[program.graph.inputs[v.slot]] for v in loads)

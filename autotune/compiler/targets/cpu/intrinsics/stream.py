"""How CPU kernels keep memory busy: streaming stores, and rows that are asked for before their turn.

An ordinary store reads the line that it writes, so that 12 bytes move for every 8 of a copy. A streaming store sends
whole lines past the caches. LLVM vectorises no scalar loop of them, since it may not assume that they are aligned;
so a pass writes its results into a buffer in the first-level cache (the second, where it sums them up too), and after
each stretch :func:`streamer` copies them out in whole lines.

A kernel of several passes reads memory in the first of them only, and the processor's prefetchers stop at the ends of
pages, which rows often are. So the passes after it ask for the next row, stretch by stretch (:func:`fetcher`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from autotune.compiler.targets.cpu.intrinsics.math import I32, Builder, Ir
from autotune.compiler.targets.cpu.intrinsics.memory import mark
from autotune.compiler.targets.cpu.intrinsics.ops import written
from autotune.compiler.targets.cpu.moves import LINE
from autotune.ir.graph import STORAGE_BYTES

_SECOND_LEVEL = 2  # as llvm.prefetch counts: 3 is the first-level cache

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_LINE = ir.VectorType(I32, LINE // 4)


@cache
def streamer(storage: str, buffer: str, out: str, spaces: tuple[str, ...]) -> Any:
    """stream(address, index, buffer, count): copy ``count`` elements from the start of a buffer to those from
    ``index`` on of an output, in whole lines that bypass the caches; what lies before the first and after the last
    line boundary goes by ordinary stores."""
    size = STORAGE_BYTES[storage]

    @written(types.void, types.int64, types.int64, types.int64, types.int64)
    def stream(b: Builder, base: Ir, index: Ir, source: Ir, count: Ir) -> None:
        to = b.add(base, b.mul(index, _I64(size)))
        length = b.mul(count, _I64(size))
        before = b.and_(b.neg(to), _I64(LINE - 1))
        head = b.select(b.icmp_signed("<", before, length), before, length)
        lines = b.udiv(b.sub(length, head), _I64(LINE))
        tail_at = b.add(head, b.mul(lines, _I64(LINE)))
        _copy(b, to, source, head)
        first_to, first_from = b.add(to, head), b.add(source, head)
        with cgutils.for_range(b, lines) as loop:
            offset = b.mul(loop.index, _I64(LINE))
            value = b.load(b.inttoptr(b.add(first_from, offset), _LINE.as_pointer()), typ=_LINE)
            value.align = size
            mark(b, value, buffer, spaces)
            access = b.store(value, b.inttoptr(b.add(first_to, offset), _LINE.as_pointer()))
            access.align = LINE
            access.set_metadata("nontemporal", b.module.add_metadata([I32(1)]))
            mark(b, access, out, spaces)
        _copy(b, b.add(to, tail_at), b.add(source, tail_at), b.sub(length, tail_at))

    return stream


def _copy(b: Builder, to: Ir, source: Ir, length: Ir) -> None:
    """Less than a line, by ordinary stores."""
    byte = _I8.as_pointer()
    with b.if_then(b.icmp_signed("!=", length, _I64(0)), likely=False):
        cgutils.raw_memcpy(b, b.inttoptr(to, byte), b.inttoptr(source, byte), length, 1)


@cache
def fetcher(storage: str) -> Any:
    """fetch(address, index, count): have ``count`` elements from ``index`` on brought into the second-level cache."""
    size = STORAGE_BYTES[storage]

    @written(types.void, types.int64, types.int64, types.int64)
    def fetch(b: Builder, base: Ir, index: Ir, count: Ir) -> None:
        at = b.add(base, b.mul(index, _I64(size)))
        lines = b.udiv(b.add(b.mul(count, _I64(size)), _I64(LINE - 1)), _I64(LINE))
        byte = _I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
        prefetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
        with cgutils.for_range(b, lines) as loop:
            line = b.inttoptr(b.add(at, b.mul(loop.index, _I64(LINE))), byte)
            b.call(prefetch, [line, I32(0), I32(_SECOND_LEVEL), I32(1)])

    return fetch


@written(types.void)
def drain(b: Builder) -> None:
    """Wait until what this thread has streamed is as visible as what it has stored."""
    if b.module.triple.startswith(("x86_64", "i686", "i386")):
        b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse.sfence"), [])
    else:
        b.fence("release")

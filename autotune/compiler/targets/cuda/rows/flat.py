"""The flat skeleton: a pointwise program, one pack a thread at a time, ``unroll`` packs in flight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autotune.compiler.targets.cuda.access import narrowest, open_row
from autotune.compiler.targets.cuda.counts import check_launch
from autotune.compiler.targets.cuda.rows import legacy
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
from autotune.compiler.targets.cuda.rows.kernel import alignments
from autotune.compiler.targets.cuda.source import GENERATOR, CudaSource
from autotune.errors import Unsupported


def emit_flat(e: CudaEmitter) -> CudaSource:
    """The flat kernel of ``e``'s program.

    Every full block runs without bounds checks, so that all its loads can be in flight at once; the last block checks
    each pack. Elements that do not fill a pack, where their number is open, go one by one to its first threads.
    """
    p, s, vec = e.program, e.schedule, e.vec
    block, unroll = s.block, s.unroll
    if block > 1024 or block < 32 or block % 32:
        raise Unsupported("a flat kernel's block is a multiple of 32 up to 1024 threads")
    (pas,) = p.passes
    text, params = legacy.function(e.pass_function(0, pas)[0], "f0")
    dynamic = p.dynamic == 0
    open_cols = open_row(p)
    col_packs = 0 if open_cols else p.n_cols // vec
    inner = e.inner_rows()
    if not open_cols:
        inner *= col_packs
    total = (f"n0 // {vec}" if open_cols else f"n0 * {inner}") if dynamic else str(inner)
    wide = open_cols or e.count.wide
    count = "int64" if wide else "int32"

    def pack(at: str) -> list[str]:
        out = [f"w = {at}"]
        if open_cols:
            out.append(f"c = w * {vec}")
        else:
            if p.rows:
                out.append(f"row = {e.count.udiv}(w, {col_packs})")
                out.append(f"c = {count}((w - row * {col_packs}) * {vec})")
            else:
                out.append(f"c = {count}(w * {vec})")
            out += legacy.lines(e.row_indices())
        for i in pas.row_values:
            out += legacy.lines(e.row_value(i))
        out += legacy.lines(e.bases())
        out.append(f"f0({', '.join(params)})")
        return out

    if pas.row_stores:
        raise Unsupported("an output without a column axis in a flat kernel")
    body = ["tid = int32(cuda.threadIdx.x)", f"total = {'' if open_cols else count}({total})"]
    step = block * unroll
    loop = [f"at = {count}(group * {step} + tid)", f"if (group + 1) * {step} <= total:"]
    for u in range(unroll):
        loop += ["    " + x for x in pack(f"{count}(at + {u * block})")]
    loop.append("else:")
    loop.append(f"    for u in range({unroll}):")
    loop.append(f"        w = {count}(at + u * {block})")
    loop.append("        if w < total:")
    loop += ["            " + x for x in pack("w")]
    if s.blocks_per_sm > 0:
        body.append(f"for group in range({count}(blk), (total + {step - 1}) // {step}, nblk):")
        body += ["    " + x for x in loop]
    else:
        body.append(f"group = {count}(blk)")
        body += loop
    functions = [text]
    if open_cols and vec > 1:
        lines, function = _rest(e)
        body += lines
        functions.append(function)
    launch: dict[str, Any] = {
        "dynamic": dynamic,
        "inner": 1 if open_cols else inner,
        "per_block": step * (vec if open_cols else 1),
        "blocks_per_sm": s.blocks_per_sm,
        "block": block,
        "shared": 0,
        "align": alignments(e),
        "multiple": 1,
        "generator": GENERATOR,
    }
    if wide:
        launch["wide"] = True
    check_launch(launch, p.graph.extents[0])
    return CudaSource(tuple(functions), tuple(body), e.params(), launch, block, s.max_registers)


def _rest(e: CudaEmitter) -> tuple[list[str], str]:
    """Lines for the elements after the last whole pack, and the device function ``f1`` for one of them."""
    single = CudaEmitter(e.program, replace(e.schedule, vector_bytes=narrowest(e.program)))
    (pas,) = single.program.passes
    text, params = legacy.function(single.pass_function(0, pas)[0], "f1")
    # Other threads' loads are inside too, should the compiler move them out of a loop over blocks and the branch in it.
    lines = [f"c = total * {e.vec} + tid", "cl = least64(c, n0 - 1)", "if blk == nblk - 1 and c < n0:"]
    for i in pas.row_values:
        lines += ["    " + x for x in legacy.lines(single.row_value(i))]
    lines += ["    " + x for x in legacy.lines(single.bases())]
    lines.append(f"    f1({', '.join('cl' if name == 'c' else name for name in params)})")
    return lines, text

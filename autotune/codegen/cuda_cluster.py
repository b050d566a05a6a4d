"""Joining the blocks of a cluster, which share one row: partials meet in every block's shared memory.

A block's threads all hold the block's own part by then. Some of them write it to each other block (distributed shared
memory), a cluster barrier follows, and every thread combines all parts in the order of the blocks, so that all come to the
same number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.codegen.expr import accumulator
from autotune.codegen.program import Pass

if TYPE_CHECKING:
    from autotune.codegen.cuda_rows import Rows


def join_cluster(rows: Rows, pas: Pass) -> list[str]:
    """Lines after which every accumulator of pass ``pas`` holds the whole row's result in all blocks.

    Each exchange has slots of its own, so that no block writes to what another still reads.
    """
    size = rows.C
    slots: list[tuple[str, str, int]] = []  # accumulator, type, first element of its slot

    def slot(name: str, t: str) -> None:
        n = rows.cluster_slots.get(t, 0)
        rows.cluster_slots[t] = n + 1
        slots.append((name, t, n * size))

    for r in pas.reduce:
        slot(f"a{r}", accumulator(rows.g.values[r].dtype))
    for o in pas.online:
        slot(f"a{o.peak}", "float32")
        slot(f"a{o.total}", "float32")
    out = [f"if tid < {size}:"]
    out += [f"    rs_{t}(q{t}, int64({at}) + int64(rank), int32(tid), {name})" for name, t, at in slots]
    out.append("cluster_sync()")
    where = {name: (t, at) for name, t, at in slots}
    for r in pas.reduce:
        v = rows.g.values[r]
        t, at = where[f"a{r}"]
        parts = [f"q{t}[{at + j}]" for j in range(size)]
        out.append(f"a{r} = {rows.e.tree(v.op, v.dtype, parts)}")
    for o in pas.online:
        m, total = f"a{o.peak}", f"a{o.total}"
        out += [f"{m} = qfloat32[{where[m][1]}]", f"{total} = qfloat32[{where[total][1]}]"]
        for j in range(1, size):
            out += [f"ym = qfloat32[{where[m][1] + j}]", f"yt = qfloat32[{where[total][1] + j}]"]
            out += rows.merge_online(o, "ym", "yt")
    return out

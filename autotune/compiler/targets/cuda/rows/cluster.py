"""Joining the blocks of a cluster, which share one row: partials meet in every block's shared memory.

A block's threads all hold the block's own part by then. Some of them write it to each other block (distributed shared
memory), a cluster barrier follows, and every thread combines all parts in the order of the blocks, so that all come to
the same number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.compiler.kernel.lower import tree
from autotune.compiler.kernel.nodes import Var
from autotune.compiler.program.program import Pass
from autotune.compiler.targets.cuda.operators import accumulator
from autotune.compiler.targets.cuda.rows import legacy

if TYPE_CHECKING:
    from autotune.compiler.targets.cuda.rows.kernel import Rows
    from autotune.compiler.targets.cuda.rows.moments import Joining


def join_cluster(rows: Rows, pas: Pass, joining: Joining) -> list[str]:
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
    for m in pas.moments:
        slot(f"a{m.total}", "float32")
        slot(f"a{m.square}", "float32")
    if pas.moments and joining.uneven:
        slot("nc", "float32")
    out = []
    if not rows.cluster_begun:  # no block writes to another before that one has begun
        rows.cluster_begun = True
        out.append("cluster_wait()")
    out.append(f"if tid < {size}:")
    out += [f"    rs_{t}(q{t}, int64({at}) + int64(rank), int32(tid), {name})" for name, t, at in slots]
    out.append("cluster_sync()")
    where = {name: (t, at) for name, t, at in slots}
    for r in pas.reduce:
        v = rows.g.values[r]
        t, at = where[f"a{r}"]
        parts = [Var(f"q{t}")[at + j] for j in range(size)]
        out.append(f"a{r} = {legacy.text(tree(v.op, v.dtype, parts))}")
    for o in pas.online:
        peak, total = f"a{o.peak}", f"a{o.total}"
        out += [f"{peak} = qfloat32[{where[peak][1]}]", f"{total} = qfloat32[{where[total][1]}]"]
        for j in range(1, size):
            out += [f"ym = qfloat32[{where[peak][1] + j}]", f"yt = qfloat32[{where[total][1] + j}]"]
            out += rows.merge_online(o, "ym", "yt")
    out += _join_moments(pas, joining, {name: at for name, _, at in slots}, size)
    return out


def _join_moments(pas: Pass, joining: Joining, at: dict[str, int], size: int) -> list[str]:
    """All blocks' moments, one after the other; the blocks before have ``nb`` elements for each one's ``na``."""
    if not pas.moments:
        return []
    n = joining.n  # of one block, where all have equally many
    count = "nc" if joining.uneven else f"float32({n!r})"
    joining.uneven, was = True, joining.uneven
    out = []
    for m in pas.moments:
        s, q = at[f"a{m.total}"], at[f"a{m.square}"]
        out += [f"a{m.total} = qfloat32[{s}]", f"a{m.square} = qfloat32[{q}]"]
        out.append(f"na = qfloat32[{at['nc']}]" if was else f"na = {count}")
        for j in range(1, size):
            out.append(f"nb = qfloat32[{at['nc'] + j}]" if was else f"nb = {count}")
            out += joining.merge(m, f"qfloat32[{s + j}]", f"qfloat32[{q + j}]", "na", "nb")
            out.append("na = na + nb")
    joining.uneven = was
    return out

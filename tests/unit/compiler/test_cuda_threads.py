"""Ownership among the threads of a block: warps, parts and shuffles of a group."""

from __future__ import annotations

import pytest

from autotune.compiler.kernel.nodes import Const
from autotune.compiler.targets.cuda.device import EXTENT, Counts, Units
from autotune.compiler.targets.cuda.threads import WARP, SharedArrays, StripThreads, ThreadGroup

ROWS = [(threads, 1, rows) for threads in (1, 2, 8, 32, 96, 256, 1024) for rows in (1, 4, 32) if threads * rows <= 1024]
STRIPS = [(down, across, 1) for across in (1, 4, 16, 32, 64) for down in (8, 32, 64, 256) if across * down <= 1024]


def reached(thread: int, distances: list[int]) -> set[int]:
    """The threads whose values a thread has after shuffles at these distances."""
    found = {thread}
    for n in distances:
        found |= {other ^ n for other in found}
    return found


@pytest.mark.parametrize(("size", "stride", "groups"), [*ROWS, *STRIPS])
def test_shuffles_combine_the_threads_of_a_group_that_a_warp_has(size: int, stride: int, groups: int) -> None:
    group = ThreadGroup(size, stride)
    span = size * stride
    for thread in range(span * groups):
        same = {t for t in range(span * groups) if t // span == thread // span and t % stride == thread % stride}
        in_warp = {t for t in same if t // WARP == thread // WARP}
        assert reached(thread, group.distances) == in_warp
        assert len(in_warp) == group.within
        assert len({t // WARP for t in same}) == group.parts
        assert group.within * group.parts == len(same) == size


def test_places_of_a_thread() -> None:
    threads = StripThreads(across=8, down=32, cluster=2, vec=4, length=200, partial=False)
    assert (threads.step, threads.packs, threads.full, threads.width) == (64, 4, 3, 32)


def test_units_along_an_open_axis() -> None:
    assert Units(12, dynamic=True).total(Counts(True)).value == EXTENT * 12
    assert Units(12).total(Counts()).value == Const(12)


def test_reductions_have_elements_of_their_own() -> None:
    arrays = SharedArrays("x")
    assert [arrays.take("float32", 3), arrays.take("int32", 2), arrays.take("float32", 4)] == [0, 0, 3]
    assert {s.name.name: s.count for s in arrays.declared(7)} == {"xfloat32": 14, "xint32": 9}  # type: ignore[attr-defined]

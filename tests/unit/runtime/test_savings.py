"""Counts of steps in a process and in its forks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from autotune.runtime.savings import Savings
from autotune.store import Saving


def test_a_fork_counts_none_of_its_parents_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_SAVINGS", "1")
    written: list[Saving] = []

    def put(rows: Mapping[str, Sequence[Saving]]) -> bool:
        written.extend(rows["cpu"])
        return True

    own = Savings(put)
    step = own.counted(lambda: None, "cpu", graph="a" * 64, mode="default", alone_us=5.0)
    for _ in range(2):
        step()
    assert own.write()
    step()
    parent = own._ended
    own._forked()
    assert own.write(), "nothing of the parent's, written or not"
    for _ in range(4):
        step()
    own.end()
    parent.set()
    assert [one.steps for one in written] == [2, 4]
    assert written[0].process != written[1].process

"""Messages of a lane on a cluster, as its driver receives them."""

from __future__ import annotations

from typing import Any

from autotune.tuner.cluster.actor import Outbox


def progress(n: int) -> dict[str, Any]:
    return {"progress": {"measured": n}}


def test_of_progress_in_a_row_the_latest_is_taken_and_nothing_else_is_left_out() -> None:
    box = Outbox()
    for frame in (progress(1), progress(2), {"result": 1}, progress(3), {"mistake": "x"}, {"mistake": "y"}):
        box.send(frame)
    assert box.take(1.0) == [progress(2), {"result": 1}, progress(3), {"mistake": "x"}, {"mistake": "y"}]
    assert box.take(0.0) == []


def test_a_result_is_not_held_back_and_progress_is_for_a_moment() -> None:
    box = Outbox()
    box.send({"result": 1})
    assert box.take(1e6) == [{"result": 1}]
    box.send(progress(1))
    assert box.take(1e6) == [progress(1)]

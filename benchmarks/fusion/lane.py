"""Cases measured by several processes side by side: the parent's end, and ``python -m benchmarks.fusion.lane``
itself.

A lane measures one case after the other, as the parent hands them out. One that dies costs the case that it had.
"""

from __future__ import annotations

import select
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from autotune.errors import first_line
from autotune.measure.child import Child, ChildDied, ChildSilent, Link, serve
from autotune.measure.pool import compile_threads
from benchmarks.fusion.cases.case import Case
from benchmarks.fusion.entry import Answer, Entries, Plan

MODULE = "benchmarks.fusion.lane"

Measured = Generator[tuple[Case, Answer], None, None]
"""Cases and what came of them, in the order in which they are done."""


def measured(plan: Plan, cases: Sequence[Case], begun: Callable[[Case], None]) -> Measured:
    """Measure cases, ``plan.jobs`` at a time: one in this process, several in lanes.

    Close the iterator when done with it: that ends the lanes, and all that they started.

    Args:
        begun: called with every case at its start.
    """
    jobs = min(plan.jobs, len(cases))
    if jobs > 1:
        yield from _side_by_side(plan, cases, jobs, begun)
        return
    with Entries(plan) as entries:
        for case in cases:
            begun(case)
            yield case, entries.of(case)


def _side_by_side(plan: Plan, cases: Sequence[Case], jobs: int, begun: Callable[[Case], None]) -> Measured:
    shared, threads = plan.to_json(), compile_threads(jobs)
    todo, idle = deque(cases), list[Child]()
    busy: dict[Child, Case] = {}
    try:
        while todo or busy:
            while todo and len(busy) < jobs:
                case = todo.popleft()
                begun(case)
                lane = idle.pop() if idle else Child(MODULE, threads, log=False)
                busy[lane] = case
                try:
                    lane.send({"plan": shared, "case": case.name})
                except (ChildDied, ChildSilent) as error:
                    yield case, _end(lane, busy, error)
            for lane in select.select(list(busy), [], [])[0] if busy else []:
                try:
                    frame = lane.poll()
                except ChildDied as death:
                    yield busy[lane], _end(lane, busy, death)
                    continue
                if frame is None:
                    continue
                answer = Answer(**frame[0])
                case = busy.pop(lane)
                if answer.spent:
                    lane.kill()
                else:
                    idle.append(lane)
                yield case, answer
    finally:
        for lane in (*busy, *idle):
            lane.terminate()
        for lane in (*busy, *idle):
            lane.kill()


def _end(lane: Child, busy: dict[Child, Case], why: Exception) -> Answer:
    lane.kill()
    busy.pop(lane)
    return Answer(None, f"the process that measured it {str(why) or 'did not answer'}")


class Lane:
    """The lane's own end: every frame has the name of a case, and the plan, which is the same in all."""

    def __init__(self) -> None:
        self._entries: Entries | None = None
        self._open = ExitStack()

    def handle(self, link: Link, message: dict[str, Any], blob: bytes) -> None:
        """Answer a frame."""
        from benchmarks.fusion.suite import CASES

        if self._entries is None:
            self._entries = self._open.enter_context(Entries(Plan.from_json(message["plan"])))
        try:
            answer = self._entries.of(CASES[message["case"]])
        except Exception as error:
            traceback.print_exc()
            answer = Answer(None, first_line(error), spent=True)
        link.send(asdict(answer))


if __name__ == "__main__":
    serve(Lane().handle)

"""What one rank tells of its work: its steps and failures to the parent, and its processor time to the other ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from autotune.domains.c3.group import Group
from autotune.measure.outcome import Outcome, blame
from autotune.measure.server import classify, explain
from autotune.measure.timing.quiet import Meter
from autotune.measure.wire import Link
from autotune.task import Status

T = TypeVar("T")
FINE: dict[str, Any] = {**Outcome(Status.OK).to_json(), "restart": False}
"""How a step went that went well."""


class Talk:
    """What a rank tells its parent in the course of a job."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def phase(self, name: str, who: str = "") -> None:
        """The step that begins, and the contender it is for."""
        self._link.send({"phase": name, "who": who})

    def agree(self, here: Mapping[str, Any]) -> dict[str, Any]:
        """Tell how a step went on this rank; returns how it went on all."""
        self._link.send({"check": here})
        frame = self._link.receive()
        if frame is None:
            raise BrokenPipeError
        verdict: dict[str, Any] = frame[0]["verdict"]
        return verdict


class Load:
    """How much processes other than the ranks keep the processors busy."""

    def __init__(self, group: Group) -> None:
        self._group, self._meter = group, Meter()
        self._wall, self._mine = time.monotonic(), _processor_time()

    def others(self) -> float:
        """Processors that others kept busy on average since this was made; a collective call."""
        wall = max(time.monotonic() - self._wall, 1e-9)
        ours = self._group.gather((_processor_time() - self._mine) / wall)
        return max(0.0, self._meter.others() - float(sum(ours)) + float(ours[self._group.rank]))


def _processor_time() -> float:
    mine = os.times()
    return mine.user + mine.system


def attempt(step: Callable[[], T], talk: Talk) -> tuple[T | None, dict[str, Any]]:
    """Do a step. Returns what came of it here, None if it failed here, and the verdict of all ranks."""
    value: T | None = None
    here = FINE
    try:
        value = step()
    except Exception as problem:
        here = failed(problem)
    return value, talk.agree(here)


def ok(verdict: Mapping[str, Any]) -> bool:
    return bool(verdict["status"] == Status.OK)


def failed(problem: BaseException) -> dict[str, Any]:
    status, restart = classify(problem)
    fault, culprit = blame(problem)
    return {**Outcome(status, reason=explain(culprit), fault=fault).to_json(), "restart": restart}

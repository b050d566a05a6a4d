"""A compiling process (``python -m autotune.measure.builder``), driven by :mod:`autotune.measure.pool`."""

from __future__ import annotations

import os
from typing import Any

from autotune import task as tasks
from autotune.domain import open_task
from autotune.measure.blame import Blame, blame
from autotune.measure.outcome import one_line
from autotune.measure.serve import Link, serve
from autotune.measure.wire import artifact_to_wire
from autotune.task import Task
from autotune.workload import Workload


class Builder:
    """Keeps the task of the last workload, since jobs of one search come in a row."""

    def __init__(self) -> None:
        self._task: Task | None = None

    def handle(self, link: Link, message: dict[str, Any], blob: bytes) -> None:
        try:
            if "workload" in message:
                workload = Workload.from_json(message["workload"])
                tasks.DOMAINS[workload.kind] = message["domain"]
                self._task = open_task(workload, message["device"])
                link.send({"ok": True})
                return
            assert self._task is not None
            head, code = artifact_to_wire(self._task.build(message["config"]))
        except Exception as error:
            fault, culprit = blame(error)
            text, name = one_line(culprit) or type(culprit).__name__, type(culprit).__name__
            reason = text if name == "BuildError" or fault is Blame.USER else f"{name}: {text}"
            link.send({"ok": False, "reason": reason, "fault": str(fault)})
            return
        link.send({"ok": True, "artifact": head}, code)


_NICE = 5
"""Compilers have every processor busy for minutes; what measures, and compiles the baselines, goes first."""

if __name__ == "__main__":
    os.nice(_NICE)
    serve(Builder().handle)

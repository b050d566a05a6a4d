"""The processes of a search in a program, started while the program is compiled."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.in_program import processes
from autotune.measure.child import Child


def test_a_worker_outlives_its_first_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux ends a child with the thread that started it: the search then began with a start of 15 s."""
    started: list[Child] = []

    def first_work(self: Any, workloads: Any) -> None:
        started.append(Child("autotune.measure.server"))

    monkeypatch.setattr(processes.Processes, "_first_work", first_work)
    monkeypatch.setattr(processes, "lacking", lambda graphs: {"cpu": [("workload", 1)]})
    graph: Any = SimpleNamespace(regions=[("cpu", None)])
    with processes.Processes("cpu") as found:
        found.begin(graph)
        found.begin(graph)
        found.ready()
        assert len(started) == 2
        time.sleep(0.3)
        assert all(child.alive for child in started)
    for child in started:
        child.kill()

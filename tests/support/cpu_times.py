"""``--cpu-times FILE``: what tests cost in CPU seconds of this process and of those it started and waited for.

Unlike wall time, which ``--durations`` prints, CPU time hardly depends on what else the machine does.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

_CPU = "CPU seconds"


def _spent() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _line(times: list[float], name: str) -> str:
    return f"{times[0]:9.2f} {times[1]:9.2f}  {name}\n"


class CpuTimes:
    """Adds each test's CPU seconds to its reports, and writes a table of the tests and of their files.

    In a run of several processes, each of them measures and the first writes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writes = "PYTEST_XDIST_WORKER" not in os.environ
        if self._writes:
            path.unlink(missing_ok=True)
        self._last = _spent()
        self._tests: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        """CPU seconds and wall seconds by node id."""

    def pytest_collection_finish(self) -> None:
        self._last = _spent()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = _spent()
        report.user_properties = [*report.user_properties, (_CPU, now - self._last)]
        self._last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        both = self._tests[report.nodeid]
        both[0] += sum(float(str(value)) for name, value in report.user_properties if name == _CPU)
        both[1] += report.duration
        if report.when == "teardown" and self._writes:
            with self.path.open("a") as raw:  # for a run that does not get to its end
                raw.write(_line(both, report.nodeid))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        files: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        layers: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for test, (cpu, wall) in self._tests.items():
            file = test.partition("::")[0]
            for total in (files[file], layers["/".join(file.split("/")[:2])]):
                total[0] += cpu
                total[1] += wall
        tables = (layers, files, self._tests)
        lines = [_line(both, name) for t in tables for name, both in sorted(t.items(), key=lambda row: -row[1][0])]
        self.path.write_text("".join(["# CPU s    wall s  of layers, files and tests\n", *lines]))
        terminalreporter.write_line(f"CPU times: {self.path}")

"""``--skipped FILE``: a list of the tests that several runs of pytest skipped, and why.

``python -m tests.support.skipped FILE`` prints the list. With ``--strict`` a reason that names neither a GPU nor
"this torch" is an error.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from pathlib import Path

import pytest

_PREFIX = "Skipped: "
_ALLOWED = ("GPU", "this torch")


class SkippedTests:
    """Adds the file, the test and the reason of each skip to a file of JSON lines, which later runs continue.

    In a run of several processes, the first one hears of all tests and writes.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._add(report)

    def _add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):  # a test that fails as expected has another form
            reason = str(report.longrepr[2]).removeprefix(_PREFIX)
            with self.path.open("a") as file:
                file.write(json.dumps([report.nodeid, reason]) + "\n")


def recorder(path: str) -> SkippedTests | None:
    """The plugin for this process; None in a worker of pytest-xdist, whose reports reach the first process."""
    return None if "PYTEST_XDIST_WORKER" in os.environ else SkippedTests(Path(path))


def listed(path: Path, *, strict: bool = False) -> tuple[str, bool]:
    """The list of skipped tests as text, and False if ``strict`` and a reason is not allowed."""
    skipped = sorted({tuple(json.loads(line)) for line in path.read_text().splitlines()})
    if not skipped:
        return "== No test was skipped.", True
    files = Counter((reason, nodeid.partition("::")[0]) for nodeid, reason in skipped)
    lines = [f"== {len(skipped)} skipped:"]
    lines += [f"{count:6d}  {file}: {reason}" for (reason, file), count in sorted(files.items())]
    allowed = all(any(words in reason for words in _ALLOWED) for _, reason in skipped)
    if strict and not allowed:
        lines.append("== An error: a skipped test needs a GPU or another torch. `make test-all` installs the rest.")
    return "\n".join(lines), allowed or not strict


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the list of skipped tests that --skipped FILE wrote.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--strict", action="store_true", help="fail if a reason names neither a GPU nor this torch")
    options = parser.parse_args()
    text, fine = listed(options.file, strict=options.strict)
    print(f"\n{text}")  # a library's last words may lack the end of their line
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())

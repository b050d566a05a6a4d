"""The progress of a search in a program."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from autotune.in_program import searcher
from autotune.in_program.searcher import ProgressLine
from autotune.tuner.result import Progress


def moment(workload: str, phase: str, saved_us: float = 0.0) -> Progress:
    return Progress(workload, phase, 8, 8, 0, 0, 10.0, 1.0, 2.0, saved_us=saved_us)


def test_progress_multiplies_savings_by_the_regions_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(searcher, "_PLAIN_S", 0.0)
    with ProgressLine([("norm", 24), ("loss", 1), ("copy", 4)], 60.0) as report:
        for state in (
            moment("norm", "search"),
            moment("norm", "done", saved_us=50.0),
            moment("loss", "final"),
            moment("loss", "done", saved_us=300.0),
            moment("norm", "search"),
        ):
            report(state)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("autotune: region 1 of 3 (candidates), 0 us of the step won, at most ")
    assert [line.split(", ")[1] for line in lines] == [
        "0 us of the step won",
        "1.2 ms of the step won",
        "1.2 ms of the step won",
        "1.5 ms of the step won",
        "1.5 ms of the step won",
    ]
    assert "region 2 of 3 (against Inductor)" in lines[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Log:
    """In the place of stderr, as programs that copy their output to a file have it."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def closed() -> io.StringIO:
    made = io.StringIO()
    made.close()
    return made


def test_a_log_of_the_programs_own_has_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Log()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(searcher, "_PLAIN_S", 0.0)
    with ProgressLine([("norm", 2)], 60.0) as report:
        report(moment("norm", "search"))
    assert shown.text.startswith("autotune: region 1 of 1 (candidates)")


@pytest.mark.parametrize("stream", [None, closed()])
def test_a_program_without_stderr_is_searched_in_silence(
    stream: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(searcher, "_PLAIN_S", 0.0)
    with ProgressLine([("norm", 2)], 60.0) as report:
        report(moment("norm", "search"))
    assert capsys.readouterr().out == ""


def test_a_terminal_has_one_line_that_goes_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: Any = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(searcher, "_REDRAWN_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    with ProgressLine([("norm", 2)], 60.0) as report:
        report(moment("norm", "search"))
        report(moment("norm", "final"))
    text = shown.getvalue()
    assert "(candidates)" in text
    assert "(against Inductor)" in text
    assert text.rstrip().endswith("\x1b[2K"), "the line is erased"

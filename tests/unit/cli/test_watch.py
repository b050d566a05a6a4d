"""The progress of a search, on a terminal and in a log."""

from __future__ import annotations

import io
from typing import Any

import pytest

from autotune.cli.commands import watch as progress
from autotune.cli.commands.watch import ProgressDisplay, describe, seconds_left, share_done
from autotune.tuner.result import Progress


def state(**changes: Any) -> Progress:
    fields: dict[str, Any] = {
        "workload": "softmax f32", "phase": "search", "measured": 10, "trials": 40, "reused": 0, "failed": 0,
        "best_us": 12.0, "elapsed_s": 20.0, "left_s": None,
    }  # fmt: skip
    return Progress(**{**fields, **changes})


def test_time_left_is_the_nearer_of_both_limits() -> None:
    assert seconds_left(state()) == 60.0
    assert seconds_left(state(left_s=5.0)) == 5.0
    assert seconds_left(state(left_s=500.0)) == 60.0
    assert seconds_left(state(measured=0)) is None


def test_share_done_never_leaves_zero_to_one() -> None:
    assert share_done(state()) == 0.25
    assert share_done(state(left_s=20.0)) == 0.5
    assert share_done(state(measured=50)) == 1.0
    assert share_done(state(measured=0, elapsed_s=0.0)) == 0.0
    assert share_done(state(phase="done")) == 1.0


def test_a_line_has_the_important_facts() -> None:
    assert describe(state(failed=2, reused=3)) == (
        "softmax f32: search, 10 of 40 measured, 3 known, 2 failed, best 12 us, at most 1:00 left"
    )
    assert describe(state(phase="final", best_us=None)).endswith("final, 10 of 40 measured, best –")


def test_plain_lines_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    out = io.StringIO()
    with ProgressDisplay(of=1, stream=out) as display:
        for measured in range(100):  # one every 0.1 s: 10 s in all
            display.show(state(measured=measured, trials=100, elapsed_s=measured / 10))
            clock[0] += 0.1
    lines = out.getvalue().splitlines()
    assert 3 <= len(lines) <= 4
    assert "0 of 100" in lines[0]
    assert "99 of 100" in lines[-1]


def test_each_workload_begins_and_ends_with_a_line() -> None:
    out = io.StringIO()
    with ProgressDisplay(of=2, stream=out) as display:
        for label in ("a", "b"):
            for measured in range(3):
                display.show(state(workload=label, measured=measured, elapsed_s=float(measured)))
            display.show(state(workload=label, measured=3, phase="done", elapsed_s=4.0))
    lines = out.getvalue().splitlines()
    assert [line.partition(":")[0] for line in lines] == ["[1/2] a", "[1/2] a", "[2/2] b", "[2/2] b"]
    assert "done" in lines[1]


def test_equal_labels_are_distinguished_by_time() -> None:
    out = io.StringIO()
    with ProgressDisplay(of=2, stream=out) as display:
        display.show(state(elapsed_s=9.0))
        display.show(state(elapsed_s=1.0))
    assert [line.partition(" ")[0] for line in out.getvalue().splitlines()] == ["[1/2]", "[2/2]"]


def test_devices_side_by_side_are_distinguished() -> None:
    out = io.StringIO()
    with ProgressDisplay(of=3, stream=out) as display:
        for name, label in (("cuda:0", "a"), ("cuda:1", "b"), ("cuda:0", "a"), ("cuda:0", "c"), ("cuda:1", "b")):
            display.show(state(workload=label, device=name, measured=10 + len(out.getvalue())))
    began = "[cuda:0 1/3] a", "[cuda:1 2/3] b", "[cuda:0 1/3] a", "[cuda:0 3/3] c"
    lines = [
        line.partition(":")[0] + ":" + line.partition(":")[2].partition(":")[0] for line in out.getvalue().splitlines()
    ]
    assert lines == [*began, "[cuda:1 2/3] b"]  # each line has the begin or the end


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    with ProgressDisplay(of=1, stream=out) as display:
        display.show(state(workload="softmax [f32]"))
        display.show(state(workload="softmax [f32]", measured=20, best_us=8.5))
    text = out.getvalue()
    assert "softmax [f32]" in text  # brackets are text, not markup
    assert "20/40" in text
    assert "8.5 us" in text
    assert "left" in text


def test_on_a_terminal_every_device_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    with ProgressDisplay(of=2, stream=out) as display:
        for measured in (1, 2):
            for name, label in (("cuda:0", "a"), ("cuda:1", "b")):
                display.show(state(workload=label, device=name, measured=measured))
    last = out.getvalue().rpartition("[cuda:0 1/2] a")[2]
    assert last.count("2/40") == 2
    assert "[cuda:1 2/2] b" in last

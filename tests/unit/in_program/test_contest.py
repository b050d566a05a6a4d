"""A contest of two codes in a program's steps, with a device whose time the test sets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autotune.in_program import contest as module
from autotune.in_program.contest import BLOCK, ROUNDS, WARM, Contest, Frame, Outcome, judge

STEPS = 2 * WARM + 2 * ROUNDS * BLOCK


class Device:
    """A timer whose clock moves by what a code takes."""

    def __init__(self) -> None:
        self.us = 0.0

    def mark(self) -> float:
        return self.us

    def between_us(self, begin: float, end: float) -> float:
        return end - begin

    def code(self, name: str, us: float, ran: list[str]) -> Any:
        def run(*args: Any) -> str:
            self.us += us
            ran.append(name)
            return name

        return run


def made(before: float, after: float) -> tuple[Contest, Frame, list[str], list[Outcome]]:
    device, ran, ended = Device(), list[str](), list[Outcome]()
    contest = Contest(device, ended.append)
    frame = Frame(device.code("before", before, ran), device.code("after", after, ran), contest)
    return contest, frame, ran, ended


@pytest.mark.parametrize(("after", "kept"), [(80.0, True), (100.0, True), (101.0, False)])
def test_the_faster_code_stays(after: float, kept: bool) -> None:
    contest, frame, ran, ended = made(100.0, after)
    for _ in range(STEPS + 1):
        frame()
    (outcome,) = ended
    assert (outcome.before_us, outcome.after_us, outcome.kept) == (100.0, after, kept)
    assert outcome.ratio == pytest.approx(100.0 / after)
    assert not contest.running
    assert frame() == ("after" if kept else "before")
    assert ran[:STEPS].count("before") == ran[:STEPS].count("after") == STEPS // 2


def test_the_first_step_after_the_other_code_is_not_timed() -> None:
    device, ran, ended = Device(), list[str](), list[Outcome]()
    contest = Contest(device, ended.append)

    def cold(name: str, us: float) -> Any:
        code = device.code(name, us, ran)

        def run(*args: Any) -> Any:
            device.us += 1000.0 * (not ran or ran[-1] != name)
            return code(*args)

        return run

    frame = Frame(cold("before", 100.0), cold("after", 80.0), contest)
    for _ in range(STEPS + 1):
        frame()
    assert ended == [Outcome(100.0, 80.0, 1.25, 0.0, True)]


def test_nothing_is_decided_before_the_last_block() -> None:
    contest, frame, _, ended = made(100.0, 50.0)
    for _ in range(STEPS):
        frame()
    assert contest.running
    assert ended == []


def test_frames_change_together_at_the_ends_of_steps() -> None:
    device, ran = Device(), list[str]()
    contest = Contest(device, lambda outcome: None)
    frames = [Frame(device.code("before", 1.0, ran), device.code("after", 1.0, ran), contest) for _ in range(3)]
    for _ in range(STEPS):
        step = [frame() for frame in frames]
        assert len(set(step)) == 1


def test_a_step_of_several_calls_ends_with_its_optimizer() -> None:
    _, frame, ran, ended = made(100.0, 80.0)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 0.1)
    lengths = []
    for _ in range(STEPS + 1):
        begin = len(ran)
        for _ in range(4):
            frame()
        lengths.append(ran[begin:])
        weight.grad = torch.ones(1)
        optimizer.step()
        if ended:
            break
    assert all(len(set(step)) == 1 for step in lengths[1:-1]), "no code changes within a step"
    assert ended[0].before_us == 400.0


def test_a_captured_call_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, frame, ran, ended = made(100.0, 200.0)
    monkeypatch.setattr(module, "_capturing", lambda: True)
    for _ in range(2 * STEPS):
        frame()
    assert set(ran) == {"after"}
    assert ended == []


def test_the_other_code_is_released() -> None:
    _, frame, _, _ = made(100.0, 80.0)
    for _ in range(STEPS + 1):
        frame()
    assert frame.before is frame.after


def test_one_slow_block_decides_nothing() -> None:
    quiet, slow = [100.0] * 5, [300.0] * 5
    assert judge([quiet, quiet, quiet, quiet], [[90.0] * 5, slow, [90.0] * 5, [90.0] * 5]).kept

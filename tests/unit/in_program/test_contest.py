"""A contest of two codes in a program's steps, with a device whose time the test sets. Times are in us."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autotune.in_program import contest as module
from autotune.in_program.contest import BLOCK, LEAST_US, ROUNDS, WARM, Contest, Frame, Outcome, judge

STEPS = 2 * WARM + 2 * ROUNDS * BLOCK


class Device:
    """A timer whose clock advances by the time of a code."""

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


@pytest.mark.parametrize(("after", "kept"), [(80e3, True), (100e3, True), (101e3, False)])
def test_the_faster_code_stays(after: float, kept: bool) -> None:
    contest, frame, ran, ended = made(100e3, after)
    for _ in range(STEPS + 1):
        frame()
    (outcome,) = ended
    assert (outcome.before_us, outcome.after_us, outcome.kept) == (100e3, after, kept)
    assert outcome.ratio == pytest.approx(100e3 / after)
    assert not contest.running
    assert frame() == ("after" if kept else "before")
    assert ran[:STEPS].count("before") == ran[:STEPS].count("after") == STEPS // 2


def noisy(before: float, after: float, noise: Callable[[int], float]) -> Outcome:
    """The outcome of a contest in whose step ``k`` something else takes ``noise(k)``."""
    device, ended = Device(), list[Outcome]()
    frame = Frame(device.code("before", before, []), device.code("after", after, []), Contest(device, ended.append))
    for k in range(STEPS + 1):
        frame()
        device.us += noise(k)
    return ended[0]


def test_another_program_on_the_device_does_not_decide() -> None:
    for seed in range(20):
        chance = random.Random(seed)
        bursts = [chance.choice((0.0, 0.0, 9e3)) for _ in range(STEPS // 8 + 1)]
        outcome = noisy(26e3, 24.8e3, lambda k, bursts=bursts: bursts[k // 8])  # type: ignore[misc]
        assert outcome.kept, seed


def test_equal_codes_are_seldom_given_up() -> None:
    kept = 0
    for seed in range(200):
        chance = random.Random(seed)
        kept += noisy(26e3, 26e3, lambda k, chance=chance: chance.expovariate(1e-3)).kept  # type: ignore[misc]
    assert kept > 180


def test_a_slow_drift_of_the_clock_does_not_decide() -> None:
    assert noisy(26e3, 25.9e3, lambda k: 20.0 * k).kept
    assert not noisy(26e3, 26.2e3, lambda k: -20.0 * k).kept


def test_short_steps_are_timed_together() -> None:
    _, frame, ran, ended = made(2e3, 2.1e3)
    for _ in range(STEPS + 1):
        frame()
    assert ended == []
    together = round(LEAST_US / 2.1e3 + 0.5)
    while not ended:
        frame()
    assert len(ran) - 1 == 2 * (WARM + BLOCK * ROUNDS * together)
    assert (ended[0].before_us, ended[0].after_us) == (pytest.approx(2e3), pytest.approx(2.1e3))


def test_without_gradients_only_calls_are_timed() -> None:
    device, ran, ended = Device(), list[str](), list[Outcome]()
    contest = Contest(device, ended.append)
    first, second = (
        Frame(device.code("before", us, ran), device.code("after", us / 2, ran), contest) for us in (20e3, 80e3)
    )
    chance = random.Random(0)
    with torch.no_grad():
        for _ in range(STEPS + 1):
            first()
            device.us += chance.uniform(0.0, 500e3)  # sampling, another model
            second()
            device.us += chance.uniform(0.0, 500e3)
    (outcome,) = ended
    assert (outcome.before_us, outcome.after_us) == (pytest.approx(100e3), pytest.approx(50e3))
    assert outcome.kept
    assert ran[: 2 * STEPS].count("before") == ran[: 2 * STEPS].count("after")


def test_the_first_step_of_a_block_is_not_timed() -> None:
    """Of four steps the first and the last take longer: the median of all of them would be 1.5 ms more."""
    assert BLOCK == 4
    outcome = noisy(20e3, 16e3, lambda k: (9e3, 0.0, 0.0, 3e3)[(k - 2 * WARM) % BLOCK])
    assert (outcome.before_us, outcome.after_us) == (pytest.approx(20e3), pytest.approx(16e3))


def test_nothing_is_decided_before_the_last_block() -> None:
    contest, frame, _, ended = made(100e3, 50e3)
    for _ in range(STEPS):
        frame()
    assert contest.running
    assert ended == []


def test_frames_change_together_at_the_ends_of_steps() -> None:
    device, ran = Device(), list[str]()
    contest = Contest(device, lambda outcome: None)
    frames = [Frame(device.code("before", 50e3, ran), device.code("after", 50e3, ran), contest) for _ in range(3)]
    for _ in range(STEPS):
        step = [frame() for frame in frames]
        assert len(set(step)) == 1


def test_a_step_of_several_calls_ends_with_its_optimizer() -> None:
    _, frame, ran, ended = made(100e3, 80e3)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 0.1)
    lengths = []
    for _ in range(STEPS + 2):  # the calls of the first step are no whole steps
        begin = len(ran)
        for _ in range(4):
            frame()
        lengths.append(ran[begin:])
        weight.grad = torch.ones(1)
        optimizer.step()
        if ended:
            break
    assert all(len(set(step)) == 1 for step in lengths[1:-1]), "no code changes within a step"
    assert ended[0].before_us == 400e3


def two(before: float, after: float) -> tuple[Contest, list[Frame], list[str], list[Outcome]]:
    contest, first, ran, ended = made(before, after)
    device: Any = contest.timer
    second = Frame(device.code("before", before, ran), device.code("after", after, ran), contest)
    return contest, [first, second], ran, ended


def test_a_first_batch_of_other_sizes_does_not_hold_up_a_training() -> None:
    """Dynamo compiles another graph for the second batch, and never calls the first one again."""
    _, (first, second), _, ended = two(100e3, 80e3)
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], 0.1)
    for k in range(STEPS + 2):
        (second if k else first)()
        optimizer.step()
    assert [outcome.before_us for outcome in ended] == [100e3]


def test_a_validation_before_the_training_does_not_lead_it() -> None:
    """Lightning calls the validation twice at first, and then once an epoch."""
    _, (validation, training), ran, ended = two(100e3, 80e3)
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], 0.1)

    def validate() -> None:
        with torch.no_grad():
            validation()
            validation()

    validate()
    del ran[:]
    for k in range(STEPS + 2):
        training()
        optimizer.step()
        if k % 20 == 19:
            validate()
    assert [(outcome.before_us, outcome.after_us) for outcome in ended] == [(100e3, 80e3)]


def test_a_first_request_of_other_sizes_does_not_hold_up_a_server() -> None:
    _, (first, second), _, ended = two(100e3, 80e3)
    with torch.no_grad():
        first()
        for _ in range(module.MOST_CALLS + STEPS + 2):
            second()
    assert [outcome.before_us for outcome in ended] == [100e3]


def test_a_captured_call_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, frame, ran, ended = made(100e3, 200e3)
    monkeypatch.setattr(module, "_capturing", lambda: True)
    for _ in range(2 * STEPS):
        frame()
    assert set(ran) == {"after"}
    assert ended == []


def test_the_other_code_is_released() -> None:
    _, frame, _, _ = made(100e3, 80e3)
    for _ in range(STEPS + 1):
        frame()
    assert frame.before is frame.after


def test_a_cancelled_contest_releases_its_code_and_its_hook() -> None:
    contest, frame, _, ended = made(100e3, 200e3)
    for _ in range(STEPS // 2):
        frame()
    hook, before = contest._hook, weakref.ref(frame.before)
    contest.cancel()
    assert before() is None
    assert hook.id not in hook.hooks_dict_ref()
    assert frame() == "after"
    assert ended == []


def test_a_contest_that_has_not_begun_is_cancelled_too() -> None:
    contest, frame, _, ended = made(100e3, 200e3)
    contest.cancel()
    assert frame() == "after"
    assert ended == []


def test_one_slow_block_decides_nothing() -> None:
    quiet, slow = [100.0] * 5, [300.0] * 5
    assert judge([quiet, quiet, quiet, quiet], [[90.0] * 5, slow, [90.0] * 5, [90.0] * 5]).kept


class Steps(list[Any]):
    """Steps of a contest whose last one has just been added when another thread calls the model."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self._thread = threading.Thread(target=call, daemon=True)

    def append(self, step: Any) -> None:
        super().append(step)
        if len(self) == STEPS:
            self._thread.start()
            self._thread.join(0.3)  # a call that waits for this one goes on behind it


def test_a_call_in_another_thread_does_not_keep_a_contest_from_its_end() -> None:
    contest, frame, ran, ended = made(100e3, 80e3)
    contest._steps = Steps(frame)
    for _ in range(STEPS + 1):
        frame()
    assert len(ended) == 1
    assert not contest.running
    assert frame() == "after"
    while len(ran) < STEPS + 3:  # until pytest's limit
        time.sleep(0.01)
    assert len(ran) == STEPS + 3


@pytest.mark.parametrize(("after", "code"), [(80e3, "after"), (200e3, "before")])
def test_a_frame_that_is_added_after_the_end_runs_the_code_that_won(after: float, code: str) -> None:
    contest, frame, _, _ = made(100e3, after)
    for _ in range(STEPS + 1):
        frame()
    late = Frame(lambda: "before", lambda: "after", contest)
    assert not contest.running
    assert [frame(), late()] == [code, code]

"""The seconds that a program gives to searches: where they are read, and that they are spent once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.in_program import options
from autotune.in_program.options import asked, left_s, spending, tuning


@pytest.fixture(autouse=True)
def unspent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_spent_s", 0.0)
    monkeypatch.delenv("AUTOTUNE_SEARCH", raising=False)


def test_the_option_is_taken_out_of_inductors() -> None:
    options = {"mode": None, "options": {"search": 90, "epilogue_fusion": False}}
    assert asked(options) == (90.0, {"mode": None, "options": {"epilogue_fusion": False}})
    assert options["options"] == {"search": 90, "epilogue_fusion": False}, "the user's own dictionary stays"


@pytest.mark.parametrize("none", [{}, {"options": None}, {"options": {"search": 0}}, {"options": {"search": False}}])
def test_without_a_budget_nothing_is_asked_for(none: dict[str, Any]) -> None:
    assert asked(none)[0] == 0.0


def test_the_option_comes_before_the_variable_and_a_context_before_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_SEARCH", "60")
    assert asked({})[0] == 60.0
    assert asked({"options": {"search": 90}})[0] == 90.0
    assert asked({"options": {"search": 0}})[0] == 0.0
    with tuning(seconds=30):
        assert asked({"options": {"search": 90}})[0] == 30.0
        with tuning(seconds=20):
            assert asked({})[0] == 20.0
    assert asked({})[0] == 60.0


@pytest.mark.parametrize("bad", ["fast", -3, float("nan"), float("inf"), True, [], None])
def test_a_budget_that_is_none_is_a_users_mistake(bad: Any) -> None:
    with pytest.raises(UserError, match="seconds above 0"), tuning(seconds=bad):
        pass
    if bad is not None:
        with pytest.raises(UserError, match="options\\['search'\\]"):
            asked({"options": {"search": bad}})


def test_a_variable_that_is_none_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AUTOTUNE_SEARCH", "a minute")
    with caplog.at_level(logging.WARNING, "autotune"):
        assert [asked({})[0], asked({})[0]] == [0.0, 0.0]
    assert len([r for r in caplog.records if "AUTOTUNE_SEARCH" in r.getMessage()]) <= 1


def test_all_searches_spend_from_one_purse(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 30.0, 100.0, 125.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    with spending():
        pass
    assert left_s(90.0) == 60.0
    with spending():
        pass
    assert left_s(90.0) == 35.0


def test_a_context_has_a_separate_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_spent_s", 80.0)
    with tuning(seconds=90):
        assert left_s(90.0) == 90.0
        now = iter([0.0, 4.0])
        with monkeypatch.context() as patched:
            patched.setattr(time, "monotonic", lambda: next(now))
            with spending():
                pass
        assert left_s(90.0) == 86.0
    assert left_s(90.0) == 6.0, "what it spent counts outside, too"


@pytest.mark.parametrize("first", [0, 1])
def test_contexts_of_two_threads_have_separate_budgets(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    monkeypatch.setenv("AUTOTUNE_SEARCH", "60")
    both, one_ended = threading.Barrier(2, timeout=250), threading.Event()
    seen: dict[int, list[float]] = {}

    def run(k: int) -> None:
        budget = 30.0 + k
        with tuning(seconds=budget):
            both.wait()
            _spend(5.0 + k)
            both.wait()
            if k != first:
                assert one_ended.wait(250)
            seen[k] = [asked({})[0], left_s(budget)]
        one_ended.set()

    threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {0: [30.0, 25.0], 1: [31.0, 25.0]}
    assert asked({})[0] == 60.0
    assert left_s(60.0) == 49.0, "what both spent counts outside"


def test_a_thread_without_a_context_takes_the_one_around_it() -> None:
    seen: list[float] = []

    def work() -> None:
        seen.append(asked({})[0])
        _spend(4.0)

    with tuning(seconds=30):
        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
        assert left_s(30.0) == 26.0
    assert seen == [30.0]


def test_a_context_that_outlives_the_one_around_it_keeps_its_budget() -> None:
    def steps(seconds: float) -> Generator[None, None, None]:
        with tuning(seconds=seconds):
            yield

    outer, inner = steps(30.0), steps(20.0)
    next(outer)
    next(inner)
    outer.close()
    assert asked({})[0] == 20.0
    _spend(4.0)
    inner.close()
    assert asked({})[0] == 0.0
    assert left_s(90.0) == 86.0


def _spend(seconds: float) -> None:
    """Spend seconds without waiting; threads may do this at once."""
    with options._lock:
        options._spend(options._innermost(), seconds)

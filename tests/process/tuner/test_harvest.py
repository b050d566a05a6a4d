"""Candidates that are compiled when a search's time ends are measured, if that takes little time."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from autotune.measure.outcome import Outcome
from autotune.measure.policy import Policy
from autotune.measure.pool import Built, CompilePool
from autotune.store import Store
from autotune.task import Config, Status
from autotune.tuner.context import Context, Session
from autotune.tuner.options import Budget
from autotune.tuner.phases.explore import TIME_UP, Explorer
from autotune.tuner.seeds import Seed
from autotune.workload import Workload
from tests.support.toy.toy_domain import GOOD, ToyTask
from tests.support.toy.toy_domain import workload as toy

CONFIGS: list[Config] = [{"how": how, "block": 2**k} for how in GOOD for k in range(6)]
STEP_S = 0.5


class Compiled(CompilePool):
    """Everything is compiled at once, except for ``slow`` candidates."""

    slow: Any = ()

    def submit(self, workload: Workload, device: str, config: Config) -> Future[Built]:
        future: Future[Built] = Future()
        if config not in self.slow:
            future.set_result(Built(ToyTask(workload, device).build(config)))
        return future


class Hand:
    """A measurer by whose hand the time goes: half a second a candidate."""

    def __init__(self) -> None:
        self.now, self.measured = 0.0, list[Config]()
        self.stop_at: Any = None

    def open(self, workload: Workload) -> None:
        pass

    def measure(self, config: Config, *_: object, **__: object) -> Outcome:
        self.now += STEP_S
        self.measured.append(config)
        return Outcome(Status.OK, samples=(100.0,))


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    made = Hand()
    monkeypatch.setattr(Session, "elapsed", property(lambda self: made.now))
    return made


def explored(
    store: Store,
    policy: Policy,
    hand: Hand,
    until_s: float,
    device: str,
    slow: Any = (),
    waits: float | None = None,
    least: int = 0,
) -> tuple[str, int]:
    """Why a search with all candidates as seeds ended, and how many it measured."""
    pool = Compiled(len(CONFIGS))
    pool.slow = slow
    context = Context(store=store, device="cpu", policy=policy, lent=(pool,), _pool=pool, _worker=hand)  # type: ignore[arg-type]
    task = ToyTask(toy(), device)
    s = context.session(task, Budget(waits=waits))
    seeds = [Seed(c, "asked") for c in CONFIGS]
    stop = Explorer(s, task.space(), None, seeds, until_s=until_s, patience=0, least=least).run()
    return stop, len(hand.measured)


@pytest.mark.parametrize(
    ("until_s", "measured"),
    [
        (2.0, 4 + 1),  # a quarter of the time more
        (4.0, 8 + 2),  # but no more than a second
        (5.0, 10 + 2),
        (0.0, 1),  # one whatever the time is
    ],
)
def test_a_little_more_time_for_compiled_candidates(
    until_s: float, measured: int, store: Store, policy: Policy, hand: Hand
) -> None:
    assert explored(store, policy, hand, until_s, "cuda:0") == (TIME_UP, measured)
    assert hand.measured == CONFIGS[:measured]


def test_running_compilations_are_left(store: Store, policy: Policy, hand: Hand) -> None:
    slow = CONFIGS[3:9]
    assert explored(store, policy, hand, 2.0, "cuda:0", slow) == (TIME_UP, 5)
    assert hand.measured == [*CONFIGS[:3], *CONFIGS[9:11]]


def test_nothing_is_measured_during_compilation_on_a_cpu(
    store: Store, policy: Policy, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.tuner.phases.explore._QUIET_S", 0.0)
    assert explored(store, policy, hand, 2.0, "cpu", CONFIGS[11:]) == (TIME_UP, 4)


def test_a_search_waits_for_its_first_candidate_as_long_as_its_budget_says(
    store: Store, policy: Policy, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region of 16 recomputed layers compiled for minutes, and 11 other regions lost their kernels."""

    def passes(futures: Any, timeout: float, return_when: Any = None) -> tuple[set[Any], set[Any]]:
        hand.now += 1.0
        return set(), set(futures)

    monkeypatch.setattr("autotune.tuner.phases.explore.wait", passes)
    assert explored(store, policy, hand, 2.0, "cuda:0", CONFIGS, waits=4.0) == (TIME_UP, 0)
    assert hand.now == 6.0


def test_an_explorer_that_begins_late_measures_what_is_compiled(store: Store, policy: Policy, hand: Hand) -> None:
    """The parts of a composition may take longer than their time; the composed whole is measured in any case."""
    hand.now = 8.0
    assert explored(store, policy, hand, 4.5, "cuda:0", waits=3.0, least=2) == (TIME_UP, 2)

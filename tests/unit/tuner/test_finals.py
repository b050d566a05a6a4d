"""A final comparison's wait for the baselines' code, by a clock that the tests set."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autotune.measure.policy import Policy
from autotune.measure.pool import BaselinePool
from autotune.tuner import context as contexts
from autotune.tuner.context import Context
from autotune.tuner.options import Budget
from autotune.tuner.phases import finals
from autotune.workload import Workload
from tests.support.clock import Clock


class Baselines:
    """A pool whose compilation takes so many seconds."""

    def __init__(self, clock: Clock, takes_s: float) -> None:
        self._clock, self._takes_s = clock, takes_s

    def wait(self, workload: Workload, device: str, seconds: float) -> object | None:
        self._clock.sleep(min(self._takes_s, seconds, 30.0))
        return object() if self._takes_s <= min(seconds, 30.0) else None


@pytest.mark.parametrize(
    ("takes_s", "end", "most", "compared", "waited_s"),
    [
        (4.0, 10.0, None, True, 4.0),
        (20.0, 10.0, None, False, 10.0),  # the run ends before the code exists
        (0.0, 0.0, None, True, 0.0),  # it existed already
        (2.0, 0.0, None, False, 0.0),
        (40.0, 90.0, None, True, 30.0),  # the worker compiles it
        (40.0, None, None, True, 30.0),
        (4.0, 60.0, 3.0, False, 3.0),  # the budget allows no longer wait
        (2.0, 60.0, 3.0, True, 2.0),
    ],
)
def test_a_comparison_waits_no_longer_than_the_run_lasts(
    monkeypatch: pytest.MonkeyPatch, takes_s: float, end: float | None, most: float | None, compared: bool,
    waited_s: float,
) -> None:  # fmt: skip
    clock = Clock()
    monkeypatch.setattr(contexts, "time", clock)
    given: Any = {"store": None, "_baselines": Baselines(clock, takes_s)}
    context = Context(device="cuda:0", policy=Policy(method="cpu"), end=end, **given)
    session: Any = SimpleNamespace(
        context=context,
        task=SimpleNamespace(workload=Workload("fusion", {}), device="cuda:0"),
        budget=Budget(waits=most),
    )
    assert finals._has_baselines(session) is compared
    assert clock.ns / 1e9 == pytest.approx(waited_s)


def test_a_pool_waits_no_longer_than_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    class Future:
        def result(self, timeout: float) -> None:
            waited.append(timeout)
            raise TimeoutError

    monkeypatch.setattr(BaselinePool, "submit", lambda self, workload, device, config: Future())
    monkeypatch.setattr(BaselinePool, "keep", lambda self, workload, device, config, future: None)
    with BaselinePool(1) as pool:
        assert pool.wait(Workload("fusion", {}), "cuda:0", 7.0) is None
        assert pool.wait(Workload("fusion", {}), "cuda:0") is None
    assert waited == [7.0, 30.0]


@pytest.mark.parametrize(
    ("latency_us", "left_s", "again"),
    [
        (1e6, None, 2),  # no limit
        (1e6, 60.0, 2),
        (1e6, 35.0, 1),  # 10 s for each, and 16 s for the comparison
        (1e6, 20.0, 0),
        (10.0, 1.0, 2),
        (10.0, 0.0, 0),
    ],
)
def test_slow_candidates_are_not_timed_again_beyond_the_time(
    latency_us: float, left_s: float | None, again: int
) -> None:
    """Each of two candidates takes ``latency_us``."""
    policy = Policy(method="cpu", repeat_repeats=20)
    known = [
        SimpleNamespace(config={"block": block}, stage="screen", latency_us=latency_us, reason="") for block in (1, 2)
    ]
    store = SimpleNamespace(get_measurement=lambda *key: None, claim=lambda *key: True)
    own: Any = SimpleNamespace(
        context=SimpleNamespace(
            policy=policy, store=store, owner="me", interrupt=SimpleNamespace(requested=False)
        ),
        budget=SimpleNamespace(trials=None), key=None, whole=None, left=left_s, ranking=lambda: known,
        artifact=lambda config: None, report=lambda *told: None,
    )  # fmt: skip
    timed = []

    def measure(config: Any, built: Any, stage: str) -> Any:
        timed.append(config)
        if own.left is not None:
            own.left -= min(10.0, 20 * latency_us / 1e6)
        return SimpleNamespace(latency_us=latency_us)

    own.measure = measure
    finals.refine(own)
    assert len(timed) == again

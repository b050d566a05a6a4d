"""Measurements in the sampler's study, its next proposals, and the view of Optuna's dashboard."""

from __future__ import annotations

from pathlib import Path

import pytest
from optuna.study import StudyDirection

from autotune.space import Parameter, Space
from autotune.store import Store
from autotune.store.records import Key, Measurement
from autotune.task import Config, Status
from autotune.tuner import studies
from autotune.tuner.studies import History, Studies
from autotune.workload import Workload
from tests.support.rows import put_key

SPACE = Space((Parameter("block", (1, 2, 4, 8)), Parameter("how", ("a", "b"))), "test.toml")
KEY = Key("w", "d", "e", "p")


def measured(block: int, how: str = "a", us: float | None = None) -> Measurement:
    config: Config = {"block": block, "how": how}
    return Measurement(KEY, config, Status.OK if us else Status.TIMEOUT, latency_us=us)


def told(h: History) -> list[tuple[int, float, float]]:
    return [(t.params["block"], t.value, t.constraints["failed"]) for t in h._study.trials]


def test_failures_cost_more_than_anything_measured_and_keep_their_place() -> None:
    known = [measured(4, us=30.0), measured(1), measured(2, us=50.0), measured(3, us=1.0), measured(4, us=9.0)]
    h = History(sampler="random", seed=0, space=SPACE, known=known)
    assert told(h) == [(4, 30.0, 0.0), (1, 100.0, 1.0), (2, 50.0, 0.0)]  # 3 is not of the space, 4 is known by then
    h.add(measured(2, us=1.0))
    h.add(measured(8, "b"))
    assert told(h)[3:] == [(8, 100.0, 1.0)]


def test_of_many_the_fastest_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "_WARM", 2)
    known = [measured(1), measured(2, us=5.0), measured(4, us=7.0), measured(8, us=6.0)]
    assert [block for block, *_ in told(History(sampler="tpe", seed=0, space=SPACE, known=known))] == [2, 8]


def test_continued_search_proposes_other_candidates() -> None:
    def proposed(known: list[Measurement]) -> list[Config]:
        h = History(sampler="random", seed=3, space=SPACE, known=known)
        return [h.ask()[1] for _ in range(6)]

    assert proposed([]) == proposed([])
    assert proposed([measured(1, us=1.0), measured(2, us=2.0)]) != proposed([])


def test_outcomes_of_proposals_are_remembered() -> None:
    h = History(sampler="random", seed=0, space=SPACE)
    (one, config), (two, _), (three, _) = h.ask(), h.ask(), h.ask()
    h.tell(one, Measurement(KEY, config, Status.OK, latency_us=4.0))
    h.drop(two)
    h.skip(three, {"block": 8, "how": "b"}, 7.5)
    assert [t.value for t in h._study.trials] == [4.0, None, 7.5]
    h.add(Measurement(KEY, config, Status.OK, latency_us=3.0))
    assert len(h._study.trials) == 3


def test_a_study_shows_the_users_figure_and_grows(tmp_path: Path) -> None:
    objective = {"name": "rate", "unit": "rows/s", "direction": "max"}
    spec = {"kernel": "m:k", "source": "0" * 64, "key": {}, "objective": objective}
    with Store.open(tmp_path / "t.db") as store:
        key = put_key(store, Workload("kernel", spec, label="k"))
        store.add_measurement(Measurement(key, {"block": 1}, Status.OK, latency_us=0.5, when=1e9, measure_s=1e3))
        damaged = Measurement(key, {"block": 3}, Status.OK, latency_us=0.1, when=1e300, measure_s=1e300)
        store.add_measurement(damaged)  # of no year that there is: left out
        studies = Studies(store)
        ((study,), (first,)) = studies.get_all_studies(), studies.get_all_trials(0)
        assert (study.study_name.startswith("k on "), study.direction) == (True, StudyDirection.MAXIMIZE)
        assert (first.value, first.params) == (2.0, {"block": 1})
        store.add_measurement(Measurement(key, {"block": 2}, Status.OK, latency_us=0.25))
        store.add_measurement(Measurement(key, {"block": 2}, Status.OK, "repeat", latency_us=0.25))
        assert [t.value for t in studies.get_all_trials(0)] == [2.0, 4.0]
        assert studies.get_best_trial(0).params == {"block": 2}

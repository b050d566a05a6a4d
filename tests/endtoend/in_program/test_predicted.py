"""Predicted schedules: proposals, trials, and stored results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from autotune.device import environment, identify
from autotune.domain import open_task
from autotune.domains.fusion.task import FusionTask
from autotune.in_program import predicted
from autotune.in_program.predicted import MARGIN, MOST, NO_GAIN, Prediction, Trials, gain, proposals
from autotune.measure.outcome import Outcome
from autotune.measure.pool import Built, CompilePool
from autotune.measure.worker import Contender, Worker
from autotune.runtime.ladder import Level
from autotune.runtime.match import match
from autotune.store import Store
from autotune.store.records import PREDICTED
from autotune.task import Artifact, Config, Status, config_key
from autotune.workload import Workload
from tests.support.capture_helpers import regions_of


def workload(rows: int = 64, fn: Callable[..., torch.Tensor] | None = None) -> Workload:
    norm = fn or (lambda x: torch.nn.functional.layer_norm(x * 2, (48,)))
    (region,) = regions_of(norm, torch.randn(rows, 48))
    assert region.workload is not None
    return region.workload


class Pool:
    """Builds in this process; ``broken`` builds nothing."""

    def __init__(self) -> None:
        self.broken = False
        self.built: list[Config] = []

    def submit(self, workload: Workload, device: str, config: Config) -> Future[Built]:
        future: Future[Built] = Future()
        self.built.append(config)
        made = Built(None, "it does not compile")
        future.set_result(made if self.broken else Built(open_task(workload, device).build(config)))
        return future


class Bench:
    """A measuring worker in this process.

    Attributes:
        ours, inductor: microseconds that candidates and Inductor's code take.
        wrong: candidates that compute something else, by number.
    """

    others = None

    def __init__(self, ours: float = 10.0, inductor: float | None = 20.0) -> None:
        self.ours, self.inductor = ours, inductor
        self.wrong: set[int] = set()
        self.measured = 0

    def open(self, workload: Workload) -> None: ...

    def measure(self, config: Config, artifact: Artifact, **how: Any) -> Outcome:
        self.measured += 1
        if self.measured - 1 in self.wrong:
            return Outcome(Status.WRONG_RESULT, reason="output 0 is wrong")
        return Outcome(Status.OK, (self.ours,) * 3)

    def compare(self, contenders: Sequence[Contender], *, seed: int, without: Sequence[str]) -> dict[str, Outcome]:
        assert list(without) == ["eager"]
        (mine,) = contenders
        found = {mine.name: Outcome(Status.OK, (self.ours,) * 5)}
        if self.inductor is not None:
            found["inductor"] = Outcome(Status.OK, (self.inductor,) * 5)
        return found


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusionTask, "_compile_cpu", lambda self, plan, parts: None)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "t.db") as made:
        yield made


def tried(store: Store, bench: Bench, pool: Pool | None = None, of: Workload | None = None) -> Prediction:
    trials = Trials(store, "cpu", cast(CompilePool, pool or Pool()), "run", {})
    found = trials.run(of or workload(), cast(Worker, bench))
    assert not any(s.predicted and s.key.workload == found.workload for s in store.schedules()), "not before the end"
    trials.store()
    return found


def found(store: Store, of: Workload) -> Any:
    return match(of, store, identify("cpu"), environment("cpu"))


def test_the_default_is_proposed_first_and_few_others() -> None:
    task = open_task(workload(), "cpu")
    made = proposals(task)
    assert (made[0].origin, made[0].config) == ("default", task.normalize(task.default()))
    assert 1 < len(made) <= MOST
    assert len({config_key(p.config) for p in made}) == len(made)
    assert all(task.reject(p.config) is None for p in made)
    assert {p.origin for p in made[1:]} == {"heuristic"}, "a CPU has no cost model"


def test_the_best_at_other_rows_is_proposed_before_the_models_picks() -> None:
    near, task = open_task(workload(256), "cpu"), open_task(workload(), "cpu")
    known = next(c for c in map(near.normalize, near.seeds()) if c != task.normalize(task.default()))
    assert ("neighbour", task.adapt(known)) in [(p.origin, p.config) for p in proposals(task, [("neighbour", known)])]


def test_a_gain_is_expected_of_reductions_and_hardly_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_CUDA_TARGET", "sm_90:132")

    def on_gpu(rows: int, fn: Callable[..., torch.Tensor]) -> float:
        task = open_task(workload(rows, fn), "cuda:0")
        found = gain(task, proposals(task))
        assert found is not None
        return found

    twice = on_gpu(1 << 18, lambda x: torch.softmax(x - x.mean(0), 1))
    once = on_gpu(1 << 18, lambda x: torch.nn.functional.gelu(x))
    assert twice > once
    assert once < 1.25


def test_the_fastest_is_stored_and_the_workload_stays_missed(store: Store) -> None:
    store.put_workload(workload())
    store.add_miss(workload(), identify("cpu").fingerprint, "not tuned")
    result = tried(store, Bench(10.0, 20.0))
    assert (result.won, result.latency_us, result.inductor_us) == (True, 10.0, 20.0)
    stored = found(store, workload())
    assert stored.level is Level.HEURISTIC
    assert not stored.level.own
    assert stored.schedule.space == PREDICTED
    assert stored.schedule.baselines == {"inductor": 20.0}
    assert len(store.misses()) == 1, "a search is to find more"


@pytest.mark.parametrize("inductor", [9.0, 10.0 * MARGIN - 0.01])
def test_a_wrong_prediction_leaves_the_region_to_inductor(store: Store, inductor: float) -> None:
    result = tried(store, Bench(10.0, inductor))
    assert (result.won, result.why) == (False, "")
    stored = found(store, workload())
    assert (stored.level, stored.schedule.config, stored.schedule.winner) == (Level.HEURISTIC, None, "inductor")


def test_a_candidate_that_computes_something_else_is_not_stored(store: Store) -> None:
    bench = Bench()
    bench.wrong = {0}
    assert tried(store, bench).won
    default = open_task(workload(), "cpu").normalize(open_task(workload(), "cpu").default())
    assert found(store, workload()).schedule.config != default
    statuses = [m.status for _, m in store.neighbours(workload().family, "", "")]
    assert Status.WRONG_RESULT not in statuses


def test_nothing_that_works_stores_nothing(store: Store) -> None:
    bench, broken = Bench(), Pool()
    bench.wrong, broken.broken = set(range(MOST)), True
    assert tried(store, bench).why == "output 0 is wrong"
    assert tried(store, Bench(), broken, workload(96)).why == "it does not compile"
    assert tried(store, Bench(inductor=None), of=workload(128)).why == "no code of Inductor's"
    assert store.schedules() == []


def test_no_candidate_is_built_where_the_models_expect_no_gain(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicted, "gain", lambda task, proposed: 1.0)
    pool = Pool()
    assert tried(store, Bench(), pool).why == NO_GAIN
    assert pool.built == []


def test_a_search_replaces_a_prediction_and_never_the_reverse(store: Store) -> None:
    tried(store, Bench(10.0, 20.0))
    (stored,) = store.schedules(artifacts=True)
    searched = replace(stored, space="", latency_us=11.0)
    assert store.put_schedule(searched), "slower by its number, but searched"
    assert found(store, workload()).level is Level.EXACT
    assert not store.put_schedule(replace(stored, latency_us=5.0, when=0.0))
    assert found(store, workload()).level is Level.EXACT
    tried(store, Bench(1.0, 20.0))
    assert [s.space for s in store.schedules()] == [""]


def test_other_rows_do_not_take_a_prediction(store: Store) -> None:
    tried(store, Bench(10.0, 20.0))
    other = found(store, workload(128))
    assert other.level is Level.NONE
    assert "not searched" in other.reason

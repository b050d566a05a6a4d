"""Regions that nobody searched: when schedules are predicted, what the program runs, and that nothing can fail it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import autotune
from autotune.errors import UserError
from autotune.in_program import options, search, searcher, unsearched, verdicts
from autotune.measure.child import Child, ChildDied, ChildSilent
from autotune.runtime.deployment import deployment
from autotune.runtime.inductor.verdict import Surveyed, lacking
from autotune.runtime.ladder import Level, Outcome
from autotune.store import Store
from autotune.store.records import PREDICTED
from autotune.workload import Workload
from tests.endtoend.in_program.test_search import STEPS, eager, faster, train
from tests.support.deployment import store_default
from tests.support.runtime.searches import Searches

DEFAULT = {"unsearched": "default"}


class Process:
    """In the place of the process that tries: stores the default kernel of every workload as predicted.

    Attributes:
        labels: of the workloads that were tried.
        wins: a prediction is a gain.
    """

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.wins = True
        self.during: Callable[[], object] = lambda: None
        self.ended = 0
        self.most = 100
        """Workloads that there is time for."""

    def __call__(self, module: str) -> Process:
        assert module == "autotune.in_program.predicted"
        self._asked: list[tuple[Workload, str]] = []
        self._device = ""
        return self

    def send(self, message: dict[str, Any]) -> None:
        self._device = message.get("device", self._device)
        if "workloads" not in message:
            return
        self.during()
        self._asked += [(Workload.from_json(told), self._device) for told in message["workloads"]]

    def receive(self, deadline: float) -> tuple[dict[str, Any], bytes]:
        def edit(s: Any) -> Any:
            lost = {} if self.wins else {"config": None, "artifact": None, "winner": "inductor"}
            return replace(s, key=replace(s.key, policy="stub"), space=PREDICTED, **lost)

        tried = self._asked[: self.most]
        with Store.open(None) as store:
            for w, device in tried:
                self.labels.append(w.label)
                store_default(store, w, device, edit=edit)
        found = [{"won": self.wins, "inductor_us": 15.0}] * len(tried)
        return {"found": found, "left": len(self._asked) - len(tried), "error": ""}, b""

    def kill(self) -> None:
        self.ended += 1


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, db: str) -> Iterator[Process]:
    made = Process()
    monkeypatch.setattr(searcher, "_Process", made)
    monkeypatch.setattr(unsearched, "_waited_s", 0.0)
    monkeypatch.setattr(search, "_contest", None)
    monkeypatch.setattr(options, "_spent_s", 0.0)
    yield made
    torch._dynamo.reset()


def test_both_graphs_run_predicted_schedules_and_stay_missed(
    process: Process, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], db: str
) -> None:
    faster(monkeypatch, kept=True)
    losses, _ = train(STEPS + 2, **DEFAULT)
    assert any("backward" in label for label in process.labels)
    assert not all("backward" in label for label in process.labels)
    assert losses == pytest.approx(eager(STEPS + 2), rel=1e-4)
    counted, tried = autotune.counters(), len(process.labels)
    assert (counted.hits, counted.hits_predicted, counted.predicted, counted.predicted_wrong) == (tried,) * 3 + (0,)
    told = capsys.readouterr().err
    assert f"{tried} of {tried} regions without a search have a predicted schedule now" in told
    assert ": they are used" in told
    assert process.ended == 1
    with Store.open(db) as store:
        assert len(store.misses()) == tried, "`autotune search --missed` finds them"


def test_the_next_process_tries_nothing(process: Process, monkeypatch: pytest.MonkeyPatch, db: str) -> None:
    faster(monkeypatch, kept=True)
    train(STEPS + 2, **DEFAULT)
    with Store.open(db) as store:
        state = store.state()
    torch._dynamo.reset()
    tried, before = len(process.labels), autotune.counters().hits
    train(1, **DEFAULT)
    assert len(process.labels) == tried
    assert autotune.counters().hits == before + tried
    with Store.open(db) as store:
        assert store.state() == state, "torch's caches keep the code of the first process"


def test_next_process_tries_the_remaining_predictions(
    process: Process, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faster(monkeypatch, kept=True)
    process.most = 1
    for tried in (1, 2, 2):
        train(1, **DEFAULT)
        assert len(process.labels) == len(set(process.labels)) == tried
        torch._dynamo.reset()
    assert "1 not tried in time" in capsys.readouterr().err


def test_a_process_waits_for_so_long_and_no_longer(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsearched, "_waited_s", unsearched._MOST_S)
    train(1, **DEFAULT)
    assert process.labels == []


def test_wrong_predictions_are_counted_and_compile_nothing_again(
    process: Process, db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.wins = False
    compiled: list[bool] = []
    real = search.copied
    monkeypatch.setattr(search, "copied", lambda gm: (compiled.append(True), real(gm))[1])
    train(2, **DEFAULT)
    counted = autotune.counters()
    assert (counted.predicted, counted.predicted_wrong, counted.hits) == (0, len(process.labels), 0)
    assert search._contest is None
    torch._dynamo.reset()
    train(1, **DEFAULT)
    assert len(compiled) == 1
    assert autotune.counters().baseline_wins == len(process.labels)
    with Store.open(db) as store:
        assert len(store.misses()) == len(process.labels), "a search may find better"


def test_the_ladder_explains_a_prediction(process: Process) -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, -1)

    x = torch.randn(32, 48)
    for wins, told in ((True, "predicted and timed once, 10.0 us"), (False, "the prediction was wrong")):
        process.wins = wins
        with torch.no_grad():
            torch.compile(norm, backend=unsearched_backend(), options=DEFAULT)(x)
        (region,) = autotune.lookup(norm, (x,), explain=True)
        assert region.level is Level.HEURISTIC
        (step,) = [step for step in region.ladder if step.outcome is Outcome.TAKEN]
        assert told in step.why
        torch._dynamo.reset()
        x = torch.randn(32 * 30, 48)


def unsearched_backend() -> Any:
    from autotune.in_program.backend import dynamo_backend

    return dynamo_backend


def test_a_slower_step_runs_inductors_code_and_a_search_still_searches_it(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    faster(monkeypatch, kept=False)
    train(STEPS + 2, **DEFAULT)
    assert (autotune.counters().hits, autotune.counters().left) == (0, len(process.labels))
    torch._dynamo.reset()
    deployment().reset_counters()
    train(1, **DEFAULT)
    assert (autotune.counters().hits, autotune.counters().left) == (0, len(process.labels))
    torch._dynamo.reset()
    searches = Searches()
    monkeypatch.setattr(search, "Searcher", searches)
    train(1, search=100)
    assert sorted(searches.labels[0]) == sorted(process.labels)


def test_predicted_regions_stay_missed_for_a_search(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Surveyed] = []
    faster(monkeypatch, kept=True)
    monkeypatch.setattr(verdicts, "note_verdicts", lambda found, *a, **k: graphs.extend(found[0].graphs))
    train(1, **DEFAULT)
    (missed,) = lacking(graphs).values()
    assert len(missed) == len(process.labels)


def test_stored_regions_are_not_tried(process: Process, db: str) -> None:
    train(1)
    with Store.open(db) as store:
        for miss in store.misses():
            found = store.get_workload(miss.workload)
            assert found is not None
            store_default(store, found)
    torch._dynamo.reset()
    train(1, **DEFAULT)
    assert process.labels == []


def test_the_variable_asks_for_it_and_the_option_comes_first(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_UNSEARCHED", "default")
    train(1, unsearched="leave")
    assert process.labels == []
    torch._dynamo.reset()
    train(1)
    assert process.labels


def test_without_it_regions_are_left_and_missed(process: Process, db: str) -> None:
    train(1)
    assert process.labels == []
    with Store.open(db) as store:
        assert store.misses()


def test_a_value_that_it_does_not_take_is_named(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match=r"options\['unsearched'\]: 'guess' must be one of default, leave"):
        train(1, unsearched="guess")
    with pytest.raises(UserError, match="unsearched"):
        autotune.configure(unsearched="guess")


def test_a_missing_compiler_is_reported_once_and_nothing_is_tried(
    process: Process, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unsearched, "lacks", lambda device: "numba")
    losses, _ = train(3, **DEFAULT)
    assert losses == pytest.approx(eager(3), rel=1e-4)
    told = [r.getMessage() for r in caplog.records if "no schedule is predicted" in r.getMessage()]
    assert told == ["autotune: no schedule is predicted: numba is not installed"]
    assert process.labels == []


def test_compilers_are_found_by_their_modules() -> None:
    assert unsearched.lacks("cpu") == ""
    assert unsearched._found("numba")
    assert not unsearched._found("no_such.module")


def test_a_failure_is_warned_of_and_the_program_trains_on(process: Process, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA out of memory")

    process.during = fail
    losses, _ = train(3, **DEFAULT)
    assert losses == pytest.approx(eager(3), rel=1e-4)
    assert [r.getMessage() for r in caplog.records if "were not predicted: RuntimeError: CUDA out" in r.getMessage()]


@pytest.mark.parametrize(
    ("failure", "says"),
    [(ChildSilent(), "did not answer in time"), (ChildDied("killed by SIGKILL"), "ended: killed by SIGKILL")],
)
def test_a_process_without_an_answer_is_described_in_words(
    process: Process, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: Exception, says: str
) -> None:
    def fail(self: Process, deadline: float) -> None:
        raise failure

    monkeypatch.setattr(Process, "receive", fail)
    losses, _ = train(2, **DEFAULT)
    assert losses == pytest.approx(eager(2), rel=1e-4)
    (warned,) = [r.getMessage() for r in caplog.records if "not predicted" in r.getMessage()]
    assert warned == f"autotune: schedules were not predicted: the process that tries them {says}"


def test_a_process_that_is_killed_costs_the_prediction_alone(
    db: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Dying(Child):
        def send(self, message: Any, blob: bytes = b"", timeout: float = 60.0) -> None:
            super().send(message, blob, timeout)
            os.kill(self.pid, 9)

    monkeypatch.setattr(searcher, "_Process", Dying)
    monkeypatch.setattr(search, "_contest", None)
    losses, _ = train(3, **DEFAULT)
    assert losses == pytest.approx(eager(3), rel=1e-4)
    assert [r.getMessage() for r in caplog.records if "schedules were not predicted" in r.getMessage()]


def test_a_real_prediction(db: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Real processes on this CPU; which code is faster depends on the host's load."""
    monkeypatch.setattr(unsearched, "_WAIT_LEAST_S", 400.0)
    monkeypatch.setattr(search, "_contest", None)
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path / "kernels"))

    def norm(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, -1)

    x = torch.randn(512, 256)
    with torch.no_grad():
        got = torch.compile(norm, backend=unsearched_backend(), options=DEFAULT)(x)
    torch.testing.assert_close(got, norm(x))
    counted = autotune.counters()
    assert counted.predicted + counted.predicted_wrong == 1
    with Store.open(db) as store:
        (schedule,) = store.schedules()
        assert schedule.predicted
        assert set(schedule.baselines) == {"inductor"}
        assert store.misses()

"""Verdicts at deploy time: their keys, their effect, and damaged ones."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import autotune
from autotune.compiler.capture.recording import capture
from autotune.compiler.regions.find import find_regions
from autotune.device import environment, identify
from autotune.runtime.backend import passes, trial_backend
from autotune.runtime.inductor.verdict import Trial, base_mode, graph_fingerprint
from autotune.store import Store, Verdict
from autotune.workload import Workload
from tests.support.deployment import Tune

X = torch.linspace(-1.0, 1.0, 8 * 16).reshape(8, 16)
W = torch.linspace(-1.0, 1.0, 16 * 16).reshape(16, 16)


def step(x: Tensor) -> Tensor:
    return torch.softmax(torch.tanh(x) @ W, -1)


def fingerprint(fn: Callable[..., Any], x: Tensor = X) -> str:
    (graph,) = capture(fn, (x,))
    return graph_fingerprint(graph.module.graph, find_regions(graph.module), {})


def test_a_graph_is_told_by_its_regions_and_its_other_operators() -> None:
    assert fingerprint(step) == fingerprint(lambda x: torch.softmax(torch.tanh(x) @ W, -1))
    assert fingerprint(step) != fingerprint(step, X[:4].clone()), "other regions"
    twice = fingerprint(lambda x: torch.softmax(torch.tanh(x) @ W @ W, -1))
    assert fingerprint(step) != twice, "another product between the same regions"


def test_modes_of_cuda_graphs_are_those_without() -> None:
    modes = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
    assert [base_mode(m) for m in modes] == ["default"] * 3 + ["max-autotune-no-cudagraphs"] * 2


def decided(db: str, workloads: Sequence[Workload], mode: str = "default") -> str:
    """Store the verdict that ``workloads`` are left in the graph of :func:`step`; gives the graph."""
    trial = Trial()
    torch.compile(step, backend=trial_backend(trial))(X)
    torch._dynamo.reset()
    ((graph, device),) = trial.graphs
    assert device == "cpu"
    left = tuple(w.fingerprint for w in workloads)
    with Store.open(db) as store:
        device, env = store.put_device(identify("cpu")), store.put_environment(environment("cpu"))
        store.put_verdicts([Verdict(graph, device, env, mode, left, {}, time.time())])
    autotune_counters()
    return graph


def autotune_counters() -> dict[str, int]:
    from autotune.runtime.deployment import deployment

    found = {name: n for name, n in autotune.counters().items() if n}
    deployment().reset_counters()
    return found


def deployed() -> dict[str, int]:
    torch._dynamo.reset()
    torch.testing.assert_close(autotune.compile(step)(X), step(X))
    return autotune_counters()


@pytest.fixture
def tanh(tune: Tune) -> Workload:
    (found,) = [w for w in tune(step, (X,)) if "tanh" in w.label]
    return found


def test_verdict_leaves_regions_without_recording_misses(tanh: Workload, db: str) -> None:
    assert deployed() == {"graphs": 1, "hits": 2}
    decided(db, [tanh])
    assert deployed() == {"graphs": 1, "hits": 1, "left": 1}
    with Store.open(db) as store:
        assert store.misses() == []


def test_a_verdict_of_another_mode_or_graph_is_not_used(tanh: Workload, db: str) -> None:
    decided(db, [tanh], "max-autotune-no-cudagraphs")
    assert deployed() == {"graphs": 1, "hits": 2}
    torch._dynamo.reset()
    other = torch.compile(lambda x: torch.softmax(torch.tanh(x) @ W, -1).view(-1) @ W.new_ones(128), backend="autotune")
    decided(db, [tanh])
    other(X)
    assert "left" not in autotune_counters()


@pytest.mark.usefixtures("default_numerics")
@pytest.mark.parametrize("under", ["highest", "medium"])
def test_a_verdict_is_obeyed_under_the_precision_that_it_was_taken_under(
    under: str, tanh: Workload, db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_float32_matmul_precision(under)
    graph = decided(db, [tanh])
    assert (graph == fingerprint(step)) == (under == "highest"), "one without settings is of the default ones"
    assert deployed() == {"graphs": 1, "hits": 1, "left": 1}
    torch.set_float32_matmul_precision("medium" if under == "highest" else "highest")
    assert deployed() == {"graphs": 1, "hits": 2}
    torch.backends.cudnn.benchmark = True  # of no kernel on a CPU
    torch.set_float32_matmul_precision(under)
    assert deployed() == {"graphs": 1, "hits": 1, "left": 1}


@pytest.mark.usefixtures("default_numerics", "db")
def test_code_in_the_cache_of_a_graph_is_of_one_setting() -> None:
    """Inductor's own key has some of these settings, and not cuDNN's."""

    def identity() -> object:
        return passes({}, "default")["post_grad_custom_post_pass"].uuid()

    before = identity()
    assert identity() == before
    torch.backends.cudnn.benchmark = True
    assert identity() != before


def test_trial_leaves_the_given_families_despite_stored_verdicts(tanh: Workload, db: str) -> None:
    decided(db, [tanh])
    trial = Trial()
    torch.compile(step, backend=trial_backend(trial))(X)
    assert autotune_counters() == {"graphs": 1, "hits": 2}
    assert len(trial.families) == 2
    assert trial.families[tanh.fingerprint].inductor_us == 15.0
    torch.compile(step, backend=trial_backend(Trial(frozenset(trial.families))))(X)
    assert autotune_counters() == {"graphs": 1, "left": 2}, "Dynamo takes it for another backend"


def test_a_damaged_verdict_is_passed_over_with_one_warning(
    tanh: Workload, db: str, caplog: pytest.LogCaptureFixture
) -> None:
    decided(db, [tanh])
    with sqlite3.connect(db) as connection:
        assert connection.execute("UPDATE autotune_verdicts SET \"left\" = '5'").rowcount == 1
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert deployed() == {"graphs": 1, "hits": 2}
    told = [r.getMessage() for r in caplog.records if "verdict" in r.getMessage()]
    assert len(told) == 1
    assert "search its program again" in told[0]

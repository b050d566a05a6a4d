"""A task's caches, which the search shares with its prefetching thread."""

from __future__ import annotations

import random

import pytest

from autotune.domains.fusion.task import FusionTask
from tests.support import zoo


def test_a_rejection_is_computed_once_in_all_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    task = FusionTask(zoo.workload("layer_norm_backward"), "cuda:0", "sm_90", 132)
    good = task.normalize(task.default())
    space, rng = task.space(), random.Random(0)
    drawn = (task.normalize(space.sample(rng)) for _ in range(2000))
    bad = next(config for config in drawn if task.reject(config))
    why = task.reject(bad)
    assert task.reject(good) is None
    asked: list[object] = []
    monkeypatch.setattr(FusionTask, "_why_not", lambda self, config: asked.append(config))
    other = task.under("", {})
    assert other.reject(dict(good)) is None
    assert other.reject(dict(bad)) == why
    assert other.reject({**good, "plan": "none such"}) is None
    assert len(asked) == 1


def test_suggestions_are_those_of_the_plan_of_a_method() -> None:
    task = FusionTask(zoo.workload("mean_cross_entropy"), "cuda:0", "sm_90", 132)
    assert task.seeds() is task.seeds()
    other = task.under("greedy", {})
    assert other.seeds() == FusionTask(task.workload, "cuda:0", "sm_90", 132).under("greedy", {}).seeds()

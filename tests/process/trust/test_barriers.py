"""Stored configurations with barriers over the whole grid do no harm: they are refused, or run without the barrier."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.compiler.assemble import bind
from autotune.compiler.schedules.configurations import improper
from autotune.domains.fusion.task import FusionTask
from autotune.errors import BuildError
from autotune.runtime.ladder import Level
from autotune.task import Artifact, Config
from tests.process.trust.test_cuda import look_up, rewritten, stored
from tests.support.hostile import workload_of

LACKS = "grid barriers, which this autotune lacks"
BARRIERS = [
    ({"finish": "barrier"}, f"finish asks for {LACKS}"),
    ({"plan": "r1 > o0"}, f"its plan has {LACKS}"),
]


@functools.cache
def sums() -> FusionTask:
    """A region of one group, whose sums over all rows are finished from partial results."""
    return FusionTask(workload_of(lambda x: x.sum(0), torch.ones(4096, 512)), "cuda:0", "sm_90", 132)


@functools.cache
def built() -> tuple[Config, Artifact]:
    config = sums().default()
    artifact = sums().build(config)
    assert len(artifact.kernels) == 2
    return config, artifact


def as_earlier(data: dict[str, Any]) -> None:
    """Scratch as earlier versions described it: with a third element, true for a barrier's counter."""
    data["scratch"] = [[*described, False] for described in data["scratch"]]


def test_stored_finish_by_a_kernel_equals_the_default(db: Path) -> None:
    config, artifact = built()
    earlier = config | {"finish": "kernel"}
    assert improper({f"g1.{name}": choice for name, choice in earlier.items()}, "cuda") == ""
    assert sums().normalize(earlier) == sums().adapt(earlier) == config
    assert sums().reject(earlier) is None
    then = sums().build(earlier)
    assert [k.code for k in then.kernels] == [k.code for k in artifact.kernels]
    stored(db, sums().workload, earlier, then)
    rewritten(db, as_earlier)
    found = look_up(db, sums().workload)
    assert found.level is Level.EXACT
    assert found.schedule is not None
    assert found.schedule.artifact == then


@pytest.mark.parametrize(("changes", "words"), BARRIERS)
def test_a_configuration_with_a_grid_barrier_is_no_hit(changes: Config, words: str, db: Path) -> None:
    config, artifact = built()
    earlier = config | changes
    assert improper(earlier, "cuda") == words
    stored(db, sums().workload, earlier, bind(artifact, sums().graph, earlier))
    found = look_up(db, sums().workload)
    assert found.level is Level.NONE
    assert words in found.reason


def test_the_counter_of_a_grid_barrier_is_no_hit(db: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, artifact = built()
    stored(db, sums().workload, config, artifact)
    rewritten(db, lambda data: data["scratch"].append(["int32", 32, True]))
    assert look_up(db, sums().workload).level is Level.NONE
    assert "another version of autotune (its kernels have grid barriers)" in caplog.text


@pytest.mark.parametrize(("changes", "words"), BARRIERS)
def test_a_search_goes_on_without_the_grid_barrier(changes: Config, words: str) -> None:
    config = built()[0]
    earlier = config | changes
    with pytest.raises(BuildError, match=words):
        sums().build(earlier)
    fitted = sums().adapt(earlier)
    if "plan" in changes:  # of which nothing is left
        assert fitted is sums().predict(earlier) is None
        assert "is not a root" in (sums().reject(earlier) or "")
    else:
        assert fitted == config

"""The small regions that warm a search's processes up."""

from __future__ import annotations

import pytest

from autotune.domain import domain_of, open_task
from autotune.domains.fusion.bench import FusionBench


@pytest.mark.parametrize("number", [0, 1, 15])
def test_a_sample_is_a_whole_region(number: int) -> None:
    domain = domain_of("fusion")
    sample = domain.sample(number)
    assert sample is not None
    assert not domain.damage(sample), "its program computes its graph"
    assert sample.fingerprint != getattr(domain.sample(number + 1), "fingerprint", "")
    bench, task = FusionBench(sample, "cpu"), open_task(sample, "cpu")
    run = bench.load(task.normalize(task.default()), task.build(task.default()))
    assert bench.verify(run, 0).ok
    assert set(bench.baselines()) == {"eager", "inductor"}

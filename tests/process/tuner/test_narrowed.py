"""A user's narrowed space confines what is deployed, whatever else is measured or stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autotune import api
from autotune.device import usable_processors
from autotune.domains.fusion.program_spec import workloads_of
from autotune.measure.policy import Policy
from autotune.space import Parameter, Space, holds
from autotune.store import Store
from autotune.task import Config, config_key
from autotune.tuner.result import Result
from tests.support.toy.toy_domain import takes_us, workload

# Block 8 is the best, and any candidate beats the baseline.
SPEC = {"slow_us": 4000, "eager_us": 200_000}
Search = Callable[..., Result]


@pytest.fixture
def tune(store: Store, policy: Policy) -> Search:
    def run(space: Path | None = None, **options: object) -> Result:
        given = {"trials": 50, "patience": 0, "sampler": "brute", "policy": policy, **options}
        file = str(space) if space else None
        return api.tune_workloads([workload(**SPEC)], "cpu", store, space_file=file, **given)[0]  # type: ignore[arg-type]

    return run


def space_file(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_neither_the_default_nor_a_stored_schedule_is_deployed_from_outside(
    tune: Search, store: Store, tmp_path: Path
) -> None:
    def final_times() -> dict[str, float]:
        return {config_key(m.config): m.when for m in store.measurements(stage="final")}

    wide = tune()
    assert wide.best is not None
    assert (wide.winner, wide.best["block"], wide.measured) == ("autotune", 8, 12)
    assert wide.deployed_us == takes_us(workload(**SPEC).spec, wide.best)

    mine = space_file(tmp_path, "block = [1, 2]")
    narrow = tune(mine)
    assert narrow.measured == 0
    assert narrow.best is not None
    assert (narrow.winner, narrow.best["block"]) == ("autotune", 2)
    (schedule,) = store.schedules(artifacts=True)
    assert (schedule.config, schedule.latency_us) == (narrow.best, narrow.deployed_us)
    assert schedule.artifact is not None
    assert schedule.artifact.kernels[0].launch["block"] == 2
    assert schedule.space
    times = [takes_us(workload(**SPEC).spec, {"how": how, "block": b}) for how, b in (("rows", 4), ("vector", 2))]
    assert [narrow.default_us, narrow.deployed_us] == times  # the default is outside, and compared all the same
    before = final_times()
    again = tune(mine)
    assert (again.best, again.deployed_us, final_times()) == (narrow.best, narrow.deployed_us, before)

    wide = tune()  # the narrow decision does not hold for all candidates
    assert wide.best is not None
    assert wide.best["block"] == 8
    (schedule,) = store.schedules()
    assert (schedule.config, schedule.space) == (wide.best, "")
    # The wide winner is in here, without unmeasured candidates: nothing is compared again.
    inside = tune(space_file(tmp_path, "block = [8]"))
    assert (inside.best, inside.deployed_us) == (wide.best, wide.deployed_us)


def test_a_copy_of_the_whole_space_changes_nothing(tune: Search, store: Store, tmp_path: Path) -> None:
    result = tune(space_file(tmp_path, 'how = ["vector", "rows"]'), trials=1)
    assert result.best == {"how": "rows", "block": 4}
    assert store.schedules()[0].space == ""


def test_the_nearest_point_to_the_default_comes_next(tune: Search, store: Store, tmp_path: Path) -> None:
    result = tune(space_file(tmp_path, "block = [1, 16]"), trials=2, sampler="tpe")
    assert [m.config["block"] for m in store.measurements(stage="screen")][:2] in ([4, 1], [4, 16])
    assert result.ok


def test_only_candidates_of_the_space_count_as_a_result(tune: Search, store: Store, tmp_path: Path) -> None:
    mine = space_file(tmp_path, "block = [1]")
    result = tune(mine, trials=1)
    assert not result.ok
    assert result.error == f"no candidate of {mine} was tried"
    assert store.schedules() == []


def test_a_value_without_effect_is_no_matter() -> None:
    space = Space((Parameter("how", ("vector", "rows")), Parameter("block", (8, 16)), Parameter("tile", (4,))))

    def normalize(c: Config) -> Config:
        return {**c, "block": 1, "tile": 0} if c["how"] == "rows" else c

    assert holds(space, {"how": "rows", "block": 1, "tile": 0}, normalize)
    assert holds(space, {"how": "vector", "block": 16, "tile": 4}, normalize)
    assert not holds(space, {"how": "vector", "block": 1, "tile": 4}, normalize)
    assert not holds(space, {"how": "vector", "block": 8, "tile": 0}, normalize)
    assert not holds(space, {"how": "rows", "block": 1}, normalize)


@pytest.mark.skipif(usable_processors() < 2, reason="the default has one thread here, which is in the space")
def test_one_thread_on_the_cpu(store: Store, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path / "cache"))
    ((region, _),) = workloads_of(lambda x: torch.softmax(x, -1), (torch.zeros(256, 96),))
    mine = space_file(tmp_path, "[cpu.threads]\nchoices = [1]\n")
    quick = replace(policy, build_s=60.0)
    (result,) = api.tune_workloads(
        [replace(region, source={})], "cpu", store, trials=3, policy=quick, space_file=str(mine)
    )
    measured = store.measurements(stage="screen")
    assert measured[0].config["threads"] != 1  # the default
    assert all(m.config["threads"] == 1 for m in measured[1:])
    assert result.best is not None
    assert result.best["threads"] == 1
    (schedule,) = store.schedules()
    won = schedule.winner == "autotune"  # or eager is faster, which is left to the host here
    assert schedule.config == (result.best if won else None)

"""Look-ups: levels, nearest rows, misfits, and side effects that they must not have."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import autotune
from autotune.device import environment, identify
from autotune.errors import UserError
from autotune.ir.graph import Graph
from autotune.runtime.deployment import Deployment, deployment, use
from autotune.runtime.fitting import misfit
from autotune.runtime.ladder import Level
from autotune.runtime.match import match
from autotune.runtime.settings import COUNTERS, Settings
from autotune.store import Store
from autotune.store.records import Schedule
from autotune.workload import Workload
from tests.support.deployment import Tune, baseline
from tests.support.runtime.models import Block


def softmax(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x * 3, -1)


def test_levels(tune: Tune) -> None:
    (stored,) = tune(softmax, (torch.randn(32, 48),))
    exact = autotune.lookup(softmax, (torch.randn(32, 48),))
    assert exact.level is Level.EXACT
    assert (exact.hits, exact.misses) == (1, 0)
    assert exact[0].latency_us == 10.0
    assert exact[0].baselines == {"eager": 20.0, "inductor": 15.0}
    assert exact[0].speedup == 1.5
    other = autotune.lookup(softmax, (torch.randn(4, 16, 48),))
    assert other.level is Level.OTHER_ROWS
    assert other[0].tuned == stored
    assert "32 rows" in other[0].reason
    none = autotune.lookup(softmax, (torch.randn(32, 40),))
    assert none.level is Level.NONE
    assert none[0].schedule is None
    assert "not tuned" in none[0].reason


def test_the_nearest_number_of_rows_is_taken(tune: Tune) -> None:
    for rows in (8, 64, 512):
        tune(softmax, (torch.randn(rows, 48),))
    for rows, nearest in ((9, 8), (30, 64), (160, 64), (200, 512), (5000, 512)):
        (found,) = autotune.lookup(softmax, (torch.randn(rows, 48),))
        assert found.tuned is not None
        assert found.tuned.extent == nearest


def test_the_worst_region_decides(tune: Tune) -> None:
    model, x = Block().eval(), torch.randn(32, 48)
    with torch.no_grad():
        tune(model, (x,), select=lambda w: "softmax" in w.label)
        result = autotune.lookup(model, (x,))
    assert result.level is Level.NONE
    assert (result.hits, result.misses) == (1, 1)
    assert result.to_json()["match"] == "none"


def test_equal_regions_are_one_entry(tune: Tune) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = softmax(x)
        return softmax(y @ y.T @ y)

    tune(fn, (torch.randn(32, 48),))
    result = autotune.lookup(fn, (torch.randn(32, 48),))
    assert len(result) == 1
    assert result[0].count == result.hits == 2


def test_a_look_up_records_nothing(db: str) -> None:
    assert autotune.lookup(softmax, (torch.randn(8, 48),)).level is Level.NONE
    assert not Path(db).exists()


def test_another_environment(tune: Tune) -> None:
    (stored,) = tune(softmax, (torch.randn(32, 48),))
    device, here = identify("cpu"), environment("cpu")
    patched, minor = replace(here, numba="0.1.2"), replace(here, torch="1.13.0")
    with Store.open() as store:
        assert match(stored, store, device, patched).level is Level.EXACT
        assert match(stored, store, device, patched, rules=Settings(environment="strict")).level is Level.NONE
        assert match(stored, store, device, minor).level is Level.NONE
        assert match(stored, store, replace(device, units=device.units + 1), here).level is Level.NONE


def test_a_baseline_fits_any_rows(tune: Tune) -> None:
    tune(softmax, (torch.randn(32, 48),), edit=baseline("inductor"))
    (found,) = autotune.lookup(softmax, (torch.randn(16, 48),))
    assert found.level is Level.OTHER_ROWS
    assert found.schedule is not None
    assert found.schedule.winner == "inductor"


def test_requirements_of_a_launch(tune: Tune) -> None:
    found: list[Schedule] = []
    (stored,) = tune(softmax, (torch.randn(32, 48),), edit=lambda s: found.append(s) or s)  # type: ignore[func-returns-value]
    tuned = Graph.from_json(stored.spec)
    here = replace(tuned, extents=(30, *tuned.extents[1:]))
    assert misfit(here, tuned, found[0]) == ""
    artifact = found[0].artifact
    assert artifact is not None

    def with_launch(**launch: object) -> Schedule:
        kernel = replace(artifact.kernels[0], code=b"cubin", launch=launch)
        return replace(found[0], artifact=replace(artifact, kernels=(kernel,)))

    assert misfit(here, tuned, with_launch(dynamic=True)) == ""
    assert "one number of rows" in misfit(here, tuned, with_launch(dynamic=False))
    assert "multiple of 4" in misfit(here, tuned, with_launch(dynamic=True, multiple=4))
    many = replace(tuned, extents=(2**27, *tuned.extents[1:]))
    unit = {"dynamic": True, "per_block": 8, "blocks_per_sm": 0}
    assert misfit(many, tuned, with_launch(**unit, inner=1)) == ""  # large tensors of rows that 32 bits can count
    assert "32-bit" in misfit(many, tuned, with_launch(**unit, inner=16))
    assert misfit(many, tuned, with_launch(**unit, inner=16, wide=True)) == ""
    assert "blocks" in misfit(many, tuned, with_launch(**unit | {"per_block": 1}, inner=16, wide=True))
    wider = replace(tuned, extents=(32, 50))
    assert "differ" in misfit(wider, tuned, found[0])


def test_errors_in_one_line(db: str) -> None:
    with pytest.raises(UserError, match="give device="):
        autotune.lookup(lambda: torch.ones(3), ())
    with pytest.raises(UserError, match="cuda"):
        autotune.lookup(softmax, (torch.randn(8, 8),), device="cuda:77")
    Path(db).write_bytes(b"no database at all")
    with pytest.raises(UserError, match=r"tuned\.db"):
        autotune.lookup(softmax, (torch.randn(8, 8),))


def test_counters() -> None:
    deployment().reset_counters()
    deployment().count("hits")
    deployment().count("hits", 2)
    now = autotune.counters()
    assert now.hits == now["hits"] == 3
    assert dict(now)["misses"] == 0
    assert set(now) == set(COUNTERS)
    deployment().count("hits")
    assert now.hits == 3, "a snapshot"
    with pytest.raises(AttributeError, match="no counter"):
        _ = now.nothing
    assert repr(now) == "Counters(hits=3)"


def test_a_callable_that_fails_is_the_users_mistake_in_one_line() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("first line\nsecond line")

    with pytest.raises(UserError, match=r"^broken failed on its inputs: ValueError: first line$"):
        autotune.lookup(broken, (torch.randn(2),), device="cpu")
    with pytest.raises(UserError, match="int, which cannot be called"):
        autotune.lookup(3, (torch.randn(2),), device="cpu")  # type: ignore[arg-type]


def test_a_single_input_needs_no_tuple(tune: Tune) -> None:
    tune(softmax, (torch.randn(32, 48),))
    assert autotune.lookup(softmax, torch.randn(32, 48)).level is Level.EXACT


def test_only_the_nearest_are_tried_and_each_once(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of a family that do not fit cost a plan each: no more than so many, and once a process."""
    import autotune.runtime.fitting as fitting
    import autotune.runtime.match as module

    (stored,) = tune(softmax, (torch.randn(32, 48),))
    tried: list[int] = []

    def refuse(graph: Graph, tuned: Graph, schedule: Schedule) -> str:
        tried.append(tuned.extents[0])
        return "no reason"

    monkeypatch.setattr(fitting, "misfit", refuse)
    monkeypatch.setattr(module, "TRIED", 4)
    device, here = identify("cpu"), environment("cpu")

    def of(rows: int) -> Workload:
        spec = Graph.from_json(stored.spec)
        spec = replace(spec, extents=(rows, *spec.extents[1:]))
        return replace(stored, spec=spec.to_json(), extent=rows)

    with Store.open() as store:
        (first,) = store.schedules(artifacts=True)
        for rows in (1, 2, 4, 8, 16, 64, 128):
            w = of(rows)
            key = replace(first.key, workload=store.put_workload(w))
            store.put_schedule(replace(first, key=key, extent=rows))
        found = match(of(30), store, device, here)
        assert found.level is Level.NONE
        assert tried == [32, 16, 64, 8]
        assert found.reason.count("does not fit") == 3
        assert match(of(30), store, device, here).reason == found.reason
        assert len(tried) == 4
        monkeypatch.setattr(fitting, "misfit", lambda graph, tuned, schedule: "")
        store.put_schedule(replace(first, when=first.when + 1e9, latency_us=1.0), replace=True)
        assert match(of(30), store, device, here).level is Level.OTHER_ROWS, "one that was decided anew is tried anew"


def test_a_database_that_fails_while_a_model_of_symbolic_sizes_runs(
    tune: Tune, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tune(softmax, (torch.randn(32, 48),))
    f = torch.compile(softmax, backend="autotune")
    x = torch.randn(32, 48)
    torch._dynamo.mark_dynamic(x, 0)
    use(Deployment())
    torch.testing.assert_close(f(x), softmax(x))
    assert autotune.counters().hits

    def fail(*given: object, **options: object) -> None:
        raise UserError("the database is gone")

    monkeypatch.setattr(Store, "get_schedule", fail)
    y = torch.randn(40, 48)
    with caplog.at_level(logging.WARNING, logger="autotune"):
        torch.testing.assert_close(f(y), softmax(y))
    assert "the database is gone; no schedule is looked up" in caplog.text


def test_a_result_is_short_where_it_is_printed(tune: Tune) -> None:
    (stored,) = tune(softmax, (torch.randn(32, 48),))
    assert repr(autotune.lookup(softmax, (torch.randn(32, 48),))) == f"LookupResult(cpu, {stored.label}: exact)"

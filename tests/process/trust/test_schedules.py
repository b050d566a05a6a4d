"""A stored configuration is deployed only where every value is one of ours, and is the one that was stored."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.compiler.schedules.configurations import improper, ranges
from autotune.device import environment, identify
from autotune.errors import BuildError, Unsupported
from autotune.ir.graph import Graph
from autotune.runtime.ladder import Level
from autotune.runtime.launch.executor import load_executor
from autotune.runtime.launch.prepared import RegionTensors, TensorSpec
from autotune.runtime.lookup import lookup
from autotune.runtime.match import match
from autotune.space import load_space
from autotune.store import Key, Schedule, Store
from autotune.task import Artifact, Kernel, config_key
from autotune.workload import Workload
from tests.support.hostile import execute, normalised, put_config, softmax, tuned

X = torch.sin(torch.arange(64 * 96) * 0.7).view(64, 96)
_BITS = (7, 8, 15, 16, 31, 32, 62, 63, 64)
BOUNDARIES: tuple[Any, ...] = (
    *(sign * (1 << bits) + off for bits in _BITS for sign in (1, -1) for off in (-1, 0, 1)),
    0, -1, 1.0, 0.5, float("inf"), True, False, "", "1", "registers", "reload", 10**30,
)  # fmt: skip


def deployed(db: Path) -> tuple[Level, str]:
    found = lookup(softmax, X, db=str(db), device="cpu")
    return found.level, found[0].reason


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("column_tile", 2**63 - 1),
        ("column_tile", 2**40),
        ("row_block", 2**31),
        ("row_block", 2**63 - 1),
        ("threads", 10**9),
        ("parts", 2**31),
        ("row_block", True),
        ("row_block", 1.0),
        ("keep", "__import__('os')"),
        ("wide", 1),
        ("plan", 5),
        ("unheard_of", 1),
    ],
)
def test_values_out_of_range_are_no_hit(db: Path, name: str, value: Any) -> None:
    workload, config = tuned(db, softmax, X)
    assert deployed(db)[0] is Level.EXACT
    put_config(db, workload, {**config, name: value})
    level, reason = deployed(db)
    assert level is Level.NONE
    assert "damaged" in reason


def test_a_plan_of_another_graph_is_not_loaded(db: Path) -> None:
    """It is of the right form; that it does not fit shows when it is planned."""
    workload, config = tuned(db, softmax, X)
    put_config(db, workload, {**config, "plan": "r9,o0 / o7"})
    with Store.open(db) as store:
        schedule = store.get_schedule(workload.fingerprint, identify("cpu").fingerprint, environment("cpu"))
    assert schedule is not None
    spec = TensorSpec.of(X)
    with pytest.raises(Unsupported, match="the region has no"):
        load_executor(
            Graph.from_json(workload.spec), schedule, RegionTensors([0], [0], [spec], [spec]), torch.device("cpu")
        )


def test_it_is_reported_once(db: Path, caplog: pytest.LogCaptureFixture) -> None:
    workload, config = tuned(db, softmax, X)
    put_config(db, workload, {**config, "column_tile": 2**63 - 1})
    with caplog.at_level(logging.WARNING, logger="autotune"):
        deployed(db)
        deployed(db)
    assert sum("column_tile = 9223372036854775807 is out of range" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize("name", sorted(ranges("cpu")))
def test_accepted_boundary_values_give_right_results(name: str, db: Path) -> None:
    """Every boundary value is refused, or its kernel computes what it should."""
    workload, config = tuned(db, normalised, X)
    want, spec = normalised(X), TensorSpec.of(X)
    limits = ranges("cpu")[name]
    edges = () if limits is None or isinstance(limits[0], str) else (*limits, int(limits[1]) + 1, int(limits[0]) - 1)
    graph = Graph.from_json(workload.spec)
    taken = 0
    for value in (*BOUNDARIES, *edges):
        changed = {**config, name: value}
        schedule = Schedule(Key("", "", "", ""), changed, 1.0, {}, Artifact("cpu", (Kernel("cpu_0"),)))
        if improper(changed, "cpu"):
            with pytest.raises(BuildError, match="damaged"):
                load_executor(graph, schedule, RegionTensors([0], [0], [spec], [spec]), torch.device("cpu"))
            continue
        taken += 1
        run = load_executor(graph, schedule, RegionTensors([0], [0], [spec], [spec]), torch.device("cpu"))
        out = torch.full_like(X, -7.0)
        run.run_into([X], [out])
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    assert taken


@pytest.mark.parametrize("side", ["cpu", "cuda"])
def test_everything_that_a_search_tries_is_let_in(side: str) -> None:
    for parameter in load_space("fusion", side):
        for choice in parameter.choices:
            assert improper({parameter.name: choice, f"g12.{parameter.name}": choice}, side) == ""
        assert improper({parameter.name: None}, side)  # type: ignore[dict-item]
    assert improper({"threads_per_row": 1024, "rows_per_block": 2}, "cuda")
    assert improper({"g1.threads_per_row": 1024, "g1.rows_per_block": 2}, "cuda")


def test_a_configuration_that_was_changed_in_place_is_no_hit(db: Path) -> None:
    """Its values are harmless, and not those that were measured."""
    _, config = tuned(db, softmax, X)
    changed = {**config, "column_tile": 48}
    execute(db, "UPDATE autotune_configs SET params = ?", (json.dumps(changed),))
    with Store.open(db) as store:
        assert store.schedules() == []
        assert "does not match its SHA-256" in store.problems[-1]
    assert deployed(db)[0] is Level.NONE
    execute(db, "UPDATE autotune_configs SET fingerprint = ?", (config_key(changed),))
    execute(db, "UPDATE autotune_schedules SET config = ?", (config_key(changed),))
    assert deployed(db)[0] is Level.EXACT


@pytest.mark.parametrize("baselines", ['{"eager": "x"}', '{"eager": -1}', "[]"])
def test_latencies_that_are_none_are_no_hit(db: Path, baselines: str) -> None:
    tuned(db, softmax, X)
    execute(db, "UPDATE autotune_schedules SET baselines = ?", (baselines,))
    assert deployed(db)[0] is Level.NONE


def test_a_damaged_relative_of_the_family_does_not_stop_a_look_up(db: Path) -> None:
    workload, _ = tuned(db, softmax, X)
    bad = json.loads(json.dumps(workload.spec))
    next(v for v in bad["values"] if v["op"] == "load")["strides"] = [-1, -1]
    other = Workload("fusion", bad, family=workload.family, extent=65)
    with Store.open(db) as store:
        store.put_workload(other)
        execute(db, "UPDATE autotune_schedules SET workload = ?", (other.fingerprint,))
        found = match(workload, store, identify("cpu"), environment("cpu"))
    assert found.level is Level.NONE
    assert "its graph is damaged" in found.reason


def test_a_number_that_no_kernel_takes_is_refused_before_a_kernel_is_printed() -> None:
    for name in ("row_block", "column_tile", "threads", "parts"):
        assert improper({name: 2**31}, "cpu") == f"{name} = {2**31} is out of range"

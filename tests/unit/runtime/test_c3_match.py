"""Levels of a scenario's strategy, the choice of a neighbour, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.device import DeviceIdentity, environment
from autotune.domains.c3.match import C3Level, C3Match, match_scenario, without_search
from autotune.domains.c3.ready import match_from_wire, match_to_wire, searchable
from autotune.domains.c3.scenario import COLLECTIVES, Gemm, Program, Scenario
from autotune.domains.c3.strategy import BASELINES, HostStrategy, Strategy, kernel_of
from autotune.store import Store
from autotune.store.records import Calibration, Key, Schedule
from autotune.task import Artifact, Config, Kernel

MIB = 2**20
HERE = DeviceIdentity("cpu", "some CPU", 8, 16384, count=2)
GPUS = DeviceIdentity("cuda", "some GPU", 132, 143360, count=4, links="NV18")
ENV = environment("cpu")
SCENARIO = Scenario(Gemm(1024, 512, 256, "f32"), "all_gather", 4 * MIB, 2, "f32")
ON_GPUS = Scenario(Gemm(8192, 8192, 8192), "all_gather", 512 * MIB, 4)
ADDING = replace(ON_GPUS, collective="reduce_scatter")
TUNED = HostStrategy(order="gemm_first", engine="copy", copies=2).config()
HOST_NAIVE = BASELINES["cpu"]["naive"]
COPY = Strategy("comm_first", "copy", "comm", ctas=16).config()
SM = Strategy("comm_first", "sm", "comm", ctas=32).config()
KERNELS = Artifact("sm_90", (Kernel("add", b"cubin", {"op": "reduce"}),))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "c3.db") as opened:
        yield opened


def put(
    store: Store,
    scenario: Scenario,
    config: Config | None,
    identity: DeviceIdentity = HERE,
    artifact: Artifact | None = None,
    winner: str = "autotune",
) -> None:
    workload = scenario.workload()
    key = Key(store.put_workload(workload), store.put_device(identity), store.put_environment(ENV), "by hand")
    empty = Artifact("cpu" if identity.kind == "cpu" else "sm_90", ())
    store.put_schedule(
        Schedule(key, config, 100.0, {"sequential": 150.0, "naive": 140.0, "=compute": 90.0},
                 None if config is None else artifact or empty, winner, workload.family, workload.extent)
    )  # fmt: skip


def find(store: Store | None, scenario: Scenario = SCENARIO, identity: DeviceIdentity = HERE) -> C3Match:
    return match_scenario(scenario, store, identity, ENV)


def test_the_very_scenario(store: Store) -> None:
    put(store, SCENARIO, TUNED)
    found = find(store)
    assert (found.level, found.config, found.distance, found.reason) == (C3Level.EXACT, TUNED, 0.0, "")
    assert found.tuned == SCENARIO
    assert found.latency_us == 100.0
    assert found.label == "copy gemm_first copies=2"


def test_nothing_is_known(store: Store) -> None:
    for found in (find(None), find(store)):
        assert found.level is C3Level.DEFAULT
        assert found.config == HOST_NAIVE
        assert found.schedule is None
    assert "no database" in find(None).reason
    assert "not tuned" in find(store).reason


def test_the_calibration_of_an_earlier_version_changes_nothing(store: Store) -> None:
    before = find(store)
    store.put_device(HERE)
    store.put_calibration(Calibration(HERE.fingerprint, "c3", {"some_us": 1.0}))
    assert find(store) == before


@pytest.mark.parametrize(
    ("other", "away"),
    [
        (replace(SCENARIO, nbytes=8 * MIB), 1.0),
        (replace(SCENARIO, nbytes=8 * MIB + 8), None),
        (replace(SCENARIO, compute=Gemm(2048, 512, 128, "f32")), 1.0),
        (replace(SCENARIO, compute=Gemm(1024, 512, 1025, "f32")), None),
        (replace(SCENARIO, compute=Gemm(1024, 512, 256, "f32", "nt")), 0.0),
        (replace(SCENARIO, compute=Gemm(1024, 512, 256, "bf16")), None),
        (replace(SCENARIO, collective="all_to_all"), None),
        (replace(SCENARIO, dtype="bf16"), None),
        (replace(SCENARIO, ranks=4), None),
    ],
)
def test_match_scenario_finds_neighbours_within_the_limit(store: Store, other: Scenario, away: float | None) -> None:
    put(store, other, TUNED)
    found = find(store)
    assert found.distance == away
    if away is None:
        assert found.level is C3Level.DEFAULT
    else:
        assert found.level is C3Level.NEAREST
        assert found.tuned == other
        assert found.config == TUNED
        assert other.label in found.reason


def test_the_nearest_of_several(store: Store) -> None:
    for nbytes, copies in ((2 * MIB, 1), (3 * MIB, 2), (7 * MIB, 4)):
        config = HostStrategy(engine="copy", order="comm_first", copies=copies).config()
        put(store, replace(SCENARIO, nbytes=nbytes), config)
    put(store, replace(SCENARIO, compute=Gemm(1024, 512, 256, "f32", "tn")), HOST_NAIVE)
    assert find(store).config["copies"] == 2, "one of another layout comes after those of the family"
    assert find(store).distance == pytest.approx(0.415, abs=1e-3)
    assert "1.33 times" in find(store).reason


def test_a_baseline_that_won(store: Store) -> None:
    put(store, ON_GPUS, None, GPUS, winner="naive")
    assert find(store, ON_GPUS, GPUS).config == BASELINES["cuda"]["naive"]
    put(store, replace(ON_GPUS, nbytes=256 * MIB), None, GPUS, winner="sequential")
    assert find(store, replace(ON_GPUS, nbytes=200 * MIB), GPUS).config == BASELINES["cuda"]["sequential"]
    put(store, replace(ON_GPUS, nbytes=1024 * MIB), None, GPUS, winner="eager")
    found = find(store, replace(ON_GPUS, nbytes=1024 * MIB), GPUS)
    assert found.level is C3Level.NEAREST
    assert "'eager' is not a strategy" in found.reason


def test_kernels_must_exist(store: Store) -> None:
    put(store, ADDING, COPY, GPUS)
    found = find(store, ADDING, GPUS)
    assert found.level is C3Level.DEFAULT
    assert "kernels are not stored" in found.reason
    put(store, ADDING, COPY, GPUS, KERNELS)
    found = find(store, ADDING, GPUS)
    assert found.level is C3Level.EXACT
    assert found.artifact == KERNELS
    put(store, ON_GPUS, COPY, GPUS)
    assert find(store, ON_GPUS, GPUS).level is C3Level.EXACT, "copies alone need none"
    assert not kernel_of(TUNED, "all_reduce")


def test_strategies_without_a_search() -> None:
    for scenario in (ON_GPUS, ADDING):
        found = without_search(scenario, "cuda", sms=132)
        assert found[-1] == BASELINES["cuda"]["sequential"]
        assert not any(kernel_of(config, scenario.collective) for config in found)
    assert without_search(ADDING, "cuda")[0]["engine"] == "nccl"


def test_a_neighbour_s_strategy_is_fitted(store: Store) -> None:
    chunks = Strategy("comm_first", "copy", "comm", ctas=16, chunks=8).config()
    near, short = (replace(ADDING, nbytes=n * 2048 * 4) for n in (8, 4))
    put(store, near, chunks, GPUS, KERNELS)
    found = find(store, short, GPUS)
    assert found.level is C3Level.DEFAULT
    assert "4096 elements in 8 chunks" in found.reason
    put(store, replace(near, nbytes=6 * 2048 * 4), {"engine": "nccl", "chunks": 3, "order": "comm_first"}, GPUS)
    assert find(store, short, GPUS).config == Strategy(order="comm_first").config(), "normalised, and complete"
    put(store, short, {"engine": "warp drive"}, GPUS)
    assert "no engine 'warp drive'" in find(store, short, GPUS).reason


def test_strategies_of_earlier_versions_run_without_deleted_choices(store: Store) -> None:
    """As a search of an earlier version stored them: batches, streams, panels, pulling, on CPUs chunks."""
    batch = {"order": "gemm_first", "engine": "copy", "launch": "eager", "priority": "comm", "reserve": 0, "ctas": 0,
             "chunks": 4, "panels": 4, "streams": 2, "direction": "pull", "batch": True}  # fmt: skip
    put(store, ON_GPUS, batch, GPUS)
    found = find(store, ON_GPUS, GPUS)
    assert found.level is C3Level.EXACT
    assert found.config == Strategy("gemm_first", "copy", "comm").config()
    put(store, ADDING, {**batch, "ctas": 32, "reserve": 8}, GPUS, KERNELS)
    found = find(store, ADDING, GPUS)
    assert found.level is C3Level.EXACT
    assert found.config == Strategy("gemm_first", "copy", "comm", 8, 32, 4).config()
    put(store, SCENARIO, {**TUNED, "chunks": 8, "panels": 2})
    assert find(store).config == TUNED


def test_kernels_that_only_move_are_not_deployed_any_more(store: Store) -> None:
    put(store, ON_GPUS, SM, GPUS, Artifact("sm_90", (Kernel("copy", b"cubin", {"op": "copy"}),)))
    found = find(store, ON_GPUS, GPUS)
    assert found.level is C3Level.DEFAULT
    assert "kernels that only move data, which this autotune lacks" in found.reason
    put(store, ADDING, SM, GPUS, KERNELS)
    assert find(store, ADDING, GPUS).config == SM


def test_programs_differ_in_bytes_only(store: Store) -> None:
    named = replace(SCENARIO, compute=Program("layer_norm"))
    put(store, named, TUNED)
    assert find(store, replace(named, nbytes=5 * MIB)).level is C3Level.NEAREST
    assert find(store, replace(named, compute=Program("softmax"))).level is C3Level.DEFAULT
    assert searchable(named)
    assert searchable(replace(named, compute=Program("my.model:step", "my.model:inputs")))
    assert not searchable(replace(named, compute=Program("my.model:step")))


def test_other_software(store: Store) -> None:
    put(store, SCENARIO, TUNED)
    patched = replace(ENV, numba="0.1.2")
    for strict, level in ((False, C3Level.EXACT), (True, C3Level.DEFAULT)):
        found = match_scenario(SCENARIO, store, HERE, patched, strict=strict)
        assert found.level is level


def test_a_match_travels_whole(store: Store) -> None:
    put(store, ADDING, COPY, GPUS, KERNELS)
    for found in (find(store, ADDING, GPUS), find(store, replace(ADDING, nbytes=300 * MIB), GPUS), find(None)):
        assert match_from_wire(match_to_wire(found)) == found


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_an_unsearched_scenario_overlaps_all_the_same(collective: str) -> None:
    s = replace(SCENARIO, collective=collective)
    first, *_, last = without_search(s, "cuda", sms=132)
    assert first["order"] != "sequential"
    assert not kernel_of(first, collective)
    assert last["order"] == "sequential"

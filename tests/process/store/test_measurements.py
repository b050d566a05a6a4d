"""Workloads, measurements and the queries over them, on both dialects."""

from __future__ import annotations

import dataclasses
import math

import pytest

from autotune.device import DeviceIdentity
from autotune.store import Key, Measurement, Schedule, Store
from autotune.task import Config, Status
from autotune.tuner.seeds import winners
from autotune.workload import Workload
from tests.support.rows import ENVIRONMENT, FAR, GPU, OTHER_GPU, put_key, workload


def ok(key: Key, config: Config, us: float, stage: str = "screen") -> Measurement:
    return Measurement(
        key, config, Status.OK, stage, latency_us=us, samples=(us, us + 1), noise=0.01, error=0.5, when=1.5
    )


def failed(key: Key, config: Config, status: Status, stage: str = "screen") -> Measurement:
    return Measurement(key, config, status, stage, reason=f"because of {status}", when=1.5)


def test_store_returns_records_by_fingerprint(store: Store) -> None:
    w = workload()
    key = put_key(store, w)
    found = store.get_workload(key.workload)
    assert found is not None
    assert (found, found.label, found.source, found.extent) == (w, w.label, w.source, w.extent)
    assert store.get_device(key.device) == GPU
    assert store.get_environment(key.environment) == ENVIRONMENT
    assert store.get_workload("0" * 64) is store.get_device("0" * 64) is store.get_environment("0" * 64) is None


def test_putting_a_workload_again_updates_its_label_but_never_empties_it(store: Store) -> None:
    w = workload()
    store.put_workload(w)
    store.put_workload(dataclasses.replace(w, label="", source={}))
    assert [f.label for f in store.find_workloads()] == [w.label]
    store.put_workload(dataclasses.replace(w, label="better", source={"calls": [1, 2]}))
    (found,) = store.find_workloads()
    assert (found.label, found.source) == ("better", {"calls": [1, 2]})


def test_a_workload_without_a_family_gets_one(store: Store) -> None:
    """A search of the same region is enough, even with nothing left to search."""
    w = workload()
    bare = dataclasses.replace(w, family="", extent=0)
    schedule = Schedule(put_key(store, bare), {"a": 1}, 5.0, {"eager": 9.0})
    other = dataclasses.replace(schedule, key=put_key(store, workload(2, family="e" * 64)), family="e" * 64, extent=2)
    for decided in (schedule, other):
        store.put_schedule(decided)
    before = store.state()
    store.put_workload(bare)
    assert store.state() == before
    store.put_workload(w)
    assert store.state() != before
    (found,) = store.find_workloads(w.fingerprint)
    assert (found.family, found.extent) == (w.family, 64)
    assert [s.key.workload for s in store.family_schedules(w.family, GPU.fingerprint)] == [w.fingerprint]
    (near,) = store.nearest(w.family, GPU.fingerprint, ENVIRONMENT, 32, limit=4)
    assert (near.workload, near.extent) == (w.fingerprint, 64)
    assert [s.extent for s in store.family_schedules("e" * 64, GPU.fingerprint)] == [2]
    now = store.state()
    store.put_workload(dataclasses.replace(w, family="d" * 64))
    assert store.state() == now, "a family that is known stays"
    assert store.find_workloads(w.fingerprint)[0].family == w.family


def test_find_workloads_by_prefix_and_label(store: Store) -> None:
    a, b = workload(1), workload(2)
    c = Workload("c3", {"x": 1}, label="100%_odd")
    for w in (a, b, c):
        store.put_workload(w)
    assert store.find_workloads(a.fingerprint[:10].upper()) == [a]
    assert store.find_workloads("LAYER_norm f32 2x") == [b]
    assert store.find_workloads("%") == [c]  # a pattern's letters match themselves
    assert store.find_workloads("zzz") == []


def test_a_measurement_comes_back_as_it_was(store: Store, key: Key) -> None:
    m = Measurement(
        key, {"threads": 64, "keep": "registers", "online": True, "x": 0.5}, Status.OK, "final", 12.5,
        (12.0, 12.5, 13.0), 0.08, 0.25, "", "run7", 1.25, 0.5, 99.5,
    )  # fmt: skip
    assert store.add_measurement(m)
    assert store.get_measurement(key, m.config, "final") == m
    assert store.measurements() == [m]
    assert store.get_measurement(key, m.config, "screen") is None
    assert store.get_measurement(key, {**m.config, "threads": 65}, "final") is None


def test_the_first_measurement_stands(store: Store, key: Key) -> None:
    assert store.add_measurement(ok(key, {"a": 1}, 5.0))
    assert not store.add_measurement(ok(key, {"a": 1}, 1.0))
    assert not store.add_measurement(failed(key, {"a": 1}, Status.CRASHED))
    assert store.add_measurement(ok(key, {"a": 1}, 6.0, "repeat"))
    assert [m.latency_us for m in store.measurements()] == [5.0, 6.0]


def test_the_store_dates_rows_without_a_date(store: Store, key: Key) -> None:
    store.add_measurement(dataclasses.replace(ok(key, {"a": 1}, 5.0), when=0.0))
    assert store.measurements()[0].when > 1.7e9


def test_measurements_need_the_rows_of_their_key(store: Store, key: Key) -> None:
    for name in ("workload", "device", "environment"):
        stranger = dataclasses.replace(key, **{name: "0" * 64})
        with pytest.raises(ValueError, match="put the workload, device and environment"):
            store.add_measurement(ok(stranger, {"a": 1}, 5.0))
    assert store.measurements() == []


@pytest.mark.parametrize("us", [None, math.nan, math.inf, 0.0, -1.0])
def test_an_ok_measurement_needs_a_latency(store: Store, key: Key, us: float | None) -> None:
    with pytest.raises(ValueError, match="needs a latency"):
        store.add_measurement(Measurement(key, {"a": 1}, Status.OK, latency_us=us))
    assert store.measurements() == []


def test_failures_keep_any_reason(store: Store, key: Key) -> None:
    m = Measurement(key, {"a": 1}, Status.WRONG_RESULT, error=math.nan, reason="NUL \0, ünïcode, " + "x" * 50_000)
    assert store.add_measurement(m)
    (found,) = store.measurements()
    assert found.reason.startswith("NUL \\0, ünïcode, xxx")
    assert len(found.reason) == 20_000
    assert found.error == math.inf  # verification was reached and failed: not None
    assert (found.latency_us, found.noise, found.samples) == (None, None, ())


def test_every_filter_of_measurements(store: Store, key: Key) -> None:
    other = put_key(store, workload(2), OTHER_GPU)
    for i in range(3):
        store.add_measurement(ok(key, {"i": i}, 5.0 + i))
    store.add_measurement(ok(key, {"i": 0}, 5.5, "repeat"))
    store.add_measurement(failed(other, {"i": 0}, Status.TIMEOUT))
    assert len(store.measurements()) == 5
    assert len(store.measurements(workload=key.workload)) == 4
    assert len(store.measurements(device=other.device)) == 1
    assert len(store.measurements(environment=key.environment, policy=key.policy)) == 5
    assert len(store.measurements(policy="q")) == 0
    assert [m.stage for m in store.measurements(stage="repeat")] == ["repeat"]
    assert [m.key for m in store.measurements(status=Status.TIMEOUT)] == [other]
    assert [m.config["i"] for m in store.measurements(workload=key.workload, stage="screen", limit=2)] == [1, 2]


def test_best_takes_each_candidates_latest_stage(store: Store, key: Key) -> None:
    store.add_measurement(ok(key, {"lucky": 1}, 1.0))
    store.add_measurement(ok(key, {"lucky": 1}, 9.0, "repeat"))
    store.add_measurement(ok(key, {"steady": 1}, 5.0))
    store.add_measurement(ok(key, {"steady": 1}, 5.2, "repeat"))
    store.add_measurement(ok(key, {"steady": 1}, 5.1, "final"))
    store.add_measurement(ok(key, {"slow": 1}, 20.0))
    assert [(m.config, m.latency_us) for m in store.best(key, n=10)] == [
        ({"steady": 1}, 5.1), ({"lucky": 1}, 9.0), ({"slow": 1}, 20.0),
    ]  # fmt: skip
    assert [m.latency_us for m in store.best(key)] == [5.1]
    assert store.best(put_key(store, workload(3))) == []


def test_best_leaves_out_failures_of_any_stage(store: Store, key: Key) -> None:
    store.add_measurement(ok(key, {"a": 1}, 1.0))
    store.add_measurement(failed(key, {"a": 1}, Status.WRONG_RESULT, "repeat"))
    store.add_measurement(ok(key, {"b": 1}, 2.0))
    assert [m.config for m in store.best(key, n=5)] == [{"b": 1}]


def test_status_counts_candidates_once(store: Store, key: Key) -> None:
    store.add_measurement(ok(key, {"a": 1}, 1.0))
    store.add_measurement(ok(key, {"a": 1}, 1.0, "repeat"))
    store.add_measurement(ok(key, {"b": 1}, 1.0))
    store.add_measurement(failed(key, {"b": 1}, Status.TIMEOUT, "repeat"))
    for i, status in enumerate(s for s in Status if s != Status.OK):
        store.add_measurement(failed(key, {"i": i}, status))
    expected = {str(s): 1 for s in Status}
    assert store.status_counts(key) == {**expected, "timeout": 2}


def test_neighbours_prefer_the_same_device_then_the_nearest(store: Store) -> None:
    here = put_key(store, workload(64))
    store.add_measurement(ok(here, {"c": 0}, 1.0))
    for rows, us in ((32, 4.0), (1024, 5.0)):
        store.add_measurement(ok(put_key(store, workload(rows)), {"c": rows}, us))
        store.add_measurement(failed(put_key(store, workload(rows)), {"bad": 1}, Status.CRASHED))
    store.add_measurement(ok(put_key(store, workload(32), OTHER_GPU), {"c": 33}, 0.1))
    store.add_measurement(ok(put_key(store, workload(65), OTHER_GPU), {"c": 65}, 0.2))
    store.add_measurement(ok(put_key(store, workload(7, family="g" * 64)), {"c": 7}, 0.1))

    def configs(**options: int) -> list[object]:
        found = store.neighbours("f" * 64, here.device, here.workload, **options)
        assert all(w.fingerprint == m.key.workload for w, m in found)
        return [m.config["c"] for _, m in found]

    assert configs() == [32, 1024, 65]
    assert configs(extent=900) == [1024, 32, 65]
    assert configs(extent=900, limit=1) == [1024]
    assert store.neighbours("", here.device) == []


def test_the_best_of_other_places(store: Store) -> None:
    """By devices in turn, without the key of the look-up, other workloads, and failures there."""
    here = put_key(store)
    store.add_measurement(ok(here, {"own": 1}, 0.1))
    store.add_measurement(ok(put_key(store, workload(65)), {"other": 1}, 0.1))
    there, newer = put_key(store, device=OTHER_GPU), put_key(store, env=FAR)
    for n in range(4):
        store.add_measurement(ok(there, {"there": n}, 5.0 + n))
        store.add_measurement(ok(newer, {"newer": n}, 9.0 + n))
    store.add_measurement(ok(there, {"there": 2}, 0.5, "final"))
    store.add_measurement(ok(there, {"lucky": 1}, 0.2))
    store.add_measurement(failed(there, {"lucky": 1}, Status.WRONG_RESULT, "final"))
    found = [m.config for m in store.under_other_keys(here, 1)]
    assert sorted(found[:2], key=str) == [{"newer": 0}, {"there": 2}]
    assert {"lucky": 1} not in found
    assert {"own": 1} not in found
    assert winners(store, here) == [{"newer": 0}, {"newer": 1}, {"newer": 2}]  # this device, other software
    cpu = DeviceIdentity("cpu", "Test CPU", 2, 24576, "x86_64", threads=2)
    store.add_measurement(ok(put_key(store, device=cpu), {"cpu": 1}, 0.1))
    twin = dataclasses.replace(GPU, name="NVIDIA Twin")
    assert winners(store, put_key(store, device=twin)) == [
        {"own": 1},
        {"newer": 0},
        {"newer": 1},
    ]  # of its architecture
    assert winners(store, put_key(store, device=dataclasses.replace(cpu, units=1))) == [{"cpu": 1}]


def test_overview_and_stats(store: Store, key: Key) -> None:
    assert store.stats()["speedup_geomean"] is None
    store.add_measurement(ok(key, {"a": 1}, 4.0))
    store.add_measurement(ok(key, {"a": 1}, 4.5, "repeat"))
    store.add_measurement(failed(key, {"b": 1}, Status.TIMEOUT))
    (line,) = store.overview()
    assert (line.label, line.device_name, line.measured, line.failed) == (workload().label, GPU.name, 2, {"timeout": 1})
    assert (line.best_us, line.winner, line.speedup) == (4.5, None, None)
    stats = store.stats()
    assert stats["measurements"] == {"ok": 2, "timeout": 1}
    assert stats["rows"]["autotune_configs"] == 2
    assert stats["bytes"] > 10_000

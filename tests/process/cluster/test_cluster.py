"""A search on a real Ray cluster whose nodes come and go. Candidates are measured by a formula (:mod:`lane_domain`)."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from autotune import api
from autotune.measure.blame import Blame
from autotune.measure.child import ChildDied
from autotune.measure.pool import Built
from autotune.store import Store
from autotune.tuner.cluster import building
from autotune.tuner.cluster import engine as engines
from autotune.tuner.cluster.building import ClusterPool
from autotune.tuner.cluster.cluster import Cluster
from autotune.tuner.cluster.engine import Engine
from autotune.tuner.result import Progress
from autotune.workload import Workload
from tests.support.ray_cluster import LocalCluster, until
from tests.support.toy.policy import QUICK
from tests.support.toy.toy_domain import workload as toy

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("formula")]
ALL: dict[str, Any] = {"patience": 0, "sampler": "random", "policy": QUICK}


def measured(log: Path) -> list[tuple[str, str, str]]:
    """Process, workload and candidate of each first measurement."""
    lines = [line.split(" ", 2) for line in log.read_text().splitlines()]
    return [(pid, workload, config) for pid, workload, config in lines]


def rows(store: Store) -> dict[str, float | None]:
    return {f"{m.key.workload} {m.config}": m.latency_us for m in store.measurements(stage="screen")}


def test_a_node_is_lost_and_another_joins(
    ray_cluster: LocalCluster, cluster: Cluster, store: Store, log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing measured is lost, nothing is measured twice but what the lost node had in hand."""
    works = [toy(rows=r, log=str(log), pause_s=0.3) for r in range(16, 34)]  # enough for the new node to start
    events: list[str] = []
    before: dict[str, Any] = {}

    def progress(state: Progress) -> None:
        lines = measured(log) if log.exists() else []
        if not events and len({pid for pid, _, _ in lines}) == 4 and len(lines) >= 12:
            before.update(rows(store))
            ray_cluster.kill(ray_cluster.nodes.pop(0))
            events.append("lost")
        elif events == ["lost"]:
            ray_cluster.nodes.append(ray_cluster.add())
            events.append("joined")

    found = api.tune_workloads(works, "cpu", store, trials=6, cluster=cluster, progress=progress, **ALL)
    assert events == ["lost", "joined"]
    assert [r.workload for r in found] == [w.fingerprint for w in works]
    assert all(r.ok and r.winner == "autotune" and not r.error for r in found)
    assert before.items() <= rows(store).items()
    assert len(before) >= 8
    assert store.stats()["claims"] == 0
    each = Counter((workload, config) for _, workload, config in measured(log))
    again = [key for key, times in each.items() if times > 1]
    assert len(again) <= 1  # what was measured when the node went, and not yet stored
    assert len({pid for pid, _, _ in measured(log)}) >= 5  # the new node's too
    counts = Counter(m.key.workload for m in store.measurements(stage="screen") if m.status == "ok")
    assert min(counts.values()) >= 6
    assert "goes on elsewhere" in caplog.text
    (run,) = store.runs()
    assert (run.state, {m.run for m in store.measurements()}) == ("done", {run.id})


def test_another_kind_of_device_is_a_search_of_its_own(
    ray_cluster: LocalCluster, cluster: Cluster, store: Store, log: Path
) -> None:
    """A node that may use one processor fewer is another device."""
    every = os.sched_getaffinity(0)
    if len(every) < 2:
        pytest.skip("one processor alone makes no two kinds of devices")
    os.sched_setaffinity(0, {min(every)})
    try:
        odd = ray_cluster.add()
    finally:
        os.sched_setaffinity(0, every)
    try:
        works = [toy(rows=r, log=str(log)) for r in (8, 9, 10)]
        found = api.tune_workloads(works, "cpu", store, trials=3, cluster=cluster, **ALL)
    finally:
        ray_cluster.kill(odd)
    assert len(cluster.kinds) == 2
    assert {len(kind.nodes) for kind in cluster.kinds} >= {1}
    assert len({kind.device for kind in cluster.kinds}) == 2
    for kind in cluster.kinds:
        own = [r for r in found if r.device == kind.label]
        assert [r.workload for r in own] == [w.fingerprint for w in works]
        assert all(r.winner == "autotune" for r in own)
        assert {s.key.workload for s in store.schedules(kind.device)} == {w.fingerprint for w in works}


def test_ctrl_c_ends_all_lanes_in_good_order(cluster: Cluster, store: Store, log: Path) -> None:
    works = [toy(rows=r, log=str(log), pause_s=0.3) for r in (16, 17, 18, 19)]
    sent: list[str] = []

    def progress(state: Progress) -> None:
        if not sent and state.measured >= 3:
            sent.append(state.workload)
            os.kill(os.getpid(), signal.SIGINT)

    found = api.tune_workloads(works, "cpu", store, cluster=cluster, progress=progress, **ALL)
    assert found
    assert all(r.interrupted for r in found)
    assert any(r.winner == "autotune" for r in found)
    assert store.runs()[0].state == "interrupted"
    assert store.stats()["claims"] == 0
    assert 3 <= len(store.measurements(stage="screen")) < 4 * 12


def test_a_workload_that_kills_its_lane_again_and_again_is_told(
    cluster: Cluster, store: Store, tmp_path: Path, log: Path
) -> None:
    fatal = tmp_path / "fatal"
    fatal.touch()
    works = [toy(rows=64, fatal=str(fatal)), toy(rows=32, log=str(log))]
    found = api.tune_workloads(works, "cpu", store, trials=2, cluster=cluster, **ALL)
    assert [r.ok for r in found] == [False, True]
    assert "ended early" in found[0].error
    assert store.stats()["claims"] == 0


def test_several_devices_of_a_lane_are_on_one_node_or_waited_for(ray_cluster: LocalCluster, engine: Engine) -> None:
    """As for C3: Ray's GPUs are numbers here."""
    node = ray_cluster.add(num_gpus=2)
    try:
        (there,) = [n for n in engine.nodes() if n.gpus]
        first = engine.start(there, 2, 1.0)
        second = engine.start(there, 2, 1.0)
        assert until(lambda: first.placed)
        assert not second.placed
        first.send({"unknown": True})
        assert until(lambda: engine.ready([first], 0.2))
        with pytest.raises(ChildDied, match="KeyError"):
            first.poll()
        first.kill()
        assert until(lambda: second.placed)
        second.kill()
    finally:
        ray_cluster.kill(node)


def test_candidates_are_compiled_on_any_node(engine: Engine) -> None:
    remote = engines.remote_builds(20.0, {})
    work = Workload("toy", {**toy().spec, "bad": True})
    with ClusterPool(remote, 4, 20.0) as pool:
        good = [pool.submit(work, "cpu", {"how": "vector", "block": b}) for b in (1, 2, 4, 8)]
        bad = pool.submit(work, "cpu", {"how": "build_error", "block": 1})
        crash = pool.submit(work, "cpu", {"how": "build_crash", "block": 1})
        assert all(f.result().artifact is not None for f in good)
        assert "512 KiB" in bad.result().reason
        assert (crash.result().artifact, crash.result().fault) == (None, Blame.CANDIDATE)
        assert "exited with code 7" in crash.result().reason
        assert not pool._children  # nothing was compiled here


def test_what_no_node_compiles_is_compiled_here(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    """Neither on a node with other compilers, nor where the cluster is gone."""
    monkeypatch.setattr(building, "compilers", lambda: {"autotune": "0"})
    with ClusterPool(engines.remote_builds(20.0, {}), 1, 20.0) as pool:
        built: Built = pool.submit(toy(), "cpu", {"how": "vector", "block": 1}).result()
        assert built.artifact is not None
        assert len(pool._children) == 1
        other = pool.submit(toy(rows=32), "cpu", {"how": "rows", "block": 2}).result()
        assert other.artifact is not None
        assert other.artifact.kernels[0].launch == {"block": 2}

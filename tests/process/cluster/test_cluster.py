"""A search on a real Ray cluster with nodes that start and end, and the output of ``autotune search --ray``.

Candidates are measured by a formula (:mod:`lane_domain`). All tests with a cluster are in this file, since one process
of ``make test`` has a file: two clusters took fifty CPU seconds each.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from autotune import api
from autotune.cli.app import main
from autotune.errors import UserError
from autotune.measure.child import ChildDied
from autotune.measure.outcome import Blame
from autotune.measure.pool import Built
from autotune.store import Store
from autotune.tuner.cluster import actor as building
from autotune.tuner.cluster import engine as engines
from autotune.tuner.cluster.actor import ClusterPool
from autotune.tuner.cluster.cluster import Cluster
from autotune.tuner.cluster.engine import Engine
from autotune.tuner.result import Progress
from autotune.workload import Workload
from tests.process.cluster.conftest import NODES
from tests.process.cluster.test_command import TARGET, refused
from tests.support.ray_cluster import LocalCluster, local_cluster, until
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
    ray_cluster: LocalCluster, cluster: Cluster, store: Store, log: Path, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Nothing measured is lost, nothing is measured twice but what the lost node had in hand.

    The nodes that are left wait for the new one, however long that takes to start.
    """
    wait = tmp_path / "wait"
    works = [toy(rows=r, log=str(log), pause_s=0.1, wait=str(wait)) for r in range(16, 28)]
    events: list[str] = []
    before: dict[str, Any] = {}

    def progress(state: Progress) -> None:
        old = {pid for pid, _, _ in measured(log)} if log.exists() else set()
        if not events and len(old) == NODES and len(measured(log)) >= 3 * NODES:
            before.update(rows(store))
            partial = tmp_path / "partial"
            partial.write_text(" ".join(old))
            partial.rename(wait)
            ray_cluster.kill(ray_cluster.nodes.pop(0))
            events.append("lost")
            ray_cluster.nodes.append(ray_cluster.add())
            events.append("joined")

    found = api.tune_workloads(works, "cpu", store, trials=4, cluster=cluster, progress=progress, **ALL)
    assert events == ["lost", "joined"]
    assert [r.workload for r in found] == [w.fingerprint for w in works]
    assert all(r.ok and r.winner == "autotune" and not r.error for r in found)
    assert before.items() <= rows(store).items()
    assert len(before) >= 2 * NODES
    assert store.stats()["claims"] == 0
    each = Counter((workload, config) for _, workload, config in measured(log))
    again = [key for key, times in each.items() if times > 1]
    assert len(again) <= 1  # what was measured when the node went, and not yet stored
    assert not wait.exists()  # the new node has measured
    assert len({pid for pid, _, _ in measured(log)}) >= NODES + 1
    counts = Counter(m.key.workload for m in store.measurements(stage="screen") if m.status == "ok")
    assert min(counts.values()) >= 4
    assert "continues on another device" in caplog.text
    (run,) = store.runs()
    assert (run.state, {m.run for m in store.measurements()}) == ("done", {run.id})


def test_another_kind_of_device_is_a_separate_search(
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
        works = [toy(rows=8, log=str(log))]  # a lane of each kind
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
    works = [toy(rows=r, log=str(log), pause_s=0.3) for r in (16, 17)]
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
    assert 3 <= len(store.measurements(stage="screen")) < 2 * 12


def test_a_workload_that_kills_its_lane_again_and_again_is_reported(
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


@pytest.mark.slow
def test_a_forked_process_ends_after_a_cluster_was_closed() -> None:
    """Tests that fork run in the same process after these."""
    with local_cluster(0) as other:
        for _ in range(2):  # Ray keeps the client of the newest connection
            Engine(other.address).close()
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join(250)
    child.kill()
    child.join()
    assert child.exitcode == 0


def test_candidates_are_compiled_on_any_node(engine: Engine) -> None:
    remote = engines.remote_builds(20.0, {}, secrets.token_hex(16))
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


def test_who_builds_for_a_search_shares_a_folder_that_the_last_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = "from autotune.tuner.cluster.actor import shared_folder as f; print(f('s'), flush=True); input()"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(2)]
    folders = {process.stdout.readline().strip() for process in both if process.stdout}
    assert folders == {str(tmp_path / "autotune-build-s")}
    (tmp_path / "autotune-build-s" / "made").touch()
    for process, left in zip(both, (True, False), strict=True):
        assert Path(tmp_path, "autotune-build-s", "made").exists()
        process.communicate("\n", timeout=550)
        assert Path(tmp_path, "autotune-build-s").exists() is left


def test_candidates_that_no_node_compiles_are_compiled_here(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    """Neither on a node with other compilers, nor where the cluster is gone."""
    monkeypatch.setattr(building, "compilers", lambda: {"autotune": "0"})
    with ClusterPool(engines.remote_builds(20.0, {}, secrets.token_hex(16)), 1, 20.0) as pool:
        built: Built = pool.submit(toy(), "cpu", {"how": "vector", "block": 1}).result()
        assert built.artifact is not None
        assert len(pool._children) == 1
        other = pool.submit(toy(rows=32), "cpu", {"how": "rows", "block": 2}).result()
        assert other.artifact is not None
        assert other.artifact.kernels[0].launch == {"block": 2}


def test_mistakes_that_the_cluster_tells(
    ray_cluster: LocalCluster, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with contextlib.closing(Engine(ray_cluster.address)) as engine:
        assert until(
            lambda: not any(node.gpus for node in engine.nodes())
        )  # the cluster has noted the end of an earlier test's node
    capsys.readouterr()  # Ray's message of it
    ray = [*TARGET, ray_cluster.address]
    assert "no node of the cluster" in refused(capsys, *ray, "--device", "cuda")
    assert "with --ray, use auto, cpu or cuda" in refused(capsys, *ray, "--device", "cuda:1")
    module = ["search", "fusion", "no.such.module:f", "--inputs", "no.such.module:g", "--ray", ray_cluster.address]
    line = refused(capsys, *module, "--device", "cpu", "--db", postgres_url)
    assert "no module 'no' for" in line
    assert f"(on {socket.gethostname()})" in line
    monkeypatch.setattr(Engine, "host", property(lambda engine: "10.9.9.9"))
    line = refused(capsys, *ray, "--device", "cpu", "--db", str(tmp_path / "x.db"))
    assert "needs PostgreSQL" in line


def test_a_domain_of_ones_own_is_searched_on_the_nodes_and_no_password_is_told_to_anyone(
    ray_cluster: LocalCluster, cluster: Cluster, postgres_url: str, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Neither in the output nor in any file that Ray keeps of the session, also if an actor dies."""
    secret = "hunter2xyz"
    url = postgres_url.replace("autotune@", f"autotune:{secret}@")
    assert secret in url
    monkeypatch.setenv("AUTOTUNE_DOMAINS", "gelu=examples.blocked_gelu.domain")
    words = ["search", "gelu", "65536", "--device", "cpu", "--ray", ray_cluster.address, "--db", url]
    assert main([*words, "--trials", "2", "--json"]) == 0
    out, err = capfd.readouterr()
    answer = json.loads(out)
    assert answer["measured"] == 2
    assert answer["match"] == "exact"
    assert f"{NODES} nodes of the Ray cluster" in err
    assert "2 of 2 measured" in err
    with Store.open(url) as store, pytest.raises(UserError, match="on a node: RuntimeError: no_such thing"):
        cluster.call(_fails, None, store)
    told = capfd.readouterr()
    assert secret not in out + err + told.out + told.err
    files = [path for path in Path(ray_cluster.folder).rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


def _fails(args: object, device: str, store: Store) -> None:
    raise RuntimeError("no_such thing")

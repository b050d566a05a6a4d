"""Calibration and its report: figures from probes, and how the models order what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.cli.app import main
from autotune.compiler.planner.beam import shapes
from autotune.compiler.planner.groups import write_text
from autotune.compiler.planner.plan import make_plan
from autotune.device import DeviceIdentity, Environment, identify
from autotune.domains.fusion import calibrate as module
from autotune.domains.fusion.calibrate import _renamed, _time, figures, probes
from autotune.domains.fusion.task import FusionTask
from autotune.ir.canonical import canonicalize, to_workload
from autotune.ir.inputs import make_inputs
from autotune.ir.oracle import interpret
from autotune.ir.simplify import simplify
from autotune.measure.policy import Policy
from autotune.measure.worker import Measurer, Worker
from autotune.store import Calibration, Key, Measurement, Store
from autotune.task import Config, Status
from autotune.workload import Workload
from benchmarks.search_quality.model_ranks import report, spearman
from tests.unit.compiler.planner.test_beam import MEASURED, F, layer_norm_backward
from tests.unit.compiler.planner.test_latency import softmax

H200 = DeviceIdentity("cuda", "NVIDIA H200", 132, 143360, "9.0")


@pytest.mark.parametrize("side", ["cuda", "cpu"])
def test_every_probe_is_a_workload_with_its_plan(side: str) -> None:
    names = [p.name for p in probes(side)]
    assert len(set(names)) == len(names)
    for probe in probes(side):
        graph, _, outputs = canonicalize(simplify(probe.graph))
        plan = make_plan(graph, side, _renamed(probe.plan, outputs))
        assert len(plan.launches) == {"launches": 8, "through the cache": 2}.get(probe.name, 1)
        if graph.size(range(len(graph.extents))) < 1 << 14:
            assert all(t.isfinite().all() for t in interpret(graph, make_inputs(graph, seed=0)))


def test_figures_follow_from_the_probes() -> None:
    made = {p.name: p for p in probes("cuda")}
    times = {
        "one launch": 2.5,
        "launches": 2.5 + 7 * 1.2,
        "copy 32 MiB": 2.5 + made["copy 32 MiB"].work / 3.9e6,
        "copy 512 MiB": 2.5 + made["copy 512 MiB"].work / 4.2e6,
        "from memory": 6.0,
        "through the cache": 6.0 + 1.2 + made["through the cache"].work / 8e6,
        "light operators": 2.5 + made["light operators"].work / 1.1e7,
    }
    found = figures(list(made.values()), times)
    assert found == pytest.approx({"first_us": 2.5, "next_us": 1.2, "copy_gbs": 4200, "l2_gbs": 8000, "ops_gs": 11000})
    assert "heavy_gs" not in found  # its probe failed: the built-in figure stays
    assert figures(list(made.values()), {}) == {}


@pytest.mark.slow
def test_probes_run_in_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path / "cache"))
    policy = Policy(method="cpu", warmup=1, screen_repeats=3, cold_bytes=1 << 16, quiet_s=0.0)
    workers: list[Worker] = []

    def measurer(task: FusionTask) -> Measurer:
        if not workers:
            workers.append(Worker(task.workload, "cpu", policy))
        workers[0].open(task.workload)
        return workers[0]

    try:
        small = [p for p in probes("cpu") if p.name in ("one launch", "launches")]
        times = {p.name: us for p in small if (us := _time(p, "cpu", measurer)) is not None}
    finally:
        for worker in workers:
            worker.close()
    assert times.keys() == {"one launch", "launches"}
    assert figures(small, times).keys() == {"first_us", "next_us"}


def test_rank_correlation() -> None:
    assert spearman([(1, 10), (2, 20), (3, 30), (4, 45)]) == pytest.approx(1)
    assert spearman([(1, 4), (2, 3), (3, 2), (4, 1)]) == pytest.approx(-1)
    assert spearman([(1, 1), (2, 1), (2, 2), (3, 2)]) == pytest.approx(0.5**0.5)
    assert spearman([(1, 5), (1, 6), (1, 7)]) == 0


def _measured(store: Store, work: Workload, config: Config, us: float) -> None:
    key = Key(
        store.put_workload(work),
        store.put_device(H200),
        store.put_environment(Environment("cuda", "2.11.0", "0.68")),
        "p" * 64,
    )
    store.add_measurement(Measurement(key, config, Status.OK, latency_us=us, samples=(us,)))


def test_the_report_compares_models_with_measurements(tmp_path: Path) -> None:
    with Store.open(tmp_path / "r.db") as store:
        for rows in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768):
            work = softmax(rows, 2048)
            t = FusionTask(work, "cuda:0", target="sm_90", sms=132).under("", {})
            space = t.space()
            configs = [t.default(), *(c for s in t.seeds() if (c := space.project(s)) is not None)]
            different = {tuple(sorted(c.items())): c for c in map(t.normalize, configs)}
            for config in different.values():
                _measured(store, work, config, 1.7 * (t.predict(config) or 0.0))
        found = report(store, H200.fingerprint)
        assert not found["calibrated"]
        assert found["latency_spearman"] == pytest.approx(1)
        assert len(found["workloads"]) == 8
        assert found["delta_spearman"] == pytest.approx(1)
        assert found["workloads_compared"] == 8
        store.put_calibration(Calibration(H200.fingerprint, "fusion", {"copy_gbs": 4150.0}))
        assert report(store, H200.fingerprint)["calibrated"]


def test_plans_of_a_region_are_compared_in_pairs(tmp_path: Path) -> None:
    graph = canonicalize(simplify(layer_norm_backward(16384, 1024)))[0]
    work = to_workload(graph, "layer norm backward")
    texts = [write_text(s) for s in shapes(graph, "cuda", MEASURED, F, 4)]
    assert len(texts) > 1
    with Store.open(tmp_path / "r.db") as store:
        for k, text in enumerate(texts):
            _measured(store, work, {"plan": text}, 40.0 + k)
        found = report(store, H200.fingerprint)
        pairs = len(texts) * (len(texts) - 1) // 2
        assert (found["plan_pairs"], found["plan_pairs_right"]) == (pairs, pairs)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    db = str(tmp_path / "c.db")
    monkeypatch.setattr(module, "calibrate", lambda device, measurer, told: {"copy_gbs": 12.0, "first_us": 8.0})
    assert main(["calibrate", "fusion", "--device", "cpu", "--db", db, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["figures"] == {"copy_gbs": 12.0, "first_us": 8.0}
    with Store.open(db) as store:
        found = store.get_calibration(identify("cpu").fingerprint, "fusion")
        assert found is not None
        assert found.figures["copy_gbs"] == 12.0
    monkeypatch.setattr(module, "calibrate", lambda device, measurer, told: {})
    assert main(["calibrate", "fusion", "--device", "cpu", "--db", db]) == 1
    assert "not measured, so the built-in figure is used" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["calibrate", "nothing"])


def test_a_mistake_in_the_device_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "fusion", "--device", "gpu", "--db", str(tmp_path / "c.db")]) == 2
    assert "unknown device 'gpu'" in capsys.readouterr().err


def test_no_kernel_beats_moving_the_bytes_and_without_a_calibration_that_is_not_known() -> None:
    task = FusionTask(to_workload(canonicalize(simplify(module._copy(1 << 20)))[0], "copy"), "cpu")
    assert task.least_us() is None
    known = task.under("", {"copy_gbs": 10.0, "first_us": 5.0})
    assert known.least_us() == pytest.approx(5.0 + (2 << 22) / 10.0 / 1e3)

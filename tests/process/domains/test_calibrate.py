"""Calibration: on real ranks of a CPU, and on a machine that exists on paper only, whose best strategies are known."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from statistics import geometric_mean
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.domains.c3 import task
from autotune.domains.c3.calibration.calibrate import calibrate
from autotune.domains.c3.calibration.grids import CPU, CUDA, KIB
from autotune.domains.c3.calibration.heuristics import choose
from autotune.domains.c3.calibration.model import Model
from autotune.domains.c3.calibration.probe import COMPUTE, Opened
from autotune.domains.c3.measuring.ranks import Ranks
from autotune.domains.c3.scenario import REDUCING, Gemm, Scenario, parse_bytes, parse_gemm
from autotune.domains.c3.strategy import Strategy
from autotune.measure.worker import WorkerFault
from autotune.task import Artifact, Config
from tests.support import ROOT

RANKS = 4
TABLE = ROOT / "benchmarks" / "c3_scenarios.toml"


def scenarios() -> Iterator[Scenario]:
    """Those of `python -m benchmarks.c3`."""
    table = tomllib.loads(TABLE.read_text())
    for op, classes in table.items():
        if isinstance(classes, dict):
            for cases in classes.values():
                for case in cases.values():
                    yield Scenario(parse_gemm(case["gemm"]), op, parse_bytes(case["bytes"]), RANKS)


class Paper:
    """A machine of formulas: GEMMs run at 700 TFLOP/s or 4 TB/s, copies fast but late, NCCL early but slow. ``copies``
    makes copies faster."""

    def __init__(self, broken: str = "", dies: str = "", copies: float = 1.0) -> None:
        self.ranks = RANKS
        self.copies = copies
        self.broken, self.dies = broken, dies
        self.asked: list[str] = []

    def call(self, function: str, arguments: Mapping[str, Any], timeout_s: float) -> list[Any]:
        if function.endswith(":where"):
            return ["cuda:0"] * self.ranks
        probe = arguments["probe"]
        self.asked.append(probe["name"])
        if self.dies and self.dies in probe["name"]:
            raise WorkerFault("rank 1 is gone")
        gemm = Gemm(**probe["gemm"]) if probe["gemm"] else None
        us, skipped = {}, {}
        for run in probe["runs"]:
            strategy = Strategy.of(run["config"])
            if strategy.engine == self.broken and run["parts"] != "compute":
                skipped[run["name"]] = "no peer access"
                continue
            compute = self.compute(gemm, strategy) if gemm is not None else 0.0
            comm = 0.0
            if run["parts"] != "compute":
                spec = probe["collective"]
                comm = self.comm(spec["op"], spec["numel"] * 2, strategy)
            both = {"compute": compute, "comm": comm}.get(run["parts"])
            us[run["name"]] = self.both(gemm, compute, comm, strategy) if both is None else both
        return [{"us": us, "skipped": skipped}] * self.ranks

    def compute(self, gemm: Gemm, s: Strategy) -> float:
        moved = 2 * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n)
        slow = 132 / (132 - s.reserve) * (1 + 0.01 * (s.panels - 1))
        return 4 + max(gemm.flops / 700e6 * slow, moved / 4e6)

    def comm(self, op: str, nbytes: int, s: Strategy) -> float:
        reducing = 1.4 if op in REDUCING and s.engine == "copy" else 1.0
        start, rate = {"copy": (25, 0.42e6), "nccl": (12, 0.36e6), "sm": (8, 0.30e6)}[s.engine]
        rate *= self.copies if s.engine == "copy" else 1.0
        if s.engine == "nccl" and s.ctas:
            rate *= min(1.0, s.ctas / 24)
        return start + reducing * nbytes / rate + 3 * (s.chunks - 1)

    def both(self, gemm: Gemm | None, compute: float, comm: float, s: Strategy) -> float:
        if s.order == "sequential" or (s.engine != "copy" and s.order == "gemm_first" and not s.reserve):
            return compute + comm
        slow = {"copy": 1.12 if compute > 1500 else 1.02, "nccl": 1.25, "sm": 1.3}[s.engine]
        late = 20.0 if s.order == "comm_first" else 0.0  # the GEMM waits for copies to be issued
        if compute < 300 and s.order == "gemm_first":
            late = 100.0
        if comm <= slow * compute:
            return late + compute + comm * (1 - 1 / slow)
        return late + comm + compute * (slow - 1) * 0.3

    def scenario(self, s: Scenario, config: Mapping[str, Any]) -> float:
        """What a strategy really takes on this machine."""
        strategy = Strategy.of(config)
        assert isinstance(s.compute, Gemm)
        comm = self.comm(s.collective, s.nbytes, strategy)
        return self.both(s.compute, self.compute(s.compute, strategy), comm, strategy)


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on paper needs none, and there may be no GPU to build them for."""
    monkeypatch.setattr(task, "build", lambda scenario, config, device: Artifact("sm_90", ()))


@pytest.fixture(scope="module")
def paper_figures() -> dict[str, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "build", lambda scenario, config, device: Artifact("sm_90", ()))
        return calibrate(Paper())


def test_no_scenario_of_the_suite_is_near_what_is_calibrated() -> None:
    found = list(scenarios())
    assert len(found) == 40
    for s in found:
        assert isinstance(s.compute, Gemm)
        assert s.nbytes not in CUDA.sizes
        for g in CUDA.gemms:
            apart = [abs(math.log2(a / b)) for a, b in zip((s.compute.m, s.compute.n, s.compute.k), (g.m, g.n, g.k),
                                                           strict=True)]  # fmt: skip
            assert max(apart) > 0.3, f"{s.label} is nearly {g.label}"


@pytest.mark.parametrize("copies", [1.0, 0.4])
def test_first_choices_come_near_the_best_on_a_machine_of_known_times(copies: float) -> None:
    """The choice by rule is good on a machine with fast copies, and there the tables hardly improve on it."""
    machine = Paper(copies=copies)
    figures = calibrate(machine)
    over: list[float] = []
    by_rule: list[float] = []
    for s in scenarios():
        chosen = choose(s, figures, "cuda")
        candidates = [machine.scenario(s, c) for c in chosen]
        for order in ("comm_first", "gemm_first", "sequential"):
            candidates += [machine.scenario(s, Strategy(order, engine).config()) for engine in ("copy", "nccl", "sm")]
        over.append(machine.scenario(s, chosen[0]) / min(candidates))
        by_rule.append(machine.scenario(s, choose(s, {}, "cuda")[0]) / min(candidates))
    near = sum(o <= 1.1 for o in over) / len(over)
    assert near >= 0.95
    assert geometric_mean(over) < geometric_mean(by_rule)
    if copies < 1:
        assert sum(o <= 1.1 for o in by_rule) / len(by_rule) < 0.5


def test_predictions_are_close_on_a_machine_of_known_times(paper_figures: dict[str, float]) -> None:
    machine, model = Paper(), Model.of(paper_figures)
    off = []
    for s in scenarios():
        for config in choose(s, paper_figures, "cuda"):
            us = model.predict(s, config)
            assert us is not None
            off.append(abs(math.log(us / machine.scenario(s, config))))
    assert sorted(off)[len(off) // 2] < 0.05
    assert sorted(off)[int(0.9 * len(off))] < 0.15


def test_an_engine_that_does_not_work_is_told_and_never_chosen() -> None:
    told: dict[str, float | None] = {}
    figures = calibrate(Paper(broken="copy"), told.__setitem__)
    assert not any("copy" in name for name in figures)
    assert any("no peer access" in name and seconds is None for name, seconds in told.items())
    s = Scenario(Gemm(8192, 8192, 8192), "all_gather", 512 << 20, RANKS)
    assert choose(s, {}, "cuda")[0]["engine"] == "copy"
    assert choose(s, figures, "cuda")[0]["engine"] == "nccl"


def test_a_collective_is_shared_by_strategies_that_it_cannot_tell_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an all-to-all keeps on the device is copied first or last, as the order says, and so is not shared."""
    made: list[Config] = []

    def open_collective(spec: Any, group: Any, config: Config, artifact: Any) -> Any:
        made.append(config)
        return SimpleNamespace(close=lambda: None, input=torch.zeros(1))

    monkeypatch.setattr("autotune.domains.c3.collectives.open.open_collective", open_collective)
    probe = {"collective": {"op": "all_to_all", "numel": 64, "dtype": "bf16"}}
    with ExitStack() as stack:
        opened = Opened(SimpleNamespace(), probe, stack)  # type: ignore[arg-type]
        plain = Strategy("comm_first", "copy", priority="comm")
        runs = [
            plain,
            replace(plain, order="sequential"),
            replace(plain, reserve=8),
            replace(plain, order="gemm_first"),
        ]
        found = [opened.collective({"config": s.config(), "artifact": None}) for s in runs]
    assert found[0] is found[1] is found[2]
    assert found[3] is not found[0]
    assert [c["order"] for c in made] == ["comm_first", "gemm_first"]


def test_ranks_that_die_cost_a_probe_and_end_the_calibration_the_third_time() -> None:
    one = Paper(dies="all_to_all 48MiB")
    figures = calibrate(one)
    assert "comm_us.all_to_all.copy,push.12MiB" in figures
    assert "comm_us.all_to_all.copy,push.48MiB" not in figures
    assert "comm_us.all_to_all.copy,push.192MiB" in figures
    always = Paper(dies="beside")
    calibrate(always)
    assert sum("beside" in name for name in always.asked) == 3


def test_no_probe_begins_after_the_time_is_up() -> None:
    machine = Paper()
    told: list[str] = []
    figures = calibrate(machine, lambda name, seconds: told.append(name), replace(CUDA, seconds=0.0))
    assert machine.asked == []
    assert figures == {}
    assert all("no time" in name for name in told)


def test_real_ranks_on_a_cpu() -> None:
    grid = replace(
        CPU,
        gemms=(Gemm(384, 384, 384, "f32"),),
        sizes=(64 * KIB, 256 * KIB),
        most=512 * KIB,
        collectives=("all_gather", "reduce_scatter"),
        seconds=60.0,
    )
    told: dict[str, float | None] = {}
    with Ranks(None, "cpu", task.policy("cpu"), ranks=2) as ranks:
        figures = calibrate(ranks, told.__setitem__, grid)
        assert ranks.restarts == 0
    assert None not in told.values(), told
    model = Model.of(figures)
    assert set(model.gemms) == {Gemm(384, 384, 384, "f32")}
    assert set(model.slowdowns) == {"threads=1", "panels=2"}
    ways = {"gloo", "copy,copies=1", "copy,copies=2"}
    assert set(model.comms) == {(op, way) for op in grid.collectives for way in ways}
    assert all([size for size, _ in curve] == [64 * KIB, 256 * KIB] for curve in model.comms.values())
    assert {op for op, _ in model.shares} == set(grid.collectives)
    s = Scenario(Gemm(320, 320, 320, "f32"), "all_gather", 128 * KIB, 2, "f32")
    chosen = choose(s, figures, "cpu")
    assert model.predict(s, chosen[0]) is not None
    assert COMPUTE not in figures

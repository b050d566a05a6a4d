"""Look-ups of CUDA kernels that sum over the rows, for other rows than tuned. They need no GPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autotune.compiler.targets.cpu.columns import LONGEST_ELSEWHERE, parts_for
from autotune.compiler.targets.cpu.schedule import CpuSchedule
from autotune.compiler.targets.cuda import device
from autotune.device import DeviceIdentity, Environment
from autotune.domains.fusion.program_spec import workloads_of
from autotune.domains.fusion.task import FusionTask
from autotune.ir.canonical import to_workload
from autotune.ir.graph import Graph
from autotune.runtime.deployment import deployment
from autotune.runtime.fitting import misfit
from autotune.runtime.ladder import Level, Match
from autotune.runtime.match import match
from autotune.store import Key, Schedule, Store
from autotune.task import Artifact
from autotune.workload import Workload

GPU = DeviceIdentity("cuda", "NVIDIA Test", 12, 143360, "9.0")
ENV = Environment("cuda", torch="2.11.0", numba="0.68.1", numba_cuda="0.30.4", cuda="13.0", driver="580.1")
ROWS, WIDTH = 256, 64


def norm_backward(g: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return g - x * (g * x).sum(-1, keepdim=True), (g * x).sum(0), g.sum(0)


def mean_too(g: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return g - x * (g * x).sum(-1, keepdim=True), g.mean(0)


def spread(g: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """A variance over 256 rows, whatever the number of rows is."""
    h = g - x * (g * x).sum(-1, keepdim=True)
    d = g - g.sum(0) * (1 / ROWS)
    return h, (d * d).sum(0)


def loss(g: Tensor, x: Tensor) -> Tensor:
    return (g * x).sum()


def flat_loss(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return g * x, (g * x).sum()


def workload(fn: Callable[..., object], rows: int) -> Workload:
    ((work, _),) = workloads_of(fn, (torch.ones(rows, WIDTH), torch.ones(rows, WIDTH)))  # type: ignore[arg-type]
    return work


def at(work: Workload, rows: int) -> Workload:
    graph = Graph.from_json(work.spec)
    return to_workload(replace(graph, extents=(rows, *graph.extents[1:])))


@functools.cache
def tuned(fn: Callable[..., object] = norm_backward, target: str = "sm_90") -> Schedule:
    if target == "cpu":
        task = FusionTask(workload(fn, ROWS), "cpu")
    else:
        task = FusionTask(workload(fn, ROWS), "cuda:0", target, GPU.units)
    config = task.default()
    key = Key(task.workload.fingerprint, GPU.fingerprint, ENV.strict, "by hand")
    return Schedule(
        key, config, 10.0, {"eager": 20.0}, task.build(config), "autotune", task.workload.family, task.workload.extent
    )


@pytest.fixture
def store(tmp_path: object) -> Iterator[Store]:
    with Store.open(f"{tmp_path}/rows.db") as found:
        found.put_workload(workload(norm_backward, ROWS))
        found.put_device(GPU)
        found.put_environment(ENV)
        found.put_schedule(tuned())
        yield found


def look_up(store: Store, work: Workload) -> Match:
    return match(work, store, GPU, ENV, rules=replace(deployment().settings, rows=math.inf))


def test_a_main_kernel_and_its_finish_are_found_by_other_rows(store: Store) -> None:
    artifact = tuned().artifact
    assert artifact is not None
    assert [bool(k.launch["dynamic"]) for k in artifact.kernels] == [True, False]
    assert look_up(store, workload(norm_backward, ROWS)).level is Level.EXACT
    for rows in (2, 63, 64, 255, 257, 16 * ROWS, 1_000_003):
        work = workload(norm_backward, rows)
        assert (work.family, work.extent) == (tuned().family, rows)
        found = look_up(store, work)
        assert (found.level, found.tuned and found.tuned.extent) == (Level.OTHER_ROWS, ROWS), found.reason


def test_unsupported_rows_are_refused(store: Store) -> None:
    work = workload(norm_backward, ROWS)
    main, finish = tuned().artifact.kernels  # type: ignore[union-attr]
    blocks, at_once = main.launch["grid"], main.launch["per_block"]
    most = device.MOST_IN_TURN * blocks * at_once
    assert look_up(store, at(work, most)).level is Level.OTHER_ROWS
    for rows, why in ((most + 1, "rows for each accumulator"), (1 << 31, "one number of rows")):
        found = look_up(store, at(work, rows))
        assert found.level is Level.NONE
        assert why in found.reason
    one = workload(norm_backward, 1)
    assert one.family != work.family, "of one row nothing is left to be summed"
    assert look_up(store, one).level is Level.NONE
    here, there = (Graph.from_json(w.spec) for w in (at(work, 300), work))
    assert misfit(here, there, tuned()) == ""

    def changed(**launch: object) -> Schedule:
        kernels = (replace(main, launch={**main.launch, **launch}), finish)
        return replace(tuned(), artifact=replace(tuned().artifact, kernels=kernels))  # type: ignore[type-var]

    assert "one number of rows" in misfit(here, there, changed(dynamic=False))
    assert misfit(here, there, changed(multiple=4)) == ""
    assert "a multiple of 7 rows" in misfit(here, there, changed(multiple=7))
    for damage in ({"grid": None}, {"tiles": 0}, {"grid": blocks + 1, "tiles": 2}, {"grid": 0}):
        assert "damaged" in misfit(here, there, changed(**damage))
    assert "one number of rows" in misfit(here, there, changed(group=None))
    artifact: Artifact = replace(tuned().artifact, kernels=(main, finish, finish))  # type: ignore[type-var]
    assert "one number of rows" in misfit(here, there, replace(tuned(), artifact=artifact))
    artifact = replace(artifact, kernels=(main, finish), generator="cuda-1")
    assert "generator cuda-1" in misfit(here, there, replace(tuned(), artifact=artifact))


def test_cpu_kernels_in_parts_take_other_rows_within_bounds() -> None:
    work, own = workload(norm_backward, ROWS), tuned(target="cpu")
    there = Graph.from_json(work.spec)
    schedule = CpuSchedule.from_config({k: v for k, v in (own.config or {}).items() if k != "plan"})
    most = parts_for(there, schedule) * LONGEST_ELSEWHERE

    def why(rows: int) -> str:
        return misfit(Graph.from_json(at(work, rows).spec), there, own)

    assert most > LONGEST_ELSEWHERE, "several parts"
    assert [why(rows) for rows in (16, 17, 255, 16 * ROWS, most)] == [""] * 5
    assert "rows for each accumulator" in why(most + 1)
    assert why(15) != "", "too few for parts"
    moments = Graph.from_json(workload(spread, ROWS).spec)
    assert misfit(replace(moments, extents=(300, *moments.extents[1:])), moments, tuned(spread, "cpu")) != ""


def test_one_over_the_rows_is_another_family() -> None:
    one, two = workload(mean_too, 256), workload(mean_too, 512)
    assert one.family
    assert one.family != two.family
    here, there = Graph.from_json(two.spec), Graph.from_json(one.spec)
    assert "operators" in misfit(here, there, tuned(mean_too))


def test_a_kernel_that_rests_on_the_rows_is_refused() -> None:
    """The region is equal for all rows. Its kernels use the constant as one over the rows, only at those rows."""
    one, two = workload(spread, ROWS), workload(spread, 2 * ROWS)
    assert one.family == two.family != ""
    artifact = tuned(spread).artifact
    assert artifact is not None
    assert artifact.kernels[0].launch["dynamic"], "by its launch data alone it could run them"
    assert misfit(Graph.from_json(two.spec), Graph.from_json(one.spec), tuned(spread)) != ""
    assert misfit(Graph.from_json(one.spec), Graph.from_json(one.spec), tuned(spread)) == ""


def test_sums_of_everything_have_no_family() -> None:
    for fn in (loss, flat_loss):
        assert workload(fn, 512).family == ""

"""The latency-evaluator: it orders schedules as a GPU does where that is known, for every workload of the zoo."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import zlib

import pytest
import torch
from torch import Tensor

from autotune.compiler.planner.cost import Figures
from autotune.compiler.planner.latency import Work, _work
from autotune.compiler.program.passes import build_program
from autotune.domains.fusion.task import FusionTask
from autotune.ir.canonical import canonicalize, to_workload
from autotune.ir.graph import Graph
from autotune.ir.simplify import simplify
from autotune.task import Config
from autotune.tuner import seeds
from autotune.workload import Workload
from tests.support.cpu_graphs import Build
from tests.support.zoo import ZOO, Case, T, workloads, workloads_of


def task(work: Workload, device: str = "cuda:0") -> FusionTask:
    return FusionTask(work, device, target="sm_90", sms=132)


def softmax(rows: int, cols: int) -> Workload:
    b = Build(rows, cols)
    x = b.load("bfloat16", 0, 1)
    e = b.exp(b.sub(x, b.reduce("max", x, 1)))
    b.out(b.div(e, b.reduce("sum", e, 1)), "bfloat16")
    return to_workload(canonicalize(simplify(b.graph()))[0])


def scaled(rows: int) -> Workload:
    b = Build(rows, 4096)
    b.out(b.mul(b.load("float32", 0, 1), b.load("float32", 1)), "float32")
    return to_workload(canonicalize(simplify(b.graph()))[0])


@pytest.mark.parametrize("case", ZOO, ids=lambda c: c.name)
def test_every_schedule_has_a_finite_time(case) -> None:
    rng = random.Random(zlib.crc32(case.name.encode()))
    for work in workloads(case.name):
        t = task(work)
        space = t.space()
        for config in (t.default(), *(t.normalize(space.sample(rng)) for _ in range(6))):
            if t.reject(config) is None:
                us = t.predict(config)
                assert us is None or 0 < us < 1e6


def test_large_workloads_are_near_the_bandwidth_and_small_ones_near_the_launch() -> None:
    large, small = task(scaled(65536)), task(scaled(2))
    floor = Graph.from_json(large.workload.spec).bytes_moved / Figures().copy_gbs / 1e3
    us = large.predict(large.default())
    assert us is not None
    assert floor < us < 1.5 * floor
    us = small.predict(small.default())
    assert us is not None
    assert Figures().first_us < us < 2 * Figures().first_us


def test_far_too_slow_schedules_are_predicted() -> None:
    t = task(softmax(8192, 8192))
    good = t.predict(t.default())
    assert good is not None
    one_element_at_a_time = {**t.default(), "vector_bytes": 2, "keep": "reload", "unroll": 1, "threads_per_row": 32,
                             "rows_per_block": 2, "blocks_per_sm": 1}  # fmt: skip
    slow = t.predict(one_element_at_a_time)
    assert slow is not None
    assert slow > 4 * good
    again = t.predict({**t.default(), "keep": "reload", "unroll": 4})
    assert again is not None
    assert again > good
    spilling = t.predict({**t.default(), "max_registers": 32, "threads_per_row": 64, "rows_per_block": 2})
    assert spilling is not None
    assert spilling > 2 * good


def test_the_place_of_kept_values_counts() -> None:
    """As eight H200 spaces have it: registers, then the cache for a short row, then shared memory for a long one."""
    t = task(softmax(16384, 1000))
    by_warp = {**t.default(), "threads_per_row": 32, "rows_per_block": 4, "vector_bytes": 8, "unroll": 4}
    times = {keep: t.predict({**by_warp, "keep": keep}) or math.inf for keep in ("registers", "shared", "reload")}
    assert times["registers"] < times["shared"] < 1.5 * times["registers"]
    assert times["reload"] < 1.5 * times["registers"], "other blocks hide what is read again"


def test_registers_that_keep_nothing_do_not_hasten_a_row() -> None:
    """A row's sum in one pass: loads of a whole row at once take registers, and no more of them are in flight."""
    b = Build(4096, 32000)
    b.out(b.reduce("sum", b.exp(b.load("bfloat16", 0, 1)), 1), "float32")
    t = task(to_workload(canonicalize(simplify(b.graph()))[0]))
    config = {**t.default(), "threads_per_row": 64, "rows_per_block": 4, "vector_bytes": 16}
    whole = t.predict({**config, "keep": "registers", "unroll": 1})
    ahead = t.predict({**config, "keep": "reload", "unroll": 4})
    assert whole is not None
    assert ahead is not None
    assert ahead < 0.9 * whole


def test_inputs_of_a_row_take_no_registers_of_its_elements() -> None:
    def shape(scales: int) -> Work:
        b = Build(8192, 4096)
        x = b.load("bfloat16", 0, 1)
        for _ in range(scales):
            x = b.mul(x, b.load("float32", 0))
        b.out(b.reduce("sum", x, 1), "float32")
        t = task(to_workload(canonicalize(simplify(b.graph()))[0]))
        found = _work(build_program(t.graph, keep=True, online=False), t.default(), 0.0)
        assert found is not None
        return found

    assert shape(0).registers == shape(3).registers
    assert shape(0).in_flight == shape(3).in_flight


def test_twice_the_rows_take_twice_the_time() -> None:
    a, b = task(softmax(8192, 4096)), task(softmax(16384, 4096))
    first, second = a.predict(a.default()), b.predict(a.default())
    assert first is not None
    assert second is not None
    launch = Figures().first_us
    assert (second - launch) / (first - launch) == pytest.approx(2, rel=0.1)


def test_a_slower_device_takes_longer() -> None:
    t = task(softmax(8192, 4096))
    slower = t.under("", {"copy_gbs": 1000.0})
    fast, slow = t.predict(t.default()), slower.predict(t.default())
    assert fast is not None
    assert slow is not None
    assert slow > 3 * fast
    assert not Figures.of("cuda", {}).calibrated
    assert Figures.of("cuda", {"copy_gbs": 1.0, "unknown": 3.0}).calibrated


def test_a_cpu_has_no_model() -> None:
    t = task(softmax(8192, 4096), device="cpu")
    assert t.predict(t.default()) is None
    assert seeds.picks(t, t.space(), 0) == []


def test_picks_are_the_best_by_the_model_and_can_be_tried() -> None:
    t = task(softmax(8192, 8192))
    chosen = seeds.picks(t, t.space(), 0)
    assert len(chosen) == seeds.PICKS
    times = [t.predict(c) or math.inf for c in chosen]
    drawn = random.Random(1)
    assert max(times) < min(t.predict(t.normalize(t.space().sample(drawn))) or math.inf for _ in range(8))
    assert times[0] == min(times)
    assert max(times) < 1.1 * times[0]
    common = [len(a.items() & b.items()) / max(len(a), len(b)) for a, b in itertools.combinations(chosen, 2)]
    assert max(common) < 1
    assert statistics.fmean(common) < 0.6, "unlike each other"
    assert all(t.reject(c) is None and t.space().contains(c) for c in chosen)
    planned = seeds.plan(t, t.space(), [])
    assert {s.origin for s in planned} == {"default", "heuristic", "model"}
    assert [s.origin for s in planned[:5]] == ["default", "model", "model", "heuristic", "model"], "in turn"
    assert next(s.config for s in planned if s.origin == "model") == chosen[0]


@pytest.mark.parametrize("name", ["relu_statistics", "layer_norm_backward", "mean_cross_entropy"])
@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_compositions_combine_their_parts(name: str, device: str) -> None:
    """Parts plan to one group each; what is combined of their schedules is a configuration of the region."""
    for work in workloads(name):
        t = task(work, device)
        found = t.compositions(4)
        for c in found:
            parts = [task(p, device) for p in c.parts]
            assert all(len(p.plan.groups) == 1 for p in parts if p.workload != work)
            others = [p.space().project(p.seeds()[0]) for p in parts]
            choices = [[(p.default(), 10.0), (p.normalize(o or {}), 11.0)] for p, o in zip(parts, others, strict=True)]
            made = c.combine(choices)
            assert made
            for config, us in made:
                assert t.reject(config) is None
                assert t.normalize(config) == config
                assert t.space_for(config).contains(config)
                assert us > 0
            # Groups timed alone are timed with a launch each, the whole pays less for all but the first.
            assert made[0][1] <= 10.0 * len(t.plan_of(made[0][0]).groups)
            assert t.plan_of(made[0][0]).text == c.name
        if found:
            assert {p.fingerprint for c in found for p in c.parts} <= {
                p.fingerprint for c in task(work, device).compositions(4) for p in c.parts
            }


def test_equal_groups_of_different_regions_are_one_part() -> None:
    def region(extra: bool) -> Workload:
        b = Build(4096, 512)
        x = b.load("float32", 0, 1)
        y = b.sub(x, b.reduce("max", x, 0))
        z = b.sub(y, b.reduce("sum", y, 1))
        b.out(b.sub(z, b.reduce("max", z, 0)), "float32")
        if extra:
            b.out(b.reduce("sum", b.exp(b.load("float32", 0, 1)), 1), "float32")
        return to_workload(canonicalize(simplify(b.graph()))[0])

    plain, more = (task(region(extra)).compositions(4) for extra in (False, True))
    assert {p for c in plain for p in c.parts} & {p for c in more for p in c.parts}


def test_a_broadcast_weight_does_not_keep_statistics_on_few_multiprocessors() -> None:
    """Instance norm of 2 x 32 channels, channels last, as a training step stores it: on an H200 the greedy plan's
    kernel of 64 sums took 169 ms, and Inductor's 0.5."""
    voxels = 1 << 21
    b = Build(2, 32, voxels)
    weight, share = b.load("float32", 1), b.const(1 / voxels)
    x = b.load("float16", 0, 1, 2, strides=(32 * voxels, 1, 32))
    mean = b.mul(share, b.reduce("sum", x, 2))
    far = b.sub(x, mean)
    scale = b.rsqrt(b.mul(share, b.reduce("sum", b.mul(far, far), 2)))
    b.out(weight, "float32", (0, 1), (32, 1))
    b.out(mean, "float32")
    b.out(scale, "float32")
    b.out(b.mul(b.mul(far, scale), weight), "float16", strides=(32 * voxels, 1, 32))
    t = task(to_workload(canonicalize(simplify(b.graph()))[0]))
    assert "outer" in {on.name for on, _ in t.sides(t.plan)}
    best = t.compositions(4)[0]
    (config, _), *_ = best.combine([[(task(part).default(), 10.0)] for part in best.parts])
    assert t.reject(config) is None
    assert [on.name for on, _ in t.sides(t.plan_of(config))] == ["flat", "columns", "flat"]


def test_tiles_are_near_the_bandwidth() -> None:
    b = Build(8192, 8192)
    x, y = b.load("float32", 0, 1), b.load("float32", 0, 1, strides=(1, 8192))
    b.out(b.add_(x, y), "float32")
    t = task(to_workload(canonicalize(simplify(b.graph()))[0]))
    tiled = t.predict(t.default())
    assert tiled is not None
    floor = Graph.from_json(t.workload.spec).bytes_moved / Figures().copy_gbs / 1e3
    assert floor < tiled < 1.5 * floor


def test_index_adds_of_many_threads_have_a_finite_time() -> None:
    """The compiler takes no more registers than the threads of a block may have."""

    def added(rows: Tensor, at: Tensor) -> Tensor:
        return torch.zeros(3000, 1024, dtype=torch.bfloat16).index_add(0, at, rows) * 2

    (work,) = workloads_of(Case("added", added, (T(50000, 1024, d=torch.bfloat16), T(50000, d=torch.int64))))
    t = task(work, "cuda:0")
    shape: Config = {"threads_per_row": 128, "rows_per_block": 8, "owned": 32, "unroll": 4, "max_registers": 0}
    config = t.normalize(t.default() | shape)
    assert t.reject(config) is None
    assert math.isfinite(t.predict(config) or math.inf)

"""Several CPU kernels in one launch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from autotune.compiler.planner.plan import make_plan
from autotune.compiler.program.passes import build_program
from autotune.compiler.targets.cpu import kernel as cpu_batch
from autotune.compiler.targets.cpu import launcher as cpu_load
from autotune.compiler.targets.cpu.kernel import batch, load
from autotune.compiler.targets.cpu.schedule import CpuSchedule
from autotune.runtime.launch.cpu import make_launches
from tests.support.cpu_graphs import Build, softmax
from tests.support.many_parts import beside, update


def _kernels(rows: list[int], **schedule: Any) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """A launch of a softmax for each number of rows, its inputs and expected outputs."""
    parts, inputs, wanted = [], [], []
    for n in rows:
        graph = softmax(n, 64)
        kernel = load(build_program(graph), CpuSchedule(**schedule))
        parts.append((kernel, 2, n))
        inputs.append(torch.randn(n, 64))
        wanted.append(torch.softmax(inputs[-1] * 0.7, 1))
    return batch(parts), inputs, wanted


def _run(launch: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    outputs = [torch.full_like(x, float("nan")) for x in inputs]
    launch([p for x, y in zip(inputs, outputs, strict=True) for p in (x.data_ptr(), y.data_ptr())])
    return outputs


@pytest.mark.parametrize("fallback", [False, True])
def test_every_kernel_runs_on_its_own_tensors(monkeypatch: pytest.MonkeyPatch, fallback: bool) -> None:
    if fallback:
        monkeypatch.setattr(cpu_load, "_gomp_parallel", lambda: None)
    monkeypatch.setattr(cpu_load, "_most_threads", lambda: 3)
    monkeypatch.setattr(cpu_load, "_torch_threads", lambda: lambda: 3)
    launch, inputs, wanted = _kernels([3000, 1, 700, 5], threads=3, row_block=7)
    for _ in range(5):  # each call resets the counters
        torch.testing.assert_close(_run(launch, inputs), wanted)


def test_a_launch_may_be_made_from_several_threads_at_once() -> None:
    launch, inputs, wanted = _kernels([500, 800], threads=2)

    def work(k: int) -> None:
        for _ in range(20):
            torch.testing.assert_close(_run(launch, inputs), wanted)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_small_kernels_share_a_team_where_all_of_them_together_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def starter(address: int, threads: int) -> Any:
        start = cpu_load.starter(address, 1)
        return lambda at, n: (started.append(n), start(at, 1))

    monkeypatch.setattr(cpu_load, "_most_threads", lambda: 2)
    monkeypatch.setattr(cpu_batch, "starter", starter)
    kernel = load(build_program(softmax(4, 64)), CpuSchedule(threads=2))
    limit = kernel.serial_below
    assert limit > 8
    for rows, team in (([4, 4], 1), ([limit // 2 + 1] * 2, 2)):
        launch, inputs, wanted = _kernels(rows, threads=2)
        torch.testing.assert_close(_run(launch, inputs), wanted)
        assert started.pop() == team
    launch, inputs, wanted = _kernels([limit] * 2, threads=1)
    torch.testing.assert_close(_run(launch, inputs), wanted)
    assert started.pop() == 1  # a schedule of one thread stays on one


def test_groups_that_do_not_wait_for_each_other_are_one_launch() -> None:
    graph = beside(update(300), update(7), update(41, 3))
    plan = make_plan(graph, "cpu")
    assert [together for together, _ in make_launches(plan, {})] == [range(len(plan.groups))]
    assert len(plan.groups) > 1


def test_a_group_waits_for_those_whose_results_it_reads() -> None:
    """Column maxima, row sums of the differences, column maxima of their differences."""
    b = Build(6, 10)
    x = b.load("float32", 0, 1)
    y = b.sub(x, b.reduce("max", x, 0))
    z = b.sub(y, b.reduce("sum", y, 1))
    b.out(b.sub(z, b.reduce("max", z, 0)), "float32")
    plan = make_plan(b.graph(), "cpu")
    assert [together for together, _ in make_launches(plan, {})] == [range(k, k + 1) for k in range(3)]

"""The C3 domain's task: spaces that fit the scenario and the machine, seeds, kernels, and where it all belongs."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune import task as tasks
from autotune.device import identify
from autotune.domain import domain_of, identity_of, open_task, policy_for
from autotune.domains.c3 import task
from autotune.domains.c3.scenario import COLLECTIVES, Gemm, Program, Scenario
from autotune.domains.c3.strategy import BASELINES, Strategy
from autotune.domains.c3.task import links, parse_topology, visible
from autotune.errors import BuildError, Unsupported, UserError
from autotune.space import load_space
from autotune.tuner.seeds import plan

BIG = Scenario(Gemm(4096, 4096, 4096), "all_gather", 1 << 26, 4)


def opened(scenario: Scenario, device: str) -> task.C3Task:
    made = open_task(scenario.workload(), device)
    assert isinstance(made, task.C3Task)
    return made


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_CUDA_TARGET", "sm_90:132")


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("op", COLLECTIVES)
def test_defaults_and_seeds_are_normal_possible_and_in_the_space(op: str, device: str, h200: None) -> None:
    made = opened(Scenario(Gemm(4096, 4096, 4096), op, 1 << 26, 4), device)
    space = made.space()
    seeds = made.seeds()
    for config in (made.default(), *seeds):
        assert space.contains(config), config
        assert made.normalize(config) == config
        assert made.reject(config) is None
    assert len({tasks.config_key(c) for c in seeds}) == len(seeds)
    plain = BASELINES[task.side_of(device)].values()
    begun = [s.config for s in plan(made, space, [])]
    assert all(made.normalize(c) in begun for c in plain)
    assert begun[0] == made.default()


def choices(scenario: Scenario, device: str, name: str) -> tuple[Any, ...]:
    return opened(scenario, device).space()[name].choices


def test_spaces_leave_out_choices_without_effect(h200: None) -> None:
    assert choices(BIG, "cuda:0", "chunks") == (1,)
    adding = replace(BIG, collective="all_reduce")
    assert choices(adding, "cuda:0", "chunks") == (1, 2, 4, 8)
    assert choices(replace(adding, nbytes=8 * 2048), "cuda:0", "chunks") == (1, 2)
    assert choices(replace(adding, nbytes=8), "cuda:0", "chunks") == (1,)
    assert choices(BIG, "cuda:0", "engine") == ("nccl", "copy")
    assert choices(replace(adding, compute=Program("softmax")), "cuda:0", "engine") == ("nccl", "copy", "sm")
    assert choices(BIG, "cuda:0", "reserve") == load_space("c3", "cuda")["reserve"].choices


def test_sms_that_a_device_does_not_have_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_CUDA_TARGET", "sm_90:20")
    every = load_space("c3", "cuda")["reserve"].choices
    assert choices(BIG, "cuda:0", "reserve") == tuple(c for c in every if c < 20) != every


def test_threads_are_a_part_of_a_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    for processors, expected in [(1, (0,)), (4, (0,)), (16, (0, 1, 2)), (64, (0, 1, 2, 4, 8))]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, n=processors: set(range(n)), raising=False)
        assert choices(BIG, "cpu", "threads") == expected


def test_a_narrowed_space_that_leaves_nothing_is_one_line(tmp_path: Path, h200: None) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('domain = "c3"\n[cuda.chunks]\nchoices = [4, 8]\n')
    with pytest.raises(UserError, match=r"none of chunks = \[4, 8\] is possible") as caught:
        opened(BIG, "cuda:0").space(str(file))
    assert "\n" not in str(caught.value)
    adding = opened(replace(BIG, collective="reduce_scatter"), "cuda:0")
    assert adding.space(str(file))["chunks"].choices == (4, 8)


def test_a_neighbours_strategy_is_fitted(h200: None) -> None:
    small = opened(Scenario(Gemm(128, 64, 64), "all_reduce", 8 * 2048, 4), "cuda:0")
    stored = {**Strategy("comm_first", "copy", ctas=9, chunks=8).config(), "panels": 8, "batch": True}
    fitted = small.adapt(stored)
    assert fitted is not None
    assert (fitted["chunks"], fitted["ctas"], fitted["order"]) == (2, 8, "comm_first")
    assert small.reject(fitted) is None
    assert small.space().contains(fitted)
    assert small.adapt({"order": "comm_first"}) is None


def test_cpu_strategies_need_no_kernels() -> None:
    artifact = opened(BIG, "cpu").build(BASELINES["cpu"]["naive"])
    assert (artifact.target, artifact.kernels) == ("cpu", ())


@pytest.mark.parametrize(
    ("op", "engine", "ops"),
    [
        ("all_gather", "nccl", []),
        ("all_gather", "copy", []),
        ("reduce_scatter", "copy", ["reduce"]),
        ("reduce_scatter", "sm", ["reduce pairs"]),
        ("all_reduce", "nccl", []),
        ("all_reduce", "copy", ["reduce"]),
        ("all_reduce", "sm", ["reduce pairs"]),
    ],
)
def test_strategies_have_the_kernels_they_need(
    op: str, engine: str, ops: list[str], h200: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_sum(ranks: int, dtype: str, target: str, form: str, *, mean: bool) -> tasks.Kernel:
        assert (ranks, dtype, target, mean) == (4, "bf16", "sm_90", False)
        return tasks.Kernel("sum", launch={"op": f"reduce {form}".strip()})

    monkeypatch.setattr("autotune.domains.c3.collectives.sm.build_sum", build_sum)
    made = opened(Scenario(Gemm(64, 64, 64), op, 1 << 20, 4), "cuda:0")
    artifact = made.build(made.normalize(Strategy(engine=engine).config()))
    assert artifact.target == "sm_90"
    assert [k.launch["op"] for k in artifact.kernels] == ops


def test_a_kernel_of_too_many_ranks_is_a_build_error(h200: None) -> None:
    made = opened(Scenario(Gemm(64, 64, 64), "all_reduce", 1 << 20, 64), "cuda:0")
    with pytest.raises(BuildError, match="64 parts"):
        made.build(Strategy(engine="copy").config())


def test_it_is_measured_by_ranks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="several ranks"):
        domain_of("c3").open_bench(BIG.workload(), "cpu")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 6)
    with pytest.raises(UserError, match="8 ranks need 8 GPUs, but there are 6; use fewer"):
        domain_of("c3").open_measurer(
            Scenario(BIG.compute, "all_gather", 1 << 20, 8).workload(), "cuda:0", task.policy("cuda:0")
        )
    with pytest.raises(UserError, match="4 ranks need 4 GPUs, but there are 3 from cuda:3 on"):
        task.check_devices(4, "cuda:3")
    task.check_devices(4, "cuda:2")
    task.check_devices(400, "cpu")


def test_policies_of_the_two_sides_do_not_mix() -> None:
    cuda, cpu = policy_for(BIG.workload(), "cuda:0"), policy_for(BIG.workload(), "cpu")
    assert cuda.key != cpu.key
    assert (cuda.method, cpu.method) == ("ranks-graph", "ranks-cpu")
    assert cuda.final_rounds >= 20


def test_scenario_identity_has_the_number_of_devices() -> None:
    here = identity_of(BIG.workload(), "cpu")
    assert here.count == 4
    assert here.links == ""
    one = identify("cpu")
    assert here.fingerprint != one.fingerprint
    assert (here.name, here.units) == (one.name, one.units)


TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tSYS\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tSYS\tSYS\t0-47\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tSYS\tSYS\t48-95\t1\t\tN/A
GPU3\tSYS\tSYS\tSYS\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def test_links_are_read_off_the_topology() -> None:
    assert parse_topology(TOPOLOGY, [0, 1, 2]) == "NV18"
    assert parse_topology(TOPOLOGY, [2, 3]) == "SYS"
    assert parse_topology(TOPOLOGY, None) == "NV18+SYS"
    assert parse_topology(TOPOLOGY, [0, 9]) == "NV18+SYS"
    assert parse_topology("No devices were found", [0, 1]) == ""


def test_visible_devices_are_the_machines_own_numbers() -> None:
    assert visible(None, 2, 2) == [2, 3]
    assert visible("4,5,6", 1, 2) == [5, 6]
    assert visible("3", 0, 2) is None
    assert visible("GPU-abc,GPU-def", 0, 2) is None


def test_links_never_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for found, expected in [
        (subprocess.CompletedProcess([], 0, TOPOLOGY), "NV18"),
        (FileNotFoundError(2, "nvidia-smi"), "none"),
        (subprocess.TimeoutExpired("nvidia-smi", 30), "none"),
    ]:

        def run(*args: Any, answer: Any = found, **kwargs: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(task.subprocess, "run", run)
        links.cache_clear()
        assert links("cuda:0", 2) == expected
    links.cache_clear()

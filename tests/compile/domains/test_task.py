"""The fusion task on a CUDA target without a GPU, and on this CPU for real: build, load, verify, catch what is wrong.

``AUTOTUNE_TEST_CONFIGS=N`` runs the default and N random configurations of every function on the CPU; without it
every third function gets one, and every third streaming stores.
"""

from __future__ import annotations

import os
import random
import re
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autotune.compiler.planner.groups import group_configs
from autotune.compiler.schedules.configurations import improper
from autotune.compiler.schedules.cuda import scheme_of
from autotune.compiler.targets.cuda.compile import reason_of
from autotune.device import describe_cuda
from autotune.domains.fusion.bench import FusionBench
from autotune.domains.fusion.domain import DOMAIN
from autotune.domains.fusion.task import FusionTask
from autotune.errors import BuildError, UserError
from autotune.task import Config
from autotune.tuner import seeds
from autotune.workload import Workload
from tests.support.zoo import ZOO, Case, T, candidates, random_configs, workload, workloads, workloads_of

MORE = os.environ.get("AUTOTUNE_TEST_CONFIGS")
open_task, open_bench = DOMAIN.open_task, DOMAIN.open_bench
REGIONS = [(c, k) for c in ZOO for k in range(len(c.groups))]
each_region = pytest.mark.parametrize(("case", "k"), REGIONS, ids=lambda v: str(v))


def cuda(work: Workload, sms: int = 132) -> FusionTask:
    return FusionTask(work, "cuda:0", target="sm_90", sms=sms)


def emitted(task: FusionTask, config: Config) -> list[str]:
    """The source of every kernel of ``config``, and how it is launched."""
    out = []
    for group, own in zip(task.plan.groups, group_configs(task.plan, config), strict=True):
        made = scheme_of(group.graph).emit(group.graph, own, 132)
        out.append("")
        for source in made.sources:
            out[-1] += f"{source.text}{sorted(source.launch.items())}{source.block}{source.max_registers}"
    return out


# ---- CUDA, without a GPU


@each_region
def test_default_is_feasible_and_in_the_space(case, k: int) -> None:
    task = cuda(workloads(case.name)[k])
    default = task.default()
    assert task.space().contains(default)
    assert task.reject(default) is None
    assert task.normalize(default) == default


@each_region
def test_seeds_can_be_tried(case, k: int) -> None:
    """A seed outside the space is left out of the search, so most must be in; all must be what would run."""
    task = cuda(workloads(case.name)[k])
    space, found = task.space(), list(task.seeds())
    assert found
    for config in found:
        assert task.normalize(config) == config
        assert config.keys() == task.default().keys()
    planned = seeds.plan(task, space, [])
    assert len(planned) > len(found) // 3
    assert sum(task.reject(s.config) is None for s in planned) > len(planned) // 2
    assert all(space.contains(s.config) for s in planned)


@each_region
def test_normalize_is_idempotent_and_keeps_the_meaning(case, k: int) -> None:
    task = cuda(workloads(case.name)[k])
    space, rng = task.space(), random.Random(zlib.crc32(case.name.encode()))
    compared = 0
    for _ in range(80):
        if compared == 5:
            break
        config = space.sample(rng)
        normal = task.normalize(config)
        assert task.normalize(normal) == normal
        blocks = [n for n in config if n.rpartition(".")[2] in ("rows_per_block", "threads_per_row")]
        # Blocks are made of legal size, which is another kernel; all else that changes has no effect.
        if task.reject(config) is None and all(config[n] == normal[n] for n in blocks):
            compared += 1
            assert task.reject(normal) is None
            assert emitted(task, normal) == emitted(task, config)
    assert compared or len(set(task.plan.leaders)) > 2  # groups of one launch seldom agree by chance


def test_normalize_makes_blocks_of_legal_size() -> None:
    task = cuda(workload("ln_f32"))
    for threads in (1, 8, 64, 1024):
        for rows in (1, 2, 64, 256):
            config = task.normalize({**task.default(), "threads_per_row": threads, "rows_per_block": rows})
            assert 64 <= int(config["threads_per_row"]) * int(config["rows_per_block"]) <= 1024
            assert config["threads_per_row"] == threads


(LONG_STRIPS,) = workloads_of(Case("", lambda x: torch.softmax(x, 0), (T(80_000, 64),)))
"""A softmax whose strips no block's shared memory holds."""
SHARED: Config = {"keep": "shared", "prefetch": True, "online": False, "unroll": 16}
SHARED |= {"threads_per_row": 4, "rows_per_block": 256}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("ln_f32", {"threads_per_row": 24}, "power of two up to 32 or a multiple of 32"),
        ("ln_f32", {"threads_per_row": 1024, "rows_per_block": 2}, "more than 1024 threads a block"),
        ("ln_f32", {"threads_per_row": 4, "rows_per_block": 1}, "less than a warp a block"),
        ("ln_1001", {"vector_bytes": 16}, "vectors of 16 bytes do not divide a row"),
        ("ln_long", {"threads_per_row": 32, "rows_per_block": 2}, "too long for 32 threads to keep in registers"),
        ("ln_long", {"threads_per_row": 192}, "registers a thread for kept values"),
        ("ln_long", {"threads_per_row": 640, "rows_per_block": 1, "max_registers": 32}, "under a cap of 32"),
        ("ln_f32", {"threads_per_row": 1024, "max_registers": 96}, "cap of 96 registers does not fit 1024 threads"),
        ("ln_f32", {"keep": "shared"}, "rows kept in shared memory, which this autotune lacks"),
        ("long_strips", SHARED, "bytes of shared memory a block"),
    ],
)
def test_hopeless_configurations_are_rejected_with_a_reason(name: str, changes: dict[str, object], words: str) -> None:
    task = cuda(LONG_STRIPS if name == "long_strips" else workload(name))
    why = task.reject({**task.default(), **changes})  # type: ignore[dict-item]
    assert why is not None
    assert words in why
    assert "\n" not in why


def test_too_much_shared_memory_is_a_build_error() -> None:
    task = cuda(LONG_STRIPS)
    with pytest.raises(BuildError, match="bytes of shared memory a block, the device has 232448"):
        task.build({**task.default(), **SHARED})


def test_a_space_that_would_keep_rows_in_shared_memory_alone_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('domain = "fusion"\nversion = 1\n[cuda.keep]\nchoices = ["shared"]\n')
    with pytest.raises(UserError, match=r"^keep = \[shared\] is not possible: rows need keep = registers or reload"):
        cuda(workload("ln_f32")).space(str(file))
    assert cuda(LONG_STRIPS).space(str(file))["keep"].choices == ("shared",)
    file.write_text(file.read_text().replace('"shared"', '"shared", "reload"'))
    assert cuda(workload("ln_f32")).space(str(file))["keep"].choices == ("reload",)


def test_hopeless_spills_are_a_build_error() -> None:
    task = cuda(workload("ln_bf16"))
    config = {**task.default(), "threads_per_row": 32, "rows_per_block": 2, "max_registers": 32}
    with pytest.raises(BuildError, match=r"spills \d+ bytes a thread"):
        task.build(config)


def test_the_reason_of_a_failed_link_is_the_first_error_of_ptxas() -> None:
    log = (
        "ERROR_PTX_COMPILE (4)\nnvJitLink error log: ptxas error   : Entry function 'autotune_sin' with max regcount "
        "of 96 calls function '_ZN13_3cdynamic_3e5step1B2v3Eff' with regcount of 254\n"
        "ERROR NVJITLINK_ERROR_PTX_COMPILE: JIT the PTX ()\n\0"
    )
    called = "Entry function 'autotune_sin' with max regcount of 96 calls function of the device with regcount of 254"
    assert reason_of(RuntimeError(log)) == called
    assert reason_of(RuntimeError("first\nlast\n")) == "last"
    assert reason_of(RuntimeError("\0")) == "without a reason"


def test_missing_parameter_is_a_build_error() -> None:
    task = cuda(workload("ln_f32"))
    config = task.default()
    del config["unroll"]
    with pytest.raises(BuildError, match="unroll"):
        task.build(config)


@pytest.mark.parametrize(("wanted", "sms"), [(4, 132), (4, 78), (16, 132)])
def test_persistent_grid_is_no_larger_than_the_device(wanted: int, sms: int) -> None:
    task = cuda(workload("ln_f32"), sms)
    (kernel,) = task.build({**task.default(), "blocks_per_sm": wanted}).kernels
    assert kernel.launch["cap"] == sms * min(wanted, kernel.resources["blocks_per_sm"])
    (kernel,) = task.build(task.default()).kernels
    assert kernel.launch["cap"] == 0


def test_groups_have_their_own_parameters() -> None:
    task = cuda(workloads("expanded")[0])
    default = task.default()
    assert {n.partition(".")[0] for n in default} == {"g0", "g1"}
    changed = {**default, "g1.threads_per_row": 64, "g1.rows_per_block": 2}
    a, b = emitted(task, default), emitted(task, changed)
    assert a[0] == b[0]
    assert a[1] != b[1]


@pytest.mark.parametrize(("name", "other"), [("ln_f32", "ln_bf16"), ("ln_1001", "ln_f32"), ("gelu", "gelu_13")])
def test_a_neighbours_configuration_is_fitted(name: str, other: str) -> None:
    task, neighbour = cuda(workload(name)), cuda(workload(other))
    fitted = task.adapt(neighbour.default())
    assert fitted is not None
    assert task.normalize(fitted) == fitted
    assert task.reject(fitted) is None
    assert fitted.keys() == task.default().keys()


@pytest.mark.parametrize("name", ["ln_f32", "expanded"])
def test_adapt_fills_in_parameters_missing_in_earlier_configurations(name: str) -> None:
    task = FusionTask(workloads(name)[0], "cpu")
    default = {k: v for k, v in task.default().items() if k.rpartition(".")[2] != "wide"}
    old = {k: v for k, v in default.items() if k.rpartition(".")[2] not in ("stream", "prefetch")}
    assert len(old) < len(default) < len(task.default())
    adapted = task.adapt(old)
    assert adapted is not None
    assert {k: adapted[k] for k in default} == default
    assert not any(v for k, v in adapted.items() if k.rpartition(".")[2] == "wide")
    assert task.adapt({k: v for k, v in old.items() if not k.endswith("row_block")}) is None


@pytest.mark.parametrize("name", ["ln_f32", "expanded"])
def test_choices_that_a_cpu_has_no_more_are_dropped(name: str) -> None:
    """A configuration that an earlier version stored is fitted, runs as it is, and is in the space again."""
    task = FusionTask(workloads(name)[0], "cpu")
    default = task.default()
    groups = {k.rpartition(".")[0] for k in default}
    earlier = {f"{g}.{k}".lstrip("."): v for g in groups for k, v in (("keep", "reload"), ("online", True))}
    assert improper({**default, **earlier}, "cpu") == ""
    assert task.adapt({**default, **earlier}) == task.normalize({**default, **earlier}) == default
    assert improper({**default, **dict.fromkeys(earlier, 1)}, "cpu")


def test_users_space_is_narrowed_further(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('domain = "fusion"\n[cuda.threads_per_row]\nchoices = [64, 128]\n')
    assert cuda(workload("ln_f32")).space(str(file))["threads_per_row"].choices == (64, 128)
    file.write_text('domain = "fusion"\n[cuda.threads_per_rows]\nchoices = [64]\n')
    with pytest.raises(UserError, match=r"unknown parameter cuda\.threads_per_rows; did you mean"):
        cuda(workload("ln_f32")).space(str(file))


def test_target_can_be_named_where_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_CUDA_TARGET", "sm_80:108")
    assert describe_cuda("cuda:0") == ("sm_80", 108)
    task = open_task(workload("ln_3"), "cuda:0")
    assert task.target() == ("sm_80", 108)
    assert task.build(task.default()).target == "sm_80"


def test_damaged_workload_is_a_value_error() -> None:
    work = workload("ln_3")
    values = [dict(v) for v in work.spec["values"]]
    values[-1]["args"] = [len(values)]
    with pytest.raises(ValueError, match="does not come before it"):
        FusionTask(Workload("fusion", {**work.spec, "values": values}), "cpu")


# ---- the CPU, for real


def streaming(config: Config) -> Config:
    """With streaming stores and rows fetched ahead, which tensors as small as here would not have."""
    return {k: v if k.split(".")[-1] not in ("stream", "prefetch") else True for k, v in config.items()}


@each_region
def test_every_function_is_right_on_the_cpu(case, k: int) -> None:
    work = workloads(case.name)[k]
    task, bench = open_task(work, "cpu"), open_bench(work, "cpu")
    more = int(MORE) if MORE else ZOO.index(case) % 3 == 1
    others = random_configs(task, more, seed=zlib.crc32(case.name.encode()))
    if ZOO.index(case) % 3 == 2:
        others = [streaming(task.default())]
    for config in [task.default(), *others]:
        verdict = bench.verify(bench.load(config, task.build(config)), seed=7)
        assert verdict.ok, (config, verdict)
        assert verdict.error <= 1


@pytest.mark.parametrize("name", ["ln_1001", "softmax_mask", "rope"])
def test_every_seed_is_right_on_the_cpu(name: str) -> None:
    work = workload(name)
    task, bench = open_task(work, "cpu"), open_bench(work, "cpu")
    for config in candidates(task, 2, 1):
        verdict = bench.verify(bench.load(config, task.build(config)), seed=3)
        assert verdict.ok, (config, verdict)


def add_to_one(outputs: list[torch.Tensor]) -> None:
    flat = outputs[0].view(-1)
    flat[flat.numel() // 2] += 1e-2


def leave_one(outputs: list[torch.Tensor]) -> None:
    """As if one element had not been written: what poisoned it is still there."""
    flat = outputs[0].view(-1)
    flat[-1] = -7.03125e4


def hide_nan(outputs: list[torch.Tensor]) -> None:
    outputs[0].nan_to_num_(0.0)


def swap_rows(outputs: list[torch.Tensor]) -> None:
    outputs[0].copy_(outputs[0].view(-1, 512).roll(1, 0).reshape(-1))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (add_to_one, "output 0 on random inputs: .*times the tolerance"),
        (leave_one, r"output 0 on random inputs: -70312\.5 instead of"),
        (hide_nan, "output 0 on inputs with NaN and infinities: 0 instead of nan"),
        (swap_rows, "output 0 on random inputs"),
    ],
)
def test_verification_catches(spoil: Callable[[list[torch.Tensor]], None], words: str) -> None:
    """A kernel that is right but for one thing."""
    task, bench = open_task(workload("softmax_mask"), "cpu"), open_bench(workload("softmax_mask"), "cpu")
    run = bench.load(task.default(), task.build(task.default()))
    assert bench.verify(run, 1).ok
    real = run.executor

    class Spoiled:
        def run_into(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
            real.run_into(inputs, outputs)
            spoil(outputs)

    run.executor = Spoiled()
    verdict = bench.verify(run, 1)
    assert not verdict.ok
    assert verdict.error > 1
    assert re.search(words, verdict.detail), verdict.detail


def test_verification_catches_an_artifact_of_another_function() -> None:
    """The kernel of x + 1 on the workload of gelu: same shapes, other numbers."""
    bench, task = open_bench(workload("gelu"), "cpu"), open_task(workload("gelu"), "cpu")
    values = [dict(v) for v in workload("gelu").spec["values"]]
    for v in values:
        if v["op"] == "erf":
            v["op"] = "tanh"
    wrong = Workload("fusion", {**workload("gelu").spec, "values": values})
    other, other_bench = open_task(wrong, "cpu"), open_bench(wrong, "cpu")
    run = other_bench.load(other.default(), other.build(other.default()))
    assert other_bench.verify(run, 1).ok
    assert not bench.verify(run, 1).ok
    assert bench.verify(bench.load(task.default(), task.build(task.default())), 1).ok


def test_baselines_are_the_users_program() -> None:
    work = workload("residual_ln")
    bench = FusionBench(work, "cpu")
    assert list(bench.baselines()) == ["eager", "inductor"]
    h, y = bench.baselines()["eager"]()()
    flat = dict(enumerate(bench.inputs))
    x, r = (t.view(4, 16, 768) for t in bench.given.views[:2])
    torch.testing.assert_close(h, x + r)
    assert y.shape == (4, 16, 768)
    assert {t.data_ptr() for t in bench.given.views} <= {t.data_ptr() for t in flat.values()}
    assert bench.bytes_moved() == 4 * (4 * 64 * 768 + 2 * 768)

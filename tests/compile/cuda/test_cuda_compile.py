"""Every kernel compiles to a cubin without a GPU, and has what makes it fast: seen in its PTX and its resources.

``AUTOTUNE_TEST_CONFIGS=N`` compiles the default and N random configurations of every function; without it every
eighth function gets one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zlib
from dataclasses import replace

import pytest

from autotune.compiler.program.passes import build_program
from autotune.compiler.targets.cuda.compile import build, capability, compile_ptx, resources
from autotune.compiler.targets.cuda.rows.flat import FlatKernel
from autotune.compiler.targets.cuda.rows.kernel import RowKernel
from autotune.compiler.targets.cuda.source import CudaSchedule, CudaSource
from autotune.domains.fusion.task import FusionTask
from autotune.errors import BuildError, Unsupported
from autotune.task import Artifact, Config
from autotune.workload import Workload
from tests.support.edited import edited
from tests.support.zoo import ZOO, candidates, random_configs, workload, workloads

MORE = os.environ.get("AUTOTUNE_TEST_CONFIGS")
SLOW = {"every_function", "library_functions", "integers_32", "bits"}  # compile for seconds: their default is enough


def task_of(work: Workload, target: str = "sm_90") -> FusionTask:
    return FusionTask(work, "cuda:0", target=target, sms=132)


def one(name: str, **changes: object) -> tuple[FusionTask, Config]:
    """The task of a region of one kernel, and its default with some parameters changed."""
    task = task_of(workload(name))
    return task, {**task.default(), **changes}  # type: ignore[dict-item]


def source_of(task: FusionTask, config: Config) -> CudaSource:
    """The source that the task compiles for a region of one kernel."""
    (group,) = task.plan.groups
    schedule = CudaSchedule.from_config(config)
    program = build_program(group.graph, keep=schedule.keep != "reload", online=schedule.online)
    return (FlatKernel if program.pointwise else RowKernel)(program, schedule).source()


def ptx_of(name: str, **changes: object) -> str:
    return compile_ptx(source_of(*one(name, **changes)), "sm_90")[0]


def check(artifact: Artifact, task: FusionTask) -> None:
    target, sms = task.target()
    assert artifact.target == target
    shared = task.plan.scratch_numel(task.graph)
    assert artifact.scratch[: len(shared)] == shared  # what groups have for themselves follows
    assert len(artifact.kernels) >= len(task.plan.launches)
    reached = {tuple(ref) for kernel in artifact.kernels for ref in kernel.launch["args"]}
    named = {ref for group in task.plan.groups for ref in (*group.inputs, *group.outputs)}
    assert reached == named | {("scratch", k) for k in range(len(artifact.scratch))}
    for kernel in artifact.kernels:
        used, rule = kernel.resources, kernel.launch
        assert resources(kernel.code, kernel.entry)["registers"] == used["registers"]
        assert 8 <= used["registers"] <= 255
        assert 1 <= used["blocks_per_sm"] <= 32
        assert used["threads"] == rule["block"]
        assert rule["block"] % 32 == 0
        assert len(rule["align"]) == len(rule["args"])
        assert rule["cap"] <= sms * used["blocks_per_sm"]
        assert int(rule.get("grid", 1)) >= 1


@pytest.mark.parametrize("case", ZOO, ids=str)
def test_default_and_others_compile(case) -> None:
    for work in workloads(case.name):
        task = task_of(work)
        default = task.default()
        assert task.reject(default) is None
        check(task.build(default), task)
        if case.name in SLOW:
            continue
        more = int(MORE) if MORE else int(ZOO.index(case) % 8 == 5)
        for config in random_configs(task, more, seed=zlib.crc32(case.name.encode())):
            check(task.build(config), task)


@pytest.mark.parametrize("name", ["softmax_mask"])
def test_every_seed_compiles(name: str) -> None:
    task = task_of(workload(name))
    for config in candidates(task, 0, 0):
        check(task.build(config), task)


@pytest.mark.parametrize("target", ["sm_80", "sm_100"])
@pytest.mark.parametrize("name", ["ln_bf16", "cross_entropy"])
def test_other_architectures(name: str, target: str) -> None:
    task = task_of(workload(name), target)
    artifact = task.build(task.default())
    check(artifact, task)
    (kernel,) = artifact.kernels
    text, entry = compile_ptx(replace(source_of(task, task.default()), name=kernel.entry), target)
    assert entry == kernel.entry
    assert f".entry {entry}(" in text
    assert f".target {target}" in text
    assert capability(target) == divmod(int(target[3:]), 10)


@pytest.mark.parametrize(("name", "words"), [("ln_f32", 4), ("ln_bf16", 4), ("gelu", 4), ("ln_1001", 0)])
def test_aligned_rows_move_sixteen_bytes_at_a_time(name: str, words: int) -> None:
    text = ptx_of(name)
    accesses = re.findall(r"(?:ld|st)\.global\S*", text)
    assert {a[:2] for a in accesses} == {"ld", "st"}
    if name == "gelu":  # a row of any length: what does not fill a vector goes one by one
        single = [a for a in accesses if ".v" not in a]
        assert sorted(a[:2] for a in single) == ["ld", "st"]
        accesses = [a for a in accesses if ".v" in a]
        assert len(accesses) >= 4
    if words:
        assert all(a.endswith(f".v{words}.u32") for a in accesses)
    else:
        assert not any(".v" in a for a in accesses)


@pytest.mark.parametrize("name", ["ln_f32", "ln_bf16", "ln_f16", "ln_1001", "ln_long", "softmax_mask", "bgrl_bf16"])
def test_kept_values_stay_in_registers(name: str) -> None:
    task, config = one(name)
    assert config["keep"] == "registers"
    (kernel,) = task.build(config).kernels
    assert kernel.resources["stack"] == 0


@pytest.mark.parametrize("name", ["ln_bf16", "ln_f16", "bgrl_bf16", "swiglu_rms", "cross_entropy"])
def test_half_types_are_converted_in_line(name: str) -> None:
    text = ptx_of(name)
    assert not re.search(r"\bcall\b", text)
    assert not re.search(r"\bld\.local|\bst\.local", text)
    if name in ("ln_bf16", "bgrl_bf16", "swiglu_rms"):
        assert "cvt.rn.bf16x2.f32" in text


@pytest.mark.parametrize(
    ("name", "instruction"),
    [
        ("float8_rows", "cvt.rn.satfinite.e4m3x2.f32"),
        ("float8_rows_odd", "cvt.rn.satfinite.e5m2x2.f32"),
        ("float8_read", "cvt.rn.f16x2.e4m3x2"),
    ],
)
def test_float8_is_converted_in_line(name: str, instruction: str) -> None:
    text = ptx_of(name)
    assert instruction in text
    assert not re.search(r"\bcall\b|\bld\.local|\bst\.local", text)


@pytest.mark.parametrize("cap", [32, 40, 64])
def test_register_cap_is_kept(cap: int) -> None:
    task, config = one("bgrl_bf16", max_registers=cap)
    assert f".maxnreg {cap}" in source_text(task, config)
    (kernel,) = task.build(config).kernels
    assert kernel.resources["registers"] <= cap
    (free,) = task.build({**config, "max_registers": 0}).kernels
    assert free.resources["registers"] > 40  # so that the lower caps do cap something


def source_text(task: FusionTask, config: Config) -> str:
    """PTX with the cap in it, as the linker gets it."""
    return compile_ptx(source_of(task, config), "sm_90")[0]


def test_block_size_is_told_to_the_assembler() -> None:
    assert re.search(r"\.maxntid 96(?:, 1, 1)?\s", ptx_of("ln_f32", threads_per_row=96, rows_per_block=1))


def test_online_cross_entropy_walks_its_row_once() -> None:
    walked = {}
    for online in (False, True):
        # Eight packs a thread, so that no loop remains whose body the compiler may repeat.
        changes = {"keep": "reload", "online": online, "unroll": 8, "threads_per_row": 32, "rows_per_block": 4}
        task, config = one("cross_entropy_f32", **changes)
        walked[online] = len(re.findall(r"ld\.global\S*\.v4\.u32", source_text(task, config)))
        program = build_program(task.plan.groups[0].graph, keep=False, online=online)
        assert sum(p.walks for p in program.passes) == (1 if online else 2)
    assert walked == {False: 16, True: 8}


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        ("streaming", r"ld\.global\.cs\.nc\.v4"),
        ("no_allocate", r"ld\.global\.nc\.L1::no_allocate\.v4"),
        ("prefetch", r"ld\.global\.nc\.L1::no_allocate\.L2::256B\.v4"),
        ("evict_first", r"L2::evict_first\.b64[^}]*ld\.global[.\w:]*L2::cache_hint\.v4"),
    ],
)
def test_load_hints_are_for_inputs_that_are_read_once(hint: str, words: str) -> None:
    task, config = one("ln_f32", load_hint=hint)
    text = source_text(task, config)
    assert len(re.findall(words, text)) == len(re.findall(r"ld\.global\.nc\.v4", ptx_of("ln_f32"))) - 2
    assert len(re.findall(r"ld\.global\.nc\.v4", text)) == 2  # weight and bias, which all rows share
    task.build(config)


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        ("streaming", r"st\.global\.cs\.v4"),
        ("evict_first", r"L2::evict_first\.b64[^}]*st\.global\.L2::cache_hint\.v4"),
        ("evict_last", r"L2::evict_last\.b64[^}]*st\.global\.L2::cache_hint\.v4"),
    ],
)
def test_store_hints(hint: str, words: str) -> None:
    task, config = one("ln_f32", store_hint=hint)
    assert re.search(words, source_text(task, config))
    task.build(config)


@pytest.mark.parametrize(("threads", "shuffles", "barriers"), [(1, 0, 0), (8, 3, 0), (32, 5, 0), (128, 5, 1)])
def test_reductions_use_the_narrowest_scope(threads: int, shuffles: int, barriers: int) -> None:
    """Thread: nothing; warp: log2 shuffles; block: one barrier, then log2(warps) more shuffles."""
    text = ptx_of("minmax_prod", threads_per_row=threads, rows_per_block=max(1, 64 // threads), vector_bytes=4)
    warps = threads // 32
    per_reduction = shuffles + (warps - 1).bit_length() if warps > 1 else shuffles
    assert len(re.findall(r"shfl\.sync\.bfly", text)) == 5 * per_reduction
    assert len(re.findall(r"\bbar\.sync|\bbarrier\.sync", text)) == barriers


@pytest.mark.usefixtures("compiled_anew")
def test_the_same_candidate_is_the_same_cubin() -> None:
    """Stored once under its SHA-256, whoever compiles it."""
    task, config = one("ln_17")
    (a,), (b,) = task.build(config).kernels, task_of(workload("ln_17")).build(config).kernels
    assert a.sha256 == b.sha256


def test_a_kernel_that_does_not_compile_is_a_build_error() -> None:
    good = source_of(*one("ln_3"))
    broken = edited(good, lambda line: line.replace("rsqrt(", "no_such_function("))
    with pytest.raises(BuildError, match="numba: "):
        compile_ptx(broken, "sm_90")
    with pytest.raises(BuildError, match=r"numba: .*4\.1"):
        build(good, "sm_41")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"threads_per_row": 24}, "power of two up to 32 or a multiple of 32"),
        ({"threads_per_row": 1024, "rows_per_block": 2}, "more than 1024 threads"),
        ({"threads_per_row": 8, "rows_per_block": 2}, "less than a warp"),
        ({"vector_bytes": 32, "threads_per_row": 32}, "do not divide a row"),
    ],
)
def test_schedules_that_cannot_be_emitted_have_a_reason(changes: dict[str, object], words: str) -> None:
    name = "ln_1001" if "vector_bytes" in changes else "ln_f32"
    with pytest.raises(Unsupported, match=words):
        source_of(*one(name, **changes))


@pytest.mark.usefixtures("new_interpreters")
def test_a_numpy_without_row_stack_will_do_and_is_left_as_it_was() -> None:
    """numpy 2.5 has no ``row_stack``, which numba-cuda 0.30 reads when it compiles for the first time."""
    code = """
import numpy
if hasattr(numpy, "row_stack"):
    del numpy.row_stack
    numpy.__all__ = [name for name in numpy.__all__ if name != "row_stack"]
from autotune.compiler.targets.cuda.compile import build
from autotune.domains.fusion.task import FusionTask
from tests.support.zoo import workload

task = FusionTask(workload("softmax_mask"), "cuda:0", target="sm_90", sms=132)
print(len(task.build(task.default()).kernels), hasattr(numpy, "row_stack"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1 False\n"), done.stderr

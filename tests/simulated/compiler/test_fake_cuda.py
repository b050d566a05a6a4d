"""Emitted kernels run in plain Python and compute what the oracle does; and the fake finds what it is there to find."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest

from autotune.compiler.schedules.configurations import group_configs
from autotune.compiler.schedules.cuda import scheme_of
from autotune.compiler.targets.cuda.source import Listing
from autotune.domains.fusion.task import FusionTask
from tests.support.edited import edited
from tests.support.fake_cuda import KernelError, Machine, check_group
from tests.support.fake_intrinsics import Pointer
from tests.support.zoo import BY_NAME, random_configs, workloads

SMALL = [
    "ln_3", "ln_17", "ln_1001", "ln_1", "softmax_mask", "cross_entropy_f32", "lstm", "gelu_13",
    "gru_step", "gru_step_odd", "lstm_steps", "gated_vector", "vector_residual_rms", "classify", "dequantized_vector",
    "transposed", "transposed_types", "nhwc",
    "rope_odd", "group_norm", "integers", "bits", "int16", "mean_cross_entropy", "expanded", "strided", "uint8",
    "quantize", "scalars", "every_function", "library_functions", "minmax_prod", "embedding_ln", "upsample_silu",
    "points_ln",
    "log_softmax_backward", "momentum", "unrelated", "packed_backward", "packed_backward_odd", "dropout_residual_ln",
    "embeddings_ln_dropout",
]  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_kernels_of_the_zoo_compute_what_the_oracle_does(name: str) -> None:
    for work in workloads(name):
        task = FusionTask(work, "cuda:0", target="sm_90", sms=3)
        seed = zlib.crc32(name.encode())
        for n, config in enumerate([task.default(), *random_configs(task, 1, seed)]):
            for group, part in zip(task.plan.groups, group_configs(task.plan, config), strict=True):
                made = scheme_of(group.graph).emit(group.graph, part, 3)
                check_group(group.graph, made, seed=n, special=bool(n))


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize(("threads", "rows", "vector_bytes"), [(16, 4, 8), (32, 4, 4), (64, 1, 4), (8, 8, 4)])
@pytest.mark.parametrize("name", ["dropout_residual_ln", "embeddings_ln_dropout", "ln_17"])
def test_what_later_passes_need_is_done_early(
    name: str, threads: int, rows: int, vector_bytes: int, online: bool
) -> None:
    (work,) = workloads(name)
    task = FusionTask(work, "cuda:0", target="sm_90", sms=3)
    (group,) = task.plan.groups
    scheme = scheme_of(group.graph)
    shape = {"threads_per_row": threads, "rows_per_block": rows, "online": online, "prefetch": True}
    shape |= {"vector_bytes": 2 if name == "ln_17" else vector_bytes}
    config = scheme.normalize(group.graph, scheme.default(group.graph) | shape)
    assert config["prefetch"] == (name != "ln_17")  # its rows have no whole vectors
    made = scheme.emit(group.graph, config, 3)
    assert ("tied(" in made.sources[0].text) == config["prefetch"]
    check_group(group.graph, made, special=not online)


def test_columns_and_their_finish() -> None:
    task = FusionTask(workloads("layer_norm_backward")[0], "cuda:0", target="sm_90", sms=3)
    group = task.plan.groups[0]
    scheme = scheme_of(group.graph)
    assert scheme.name == "columns"
    config = scheme.default(group.graph) | {"blocks_per_sm": 1}
    made = scheme.emit(group.graph, config, 3)
    assert len(made.sources) == 2
    check_group(group.graph, made, special=True)


def test_a_wrong_kernel_does_not_pass() -> None:
    (work,) = workloads("ln_1001")
    task = FusionTask(work, "cuda:0", target="sm_90", sms=3)
    (group,) = task.plan.groups
    config = {**task.default(), "threads_per_row": 64, "rows_per_block": 1, "keep": "reload"}
    made = scheme_of(group.graph).emit(group.graph, config, 3)
    check_group(group.graph, made)
    (good,) = made.sources
    for bad, words in (
        (edited(good, lambda line: "" if "syncthreads" in line else line), "race"),
        (edited(good, lambda line: line.replace("c < 1001", "c < 1000")), "output 0"),
    ):
        with pytest.raises(KernelError, match=words):
            check_group(group.graph, replace(made, sources=(bad,)))


def source(*body: str, params: tuple[str, ...] = ("f32",), block: int = 32, shared: int = 0) -> Listing:
    return Listing((), ("tid = int32(cuda.threadIdx.x)", *body), params, {"dynamic": False, "shared": shared}, block, 0)


def run(kernel: Listing, n: int = 64, once: bool = True) -> None:
    Machine(kernel, 1).run([Pointer.poisoned("float32", n, once)], 0)


def test_a_race_is_found() -> None:
    lines = ("s = cuda.shared.array(32, float32)", "s[tid] = float32(1)")
    read = "st_f32_1_d(p0, tid, s[tid ^ 1])"
    run(source(*lines, "cuda.syncthreads()", read))
    with pytest.raises(KernelError, match="race for word"):
        run(source(*lines, read))
    with pytest.raises(KernelError, match="race for word"):
        run(source(*lines, "cuda.syncthreads()", "x = s[tid ^ 1]", "s[tid] = x"))


def test_a_barrier_that_some_threads_miss_is_found() -> None:
    with pytest.raises(KernelError, match="wait for ever at syncthreads"):
        run(source("if tid < 16:", "    cuda.syncthreads()"))
    with pytest.raises(KernelError, match="wait for ever at shfl_xor_sync"):
        run(source("if tid < 16:", "    y = cuda.shfl_xor_sync(0xffffffff, tid, 1)"))


def test_accesses_outside_and_unaligned_ones_are_found() -> None:
    with pytest.raises(KernelError, match="of a tensor of 31"):
        run(source("st_f32_1_d(p0, tid, float32(0))"), n=31)
    with pytest.raises(KernelError, match="not aligned"):
        run(source("if tid == 0:", "    st_f32_4_d(p0, 2, (float32(0), float32(0), float32(0), float32(0)))"))
    with pytest.raises(KernelError, match="written twice"):
        run(source("st_f32_1_d(p0, tid >> 1, float32(0))"))
    with pytest.raises(KernelError, match="outside a shared array"):
        run(source("s = cuda.shared.array(31, float32)", "s[tid] = float32(0)"))


def test_shuffles_and_barriers_in_device_functions() -> None:
    text = "def f0(a):\n    return a + cuda.shfl_xor_sync(0xffffffff, a, 1)"
    kernel = source("st_f32_1_d(p0, tid, float32(f0(tid)))")
    p = Pointer.poisoned("float32", 32, True)
    Machine(Listing((text,), kernel.lines, ("f32",), kernel.launch, 32, 0), 1).run([p], 0)
    assert p.tensor().tolist() == [2 * (t // 2 * 2) + 1 for t in range(32)]


def test_every_case_is_one_of_the_zoo() -> None:
    assert set(SMALL) <= set(BY_NAME)

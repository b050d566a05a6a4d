"""Kernels run in plain Python and compute the oracle's results; and the machine detects its faults."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
from torch import Tensor

from autotune.compiler.kernel.nodes import (
    Assign,
    Cast,
    Const,
    Do,
    Expr,
    Function,
    Intrinsic,
    Pointer,
    Return,
    Stmt,
    Store,
    Var,
    when,
)
from autotune.compiler.planner.groups import group_configs
from autotune.compiler.schedules.cuda import scheme_of
from autotune.compiler.targets.cuda.device import BARRIER, THREAD, Shared, ThreadIndex, shuffle
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
from autotune.compiler.targets.cuda.source import CudaSource
from autotune.domains.fusion.task import FusionTask
from autotune.errors import Superseded
from tests.support.edited import changed, without
from tests.support.simulator.errors import KernelError
from tests.support.simulator.groups import check_group
from tests.support.simulator.machine import Machine
from tests.support.simulator.tensors import Pointer as Memory
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
def test_kernels_of_the_zoo_agree_with_the_oracle(name: str) -> None:
    for work in workloads(name):
        task = FusionTask(work, "cuda:0", target="sm_90", sms=3)
        seed = zlib.crc32(name.encode())
        for n, config in enumerate([task.default(), *random_configs(task, 1, seed)]):
            for group, part in zip(task.plan.groups, group_configs(task.plan, config), strict=True):
                made = scheme_of(group.graph).emit(group.graph, part, 3)
                check_group(group.graph, made, seed=n, special=bool(n))


def test_loads_of_later_passes_are_no_longer_issued_early() -> None:
    """Kernels of earlier versions did that without a persistent grid; an audit accepts them as superseded."""
    (work,) = workloads("dropout_residual_ln")
    (group,) = FusionTask(work, "cuda:0", target="sm_90", sms=3).plan.groups
    scheme = scheme_of(group.graph)
    config = scheme.default(group.graph) | {"prefetch": True}
    assert scheme.normalize(group.graph, config)["prefetch"] is False
    with pytest.raises(Superseded, match="which this autotune lacks"):
        scheme.emit(group.graph, config, 3)
    persistent = scheme.normalize(group.graph, config | {"blocks_per_sm": 2})
    assert persistent["prefetch"] is True
    check_group(group.graph, scheme.emit(group.graph, persistent, 3))


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
        (changed(good, without(BARRIER)), "race"),
        (changed(good, lambda x: CudaEmitter.column < 1000 if x == (CudaEmitter.column < 1001) else x), "output 0"),
    ):
        with pytest.raises(KernelError, match=words):
            check_group(group.graph, replace(made, sources=(bad,)))


S, X, VALUE = Var("s", "float32"), Var("x", "float32"), Const(1.0, "float32")
NEIGHBOUR = THREAD ^ 1


def source(*body: Stmt, block: int = 32) -> CudaSource:
    launch = {"dynamic": False, "shared": 0}
    return CudaSource((Assign(THREAD, ThreadIndex()), *body), ("f32",), launch, block, 0)


def stored(at: Expr, *values: Expr) -> Store:
    return Store("float32", "default", Pointer(0), at, values)


def run(kernel: CudaSource, n: int = 64, once: bool = True) -> Tensor:
    memory = Memory.poisoned("float32", n, once)
    Machine(kernel, 1).run([memory], 0)
    return memory.tensor()


def test_a_race_is_found() -> None:
    write = (Shared(S, 32, "float32"), Assign(S[THREAD], VALUE))
    read = stored(THREAD, S[NEIGHBOUR])
    run(source(*write, BARRIER, read))
    with pytest.raises(KernelError, match="race for word"):
        run(source(*write, read))
    with pytest.raises(KernelError, match="race for word"):
        run(source(*write, BARRIER, Assign(X, S[NEIGHBOUR]), Assign(S[THREAD], X)))


def test_a_race_is_found_behind_two_readers_and_between_views_of_one_array() -> None:
    words = Var("w", "uint32")
    everybody = (Shared(S, 1, "float32"), Assign(X, S[Const(0)]))
    with pytest.raises(KernelError, match="race for word"):
        run(source(*everybody, when(THREAD.equals(7), [Assign(S[Const(0)], VALUE)])))
    run(source(*everybody, BARRIER, when(THREAD.equals(7), [Assign(S[Const(0)], VALUE)])))
    kernel = source(Shared(S, 0, "float32"), Shared(words, 0, "uint32"), Assign(S[THREAD], VALUE), Do(words[NEIGHBOUR]))
    with pytest.raises(KernelError, match="race for word"):
        run(replace(kernel, launch={"dynamic": False, "shared": 128}))


def test_a_barrier_that_some_threads_miss_is_found() -> None:
    with pytest.raises(KernelError, match="wait for ever at syncthreads"):
        run(source(when(THREAD < 16, [BARRIER])))
    with pytest.raises(KernelError, match="wait for ever at shfl_xor_sync"):
        run(source(when(THREAD < 16, [Do(shuffle(THREAD, 1))])))


def test_accesses_outside_and_unaligned_ones_are_found() -> None:
    with pytest.raises(KernelError, match="of a tensor of 31"):
        run(source(stored(THREAD, VALUE)), n=31)
    with pytest.raises(KernelError, match="not aligned"):
        run(source(when(THREAD.equals(0), [stored(Const(2), VALUE, VALUE, VALUE, VALUE)])))
    with pytest.raises(KernelError, match="written twice"):
        run(source(stored(THREAD >> 1, VALUE)))
    with pytest.raises(KernelError, match="outside a shared array"):
        run(source(Shared(S, 31, "float32"), Assign(S[THREAD], VALUE)))


def test_shuffles_and_barriers_in_device_functions() -> None:
    inner = Function((THREAD,), (BARRIER, Return((THREAD + shuffle(THREAD, 1),), alone=True)))
    outer = Function((THREAD,), (Return((inner(),), alone=True),))
    found = run(source(stored(THREAD, Cast("float32", outer()))), n=32)
    assert found.tolist() == [2 * (t // 2 * 2) + 1 for t in range(32)]


def test_an_unknown_construct_is_an_error_of_the_simulator() -> None:
    with pytest.raises(LookupError, match="no intrinsic sleep"):
        run(source(Do(Intrinsic("sleep", ()))))
    with pytest.raises(AttributeError, match="Sleep"):
        run(source(Sleep()))


class Sleep(Stmt):
    """A statement of no target."""


def test_every_case_is_one_of_the_zoo() -> None:
    assert set(SMALL) <= set(BY_NAME)

"""Several bodies in one launch: each block finds its body, its tensors and its place among the blocks."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from autotune.compiler.assemble import packed
from autotune.compiler.kernel.nodes import Cast, Const, Function, functions_of
from autotune.compiler.planner.groups import group_configs, pack, read_text, write_text
from autotune.compiler.planner.plan import build_plan, greedy
from autotune.compiler.targets.cuda.compile import build, compile_ptx
from autotune.compiler.targets.cuda.device import BLOCK, EXTENT
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
from autotune.compiler.targets.cuda.source import Body, CudaSource, Ref, Run, deal, pack_bodies
from autotune.domains.fusion.task import FusionTask
from autotune.errors import Unsupported
from autotune.ir.graph import Graph
from tests.support.cpu_graphs import Build, layer_norm, softmax, softmax_of_everything
from tests.support.edited import changed
from tests.support.many_parts import beside, row_sums, run_packed, run_plan, task_of, update
from tests.support.simulator.machine import Machine
from tests.support.simulator.tensors import Pointer

ODD = (1, 3, 5, 37, 129, 1023, 2050)


def optimizer(*sizes: int, **kind) -> FusionTask:
    return task_of(beside(*(update(n, **kind) if n > 1 else update(**kind) for n in sizes)))


def only_launch(task: FusionTask, **changes) -> tuple[CudaSource, tuple[Ref, ...]]:
    (numbers,) = task.plan.launches
    config = {k: changes.get(k.partition(".")[2], v) for k, v in task.default().items()}
    return packed(task.plan, numbers, group_configs(task.plan, config), 3)


def bodies_of(source: CudaSource) -> list[Function]:
    """The functions of a packed kernel that are whole bodies."""
    return [f for f in functions_of(source.body) if BLOCK in f.params]


@pytest.mark.parametrize("vector", [4, 16])
@pytest.mark.parametrize("blocks_per_sm", [0, 2])
def test_tensors_of_odd_sizes_share_one_body(vector: int, blocks_per_sm: int) -> None:
    task = optimizer(*ODD)
    assert [len(launch) for launch in task.plan.launches] == [7]
    config = task.default()
    prefix = next(iter(config)).partition(".")[0]
    assert {k.partition(".")[0] for k in config} == {prefix}
    config |= {f"{prefix}.vector_bytes": vector, f"{prefix}.threads_per_row": 64, f"{prefix}.unroll": 2}
    config |= {f"{prefix}.blocks_per_sm": blocks_per_sm}
    (grid,) = run_packed(task, config, seed=vector)
    assert grid >= 7
    source, _ = packed(task.plan, task.plan.launches[0], group_configs(task.plan, config), 3)
    assert len(bodies_of(source)) == 1


def test_a_tensor_of_one_element_is_one_of_the_family() -> None:
    """Its graph has no axes, and the canonical order of its slots is another."""
    task = optimizer(1, 640)
    assert sorted(len(g.graph.extents) for g in task.plan.groups) == [0, 1]
    assert len(set(task.plan.leaders)) == 1
    run_packed(task, seed=1)
    run_packed(optimizer(1, 1, 1), seed=2)


def test_types_of_storage_and_shared_numbers() -> None:
    run_packed(optimizer(5, 300, 77, storage="bfloat16"), seed=3)
    parts = [update(n, rate=True) for n in (40, 9, 130)]
    task = task_of(beside(*parts, shared={(1, 2): (0, 2), (2, 2): (0, 2)}))
    source, refs = only_launch(task)
    assert len(refs) == 2 * 3 + 1 + 2 * 3
    run_packed(task, seed=4)
    assert len(source.params) == len(refs)


def test_special_values() -> None:
    run_packed(optimizer(5, 1000), seed=5, special=True)


def test_different_bodies_share_a_launch() -> None:
    task = task_of(beside(softmax(5, 96), update(333), layer_norm(3, 64), row_sums(9, 40), update(7)))
    assert [len(launch) for launch in task.plan.launches] == [5]
    assert len(set(task.plan.leaders)) == 4
    (grid,) = run_packed(task, seed=6)
    blocks = [int(c["threads_per_row"]) * int(c["rows_per_block"]) for c in group_configs(task.plan, task.default())]
    assert len(set(blocks)) == 1
    assert grid >= 5


def test_equal_groups_that_take_no_extent() -> None:
    """A sum of everything has no rows: groups of one extent share a body, others have their own."""

    def total(n: int) -> Graph:
        b = Build(n)
        b.out(b.reduce("sum", b.load("float32", 0), 0), "float32")
        return b.graph()

    task = task_of(beside(total(70), total(70), total(33)))
    source, _ = only_launch(task)
    assert len(bodies_of(source)) == 2
    assert "n0" not in source.text
    run_packed(task, seed=7)


def test_a_wrong_leaf_does_not_pass() -> None:
    task = optimizer(37, 130, 500)
    source, refs = only_launch(task)
    bad = changed(source, lambda x: Cast("int32", Const(2)) if x == Cast("int32", Const(1)) else x)
    pointers = [
        Pointer.zeros("float32", 500) if kind == "input" else Pointer.poisoned("float32", 500, once=True)
        for kind, _ in refs
    ]
    Machine(source, int(source.launch["grid"])).run(pointers, 1)
    for p, (kind, _) in zip(pointers, refs, strict=True):
        assert kind == "input" or p.written is not None
    written = [int(p.written.sum()) for p in pointers if p.written is not None]
    assert sorted(written) == [37, 37, 130, 130, 500, 500]
    for p in pointers:
        if p.written is not None:
            p.written[:] = False
    Machine(bad, int(bad.launch["grid"])).run(pointers, 1)  # no block is the last of two: the rest is not written
    assert sorted(int(p.written.sum()) for p in pointers if p.written is not None) != sorted(written)


def test_it_compiles_and_its_parameters_fit() -> None:
    task = optimizer(*range(101, 101 + 2 * 60, 2))
    source, refs = only_launch(task)
    assert len(refs) == 240
    text, _ = compile_ptx(source, "sm_90")
    assert len(re.findall(r"\.param \.u64", text.partition("{")[0])) == 240
    assert "call" not in text  # bodies are inlined
    assert ".v4.u32" in text
    kernel = build(source, "sm_90")
    assert kernel.resources["stack"] == 0
    alone = optimizer(100_001)
    lone = alone.build(alone.default()).kernels[0]
    assert kernel.resources["registers"] <= lone.resources["registers"] + 16


def test_the_artifact_of_a_packed_region() -> None:
    task = task_of(beside(update(1000), update(3001), softmax(4, 64)))
    artifact = task.build(task.default())
    (kernel,) = artifact.kernels
    assert kernel.launch["grid"] == kernel.launch["inner"] >= 3
    assert kernel.launch["dynamic"] is False
    assert sorted(map(tuple, kernel.launch["args"])) == sorted(
        [("input", k) for k in range(5)] + [("output", k) for k in range(5)]
    )


def source(block: int = 64, **launch) -> CudaSource:
    rule = {"dynamic": True, "inner": 1, "per_block": 10, "blocks_per_sm": 0, "shared": 0, "align": [4]} | launch
    return CudaSource((), ("f32",), rule, block, 0)


def runs(*extents: int) -> tuple[Run, ...]:
    return tuple(Run((("input", k),), n, n) for k, n in enumerate(extents))


def test_blocks_are_dealt_by_work() -> None:
    plain = Body(source(), runs(1, 10, 11, 1000))
    assert deal([plain], 4) == [[1, 1, 2, 100]]
    persistent = Body(source(blocks_per_sm=5), runs(1, 100, 900))
    assert deal([persistent], 4) == [[1, 2, 18]]
    assert deal([persistent], 1000) == [[1, 10, 90]]  # no more than alone
    assert deal([plain, persistent], 4) == [[1, 1, 2, 100], [1, 1, 9]]


def test_groups_that_cannot_share_a_launch_are_refused() -> None:
    with pytest.raises(Unsupported, match="blocks of 128 and of 64 threads"):
        pack_bodies([Body(source(), runs(5)), Body(source(128), runs(5))], 4)
    with pytest.raises(Unsupported, match="wait for each other"):
        pack_bodies([Body(source(), runs(5)), Body(replace(source(), cluster=2), runs(5))], 4)


def test_the_loosest_register_cap_holds() -> None:
    a, b = replace(source(), max_registers=32), replace(source(), max_registers=64)
    assert pack_bodies([Body(a, runs(5)), Body(b, runs(5))], 4)[0].max_registers == 64
    assert pack_bodies([Body(a, runs(5)), Body(source(), runs(5))], 4)[0].max_registers == 0


def test_a_plan_may_pack_more_than_the_default() -> None:
    task = optimizer(33, 70)
    one, two = (g.roots for g in task.plan.groups)
    text = write_text(((one,), (two,)))
    apart = build_plan(task.graph, read_text(text))
    task.plan = apart
    assert run_packed(task, seed=8) == [1, 1]


def test_the_last_block_of_a_row_of_odd_length() -> None:
    """One tensor: whole vectors, then what is left over, whatever the length is to the block's."""
    for n in (2, 3, 4, 7, 511, 512, 513, 1025, 1027):
        task = optimizer(n)
        for blocks_per_sm in (0, 1):
            config = task.default() | {"threads_per_row": 64, "unroll": 2, "blocks_per_sm": blocks_per_sm}
            run_packed(task, config, seed=n)


def test_a_body_that_misses_its_rest_is_found() -> None:
    task = optimizer(7)
    launch, refs = only_launch(task)
    bad = changed(launch, lambda x: CudaEmitter.column + 1 < EXTENT if x == (CudaEmitter.column < EXTENT) else x)
    pointers = [
        Pointer.zeros("float32", 7) if kind == "input" else Pointer.poisoned("float32", 7, once=True)
        for kind, _ in refs
    ]
    Machine(bad, int(launch.launch["grid"])).run(pointers, 1)
    assert not all(p.written.all() for p in pointers if p.written is not None)


def column_sums(rows: int, cols: int) -> Graph:
    b = Build(rows, cols)
    b.out(b.reduce("sum", b.load("float32", 0, 1), 0), "float32")
    return b.graph()


def test_bias_gradients_share_a_launch() -> None:
    """Sums over rows: of one family if only the columns differ, which stay; together with rows and elements."""
    shapes = [(48, 64), (48, 128), (30, 64)]
    task = task_of(beside(*(column_sums(*s) for s in shapes), softmax(6, 100), update(77)))
    assert [len(launch) for launch in task.plan.launches] == [5]
    config = task.default()
    assert task.reject(config) is None
    assert task.normalize(config) == config
    run_packed(task, config, seed=9)


def test_large_groups_share_a_launch_with_their_like_only() -> None:
    task = task_of(beside(update(3_000_000), update(2_000_001), softmax(6, 100), row_sums(6, 40)))
    assert sorted(len(launch) for launch in task.plan.launches) == [2, 2]


def maxima_then_rows(rows: int, cols: int) -> Graph:
    """Column maxima, and row sums of the differences: two dependent kernels."""
    b = Build(rows, cols)
    x = b.load("float32", 0, 1)
    b.out(b.reduce("sum", b.sub(x, b.reduce("max", x, 0)), 1), "float32")
    return b.graph()


def test_values_between_launches() -> None:
    """Two unrelated parts, each of two dependent groups, side by side in both launches; and another group."""
    task = task_of(beside(maxima_then_rows(40, 64), maxima_then_rows(24, 32), update(50)))
    shape = pack(build_plan(task.graph, greedy(task.graph, "cpu")))
    assert [len(launch) for launch in shape] == [3, 2]
    assert len(run_plan(task, write_text(shape), seed=1)) == 2


def test_partial_results_and_values_between_launches() -> None:
    """Partial maxima, their maximum, partial sums, their sum, and the quotients."""
    assert len(run_plan(task_of(softmax_of_everything(64, 512)), "r1 / r4 / o0", special=True)) == 5

"""Phases of a plan in one launch: bodies behind grid barriers, on any number of blocks, against the oracle."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cpu_graphs import Build, layer_norm, layer_norm_backward, softmax, softmax_of_everything
from fake_cuda import KernelError, Machine, grid_of
from fake_intrinsics import Pointer
from many_parts import beside, check_outputs, row_sums, task_of, update
from torch import Tensor
from zoo import workloads

from autotune.compiler.assemble import build_artifact, compile_source, packed, phased
from autotune.compiler.planner.packing import pack
from autotune.compiler.planner.plan import Shape, build_plan, greedy, make_plan, read_text, write_text
from autotune.compiler.schedules.cuda import scheme_of
from autotune.compiler.targets.cuda.compile import build, compile_ptx
from autotune.compiler.targets.cuda.intrinsics import cluster as intrinsics_cluster
from autotune.compiler.targets.cuda.intrinsics.cluster import STATE_WORDS
from autotune.compiler.targets.cuda.kernels import Ref
from autotune.compiler.targets.cuda.phases import Phase, coherent, in_phases
from autotune.compiler.targets.cuda.source import CudaSource
from autotune.domains.fusion.program_spec import workloads_of
from autotune.domains.fusion.task import FusionTask
from autotune.errors import BuildError, Unsupported
from autotune.ir.graph import Graph
from autotune.ir.interpret import make_inputs
from autotune.task import Config


def columns_then_rows(rows: int, cols: int) -> Graph:
    """Column maxima, row sums of what they leave, column maxima of what those leave: three dependent kernels."""
    b = Build(rows, cols)
    x = b.load("float32", 0, 1)
    y = b.sub(x, b.reduce("max", x, 0))
    z = b.sub(y, b.reduce("sum", y, 1))
    b.out(b.sub(z, b.reduce("max", z, 0)), "float32")
    return b.graph()


THREE = "r1 > r3,r5 > o0"
"""A plan of the above: schemes outer, tile and flat."""


EVERYTHING = "r1 > r4 > o0"


def maxima_then_rows(rows: int, cols: int) -> Graph:
    """Column maxima, and row sums of what they leave: two dependent kernels."""
    b = Build(rows, cols)
    x = b.load("float32", 0, 1)
    b.out(b.reduce("sum", b.sub(x, b.reduce("max", x, 0)), 1), "float32")
    return b.graph()


def apart(task: FusionTask, *over: tuple[int, ...]) -> Shape:
    """A launch for the roots of each set of axes, in this order; outputs go with the reductions they are."""
    graph = task.graph
    groups = [[f"r{i}" for i in graph.live if graph.values[i].over == axes] for axes in over]
    for k, o in enumerate(graph.outputs):
        last = max((i for i in _before(graph, o.value) if graph.values[i].over), key=lambda i: over.index(
            graph.values[i].over))  # fmt: skip
        groups[over.index(graph.values[last].over)].append(f"o{k}")
    return tuple(((tuple(g),),) for g in groups)


def _before(graph: Graph, i: int) -> set[int]:
    return {i}.union(*(_before(graph, a) for a in graph.values[i].args))


def one(shape: Shape) -> str:
    """All launches of a plan as phases of one."""
    return write_text((tuple(launch[0] for launch in shape),))


def run(task: FusionTask, text: str, blocks: int, seed: int = 0, special: bool = False, **changes: object) -> list[int]:
    """Run a plan by the fake machine, launches of several phases by so many blocks, and compare with the oracle.

    Returns:
        Bodies of each launch.
    """
    graph, plan, parts = task.graph, make_plan(task.graph, "cuda", text), schedule(task, text, **changes)
    inputs = make_inputs(graph, seed=seed, special=special)
    memory = {
        "input": [Pointer.reading(t, graph.inputs[k]) for k, t in enumerate(inputs)],
        "output": [Pointer.poisoned(o.dtype, graph.output_numel(k), once=True) for k, o in enumerate(graph.outputs)],
        "scratch": [Pointer.poisoned(dtype, n) for dtype, n, _ in plan.scratch_numel(graph)],
    }
    bodies = []
    for launch in plan.launches:
        extent = 1
        refs: Sequence[Ref]
        if len(launch) > 1:
            source, refs, private = phased(plan, launch, parts, task.target()[1], len(memory["scratch"]))
            memory["scratch"] += [(Pointer.zeros if p.state else Pointer.poisoned)(p.storage, p.numel) for p in private]
            source = replace(source, launch={**source.launch, "grid": min(blocks, int(source.launch["inner"]))})
        elif len(launch[0]) > 1:
            source, refs = packed(plan, launch[0], parts, task.target()[1])
        else:
            group = plan.groups[launch[0][0]]
            made = scheme_of(group.graph).emit(group.graph, parts[launch[0][0]], task.target()[1])
            (source,), extent = made.sources, group.graph.extents[0]
            refs = [*group.inputs, *group.outputs]
        pointers = [memory[kind][n] for kind, n in refs]
        for p, short, need in zip(pointers, source.params, source.launch["align"], strict=True):
            p.check(short, int(need))
        Machine(source, grid_of(source, extent, 3), seed).run(pointers, extent)
        bodies.append(1 + sum("grid_barrier" in line for line in source.body))
        if len(launch) > 1:
            assert not pointers[-1].data.any()
    check_outputs(graph, inputs, [p.tensor() for p in memory["output"]])
    return bodies


def schedule(task: FusionTask, text: str, **changes: object) -> list[Config]:
    """The groups' configurations under a plan: their defaults with changes, agreed and normalised."""
    plan = make_plan(task.graph, "cuda", text)
    parts = [on.default(g.graph) for on, g in task.sides(plan)]
    config = task.joined(plan, [c | {k: v for k, v in changes.items() if k in c} for c in parts])  # type: ignore[misc]
    assert task.reject(config) is None
    assert task.normalize(config) == config
    return task.parts_of(plan, config)


@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_three_phases_with_values_between(blocks: int) -> None:
    task = task_of(columns_then_rows(40, 64))
    assert run(task, THREE, blocks, seed=blocks, special=blocks == 3) == [3]


@pytest.mark.parametrize("blocks_per_sm", [0, 1])
def test_blocks_that_go_on_and_blocks_that_are_counted(blocks_per_sm: int) -> None:
    """Persistent bodies take the grid's number of blocks, others' blocks are shared out to them in turns."""
    task = task_of(columns_then_rows(48, 64))
    parts = schedule(task, THREE, blocks_per_sm=blocks_per_sm)
    source, _, _ = phased(make_plan(task.graph, "cuda", THREE), ((0,), (1,), (2,)), parts, 3, 2)
    loops = sum(line.startswith("for b") for line in source.body)
    assert loops == 3 if not blocks_per_sm else loops < 3
    run(task, THREE, 2, blocks_per_sm=blocks_per_sm)


@pytest.mark.parametrize("blocks", [2, 7])
def test_statistics_of_columns_beside_a_softmax_of_rows(blocks: int) -> None:
    """Reductions over different axes, nothing between them: the second phase finds the input in the cache."""
    task = FusionTask(workloads("relu_statistics")[0], "cuda:0", target="sm_90", sms=3)
    kinds = list(dict.fromkeys(v.over for i in task.graph.live if (v := task.graph.values[i]).over))
    text = one(apart(task, *kinds))
    assert run(task, text, blocks, seed=blocks, special=blocks == 2)[0] >= 2


def test_a_group_of_two_kernels_is_two_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The partial sums of a columns group and its finish, then the rows."""
    monkeypatch.setattr("autotune.compiler.schedules.cuda.columns.MOST_ROWS_AT_ONCE", 64)
    task = task_of(layer_norm_backward(96, 64))
    text = one(apart(task, (0,), (1,)))
    plan = make_plan(task.graph, "cuda", text)
    assert [scheme_of(g.graph).name for g in plan.groups] == ["columns", "rows"]
    parts = schedule(task, text, finish="kernel", cluster=2)
    assert [c["finish"] for c in parts] == ["barrier", "kernel"]
    for blocks in (1, 4):
        assert run(task, text, blocks, seed=blocks) == [3]


def test_softmax_of_everything() -> None:
    """Partial maxima, their maximum, partial sums, their sum, and the quotients: five phases."""
    task = task_of(softmax_of_everything(64, 512))
    plan = make_plan(task.graph, "cuda", EVERYTHING)
    assert [scheme_of(g.graph).name for g in plan.groups] == ["columns", "columns", "flat"]
    assert run(task, EVERYTHING, 3, special=True) == [5]


def test_packed_groups_are_a_phase() -> None:
    """Two unrelated parts, each of two dependent groups, side by side in both phases; another group beside."""
    task = task_of(beside(maxima_then_rows(40, 64), maxima_then_rows(24, 32), update(50)))
    shape = pack(build_plan(task.graph, greedy(task.graph, "cpu")))
    assert [len(launch[0]) for launch in shape] == [3, 2]
    assert run(task, one(shape), 4, seed=1) == [2]


def test_a_load_that_is_not_coherent_is_found() -> None:
    task = task_of(columns_then_rows(40, 64))
    plan, parts = make_plan(task.graph, "cuda", THREE), schedule(task, THREE)
    source, refs, private = phased(plan, plan.launches[0], parts, 3, 2)
    inputs = make_inputs(task.graph, seed=0)
    bad = replace(source, functions=tuple(re.sub(r"_w\(", "_d(", f) for f in source.functions))
    assert bad != source
    for made, words in ((source, ""), (bad, "read-only path")):
        memory = {
            "input": [Pointer.reading(inputs[0], "float32")],
            "output": [Pointer.poisoned("float32", 40 * 64, once=True)],
            "scratch": [Pointer.poisoned(d, n) for d, n, _ in plan.scratch_numel(task.graph)]
            + [Pointer.zeros(p.storage, p.numel) for p in private],
        }
        machine = Machine(replace(made, launch={**made.launch, "grid": 2}), 2)
        if words:
            with pytest.raises(KernelError, match=words):
                machine.run([memory[kind][n] for kind, n in refs], 1)
        else:
            machine.run([memory[kind][n] for kind, n in refs], 1)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("gap", [0, 1])
def test_parts_that_an_earlier_phase_wrote_are_read_coherently(gap: int, prefetch: bool) -> None:
    """One of two parts side by side, whose pointer is selected, or of two with a gap between."""
    back, sizes = torch.ops.aten.select_backward, [40, 2 + gap, 64]

    def parts(x: Tensor, y: Tensor) -> Tensor:
        return (back(x.sum(0), sizes, 1, 0) + back(y, sizes, 1, 1 + gap)).softmax(-1)

    ((work, _),) = workloads_of(parts, (torch.randn(8, 40, 64), torch.randn(40, 64)))
    task = FusionTask(work, "cuda:0", target="sm_90", sms=3)
    (first,) = (i for i, v in enumerate(task.graph.values) if v.over and task.graph.values[v.args[0]].op == "load")
    rest = [f"r{i}" for i in task.graph.live if task.graph.values[i].over and i != first]
    changes = {"prefetch": prefetch, "threads_per_row": 16, "rows_per_block": 2, "blocks_per_sm": 1}
    text = f"r{first} > {','.join(rest)},o0"
    plan = make_plan(task.graph, "cuda", text)
    source, _, _ = phased(plan, plan.launches[0], schedule(task, text, **changes), 3, len(plan.scratch))
    kind = ("lr" if not gap else "lw") if prefetch else ("ld" if not gap else "lg")
    assert re.search(rf"\b{kind}_f32_4_w\({'p' if gap else 's'}\d", "\n".join(source.functions))
    assert run(task, text, 3, **changes) == [2]


def test_what_goes_on_without_the_barrier_is_wrong() -> None:
    task = task_of(columns_then_rows(40, 64))
    real = in_phases

    def without(*args: object, **kw: object) -> tuple[CudaSource, tuple[Ref, ...]]:
        source, refs = real(*args, **kw)  # type: ignore[arg-type]
        return replace(source, body=tuple(x for x in source.body if "grid_barrier" not in x)), refs

    with pytest.MonkeyPatch.context() as m:
        m.setattr("autotune.compiler.assemble.in_phases", without)
        with pytest.raises(KernelError, match="output 0"):
            run(task, THREE, 4)


def test_the_artifact_takes_the_blocks_that_fit() -> None:
    task = FusionTask(task_of(columns_then_rows(4096, 1024)).workload, "cuda:0", target="sm_90", sms=132)
    shape = read_text(make_plan(task.graph).text)
    plan = make_plan(task.graph, "cuda", one(shape))
    artifact = build_artifact(task.graph, plan, schedule(task, plan.text), "sm_90", 132)
    (kernel,) = artifact.kernels
    assert kernel.launch["cooperative"]
    assert kernel.resources["stack"] == 0
    fit = kernel.resources["blocks_per_sm"] * 132
    assert 0 < kernel.launch["grid"] <= fit
    assert kernel.launch["inner"] >= kernel.launch["grid"] == min(fit, kernel.launch["inner"])
    words = [n for _, n, state in artifact.scratch if state]
    assert words == [STATE_WORDS]
    assert kernel.launch["args"][-1] == ["scratch", len(artifact.scratch) - 1]


def test_loads_behind_a_barrier_are_plain_ones() -> None:
    task = task_of(softmax_of_everything(64, 512))
    plan = make_plan(task.graph, "cuda", EVERYTHING)
    source, _, _ = phased(plan, plan.launches[0], schedule(task, plan.text), 3, len(plan.scratch))
    text, _ = compile_ptx(source, "sm_90")
    assert re.search(r"ld\.global\.nc\b", text)
    assert re.search(r"ld\.global\.(u32|v\d\.u32)", text)
    assert "call" not in text  # phases are inlined


def test_a_grid_that_does_not_fit_is_refused() -> None:
    """A group's own finish behind a barrier has the grid of its main kernel, which all must be resident."""
    task = FusionTask(task_of(layer_norm_backward(8192, 1024)).workload, "cuda:0", target="sm_90", sms=132)
    (group,) = task.plan.groups
    scheme = scheme_of(group.graph)
    config = scheme.default(group.graph) | {"finish": "barrier", "threads_per_row": 256, "rows_per_block": 4}
    made = scheme.emit(group.graph, config | {"blocks_per_sm": 4}, 132)
    refs = [(kind if kind != "private" else "scratch", n) for kind, n in made.args[0]]
    with pytest.raises(BuildError, match=r"528 blocks behind one barrier, \d+ fit the device"):
        compile_source(made.sources[0], refs, "sm_90", 132, 0)


def body(block: int = 64, **launch: object) -> CudaSource:
    rule = {"dynamic": True, "inner": 1, "per_block": 10, "blocks_per_sm": 0, "shared": 0, "align": [4]} | launch
    return CudaSource((), ("x = ld_f32_1_d(p0, 0)",), ("f32",), rule, block, 0)


def test_what_cannot_be_phases_of_one_launch_is_refused() -> None:
    state, good = ("scratch", 0), Phase(body(), (("input", 0),), 100)
    for bad, words in (
        (body(128), "blocks of 128 and of 64 threads"),
        (replace(body(), cluster=2), "wait for each other"),
        (body(cooperative=True), "wait for each other"),
    ):
        with pytest.raises(Unsupported, match=words):
            in_phases([good, replace(good, source=bad)], state, 3)
    unknown = replace(body(), body=("x = ld_f32_1_d(q, 0)",))
    assert coherent(unknown, []) == unknown
    with pytest.raises(Unsupported, match="unknown tensor"):
        coherent(unknown, [0])


def test_blocks_of_a_phase() -> None:
    assert Phase(body(), (("input", 0),), 101).blocks(3) == 11
    persistent = Phase(body(blocks_per_sm=2), (("input", 0),), 101)
    assert persistent.blocks(3) == 6
    assert persistent.any_grid
    counted = Phase(body(blocks_per_sm=2, grid=5), (("input", 0),), 101)
    assert counted.blocks(3) == 5
    assert not counted.any_grid


def test_groups_of_one_block_size() -> None:
    """Rows of 64 threads and of 256 in one launch: all take the larger blocks."""
    task = task_of(beside(softmax(30, 64), layer_norm(40, 96), row_sums(20, 50)))
    text = one(tuple(((g.roots,),) for g in task.plan.groups))
    parts = schedule(task, text)
    assert len({int(c["threads_per_row"]) * int(c["rows_per_block"]) for c in parts}) == 1
    assert run(task, text, 4) == [3]
    source, _, _ = phased(make_plan(task.graph, "cuda", text), ((0,), (1,), (2,)), parts, 3, 0)
    assert build(source).resources["stack"] == 0


class Counter:
    """The word of a barrier, and its functions as threads of Python see them: they give way at every access."""

    def __init__(self) -> None:
        self.word, self.lock = np.int32(0), threading.Lock()

    def arrive(self, _: object, k: int, n: int) -> int:
        time.sleep(0)
        with self.lock:
            was = int(self.word)
            self.word = np.int64(was + int(n)).astype(np.int32)
            return was

    def watch(self, _: object, k: int) -> int:
        time.sleep(0)
        return int(self.word)


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("fault", [False, True])
def test_one_counter_is_enough(blocks: int, fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks as threads that run ahead as they like, through many barriers: nobody passes before all have arrived, and
    a launch of another number of blocks goes on where the last one ended. Were one counted twice, they would not.
    """
    counter, rounds = Counter(), 60
    late, wrong = random.Random(0), []
    end = threading.Event()

    def watch(state: object, k: int) -> int:
        if end.is_set():
            raise TimeoutError
        return counter.watch(state, k)

    def arrive(state: object, k: int, n: int) -> int:
        return counter.arrive(state, k, n + 1 if fault and n == 1 else n)

    monkeypatch.setattr(intrinsics_cluster, "arrive", arrive)
    monkeypatch.setattr(intrinsics_cluster, "watch", watch)
    nothing = SimpleNamespace(syncthreads=lambda: None, threadIdx=SimpleNamespace(x=0))
    monkeypatch.setattr(intrinsics_cluster, "cuda", nothing)

    def launch(count: int) -> bool:
        """Whether all came through within a while."""
        done = [0] * count

        def block(n: int) -> None:
            for j in range(rounds):
                done[n] = j
                try:
                    intrinsics_cluster._grid_barrier(None, n, count)
                except TimeoutError:
                    return
                if min(done) < j:
                    wrong.append((n, j))
                if late.random() < 0.2:
                    time.sleep(0.0005)

        threads = [threading.Thread(target=block, args=(n,), daemon=True) for n in range(count)]
        for t in threads:
            t.start()
        until = time.monotonic() + (2 if fault else 60)
        for t in threads:
            t.join(max(0.0, until - time.monotonic()))
        through = not any(t.is_alive() for t in threads)
        if not through:
            end.set()
            for t in threads:  # none may go on with what the next test puts in place of these functions
                t.join(30)
        return through

    through = launch(blocks) and launch(blocks + 2)
    assert (through and not wrong) != fault


def test_a_few_registers_fewer_make_room_for_another_block() -> None:
    """Blocks of 1024 threads of more than 32 registers are alone on an SM; the same kernel fits twice."""
    task = FusionTask(task_of(softmax_of_everything(4096, 4096)).workload, "cuda:0", target="sm_90", sms=132)
    plan = make_plan(task.graph, "cuda", EVERYTHING)
    parts = schedule(task, EVERYTHING, vector_bytes=32)
    source, refs, _ = phased(plan, plan.launches[0], parts, 132, len(plan.scratch))
    alone = build(source)
    assert (source.block, alone.resources["blocks_per_sm"]) == (1024, 1)
    kernel = compile_source(source, refs, "sm_90", 132, 0)
    assert kernel.resources["blocks_per_sm"] == 2
    assert kernel.resources["stack"] == 0
    assert kernel.launch["grid"] == 264
    capped = replace(source, max_registers=48)  # who has chosen keeps what was chosen
    assert compile_source(capped, refs, "sm_90", 132, 0).launch["grid"] == 132

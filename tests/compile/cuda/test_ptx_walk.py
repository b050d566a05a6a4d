"""Compiled kernels touch nothing outside their tensors, wherever the compiler has moved their loads.

A load in inline assembly without side effects is arithmetic to it: where the address does not change from turn to turn
of a loop, the load leaves the loop, and a branch that guards it as well. Memory past a large tensor is not mapped.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autotune.compiler import assemble
from autotune.compiler.planner.plan import make_plan
from autotune.compiler.targets.cuda import compile
from autotune.compiler.targets.cuda.compile import compile_ptx
from autotune.compiler.targets.cuda.source import CudaSource, Listing, Ref
from autotune.domains.c3.collectives.sm import emit_sum
from autotune.domains.fusion.task import FusionTask
from autotune.ir.graph import STORAGE_BYTES, Graph
from autotune.runtime.launch.prepared import grid_of
from autotune.task import Config, Kernel
from tests.support.cpu_graphs import Build, layer_norm, softmax_of_everything
from tests.support.many_parts import task_of
from tests.support.ptx_walk import Outside, Tensor, Walk
from tests.support.zoo import workloads

Made = tuple[CudaSource, str, Sequence[Ref], int]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Made]:
    """Sources, their PTX, what is behind their pointers, and their groups, of all kernels that the test builds."""
    real, to_ptx, texts, found = assemble.compile_source, compile.compile_ptx, {}, []

    def ptx_of(source: CudaSource, target: str) -> tuple[str, str]:
        texts[source.text] = to_ptx(source, target)
        return texts[source.text]

    def compile_source(draft: assemble.Draft, target: str, sms: int) -> Kernel:
        kernel = real(draft, target, sms)
        found.append((draft.source, texts[draft.source.text][0], draft.refs, draft.group))
        return kernel

    monkeypatch.setattr(compile, "compile_ptx", ptx_of)
    monkeypatch.setattr(assemble, "compile_source", compile_source)
    return found


def configured(task: FusionTask, text: str = "", **changes: object) -> Config:
    """The groups' defaults under a plan (the greedy one without ``text``) with changes."""
    plan = make_plan(task.graph, "cuda", text)
    parts = [on.default(g.graph) for on, g in task.sides(plan)]
    config = task.joined(plan, [c | {k: v for k, v in changes.items() if k in c} for c in parts])  # type: ignore[misc]
    assert task.reject(config) is None
    return config


def walk(task: FusionTask, config: Config, made: list[Made], content: bytes = b"") -> list[Walk]:
    """Walk through all kernels of a configuration by the first and the last thread of the first and the last block,
    and of one block that does all the work if any number of blocks can.

    Args:
        content: of every input.

    Returns:
        Those of the first threads.

    Raises:
        Outside: see there.
    """
    artifact, graph, firsts = task.build(config), task.graph, []
    inputs = [(graph.input_numel(k), name) for k, name in enumerate(graph.inputs)]
    outputs = [(graph.output_numel(k), o.dtype) for k, o in enumerate(graph.outputs)]
    sizes = {"input": inputs, "output": outputs, "scratch": [(n, dtype) for dtype, n in artifact.scratch]}
    assert len(made) == len(artifact.kernels)
    for (source, ptx, refs, group), kernel in zip(made, artifact.kernels, strict=True):
        extent, rule = task.plan_of(config).groups[group].graph.extents[0], source.launch
        blocks = grid_of(kernel.launch, extent)
        any_number = "grid" not in rule and bool(rule["blocks_per_sm"])
        grids = {(0, blocks), (blocks - 1, blocks), *([(0, 1)] if any_number else [])}
        walks = []
        for block, of in sorted(grids):
            for tid in (0, source.block - 1):
                given: list[Tensor | int] = []
                for kind, k in refs:
                    n, dtype = sizes[kind][k]
                    nbytes = n * STORAGE_BYTES[dtype]
                    given.append(Tensor(nbytes, content[:nbytes] if kind == "input" else b""))
                if rule["dynamic"]:
                    given.append(extent)
                one = Walk(ptx, given, tid, int(rule["shared"]), block, of, block % source.cluster)
                one.run()
                walks.append(one)
        firsts += walks[::2]
    return firsts


@pytest.mark.parametrize(("text", "blocks_per_sm", "cols"), [("r1 / r4 / o0", 1, 509), ("r1 / r4 / o0", 1, 512)])
def test_elements_that_fill_no_pack_in_a_loop_over_blocks(
    text: str, blocks_per_sm: int, cols: int, made: list[Made]
) -> None:
    task = task_of(softmax_of_everything(48, cols))
    config = configured(task, text)
    key = "g2.blocks_per_sm"
    assert config[key] == 0
    walk(task, task.normalize({**config, key: blocks_per_sm}), made)


@pytest.mark.parametrize(
    ("storage", "vector_bytes", "prefetch"), [("float32", 16, True), ("float16", 4, False), ("float16", 16, True)]
)
def test_weights_of_rows_that_fill_no_set_of_packs(
    storage: str, vector_bytes: int, prefetch: bool, made: list[Made]
) -> None:
    task = task_of(layer_norm(50, 640, storage))
    changes = {"threads_per_row": 128, "rows_per_block": 1, "keep": "registers"}
    for blocks_per_sm in (2, 0):
        made.clear()
        config = configured(task, vector_bytes=vector_bytes, prefetch=prefetch, blocks_per_sm=blocks_per_sm, **changes)
        assert config["prefetch"] == (prefetch and blocks_per_sm > 0)
        walk(task, config, made)


@pytest.mark.parametrize("index", [0, 48, 49, -1, 1 << 40])
def test_rows_of_a_table_that_are_gathered_by_vectors(index: int, made: list[Made]) -> None:
    (work,) = workloads("embeddings_ln_dropout")
    task = FusionTask(work, "cuda:0", target="sm_90", sms=132)
    config = configured(task, threads_per_row=32, rows_per_block=4)
    walk(task, config, made, content=index.to_bytes(8, "little", signed=True) * (50 * 96))


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize(("threads", "match", "owned"), [(8, 8, 16), (2, 32, 1)])
def test_terms_and_places_of_sums(threads: int, match: int, owned: int, place: int, made: list[Made]) -> None:
    """Only listed elements are read, whatever is in memory behind the list's end."""
    work, *_ = workloads("scatter_twice")  # before torch 2.13 a mask of padding is another region
    task = FusionTask(work, "cuda:0", target="sm_90", sms=132)
    config = configured(task, threads_per_row=threads, rows_per_block=match, owned=owned, unroll=2)
    assert config["owned"] == owned
    firsts = walk(task, config, made, content=place.to_bytes(8, "little", signed=True) * (40 * 24))
    ((_, _, refs, _),) = made
    assert all({refs[p] for p in one.written} == {("output", 0)} for one in firsts)


def picked(rows: int, cols: int) -> Graph:
    """Row sums of ``x`` times what an index of the column picks: the same address in every row, inside or not."""
    b = Build(rows, cols)
    x, index = b.load("float32", 0, 1), b.load("int32", 1)
    table = b.slot("float32")
    found = b.add("gather", (index,), axes=(1,), strides=(0,), slot=table, bound=5, index_stride=1)
    b.out(b.reduce("sum", b.mul(x, found), 1), "float32")
    return b.graph()


@pytest.mark.parametrize("index", [4, 5, 1 << 20])
def test_an_index_outside_its_table_is_not_followed(index: int, made: list[Made]) -> None:
    task = task_of(picked(40, 256))
    changes = {"threads_per_row": 32, "rows_per_block": 1, "blocks_per_sm": 1}
    walk(task, configured(task, **changes), made, content=index.to_bytes(4, "little", signed=True) * (40 * 256))


def softmax_down(rows: int, cols: int, storage: str) -> Graph:
    """Softmax over dim 0 times a weight a row."""
    b = Build(rows, cols)
    x, w = b.load(storage, 0, 1), b.load(storage, 0)
    e = b.exp(b.sub(x, b.reduce("max", x, 0)))
    b.out(b.mul(b.div(e, b.reduce("sum", e, 0)), w), storage)
    return b.graph()


@pytest.mark.parametrize(("cluster", "held", "vector_bytes"), [(1, 0, 16), (1, 3, 16), (4, 2, 16), (1, 0, 4)])
def test_strips_that_are_copied_ahead(cluster: int, held: int, vector_bytes: int, made: list[Made]) -> None:
    """Strips and places that do not divide by the threads, asynchronous copies, and other blocks' shared memory."""
    task = task_of(softmax_down(301, 100, "float32"))
    changes = {"cluster": cluster, "held": held, "vector_bytes": vector_bytes}
    shape = {"threads_per_row": 2, "rows_per_block": 16, "keep": "shared", "prefetch": True, "unroll": 2}
    first = walk(task, configured(task, **shape, **changes), made)[0]
    assert first.copied > 0


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("n", [2, 100])
def test_short_sums_between_devices(parts: int, n: int) -> None:
    source = emit_sum(parts, "bf16")
    ptx, _ = compile_ptx(source, "sm_90")
    for tid in (0, 15, source.block - 1):
        tensors = [Tensor(2 * n) for _ in source.params]
        Walk(ptx, [*tensors, n], tid).run()


def test_an_access_outside_is_found() -> None:
    launch = {"dynamic": False, "inner": 1, "per_block": 1, "blocks_per_sm": 0, "block": 32, "shared": 0, "align": [4],
              "multiple": 1}  # fmt: skip
    body = ("tid = int32(cuda.threadIdx.x)", "if tid < 10:", "    st_f32_1_d(p1, tid, ld_f32_1_d(p0, tid + 2))")
    ptx, _ = compile_ptx(Listing((), body, ("f32", "f32"), launch, 32, 0), "sm_90")
    for tid in (0, 9, 10, 31):
        Walk(ptx, [Tensor(48), Tensor(40)], tid).run()
    with pytest.raises(Outside, match="4 bytes at 44 of pointer 0, which has 44"):
        Walk(ptx, [Tensor(44), Tensor(40)], 9).run()
    with pytest.raises(Outside, match="4 bytes at 36 of pointer 1"):
        Walk(ptx, [Tensor(48), Tensor(36)], 9).run()

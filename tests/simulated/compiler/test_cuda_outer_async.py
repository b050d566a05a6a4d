"""The outer scheme with strips copied to shared memory ahead: what the kernels compute, wait for, and need."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from autotune.compiler.kernel.nodes import Const, Do, Expr, Node, Pointer, Stmt, Var
from autotune.compiler.schedules.cuda.outer import OUTER
from autotune.compiler.targets.cuda.compile import build, compile_ptx
from autotune.compiler.targets.cuda.device import COMMIT_COPIES, THREAD, Shared, await_copies, copy_ahead, take
from autotune.compiler.targets.cuda.source import Body, CudaSource, GroupKernels, Run, pack_bodies
from autotune.errors import Unsupported
from autotune.ir.graph import Graph
from autotune.ir.inputs import make_inputs
from autotune.ir.oracle import interpret
from autotune.measure.verify import compare
from autotune.space import load_space
from autotune.task import Config, Kernel
from tests.simulated.compiler.test_cuda_outer import BY_NAME, SHAPES, big, graph, graphs_of
from tests.simulated.compiler.test_simulator import run
from tests.simulated.compiler.test_simulator import source as one_kernel
from tests.support.edited import changed
from tests.support.simulator.errors import KernelError
from tests.support.simulator.groups import check_group
from tests.support.simulator.machine import Machine
from tests.support.simulator.tensors import Pointer as Tensor
from tests.support.zoo import BF16, F16, F32, T

ONE_STRIP = [shape for shape in SHAPES if "blocks_per_sm" not in shape]
"""Of a block: strips are not copied in a persistent grid."""
COPIED: Config = {"keep": "shared", "prefetch": True, "unroll": 2, "cluster": 1, "vector_bytes": 8}


def made(g: Graph, **changes: Any) -> GroupKernels:
    return OUTER.emit(g, {**OUTER.default(g), **COPIED, **changes}, 2)


def source(g: Graph, **changes: Any) -> CudaSource:
    (only,) = made(g, **changes).sources
    return only


def with_body(kernels: GroupKernels, change: Callable[[Node], Node]) -> GroupKernels:
    """The kernel with some nodes changed."""
    (only,) = kernels.sources
    return replace(kernels, sources=(changed(only, change),))


@pytest.mark.parametrize("shape", ONE_STRIP, ids=lambda s: "x".join(str(v) for v in s.values()))
def test_every_way_of_joining(shape: dict[str, int]) -> None:
    for name in ("softmax", "joined_moments", "layer_norm_0_bf16"):
        for online in (False, True) if name == "softmax" else (False,):
            check_group(graph(name), made(graph(name), **shape, online=online), seed=3, special=True, sms=2)


@pytest.mark.parametrize(
    ("name", "vector_bytes"),
    [("softmax", 4), ("softmax", 16), ("softmax", 32), ("layer_norm_0_bf16", 4), ("layer_norm_0_bf16", 16),
     ("batched", 4), ("batched", 32), ("two_axes", 4), ("two_axes", 32)],
)  # fmt: skip
def test_copies_of_every_size(name: str, vector_bytes: int) -> None:
    kernels = made(graph(name), threads_per_row=2, rows_per_block=16, vector_bytes=vector_bytes)
    check_group(graph(name), kernels, special=True, sms=2)


def test_inputs_that_cannot_be_copied_are_not() -> None:
    """Nothing kept, gathered, guarded, or elements of two bytes that are not packed."""
    for name in ("sum", "looked_up", "windows", "odd"):
        g = graph(name)
        with pytest.raises(Unsupported):
            made(g, vector_bytes=2 if name == "odd" else 8)
        config = OUTER.default(g) | COPIED | {"vector_bytes": OUTER.default(g)["vector_bytes"]}
        assert OUTER.normalize(g, config)["prefetch"] is False
        space = OUTER.space_of(g, load_space("fusion", "cuda"))
        assert space["prefetch"].choices == (False,)


def test_earlier_configurations_mean_the_same() -> None:
    """They have no prefetch, or one that is off; and it is off wherever values do not wait in shared memory."""
    g = graph("softmax")
    old = {k: v for k, v in OUTER.default(g).items() if k != "prefetch"}
    assert OUTER.normalize(g, old)["prefetch"] is False
    for keep in ("registers", "reload"):
        assert OUTER.normalize(g, {**old, "keep": keep, "prefetch": True})["prefetch"] is False
    assert OUTER.normalize(g, {**old, "keep": "shared", "prefetch": True})["prefetch"] is True


def test_a_copy_is_awaited_before_it_is_read() -> None:
    kernels = made(graph("softmax"), threads_per_row=8, rows_per_block=8)
    check_group(graph("softmax"), kernels)
    with pytest.raises(KernelError, match="before its copy is there"):
        check_group(graph("softmax"), with_body(kernels, lambda x: await_copies(5) if x == await_copies(4) else x))


def test_a_persistent_grid_copies_no_strip() -> None:
    g = graph("softmax")
    config = {**OUTER.default(g), **COPIED, "blocks_per_sm": 1}
    assert OUTER.normalize(g, config)["prefetch"] is False
    with pytest.raises(Unsupported, match="a persistent grid, which this autotune lacks"):
        made(g, threads_per_row=8, rows_per_block=8, blocks_per_sm=1)


def test_the_machine_simulates_asynchronous_copies() -> None:
    array = Var("s", "uint32")

    def taken(word: Expr) -> Stmt:
        return Do(take("float32", 2, (array, word, Const(0))))

    shared = Shared(array, 64, "uint32")
    copied = copy_ahead("float32", 2, "default", (array, THREAD * 2, Const(0)), Pointer(0), THREAD * 2)
    end = (COMMIT_COPIES, await_copies(0))
    run(one_kernel(shared, copied, *end, taken(THREAD * 2)), once=False)
    for one in end:
        with pytest.raises(KernelError, match="before its copy is there"):
            run(one_kernel(shared, copied, one, taken(THREAD * 2)), once=False)
    with pytest.raises(KernelError, match=r"before its copy is there|race for word"):
        run(one_kernel(shared, copied, *end, taken((THREAD ^ 1) * 2)), once=False)
    with pytest.raises(KernelError, match="not aligned"):
        run(one_kernel(shared, taken(THREAD * 2 + 1)), once=False)


def test_exponentials_replace_their_inputs_in_shared_memory() -> None:
    """4096 rows of 64 bytes on four blocks: 64 KiB a block, whether or not there is a pass between."""
    for online in (False, True):
        shape = {"threads_per_row": 4, "rows_per_block": 64, "vector_bytes": 16, "cluster": 4}
        assert source(big("softmax"), **shape, online=online).launch["shared"] == 4096 * 64 // 4


STRIP: Config = {"threads_per_row": 4, "rows_per_block": 64, "vector_bytes": 16, "cluster": 4, "unroll": 8}
"""A strip of 64 bytes by 4096 rows as 16 places of each thread, in two groups."""


def test_a_strip_is_read_by_copies_alone() -> None:
    text = compile_ptx(source(big("softmax"), **STRIP), "sm_90")[0]
    assert len(re.findall(r"cp\.async\.cg\.shared\.global \[\S+, \[\S+, 16", text)) == 8
    assert "ld.global" not in text
    assert text.count("cp.async.commit_group") == 2  # after each group of copies, and before each is awaited
    assert text.count("cp.async.wait_group 2") == text.count("cp.async.wait_group") == 1
    assert len(re.findall(r"ld\.shared\.v4", text)) == 3 * 8
    assert len(re.findall(r"st\.shared\.v4", text)) == 8


def test_copies_have_no_cache_policy() -> None:
    """ptxas 13.0 made an illegal instruction of the second one that had: on an H200, at run time."""
    for hint, copies in (("evict_first", r"cp\.async\.cg\.shared\.global \["), ("prefetch", r"\.global\.L2::256B \[")):
        text = compile_ptx(source(big("softmax"), **STRIP, load_hint=hint), "sm_90")[0]
        assert len(re.findall(copies, text)) == 8
        assert "cache_hint" not in text


def test_places_held_in_registers_are_loaded_once_and_first() -> None:
    """4 of the 16 places of a strip; with 12 in shared memory, as one group of 8 and one of 4."""
    made = source(big("softmax"), **STRIP, held=4)
    assert made.launch["shared"] == 12 * 16 * 256
    text = compile_ptx(made, "sm_90")[0]
    loads = [m.start() for m in re.finditer(r"ld\.global\.nc\.v4\.u32", text)]
    copies = [m.start() for m in re.finditer(r"cp\.async\.cg", text)]
    assert (len(loads), len(copies)) == (4, 12)
    assert max(loads) < min(copies)
    assert len(re.findall(r"ld\.shared\.v4", text)) == 3 * 12


@pytest.mark.parametrize("held", [1, 3, 8])
@pytest.mark.parametrize("shape", SHAPES[1:6], ids=lambda s: "x".join(str(v) for v in s.values()))
def test_places_in_registers_are_computed_like_the_others(shape: dict[str, int], held: int) -> None:
    for name in ("softmax", "joined_moments", "layer_norm_0_bf16"):
        g = graph(name)
        config = OUTER.normalize(g, {**OUTER.default(g), **COPIED, **shape, "held": held})
        if config["held"] != held:
            continue  # so few places: the same as a smaller number
        for online in (False, True) if name == "softmax" else (False,):
            check_group(g, OUTER.emit(g, config | {"online": online}, 2), seed=held, special=True, sms=2)


@pytest.mark.parametrize(("unroll", "cluster"), [(1, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize(("rows", "columns", "dtype", "vector_bytes"), [
    (131, 24, F32, 16), (97, 13, F32, 4), (128, 28, F32, 8), (160, 24, BF16, 16), (99, 18, BF16, 4), (102, 18, F16, 4),
])  # fmt: skip
def test_odd_rows_and_columns_that_do_not_divide(
    rows: int, columns: int, dtype: torch.dtype, vector_bytes: int, unroll: int, cluster: int
) -> None:
    (g,) = graphs_of(lambda x: torch.softmax(x, 0), (T(rows, columns, d=dtype),))
    shape: Config = {"threads_per_row": 4, "rows_per_block": 16, "cluster": cluster}
    shape |= {"vector_bytes": vector_bytes, "unroll": unroll}
    for online in (False, True):
        config = OUTER.normalize(g, {**OUTER.default(g), **COPIED, **shape, "online": online, "held": 3})
        assert config["prefetch"]
        assert config["held"] == 3
        check_group(g, OUTER.emit(g, config, 3), seed=unroll, special=bool(unroll % 2))


def test_registers_with_shared_memory_are_for_strips_that_do_not_fit() -> None:
    space = load_space("fusion", "cuda")
    assert OUTER.space_of(big("softmax"), space)["held"].choices == space["held"].choices
    assert OUTER.space_of(graph("softmax"), space)["held"].choices == (0,)
    g = graph("softmax")
    base = {**OUTER.default(g), **COPIED, "threads_per_row": 2, "rows_per_block": 32, "held": 8}
    assert OUTER.normalize(g, base | {"rows_per_block": 32})["held"] == 1  # two places
    for other in ({"prefetch": False}, {"blocks_per_sm": 1}, {"keep": "registers"}):
        assert OUTER.normalize(g, base | other)["held"] == 0
    old = {k: v for k, v in base.items() if k != "held"}
    assert OUTER.normalize(g, old)["held"] == 0
    with pytest.raises(Unsupported, match="everything"):
        made(g, threads_per_row=2, rows_per_block=16, held=64)
    with pytest.raises(Unsupported, match="not asynchronous"):
        made(g, threads_per_row=2, rows_per_block=16, keep="registers", prefetch=False, held=1)


def waves(kernel: Kernel) -> float:
    """Times the blocks of a launch fill 132 multiprocessors."""
    blocks = -(-int(kernel.launch["inner"]) // int(kernel.launch["per_block"])) * int(kernel.launch.get("cluster", 1))
    return blocks / (132 * kernel.resources["blocks_per_sm"])


@pytest.mark.parametrize(("rows", "dtype", "most"), [(4096, F32, 1), (8192, F32, 2), (4096, BF16, 1)])
def test_the_first_seed_has_everything_on_the_device(rows: int, dtype: torch.dtype, most: int) -> None:
    """32 MiB are 254 KiB an SM, more than its shared memory. Half of that fits, twice of that in two waves."""
    (g,) = graphs_of(lambda x: torch.softmax(x, 0), (T(rows, 2048, d=dtype),))
    first = next(c for c in OUTER.seeds(g) if c["prefetch"])
    assert first["online"]
    assert bool(first["held"]) == (rows * dtype.itemsize > 8192)
    (only,) = OUTER.emit(g, first, 132).sources
    kernel = build(only, "sm_90")
    assert kernel.resources["stack"] == 0
    assert 0.7 * most < waves(kernel) <= most


def test_seeds_let_blocks_share_an_sm() -> None:
    seeds = [c for c in OUTER.seeds(big("softmax")) if c["prefetch"]]
    assert (4, 4, 0) in {(c["threads_per_row"], c["cluster"], c["blocks_per_sm"]) for c in seeds}
    for config in (c for c in seeds if c["threads_per_row"] in (2, 4) and not c["online"]):
        kernel = build(source(big("softmax"), **config), "sm_90")
        assert kernel.resources["stack"] == 0
        assert kernel.resources["blocks_per_sm"] >= 3


def test_every_case_is_one_of_the_schemes() -> None:
    assert {"softmax", "joined_moments", "layer_norm_0_bf16", "batched", "two_axes"} <= set(BY_NAME)


def test_strips_of_two_groups_share_a_launch() -> None:
    """Side by side as bodies of one kernel, which has the larger body's shared memory."""
    graphs = [graph("softmax"), graph("batched")]
    shape = {"threads_per_row": 8, "rows_per_block": 8}
    bodies, memory, ends = [], {}, []
    for n, g in enumerate(graphs):
        body = source(g, **shape)
        inputs = make_inputs(g, seed=n, special=True)
        (want,) = interpret(g, inputs)
        end = Tensor.poisoned(g.outputs[0].dtype, g.output_numel(0), once=True)
        ends.append((end, want, g))
        memory[("input", n)], memory[("output", n)] = Tensor.reading(inputs[0], g.inputs[0]), end
        bodies.append(Body(body, (Run((("input", n), ("output", n)), g.extents[0], g.size(range(len(g.extents)))),)))
    packed, refs = pack_bodies(bodies, 2)
    assert packed.launch["shared"] == max(b.source.launch["shared"] for b in bodies)
    Machine(packed, int(packed.launch["grid"])).run([memory[r] for r in refs], 0)
    for end, want, g in ends:
        o = g.outputs[0]
        got = end.tensor().as_strided([g.extents[a] for a in o.axes], o.strides, o.offset)
        assert compare(got, want, o.dtype, 64).ok
    assert build(packed, "sm_90").resources["stack"] == 0

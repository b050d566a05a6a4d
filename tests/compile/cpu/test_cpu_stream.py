"""Streaming stores and rows fetched ahead: the same bits as without, wherever rows begin and end, and the instructions
that it is about."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autotune.compiler.program.passes import build_program
from autotune.compiler.schedules import cpu as target_cpu
from autotune.compiler.targets.cpu.columns import group_program
from autotune.compiler.targets.cpu.kernel import emit_source, load, load_group
from autotune.compiler.targets.cpu.schedule import (
    LINE,
    STRETCH,
    CpuSchedule,
    fetched,
    fetched_bytes,
    flatten,
    streamed,
    streamed_bytes,
)
from autotune.ir.graph import Graph
from autotune.ir.oracle import interpret
from autotune.measure.verify import compare
from autotune.space import load_space
from tests.support.cpu_graphs import (
    MARGIN,
    POISON,
    TORCH,
    Build,
    gelu_layer_norm,
    layer_norm,
    layer_norm_backward,
    logsumexp,
    random_inputs,
    softmax,
)

X86 = platform.machine() in ("x86_64", "AMD64")


def run(graph: Graph, inputs: list[Tensor], schedule: CpuSchedule, shift: int, n0: int | None = None) -> list[Tensor]:
    """Flat outputs, written from ``shift`` elements behind a line boundary on; nothing around them may be written."""
    kernel = load_group(graph, schedule)
    buffers = [
        torch.full((MARGIN + shift + graph.output_numel(k) + MARGIN,), POISON, dtype=TORCH[o.dtype])
        for k, o in enumerate(graph.outputs)
    ]
    outputs = [b[MARGIN + shift : -MARGIN] for b in buffers]
    kernel([t.data_ptr() for t in (*inputs, *outputs)], graph.extents[0] if n0 is None else n0)
    for b in buffers:
        around = torch.cat([b[: MARGIN + shift], b[-MARGIN:]])
        assert bool((around == torch.tensor(POISON).to(b.dtype)).all()), "wrote beside an output"
    return outputs


def check(graph: Graph, schedule: CpuSchedule | None = None, outputs: int = 1, exact: bool = True) -> None:
    """Streaming stores write the same values, at line boundaries and elsewhere.

    Args:
        outputs: how many are streamed.
        exact: False where a pass sums up what it stores: LLVM adds in another order then. So it does in a later pass
            with prefetches between the parts of its sum.
    """
    schedule = schedule or CpuSchedule(row_block=2)
    inputs = random_inputs(graph)
    stored, expected = run(graph, inputs, schedule, 0), interpret(graph, inputs)
    longest = max((graph.size(v.over) for v in graph.values if v.over), default=1)
    if not schedule.parts:
        assert len(streamed(flatten(build_program(graph))[0])) == outputs
    walks = [p for p in group_program(graph, bool(schedule.parts)).passes if p.walks]
    resums = any(p.reduce for p in walks[1:])
    for shift, ahead in ((0, False), (1, True), (5, False)):
        for k, got in enumerate(run(graph, inputs, replace(schedule, stream=True, prefetch=ahead), shift)):
            o = graph.outputs[k]
            if exact and not (ahead and resums):
                assert torch.equal(got.view(torch.uint8), stored[k].view(torch.uint8)), (shift, k)
            shaped = got.as_strided([graph.extents[a] for a in o.axes], o.strides, got.storage_offset() + o.offset)
            verdict = compare(shaped, expected[k], o.dtype, longest)
            assert verdict.ok, (shift, k, verdict.detail)


def machine_code(graph: Graph, schedule: CpuSchedule) -> str:
    return str(load(build_program(graph), schedule).compiled._library.get_asm_str())


@pytest.mark.parametrize(
    ("make", "cols"),
    [(softmax, 64), (softmax, 67), (softmax, 1024), (softmax, 5000), (layer_norm, 1000), (layer_norm, 1025)],
)
def test_rows_of_every_length(make, cols: int) -> None:
    """Shorter and longer than a stretch, rows that begin anywhere in a line."""
    check(make(7, cols))


@pytest.mark.parametrize("tile", [0, 256, 2048])
def test_tiles_threads_and_passes(tile: int) -> None:
    check(softmax(9, 3001), CpuSchedule(3, tile, threads=2))
    if tile != 256:
        check(gelu_layer_norm(9, 3001), CpuSchedule(3, tile, threads=2))


@pytest.mark.parametrize("storage", ["float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"])
def test_every_storage_type(storage: str) -> None:
    """A dense tensor, and rows of a reduction, in every type there is."""
    b = Build(3, 2777)
    b.out(b.load(storage, 0, 1), storage)
    check(b.graph())
    if storage in ("int32", "int16", "int8"):
        return
    b = Build(3, 2777)
    x = b.load(storage, 0, 1)
    peak = b.reduce("max", x, 1)
    b.out(b.or_(x, peak) if storage == "bool" else b.maximum(x, peak), storage)
    check(b.graph())


def test_several_outputs_of_different_types() -> None:
    b = Build(5, 1500)
    x, y = b.load("float32", 0, 1), b.load("bfloat16", 0, 1)
    d = b.sub(x, b.reduce("max", x, 1))
    b.out(d, "bfloat16")
    b.out(b.lt(d, y), "bool")
    b.out(b.mul(d, y), "float32")
    b.out(b.reduce("sum", d, 1), "float32")
    check(b.graph(), outputs=3, exact=False)


def test_stream_pass_sums_its_stored_values() -> None:
    """As a residual is stored in the pass that sums it up."""
    b = Build(3, 20000)
    s = b.add_(b.load("float32", 0, 1), b.load("float32", 0, 1))
    b.out(s, "float32")
    b.out(b.sub(s, b.mul(b.reduce("sum", s, 1), b.const(1 / 20000))), "float32")
    check(b.graph(), outputs=2, exact=False)
    check(b.graph(), CpuSchedule(column_tile=1024), outputs=2, exact=False)


@pytest.mark.parametrize("tile", [0, 256])
def test_concatenated_columns(tile: int) -> None:
    """Pieces of the columns, none of which ends where a stretch does."""
    b = Build(6, 3000)
    x = b.load("float32", 0, 1, strides=(1100, 1), guards=((1, 0, 1100),))
    y = b.load("float32", 0, 1, strides=(1900, 1), guards=((1, 1100, 3000),), offset=-1100)
    left = b.lt(b.add("index", axes=(1,), dtype="int64"), b.const(1100, "int64"))
    b.out(b.where(left, x, y), "float32")
    check(b.graph(), CpuSchedule(column_tile=tile))


def test_several_column_axes_and_padded_rows() -> None:
    b = Build(4, 3, 130)
    x = b.load("float32", 0, 1, 2)
    b.out(b.sub(x, b.reduce("max", x, 1, 2)), "float32", strides=(500, 150, 1))
    check(b.graph())


def test_rows_and_columns_in_one_pass() -> None:
    check(layer_norm_backward(70, 1300), CpuSchedule(parts=2, threads=2))
    b = Build(64, 5000)
    x = b.load("float32", 0, 1)
    b.out(b.exp(x), "float32")
    b.out(b.reduce("sum", x, 0), "float32")
    check(b.graph(), CpuSchedule(parts=2))
    check(b.graph(), CpuSchedule(parts=2, column_tile=256))


def outer_softmax(rows: int, cols: int, storage: str = "float32") -> Graph:
    b = Build(rows, cols)
    x = b.load(storage, 0, 1)
    e = b.exp(b.sub(x, b.reduce("max", x, 0)))
    b.out(b.div(e, b.reduce("sum", e, 0)), storage)
    return b.graph()


@pytest.mark.parametrize(
    ("rows", "cols", "lanes", "storage"),
    [(40, 1001, 256, "float32"), (40, 1001, 256, "bfloat16"), (7, 300, 64, "float32"), (1, 600, 16, "bfloat16")],
)
def test_lanes(rows: int, cols: int, lanes: int, storage: str) -> None:
    """Columns four at a time and one at a time, fewer in the last lanes; memory beyond a tensor is only prefetched."""
    graph = outer_softmax(rows, cols, storage)
    inputs, schedule = random_inputs(graph), CpuSchedule(row_block=lanes, threads=2)
    (stored,) = run(graph, inputs, schedule, 0)
    for shift, ahead in ((0, False), (3, True)):
        (got,) = run(graph, inputs, replace(schedule, stream=True, prefetch=ahead), shift)
        assert torch.equal(got.view(torch.uint8), stored.view(torch.uint8))
    verdict = compare(stored.view(rows, cols), interpret(graph, inputs)[0], storage, rows)
    assert verdict.ok, verdict.detail


def test_lanes_of_several_axes_and_outputs() -> None:
    """As batch norms have them: columns outside and inside of the lanes."""
    b = Build(5, 6, 200)
    x, y = b.load("float32", 0, 1, 2), b.load("bfloat16", 0, 1, 2)
    d = b.sub(b.add_(x, y), b.reduce("max", x, 0, 1))
    b.out(d, "float16")
    b.out(b.lt(x, y), "bool")
    graph = b.graph()
    inputs, schedule = random_inputs(graph), CpuSchedule(row_block=64)
    stored = run(graph, inputs, schedule, 0)
    streaming = run(graph, inputs, replace(schedule, stream=True, prefetch=True), 5)
    for s, g, want, o in zip(stored, streaming, interpret(graph, inputs), graph.outputs, strict=True):
        assert torch.equal(s.view(torch.uint8), g.view(torch.uint8))
        assert compare(g.view(5, 6, 200), want, o.dtype, 1).ok


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_other_numbers_of_rows_with_one_kernel(rows: int) -> None:
    for graph in (softmax(11, 333), _dense(11, 333)):
        x = torch.randn(rows * 333)
        kernel = [load(build_program(graph), CpuSchedule(stream=s, threads=2)) for s in (False, True)]
        want, got = torch.full((2, rows * 333 + MARGIN), POISON, dtype=torch.float32)
        for k, y in zip(kernel, (want, got), strict=True):
            k([x.data_ptr(), y.data_ptr()], rows)
        assert torch.equal(got, want)
        assert bool((got[-MARGIN:] == POISON).all())


def _dense(*extents: int) -> Graph:
    b = Build(*extents)
    b.out(b.exp(b.load("float32", *range(len(extents)))), "float32")
    return b.graph()


def _rows() -> Graph:
    return layer_norm(8, 1024, "bfloat16")


def _lanes() -> Graph:
    return outer_softmax(32, 512)


def _flat() -> Graph:
    return _dense(1 << 16)


@pytest.mark.skipif(not X86, reason="the instructions of x86")
@pytest.mark.parametrize("make", [_rows, _lanes, _flat])
def test_the_instructions_bypass_caches_and_are_waited_for(make: Callable[[], Graph]) -> None:
    graph = make()
    plain, streaming = (machine_code(graph, CpuSchedule(stream=s)) for s in (False, True))
    assert not re.search(r"\bv?movnt|\bsfence", plain)
    assert re.search(r"\bv?movnt\w+\s+%[xyz]mm", streaming)
    # Behind the last of them.
    assert streaming.rindex("sfence") > streaming.rindex("movnt")


@pytest.mark.skipif(not X86, reason="the instructions of x86")
def test_rows_are_fetched_ahead_into_the_second_level() -> None:
    plain, ahead = (machine_code(softmax(8, 4000), CpuSchedule(prefetch=p)) for p in (False, True))
    assert "prefetch" not in plain
    assert "prefetcht1" in ahead
    assert "movnt" not in ahead


@pytest.mark.parametrize("cols", [100, 1500])
def test_rows_fetched_ahead_with_ordinary_stores(cols: int) -> None:
    graph = softmax(7, cols, masked=True)
    inputs = random_inputs(graph)
    stored, ahead = (run(graph, inputs, CpuSchedule(prefetch=p), 1) for p in (False, True))
    torch.testing.assert_close(ahead[0], stored[0], rtol=1e-6, atol=0)  # sums are added up in another order


def test_which_rows_are_fetched_ahead() -> None:
    """Rows of tensors with work after the first loop are prefetched; columns in separate rows are not."""
    masked = build_program(softmax(8, 512, masked=True))
    assert [masked.graph.values[i].slot for i in fetched(masked)] == [0]  # the mask has no rows
    assert fetched_bytes(masked) == 8 * 512 * 4
    assert "o0 + s + 512" in emit_source(masked, CpuSchedule(prefetch=True))
    assert fetched(build_program(_dense(8, 512))) == ()
    assert fetched(build_program(logsumexp(8, 512))) == (0,)
    assert fetched(build_program(softmax(8, 32))) == ()
    assert fetched(build_program(outer_softmax(8, 512)), lanes=True) == ()  # ends before the prefetch arrives
    outer = build_program(outer_softmax(32, 512))
    assert (fetched(outer), fetched(outer, lanes=True)) == ((), (0,))
    # By the first pass alone, for four columns at a time and for one.
    assert emit_source(outer, CpuSchedule(prefetch=True)).count("fetch_float32(") == 5


def test_each_later_pass_asks_for_its_share() -> None:
    """Of the next row, and all passes together for all of it; a single one by itself."""

    def asked(graph: Graph, schedule: CpuSchedule, cols: int) -> tuple[int, list[int]]:
        """The number of prefetches, and their columns."""
        lines = emit_source(build_program(graph), schedule).splitlines()
        places, found = [k for k, line in enumerate(lines) if "fetch_float32(x0" in line], []
        tile = schedule.column_tile or cols
        for k in places:
            first, count = re.fullmatch(r" +fetch_float32\(x0, (.+) \+ \d+, (.+)\)", lines[k]).groups()  # type: ignore[union-attr]
            share = lines[k - 1].strip().removeprefix("s = ") if lines[k - 1].lstrip().startswith("s =") else "0"
            for t in range(0, cols, tile):
                e = min(t + tile, cols)
                for c in range(t, e, 1024):
                    at = {"t": t, "e": e, "c": c, "d": min(c + 1024, e), "o0": 0, "columns": cols}
                    at["s"] = eval(share, at)
                    found += range(eval(first, at), eval(first, at) + eval(count, at))
        return len(places), found

    for cols in (1500, 5001):
        for tile in (0, 2048):
            places, found = asked(softmax(7, cols), CpuSchedule(prefetch=True, column_tile=tile), cols)
            assert places == 2
            assert sorted(found) == list(range(cols))
    places, found = asked(logsumexp(7, 3000), CpuSchedule(prefetch=True), 3000)
    assert (places, sorted(found)) == (1, list(range(3000)))


def test_stream_skips_strided_and_short_rows() -> None:
    """Columns apart in memory, rows of less than a few lines."""

    def program(cols: int, **out):
        b = Build(32, cols)
        x = b.load("float32", 0, 1)
        b.out(b.sub(x, b.reduce("max", x, 1)), "float32", **out)
        return build_program(b.graph())

    assert streamed(program(64)) == (0,)
    assert streamed(program(63)) == ()
    assert streamed(program(64, strides=(128, 2))) == ()


def test_stream_changes_only_the_streamed_stores() -> None:
    program = build_program(layer_norm(64, 1024))
    plain, streaming = (emit_source(program, CpuSchedule(stream=s)) for s in (False, True))
    assert "stream" not in plain
    assert "drain()" in streaming.rstrip().splitlines()[-1]
    assert STRETCH % LINE == 0
    # The row's mean, one number, is stored as before.
    assert "store_float32_out1(y1, w1" in streaming
    assert streamed_bytes(program) == 64 * 1024 * 4


def test_search_space_streams_large_tensors() -> None:
    """Default candidates with streaming, possible ones, and those without it."""
    space = load_space("fusion", "cpu")
    for rows, cols, choices, seeded in ((2048, 1024, 2, True), (128, 1024, 2, False), (32, 1024, 1, False)):
        graph = softmax(rows, cols)
        config = target_cpu.default(graph)
        own = target_cpu.space_of(graph, space)
        assert all(own.contains(c) for c in target_cpu.seeds(graph))
        for name in ("stream", "prefetch"):
            assert config[name] is False
            assert len(own[name].choices) == choices
            assert target_cpu.normalize(graph, config | {name: True})[name] is (choices == 2)
            assert any(c[name] for c in target_cpu.seeds(graph)) is seeded
    # Long rows are few: several of them for a thread, so that it has a next one.
    graph = softmax(16, 65536)
    assert target_cpu.default(graph)["row_block"] == 2
    assert {c["row_block"] for c in target_cpu.seeds(graph) if c["prefetch"]} == {8}
    assert target_cpu.normalize(graph, config | {"prefetch": True, "row_block": 1})["prefetch"] is False
    # Stored configurations of older searches lack both parameters.
    old = {k: v for k, v in target_cpu.default(softmax(2048, 1024)).items() if k not in ("stream", "prefetch")}
    assert target_cpu.normalize(softmax(2048, 1024), old)["stream"] is False
    lanes = target_cpu.default(outer_softmax(512, 1024)) | {"stream": True, "prefetch": True}
    assert target_cpu.normalize(outer_softmax(512, 1024), lanes) == lanes
    assert target_cpu.normalize(outer_softmax(32, 1024), lanes)["stream"] is False

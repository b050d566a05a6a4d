"""Narrow outputs of every type and of rows of every length: no other memory is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autotune.compiler.program.passes import build_program
from autotune.compiler.targets.cpu.kernel import emit_source, load_group
from autotune.compiler.targets.cpu.schedule import CpuSchedule
from autotune.ir.graph import Graph
from tests.support.cpu_graphs import TORCH, Build, check, random_inputs, run, softmax

COLS = (1, 3, 5, 9, 17, 33)
"""One more than a vector of 1, 2, 4, ... elements among them: the last lane alone is what LLVM got wrong."""
MANY = 12
"""Outputs: LLVM writes a loop with a long body out round by round no more, but makes it one masked vector."""
FLOATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def mixed(rows: int, cols: int, storage: str, pitch: int = 0) -> Graph:
    """Clamped elements with many others: LLVM narrows no value that is also used in a wide type.

    ``pitch``: elements from one row of the first output to the next.
    """
    b = Build(rows, cols)
    source = "int64" if storage == "int32" else "uint8"
    x, z = b.load(source, 0, 1), b.load(source, 0, 1)
    dtype = b.values[x].dtype
    b.out(b.minimum(b.const(5, dtype), b.maximum(b.const(0, dtype), x)), storage, strides=(pitch or cols, 1))
    b.out(x, dtype)
    if dtype == "int32":
        b.out(x, "int16")
    for op in ("and", "maximum", "xor"):
        b.out(b.point(op, x, z), source)
    for op in ("eq", "gt", "ne", "lt"):
        b.out(b.point(op, x, z), "bool")
    b.out(b.where(b.gt(x, z), x, z), source)
    wide = x if dtype == "int64" else b.point("cast", x, dtype="int64")
    b.out(b.reduce("sum", wide, 1), "int64")
    b.out(b.reduce("prod", wide, 1), "int64")
    b.out(b.reduce("max", x, 1), source)
    b.out(b.reduce("max", b.point("cast", b.eq(x, b.const(0, dtype)), dtype="int32"), 1), "int32")
    return b.graph()


def signs(rows: int, cols: int, storage: str) -> Graph:
    """True for negative elements, which LLVM reads from their sign bits."""
    b = Build(rows, cols)
    x = b.load("int64" if storage == "int32" else "int32", 0, 1)
    dtype = b.values[x].dtype
    for bits in range(1, MANY):
        b.out(b.lt(b.xor(x, b.const(bits, dtype)), b.const(0, dtype)), storage)
    b.out(b.reduce("sum", x, 1), dtype)
    return b.graph()


def capped(b: Build, x: int, storage: str, strides: tuple[int, int]) -> None:
    """Results of every element: no more than 1, than 2, and so on, and the element in a wide type."""
    for most in range(1, MANY):
        b.out(b.minimum(b.const(most, "int32"), x), storage, strides=strides)
    b.out(x, "int32", strides=strides)


def folded(rows: int, cols: int, storage: str) -> Graph:
    """Everything in one sum: the columns are two axes."""
    b = Build(rows, cols)
    x = b.load("uint8", 0, 1)
    capped(b, x, storage, (cols, 1))
    b.out(b.reduce("sum", x, 0, 1), "int32")
    return b.graph()


def down(rows: int, cols: int, storage: str) -> Graph:
    """The elements of a row are far apart, and their neighbours in memory those of other rows."""
    b = Build(rows, cols)
    strides = (1, rows)
    x = b.load("uint8", 0, 1, strides=strides)
    capped(b, x, storage, strides)
    b.out(b.reduce("max", x, 1), storage)
    return b.graph()


def floats(rows: int, cols: int, storage: str) -> Graph:
    b = Build(rows, cols)
    x = b.load("float32", 0, 1)
    for n in range(1, MANY):
        b.out(b.mul(x, b.const(0.5 / n)), storage)
    b.out(b.reduce("sum", x, 1), "float32")
    return b.graph()


@pytest.mark.parametrize("storage", ["int8", "uint8", "int16", "int32"])
def test_cut_integers(storage: str) -> None:
    for cols in COLS:
        check(mixed(6, cols, storage), CpuSchedule())


@pytest.mark.parametrize("storage", ["int8", "uint8", "int16", "int32", "bool"])
def test_comparisons(storage: str) -> None:
    for cols in COLS:
        check(signs(6, cols, storage), CpuSchedule())


@pytest.mark.parametrize("storage", ["uint8", "int16"])
@pytest.mark.parametrize("make", [folded, down])
def test_integers_in_other_loops(make: Callable[[int, int, str], Graph], storage: str) -> None:
    for rows in (2, 6, 9):
        for cols in (1, 3, 9, 17):
            check(make(rows, cols, storage), CpuSchedule())


@pytest.mark.parametrize("storage", FLOATS)
def test_floats(storage: str) -> None:
    for cols in COLS:
        graph = floats(6, cols, storage)
        inputs = random_inputs(graph)
        got = run(graph, inputs, CpuSchedule())[0]
        assert torch.equal(got.float(), (inputs[0].view(6, cols) * 0.5).to(got.dtype).float())


@pytest.mark.parametrize("tile", [0, 9])
def test_gaps_between_rows_stay(tile: int) -> None:
    """Memory between rows belongs to another tensor, and another thread may write it."""
    graph = mixed(5, 9, "uint8", pitch=16)
    inputs = random_inputs(graph)
    outputs = [torch.full((5 * 16,), 77, dtype=TORCH[o.dtype]) for o in graph.outputs]
    load_group(graph, CpuSchedule(column_tile=tile))([t.data_ptr() for t in (*inputs, *outputs)], 5)
    rows = outputs[0].view(5, 16)
    assert torch.equal(rows[:, :9], inputs[0].view(5, 9).clamp(max=5))
    assert (rows[:, 9:] == 77).all()


def test_a_short_row_of_floats_keeps_its_length() -> None:
    """A hidden length costs short rows their single vector: only integer stores hide it."""

    def source(graph: Graph) -> str:
        return emit_source(build_program(graph), CpuSchedule())

    assert "in range(9):" in source(softmax(6, 9))
    assert "in range(9):" not in source(mixed(6, 9, "uint8"))

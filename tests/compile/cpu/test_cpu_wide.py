"""Vectors of 512 bits: asked for where the processor has them, right, and another configuration than without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autotune.compiler.program.passes import build_program
from autotune.compiler.schedules import cpu as target_cpu
from autotune.compiler.targets.cpu.kernel import emit_source, load, load_group
from autotune.compiler.targets.cpu.schedule import CpuSchedule
from autotune.device import cpu_isa
from autotune.ir.graph import Graph
from autotune.ir.oracle import interpret
from autotune.measure.verify import compare
from autotune.space import load_space
from tests.support.cpu_graphs import (
    gelu_layer_norm,
    layer_norm_backward,
    random_inputs,
    softmax,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(params=[False, True], ids=["avx2", "avx512"])
def has(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True if the faked processor has vectors of 512 bits."""
    monkeypatch.setattr(target_cpu, "cpu_isa", lambda: "avx avx2 fma" + (" avx512f" if request.param else ""))
    return bool(request.param)


def run(graph: Graph, inputs: list[Tensor], schedule: CpuSchedule) -> list[Tensor]:
    outputs = [torch.empty(graph.output_numel(k), dtype=DTYPES[o.dtype]) for k, o in enumerate(graph.outputs)]
    load_group(graph, schedule)([t.data_ptr() for t in (*inputs, *outputs)], graph.extents[0])
    return outputs


@pytest.mark.parametrize("cols", [1, 17, 64, 200, 1000, 4096])
def test_results_are_right(cols: int) -> None:
    for graph, schedule in (
        (softmax(7, cols), CpuSchedule(row_block=2)),
        (gelu_layer_norm(9, cols), CpuSchedule(row_block=2, stream=True, prefetch=True)),
        (layer_norm_backward(70, cols), CpuSchedule(parts=2)),
    ):
        if schedule.parts and cols < 2:
            continue
        inputs = random_inputs(graph)
        expected = interpret(graph, inputs)
        longest = max((graph.size(v.over) for v in graph.values if v.over), default=1)
        for k, got in enumerate(run(graph, inputs, replace(schedule, wide=True))):
            o = graph.outputs[k]
            shaped = got.as_strided([graph.extents[a] for a in o.axes], o.strides, o.offset)
            verdict = compare(shaped, expected[k], o.dtype, longest)
            assert verdict.ok, (k, verdict.detail)


def test_llvm_is_asked() -> None:
    program = build_program(softmax(8, 4096))
    narrow, wide = (load(program, CpuSchedule(wide=w)).compiled._library for w in (False, True))
    assert '"prefer-vector-width"="512"' in wide.get_llvm_str()
    assert "prefer-vector-width" not in narrow.get_llvm_str()
    if "avx512f" in cpu_isa().split():
        assert wide.get_asm_str().count("%zmm") > 20
    assert "wide" not in emit_source(program, CpuSchedule())


def test_it_is_searched_where_the_processor_has_them(has: bool) -> None:
    graph = softmax(2048, 1024)
    default = target_cpu.default(graph)
    assert default["wide"] is has
    assert target_cpu.space_of(graph, load_space("fusion", "cpu"))["wide"].choices == (
        (True, False) if has else (False,)
    )
    assert {c["wide"] for c in target_cpu.seeds(graph)} == ({True, False} if has else {False})
    assert target_cpu.normalize(graph, default | {"wide": True})["wide"] is has
    # What was stored before there was a choice runs as it was measured.
    old = {k: v for k, v in default.items() if k != "wide"}
    assert target_cpu.normalize(graph, old)["wide"] is False

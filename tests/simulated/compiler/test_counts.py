"""Kernels that count or reach beyond 32 bits: with a small limit in plain Python, with large tensors as cubins."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune.compiler.schedules.cuda import Scheme, scheme_of
from autotune.compiler.targets.cpu.schedule import CpuSchedule
from autotune.compiler.targets.cuda import device
from autotune.compiler.targets.cuda.compile import build, compile_ptx
from autotune.compiler.targets.cuda.source import CudaSource, GroupKernels
from autotune.errors import Unsupported
from autotune.ir.graph import Graph
from autotune.space import load_space
from autotune.task import Config
from tests.gpu import large_check
from tests.simulated.compiler.test_cuda_outer import Case, graphs_of
from tests.support.cpu_graphs import check
from tests.support.many_parts import beside, run_packed, task_of, update
from tests.support.simulator import intrinsics
from tests.support.simulator.errors import KernelError
from tests.support.simulator.groups import check_group, grid_of
from tests.support.zoo import BF16, T, layer_norm_backward, norm_then_softmax

MOST = 300
"""The numbers that an int32 holds in these tests: those of threads, not those of rows, columns or packs."""
HUGE = 1 << 31
REAL_INT32 = intrinsics.int32


def narrow_int32(x: Any) -> int:
    """``int32`` of few bits, which complains where the real one would wrap."""
    if abs(int(x)) >= MOST:
        raise KernelError(f"{x} is counted in 32 bits")
    return REAL_INT32(x)


def both_ways(x: Tensor) -> tuple[Tensor, ...]:
    """Reductions over all rows with pointwise work: blocks have tiles of the columns."""
    return x * 2, x.sum(0), x.amax(0)


def by_rows(x: Tensor, w: Tensor) -> Tensor:
    return x * w[:, None] + 1


def softmax_0(x: Tensor) -> Tensor:
    return torch.softmax(x, 0)


def softmax_1(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


CASES = {
    "flat": [Case("", by_rows, (T(20, 67), T(20))), Case("", lambda x: x + x.t(), (T(37, 37),))],
    "transpose": [Case("", lambda x, y: x * 2 + y.t(), (T(16, 513), T(513, 16)))],
    "rows": [
        Case("", softmax_1, (T(330, 3),)),
        Case("", softmax_1, (T(2, 653),)),
        Case("", lambda x: x.sum((1, 2)), (T(3, 13, 60, strides=(4800, 240, 2)),)),
    ],
    "columns": [Case("", layer_norm_backward, (T(330, 8), T(330, 8), T(8))), Case("", both_ways, (T(66, 330),))],
    "outer": [Case("", softmax_0, (T(331, 8),)), Case("", softmax_0, (T(3, 356),))],
    "tile": [Case("", norm_then_softmax, (T(330, 8),))],
}
"""Of each scheme, functions whose kernels count beyond MOST: rows or packs, and columns or places."""


def graph_of(case: Case) -> Graph:
    (only,) = graphs_of(case.fn, case.inputs)
    return only


def some_configs(scheme: Scheme, graph: Graph, n: int) -> list[Config]:
    """``n`` random configurations of one element a vector, so that there is much to count, in blocks of few threads."""
    rng, space = random.Random(5), scheme.space_of(graph, load_space("fusion", "cuda"))
    found: list[Config] = []
    while len(found) < n:
        config = scheme.normalize(graph, space.sample(rng) | {"vector_bytes": 4})
        few = int(config["threads_per_row"]) * int(config["rows_per_block"]) <= 128
        if not few or config in found or scheme.reject(graph, config) is not None:
            continue
        if all(grid_of(source, graph.extents[0], 3) <= MOST for source in scheme.emit(graph, config, 3).sources):
            found.append(config)  # blocks have 32-bit numbers, however much they count
    return found


@pytest.mark.parametrize("name", CASES)
def test_wide_kernels_agree_with_the_oracle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intrinsics, "int32", narrow_int32)
    for case in CASES[name]:
        graph = graph_of(case)
        scheme = scheme_of(graph)
        assert scheme.name == name
        configs = some_configs(scheme, graph, 3)
        narrow = scheme.emit(graph, configs[0], 3)
        with pytest.raises(KernelError, match="in 32 bits"):
            check_group(graph, narrow)
        with monkeypatch.context() as patch:
            patch.setattr(device, "LIMIT", 1)
            for n, config in enumerate(configs):
                made = scheme.emit(graph, config, 3)
                check_group(graph, made, seed=n, special=n == 1)
            assert made.sources[0].launch["wide"] is True


def test_wide_kernels_share_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intrinsics, "int32", narrow_int32)
    task = task_of(beside(graph_of(CASES["rows"][0]), update(37), graph_of(CASES["flat"][0]), update(1301)))
    with pytest.raises(KernelError, match="in 32 bits"):
        run_packed(task)
    monkeypatch.setattr(device, "LIMIT", 1)
    (grid,) = run_packed(task)
    assert grid >= 4


LARGE = {
    "flat": (Case("", by_rows, (T(1 << 20, 4099, d=BF16), T(1 << 20, d=BF16))), {}),
    "transpose": (Case("", lambda x, y: x * 2 + y.t(), (T(16, HUGE, d=BF16), T(HUGE, 16, d=BF16))), {}),
    "rows": (Case("", softmax_1, (T(HUGE, 3, d=BF16),)), {}),
    "rows_long": (Case("", lambda x: x.float().sum(-1), (T(2, HUGE + 8, d=BF16),)), {}),
    "columns": (Case("", layer_norm_backward, (T(HUGE, 8), T(HUGE, 8), T(8))), {}),
    "outer": (Case("", softmax_0, (T(HUGE, 8, d=BF16),)), {}),
    "outer_wide": (Case("", softmax_0, (T(3, HUGE, d=BF16),)), {"vector_bytes": 2}),
}
"""Functions of tensors of 2**31 elements and more, which 32 bits cannot count, and what differs from the default.
(A tile of that many elements is never made: see ``schemes.tile.LARGEST``.)"""


def emitted(graph: Graph, **changes: Any) -> GroupKernels:
    scheme = scheme_of(graph)
    config = scheme.normalize(graph, scheme.default(graph) | changes)
    assert scheme.reject(graph, config) is None
    return scheme.emit(graph, config, 132)


@pytest.mark.parametrize("name", LARGE)
def test_large_tensors_have_wide_kernels_that_compile(name: str) -> None:
    case, changes = LARGE[name]
    graph = graph_of(case)
    assert scheme_of(graph).name == name.partition("_")[0]
    main = emitted(graph, **changes).sources[0]
    assert main.launch["wide"] is True
    assert build(main, "sm_90").resources["stack"] == 0


@pytest.mark.parametrize("prefetch", [False, True])
def test_others_compile_too(prefetch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "LIMIT", 1)
    if prefetch:
        ahead = {"prefetch": True, "blocks_per_sm": 2, "keep": "registers", "rows_per_block": 4, "threads_per_row": 32}
        graph = graph_of(Case("", softmax_1, (T(4096, 256),)))
        made = emitted(graph, **ahead)
        assert made.sources[0].text != emitted(graph, **ahead | {"prefetch": False}).sources[0].text
    else:
        made = emitted(graph_of(CASES["tile"][0]))
    assert made.sources[0].launch["wide"] is True
    assert build(made.sources[0], "sm_90").resources["stack"] == 0


def main_source(case: Case, **changes: Any) -> CudaSource:
    return emitted(graph_of(case), **changes).sources[0]


def test_large_tensors_of_countable_rows_keep_their_kernels() -> None:
    """2**32 elements in rows of 4096: the same source as for a thousand rows."""
    few, many = (main_source(Case("", softmax_1, (T(n, 4096, d=BF16),))) for n in (1 << 14, 1 << 20))
    assert many.text == few.text
    assert "wide" not in many.launch
    assert "64(" not in many.text.replace("int64(", "")


def test_the_limit_leaves_room_for_the_last_block() -> None:
    assert not device.Counts.of(3, device.LIMIT - 1).wide
    assert device.Counts.of(device.LIMIT, 3).wide
    most = 1024 * 8 * 16 * 16  # threads, packs in flight, elements, blocks of a cluster
    assert device.LIMIT - 1 + most < HUGE


def test_offsets_beyond_32_bits_of_few_elements() -> None:
    """64 x 64 elements, 2**26 apart from row to row: counted in 32 bits, found by a product of 64."""
    source = main_source(Case("", lambda x: x * 2, (T(64, 64, strides=(1 << 26, 1)),)))
    assert "wide" not in source.launch
    text, _ = compile_ptx(source, "sm_90")
    assert re.search(r"mul\.wide\.[su]32 \s*%rd\d+, %r\d+, 67108864;", text)
    columns = main_source(Case("", lambda x: x.sum(1), (T(64, 64, strides=(1, 1 << 26)),)), keep="reload")
    text, _ = compile_ptx(columns, "sm_90")
    assert not re.search(r"(mul\.lo\.s32|shl\.b32)[^;]*, (67108864|26|28);", text)


def test_a_cpu_kernel_reaches_beyond_32_bits(tmp_path: Path) -> None:
    """The same on the CPU, where it runs: 4 GiB from row to row, in a file that has only the pages touched."""
    graph = graph_of(Case("", lambda x: x * 2 + x[:, :1], (T(4, 48, d=BF16, strides=(HUGE, 1)),)))
    n = graph.input_numel(0)
    assert n > 3 * HUGE
    x = torch.from_file(str(tmp_path / "sparse"), shared=True, size=n, dtype=BF16)
    x.as_strided((4, 48), (HUGE, 1)).copy_(torch.randn(4, 48))
    for schedule in (CpuSchedule(), CpuSchedule(threads=2, column_tile=16)):
        check(graph, schedule, [x])


@pytest.mark.parametrize(("half", "dtype"), [(1 << 20, "int32"), (1 << 30, "int64")])
def test_positions_along_a_long_axis(half: int, dtype: str) -> None:
    """Where two tensors meet, and a range of floats: in 32 bits a position beyond 2**31 would be negative. (A range of
    floats is one of 64-bit integers, as Inductor takes it apart.)"""
    joined = graph_of(Case("", lambda x, y: torch.cat([x, y]) * 2, (T(half), T(half + 64))))
    counted = graph_of(Case("", lambda x: x * torch.arange(2 * half + 64, dtype=torch.float32), (T(2 * half + 64),)))
    assert {v.dtype for v in joined.values if v.op == "index"} == {dtype}
    assert {v.dtype for v in counted.values if v.op == "index"} == {"int64"}


def test_the_check_of_large_tensors_works(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The GPU host's script at 2**11 instead of 2**31, on the CPU: right kernels pass, and wrong results do not."""
    options = ["--device", "cpu", "--log2", "11", "--configs", "0"]
    assert large_check.main(options) == 0
    assert "checked 7 bad 0" in capsys.readouterr().out
    real = large_check.run

    def wrong_at_the_end(*args: Any) -> tuple[list[Tensor], list[bool]]:
        outputs, wide = real(*args)
        for y in outputs:
            y[-1] += 0.5 + abs(y[-1])
        return outputs, wide

    monkeypatch.setattr(large_check, "run", wrong_at_the_end)
    assert large_check.main(options) == 1
    assert "checked 7 bad 7" in capsys.readouterr().out


def test_more_blocks_than_a_launch_has_are_refused() -> None:
    graph = graph_of(LARGE["rows"][0])
    scheme = scheme_of(graph)
    with pytest.raises(Unsupported, match="2147483648 blocks in one launch"):
        scheme.emit(graph, scheme.default(graph) | {"rows_per_block": 1, "threads_per_row": 32}, 132)


def test_check_launch_refuses_counts_beyond_the_counters() -> None:
    rule = {"dynamic": True, "inner": 16, "per_block": 8, "blocks_per_sm": 0}
    device.check_launch(rule, (device.LIMIT - 1) // 16)
    with pytest.raises(Unsupported, match="32-bit counters"):
        device.check_launch(rule, 1 << 28)
    device.check_launch(rule | {"wide": True}, 1 << 28)
    device.check_launch(rule | {"dynamic": False}, 1 << 28)
    with pytest.raises(Unsupported, match="32-bit counters"):
        device.check_launch(rule | {"grid": 4}, 1 << 28)
    device.check_launch(rule | {"grid": 4, "dynamic": False}, 1 << 28)
    with pytest.raises(Unsupported, match="in one launch"):
        device.check_launch(rule | {"wide": True}, 1 << 31)
    device.check_launch(rule | {"wide": True, "blocks_per_sm": 2}, 1 << 31)


def test_sums_over_the_rows_of_a_block_are_bounded() -> None:
    rule = {"dynamic": True, "inner": 1, "per_block": 8, "blocks_per_sm": 2, "grid": 12, "tiles": 3}
    most = device.MOST_IN_TURN * 8 * 4  # of four blocks for each tile of columns, with eight rows at a time
    device.check_launch(rule, most)
    with pytest.raises(Unsupported, match="65536 rows for each accumulator"):
        device.check_launch(rule, most + 1)

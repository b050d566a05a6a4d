"""Loads of which a select or a sum takes one are one load whose pointer is selected; loaded a row ahead, too."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autotune.compiler.program.columns import main_program, split_columns
from autotune.compiler.program.passes import build_program
from autotune.compiler.schedules.cuda import scheme_of
from autotune.compiler.targets.cuda.compile import compile_ptx
from autotune.compiler.targets.cuda.rows.packs import find_selected_loads
from autotune.compiler.targets.cuda.source import CudaSource
from autotune.domains.fusion.program_spec import workloads_of
from autotune.domains.fusion.task import FusionTask
from autotune.space import load_space
from tests.compile.cuda.test_ptx_walk import Made, configured, made, walk
from tests.support.simulator.groups import check_group, run_group
from tests.support.zoo import workloads

__all__ = ["made"]
BACK = torch.ops.aten.select_backward


def task_of(fn: object, *args: Tensor) -> FusionTask:
    """The task of a function of one region, for a device of three multiprocessors."""
    ((work, _),) = workloads_of(fn, args)  # type: ignore[arg-type]
    return FusionTask(work, "cuda:0", target="sm_90", sms=3)


def packed(*parts: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients [rows, columns] written next to each other, the last one first in the sum, and their column sums."""
    n = len(parts)
    total = BACK(parts[n // 2], [n, *parts[0].shape], 0, n // 2)
    for k in range(n):
        total = total if k == n // 2 else BACK(parts[k], [n, *parts[0].shape], 0, k) + total
    whole = total.permute(1, 0, 2).reshape(parts[0].shape[0], -1)
    return whole, whole.sum(0)


def loads(source: CudaSource) -> list[str]:
    """The loads in a kernel's device functions."""
    return re.findall(r"\b(l[dgrw]_\w+)\(", source.text.partition("def kernel(")[0])


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_packed_gradient_takes_one_load_of_16_bytes_for_a_store_of_16(prefetch: bool) -> None:
    task = task_of(packed, *(torch.randn(4096, 768, dtype=torch.bfloat16) for _ in range(3)))
    (group,) = task.plan.groups
    scheme = scheme_of(group.graph)
    assert scheme.name == "columns"
    config = scheme.default(group.graph)
    assert (config["vector_bytes"], config["threads_per_row"]) == (16, 96)  # 288 packs
    source = scheme.emit(group.graph, scheme.normalize(group.graph, config | {"prefetch": prefetch}), 132).sources[0]
    assert loads(source) == ["lr_bf16_8_d" if prefetch else "ld_bf16_8_d"]
    ptx, _ = compile_ptx(source, "sm_90")
    assert set(re.findall(r"ld\.global\S*", ptx)) == {"ld.global.nc.v4.u32"}
    assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.u32"}
    assert "@q" not in ptx  # no load under a predicate


@pytest.mark.parametrize(("cols", "dtype"), [(768, torch.bfloat16), (256, torch.bfloat16), (96, torch.float32)])
def test_threads_that_leave_few_idle_are_in_the_space(cols: int, dtype: torch.dtype) -> None:
    """Measurements outside of it teach a search nothing. 3 x 256 are 96 vectors, three quarters of 128."""
    (group,) = task_of(packed, *(torch.randn(4096, cols, dtype=dtype) for _ in range(3))).plan.groups
    scheme = scheme_of(group.graph)
    space = scheme.space_of(group.graph, load_space("fusion", "cuda"))
    candidates = [scheme.default(group.graph), *scheme.seeds(group.graph)]
    assert candidates[0]["threads_per_row"] == 96
    assert all(space.contains(c) for c in candidates if c["threads_per_row"] <= 192)  # type: ignore[operator]
    assert all(scheme.reject(group.graph, c) is None for c in candidates)


@pytest.mark.parametrize(
    ("rows", "cols", "dtype", "count"),
    [
        (70, 64, torch.bfloat16, 2),
        (70, 64, torch.float32, 5),
        (67, 20, torch.float32, 2),
        (67, 20, torch.bfloat16, 3),
        (66, 33, torch.bfloat16, 5),
        (66, 33, torch.float32, 3),
    ],
)
def test_packed_gradients(rows: int, cols: int, dtype: torch.dtype, count: int) -> None:
    task = task_of(packed, *(torch.randn(rows, cols, dtype=dtype) for _ in range(count)))
    (group,) = task.plan.groups
    scheme = scheme_of(group.graph)
    default = scheme.default(group.graph)
    for n, changes in enumerate(({}, {"prefetch": True, "rows_per_block": 4}, {"vector_bytes": dtype.itemsize})):
        config = scheme.normalize(group.graph, default | {"threads_per_row": 16, "blocks_per_sm": 1} | changes)
        emitted = scheme.emit(group.graph, config, 3)
        check_group(group.graph, emitted, seed=n, special=True)


def stacked(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.stack((x, y, z), 1) * 2


@pytest.mark.parametrize(
    ("fn", "kinds"),
    [
        (stacked, ["ld"]),
        (lambda x, y, z: torch.stack((x, y, z)) * 2, ["lg"]),  # as many as the kernel's argument
        (lambda x, y, z: torch.stack((x, y.exp(), z), 1), ["lg", "lg", "lg"]),
        (lambda x, y, z: torch.stack((x, torch.zeros_like(x), z), 1) + 1, ["lg", "lg"]),
        (lambda x, y, z: torch.stack((x, y, z), 1) + x[:, None], ["ld", "ld"]),
        (lambda x, y, z: BACK(x, [5, 3, 24], 1, 2) + BACK(y, [5, 3, 24], 1, 0), ["lg", "lg"]),
        (lambda x, y, z: BACK(x, [5, 3, 24], 1, 2) + BACK(y, [5, 3, 24], 1, 1), ["lg"]),
    ],
)
def test_selected_loads_are_joined_by_kind(fn: Callable[..., Tensor], kinds: list[str]) -> None:
    task = task_of(fn, *(torch.randn(5, 24) for _ in range(3)))
    (group,) = task.plan.groups
    scheme = scheme_of(group.graph)
    emitted = scheme.emit(group.graph, scheme.default(group.graph), 3)
    assert scheme.name == "flat"
    assert sorted(x[:2] for x in loads(emitted.sources[0])) == kinds
    check_group(group.graph, emitted)
    check_group(group.graph, emitted, special=True)


def test_only_a_sum_with_zeros_takes_the_sign_of_a_zero() -> None:
    x, y, z = (torch.randn(80, 16) for _ in range(3))
    select = build_program(task_of(stacked, x, y, z).plan.groups[0].graph)
    add = main_program(split_columns(task_of(packed, x, y, z).plan.groups[0].graph))
    for program, added in ((select, False), (add, True)):
        (joined,) = find_selected_loads(program).loads.values()
        assert joined.added == added
        assert len(joined.parts) == 3


def test_a_negative_zero_next_to_a_sum_stays_negative() -> None:
    """Two gradients that are added to zeros, and a third tensor behind them that is not."""

    def beside(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        both = BACK(x, [2, *x.shape], 0, 0) + BACK(y, [2, *x.shape], 0, 1)
        return torch.cat((both, z[None])) * 2

    inputs = [torch.full((5, 24), -0.0) for _ in range(3)]
    (group,) = task_of(beside, *inputs).plan.groups
    scheme = scheme_of(group.graph)
    (out,) = run_group(group.graph, scheme.emit(group.graph, scheme.default(group.graph), 3), inputs)
    assert torch.equal(torch.signbit(out.reshape(3, 5, 24)), torch.signbit(beside(*inputs)))


def test_tensors_of_other_types_or_strides_are_loaded_apart() -> None:
    x, y = torch.randn(5, 24), torch.randn(5, 48)[:, ::2]
    for other in (x.half(), y):
        task = task_of(lambda a, b: torch.stack((a.float(), b.float()), 1), x, other)
        assert not find_selected_loads(build_program(task.plan.groups[0].graph)).loads


@pytest.mark.parametrize("changes", [{}, {"prefetch": True}, {"vector_bytes": 4, "threads_per_row": 32}], ids=str)
@pytest.mark.parametrize("name", ["packed_backward", "packed_backward_odd"])
def test_nothing_outside_is_read(name: str, changes: dict[str, object], made: list[Made]) -> None:
    task = FusionTask(workloads(name)[0], "cuda:0", target="sm_90", sms=3)
    walk(task, task.normalize(configured(task) | changes), made)  # type: ignore[arg-type]


def test_a_sum_over_the_parts_of_a_stack_is_read_in_vectors() -> None:
    """No tensor has the axis of the parts; the one with unit stride is the innermost all the same."""
    task = task_of(
        lambda x, y: (torch.stack((x.exp(), y), 1) * 2).sum((1, 2)), torch.randn(40, 512), torch.randn(40, 512)
    )
    (group,) = task.plan.groups
    scheme = scheme_of(group.graph)
    assert scheme.name == "rows"
    emitted = scheme.emit(group.graph, scheme.default(group.graph), 3)
    assert loads(emitted.sources[0]) == ["lg_f32_4_d", "lg_f32_4_d"]
    check_group(group.graph, emitted)


@pytest.mark.parametrize(("first", "count"), [(0, 2), (1, 1)])
@pytest.mark.parametrize("dim", [0, 1])
def test_guarded_loads_are_issued_a_row_ahead(first: int, count: int, dim: int) -> None:
    """Two of three parts, adjacent or not, along the columns or, with ``dim`` 1, along the rows."""

    def two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        sizes = [3, 80, 40] if dim == 0 else [80, 3, 40]
        both = BACK(x, sizes, dim, first) + BACK(y, sizes, dim, 2)
        return both, both.sum(1 - dim) if dim == 0 else both.sum((0, 1))

    task = task_of(two, *(torch.randn(80, 40, dtype=torch.bfloat16) for _ in range(2)))
    (group,) = task.plan.groups
    scheme = scheme_of(group.graph)
    assert scheme.name == "columns"
    config = scheme.default(group.graph) | {"prefetch": True, "threads_per_row": 16, "blocks_per_sm": 1}
    config = scheme.normalize(group.graph, config | {"rows_per_block": 4, "max_registers": 0})
    assert config["prefetch"]
    emitted = scheme.emit(group.graph, config, 3)
    assert [x[:2] for x in loads(emitted.sources[0])] == ["lw"] * count
    check_group(group.graph, emitted)
    check_group(group.graph, emitted, seed=1, special=True)
    for source in emitted.sources:
        compile_ptx(source, "sm_90")

"""Conversions of floats to integers take the instructions of eager CUDA code, which decide about NaN and the range."""

from __future__ import annotations

import re

import torch

from autotune.compiler.assemble import draft
from autotune.compiler.planner.groups import group_configs
from autotune.compiler.targets.cuda.compile import compile_ptx
from autotune.domains.fusion.program_spec import workloads_of
from autotune.domains.fusion.task import FusionTask


def conversions(dtype: torch.dtype, *, clamp: tuple[int, int] | None = None) -> set[str]:
    """The instructions from float32 to integers in the default kernel of a conversion."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x if clamp is None else x.clamp(*clamp)).to(dtype)

    ((work, _),) = workloads_of(fn, (torch.randn(4096),))
    task = FusionTask(work, "cuda:0", target="sm_90", sms=132)
    drafts, _ = draft(task.graph, task.plan, group_configs(task.plan, task.default()), 132)
    ptx = "".join(compile_ptx(d.source, "sm_90")[0] for d in drafts)
    return {found.replace(".ftz", "") for found in re.findall(r"\bcvt\.rzi\S*", ptx)}


def test_the_instructions_have_the_widths_of_eager_mode() -> None:
    """C++ converts to the type itself: cvt.rzi saturates, and NaN is 0 in 32 bits and the smallest number in 64."""
    assert conversions(torch.int32) == {"cvt.rzi.s32.f32"}
    assert conversions(torch.int64) == {"cvt.rzi.s64.f32"}


def test_narrow_types_are_converted_by_way_of_32_bits() -> None:
    """All but NaN fits there. NaN is 0 by any width: what is kept of 64 bits are the low ones."""
    for dtype, clamp in ((torch.int8, (-128, 127)), (torch.uint8, (0, 255)), (torch.int16, (-32768, 32767))):
        assert conversions(dtype, clamp=clamp) == {"cvt.rzi.s32.f32"}

"""Kernel times out of a profiler's trace."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.bench.kernels import read_trace
from benchmarks.fusion.kernel_times import KernelTime, TraceError, split

MARK = "sweep"


def span(begin: float, end: float, name: str = "k", kernel: bool = True) -> tuple[float, float, bool, str]:
    return begin, end, kernel, name


def test_a_trace_is_divided_at_the_sweeps_and_summed_up() -> None:
    spans = [
        span(0, 1, "left over"),
        span(10, 20, MARK), span(30, 32), span(33, 36),  # a: 5 us in 2 kernels
        span(40, 50, MARK), span(60, 64),  # b: 4 us
        span(70, 80, MARK), span(90, 92), span(92, 92.5, "fill", kernel=False), span(93, 96), # a: 5.5 us, 2 kernels
        span(100, 110, MARK), span(120, 124), span(122, 126),  # b: what overlaps counts once
        span(130, 140, MARK), span(150, 152), span(153, 157),
        span(160, 170, MARK), span(180, 184),
    ]  # fmt: skip
    found = split(spans, MARK, ["a", "b"], 3)
    assert found == {"a": KernelTime(5.5, 2), "b": KernelTime(4, 1)}


def test_kernels_that_the_profiler_lost_are_reported() -> None:
    whole = [span(0, 1, MARK), span(2, 3), span(4, 5, MARK), span(6, 7)]
    assert split(whole, MARK, ["a", "b"], 1)["b"].us == 1
    with pytest.raises(TraceError, match="1 runs of 2"):
        split(whole[:2], MARK, ["a", "b"], 1)
    with pytest.raises(TraceError, match="no kernel of b"):
        split(whole[:3], MARK, ["a", "b"], 1)


def test_only_work_is_read_from_a_trace() -> None:
    def event(cat: str, ts: float, **more: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": cat, "ts": ts, "dur": 2.0, **more}

    events = [
        event("gpu_memset", 7), event("kernel", 3), event("gpu_user_annotation", 1), event("cuda_runtime", 0),
        {"ph": "M", "name": "process_name"}, {"ph": "i", "cat": "kernel", "name": "?", "ts": 9},
    ]  # fmt: skip
    assert read_trace({"traceEvents": events}) == [(3, 5, True, "kernel"), (7, 9, False, "gpu_memset")]

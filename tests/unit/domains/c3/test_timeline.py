"""Classes of the profiler's events; the record of a run on CPUs is in the suite's test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.c3 import timeline


@pytest.mark.parametrize(
    ("category", "name", "row", "kind"),
    [
        ("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl", "nccl_kernels"),
        ("kernel", "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT", "compute", "compute_kernels"),
        ("kernel", "autotune_c3_reduce", "kernels", "numba_kernels"),
        ("kernel", "autotune_kernel", "kernels", "numba_kernels"),  # stored by an earlier version
        ("gpu_memcpy", "Memcpy PtoP (Device -> Device)", "copies", "peer_copies"),
        ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", "copies", "copies"),
        ("gpu_memset", "Memset (Device)", "compute", "memsets"),
    ],
)
def test_events_are_distinguished_by_their_names(category: str, name: str, row: str, kind: str) -> None:
    assert timeline.classify(category, name) == (row, kind)


class Group:
    """One rank by itself."""

    def __init__(self) -> None:
        self.kept: set[str] = set()

    def keep(self, name: str, make: Any) -> None:
        if name not in self.kept:
            self.kept.add(name)
            make()

    def barrier(self) -> None:
        pass


class Run:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def prepare(self) -> None:
        self.calls += 1

    def __call__(self) -> None:
        self.calls += 1


def test_timeline_takes_only_device_events(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1.0, "dur": 50.0},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 10.0, "dur": 5.5, "args": {"stream": 7}},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": 10.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy PtoP (Device -> Device)", "ts": 12.0, "dur": 9.0},
    ]

    class Profile:
        def __init__(self, activities: object) -> None: ...
        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *error: object) -> None: ...
        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text(json.dumps({"traceEvents": events}))

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    group, run = Group(), Run()
    spans, seen = timeline._profiled(group, run)  # type: ignore[arg-type]
    assert [(s["row"], s["start_us"], s["us"]) for s in spans] == [("compute", 10.0, 5.5), ("copies", 12.0, 9.0)]
    assert seen == {"compute_kernels": 1, "peer_copies": 1}
    assert run.calls == 3  # prepared, once for the profiler's sake, and once for the record
    timeline._profiled(group, run)  # type: ignore[arg-type]
    assert run.calls == 5


def test_shares_of_a_step() -> None:
    """A product until 10, NCCL from 5 to 20, a copy to a peer from 18 to 22, and one within a device from 30 to 31."""
    events = [
        {"cat": "kernel", "name": "nvjet_tst", "ts": 100.0, "dur": 10e3},
        {"cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL", "ts": 5100.0, "dur": 15e3},
        {"cat": "gpu_memcpy", "name": "Memcpy PtoP (Device -> Device)", "ts": 18100.0, "dur": 4e3},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "ts": 30100.0, "dur": 1e3},
    ]
    assert timeline.shares(events) == {
        "span": 31.0, "compute": 11.0, "exposed": 12.0, "idle": 8.0,
        "row compute": 11.0, "row nccl": 15.0, "row copies": 4.0,
    }  # fmt: skip

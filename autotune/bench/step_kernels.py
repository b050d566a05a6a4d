"""The kernels that a step launches, as its CUDA graph replays them: how many, how long, and by name."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autotune.bench.library_kernels import is_library

_TRACES = 3
_BUSY_S = 0.5
"""Seconds of replays before one is traced: by then the device's clock is what a sustained load leaves it."""
_NAMES = 40
Call = Callable[[], object]


def kernels_of(steps: Mapping[str, Call]) -> dict[str, dict[str, Any]]:
    """Kernels of a step, as its CUDA graph replays them, by contender: :func:`summed`.

    What a kernel reads lies in the caches where the step leaves it. A contender that the profiler shows nothing of (a
    host that lets nobody read the counters) is left out.
    """
    found = {}
    for name, step in steps.items():
        with contextlib.suppress(RuntimeError):  # the profiler's, or no memory for one more graph
            if spans := _traced(step):
                found[name] = summed([(begin, end, kernel) for begin, end, _, kernel in spans])
    return found


def _traced(step: Call) -> list[tuple[float, float, bool, str]] | None:
    """What the profiler sees of a step's replay, whose graph is gone afterwards: two of a large model do not fit."""
    from autotune.bench.kernels import record
    from autotune.measure.timing.timer import capture, keep_running

    run = capture(step)

    def work() -> None:
        run()
        torch.cuda.synchronize()

    found = None
    for _ in range(_TRACES):  # a process's first trace may come out empty
        # A device that has rested, as while a trace is read, is faster than in the midst of a training.
        keep_running(run, _BUSY_S)
        found = [s for s in record(work) if s[2]] or found
    return found


def summed(spans: Sequence[tuple[float, float, str]]) -> dict[str, Any]:
    """Counts and microseconds of kernels (begin, end, name): memory-intensive ones and a library's, both by name.

    A library's are those of matrix products, convolutions and attention; the most frequent 40 names of a kind are kept.
    """
    us: tuple[dict[str, float], ...] = ({}, {})
    count: tuple[Counter[str], ...] = (Counter(), Counter())
    for begin, end, kernel in spans:
        kind = int(is_library(kernel))
        count[kind][kernel] += 1
        us[kind][kernel] = us[kind].get(kernel, 0.0) + end - begin
    found: dict[str, Any] = {}
    for kind, (what, names) in enumerate((("memory_intensive", "names"), ("library", "library_names"))):
        most = count[kind].most_common(_NAMES)
        found |= {what: count[kind].total(), f"{what}_us": round(sum(us[kind].values()), 1)}
        found |= {names: dict(most), f"{names}_us": {k: round(us[kind][k], 1) for k, _ in most}}
    return found

"""The kernels that a step launches, as its CUDA graph replays them: how many, how long, by name and by kind.

CUPTI, which ``torch.profiler`` reads, records every kernel of the process whoever launched it. Kernels of matrix
products, convolutions, attention, recurrences or communication are a library's, told by their names. All others are
launched for memory-intensive operators.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from autotune.compiler.targets.cuda.source import PREFIX

_TRACES = 3
_BUSY_S = 0.5
"""Seconds of replays before one is traced: by then the device's clock is what a sustained load leaves it."""
_NAMES = 40
_ACTIVITIES = ("kernel", "gpu_memcpy", "gpu_memset")
_TRITON = re.compile(r"triton_(tem|mm|bmm|convolution|flex|flash)")
"""Inductor's templates, whatever is fused into them. Its other kernels are named for all that they fuse or follow."""

_LIBRARY = re.compile(
    r"""gemm | gemv | cutlass | cublas | nvjet | xmma | splitk | wgmma | \bmma_ | _mma_
      | flash | fmha | attention | mha_
      | cudnn | conv(?!ert) | implicit_ | winograd | dgrad | wgrad | nchwtonhwc | nhwctonchw
      | rnn | nccl | memcpy | memset
    """,
    re.IGNORECASE | re.VERBOSE,
)
_NORM = re.compile(r"cudnn.*(bn_|batch_?norm)", re.IGNORECASE)

Call = Callable[[], object]
Span = tuple[float, float, bool, str]
"""Begin and end in microseconds, whether it is a kernel (not a copy or fill), and its name."""


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
    """Spans of a step's replay. Its graph is freed afterwards: two of a large model do not fit."""
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

    A library's are those of matrix products, convolutions and attention. Of each kind the 40 names that take most are
    kept.
    """
    us: tuple[dict[str, float], ...] = ({}, {})
    count: tuple[Counter[str], ...] = (Counter(), Counter())
    for begin, end, kernel in spans:
        kind = int(is_library(kernel))
        count[kind][kernel] += 1
        us[kind][kernel] = us[kind].get(kernel, 0.0) + end - begin
    found: dict[str, Any] = {}
    for kind, (what, names) in enumerate((("memory_intensive", "names"), ("library", "library_names"))):
        most = sorted(us[kind], key=us[kind].__getitem__, reverse=True)[:_NAMES]
        found |= {what: count[kind].total(), f"{what}_us": round(sum(us[kind].values()), 1)}
        found |= {names: {k: count[kind][k] for k in most}, f"{names}_us": {k: round(us[kind][k], 1) for k in most}}
    return found


def is_library(name: str) -> bool:
    """True if a kernel belongs to a library call (or is a copy), rather than to memory-intensive operators."""
    if name.startswith("triton_"):
        return bool(_TRITON.match(name))
    if name.startswith(PREFIX):
        return False
    return bool(_LIBRARY.search(name)) and not _NORM.search(name)


def record(work: Callable[[], object]) -> list[Span]:
    """Spans of the device during ``work``, in order."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
    with tempfile.TemporaryDirectory(prefix="autotune-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text()))


def read_trace(trace: Mapping[str, Any]) -> list[Span]:
    """Kernels, copies and fills of a Chrome trace, in order of their beginnings.

    Ranges that annotate the device's time line are no work and are left out.
    """
    spans = [
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]), e["cat"] == "kernel", str(e["name"]))
        for e in trace["traceEvents"]
        if e.get("ph") == "X" and e.get("cat") in _ACTIVITIES
    ]
    return sorted(spans)

"""Kernels of a step in the replay of its CUDA graph: counts and times, by name and by kind.

CUPTI, the source of ``torch.profiler``, records all kernels of the process. Kernels of matrix products, convolutions,
attention, recurrences or communication count as library kernels, by their names. All others belong to memory-intensive
operators.
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

from autotune.compiler.targets.cuda import PREFIX

_TRACES = 3
_BUSY_S = 0.5
"""Seconds of replays before a trace, after which the device's clock has settled to a sustained load."""
_NAMES = 40
_ACTIVITIES = ("kernel", "gpu_memcpy", "gpu_memset")
_TRITON = re.compile(r"triton_(tem|mm|bmm|convolution|flex|flash)")
"""Inductor's templates, regardless of fused operators. Names of its other kernels contain all operators that they fuse
or follow."""

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
"""Begin and end in microseconds, True for a kernel (not a copy or fill), and its name."""


def kernels_of(steps: Mapping[str, Call]) -> dict[str, dict[str, Any]]:
    """Return the kernels of a step in its CUDA graph's replay, by contender: :func:`summed`.

    Kernels run with the cache contents that the step leaves. A contender without profiler records is left out, for
    example on a host that denies access to the counters.
    """
    found = {}
    for name, step in steps.items():
        with contextlib.suppress(RuntimeError):  # from the profiler, or out of memory for another graph
            if spans := _traced(step):
                found[name] = summed([(begin, end, kernel) for begin, end, _, kernel in spans])
    return found


def _traced(step: Call) -> list[tuple[float, float, bool, str]] | None:
    """Return the spans of a step's replay. Its graph is freed afterwards, since two of a large model do not fit."""
    from autotune.measure.timer import capture, keep_running

    run = capture(step)

    def work() -> None:
        run()
        torch.cuda.synchronize()

    found = None
    for _ in range(_TRACES):  # a process's first trace may be empty
        # A device that was idle, as during the reading of a trace, is faster than within a training run.
        keep_running(run, _BUSY_S)
        found = [s for s in record(work) if s[2]] or found
    return found


def summed(spans: Sequence[tuple[float, float, str]]) -> dict[str, Any]:
    """Return counts and microseconds of kernels (begin, end, name), memory-intensive and library ones, both by name.

    Library kernels are those of :func:`is_library`. The 40 names with the longest times of each kind are kept.
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
    """Return the spans of the device during ``work``, in order."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
    with tempfile.TemporaryDirectory(prefix="autotune-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text()))


def read_trace(trace: Mapping[str, Any]) -> list[Span]:
    """Return kernels, copies and fills of a Chrome trace, by start time.

    Annotation ranges on the device's time line are left out.
    """
    spans = [
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]), e["cat"] == "kernel", str(e["name"]))
        for e in trace["traceEvents"]
        if e.get("ph") == "X" and e.get("cat") in _ACTIVITIES
    ]
    return sorted(spans)

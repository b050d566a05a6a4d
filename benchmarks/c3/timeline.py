"""Time lines of C3: each rank's record of one run of a strategy, with the engine that moved the data.

On CUDA devices the profiler sees every kernel and copy, those of a replayed graph too, and so proves which engine a
strategy used. On CPUs it is the computation and the collective.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from autotune.compiler.targets.cuda import PREFIX
from autotune.domains.c3.scenario import Scenario
from autotune.domains.c3.strategy import normalize
from autotune.task import Config

if TYPE_CHECKING:
    from autotune.domains.c3.group import Group
    from autotune.domains.c3.measuring.bench import RankBench, Run

MOST = 1000
"""Spans that are told of a run at most."""
_NAME = 60  # characters of a kernel's name


def record(group: Group, scenario: Mapping[str, Any], configs: Mapping[str, Config]) -> dict[str, Any]:
    """Run each strategy once and return this rank's record. A collective call, as of ``Ranks.call``.

    Args:
        scenario: as :meth:`Scenario.to_json` has it.
        configs: strategies by a name of the caller's.

    Returns:
        For each name ``spans``, in the order of time, each with ``row`` ("compute", "nccl", "copies", "kernels" for
        Numba's, or on a CPU the engine), ``name``, ``start_us`` (since the first one began) and ``us``; ``seen``, how
        many pieces of each kind ran; and ``us``, from the first one's begin to the last one's end.
    """
    from autotune.domains.c3.measuring.bench import open_bench

    bench = open_bench(Scenario.from_json(scenario), group)
    try:
        return {name: _one(bench, config) for name, config in configs.items()}
    finally:
        bench.close()


def _one(bench: RankBench, config: Config) -> dict[str, Any]:
    from autotune.domains.c3.task import build

    side = bench.device.type
    config = normalize(config, bench.scenario, side)
    run = bench.load(config, build(bench.scenario, config, str(bench.device)))
    try:
        spans, seen = _host(bench, run, config) if side == "cpu" else _profiled(bench.group, run)
    finally:
        run.close()
    begin = min((span["start_us"] for span in spans), default=0.0)
    for span in spans:
        span["start_us"] = round(span["start_us"] - begin, 2)
        span["us"] = round(span["us"], 2)
    spans.sort(key=lambda span: float(span["start_us"]))
    end = max((span["start_us"] + span["us"] for span in spans), default=0.0)
    return {"spans": spans[:MOST], "seen": dict(sorted(seen.items())), "us": round(end, 2)}


def _profiled(group: Group, run: Run) -> tuple[list[dict[str, Any]], Counter[str]]:
    run.prepare()
    group.keep("profiler", lambda: _trace(group, run))  # the profiler's first trace may lack its beginning
    spans: list[dict[str, Any]] = []
    seen: Counter[str] = Counter()
    for event in _trace(group, run):
        row, kind = classify(str(event["cat"]), str(event["name"]))
        seen[kind] += 1
        spans.append({"row": row, "name": str(event["name"])[:_NAME], "start_us": float(event["ts"]),
                      "us": float(event["dur"])})  # fmt: skip
    return spans, seen


def _trace(group: Group, run: Run) -> list[dict[str, Any]]:
    """The device's events of one run, as the profiler writes them down."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as taken:
        group.barrier()
        run()
        torch.cuda.synchronize()
    return events_of(taken)


def events_of(taken: Any) -> list[dict[str, Any]]:
    """The device's events of a profile, as the profiler writes them down."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        taken.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return [e for e in events if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def shares(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds from the first event to the last one, by activity of the device.

    Returns:
        ``span``; ``compute``, with a kernel of the program; ``exposed``, with a collective's kernel or a copy between
        devices alone; ``idle``, with nothing; and the sums of durations by row (see :func:`classify`), as ``row nccl``.
    """
    spans: list[tuple[float, float, str]] = []
    for event in events:
        row, kind = classify(str(event["cat"]), str(event["name"]))
        row = "compute" if kind == "copies" else row  # within a device
        spans.append((float(event["ts"]), float(event["ts"]) + float(event["dur"]), row))
    begin, end = min(s[0] for s in spans), max(s[1] for s in spans)
    compute = _covered([(a, b) for a, b, row in spans if row == "compute"])
    busy = _covered([(a, b) for a, b, _ in spans])
    found = {"span": end - begin, "compute": compute, "exposed": busy - compute, "idle": end - begin - busy}
    for row in dict.fromkeys(row for _, _, row in spans):
        found[f"row {row}"] = sum(b - a for a, b, other in spans if other == row)
    return {name: round(us / 1e3, 3) for name, us in found.items()}


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def classify(category: str, name: str) -> tuple[str, str]:
    """The row of an event, and its kind of work.

    Args:
        category: "kernel", "gpu_memcpy" or "gpu_memset".
    """
    if category == "gpu_memcpy":
        return "copies", "peer_copies" if "PtoP" in name else "copies"
    if category == "gpu_memset":
        return "compute", "memsets"
    if "nccl" in name.lower():
        return "nccl", "nccl_kernels"
    if name.startswith(PREFIX):
        return "kernels", "numba_kernels"
    return "compute", "compute_kernels"


def _host(bench: RankBench, run: Run, config: Config) -> tuple[list[dict[str, Any]], Counter[str]]:
    from autotune.domains.c3.overlap import open_overlap

    assert run.computation is not None
    assert run.collective is not None
    spans: list[dict[str, Any]] = []  # of two threads; appending is atomic

    def timed(row: str, name: str, work: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            begin = time.perf_counter()
            work()
            end = time.perf_counter()
            spans.append({"row": row, "name": name, "start_us": 1e6 * begin, "us": 1e6 * (end - begin)})

        return call

    engine = run.collective.engine
    compute: Any = SimpleNamespace(run=timed("compute", "the computation", run.computation.run))
    moved: Any = SimpleNamespace(enqueue=timed(engine, bench.spec.op, run.collective.enqueue))
    overlap = open_overlap(compute, moved, config, bench.device)
    try:
        overlap.prepare()
        spans.clear()
        bench.group.barrier()
        overlap()
    finally:
        overlap.close()
    return spans, Counter(str(span["row"]) for span in spans)

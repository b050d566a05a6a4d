"""Calibration: figures of a device for the cost models, measured with generated kernels in the measuring worker.

Each probe is a small graph and a plan for it. Figures are differences of probes. A chain of launches minus one launch
gives the cost of a launch; a large copy gives the bandwidth. A value that passes through a few MiB of scratch
gives the cache's bandwidth; a chain of operators bound by arithmetic gives their rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.compiler.planner.plan import make_plan
from autotune.domains.fusion.task import FusionTask
from autotune.errors import BuildError, Unsupported
from autotune.ir.canonical import canonicalize, to_workload
from autotune.ir.graph import Graph, Output, Value
from autotune.ir.nodes import POINTWISE
from autotune.ir.simplify import simplify
from autotune.task import Config

if TYPE_CHECKING:
    from autotune.measure.worker import Measurer

MIB = 1 << 20
_CHAIN = 8
_LIGHT, _HEAVY = 40, 6
_TRIES = 4
"""Maximum number of schedules per probe: the default and suggested ones; the fastest counts."""


@dataclass(frozen=True)
class Probe:
    """A graph to time.

    Attributes:
        graph: graph of the region; ``plan`` is the text of its plan in the canonical graph, "" for the greedy plan.
        work: bytes or operations from which figures are computed.
    """

    name: str
    graph: Graph
    work: float
    plan: str = ""


def probes(side: str) -> list[Probe]:
    """All probes for a device of type ``side``, small ones first."""
    scale = 1 if side == "cuda" else 8
    found = [
        Probe("one launch", _separate(1), 0.0),
        Probe("launches", _separate(_CHAIN), 0.0, " / ".join(f"o{k}" for k in range(_CHAIN))),
    ]
    for mib in (32, 128, 512):
        found.append(Probe(f"copy {mib} MiB", _copy(mib * MIB // 8 // scale), float(mib * MIB // scale)))
    cached = 2 * MIB if side == "cuda" else MIB // 4
    found.append(Probe("through the cache", _twice(cached), 8.0 * cached, "v1 / o0"))
    found.append(Probe("from memory", _copy(cached), 8.0 * cached))
    n = 4 * MIB // scale
    found.append(Probe("light operators", _chain(n, ["mul", "add"], _LIGHT), float(n * _cost(["mul", "add"], _LIGHT))))
    heavy = ["erf", "exp", "neg", "tanh"]
    found.append(Probe("special functions", _chain(n, heavy, _HEAVY), float(n * _cost(heavy, _HEAVY))))
    return found


def calibrate(
    device: str,
    measurer: Callable[[FusionTask], Measurer],
    progress: Callable[[str, float | None], None] | None = None,
) -> dict[str, float]:
    """Measure a device; takes well under a minute.

    Args:
        device: "cpu" or "cuda:N".
        measurer: returns the measuring worker, opened on a task's workload.
        progress: called with each probe's name and microseconds, None if it could not run.

    Returns:
        Figures by field of :class:`autotune.compiler.planner.cost.Figures`, without those whose probes failed.
    """
    times: dict[str, float] = {}
    side = "cuda" if device.startswith("cuda") else "cpu"
    made = probes(side)
    for probe in made:
        us = _time(probe, device, measurer)
        if us is not None:
            times[probe.name] = us
        if progress is not None:
            progress(probe.name, us)
    return figures(made, times)


def figures(made: Sequence[Probe], times: Mapping[str, float]) -> dict[str, float]:
    """Compute figures from the probes' microseconds."""
    out: dict[str, float] = {}
    by_name = {p.name: p for p in made}
    first = times.get("one launch")
    if first is None:
        return out
    out["first_us"] = first
    if "launches" in times:
        out["next_us"] = max((times["launches"] - first) / (_CHAIN - 1), 0.05)
    copies = [by_name[n].work / (us - first) / 1e3 for n, us in times.items() if n.startswith("copy") and us > first]
    if copies:
        out["copy_gbs"] = max(copies)
    if {"through the cache", "from memory"} <= times.keys() and "next_us" in out:
        # The first kernel reads memory; the second reads the first kernel's result from the cache.
        second = times["through the cache"] - times["from memory"] - out["next_us"]
        if second > 0:
            out["l2_gbs"] = max(by_name["through the cache"].work / second / 1e3, out.get("copy_gbs", 0.0))
    for name, figure in (("light operators", "ops_gs"), ("special functions", "heavy_gs")):
        if name in times and times[name] > first:
            out[figure] = by_name[name].work / (times[name] - first) / 1e3
    return out


def _time(probe: Probe, device: str, measurer: Callable[[FusionTask], Measurer]) -> float | None:
    """Microseconds of the fastest schedule; None if no schedule works."""
    graph, _, outputs = canonicalize(simplify(probe.graph))
    task = FusionTask(to_workload(graph, f"probe: {probe.name}"), device)
    try:
        text = _renamed(probe.plan, outputs)
        plan = make_plan(graph, task.side, text)
    except Unsupported:
        return None
    worker = measurer(task)
    best: float | None = None
    for config in _configs(task, plan.text):
        try:
            artifact = task.build(config)
        except BuildError:
            continue
        outcome = worker.measure(config, artifact, stage="screen", seed=0)
        if outcome.ok and outcome.latency_us is not None:
            best = outcome.latency_us if best is None else min(best, outcome.latency_us)
    return best


def _configs(task: FusionTask, text: str) -> list[Config]:
    plan = make_plan(task.graph, task.side, text)
    if text != task.plan.text:
        default = task.joined(plan, [on.default(g.graph) for on, g in task.sides(plan)])
        return [default]
    chosen = [task.normalize(config) for config in [task.default(), *task.seeds()][:_TRIES]]
    return [c for c in chosen if task.reject(c) is None]


def _renamed(text: str, outputs: Sequence[int]) -> str:
    """A plan's text with the outputs renumbered as in the canonical form."""
    where = {old: new for new, old in enumerate(outputs)}
    words = [f"o{where[int(w[1:])]}" if w[:1] == "o" else w for w in text.split()]
    return " ".join(words)


# ---- graphs


def _load(n_axes: int, strides: Sequence[int], slot: int = 0) -> Value:
    return Value("load", axes=tuple(range(n_axes)), slot=slot, strides=tuple(strides))


def _copy(n: int) -> Graph:
    one = Value("const", number=1.0)
    add = Value("add", (0, 1), (0,))
    return Graph((n,), (_load(1, (1,)), one, add), ("float32",), (Output(2, (0,), (1,), "float32"),))


def _twice(n: int) -> Graph:
    """exp(x) + 1; a plan may store the exponential between two kernels."""
    values = (_load(1, (1,)), Value("exp", (0,), (0,)), Value("const", number=1.0), Value("add", (1, 2), (0,)))
    return Graph((n,), values, ("float32",), (Output(3, (0,), (1,), "float32"),))


def _separate(count: int) -> Graph:
    """Independent additions on a few elements each, of different lengths."""
    values: list[Value] = []
    outputs = []
    for k in range(count):
        at = len(values)
        values += [
            Value("load", axes=(k,), slot=k, strides=(1,)),
            Value("const", number=1.0 + k),
            Value("add", (at, at + 1), (k,)),
        ]
        outputs.append(Output(at + 2, (k,), (1,), "float32"))
    return Graph(tuple(1024 + 32 * k for k in range(count)), tuple(values), ("float32",) * count, tuple(outputs))


def _chain(n: int, ops: Sequence[str], times: int) -> Graph:
    """A sequence of operators, repeated ``times`` times; a constant operand of binary ones prevents simplification."""
    values: list[Value] = [_load(1, (1,)), Value("const", number=0.999)]
    last = 0
    for _ in range(times):
        for op in ops:
            args = (last, 1) if POINTWISE[op].arity == 2 else (last,)
            values.append(Value(op, args, (0,)))
            last = len(values) - 1
    return Graph((n,), tuple(values), ("float32",), (Output(last, (0,), (1,), "float32"),))


def _cost(ops: Sequence[str], times: int) -> int:
    return times * sum(POINTWISE[op].cost for op in ops)

"""A region put together of its groups: each group is a workload of its own, tuned once wherever it occurs.

A group's graph is canonical, so equal groups of different plans, regions, models and runs have one fingerprint. A
composition is a plan; combining the groups' best schedules gives a configuration of the region.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from autotune.compiler.assemble import graph_ops
from autotune.compiler.lower.op_names import form
from autotune.compiler.planner.cost import Costs, Figures, GroupCost, plan_us
from autotune.compiler.planner.groups import Group, Plan, group_configs
from autotune.compiler.planner.latency import predict_cpu, predict_cuda
from autotune.compiler.planner.methods import Method
from autotune.compiler.planner.plan import make_plan
from autotune.errors import Unsupported
from autotune.ir.forms.canonical import to_workload
from autotune.ir.graph import Graph
from autotune.task import Composition, Config, Ranked
from autotune.workload import Workload

_TRIES = 48  # ways to combine the groups' candidates that are looked at


class Region(Protocol):
    """What is asked of a task here; see :class:`autotune.domains.fusion.task.FusionTask`."""

    workload: Workload
    graph: Graph
    plan: Plan
    method: Method

    @property
    def side(self) -> str: ...

    @property
    def estimates(self) -> Figures: ...

    def target(self) -> tuple[str, int]: ...

    def default(self) -> Config: ...

    def predict(self, config: Config) -> float | None: ...

    def joined(self, plan: Plan, parts: Sequence[Config]) -> Config: ...

    def reject(self, config: Config) -> str | None: ...


def compositions(task: Region, limit: int) -> list[Composition]:
    """Plans of the task's region under its method, the most promising first.

    Empty where the only plan is one group: the region itself.
    """
    from autotune.compiler.planner.beam import shapes

    figures = task.estimates
    out = []
    for shape in shapes(task.graph, task.side, task.method, figures, limit):
        try:
            plan = make_plan(task.graph, task.side, shape)
        except Unsupported:
            continue
        if all(_alone(g, task.side) for g in plan.groups):
            made = composition(task, plan, figures)
            if not task.method.model:  # then it may not keep a plan from being measured, nor share out the time
                made = replace(made, weights=(1.0,) * len(made.parts), expected_us=0.0)
            out.append(made)
    if len(out) == 1 and len(out[0].parts) == 1 and out[0].parts[0] == task.workload:
        return []
    return out


def composition(task: Region, plan: Plan, figures: Figures) -> Composition:
    """One plan as a composition of its groups' workloads; groups of one family are tuned as their leader is."""
    leaders = sorted(set(plan.leaders))
    if len(leaders) == 1 and plan.text == task.plan.text:
        # One body for all groups: the region has the parameters of one group, and knows better than a group alone what
        # suits all of them together.
        expected = task.predict(task.default()) or plan_us(
            [group_cost(g, figures).us(figures) for g in plan.groups], 1, figures
        )
        return Composition(plan.text, (task.workload,), (expected,), expected, lambda choices: list(choices[0]))
    workloads = {k: group_workload(plan.groups[k].graph) for k in leaders}
    parts = list(dict.fromkeys(workloads.values()))
    which = tuple(parts.index(workloads[k]) for k in plan.leaders)
    costs = tuple(group_cost(g, figures) for g in plan.groups)
    own = [c.us(figures) for c in costs]
    scale = tuple(us / max(own[k], 1e-3) for us, k in zip(own, plan.leaders, strict=True))
    weights = [figures.next_us + sum(us for us, p in zip(own, which, strict=True) if p == n) for n in range(len(parts))]
    made = Combined(task, plan, figures, which, scale, costs)
    expected = made.whole_us([us + figures.first_us for us in own])
    return Composition(plan.text, tuple(parts), tuple(weights), expected, made)


@dataclass(frozen=True)
class Combined:
    """``Composition.combine`` of one plan.

    Attributes:
        which: each group's part.
        scale: each group's time over that of its part.
    """

    task: Region
    plan: Plan
    figures: Figures
    which: tuple[int, ...]
    scale: tuple[float, ...]
    costs: tuple[GroupCost, ...]

    def __call__(self, choices: Sequence[Sequence[Ranked]]) -> list[Ranked]:
        found: list[Ranked] = []
        # In the order of how far down the rankings they reach: the best of each part comes first.
        depth = [range(min(len(c), 8)) for c in choices]
        ways = sorted(itertools.islice(itertools.product(*depth), 4096), key=sum)[:_TRIES]
        for way in ways:
            picked = [choices[p][n] for p, n in enumerate(way)]
            config = self.task.joined(self.plan, [picked[p][0] for p in self.which])
            if self.task.reject(config) is not None:
                continue
            times = [picked[p][1] * scale for p, scale in zip(self.which, self.scale, strict=True)]
            found.append((config, self.whole_us(times)))
            if len(found) == 3:
                break
        return sorted(found, key=lambda r: r[1])

    def whole_us(self, times: Sequence[float]) -> float:
        """See :func:`whole_us`."""
        return whole_us(self.plan, self.costs, times, self.figures)


def whole_us(plan: Plan, costs: Sequence[GroupCost], times: Sequence[float], f: Figures) -> float:
    """What a plan should take where its groups, each timed alone with cold caches, take ``times`` (microseconds).

    A launch by itself costs more than one among others, and scratch that fits the cache is not read from memory.
    """
    if len(times) == 1:
        return times[0]
    inner = []
    for us, cost in zip(times, costs, strict=True):
        cached = cost.scratch if cost.scratch < f.l2_mib * 2**20 / 2 else 0.0
        saved = cached / 1e3 * (1 / f.copy_gbs - 1 / f.l2_gbs)
        inner.append(max(us - f.first_us - max(saved, 0.0), 0.1 * us))
    return plan_us(inner, len(plan.launches), f)


def plan_prediction(task: Region, plan: Plan, config: Config) -> float | None:
    """The latency-evaluator's microseconds of a plan under a configuration; None where a group has no model."""
    figures = task.estimates
    times: list[float] = []
    for group, part in zip(plan.groups, group_configs(plan, config), strict=True):
        if task.side == "cpu":
            us = predict_cpu(group.graph, part, figures)
        else:
            us = predict_cuda(group.graph, part, figures, task.target()[0])
        if us is None:
            return None
        times.append(us)
    if len(times) == 1:
        return times[0]
    return whole_us(plan, [group_cost(g, figures) for g in plan.groups], times, figures)


def group_cost(group: Group, figures: Figures) -> GroupCost:
    """The cost of a group of a plan, from its own graph."""
    graph = group.graph
    costs = Costs(graph, figures)
    cost = costs.group(graph.live, (), (), range(len(graph.outputs)))
    scratch = sum(costs._loads[i] for i, v in enumerate(graph.values)
                  if v.op == "load" and group.inputs[v.slot][0] != "input")  # fmt: skip
    scratch += sum(costs.written(k) for k, (kind, _) in enumerate(group.outputs) if kind == "scratch")
    return replace(cost, scratch=scratch)


def group_workload(graph: Graph) -> Workload:
    """The workload of a group's (canonical) graph, under a label of its telling operators."""
    names = graph_ops(graph)
    return to_workload(graph, f"part {'+'.join(names[:3])}{'+...' if len(names) > 3 else ''} {form(graph)}")


def _alone(group: Group, side: str) -> bool:
    """Whether a group's own graph plans to that one group again, so that it can be tuned by itself."""
    try:
        return len(make_plan(group.graph, side).groups) == 1
    except Unsupported:
        return False


__all__ = ["composition", "compositions", "group_cost", "group_workload"]

"""The search task of fusion: spaces, defaults and compilation of a region, and its composition from groups.

Each group is a workload, tuned once wherever it occurs. A group's graph is canonical, so equal groups of different
plans, regions, models and runs have the same fingerprint. A composition is a plan; the best schedules of its groups
combine to a configuration of the region.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from autotune.compiler.assemble import graph_ops
from autotune.compiler.lower.op_names import form
from autotune.compiler.planner.beam import MEASURED, check_plans, shapes
from autotune.compiler.planner.cost import Costs, Figures, GroupCost, plan_us
from autotune.compiler.planner.groups import Group, Plan, Shape, agree, group_configs
from autotune.compiler.planner.latency import predict_cuda
from autotune.compiler.planner.plan import default_plan, make_plan, small_apart
from autotune.compiler.schedules import cpu as target_cpu
from autotune.compiler.schedules.configurations import Choices, improper, join_configs, join_spaces
from autotune.compiler.schedules.cuda import scheme_of
from autotune.device import describe_cuda, usable_processors
from autotune.errors import BuildError, Unsupported
from autotune.ir.canonical import to_workload, without_constants
from autotune.ir.graph import REDUCTIONS, Graph, shared
from autotune.space import Parameter, Space, load_space
from autotune.task import Artifact, Composition, Config, Kernel, Ranked, Task, config_key
from autotune.workload import Workload

T = TypeVar("T")

_TRIES = 48  # combinations of the groups' candidates to consider


_INDUCTOR = ((1.13, 1.0), (1.7, 1.09), (2.12, 1.69), (2.6, 1.5))
"""Inductor's time relative to a copy of the region's bytes, and relative to the winner's time, by the number of sets
of reduced axes: medians of 427 regions of models on an H200 (the packaged schedules). The last has 9 regions."""


class FusionTask(Task):
    """Search task of a region on one device; see ``autotune.task.Task``.

    Args:
        target: architecture such as "sm_90"; None queries the device, without creating a CUDA context.
        sms: number of streaming multiprocessors, for persistent grids; None queries the device.

    Raises:
        Unsupported: the region has no kernels in this version.
        ValueError: the workload's graph is damaged.
    """

    def __init__(self, workload: Workload, device: str, target: str | None = None, sms: int | None = None) -> None:
        self.workload, self.device = workload, device
        self.graph = shared(Graph.from_json(workload.spec))
        self._target, self._sms = target, sms
        self.plans = MEASURED
        self.figures: Mapping[str, float] = {}
        make_plan(self.graph, self.side)  # raises Unsupported, if there is none
        self._rejected: dict[str, str | None] = {}
        self._costs: dict[str, tuple[GroupCost, ...]] = {}

    @cached_property
    def plan(self) -> Plan:
        """The plan of the default configuration, which a build of another configuration does not need."""
        return default_plan(self.graph, self.side)

    def under(self, method: str, figures: Mapping[str, float]) -> FusionTask:
        """Return a copy of this task with a choice of :data:`autotune.compiler.planner.beam.PLANS`."""
        check_plans(method or MEASURED)
        made = copy.copy(self)
        for name in ("estimates", "_seeds"):
            made.__dict__.pop(name, None)
        made.plans, made.figures, made._costs = method or MEASURED, dict(figures), {}
        return made

    def compositions(self, limit: int) -> Sequence[Composition]:
        """Plans as compositions of their groups' workloads, most promising first.

        Empty if the only plan is a single group, which is the region itself.
        """
        figures = self.estimates
        out = []
        for shape in shapes(self.graph, self.side, self.plans, figures, limit):
            if plan := self._composable(shape):
                out.append(composition(self, plan, figures))
        if len(out) == 1 and len(out[0].parts) == 1 and out[0].parts[0] == self.workload:
            return []
        return out

    def _composable(self, shape: Shape) -> Plan | None:
        """The plan of a shape whose groups can be tuned separately; None if there is none.

        On a GPU small outputs are apart if more groups then have the scheme columns, which divides few sums among all
        multiprocessors.
        """
        plans = []
        for own in dict.fromkeys((shape, small_apart(self.graph, shape))):
            with contextlib.suppress(Unsupported):
                plan = make_plan(self.graph, self.side, own)
                if all(_alone(g, self.side) for g in plan.groups):
                    plans.append(plan)
        if self.side == "cpu":
            return plans[0] if plans else None
        return max(plans, key=lambda p: [scheme_of(g.graph).name for g in p.groups].count("columns"), default=None)

    def predict(self, config: Config) -> float | None:
        """Microseconds by the latency-evaluator; None on a CPU, or if a group's scheme has no model."""
        if self.side == "cpu":
            return None
        figures = self.estimates
        try:
            plan = self.plan_of(config)
            target = self.target()[0]
            parts = group_configs(plan, config)
            times = each(plan, parts, lambda g, part: predict_cuda(g.graph, part, figures, target))
        except (Unsupported, KeyError):
            return None
        known = [us for us in times if us is not None]
        return whole_us(plan, self.costs(plan), known, figures) if len(known) == len(times) else None

    def least_us(self) -> float | None:
        """Time to move the region's bytes, from the device's calibration; None without a calibration.

        Also None if elements are gathered, since repeated reads of the same elements hit in a cache.
        """
        figures = self.estimates
        if not figures.calibrated or any(v.op == "gather" for v in self.graph.values):
            return None
        return figures.copy_us(self.graph.bytes_moved)

    def expected_gain(self, expected_us: float) -> float | None:
        """See ``autotune.task.Task``.

        Inductor's code moves the region's bytes, more than once if it reduces over several sets of axes. On regions
        with reductions it is rarely faster than the candidate.
        """
        if self.side == "cpu":
            return None
        overs = len({v.over for v in self.graph.values if v.op in REDUCTIONS})
        copies, usual = _INDUCTOR[min(overs, len(_INDUCTOR) - 1)]
        figures = self.estimates
        return max(copies * figures.copy_us(self.graph.bytes_moved) / expected_us, usual)

    @cached_property
    def estimates(self) -> Figures:
        """The device's figures for the cost models."""
        if self.side == "cpu":
            return Figures.of("cpu", self.figures, units=usable_processors())
        arch, sms = self.target()
        return Figures.of("cuda", self.figures, arch, sms)

    def costs(self, plan: Plan) -> tuple[GroupCost, ...]:
        """The cost of each group of a plan of the region."""
        if plan.text not in self._costs:
            self._costs[plan.text] = tuple(group_cost(g, self.estimates) for g in plan.groups)
        return self._costs[plan.text]

    @property
    def side(self) -> str:
        """ "cuda" or "cpu"."""
        return "cuda" if self.device.startswith("cuda") else "cpu"

    def target(self) -> tuple[str, int]:
        """(architecture, streaming multiprocessors) of the device."""
        if self._target is None or self._sms is None:
            arch, sms = describe_cuda(self.device)
            self._target = self._target or arch
            self._sms = self._sms or sms
        return self._target, self._sms

    def plan_of(self, config: Config) -> Plan:
        """The plan named by a configuration; the greedy plan if it names none."""
        return make_plan(self.graph, self.side, str(config.get("plan", "")))

    def space(self, file: str | None = None) -> Space:
        return self._space(self.plan, file)

    def space_for(self, config: Config, file: str | None = None) -> Space:
        """The space of the plan that a configuration names."""
        return self._space(self.plan_of(config), file)

    def _space(self, plan: Plan, file: str | None) -> Space:
        base = load_space("fusion", self.side, file)
        space = join_spaces([on.space_of(g.graph, base) for on, g in self.sides(plan)], plan.leaders)
        fixed = tuple(Parameter(name, (text,), "how the region is cut") for name, text in self._named(plan).items())
        return replace(space, parameters=(*space.parameters, *fixed))

    def _named(self, plan: Plan) -> Config:
        """The entry that names a plan in a configuration; empty for the greedy plan, which deployment recomputes."""
        return {} if plan.text == make_plan(self.graph, self.side).text else {"plan": plan.text}

    def joined(self, plan: Plan, parts: Sequence[Config]) -> Config:
        """The region's normalised configuration under ``plan``.

        Args:
            parts: the configurations of its groups, which may name plans of their own.
        """
        return self.normalize(self._planned(plan, [{k: v for k, v in c.items() if k != "plan"} for c in parts]))

    def default(self) -> Config:
        return self._planned(self.plan, [on.default(g.graph) for on, g in self.sides(self.plan)])

    def seeds(self) -> Sequence[Config]:
        return self._seeds

    @cached_property
    def _seeds(self) -> Sequence[Config]:
        sides = self.sides(self.plan)
        found = [on.seeds(g.graph) for on, g in sides]
        base = [on.default(g.graph) for on, g in sides]
        rows = itertools.zip_longest(*found)
        return [self._planned(self.plan, [c or b for c, b in zip(row, base, strict=True)]) for row in rows]

    def _planned(self, plan: Plan, parts: Sequence[Config]) -> Config:
        return self._joined(plan, parts) | self._named(plan)

    def normalize(self, config: Config) -> Config:
        """Replace parameters without effect, so that equivalent configurations are equal."""
        plan = self.plan_of(config)
        made = self._joined(plan, self._normalized(plan, group_configs(plan, config)))
        return made | {"plan": config["plan"]} if "plan" in config else made

    def sides(self, plan: Plan) -> list[tuple[Choices, Group]]:
        """Each group with the module or scheme that makes its schedules on this target."""
        return [(self._choices(g), g) for g in plan.groups]

    def _choices(self, group: Group) -> Choices:
        return scheme_of(group.graph) if self.side == "cuda" else target_cpu

    def _normalized(self, plan: Plan, parts: Sequence[Config]) -> list[Config]:
        return each(plan, parts, lambda g, part: self._choices(g).normalize(g.graph, part))

    def _joined(self, plan: Plan, parts: Sequence[Config]) -> Config:
        """The region's configuration: one entry per family of groups, with equal block sizes within each launch."""
        if self.side == "cuda" and any(len(launch) > 1 for launch in plan.launches):
            # A different block size may make other parameters ineffective.
            parts = agree(plan, self._normalized(plan, agree(plan, parts)))
        return join_configs(parts, plan.leaders)

    def reject(self, config: Config) -> str | None:
        """See ``autotune.task.Task``. The kernel's text is built for it, so that the reason is remembered."""
        key = config_key(config)
        if key not in self._rejected:
            self._rejected[key] = self._why_not(config)
        return self._rejected[key]

    def _why_not(self, config: Config) -> str | None:
        try:
            plan = self.plan_of(config)
        except Unsupported as error:
            return str(error)
        for (on, group), part in zip(self.sides(plan), group_configs(plan, config), strict=True):
            why = on.reject(group.graph, part)
            if why:
                return why
        return None

    def adapt(self, config: Config) -> Config | None:
        try:
            space = self.space_for(config)
        except Unsupported:
            return None
        if self.side == "cpu":
            config = target_cpu.completed(config, [p.name for p in space])
        fitted = space.project(config)
        return None if fitted is None else self.normalize(fitted)

    def take(self, config: Config, of: Workload) -> Config | None:
        """See ``autotune.task.Task``. Groups are numbered by the graph, whose constants change the numbers."""
        graph = shared(Graph.from_json(of.spec))
        try:
            plan = make_plan(graph, self.side, str(config.get("plan", "")))
            default = plan == default_plan(graph, self.side)
            own = self.plan if default else self.plan_of(config)
        except Unsupported:
            return None
        names = [without_constants(g.graph) for g in plan.groups]
        mine = [without_constants(g.graph) for g in own.groups]
        # The text of another named plan has numbers of values, too.
        if sorted(names) != sorted(mine) or (not default and "plan" in config and names != mine):
            return None
        parts = group_configs(plan, config)
        order = {name: [k for k, other in enumerate(names) if other == name] for name in names}
        try:
            return self.adapt(self.joined(own, [parts[order[name].pop(0)] for name in mine]))
        except (Unsupported, KeyError):
            return None

    def build(self, config: Config) -> Artifact:
        if why := improper(config, self.side):  # a configuration from a database is not trusted
            raise BuildError(why)
        plan = self.plan_of(config)
        parts = group_configs(plan, config)
        if self.side == "cpu":
            kernels = tuple(Kernel(entry=f"cpu_{k}") for k in range(len(parts)))
            self._compile_cpu(plan, parts)
            return Artifact("cpu", kernels, plan.scratch_numel(self.graph), "cpu-1")
        from autotune.compiler.assemble import bind, build_artifact

        target, sms = self.target()
        try:
            made = build_artifact(self.graph, plan, parts, target, sms, self.workload.source)
            return bind(made, self.graph, config)
        except (Unsupported, KeyError) as error:
            raise BuildError(str(error)) from error

    def _compile_cpu(self, plan: Plan, parts: Sequence[Config]) -> None:
        """Compile into the on-disk cache in the compile pool's process, so that the worker only loads the code."""
        from autotune.runtime.launch.cpu import make_launches

        make_launches(plan, join_configs(parts))


def composition(task: FusionTask, plan: Plan, figures: Figures) -> Composition:
    """Make a composition of a plan's group workloads; groups of a family share the schedule of their leader."""
    leaders = sorted(set(plan.leaders))
    if len(leaders) == 1 and plan.text == task.plan.text:
        # All groups have the same kernel body. The region then has the parameters of one group, and its measurements
        # include all groups, which those of a single group do not.
        expected = task.predict(task.default()) or plan_us([cost.us(figures) for cost in task.costs(plan)], 1, figures)
        return Composition(plan.text, (task.workload,), (expected,), expected, lambda choices: list(choices[0]))
    workloads = {k: group_workload(plan.groups[k].graph) for k in leaders}
    parts = list(dict.fromkeys(workloads.values()))
    which = tuple(parts.index(workloads[k]) for k in plan.leaders)
    costs = task.costs(plan)
    own = [c.us(figures) for c in costs]
    scale = tuple(us / max(own[k], 1e-3) for us, k in zip(own, plan.leaders, strict=True))
    weights = [figures.next_us + sum(us for us, p in zip(own, which, strict=True) if p == n) for n in range(len(parts))]
    made = Combined(task, plan, figures, which, scale, costs)
    expected = whole_us(plan, costs, [us + figures.first_us for us in own], figures)
    return Composition(plan.text, tuple(parts), tuple(weights), expected, made)


@dataclass(frozen=True)
class Combined:
    """``Composition.combine`` of one plan.

    Attributes:
        which: index of each group's part.
        scale: time of each group relative to its part.
    """

    task: FusionTask
    plan: Plan
    figures: Figures
    which: tuple[int, ...]
    scale: tuple[float, ...]
    costs: tuple[GroupCost, ...]

    def __call__(self, choices: Sequence[Sequence[Ranked]]) -> list[Ranked]:
        found: list[Ranked] = []
        # By the sum of ranks: the combination of the best of each part comes first.
        depth = [range(min(len(c), 8)) for c in choices]
        ways = sorted(itertools.islice(itertools.product(*depth), 4096), key=sum)[:_TRIES]
        for way in ways:
            picked = [choices[p][n] for p, n in enumerate(way)]
            config = self.task.joined(self.plan, [picked[p][0] for p in self.which])
            if self.task.reject(config) is not None:
                continue
            times = [picked[p][1] * scale for p, scale in zip(self.which, self.scale, strict=True)]
            found.append((config, whole_us(self.plan, self.costs, times, self.figures)))
            if len(found) == 3:
                break
        return sorted(found, key=lambda r: r[1])


def whole_us(plan: Plan, costs: Sequence[GroupCost], times: Sequence[float], f: Figures) -> float:
    """Estimate a plan's microseconds from ``times``, those of its groups, each timed alone with cold caches.

    A single launch costs more than one in a sequence, and scratch that fits in the cache is not read from memory.
    """
    if len(times) == 1:
        return times[0]
    inner = []
    for us, cost in zip(times, costs, strict=True):
        cached = cost.scratch if cost.scratch < f.l2_mib * 2**20 / 2 else 0.0
        saved = cached / 1e3 * (1 / f.copy_gbs - 1 / f.l2_gbs)
        inner.append(max(us - f.first_us - max(saved, 0.0), 0.1 * us))
    return plan_us(inner, len(plan.launches), f)


def each(plan: Plan, parts: Sequence[Config], compute: Callable[[Group, Config], T]) -> list[T]:
    """``compute`` of each group and its configuration, once for groups of one graph and one configuration object."""
    made: dict[tuple[int, int], T] = {}
    for group, part in zip(plan.groups, parts, strict=True):
        key = id(group.graph), id(part)
        if key not in made:
            made[key] = compute(group, part)
    return [made[id(group.graph), id(part)] for group, part in zip(plan.groups, parts, strict=True)]


def group_cost(group: Group, figures: Figures) -> GroupCost:
    """The cost of a plan's group, from the group's graph."""
    graph = group.graph
    costs = Costs(graph, figures)
    cost = costs.group(graph.live, (), (), range(len(graph.outputs)))
    scratch = sum(costs.loaded[i] for i, v in enumerate(graph.values)
                  if v.op == "load" and group.inputs[v.slot][0] != "input")  # fmt: skip
    scratch += sum(costs.written(k) for k, (kind, _) in enumerate(group.outputs) if kind == "scratch")
    return replace(cost, scratch=scratch)


def group_workload(graph: Graph) -> Workload:
    """The workload of a group's (canonical) graph, labelled with its main operators."""
    names = graph_ops(graph)
    return to_workload(graph, f"part {'+'.join(names[:3])}{'+...' if len(names) > 3 else ''} {form(graph)}")


def _alone(group: Group, side: str) -> bool:
    """True if the group's graph plans to a single group, so that the group can be tuned separately."""
    try:
        return len(default_plan(group.graph, side).groups) == 1
    except Unsupported:
        return False

"""The fusion domain: a region of memory-intensive operators as something to be searched.

:class:`FusionTask` is the search's side (spaces, defaults, compiling), :class:`FusionBench` the measuring worker's: it
owns the inputs, verifies candidates against the oracle and rebuilds the baselines from the program the user had.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from autotune.compiler.planner import ablation
from autotune.compiler.planner.ablation import FULL, METHODS, Method
from autotune.compiler.planner.cost import Figures
from autotune.compiler.planner.plan import Group, Plan, make_plan, read_text, write_text
from autotune.compiler.schedules import cpu as target_cpu
from autotune.compiler.schedules.configurations import agree, group_configs, join_configs, join_spaces
from autotune.compiler.schedules.cuda import Scheme, scheme_of
from autotune.compiler.schedules.limits import improper
from autotune.device import describe_cuda, usable_processors
from autotune.domains.fusion.compositions import compositions, plan_prediction
from autotune.errors import BuildError, Unsupported
from autotune.ir.graph import FLOATS, REDUCTIONS, Graph
from autotune.task import Artifact, Composition, Config, Kernel, Verdict
from autotune.workload import Workload

if TYPE_CHECKING:
    import torch

    from autotune.runtime.executor import Executor
    from autotune.space import Space
    from autotune.task import Runnable


class FusionTask:
    """A region on one device; see ``autotune.task.Task``.

    Args:
        target: "sm_90" and the like; found from the device if None (without creating a context on it).
        sms: streaming multiprocessors, for persistent grids; found from the device if None.

    Raises:
        Unsupported: the region has no kernels in this version.
        ValueError: the workload's graph is damaged.
    """

    def __init__(self, workload: Workload, device: str, target: str | None = None, sms: int | None = None) -> None:
        self.workload, self.device = workload, device
        self.graph = Graph.from_json(workload.spec)
        self._target, self._sms = target, sms
        self.method: Method = METHODS[FULL]
        self.figures: Mapping[str, float] = {}
        self.plan: Plan = make_plan(self.graph, self.side)

    def under(self, method: str, figures: Mapping[str, float]) -> FusionTask:
        """This task confined to a method of :mod:`autotune.compiler.planner.ablation`; see
        ``autotune.task.ComposedTask``.
        """
        from autotune.compiler.planner.beam import confined

        made = copy.copy(self)
        made.__dict__.pop("estimates", None)
        made.method, made.figures = ablation.method(method), dict(figures)
        shape = read_text(self.plan.text)
        if confined(shape, made.method) != shape:
            made.plan = make_plan(self.graph, self.side, write_text(confined(shape, made.method)))
        return made

    def compositions(self, limit: int) -> Sequence[Composition]:
        """Plans worth tuning, as compositions of their groups' workloads."""
        return compositions(self, limit)

    def predict(self, config: Config) -> float | None:
        """Microseconds by the latency-evaluator; None where a group's scheme has no model, or the method has none."""
        if not self.method.model:
            return None
        try:
            return plan_prediction(self, self.plan_of(config), config)
        except (Unsupported, KeyError):
            return None

    @cached_property
    def estimates(self) -> Figures:
        """What the cost models take the device for."""
        if self.side == "cpu":
            return Figures.of("cpu", self.figures, units=usable_processors())
        arch, sms = self.target()
        return Figures.of("cuda", self.figures, arch, sms)

    def parts_of(self, plan: Plan, config: Config) -> list[Config]:
        """Each group's own configuration."""
        return self._parts(plan, config)

    @property
    def _cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def side(self) -> str:
        """ "cuda" or "cpu"."""
        return "cuda" if self._cuda else "cpu"

    def target(self) -> tuple[str, int]:
        """(architecture, streaming multiprocessors) of the device."""
        if self._target is None or self._sms is None:
            arch, sms = describe_cuda(self.device)
            self._target = self._target or arch
            self._sms = self._sms or sms
        return self._target, self._sms

    def plan_of(self, config: Config) -> Plan:
        """The plan a configuration names; the greedy one where it names none."""
        text = str(config.get("plan", ""))
        return make_plan(self.graph, self.side, text) if text else self.plan

    def space(self, file: str | None = None) -> Space:
        return self._space(self.plan, file)

    def space_for(self, config: Config, file: str | None = None) -> Space:
        """The space of the plan that a configuration names."""
        return self._space(self.plan_of(config), file)

    def _space(self, plan: Plan, file: str | None) -> Space:
        from autotune.space import Parameter, load_space

        base = load_space("fusion", self.side, file)
        space = join_spaces([on.space_of(g.graph, base) for on, g in self.sides(plan)], plan.leaders)
        fixed = tuple(Parameter(name, (text,), "how the region is cut") for name, text in self._named(plan).items())
        return replace(space, parameters=(*space.parameters, *fixed))

    def _named(self, plan: Plan) -> Config:
        """What a configuration says of its plan: nothing where it is the greedy one, which deployment finds itself."""
        return {} if plan.text == make_plan(self.graph, self.side).text else {"plan": plan.text}

    def joined(self, plan: Plan, parts: Sequence[Config]) -> Config:
        """The region's configuration under ``plan``, made of its groups' own, normalised."""
        return self.normalize(self._joined(plan, parts) | self._named(plan))

    def default(self) -> Config:
        return self._planned([on.default(g.graph) for on, g in self.sides(self.plan)])

    def seeds(self) -> Sequence[Config]:
        sides = self.sides(self.plan)
        found = [on.seeds(g.graph) for on, g in sides]
        base = [on.default(g.graph) for on, g in sides]
        rows = itertools.zip_longest(*found)
        return [self._planned([c or b for c, b in zip(row, base, strict=True)]) for row in rows]

    def _planned(self, parts: Sequence[Config]) -> Config:
        """The configuration under the default plan."""
        return self._joined(self.plan, parts) | self._named(self.plan)

    def normalize(self, config: Config) -> Config:
        """The configuration that would in effect run."""
        plan = self.plan_of(config)
        parts = self._parts(plan, config)
        sides = self.sides(plan)
        made = self._joined(plan, [on.normalize(g.graph, c) for (on, g), c in zip(sides, parts, strict=True)])
        return made | {"plan": config["plan"]} if "plan" in config else made

    def sides(self, plan: Plan) -> list[tuple[Scheme, Group]]:
        """Each group with what knows how to schedule it on this target."""
        return [(scheme_of(g.graph) if self._cuda else target_cpu.SCHEME, g) for g in plan.groups]

    def _parts(self, plan: Plan, config: Config) -> list[Config]:
        return group_configs(plan, config)

    def _joined(self, plan: Plan, parts: Sequence[Config]) -> Config:
        """The region's configuration: one copy for each family of groups, block sizes agreed within each launch."""
        if self._cuda and any(len(launch) > 1 for launch in plan.launches):
            # Another block size may leave other parameters without effect.
            agreed = zip(self.sides(plan), agree(plan, parts), strict=True)
            parts = agree(plan, [on.normalize(g.graph, c) for (on, g), c in agreed])
        return join_configs(parts, plan.leaders)

    def reject(self, config: Config) -> str | None:
        try:
            plan = self.plan_of(config)
        except Unsupported as error:
            return str(error)
        for (on, group), part in zip(self.sides(plan), self._parts(plan, config), strict=True):
            why = on.reject(group.graph, part)
            if why:
                return why
        return None

    def adapt(self, config: Config) -> Config | None:
        try:
            space = self.space_for(config)
        except Unsupported:
            return None
        if not self._cuda:
            config = target_cpu.completed(config, [p.name for p in space])
        fitted = space.project(config)
        return None if fitted is None else self.normalize(fitted)

    def build(self, config: Config) -> Artifact:
        if why := improper(config, self.side):  # what was measured once may come from a database
            raise BuildError(why)
        plan = self.plan_of(config)
        parts = self._parts(plan, config)
        if not self._cuda:
            kernels = tuple(Kernel(entry=f"cpu_{k}") for k in range(len(parts)))
            self._compile_cpu(plan, parts)
            return Artifact("cpu", kernels, plan.scratch_numel(self.graph), "cpu-1")
        from autotune.compiler.assemble import build_artifact
        from autotune.compiler.audit import bind

        target, sms = self.target()
        try:
            made = build_artifact(self.graph, plan, parts, target, sms, self.workload.source)
            return bind(made, self.graph, config)
        except (Unsupported, KeyError) as error:
            raise BuildError(str(error)) from error

    def _compile_cpu(self, plan: Plan, parts: Sequence[Config]) -> None:
        """Compile into the on-disk cache here, in the pool's process, so that the worker only loads."""
        from autotune.runtime.cpu_launch import make_launches

        make_launches(plan, join_configs(parts))


class _Inputs:
    """A set of a bench's inputs: flat, as kernels take them, and as views of the same memory for baselines."""

    def __init__(self, source: Mapping[str, Any], flat: list[torch.Tensor], device: torch.device) -> None:
        self.flat = flat
        self.views = source_inputs(source, flat, device) if source else []


class _Candidate:
    """A loaded configuration; calling it runs the kernels as deployment would, outputs allocated anew."""

    def __init__(self, executor: Executor, bench: FusionBench) -> None:
        self.executor, self.bench = executor, bench

    def __call__(self, given: _Inputs | None = None) -> object:
        return self.executor.call(*(given or self.bench.given).flat)


class _Baseline:
    """What the user had, on the bench's inputs."""

    def __init__(self, function: Callable[..., object], bench: FusionBench) -> None:
        self.function, self.bench = function, bench

    def __call__(self, given: _Inputs | None = None) -> object:
        return self.function(*(given or self.bench.given).views)


_KEPT_BYTES = 1 << 31
"""What the oracle's results of one seed may take to be kept for the next candidate."""
_KEPT_SHARE = 0.2
"""On a GPU that has more: of its memory. A large region's oracle takes seconds, longer than all else of a candidate."""


class _Expectation:
    """Inputs, the oracle's results, and, once asked for, how far rounding alone may move them."""

    def __init__(self, inputs: list[torch.Tensor], want: list[torch.Tensor]) -> None:
        self.inputs, self.want = inputs, want
        self.lost: list[torch.Tensor | None] | None = None
        """For each output, where eager comes to NaN or an infinity, once asked for."""
        self._slack: list[torch.Tensor | None] | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.inputs, *self.want))

    def slack(self, graph: Graph) -> list[torch.Tensor | None]:
        if self._slack is None:
            from autotune.ir import conditioning

            self._slack = conditioning.slack(graph, self.inputs, self.want, self.inputs[0].device)
        return self._slack


class FusionBench:
    """A region's inputs, oracle and baselines on one device; see ``autotune.task.Bench``."""

    def __init__(self, workload: Workload, device: str) -> None:
        import torch

        from autotune.ir.interpret import make_inputs

        self.workload, self.graph = workload, Graph.from_json(workload.spec)
        self.device = torch.device(device)
        self.inputs: list[torch.Tensor] = make_inputs(self.graph, seed=0, device=self.device, special=False)
        self.reduction_length = max(
            (self.graph.size(v.over) for v in self.graph.values if v.op in REDUCTIONS), default=1
        )
        self._expected: dict[tuple[int, bool], _Expectation] = {}

    @cached_property
    def _kept_bytes(self) -> int:
        import torch

        if self.device.type != "cuda":
            return _KEPT_BYTES
        return max(_KEPT_BYTES, int(_KEPT_SHARE * torch.cuda.mem_get_info(self.device)[1]))

    def bytes_moved(self) -> int:
        return self.graph.bytes_moved

    @cached_property
    def doubt(self) -> str:
        """Why the workload's program, which may come from a database, is not run; "" where it is what it should be."""
        from autotune.domains.fusion.rederive import check_source

        return check_source(self.workload)

    @property
    def source(self) -> Mapping[str, Any]:
        """The program that the user had; empty where there is none to be trusted."""
        return {} if self.doubt else self.workload.source

    @cached_property
    def given(self) -> _Inputs:
        """The inputs for kernels and baselines, which read the same memory."""
        return _Inputs(self.source, self.inputs, self.device)

    def input_sets(self, count: int) -> list[_Inputs]:
        """See ``autotune.task.CopiedBench``."""
        copies = ([t.clone() for t in self.inputs] for _ in range(count - 1))
        return [self.given, *(_Inputs(self.source, flat, self.device) for flat in copies)]

    def load(self, config: Config, artifact: Artifact) -> Runnable:
        import torch

        from autotune.runtime.executor import TensorSpec, load_executor
        from autotune.store.records import Key, Schedule

        schedule = Schedule(Key("", "", "", ""), config, 0.0, {}, artifact)
        inputs = [TensorSpec((t.numel(),), (1,), t.dtype) for t in self.inputs]
        outputs = [
            TensorSpec((self.graph.output_numel(k),), (1,), getattr(torch, o.dtype))
            for k, o in enumerate(self.graph.outputs)
        ]
        executor = load_executor(
            self.graph, schedule, range(len(inputs)), range(len(outputs)), inputs, outputs, self.device
        )
        return _Candidate(executor, self)

    def verify(self, run: Runnable, seed: int) -> Verdict:
        """Ordinary random inputs, then ones with NaN, infinities, huge values and zeros among them."""
        assert isinstance(run, _Candidate)
        worst = 0.0
        for special in (False, True):
            verdict = self._verify(run, seed, special)
            if not verdict.ok:
                return verdict
            worst = max(worst, verdict.error)
        return Verdict(True, worst)

    def _verify(self, run: _Candidate, seed: int, special: bool) -> Verdict:
        import torch

        from autotune.measure.verify import compare

        expected = self._expectation(seed, special)
        outputs = [
            _poison(torch.empty(self.graph.output_numel(k), dtype=getattr(torch, o.dtype), device=self.device))
            for k, o in enumerate(self.graph.outputs)
        ]
        run.executor.run_into(expected.inputs, outputs)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        worst, kind = 0.0, "inputs with NaN and infinities" if special else "random inputs"
        for k, (o, want) in enumerate(zip(self.graph.outputs, expected.want, strict=True)):
            shape = [self.graph.extents[a] for a in o.axes]
            got = outputs[k].as_strided(shape, o.strides, o.offset)
            # Rounding a float to an integer (quantisation) may fall either way at a tie.
            rounded = o.dtype not in FLOATS
            off_by_one = rounded and _from_float(self.graph, k)
            verdict = compare(got, want, o.dtype, self.reduction_length, off_by_one=off_by_one)
            lost = None
            if not verdict.ok and not rounded and special:
                lost = self._lost(expected)[k]
                verdict = compare(got, want, o.dtype, self.reduction_length, lost=lost)
            if not verdict.ok and not rounded and math.isfinite(verdict.error):
                slack = expected.slack(self.graph)[k]
                verdict = compare(got, want, o.dtype, self.reduction_length, slack=slack, lost=lost)
            if not verdict.ok:
                return Verdict(False, verdict.error, f"output {k} on {kind}: {verdict.detail}")
            worst = max(worst, verdict.error)
        return Verdict(True, worst)

    def _lost(self, expected: _Expectation) -> list[torch.Tensor | None]:
        """For each float output, where the user's own program, run as it is on the same inputs, comes to NaN or an
        infinity, as a mask of the oracle's shape; None where there is no such program.

        Which of the two an operator makes of infinities depends on the order of additions and products: a kernel may
        factor ``inf * a - inf * b``, which is NaN, into ``inf * (a - b)``. Where eager is finite, nothing is lost.
        """
        if expected.lost is None:
            expected.lost = [None] * len(self.graph.outputs)
            if self.source:
                from autotune.domains.fusion.rederive import results_of

                results = self._module().forward(*source_inputs(self.source, expected.inputs, self.device))
                results = results if isinstance(results, (tuple, list)) else [results]
                for k, (o, r) in enumerate(zip(self.graph.outputs, results_of(self.workload), strict=True)):
                    shape, made = [self.graph.extents[a] for a in o.axes], results[r]
                    if made.is_floating_point() and _span(made) == self.graph.output_numel(k):
                        seen = made.as_strided(shape, o.strides, made.storage_offset() + o.offset)
                        expected.lost[k] = ~seen.isfinite()
        return expected.lost

    def _expectation(self, seed: int, special: bool) -> _Expectation:
        """Inputs and what the oracle makes of them; those of the last seeds are kept where they are not too large."""
        from autotune.ir.interpret import interpret, make_inputs

        found = self._expected.get((seed, special))
        if found is None:
            inputs = make_inputs(self.graph, seed=seed, device=self.device, special=special)
            found = _Expectation(inputs, interpret(self.graph, inputs))
            if found.nbytes <= self._kept_bytes:
                while len(self._expected) >= 2:
                    del self._expected[next(iter(self._expected))]
                self._expected[seed, special] = found
        return found

    def baselines(self) -> Mapping[str, Callable[[], Runnable]]:
        if not self.workload.source:
            return {}
        return {
            "eager": self._eager,
            "inductor": self._inductor,
        }

    def _module(self) -> Any:
        from autotune.compiler.regions import aten

        if self.doubt:
            raise BuildError(self.doubt)
        return aten.from_json(self.source, self.device.type)

    def _eager(self) -> Runnable:
        return _Baseline(self._module().forward, self)

    def _inductor(self) -> Runnable:
        import torch

        if self.device.type == "cpu":
            from autotune.runtime.inductor import compile_bare

            return _Baseline(compile_bare(self._module(), self.given.views), self)
        torch._dynamo.reset()
        run = _Baseline(torch.compile(self._module(), dynamic=False), self)
        run()
        return run


def source_inputs(source: Mapping[str, Any], flat: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The tensors that a workload's source program takes, in its order, laid over the graph's flat inputs.

    An input that no slot reads (only its shape matters) gets fresh memory.
    """
    import torch

    slot_of = {int(i): slot for slot, i in enumerate(source["slots"])}
    out = []
    for i, spec in enumerate(source["inputs"]):
        shape, strides = [int(n) for n in spec["shape"]], [int(n) for n in spec["strides"]]
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else 0
        dtype = getattr(torch, spec["dtype"])
        base = torch.zeros(max(span, 1), dtype=dtype, device=device)
        if i in slot_of:
            have = flat[slot_of[i]]
            if have.numel() >= span:
                base = have
            else:  # the graph reads less than the whole tensor
                base[: have.numel()] = have
        out.append(base.as_strided(shape, strides))
    return out


def _span(t: torch.Tensor) -> int:
    """Elements of memory from a tensor's first to its last."""
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def _poison(t: torch.Tensor) -> torch.Tensor:
    """A value no kernel writes by chance: an element that is not written shows."""
    if t.dtype.is_floating_point and t.dtype.itemsize == 1:
        return t.fill_(-352.0)
    if t.dtype.is_floating_point:
        return t.fill_(-7.03125e4 if t.dtype.itemsize == 4 else -60000.0)
    return (
        t.fill_(True)
        if t.dtype.itemsize == 1 and str(t.dtype) == "torch.bool"
        else t.fill_(-113 if t.dtype.is_signed else 113)
    )


def _from_float(graph: Graph, k: int) -> bool:
    """Whether output ``k`` is an integer made from floats."""
    stack, seen = [graph.outputs[k].value], set()
    while stack:
        i = stack.pop()
        if i in seen:
            continue
        seen.add(i)
        v = graph.values[i]
        if v.op == "cast" and v.dtype != "bool" and graph.values[v.args[0]].dtype == "float32":
            return True
        stack.extend(v.args)
    return False


def open_task(workload: Workload, device: str) -> FusionTask:
    """The search's side of a fusion workload."""
    return FusionTask(workload, device)


def open_bench(workload: Workload, device: str) -> FusionBench:
    """The worker's side of a fusion workload."""
    return FusionBench(workload, device)

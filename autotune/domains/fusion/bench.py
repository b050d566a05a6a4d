"""The measuring worker's side of a fusion workload: inputs, verification against the oracle, and baselines.

Baselines are rebuilt from the user's original program.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import fx
from torch._prims_common import compute_required_storage_length

from autotune.compiler.regions import aten
from autotune.compiler.regions.symbols import traced
from autotune.domains.fusion.inspection import check_source, results_of
from autotune.errors import BuildError
from autotune.ir import oracle
from autotune.ir.graph import FLOATS, REDUCTIONS, Graph
from autotune.ir.inputs import index_bounds, make_inputs
from autotune.ir.oracle import from_float, interpret, may_explain
from autotune.measure.quiet import share_processors
from autotune.measure.verify import compare, is_other, typical
from autotune.runtime.inductor.index_check import index_arguments
from autotune.runtime.launch.executor import load_executor
from autotune.runtime.launch.prepared import RegionTensors, TensorSpec
from autotune.store.records import Key, Schedule
from autotune.task import Artifact, Bench, Config, Runnable, Verdict
from autotune.workload import Workload

_KEPT_BYTES = 1 << 31
"""Maximum bytes of the inputs and oracle results of one seed that are kept for the next candidate."""
_KEPT_SHARE = 0.2
"""Share of a GPU's memory that replaces the maximum if larger: a large region's oracle takes seconds, longer than all
other steps of a candidate."""
_LONG_BYTES = 1 << 22
"""Bytes of a region's inputs and outputs from which a CPU's oracle takes longer than the look at other processes."""
_VIEWS = ("reshape", "view", "expand", "unsqueeze", "squeeze", "permute", "slice", "select", "clone")
_FOLLOWED = frozenset(
    # gather, index and index_select return elements of their first argument, which are then the indices.
    [*_VIEWS, "convert_element_type", "gather", "index", "index_select"]
)


class Runs(Protocol):
    """Interface of a region's kernels; see :class:`autotune.runtime.launch.executor.Executor`."""

    def call(self, *inputs: torch.Tensor) -> object:
        """Run on flat inputs, into new outputs."""
        ...

    def run_into(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Run on flat inputs into given outputs."""
        ...


class _Inputs:
    """A set of inputs: flat for kernels, and as views of the same memory for baselines."""

    def __init__(self, source: Mapping[str, Any], flat: list[torch.Tensor], device: torch.device) -> None:
        self.flat = flat
        self.views = source_inputs(source, flat, device) if source else []


class _Candidate:
    """A loaded configuration; a call runs the kernels as deployment does, with new outputs."""

    def __init__(self, executor: Runs, bench: FusionBench) -> None:
        self.executor, self.bench = executor, bench

    def __call__(self, given: _Inputs | None = None) -> object:
        return self.executor.call(*(given or self.bench.given).flat)


class _Baseline:
    """The user's original program on the bench's inputs."""

    def __init__(self, function: Callable[..., object], bench: FusionBench) -> None:
        self.function, self.bench = function, bench

    def __call__(self, given: _Inputs | None = None) -> object:
        return self.function(*(given or self.bench.given).views)


class _Expectation:
    """Inputs, the oracle's results, and a bound on their rounding error, which is computed lazily."""

    def __init__(self, inputs: list[torch.Tensor], want: list[torch.Tensor]) -> None:
        self.inputs, self.want = inputs, want
        self.lost: list[torch.Tensor | None] | None = None
        """For each output, a mask of NaN and infinite elements in eager mode; computed lazily."""
        self._slack: list[torch.Tensor | None] | None = None
        self._sizes: dict[int, float] = {}
        self._sums = [_sum_of_bits(t) for t in inputs]

    def size(self, k: int) -> float:
        """The typical magnitude of output ``k``, cached since a comparison would read the whole output for it."""
        if k not in self._sizes:
            self._sizes[k] = typical(self.want[k])
        return self._sizes[k]

    def changed(self) -> int | None:
        """The first input that is no longer as it was drawn; None if there is none."""
        pairs = enumerate(zip(self.inputs, self._sums, strict=True))
        return next((k for k, (t, before) in pairs if not torch.equal(_sum_of_bits(t), before)), None)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.inputs, *self.want))

    def slack(self, graph: Graph, k: int) -> torch.Tensor | None:
        """The error of output ``k`` that rounding explains, as of :func:`autotune.ir.oracle.slack`."""
        if self._slack is None:
            device = self.inputs[0].device
            with _beside_others(graph, device):
                self._slack = oracle.slack(graph, self.inputs, self.want, device)
        return self._slack[k]


def _beside_others(graph: Graph, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """A context for an oracle's operators: on a busy CPU a large region's use fewer threads."""
    long = device.type == "cpu" and graph.bytes_moved >= _LONG_BYTES
    return share_processors() if long else contextlib.nullcontext()


class FusionBench(Bench):
    """A region's inputs, oracle and baselines on one device; see ``autotune.task.Bench``."""

    def __init__(self, workload: Workload, device: str) -> None:
        self.workload, self.graph = workload, Graph.from_json(workload.spec)
        self.device = torch.device(device)
        self.inputs: list[torch.Tensor] = make_inputs(self.graph, 0, self.device, within=self._within)
        self.reduction_length = max(
            (self.graph.size(v.over) for v in self.graph.values if v.op in REDUCTIONS), default=1
        )
        self._expected: dict[tuple[int, bool], _Expectation] = {}
        self._translation: str | None = None  # as of _mistranslated, once it is known

    @cached_property
    def _kept_bytes(self) -> int:
        if self.device.type != "cuda":
            return _KEPT_BYTES
        return max(_KEPT_BYTES, int(_KEPT_SHARE * torch.cuda.mem_get_info(self.device)[1]))

    def bytes_moved(self) -> int:
        return self.graph.bytes_moved

    @cached_property
    def doubt(self) -> str:
        """The reason why the workload's program, which may come from a database, does not run; "" if it is valid."""
        return check_source(self.workload)

    @cached_property
    def _within(self) -> dict[int, int]:
        """Bounds on input slots that the program uses as indices, if the graph does not bound all integer inputs."""
        said = index_bounds(self.graph)
        if not any(name in ("int32", "int64") and k not in said for k, name in enumerate(self.graph.inputs)):
            return {}
        slots = {int(i): slot for slot, i in enumerate(self.source.get("slots", ()))}
        found = positions(traced(self.source, self.device.type)) if slots else {}
        return {slots[i]: bound for i, bound in found.items() if i in slots}

    @property
    def source(self) -> Mapping[str, Any]:
        """The user's program; empty if there is no valid one."""
        return {} if self.doubt else self.workload.source

    @cached_property
    def given(self) -> _Inputs:
        """The inputs of kernels and baselines, which share their memory."""
        return _Inputs(self.source, self.inputs, self.device)

    def input_sets(self, count: int) -> list[_Inputs]:
        """See ``autotune.task.Bench``."""
        copies = ([t.clone() for t in self.inputs] for _ in range(count - 1))
        return [self.given, *(_Inputs(self.source, flat, self.device) for flat in copies)]

    def load(self, config: Config, artifact: Artifact) -> Runnable:
        return _Candidate(self.executor(config, artifact), self)

    def executor(self, config: Config, artifact: Artifact) -> Runs:
        """Load a candidate's kernels; benches of other targets override this method."""
        schedule = Schedule(Key("", "", "", ""), config, 0.0, {}, artifact)
        inputs = [TensorSpec((t.numel(),), (1,), t.dtype) for t in self.inputs]
        outputs = [
            TensorSpec((self.graph.output_numel(k),), (1,), getattr(torch, o.dtype))
            for k, o in enumerate(self.graph.outputs)
        ]
        tensors = RegionTensors(range(len(inputs)), range(len(outputs)), inputs, outputs)
        return load_executor(self.graph, schedule, tensors, self.device)

    def verify(self, run: Runnable, seed: int) -> Verdict:
        """Compare on random inputs, then on inputs that include NaN, infinities, huge values and zeros."""
        assert isinstance(run, _Candidate)
        if self._translation is None:
            self._translation = self._mistranslated(seed)
        if self._translation:  # no candidate has run: the process is as it was
            return Verdict(False, 0.0, self._translation)
        worst = 0.0
        for special in (False, True):
            verdict = self._verify(run, seed, special)
            if not verdict.ok:
                return verdict
            worst = max(worst, verdict.error)
        return Verdict(True, worst)

    def _verify(self, run: _Candidate, seed: int, special: bool) -> Verdict:
        expected = self._expectation(seed, special)
        made = [
            _Poisoned(self.graph.output_numel(k), getattr(torch, o.dtype), self.device)
            for k, o in enumerate(self.graph.outputs)
        ]
        outputs = [one.tensor for one in made]
        run.executor.run_into(expected.inputs, outputs)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        worst, kind = 0.0, "inputs with NaN and infinities" if special else "random inputs"
        if changed := [k for k, one in enumerate(made) if one.is_left()]:
            return Verdict(False, math.inf, f"output {changed[0]} on {kind}: memory outside of the tensor was written")
        if (slot := expected.changed()) is not None:
            self._expected.clear()
            return Verdict(False, math.inf, f"input {slot} on {kind} was written")
        for k, (o, want) in enumerate(zip(self.graph.outputs, expected.want, strict=True)):
            shape = [self.graph.extents[a] for a in o.axes]
            got = outputs[k].as_strided(shape, o.strides, outputs[k].storage_offset() + o.offset)
            # Rounding a float to an integer (quantisation) may round a tie in either direction.
            rounded = o.dtype not in FLOATS
            off_by_one = rounded and from_float(self.graph, k)
            size = None if rounded else expected.size(k)
            verdict = compare(got, want, o.dtype, self.reduction_length, off_by_one=off_by_one, size=size)
            lost = None
            if not verdict.ok and not rounded and special:
                lost = self._lost(expected)[k]
                verdict = compare(got, want, o.dtype, self.reduction_length, lost=lost, size=size)
            if not verdict.ok and may_explain(o.dtype, verdict.error):
                slack = expected.slack(self.graph, k)
                verdict = compare(got, want, o.dtype, self.reduction_length, slack=slack, lost=lost, size=size)
            if not verdict.ok:
                return Verdict(False, verdict.error, f"output {k} on {kind}: {verdict.detail}")
            worst = max(worst, verdict.error)
        return Verdict(True, worst)

    def _lost(self, expected: _Expectation) -> list[torch.Tensor | None]:
        """For each float output, the elements that are NaN or infinite in the user's program on the same inputs.

        A mask of the oracle's shape; None without a valid program. Whether an operator returns NaN or an infinity for
        infinite inputs depends on the order of additions and products: a kernel may factor ``inf * a - inf * b``, which
        is NaN, to ``inf * (a - b)``. Elements that are finite in eager mode must match.
        """
        if expected.lost is None:
            results = self._of_program(expected)
            expected.lost = [~t.isfinite() if t is not None and t.is_floating_point() else None for t in results]
        return expected.lost

    def _of_program(self, expected: _Expectation) -> list[torch.Tensor | None]:
        """The results of the user's operators in the oracle's shapes; None for a result with another layout.

        All are None without a valid program.
        """
        found: list[torch.Tensor | None] = [None] * len(self.graph.outputs)
        if not self.source:
            return found
        results = self._module().forward(*source_inputs(self.source, expected.inputs, self.device))
        results = results if isinstance(results, (tuple, list)) else [results]
        for k, (o, r) in enumerate(zip(self.graph.outputs, results_of(self.workload), strict=True)):
            shape, made = [self.graph.extents[a] for a in o.axes], results[r]
            if compute_required_storage_length(made.shape, made.stride(), 0) == self.graph.output_numel(k):
                found[k] = made.as_strided(shape, o.strides, made.storage_offset() + o.offset)
        return found

    def _mistranslated(self, seed: int) -> str:
        """The difference of the graph from the user's operators, by their results; "" for none.

        A kernel of a wrong graph agrees with the oracle. Integers made without floats must be equal. Floats of a right
        graph differ from eager mode's by rounding, which few programs magnify to a quarter.
        """
        overflows = '"float16"' in json.dumps(self.source)
        for special in (False, True):
            expected = self._expectation(seed, special)
            exact = [oracle.is_exact(self.graph, k) for k in range(len(self.graph.outputs))]
            if special and not any(exact):
                break
            try:
                results = self._of_program(expected)
                for k, (want, seen) in enumerate(zip(expected.want, results, strict=True)):
                    if seen is None:
                        continue
                    if exact[k]:
                        wrong = not torch.equal(seen.to(want.dtype), want)
                    else:
                        slack = functools.partial(expected.slack, self.graph, k)
                        rounded = not special and seen.dtype != torch.bool
                        size = expected.size(k)
                        wrong = rounded and is_other(seen, want, slack, size, overflows=overflows)
                    if wrong:
                        return f"output {k}: the region's graph does not compute what its operators compute"
            except (IndexError, MemoryError, RuntimeError):  # they refuse such inputs, or need more memory
                break
        return ""

    def _expectation(self, seed: int, special: bool) -> _Expectation:
        """Inputs and the oracle's results; those of the last seeds are cached unless they are too large."""
        found = self._expected.get((seed, special))
        if found is None:
            with _beside_others(self.graph, self.device):
                inputs = make_inputs(self.graph, seed, self.device, special, self._within)
                found = _Expectation(inputs, interpret(self.graph, inputs))
            if found.nbytes <= self._kept_bytes:
                while len(self._expected) >= 2:
                    del self._expected[next(iter(self._expected))]
                self._expected[seed, special] = found
        return found

    def baselines(self) -> Mapping[str, Callable[[], Runnable]]:
        if not self.workload.source:
            return {}
        return {"eager": lambda: _Baseline(self._module().forward, self), "inductor": self._inductor}

    def _module(self) -> Any:
        if self.doubt:
            raise BuildError(self.doubt)
        return aten.from_json(self.source, self.device.type)

    def _inductor(self) -> Runnable:
        from autotune.compiler.regions.programs import compile_bare, compile_cached

        compiled = compile_bare if self.device.type == "cpu" else compile_cached
        return _Baseline(compiled(self._module(), self.given.views), self)


def compile_baselines(workload: Workload, device: str) -> None:
    """Compile a workload with Inductor, to fill the cache for the bench's own compilation.

    Raises:
        Exception: any exception of Inductor.
    """
    from autotune.compiler.regions.programs import compile_cached, fake_mode

    if not workload.source or check_source(workload):
        return
    with fake_mode():
        inputs = source_inputs(workload.source, (), torch.device(device))
    compile_cached(aten.from_json(workload.source, torch.device(device).type), inputs)


def source_inputs(source: Mapping[str, Any], flat: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The inputs of a workload's source program in its order, as views of the graph's flat inputs.

    An input without a slot (only its shape is used), or whose slot is not given, gets new memory.
    """
    slot_of = {int(i): slot for slot, i in enumerate(source["slots"])}
    out = []
    for i, spec in enumerate(source["inputs"]):
        shape, strides = [int(n) for n in spec["shape"]], [int(n) for n in spec["strides"]]
        span = compute_required_storage_length(shape, strides, 0)
        dtype = getattr(torch, spec["dtype"])
        base = torch.zeros(max(span, 1), dtype=dtype, device=device)
        if slot_of.get(i, len(flat)) < len(flat):
            have = flat[slot_of[i]]
            if have.numel() >= span:
                base = have
            else:  # the graph reads less than the whole tensor
                base[: have.numel()] = have
        out.append(base.as_strided(shape, strides))
    return out


_MARGIN_BYTES = 256
"""Memory on either side of a verified output. It keeps the alignment that kernels require."""


class _Poisoned:
    """A flat output full of a value that no kernel writes by chance, between two margins of the same value."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        margin = _MARGIN_BYTES // dtype.itemsize
        self._whole = _poison(torch.empty(numel + 2 * margin, dtype=dtype, device=device))
        self._margins = self._whole[:margin], self._whole[margin + numel :]
        self._before = self._margins[0].clone()
        self.tensor = self._whole[margin : margin + numel]

    def is_left(self) -> bool:
        """True if a kernel wrote outside of the tensor."""
        as_bytes = self._before.view(torch.uint8)
        return not all(torch.equal(margin.view(torch.uint8), as_bytes) for margin in self._margins)


def _sum_of_bits(t: torch.Tensor) -> torch.Tensor:
    """A number that is another one if a few elements of a contiguous tensor change."""
    size = math.gcd(t.numel() * t.element_size(), 8) if t.numel() else 1
    form = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return t.view(torch.uint8).view(form).sum(dtype=torch.int64)


def _poison(t: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with a value that no kernel writes by chance, so that unwritten elements are detected."""
    if t.dtype.is_floating_point:
        return t.fill_({1: -352.0, 2: -60000.0, 4: -7.03125e4}[t.dtype.itemsize])
    if str(t.dtype) == "torch.bool":
        return t.fill_(True)
    return t.fill_(-113 if t.dtype.is_signed else 113)


def positions(program: fx.GraphModule) -> dict[int, int]:
    """For each input that is used directly as an index, the upper bound of its elements.

    Args:
        program: aten calls with fake tensors in ``meta["val"]`` (:func:`autotune.compiler.regions.symbols.traced`).
    """
    inputs = {n: k for k, n in enumerate(program.graph.find_nodes(op="placeholder"))}
    bounds: dict[int, int] = {}
    for node in program.graph.nodes:
        for index, bound in _indexed(node):
            source: Any = index
            while source.op == "call_function" and _name(source) in _FOLLOWED:
                source = source.args[0]
            if source in inputs:
                k = inputs[source]
                bounds[k] = min(bound, bounds.get(k, bound))
    return bounds


def _indexed(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """The index arguments of a call, each with the extent of the axis that it indexes."""
    name = _name(node).removeprefix("_unsafe_")
    if name.startswith(("index_select", "index_fill", "scatter", "index_add")):
        name = "scatter"
    for index, dim, _ in index_arguments(name, node):
        table: Any = node.args[0]
        if isinstance(index, fx.Node):
            yield index, table.meta["val"].shape[dim]


def _name(node: fx.Node) -> str:
    target = node.target
    return str(target.overloadpacket.__name__) if isinstance(target, torch._ops.OpOverload) else ""

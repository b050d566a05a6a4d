"""One region inside Inductor's generated code: its text, and the function built from it when the code is loaded.

The text of a call has everything that a process needs to run the region, except the kernels, which come from the
database: the region's graph, the layouts of its tensors, and its operators, which run if the kernels cannot. Inductor
caches the text with its code, so that a warm start neither looks up nor plans regions.
"""

from __future__ import annotations

import base64
import functools
import json
import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autotune.compiler.regions import aten
from autotune.compiler.regions.aten import at_sizes
from autotune.compiler.targets.cuda import OVERWRITES
from autotune.device import environment, identify
from autotune.errors import Unsupported
from autotune.runtime.deployment import deployment
from autotune.runtime.ladder import Level, Match
from autotune.runtime.launch.cuda import LaunchError
from autotune.runtime.launch.executor import executor_of, generated
from autotune.runtime.launch.prepared import RegionTensors, TensorSpec, prepare
from autotune.runtime.launch.verify import Check, WrongResult, checked_calls, copies_of_overwritten
from autotune.task import Artifact, Status
from autotune.workload import Workload

log = logging.getLogger("autotune")

WRITTEN = b"region 7"
"""Version of the code that :mod:`autotune.runtime.inductor.region_op`, ``region_cpp`` and ``index_check`` write into
Inductor's.
Inductor's caches outlive an upgrade. So this changes with the code, and older code is not loaded."""

Pairs = tuple[tuple[int, int], ...]
"""Pairs of an input's and an output's index."""

Call = Callable[..., None]
"""Takes the region's inputs, then its outputs, which it writes, and on a GPU the raw stream."""


@dataclass(frozen=True)
class RegionCall:
    """A region and the schedule that runs it.

    Attributes:
        label: for messages.
        spec: the region's canonical graph as JSON.
        tuned: fingerprint of the workload that the schedule was tuned for.
        slots, results: as in :class:`autotune.compiler.regions.find.Binding`.
        inputs, outputs: layouts of the region's tensors.
        device: "cpu" or "cuda:N".
        source: the region's operators (:mod:`autotune.compiler.regions.aten`).
        symbols: for symbolic sizes, the tensor (inputs, then outputs) and dimension of each symbol. ``spec`` and the
            fields derived from it then have the sizes that the graph was traced with.
        verify: replaces the setting, if not empty.
        packaged: True if schedules shipped with autotune may run it.
        overwrites: inputs and outputs that a caller may pass as one tensor.
        counts: for one region of each graph, whose calls count as the graph's (:mod:`autotune.runtime.savings`): the
            "graph", its "mode", and "alone_us", the time that its kernels save in a call.
    """

    label: str
    spec: Mapping[str, Any]
    tuned: str
    slots: tuple[int, ...]
    results: tuple[int, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    device: str
    source: Mapping[str, Any]
    symbols: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    verify: str = ""
    packaged: bool = True
    overwrites: Pairs = ()
    counts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> RegionTensors:
        """The tensors, as an executor takes them."""
        return RegionTensors(self.slots, self.results, self.inputs, self.outputs)

    def text(self) -> str:
        """The call as one ASCII word."""
        fields = {**vars(self), "inputs": _layouts(self.inputs), "outputs": _layouts(self.outputs)}
        data = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return base64.b85encode(zlib.compress(data.encode(), 9)).decode()

    @classmethod
    def of(cls, text: str) -> RegionCall:
        """The inverse of :meth:`text`."""
        fields = json.loads(zlib.decompress(base64.b85decode(text)))
        fields |= {k: tuple(fields[k]) for k in ("slots", "results")}
        for k in ("inputs", "outputs"):
            fields[k] = tuple(
                TensorSpec(tuple(size), tuple(stride), getattr(torch, t)) for size, stride, t in fields[k]
            )
        fields["overwrites"] = tuple((i, k) for i, k in fields["overwrites"])
        fields["symbols"] = {name: tuple(place) for name, place in fields["symbols"].items()}
        return cls(**fields)


def _layouts(specs: Sequence[TensorSpec]) -> list[Any]:
    return [[s.size, s.stride, str(s.dtype).removeprefix("torch.")] for s in specs]


def permitted(artifact: Artifact | None, slots: Sequence[int], results: Sequence[int]) -> Pairs:
    """The pairs of the region's inputs and outputs that its kernels accept as one tensor.

    Args:
        artifact: of a schedule; an audit has compared its launch data with its configuration
            (:mod:`autotune.compiler.assemble`).
        slots, results: as in :class:`autotune.compiler.regions.find.Binding`.
    """
    if artifact is None or artifact.target == "cpu" or not artifact.kernels:
        return ()
    pairs = artifact.kernels[-1].launch.get(OVERWRITES, ())  # earlier launches overwrite nothing
    return tuple((slots[slot], results[k]) for slot, k in pairs)


def load_call(text: str) -> Call:
    """The function that Inductor's code calls for a region; equal regions share one.

    Args:
        text: of a :class:`RegionCall`.
    """
    own = deployment()
    own.count("hits")
    with own.loading:
        found = own.calls.get(text)
        if found is None:
            if ":" in text:
                from autotune.runtime.inductor import product_call

                found = product_call.load(text, Operators)
            else:
                call = RegionCall.of(text)
                found = _BySizes(call).call if call.symbols else _ready(call)
                if call.counts:
                    found = own.savings.counted(found, call.device, **call.counts)
            own.calls[text] = found
        return found


class _BySizes:
    """A region of symbolic sizes: one function for each set of sizes, built at its first call.

    Attributes:
        call: the region's function, generated: a loop over the sizes would take a microsecond of each call.
    """

    def __init__(self, call: RegionCall) -> None:
        self._call, self._made = call, dict[tuple[int, ...], Call]()
        self._places = [(name, k, dim) for name, (k, dim) in call.symbols.items()]
        takes = [f"x{k}" for k in range(len(call.inputs) + len(call.outputs))]
        takes += ["on"] if call.device != "cpu" else []
        given = ", ".join(takes)
        key = "".join(f"x{int(k)}.shape[{int(dim)}], " for _, k, dim in self._places)
        body = [f"key = ({key})", "run = get(key)", f"if run is None: run = make(key, ({given},))", f"run({given})"]
        self.call: Call = generated(f"call({given})", body, {"get": self._made.get, "make": self._make})

    def _make(self, key: tuple[int, ...], tensors: Sequence[Any]) -> Call:
        with deployment().loading:
            if key not in self._made:
                self._made[key] = self._at({p[0]: size for p, size in zip(self._places, key, strict=True)}, tensors)
            return self._made[key]

    def _at(self, sizes: Mapping[str, int], tensors: Sequence[Any]) -> Call:
        """The function for sizes by symbol; the region's operators if the look-up fails."""
        n, m = len(self._call.inputs), len(self._call.outputs)
        inputs, outputs = (tuple(map(TensorSpec.of, t)) for t in (tensors[:n], tensors[n : n + m]))
        try:
            call = at_these(self._call, sizes)
        except Exception as e:
            log.debug("a region whose sizes were not looked up", exc_info=True)
            source = at_sizes(self._call.source, sizes)
            operators = Operators(replace(self._call, source=source, symbols={}, inputs=inputs, outputs=outputs))
            operators.warn(f"is not used for sizes {dict(sizes)}: {e!r}")
            return operators
        return _ready(replace(call, inputs=inputs, outputs=outputs))


def at_these(call: RegionCall, sizes: Mapping[str, int], *, counted: bool = True) -> RegionCall:
    """A call of symbolic sizes with concrete ones. If no stored kernel takes them, ``tuned`` is empty.

    Args:
        sizes: by symbol.
        counted: True to count a hit, and to record a miss.
    """
    from autotune.compiler.regions.find import workload_of  # a warm start of a graph with static sizes needs neither
    from autotune.compiler.regions.symbols import traced
    from autotune.runtime.match import look_up

    program = at_sizes(call.source, sizes)
    workload, binding = workload_of(traced(program, call.device), str(call.spec.get("precision", "")), once=False)
    # At any ratio of rows: the alternative is the operators one by one, not Inductor's code.
    found = look_up(workload, call.device, rows=math.inf, packaged=call.packaged)
    tuned = ""
    if found.schedule is not None and found.schedule.config is not None and found.tuned is not None:
        tuned = found.tuned.fingerprint
        deployment().keep_match(call.device, found)
        deployment().count("hits_other_rows", int(counted and found.level is Level.OTHER_ROWS))
        deployment().count("hits_packaged", int(counted and found.level is Level.PACKAGED))
    if counted and not found.level.own:
        deployment().record_misses([(workload, found.reason)], call.device)
    return replace(
        call, spec=workload.spec, tuned=tuned, slots=binding.inputs, results=binding.outputs, source=program, symbols={}
    )


def _ready(call: RegionCall) -> Call:
    operators = Operators(call)
    if not call.tuned:  # these sizes are not tuned
        deployment().count("misses")
        return operators
    try:
        found = found_for(call)
        assert found.schedule is not None
        assert found.tuned is not None
        own, region = deployment(), Workload("fusion", call.spec).fingerprint
        exact = region == call.tuned
        tensors = call.tensors
        key = call.tuned, region, call.device, tensors
        made = own.prepared.get(key)
        always = checked_calls(found.proven and exact, call.verify)
        graph = tuned = None
        if made is None or always is not None:
            from autotune.ir.graph import Graph

            graph = Graph.from_json(call.spec)
            tuned = None if exact else Graph.from_json(found.tuned.spec)
        where = torch.device(call.device)
        if made is None:
            assert graph is not None
            made = prepare(graph, found.schedule, tensors, where.type)
            if made.launches:
                own.prepared[key] = made
        executor = executor_of(made, tensors, where, tuned)
        check = None
        if always is not None:
            assert graph is not None
            check = Check(graph, call.slots, call.results, operators.results, always=always)
        run = executor.writer(functools.partial(operators.instead, found), check)
        allowed = permitted(found.schedule.artifact, call.slots, call.results)
        return run if set(call.overwrites) <= set(allowed) else _apart(run, len(call.inputs), len(call.outputs))
    except Exception as e:
        log.debug("a stored kernel that was not loaded", exc_info=True)
        operators.warn(f"is not used: {e}")
        return operators


def _apart(run: Call, inputs: int, outputs: int) -> Call:
    """Wrap kernels that do not permit a call's overwriting of inputs, since their schedule is newer than the call."""

    def call(*tensors: Any) -> None:
        run(*copies_of_overwritten(tensors[:inputs], tensors[inputs : inputs + outputs]), *tensors[inputs:])

    return call


def found_for(call: RegionCall) -> Match:
    """The schedule that a call names, from the preceding look-up or from the database.

    Raises:
        Unsupported: the schedule is no longer stored, or must not run here.
    """
    return deployment().kept_match(call.tuned, call.device) or _stored(call)


def _stored(call: RegionCall) -> Match:
    from autotune.runtime.match import deployed, deployed_from_package

    own = deployment()
    store, place, env = own.store(), identify(call.device), environment(call.device)
    try:
        if store is None:
            raise Unsupported("there is no database")
        found = deployed(call.tuned, store, place, env)
    except Unsupported:
        asked = call.packaged and not (store is None and own.is_shut())
        packaged = deployed_from_package(call.tuned, store, place, env) if asked else None
        if packaged is None:
            raise
        found = packaged
    own.warn_differences(found.differences, other_device=found.level is Level.OTHER_DEVICE)
    return found


class Operators:
    """A region's operators one by one, which write the same outputs as its kernels."""

    def __init__(self, call: RegionCall) -> None:
        self._call = call
        self._module: fx.GraphModule | None = None

    def __call__(self, *tensors: Any) -> None:
        n, m = len(self._call.inputs), len(self._call.outputs)
        outputs = tensors[n : n + m]
        # An operator may return a view of its input.
        inputs = copies_of_overwritten(tensors[:n], outputs) if self._call.overwrites else tensors[:n]
        for out, value in zip(outputs, self.results(*inputs), strict=True):
            out.copy_(value)

    def results(self, *inputs: Any) -> Sequence[torch.Tensor]:
        """The operators' results on the region's inputs."""
        if self._module is None:
            self._module = aten.from_json(self._call.source, self._call.device)
        with torch.no_grad(), torch._C._DisableAutocast():
            made: Sequence[torch.Tensor] = self._module.forward(*inputs)
        return made

    def instead(self, found: Match, error: BaseException) -> Call:
        """Replace kernels that failed with ``error``. This process does not use their schedule again. Other processes
        do not either, if the schedule caused the failure and the database is writable."""
        wrong = isinstance(error, WrongResult)
        deployment().count("wrong_results", int(wrong))
        schedule = found.schedule
        if schedule is not None and deployment().disable(schedule, f"it failed in this process: {error}"):
            own = wrong or (isinstance(error, LaunchError) and error.deterministic)
            if own and found.level in (Level.EXACT, Level.HEURISTIC, Level.OTHER_ROWS):
                status = Status.WRONG_RESULT if wrong else Status.LAUNCH_ERROR
                deployment().record_failure(schedule, self._call.device, status, str(error))
        self.warn(f"{'returned wrong results' if wrong else 'failed'} and is not used any more: {error}")
        return self

    def warn(self, what: str) -> None:
        own = deployment()
        own.count("fallbacks")
        own.warn_once(f"region {self._call.tuned}", f"autotune: the stored kernel of {self._call.label} {what}")

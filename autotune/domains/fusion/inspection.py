"""Programs that are looked at without running them: before a search, and as a database has them.

A target's regions are captured over tensors that have shapes but no data, and no GPU. Where the device is there, the
target is captured on it as a search would. Otherwise it is captured on the CPU, with the sizes meant for the device;
operators that the CPU implements differently (attention, convolutions) are none of ours.

``Workload.source`` is no part of a workload's identity, and whoever can write to a shared database can change it. So it
is translated again before anything is done with it: a program that comes to the same graph computes what the workload
says, on the same inputs, and nothing else is run as "what the user had".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from autotune.compiler.capture.options import requirements
from autotune.compiler.lower.eager import moved_bytes
from autotune.compiler.lower.facts import UNKNOWN_BYTES, GraphFacts
from autotune.compiler.regions.find import Binding, Region, outside, regions_from, workload_of
from autotune.compiler.regions.symbols import traced
from autotune.domains.fusion.builtin import BUILTIN
from autotune.domains.fusion.program_spec import (
    Call,
    captures,
    gradients_of,
    load_callable,
    load_inputs,
    named_after,
    resolve,
    side_of,
)
from autotune.errors import Unsupported, UserError
from autotune.ir.graph import Graph
from autotune.workload import Workload

_SIDES = ("cpu", "cuda")


@dataclass(frozen=True)
class PlannedRegion:
    """A distinct region of a target, how often it occurs, and the ``reason`` for which Inductor compiles it, or ""."""

    region: Region
    count: int
    reason: str


@dataclass(frozen=True)
class Outside:
    """Calls of one operator that Inductor compiles, for one reason.

    Attributes:
        bytes: what they read and write together; None where their sizes are not known.
    """

    operator: str
    count: int
    bytes: int | None
    reason: str


@dataclass(frozen=True)
class Planned:
    """A target's regions, and the operators outside of them.

    Attributes:
        regions: the distinct ones in order of appearance, those that cannot be tuned last.
        outside: operators that are in none of them, with how often each occurs: matrix products, convolutions and
            attention, and operators without a rule.
        why: the same operators by reason, those of regions that Inductor compiles among them; the most bytes first.
        gradients: how it was captured (:func:`autotune.domains.fusion.program_spec.gradients_of`).
    """

    regions: Sequence[PlannedRegion]
    outside: Mapping[str, int]
    why: Sequence[Outside]
    gradients: Sequence[bool]


def here(device: str) -> bool:
    """True if this machine has the device."""
    if side_of(device) == "cpu":
        return True
    return torch.cuda.is_available() and (torch.device(device).index or 0) < torch.cuda.device_count()


def planned(target: str, inputs: str | None, device: str, *, train: bool = False) -> Planned:
    """The distinct regions of a target, and the operators outside of them.

    Args:
        target, inputs: as ``autotune search`` takes them.
        device: "cpu", "cuda" or "cuda:N"; need not be there.
        train: also the backward pass, whatever the target says requires a gradient.

    Raises:
        UserError: as :func:`autotune.domains.fusion.program_spec.resolve`, or where the callable fails on its inputs.
    """
    if here(device):
        fn, call, label = resolve(target, inputs, device)
        return _regions(fn, *call, label, train, side_of(device))
    from torch._subclasses.fake_tensor import FakeTensorMode

    # The callable itself is made outside: its weights are real, and may be what its module keeps.
    builtin = BUILTIN.get(target) if inputs is None else None
    if builtin is None and ":" not in target:
        resolve(target, inputs, "cpu")  # says what is wrong
    size = builtin.size(device) if builtin else None
    fn = builtin.make(size, "cpu") if builtin and size else load_callable(target, inputs)

    def arguments() -> Call:
        return (builtin.inputs(size, "cpu"), {}) if builtin and size else load_inputs(str(inputs), "cpu")

    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return _regions(fn, *arguments(), target, train, side_of(device))
    except UserError:
        if builtin:
            raise
    # Inputs or a program that look at data cannot do without.
    return _regions(fn, *arguments(), target, train, side_of(device))


def _regions(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], label: str, train: bool, side: str
) -> Planned:
    counts: Counter[str] = Counter()
    rest, moved = Counter[_Calls](), Counter[_Calls]()
    found: dict[str, PlannedRegion] = {}
    for graphs in captures(fn, args, kwargs, label, train=train):
        once: Counter[str] = Counter()
        left, size = Counter[_Calls](), Counter[_Calls]()
        for graph in graphs:
            facts = GraphFacts(graph.module.graph, side)
            regions = regions_from(facts)
            stay = [(node, reason, False) for node, reason in outside(facts, regions).items()]
            for region in regions:
                reason = region.reason or _option(region, side)
                key = region.workload.fingerprint if region.workload else f"none {region.reason} {region.nodes}"
                found.setdefault(key, PlannedRegion(region, 0, reason))
                once[key] += 1
                stay += [(node, reason, True) for node in region.nodes if reason]
            for node, reason, is_region in stay:
                calls = _Calls(facts[node].operator or str(node.target), reason, is_region)
                left[calls] += 1
                size[calls] += moved_bytes(facts, [node], calls.operator)
        counts |= once
        rest |= left
        moved |= size
    if len(found) == 1:
        ((key, only),) = found.items()
        workload = only.region.workload and named_after(label, only.region.workload)
        found = {key: replace(only, region=replace(only.region, workload=workload))}
    distinct = [replace(region, count=counts[key]) for key, region in found.items()]
    alone: Counter[str] = Counter()
    for calls, count in rest.items():
        alone[calls.operator] += 0 if calls.is_region else count
    why = [
        Outside(calls.operator, count, moved[calls] if moved[calls] < UNKNOWN_BYTES else None, calls.reason)
        for calls, count in sorted(rest.items(), key=lambda item: -moved[item[0]])
    ]
    modes = gradients_of(fn, args, kwargs, train=train)
    return Planned(sorted(distinct, key=lambda p: bool(p.reason)), dict((+alone).most_common()), why, modes)


class _Calls(NamedTuple):
    operator: str
    reason: str
    is_region: bool


def _option(region: Region, side: str) -> str:
    """The option of Inductor that requires results which stored kernels do not compute; "" if none is set."""
    precision = str(region.workload.spec.get("precision", "")) if region.workload else ""
    return next((f"option {one.partition(' ')[0]} of Inductor" for one in requirements(side, precision)), "")


def check_graph(workload: Workload) -> str:
    """Why a stored workload has no graph that kernels could be made of; "" where it has."""
    try:
        Graph.from_json(workload.spec)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        return f"its graph is damaged ({error})"
    return ""


def check_source(workload: Workload) -> str:
    """Why a workload's program is not to be run; "" where it is what the workload was made of, or there is none.

    The same operators make results of other types on other devices (a layer norm's statistics, say): the program is
    translated as on the device that it was captured on, and failing that as on the others.
    """
    if not workload.source:
        return ""
    why = ""
    for side in _sides(workload.source):
        try:
            fingerprint, binding = rederived(workload, side)
        except Unsupported as error:
            why = why or f"it is no region ({error})"
            continue
        except Exception as error:  # whatever torch says of a program that makes no sense
            why = why or f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            continue
        if fingerprint == workload.fingerprint and list(binding.inputs) == list(workload.source.get("slots", ())):
            return ""
        why = why or "it computes something else"
    return f"the stored program is not what the workload was made of: {why}"


def _sides(source: Mapping[str, Any]) -> list[str]:
    """The sides to translate for, the program's own first."""
    inputs = source.get("inputs")
    first = inputs[0] if isinstance(inputs, Sequence) and inputs else None
    own = first.get("device") if isinstance(first, Mapping) else None
    return sorted(_SIDES, key=lambda side: side != own)


def results_of(workload: Workload) -> tuple[int, ...]:
    """Which of its program's results each output of a workload's graph is, for one whose source was checked."""
    for side in _sides(workload.source):
        fingerprint, binding = rederived(workload, side)
        if fingerprint == workload.fingerprint:
            return binding.outputs
    raise Unsupported("the stored program is not what the workload was made of")


def rederived(workload: Workload, side: str) -> tuple[str, Binding]:
    """Fingerprint of the graph of a workload's program, and how the program's tensors meet that. Computes nothing."""
    module = traced(workload.source, side)
    made, binding = workload_of(module, str(workload.spec.get("precision", "")), dict(workload.source))
    return made.fingerprint, binding

"""Inspection of programs without running them: a preview of a target's regions, and checks of stored programs.

If the device is present, a target is captured on it, as in a search. Else it is captured on the CPU over fake tensors,
which have shapes but no data, with the sizes for the device. Operators that the CPU implements differently (attention,
convolutions) are never part of a region.

``Workload.source`` is not part of a workload's identity, and anyone with write access to a shared database can change
it. It is therefore lowered again before it is used. A program that lowers to the same graph computes the workload on
the same inputs; no other program runs as the user's baseline.

The cost of a region in eager mode is one kernel for each aten operator, with its tensors in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from autotune.compiler.capture.options import requirements
from autotune.compiler.lower.facts import UNKNOWN_BYTES, GraphFacts, moved_bytes
from autotune.compiler.lower.op_names import GENERATORS, VIEWS
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
    """A distinct region, its number of occurrences, and the ``reason`` why Inductor compiles it, or ""."""

    region: Region
    count: int
    reason: str


@dataclass(frozen=True)
class Outside:
    """Calls of one operator that Inductor compiles for one reason.

    Attributes:
        bytes: total bytes that they read and write; None if their sizes are unknown.
    """

    operator: str
    count: int
    bytes: int | None
    reason: str


@dataclass(frozen=True)
class Planned:
    """A target's regions, and the operators outside them.

    Attributes:
        regions: distinct regions in order of appearance, followed by those that cannot be tuned.
        outside: operators outside all regions with their counts: matrix products, convolutions, attention, and
            operators without a lowering rule.
        why: the same operators by reason, plus those of regions that Inductor compiles; most bytes first.
        gradients: capture modes (:func:`autotune.domains.fusion.program_spec.gradients_of`).
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
    """The distinct regions of a target, and the operators outside them.

    Args:
        target, inputs: as in ``autotune search``.
        device: "cpu", "cuda" or "cuda:N"; this machine need not have it.
        train: also capture the backward pass, whatever requires a gradient.

    Raises:
        UserError: as :func:`autotune.domains.fusion.program_spec.resolve`, or the callable fails on its inputs.
    """
    if here(device):
        fn, call, label = resolve(target, inputs, device)
        return _regions(fn, *call, label, train, side_of(device))
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Make the callable outside the fake mode: its module may keep the weights, which must be real tensors.
    builtin = BUILTIN.get(target) if inputs is None else None
    if builtin is None and ":" not in target:
        resolve(target, inputs, "cpu")  # raises the error
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
    # Inputs or a program that read data need real tensors.
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
    """The Inductor option that requires results that stored kernels do not produce; "" if none is set."""
    precision = str(region.workload.spec.get("precision", "")) if region.workload else ""
    return next((f"option {one.partition(' ')[0]} of Inductor" for one in requirements(side, precision)), "")


def check_graph(workload: Workload) -> str:
    """The reason why a stored workload's graph is invalid; "" if it is valid."""
    try:
        Graph.from_json(workload.spec)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        return f"its graph is damaged ({error})"
    return ""


def check_source(workload: Workload) -> str:
    """The reason why a workload's program must not run; "" if it matches the workload, or there is no program.

    The same operators produce results of different dtypes on different devices (a layer norm's statistics, for
    example). The program is lowered for the device of its capture first, then for the other one.

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
        except Exception as error:  # torch raises many types for an invalid program
            why = why or f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            continue
        if fingerprint == workload.fingerprint and list(binding.inputs) == list(workload.source.get("slots", ())):
            return ""
        why = why or "it computes something else"
    return f"the stored program is not what the workload was made of: {why}"


def _sides(source: Mapping[str, Any]) -> list[str]:
    """The device types to lower for, the program's own first."""
    inputs = source.get("inputs")
    first = inputs[0] if isinstance(inputs, Sequence) and inputs else None
    own = first.get("device") if isinstance(first, Mapping) else None
    return sorted(_SIDES, key=lambda side: side != own)


def results_of(workload: Workload) -> tuple[int, ...]:
    """For each output of the workload's graph, the index of the program's result; the source must have been checked."""
    for side in _sides(workload.source):
        fingerprint, binding = rederived(workload, side)
        if fingerprint == workload.fingerprint:
            return binding.outputs
    raise Unsupported("the stored program is not what the workload was made of")


def rederived(workload: Workload, side: str) -> tuple[str, Binding]:
    """The fingerprint of the graph of a workload's program, and the binding of its tensors. Executes nothing."""
    module = traced(workload.source, side)
    made, binding = workload_of(module, str(workload.spec.get("precision", "")), dict(workload.source), once=False)
    return made.fingerprint, binding


@dataclass(frozen=True)
class EagerCost:
    """Kernels and bytes of a region in eager mode.

    ``operators`` counts the kernels by aten operator, in order of appearance. Both numbers are lower bounds: an
    operator that eager mode computes in several kernels (``logsumexp``, a layer norm's backward) counts as one that
    reads its arguments and writes its results once.
    """

    kernels: int
    bytes: int
    operators: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"kernels": self.kernels, "bytes": self.bytes, "operators": dict(self.operators)}


def eager_cost(gm: fx.GraphModule) -> EagerCost:
    """The cost of a region's submodule, whose nodes have fake tensors and the operator they were decomposed from.

    Views cost nothing. A broadcast tensor is read once, and each element counts once. Connected nodes from one operator
    are one kernel, or one for each occurrence of that operator among them.
    """
    facts = GraphFacts(gm.graph)
    names: dict[str, int] = {}
    total = 0
    for nodes in _operators(facts):
        name = facts[nodes[0]].origin or str(nodes[0].target)
        names[name] = names.get(name, 0) + max(1, sum(facts[n].operator == name for n in nodes))
        total += moved_bytes(facts, nodes, name)
    return EagerCost(sum(names.values()), total, names)


def _operators(facts: GraphFacts) -> list[list[fx.Node]]:
    """The nodes that compute, grouped by the operator that they were decomposed from."""
    owner: dict[fx.Node, list[fx.Node]] = {}
    for node in facts.nodes:
        is_view = facts[node].operator in VIEWS or getattr(node.target, "is_view", False)
        if node.op != "call_function" or is_view or facts[node].operator in GENERATORS:
            continue
        group = [node]
        for given in node.all_input_nodes:
            theirs = owner.get(given)
            if theirs is None or theirs is group:
                continue
            if facts[node].operator == "getitem" or facts[given].origin == facts[node].origin:
                theirs += group
                for n in group:
                    owner[n] = theirs
                group = theirs
        for n in group:
            owner[n] = group
    return list({id(nodes): nodes for nodes in owner.values()}.values())

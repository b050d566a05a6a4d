"""A target's regions without running it: captured over tensors that have shapes but no data, and no GPU.

Where the device is there, the target is captured on it as a search would. Otherwise it is captured on the CPU, with the
sizes meant for the device; operators that the CPU implements otherwise (attention, convolutions) are none of ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autotune.compiler.lower.op_names import GENERATORS, VIEWS
from autotune.compiler.lower.translate import op_name
from autotune.compiler.regions.find import Region, find_regions
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
from autotune.errors import UserError


@dataclass(frozen=True)
class PlannedRegion:
    """A distinct region of a target and how often it occurs; ``region.workload`` is None where it cannot be tuned."""

    region: Region
    count: int


@dataclass(frozen=True)
class Planned:
    """What a target consists of.

    Attributes:
        regions: the distinct ones in order of appearance, those that cannot be tuned last.
        outside: operators that are in none of them, with how often each occurs: matrix products, convolutions and
            attention, and what no rule knows.
        gradients: how it was captured (:func:`autotune.domains.fusion.program_spec.gradients_of`).
    """

    regions: Sequence[PlannedRegion]
    outside: Mapping[str, int]
    gradients: Sequence[bool]


def outside(graph: fx.Graph, regions: Iterable[Region]) -> Counter[str]:
    """Operators of a captured graph that are in no region, with how often each occurs; those that move nothing do not
    count."""
    inside = {n for r in regions for n in r.nodes}
    nodes = [n for n in graph.nodes if n.op == "call_function" and n not in inside]
    names = (op_name(n) or str(n.target) for n in nodes)
    return Counter(n for n in names if n not in VIEWS and n not in GENERATORS and n != "getitem")


def here(device: str) -> bool:
    """Whether this machine has the device."""
    if side_of(device) == "cpu":
        return True
    return torch.cuda.is_available() and (torch.device(device).index or 0) < torch.cuda.device_count()


def planned(target: str, inputs: str | None, device: str, *, train: bool = False) -> Planned:
    """The distinct regions of a target, and what is outside them.

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
    rest: Counter[str] = Counter()
    found: dict[str, Region] = {}
    for graphs in captures(fn, args, kwargs, label, train=train):
        once: Counter[str] = Counter()
        left: Counter[str] = Counter()
        for graph in graphs:
            regions = find_regions(graph.module, side)
            for region in regions:
                key = region.workload.fingerprint if region.workload else f"none {region.reason} {region.nodes}"
                found.setdefault(key, region)
                once[key] += 1
            left += outside(graph.module.graph, regions)
        counts |= once
        rest |= left
    if len(found) == 1:
        found = {k: replace(r, workload=r.workload and named_after(label, r.workload)) for k, r in found.items()}
    distinct = [PlannedRegion(region, counts[key]) for key, region in found.items()]
    modes = gradients_of(fn, args, kwargs, train=train)
    return Planned(sorted(distinct, key=lambda p: p.region.workload is None), dict(rest.most_common()), modes)

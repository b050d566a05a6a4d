"""Methods of the fusion search: the full search, and the search without one of its parts.

Their names are defined only here. ``autotune search --plans`` and ``--ablation``, ``autotune.search(plans=...,
ablation=...)`` and the benchmarks' ablation table use them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autotune.errors import UserError


@dataclass(frozen=True)
class Method:
    """A way to search a region.

    Attributes:
        about: a description of one line.
        plans: "measured" tunes the groups of the most promising plans and chooses by measured time. "model" takes the
            plan that the cost model ranks first, "greedy" the plan with the largest groups. "any" draws plans without
            a model.
        search: True to search schedules; if False, the latency model chooses them.
        model: True if the latency model suggests schedules and excludes hopeless ones from measurement.
        packing: True if independent groups may share a launch.
    """

    about: str
    plans: str = "measured"
    search: bool = True
    model: bool = True
    packing: bool = True


FULL = "full"
METHODS: Mapping[str, Method] = {
    FULL: Method("everything"),
    "greedy": Method("the largest groups only, their schedules searched", plans="greedy"),
    "model-plan": Method("the plan the cost model likes best, its schedules searched", plans="model"),
    "model": Method("plan and schedules by the cost models, nothing searched", plans="model", search=False),
    "no-model": Method("plans and schedules searched without the cost models", plans="any", model=False),
    "no-pack": Method("without packing of independent groups", packing=False),
}
ABLATIONS = (FULL, "greedy", "model", "no-model", "no-pack")
"""The methods of the ablation table."""
PLANS: Mapping[str, str] = {"measured": FULL, "model": "model-plan", "greedy": "greedy"}
"""The method for each choice of ``plans``."""


def method(name: str) -> Method:
    """The method of a name; "" is the whole. Raises UserError where there is none."""
    return METHODS[_known(name or FULL, METHODS, "method")]


def choose(plans: str, ablation: str) -> tuple[str, bool]:
    """The method of a search, and whether schedules are searched. Raises UserError where a name is unknown, or both
    take something away."""
    _known(plans, PLANS, "way to choose plans")
    _known(ablation, ABLATIONS, "ablation")
    if ablation != FULL and plans != "measured":
        raise UserError(f"plans={plans!r} and ablation={ablation!r} exclude each other: use one of them")
    name = ablation if ablation != FULL else PLANS[plans]
    return ("" if name == FULL else name), METHODS[name].search


def _known(name: str, names: Iterable[str], what: str) -> str:
    if name in names:
        return name
    close = difflib.get_close_matches(name, list(names), 1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
    raise UserError(f"unknown {what} {name!r}; {hint}")

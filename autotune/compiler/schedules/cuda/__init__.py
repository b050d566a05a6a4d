"""Schemes: the forms of kernel a group of operators may become on CUDA.

Which scheme a group has follows from its graph alone: the first by rank that fits. So a plan is legal if
each of its groups has a scheme, and deployment needs no more than the plan to know them.

=========  ===========================================================================================================
transpose  no reductions, tensors with unit stride along different axes: tiles that go through shared memory
flat       no reductions: every element is independent
rows       reductions over one set of axes, everything else row by row: thread, warp, block or cluster scope
columns    as ``flat`` or ``rows``, with reductions over all the rows beside: per-block partials, finished by a second
           kernel
outer      reductions over outer axes, results used again at full size: threads side by side on the axis that stays
scatter    sums at places that other data tell: each block scans the places for those of its rows
tile       as ``outer``, with reductions over the unit-stride axis beside, both inside small tiles
=========  ===========================================================================================================
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from autotune.compiler.schedules.configurations import Choices
from autotune.errors import Unsupported
from autotune.ir.graph import has_sum_at

if TYPE_CHECKING:
    from autotune.compiler.targets.cuda.kernels import GroupKernels
    from autotune.ir.graph import Graph
    from autotune.task import Config


class Scheme(Choices, Protocol):
    """One form of kernel. All functions take the graph of one group (canonical, see
    ``autotune.compiler.planner.plan``).
    """

    name: str
    rank: int
    """Schemes are tried by rank; the first that fits takes the group."""
    packs: bool
    """Whether groups of it may share launches: it is one kernel of any block size, whose blocks do not wait."""

    def check(self, graph: Graph) -> None:
        """Raise Unsupported unless this scheme can run the group."""
        ...

    def threads(self, config: Config) -> str:
        """How threads are laid out, in words."""
        ...

    def home(self, graph: Graph, i: int, config: Config) -> str:
        """Where the parts of reduction ``i`` meet: "thread", "warp", "block", "cluster" or "grid"."""
        ...

    def emit(self, graph: Graph, config: Config, sms: int, fixed: bool = False) -> GroupKernels:
        """The group's kernels for a device of ``sms`` multiprocessors.

        ``fixed``: take no extent as an argument (``launch["dynamic"]`` is False). Raises Unsupported.
        """
        ...


@lru_cache(maxsize=1)
def schemes() -> dict[str, Scheme]:
    """Every scheme by its name, in the order in which they are tried; each is a file here with a ``SCHEME``."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    found: list[Scheme] = [m.SCHEME for m in modules if hasattr(m, "SCHEME")]
    return {scheme.name: scheme for scheme in sorted(found, key=lambda scheme: scheme.rank)}


@lru_cache(maxsize=512)
def scheme_of(graph: Graph) -> Scheme:
    """The CUDA scheme of a group. Remembered: planning, configuring and printing a group ask for it anew.

    Raises:
        Unsupported: no scheme fits; the message is that of the last one tried.
    """
    if has_sum_at(graph):
        return first_fit(graph, ("scatter",))
    return first_fit(graph, schemes())


def first_fit(graph: Graph, names: Iterable[str]) -> Scheme:
    """The first of these schemes that fits a group.

    Raises:
        Unsupported: none does; the message is that of the last one.
    """
    why = Unsupported("no scheme")
    for name in names:
        try:
            schemes()[name].check(graph)
        except Unsupported as error:
            why = error
            continue
        return schemes()[name]
    raise why


def legal(graph: Graph, target: str) -> bool:
    """Whether a group has a kernel on ``target`` ("cuda" or "cpu")."""
    try:
        if target == "cuda":
            scheme_of(graph)
        elif has_sum_at(graph):
            return False
        else:
            from autotune.compiler.targets.cpu.columns import column_split, row_wise

            return row_wise(graph) or column_split(graph) is not None
    except Unsupported:
        return False
    return True

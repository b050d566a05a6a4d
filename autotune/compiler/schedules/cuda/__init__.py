"""Schemes: the forms of kernel for a group of operators on CUDA.

The scheme of a group depends on its graph alone: it is the first by rank that fits. So a plan is legal if each of its
groups has a scheme, and deployment finds the schemes from the plan alone.

============  =========================================================================================================
transpose     no reductions, tensors with unit stride along different axes: tiles that go through shared memory
flat          no reductions: every element is independent
rows          reductions over one set of axes, everything else row by row: thread, warp, block or cluster scope
columns       as ``flat`` or ``rows``, and reductions over all the rows: per-block partials, finished by a second
              kernel
outer         reductions over outer axes, results used again at full size: adjacent threads along the kept axis
interleaved   as ``columns``, for rows of short pieces between those of other rows: group norm in channels last
scatter       index-add: each block scans the indices for those of its rows
scatter_rows  index-add along rows, each with its own indices: a warp places the terms of a sum side by side
tile          as ``outer``, and reductions over the unit-stride axis, both inside small tiles
batched       as ``columns``, with separate sums for each set of rows: of the tokens of an image, of all windows
============  =========================================================================================================
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import abstractmethod
from collections.abc import Iterable
from functools import lru_cache
from typing import ClassVar, NamedTuple

from autotune.compiler.schedules.configurations import Choices
from autotune.compiler.targets.cuda.compile import too_large
from autotune.compiler.targets.cuda.device import shared_bytes
from autotune.compiler.targets.cuda.source import CudaSchedule, CudaSource, GroupKernels
from autotune.errors import Unsupported
from autotune.ir.graph import Graph, has_sum_at
from autotune.task import Choice, Config
from autotune.words import plural

CAPS = (32, 40, 48, 56, 64, 80, 96, 128)
"""Register caps in the search space."""
SMS = 132
"""Number of multiprocessors for which default schedules are made; a search adapts to other devices."""


class Scheme(Choices):
    """One form of kernel. All methods take the graph of one group (canonical, see
    ``autotune.compiler.planner.plan``). A scheme of one kernel is a :meth:`source` and its choices.

    Attributes:
        rank: schemes are tried by rank; the first that fits takes the group.
        packs: True if its groups may share launches: it is one kernel for any block size, without waits between blocks.
        in_default: False if greedy plans leave the scheme out. Stored configurations may have these plans unnamed.
        schedule: the class of its parameters.
    """

    name: ClassVar[str]
    rank: ClassVar[int]
    packs: ClassVar[bool] = True
    in_default: ClassVar[bool] = True
    schedule: ClassVar[type[CudaSchedule]] = CudaSchedule

    @abstractmethod
    def check(self, graph: Graph) -> None:
        """Raise Unsupported unless this scheme can run the group."""

    def source(self, graph: Graph, config: Config, fixed: bool = False) -> CudaSource:
        """The kernel of a one-kernel scheme; see :meth:`emit`."""
        raise NotImplementedError

    def emit(self, graph: Graph, config: Config, sms: int, fixed: bool = False) -> GroupKernels:
        """The group's kernels for a device of ``sms`` multiprocessors.

        ``fixed``: take no extent as an argument (``launch["dynamic"]`` is False). Raises Unsupported.
        """
        return GroupKernels.single(self.source(graph, config, fixed), graph)

    def main(self, graph: Graph, config: Config) -> CudaSource:
        """The kernel that limits what a configuration may be."""
        return self.source(graph, config)

    def reject(self, graph: Graph, config: Config) -> str | None:
        """The reason why ``config`` cannot work, found by building the kernel in a few milliseconds, or None."""
        made = self.block(graph, config)
        return made if isinstance(made, str) else too_large(made.shared, made.threads, int(config["max_registers"]))

    def distinct(self, graph: Graph, default: Config, configs: Iterable[Config]) -> list[Config]:
        """The normalized ``configs`` that may work, each once, without ``default``."""
        made: list[Config] = []
        for config in (self.normalize(graph, c) for c in configs):
            if config != default and config not in made and self.reject(graph, config) is None:
                made.append(config)
        return made

    def first_accepted(self, graph: Graph, configs: Iterable[Config]) -> Config:
        """The first of ``configs``, normalized, that is not rejected; the last one if all are."""
        made = [self.normalize(graph, c) for c in configs]
        return next((c for c in made if self.reject(graph, c) is None), made[-1])

    def block(self, graph: Graph, config: Config) -> Block | str:
        """The block of :meth:`main`, or the reason why there is no such kernel; cached."""
        return _block(self, graph, tuple((k, _WITHOUT_EFFECT.get(k, v)) for k, v in sorted(config.items())))

    def threads(self, config: Config) -> str:
        """The layout of threads, in words."""
        t, r = int(config["threads_per_row"]), int(config.get("rows_per_block", 1))
        return f"{plural(t, 'thread')} a row, {plural(r, 'row')} a block"

    def home(self, graph: Graph, i: int, config: Config) -> str:
        """The scope of reduction ``i``: "thread", "warp", "block", "cluster" or "grid"."""
        threads = int(config.get("threads_per_row", 256))
        if int(config.get("cluster", 1) or 1) > 1:
            return "cluster"
        return "thread" if threads <= 1 else "warp" if threads <= 32 else "block"


class Block(NamedTuple):
    """Threads of a block, and bytes of its shared memory."""

    threads: int
    shared: int


_WITHOUT_EFFECT: Config = {"load_hint": "default", "store_hint": "default", "max_registers": 0}
"""Parameters that change neither the size of a block nor whether there is a kernel."""


@lru_cache(maxsize=4096)
def _block(scheme: Scheme, graph: Graph, settings: tuple[tuple[str, Choice], ...]) -> Block | str:
    try:
        source = scheme.main(graph, dict(settings))
    except Unsupported as error:
        return str(error)
    return Block(source.block, int(source.launch["shared"]) + shared_bytes(source.body))


def block_of(threads: int, rows: int) -> int:
    """``rows`` of a block, halved or doubled until it has a legal number of threads."""
    while rows * threads > 1024:
        rows //= 2
    while rows * threads < 64:
        rows *= 2
    return max(1, rows)


@lru_cache(maxsize=1)
def schemes() -> dict[str, Scheme]:
    """Every scheme by name, in order of rank: the objects of class :class:`Scheme` in the modules of this package."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    found = [made for m in modules for made in vars(m).values() if isinstance(made, Scheme)]
    return {scheme.name: scheme for scheme in sorted(found, key=lambda scheme: scheme.rank)}


@lru_cache(maxsize=512)
def scheme_of(graph: Graph) -> Scheme:
    """The CUDA scheme of a group, cached for planning, configuring and printing.

    Raises Unsupported if no scheme fits, with the message of the last one tried.
    """
    if 0 in graph.extents:
        raise Unsupported("an empty axis")
    return first_fit(graph, ("scatter", "scatter_rows") if has_sum_at(graph) else schemes())


def first_fit(graph: Graph, names: Iterable[str]) -> Scheme:
    """The first of these schemes that fits a group. Raises Unsupported if none does, with the message of the last."""
    why = Unsupported("no scheme")
    for name in names:
        try:
            schemes()[name].check(graph)
            return schemes()[name]
        except Unsupported as error:
            why = error
    raise why


def legal(graph: Graph, target: str, *, default: bool = False) -> bool:
    """True if a group has a kernel on ``target`` ("cuda" or "cpu").

    Args:
        default: only count kernels that greedy plans may have.
    """
    if target == "cpu":
        from autotune.compiler.targets.cpu.columns import column_split, row_wise

        return not has_sum_at(graph) and (row_wise(graph) or column_split(graph) is not None)
    try:
        return scheme_of(graph).in_default or not default
    except Unsupported:
        return False

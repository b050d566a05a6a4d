"""The joined products of a program by size, the strategies that a search tries for each, the lines between ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autotune.domains.c3.fsdp.steps import Plan, Tried
from autotune.domains.c3.group import deploy_group, exists
from autotune.domains.c3.match import C3Level
from autotune.domains.c3.ready import decide, look_up
from autotune.domains.c3.scenario import ITEMSIZE, Program, Scenario
from autotune.domains.c3.strategy import SM_BLOCKS, HostStrategy, Strategy
from autotune.domains.c3.tensor_parallel.outbox import Exchange
from autotune.domains.c3.tensor_parallel.products import Line
from autotune.errors import Unsupported
from autotune.runtime.deployment import deployment
from autotune.task import Config

PREFIX = "tensor_parallel:"
"""Begins the names of these computations in scenarios."""


@dataclass(frozen=True, order=True)
class Site:
    """Products of one size that run with the same strategy, at any place of the program.

    Attributes:
        op: "all_gather" before the products, or "reduce_scatter" behind them.
        rows, width, inner: the extents M, N and K on a rank; N or K is summed over several factors.
        dtype: "bf16", "f16" or "f32".
        ranks: number of ranks of the group.
        group: name of the process group, valid only in this process.
    """

    op: str
    rows: int
    width: int
    inner: int
    dtype: str
    ranks: int
    group: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the larger buffer of the collective."""
        return self.rows * (self.inner if self.op == "all_gather" else self.width) * ITEMSIZE[self.dtype]

    @property
    def scenario(self) -> Scenario:
        """The scenario of a look-up. The number of rows is in its bytes alone, so that neighbours differ in it."""
        return Scenario(Program(f"{PREFIX}{self.width}x{self.inner}"), self.op, self.nbytes, self.ranks, self.dtype)


class Sites:
    """All sites of this process.

    Attributes:
        seen: calls by site, since the counter was cleared.
        chosen: strategy by site; None is the group's own collective and one product. A site is looked up in its first
            call.
        stored: sites whose own search is in the database.
        db: database of the look-ups; None for the default one.
        searching: a search has not ended, so that graphs join all products.
    """

    def __init__(self) -> None:
        self.seen: Counter[Site] = Counter()
        self.chosen: dict[Site, Config | None] = {}
        self.stored: set[Site] = set()
        self.db: str | None = None
        self.searching = False
        self._lines: dict[str, tuple[dist.ProcessGroup, Line]] = {}

    def strategy(self, site: Site, line: Line, device: torch.device) -> Config | None:
        """Count a call, and return its strategy. A collective call the first time."""
        self.seen[site] += 1
        try:
            return self.chosen[site]
        except KeyError:
            self.chosen[site] = found = self._look_up(site, line, device)
            return found

    def identity(self) -> str:
        """The settings that compiled graphs depend on, apart from the default database."""
        return f"{self.searching}{deployment().state(self.db)!r}" if self.db else str(self.searching)

    def wants(self, site: Site, device: torch.device) -> bool:
        """True if graphs should join these products: a search runs, or has found that faster.

        Not a collective call: the caller has made sure that the ranks have equal databases.
        """
        if site in self.chosen or self.searching:
            return self.searching or self.chosen[site] is not None
        match = look_up(site.scenario, str(device), self.db)
        schedule = match.schedule
        return match.level is not C3Level.DEFAULT and schedule is not None and schedule.config is not None

    def _look_up(self, site: Site, line: Line, device: torch.device) -> Config | None:
        """The stored strategy; None if there is none, or the stock program was faster."""
        if site.ranks < 2:
            return None
        match = decide(site.scenario, deploy_group(line.group, device), db=self.db)
        if match.level is C3Level.DEFAULT or match.schedule is None:
            return None
        if match.level is C3Level.EXACT:
            self.stored.add(site)
        line.take(match.artifact, site.dtype)
        return None if match.schedule.config is None else dict(match.schedule.config)

    def line(self, name: str, device: torch.device) -> Line:
        """The ranks of the process group ``name``. A collective call the first time."""
        group = resolve(name)
        known = self._lines.get(name)
        if known is None or known[0] is not group:  # a name may be used again
            known = self._lines[name] = group, _open(group, device)
        return known[1]

    def forget(self) -> None:
        """Forget the strategies, and free the buffers. A collective call, between two steps."""
        for name, (group, line) in list(self._lines.items()):
            if not exists(group):
                del self._lines[name]
            elif line.exchange is not None:
                line.exchange.close()
        self.searching = False
        self.chosen.clear()
        self.stored.clear()
        self.seen.clear()


def _open(group: dist.ProcessGroup, device: torch.device) -> Line:
    exchange = None
    if device.type == "cuda":
        try:
            exchange = Exchange(deploy_group(group, device))
        except Unsupported as error:  # on all ranks alike
            if dist.get_rank(group) == 0:
                text = f"autotune: products and collectives run one after the other: {error}"
                deployment().warn_once("tensor parallel", text)
    return Line(group, exchange)


def resolve(name: str) -> dist.ProcessGroup:
    """The process group of this name."""
    found: Any = dist.distributed_c10d
    group: dist.ProcessGroup = found._resolve_process_group(name)
    return group


sites = Sites()
"""The sites of this process."""


def candidates(site: Site, side: str) -> list[Config]:
    """The strategies of a site other than the group's own collective, most frequent winners first.

    On CUDA devices ``chunks`` is the number of products, see
    :func:`autotune.domains.c3.tensor_parallel.panels.panels`. Order "gemm_first" puts products on one stream and copies
    on another. Order "comm_first" uses two streams of each, so that rows do not wait for an earlier panel's product.
    """
    if side == "cpu":
        return [HostStrategy("gemm_first", "copy").config()]
    ranks = site.ranks
    doubling = [ranks.bit_length()] if ranks & (ranks - 1) == 0 else []
    both = [("comm_first", n) for n in (ranks, *doubling, 2 * ranks)]
    one = [("gemm_first", n) for n in (ranks, *doubling, 1, 2 * ranks)]
    tried = dict.fromkeys([both[0], one[0], *both[1:], *one[1:]])
    return [Strategy(order, "copy", "comm", ctas=SM_BLOCKS, chunks=chunks).config() for order, chunks in tried]


def plans(stock: Plan, heavy: Sequence[Site], side: str, tried: Tried) -> Iterator[dict[Site, Config | None]]:
    """Plans, most promising first.

    The first plans give all gathers, then all scatters, the same candidate. Changes to one site at a time follow, sites
    with the most bytes first.
    """
    yield {**stock, **{site: candidates(site, side)[0] for site in heavy}}
    for op in ("all_gather", "reduce_scatter"):
        sites = [site for site in heavy if site.op == op]
        for nth in range(max((len(candidates(site, side)) for site in sites), default=0)):
            yield from _new(tried, {site: c[nth] for site in sites if nth < len(c := candidates(site, side))})
    for site in heavy:
        for choice in [None, *candidates(site, side)]:
            yield from _new(tried, {site: choice})


def _new(tried: Tried, change: Plan) -> Iterator[dict[Site, Config | None]]:
    """The best plan so far with a change, unless it was tried."""
    best, _ = min(tried, key=lambda entry: entry[1])
    plan = {**best, **change}
    if all(plan != other for other, _ in tried):
        yield plan

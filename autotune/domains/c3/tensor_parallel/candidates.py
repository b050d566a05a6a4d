"""The strategies that a search of tensor-parallel layers tries, and their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autotune.domains.c3.fsdp.steps import Plan, Tried
from autotune.domains.c3.strategy import SM_BLOCKS, HostStrategy, Strategy
from autotune.domains.c3.tensor_parallel.sites import Site
from autotune.task import Config


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

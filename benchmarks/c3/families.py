"""Families of strategies, each with a single means: the tuned strategy is compared with them.

``naive`` is what a program does that enqueues both, ``naive_swapped`` the same in the other order. ``order`` chooses
who is enqueued first and whose stream has priority, ``partition`` limits both sides' SMs, and ``copy_engine`` takes the
collective off the SMs: ConCCL's three steps. Every member is measured like any other candidate of the search.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from autotune.domains.c3.scenario import REDUCING
from autotune.domains.c3.strategy import BASELINES, KINDS, HostStrategy, Strategy, current
from autotune.task import Config

AS_THEY_ARE = ("naive", "naive_swapped")
"""Families of one strategy, which is compared whatever the search came to."""

_ORDERS = ("comm_first", "gemm_first")
_LIMITS = ((16, 0), (32, 0), (0, 16), (32, 32))
"""Thread blocks of the collective, and SMs kept from the computation; 0 for no limit."""


def families(side: str, collective: str) -> Mapping[str, list[Config]]:
    """Each family's members.

    Args:
        side: "cuda" or "cpu".
        collective: one that adds needs a kernel in addition to the copies, whose blocks are chosen too.
    """
    return _host() if side == "cpu" else _cuda(collective in REDUCING)


def fixed(side: str) -> list[Config]:
    """Strategies that could be used everywhere, and so are in every comparison."""
    if side == "cpu":
        return [HostStrategy(order, engine).config() for order, engine in product(_ORDERS, ("gloo", "copy"))]
    return [Strategy(order, "copy", priority="comm", ctas=128).config() for order in _ORDERS]


def label(config: Mapping[str, object], side: str) -> str:
    """A strategy in a few words."""
    found: str = KINDS[side].of(config).label
    return found


def from_label(text: str, side: str) -> Config:
    """The strategy that :func:`label` describes so."""
    plain = KINDS[side]().config()
    engine, order, *rest = text.split()
    config: Config = {**plain, "engine": engine, "order": order}
    for name, _, value in (word.partition("=") for word in rest):
        if name in plain:  # files of earlier versions have more
            config[name] = type(plain[name])(value)
    return current(config, side)


def _cuda(adds: bool) -> dict[str, list[Config]]:
    copies = [Strategy(order, "copy", priority="comm").config() for order in _ORDERS]
    if adds:
        copies = [Strategy(order, "copy", priority="comm", ctas=128, chunks=chunks).config()
                  for order, chunks in product(_ORDERS, (1, 2))]  # fmt: skip
        copies += [Strategy(order, "copy", priority="comm", reserve=r, ctas=32, chunks=4).config()
                   for order, r in product(_ORDERS, (4, 8))]  # fmt: skip
    return {
        "naive": [BASELINES["cuda"]["naive"]],
        "naive_swapped": [Strategy(order="comm_first").config()],
        "order": [Strategy(order, "nccl", priority=p).config()
                  for order, p in product(_ORDERS, ("equal", "comm"))],
        "partition": [Strategy(order, "nccl", priority="comm", ctas=c, reserve=r).config()
                      for order, (c, r) in product(_ORDERS, _LIMITS)],
        "copy_engine": copies,
    }  # fmt: skip


def _host() -> dict[str, list[Config]]:
    return {
        "naive": [BASELINES["cpu"]["naive"]],
        "naive_swapped": [HostStrategy(order="gemm_first").config()],
        "order": [HostStrategy(order, "gloo").config() for order in _ORDERS],
        "partition": [HostStrategy(order, "gloo", threads=n).config() for order, n in product(_ORDERS, (1, 2))],
        "copy_engine": [HostStrategy(order, "copy", copies=n).config() for order, n in product(_ORDERS, (1, 2))],
    }

"""How the two share the devices: the searched configuration, and which of its values mean something together.

A strategy is a flat :data:`autotune.task.Config`, as ``search_spaces/c3.toml`` lists it: section ``cuda`` or ``cpu``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autotune.domains.c3.scenario import REDUCING, Gemm, Scenario
from autotune.task import Config

SM_BLOCKS = 16
"""Blocks of a Numba kernel where ``ctas`` is 0."""


NCCL_MOST = 64
"""Thread blocks that NCCL may be limited to, at most."""


@dataclass(frozen=True)
class Strategy:
    """A strategy on CUDA devices; the fields are the parameters of ``[cuda]``."""

    order: str = "sequential"
    engine: str = "nccl"
    launch: str = "graph"
    priority: str = "equal"
    reserve: int = 0
    ctas: int = 0
    chunks: int = 1
    panels: int = 1
    streams: int = 1
    direction: str = "push"
    batch: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Strategy:
        """From a configuration; names that are missing keep their default."""
        return cls(**{name: config[name] for name in cls.__dataclass_fields__ if name in config})

    def config(self) -> Config:
        return asdict(self)

    @property
    def blocks(self) -> int:
        """Thread blocks of a Numba kernel."""
        return self.ctas or SM_BLOCKS

    @property
    def label(self) -> str:
        """The engine, the order and what differs from the default, such as ``copy comm_first reserve=8``."""
        plain, own = Strategy().config(), self.config()
        rest = [f"{k}={v}" for k, v in own.items() if k not in ("order", "engine") and v != plain[k]]
        return " ".join([self.engine, self.order, *rest])


@dataclass(frozen=True)
class HostStrategy:
    """A strategy on CPUs; the fields are the parameters of ``[cpu]``."""

    order: str = "sequential"
    engine: str = "gloo"
    threads: int = 0
    copies: int = 1
    chunks: int = 1
    panels: int = 1

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> HostStrategy:
        """From a configuration; names that are missing keep their default."""
        return cls(**{name: config[name] for name in cls.__dataclass_fields__ if name in config})

    def config(self) -> Config:
        return asdict(self)

    @property
    def label(self) -> str:
        plain, own = HostStrategy().config(), self.config()
        rest = [f"{k}={v}" for k, v in own.items() if k not in ("order", "engine") and v != plain[k]]
        return " ".join([self.engine, self.order, *rest])


SEQUENTIAL = Strategy().config()
"""What a user has without overlap: the computation, then NCCL's collective."""
NAIVE = Strategy(order="gemm_first").config()
"""What a user has with overlap on two streams: the computation is enqueued first, then NCCL's collective."""
HOST_SEQUENTIAL = HostStrategy().config()
HOST_NAIVE = HostStrategy(order="comm_first").config()
"""gloo's asynchronous call, then the computation."""


Range = tuple[int, int] | tuple[str, ...] | None
LIMITS: Mapping[str, Mapping[str, Range]] = {
    "cuda": {
        "order": ("sequential", "comm_first", "gemm_first"),
        "engine": ("nccl", "copy", "sm"),
        "launch": ("graph", "eager"),
        "priority": ("equal", "comm", "gemm"),
        "reserve": (0, 128),
        "ctas": (0, 256),
        "chunks": (1, 64),
        "panels": (1, 64),
        "streams": (1, 8),
        "direction": ("push", "pull"),
        "batch": None,
    },
    "cpu": {
        "order": ("sequential", "comm_first", "gemm_first"),
        "engine": ("gloo", "copy"),
        "threads": (0, 64),
        "copies": (1, 32),
        "chunks": (1, 64),
        "panels": (1, 64),
    },
}
"""For each side, its parameters: the words there are, the smallest and the largest number, None for a truth value. No
strategy that a search tries lies outside."""


def improper(config: Mapping[str, Any], side: str) -> str:
    """Why a stored strategy is none of ours, whoever wrote the database; "" where it may be one.

    Args:
        side: "cuda" or "cpu".
    """
    for name, value in config.items():
        if name not in LIMITS[side]:
            return f"it has a parameter {name[:40]!r}, which this autotune lacks"
        limits = LIMITS[side][name]
        if limits is None:
            fits = type(value) is bool
        elif isinstance(limits[0], str):
            fits = type(value) is str and value in limits
            if not fits and type(value) is str:
                return f"this autotune has no {name} {value[:40]!r}"
        else:
            fits = type(value) is int and int(limits[0]) <= value <= int(limits[1])
        if not fits:
            return f"{name} = {repr(value)[:40]} is out of range"
    return ""


def normalize(config: Config, scenario: Scenario, side: str) -> Config:
    """The strategy that would in effect run, with what plays no part set to its default.

    Args:
        side: "cuda" or "cpu".
    """
    c = dict(config)
    if not isinstance(scenario.compute, Gemm):
        c["panels"] = 1
    if side == "cpu":
        if c["engine"] != "copy":
            c["copies"] = 1
        if c["order"] == "sequential":
            c.update(chunks=1, panels=1)
        return c
    reducing = scenario.collective in REDUCING
    engine = c["engine"]
    if c["order"] == "sequential":
        c.update(priority="equal", reserve=0, panels=1)
    if engine != "copy":
        c.update(streams=1, batch=False)
        if engine == "nccl":
            c["direction"] = "push"
            if scenario.collective != "all_reduce":
                c["chunks"] = 1  # pieces of the others would not lie where they belong
    elif not reducing:
        c["ctas"] = 0
    if reducing and engine == "sm":
        c["direction"] = "pull"  # a kernel adds what it reads from its peers; adding at the peers would race
    if reducing and engine == "copy":
        c["direction"] = "push"
    if engine != "nccl" and c["order"] != "sequential" and c["priority"] == "equal":
        # Streams of one priority may come to share a hardware queue, and then run one after the other: on 8 H200s one
        # graph in twelve did, of those whose streams differed in priority none.
        c["priority"] = "comm"
    if c["batch"]:
        c["launch"] = "eager"  # a batch cannot be captured
    if engine != "nccl" and c["ctas"] == 0 and (engine == "sm" or reducing):
        c["ctas"] = SM_BLOCKS
    return c


def kernel_of(config: Mapping[str, Any], collective: str) -> str:
    """What the compiled kernel of a strategy does: "copy", "reduce", or "" where NCCL or copies do it all."""
    adds = collective in REDUCING
    if config["engine"] == "sm":
        return "reduce" if adds else "copy"
    # On CPUs, whose strategies have ``copies``, nothing is compiled.
    return "reduce" if adds and config["engine"] == "copy" and "copies" not in config else ""


def reject(config: Config, scenario: Scenario, side: str, *, sms: int = 0) -> str | None:
    """Why a strategy cannot work, or None.

    Args:
        sms: of the device; 0 where it is not known.
    """
    if side == "cpu":
        return _reject_panels(config, scenario)
    if (why := _reject_panels(config, scenario)) is not None:
        return why
    if int(config["chunks"]) > max(1, scenario.part // 1024):
        return f"a share of {scenario.part} elements in {config['chunks']} chunks"
    if config["engine"] == "nccl" and int(config["ctas"]) > NCCL_MOST:
        return f"{config['ctas']} thread blocks of NCCL, which takes {NCCL_MOST} at most"
    if sms and int(config["reserve"]) >= sms:
        return f"{config['reserve']} SMs kept from the computation of {sms}"
    return None


def _reject_panels(config: Config, scenario: Scenario) -> str | None:
    panels = int(config["panels"])
    if isinstance(scenario.compute, Gemm) and panels > 1 and scenario.compute.m // panels < 64:
        return f"{scenario.compute.m} rows in {panels} panels"
    return None

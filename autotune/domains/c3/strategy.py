"""The searched configuration, which describes how both parts share the devices; and the default rule.

A strategy is a flat :data:`autotune.task.Config` with the parameters of ``search_spaces/c3.toml``, section ``cuda`` or
``cpu``.

The rule depends on the collective alone, from measurements on H200s: copy engines, enqueued after the computation,
except for all_reduce. The driver copies the local part of an all-to-all, and a kernel reduces for a reduce-scatter.
Both then run in the computation's tail. The collective's stream has the higher priority even if it launches no kernel:
streams of equal priority may share a hardware queue, and are then serialised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from autotune.domains.c3.scenario import REDUCING, Scenario
from autotune.space import Range, load_space, within
from autotune.task import Config

SM_BLOCKS = 16
"""Thread blocks of a Numba kernel if ``ctas`` is 0."""
NCCL_MOST = 64
"""Maximum limit on NCCL's thread blocks."""


_IN = "autotune.domains.c3.collectives"
ENGINES: Mapping[str, Mapping[str, str]] = {
    "cuda": {"nccl": f"{_IN}.nccl:NcclCollective", "copy": f"{_IN}.dma:CopyCollective", "sm": f"{_IN}.sm:SmCollective"},
    "cpu": {"gloo": f"{_IN}.host:GlooCollective", "copy": f"{_IN}.host:HostCopy"},
}
"""For each device type, the engines that can move the data, as names of
:class:`~autotune.domains.c3.collectives.nccl.Collective` classes. A new engine is an entry here and a choice in
``search_spaces/c3.toml``."""


class _Labelled:
    """Common base of the strategies of both device types."""

    order: str
    engine: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Any:
        """Make a strategy from a configuration; missing parameters have their default, unknown ones are ignored."""
        fields: Mapping[str, Any] = cls.__dataclass_fields__  # type: ignore[attr-defined]
        return cls(**{name: config[name] for name in fields if name in config})

    def config(self) -> Config:
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @property
    def label(self) -> str:
        """The engine, the order and non-default parameters, such as ``copy comm_first reserve=8``."""
        plain = type(self)().config()
        rest = [f"{k}={v}" for k, v in self.config().items() if k not in ("order", "engine") and v != plain[k]]
        return " ".join([self.engine, self.order, *rest])


@dataclass(frozen=True)
class Strategy(_Labelled):
    """A strategy on CUDA devices; the fields are the parameters of ``[cuda]``."""

    order: str = "sequential"
    engine: str = "nccl"
    priority: str = "equal"
    reserve: int = 0
    ctas: int = 0
    chunks: int = 1

    @property
    def blocks(self) -> int:
        """Thread blocks of a Numba kernel."""
        return self.ctas or SM_BLOCKS


@dataclass(frozen=True)
class HostStrategy(_Labelled):
    """A strategy on CPUs; the fields are the parameters of ``[cpu]``."""

    order: str = "sequential"
    engine: str = "gloo"
    threads: int = 0
    copies: int = 1


KINDS: Mapping[str, type[Strategy] | type[HostStrategy]] = {"cuda": Strategy, "cpu": HostStrategy}
BASELINES: Mapping[str, Mapping[str, Config]] = {
    "cuda": {"sequential": Strategy().config(), "naive": Strategy(order="gemm_first").config()},
    "cpu": {"sequential": HostStrategy().config(), "naive": HostStrategy(order="comm_first").config()},
}
"""Strategies without a tuner: the computation, then NCCL's or gloo's collective; and both on two streams, computation
first (on a CPU: gloo's asynchronous call, then the computation)."""


@lru_cache(maxsize=2)
def limits(side: str) -> Mapping[str, Range]:
    """Valid values of each parameter of a stored strategy."""
    return {p.name: p.range for p in load_space("c3", side)}


EARLIER: Mapping[str, frozenset[str]] = {
    "cuda": frozenset({"launch", "panels", "streams", "direction", "batch", "adds"}),
    "cpu": frozenset({"chunks", "panels"}),
}
"""Parameters of earlier versions. In comparisons on four H200s they gained 0.1% on average and 1.6% at most
(docs/decisions/005), and ``adds`` lost (benchmarks/notes/c3-state.md). Stored strategies run without them."""


def current(config: Mapping[str, Any], side: str) -> Config:
    """A strategy without parameters and choices that only earlier versions had."""
    found = {name: value for name, value in config.items() if name not in EARLIER[side]}
    if found.get("priority") == "gemm":
        found["priority"] = "equal"
    return found


def improper(config: Mapping[str, Any], side: str) -> str:
    """The reason why a strategy from an untrusted database is invalid in this version; "" if it is valid."""
    every = limits(side)
    for name, value in current(config, side).items():
        if name not in every:
            return f"it has a parameter {name[:40]!r}, which this autotune lacks"
        if not within(value, known := every[name]):
            if type(value) is str and known and isinstance(known[0], str):
                return f"this autotune has no {name} {value[:40]!r}"
            return f"{name} = {repr(value)[:40]} is out of range"
    return ""


def normalize(config: Mapping[str, Any], scenario: Scenario, side: str) -> Config:
    """The equivalent strategy with parameters without effect set to their defaults."""
    c = current(config, side)
    if side == "cpu":
        if c["engine"] != "copy":
            c["copies"] = 1
        return c
    engine, adds = c["engine"], scenario.collective in REDUCING
    if c["order"] == "sequential":
        c.update(priority="equal", reserve=0)
    elif engine != "nccl":
        # Streams of equal priority may share a hardware queue, and are then serialised: on 8 H200s this happened to one
        # graph in twelve, and to none whose streams differed in priority.
        c["priority"] = "comm"
    if engine == "copy" and not adds:
        c["ctas"] = 0
    elif engine != "nccl" and c["ctas"] == 0:
        c["ctas"] = SM_BLOCKS
    if engine != "copy" or not adds:
        c["chunks"] = 1  # only reductions by copies overlap work with the next chunk
    return c


def kernel_of(config: Mapping[str, Any], collective: str) -> bool:
    """True if a strategy needs the compiled reduction kernel. Strategies on CPUs, which have ``copies``, do not."""
    return collective in REDUCING and config["engine"] in ("copy", "sm") and "copies" not in config


def form_of(config: Mapping[str, Any]) -> str:
    """The form of the reduction kernel that a strategy on CUDA needs."""
    return "pairs" if config["engine"] == "sm" else ""


def reject(config: Mapping[str, Any], scenario: Scenario, side: str, *, sms: int = 0) -> str | None:
    """The reason why a strategy cannot work; None if it can.

    Args:
        sms: number of SMs of the device; 0 if unknown.
    """
    if side == "cpu":
        return None
    if config["engine"] == "sm" and scenario.collective not in REDUCING:
        return "kernels that only move data, which this autotune lacks"
    if int(config["chunks"]) > max(1, scenario.part // 1024):
        return f"a share of {scenario.part} elements in {config['chunks']} chunks"
    if config["engine"] == "nccl" and int(config["ctas"]) > NCCL_MOST:
        return f"{config['ctas']} thread blocks of NCCL, which takes {NCCL_MOST} at most"
    if sms and int(config["reserve"]) >= sms:
        return f"{config['reserve']} SMs kept from the computation of {sms}"
    return None


# ---- the rule -------------------------------------------------------------------------------------------------------

_MOVING = (
    Strategy("gemm_first", "copy"),
    Strategy("comm_first", "copy"),
    Strategy("comm_first", "nccl", "comm", reserve=32, ctas=32),
    Strategy("comm_first", "nccl", "comm"),
)
_RULES: Mapping[str, tuple[Strategy, ...]] = {
    "all_gather": _MOVING,
    "all_to_all": _MOVING,
    "reduce_scatter": (
        Strategy("gemm_first", "copy", ctas=128),
        Strategy("comm_first", "copy", ctas=128),
        Strategy("comm_first", "copy", ctas=32, chunks=4, reserve=4),
        Strategy("comm_first", "copy", ctas=128, chunks=2),
        Strategy("comm_first", "nccl", "comm"),
        Strategy("comm_first", "sm", ctas=8),
        Strategy("comm_first", "sm", ctas=24),
        Strategy("comm_first", "nccl", "comm", ctas=16),
    ),
    "all_reduce": (
        Strategy("comm_first", "nccl", "comm", ctas=32),
        Strategy("gemm_first", "copy", ctas=32, chunks=4, reserve=8),
        Strategy("comm_first", "nccl", "comm"),
        Strategy("comm_first", "copy", ctas=32, chunks=4, reserve=8),
        Strategy("comm_first", "nccl", "comm", reserve=16),
        Strategy("comm_first", "copy", ctas=128),
        Strategy("comm_first", "sm", ctas=24),
        Strategy("comm_first", "sm", ctas=16),
    ),
}
_HOST = (
    HostStrategy("comm_first"),
    HostStrategy("comm_first", "copy"),
    HostStrategy("gemm_first", "copy"),
    HostStrategy("gemm_first"),
    HostStrategy("comm_first", "copy", copies=2),
    HostStrategy("comm_first", threads=1),
    HostStrategy("sequential", "copy"),
)


def by_rule(scenario: Scenario, side: str) -> list[Config]:
    """The most promising strategies, best first; without a match, the first one is deployed.

    The strategies are distinct, normalised and valid.
    """
    found: Iterable[Strategy | HostStrategy] = _HOST if side == "cpu" else _RULES[scenario.collective]
    out: list[Config] = []
    for strategy in found:
        config = normalize(strategy.config(), scenario, side)
        if reject(config, scenario, side) is None and config not in out:
            out.append(config)
    return out

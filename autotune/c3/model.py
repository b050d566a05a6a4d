"""What a strategy will take: a model over the tables that a calibration measured.

The figures are flat, and their names say what they are:

- ``gemm_us.8192x8192x8192.bf16``: a GEMM alone, microseconds;
- ``gemm_slowdown.8192x8192x8192.bf16.reserve=16``: the same with SMs kept from it (or ``panels``, or ``threads``), over
  the time without;
- ``comm_us.all_gather.copy,push.48MiB``: a collective alone, by the way the data moves;
- ``unhidden.all_gather.copy,comm_first.8192x8192x8192.bf16.100pct``: both under a strategy, where the collective alone
  takes 100% of the GEMM's time: the share of the shorter that was not hidden behind the longer (0 ideal, 1 sequential).

So ``T = max(T_gemm, T_comm) + unhidden * min(T_gemm, T_comm)``, each term looked up between what was measured: times
over sizes by straight lines in logarithms, GEMMs by a roofline whose efficiency is a mean over those like them. What no
table has, such as an issue order on an engine that failed, follows from what the two take of each other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from autotune.c3.scenario import ITEMSIZE, REDUCING, Gemm, Scenario, parse_bytes, parse_gemm
from autotune.c3.strategy import HostStrategy, Strategy
from autotune.errors import UserError
from autotune.task import Config

Curve = list[tuple[float, float]]
"""Points by rising first coordinate."""
Features = tuple[float, ...]

_DOUBT = 0.05
"""Added to the unhidden share for every parameter in which the strategy differs from the one that was measured."""
_BEST, _WORST = -0.2, 2.0
"""Unhidden shares beyond are noise. One may be below 0: chunks, say, can make a collective faster."""
_SMS = 132
_BLOCKS = 24
"""Thread blocks of NCCL's kernels, more or less, where nobody limits them."""
_PARTNERS = {"all_gather": "all_to_all", "all_to_all": "all_gather", "reduce_scatter": "all_reduce",
             "all_reduce": "reduce_scatter"}  # fmt: skip


def gemm_name(gemm: Gemm) -> str:
    """``8192x8192x8192.bf16``."""
    return f"{gemm.m}x{gemm.n}x{gemm.k}.{gemm.dtype}"


def strategy_name(config: Mapping[str, Any]) -> str:
    """``copy,comm_first,reserve=8``: what the strategy's label says, without spaces."""
    return _strategy(config).label.replace(" ", ",")


def parse_strategy(name: str, side: str) -> Config:
    """The inverse of :func:`strategy_name`."""
    engine, order, *rest = name.split(",")
    config: Config = (HostStrategy if side == "cpu" else Strategy)(order=order, engine=engine).config()
    for text in rest:
        key, _, value = text.partition("=")
        plain = config[key]
        if isinstance(plain, bool):
            config[key] = value == "True"
        else:
            config[key] = int(value) if isinstance(plain, int) else value
    return config


def variant(config: Mapping[str, Any], collective: str) -> str:
    """How a strategy moves the data: what ``comm_us`` is tabulated by. ``copy,push``, ``nccl,ctas=16``."""
    c = _strategy(config).config()
    words = [str(c["engine"])]
    if "direction" in c:
        if c["engine"] != "nccl":
            words.append(str(c["direction"]))
        if c["ctas"]:
            words.append(f"ctas={c['ctas']}")
        # Where something is added, a chunk is added while the next one travels; else chunks only cost a little.
        if collective in REDUCING and c["engine"] != "nccl" and c["chunks"] != 1:
            words.append(f"chunks={c['chunks']}")
    elif c["engine"] == "copy":
        words.append(f"copies={c['copies']}")
    return ",".join(words)


def unhidden(both_us: float, compute_us: float, comm_us: float) -> float:
    """The share of the shorter that was not hidden behind the longer."""
    return (both_us - max(compute_us, comm_us)) / min(compute_us, comm_us)


@dataclass
class Model:
    """Tables of figures, and what follows from them.

    Attributes:
        gemms: microseconds of GEMMs alone.
        slowdowns: of "reserve=16" and the like, by GEMM.
        comms: (bytes, microseconds) by collective and variant.
        shares: (log2 of T_comm / T_gemm, unhidden share) by collective and strategy, then GEMM.
    """

    gemms: dict[Gemm, float] = field(default_factory=dict)
    slowdowns: dict[str, dict[Gemm, float]] = field(default_factory=lambda: defaultdict(dict))
    comms: dict[tuple[str, str], Curve] = field(default_factory=lambda: defaultdict(list))
    shares: dict[tuple[str, str], dict[Gemm, Curve]] = field(default_factory=lambda: defaultdict(dict))
    _parsed: dict[tuple[str, str], dict[str, Config]] = field(default_factory=dict)

    @classmethod
    def of(cls, figures: Mapping[str, float]) -> Model:
        """The tables in ``figures``; what is not of this version's names is left out."""
        made = cls()
        for name, value in figures.items():
            try:
                made._add(name.split("."), value)
            except (UserError, ValueError):
                continue
        for curve in made.comms.values():
            curve.sort()
        for by_gemm in made.shares.values():
            for points in by_gemm.values():
                points.sort()
        return made

    def _add(self, words: Sequence[str], value: float) -> None:
        match words:
            case ["gemm_us", shape, dtype] if value > 0:
                self.gemms[parse_gemm(shape, dtype)] = value
            case ["gemm_slowdown", shape, dtype, setting] if value > 0:
                gemm = parse_gemm(shape, dtype)
                self.slowdowns[setting][gemm] = value
            case ["comm_us", op, way, size] if value > 0:
                point = parse_bytes(size), value
                self.comms[op, way].append(point)
            case ["unhidden", op, strategy, shape, dtype, percent]:
                gemm, ratio = parse_gemm(shape, dtype), math.log2(float(percent.removesuffix("pct")) / 100)
                self.shares[op, strategy].setdefault(gemm, []).append((ratio, value))

    def gemm_us(self, gemm: Gemm) -> float | None:
        """A GEMM alone; None where none of its kind was measured."""
        known = {g: us for g, us in self.gemms.items() if ITEMSIZE[g.dtype] == ITEMSIZE[gemm.dtype]}
        if not known:
            return None
        rate = max(g.flops / us for g, us in known.items())
        flow = max(_traffic(g) / us for g, us in known.items())

        def roof(g: Gemm) -> float:
            return max(g.flops / rate, _traffic(g) / flow)

        return roof(gemm) / _mean_of_like(gemm, {g: roof(g) / us for g, us in known.items()}, _extents)

    def slowdown(self, gemm: Gemm, name: str, value: int) -> float:
        """Time under ``name`` = ``value`` ("reserve", "panels" or "threads") over the time without."""
        plain = {"reserve": 0, "panels": 1, "threads": 0}[name]
        if value == plain:
            return 1.0
        points = [(float(plain), 1.0)] if name != "threads" else []
        for setting, by_gemm in self.slowdowns.items():
            key, _, text = setting.partition("=")
            if key == name and by_gemm:
                points.append((float(text), _mean_of_like(gemm, by_gemm, _weight)))
        if len(points) > 1:
            return _at(sorted(points), float(value))
        return _SMS / max(_SMS - value, 1) if name == "reserve" else 1.0

    def comm_us(self, scenario: Scenario, config: Mapping[str, Any]) -> float | None:
        """The collective alone, by the way of ``config``, or by the nearest one that was measured."""
        op = scenario.collective
        wanted = variant(config, op)
        if (op, wanted) not in self.comms:
            known = [(_apart(_words(wanted), _words(way)), way) for o, way in self.comms if o == op]
            known = [(apart, way) for apart, way in known if apart < math.inf]
            if not known:
                return None
            wanted = min(known)[1]
        return _over_sizes(self.comms[op, wanted], float(scenario.nbytes))

    def predict(self, scenario: Scenario, config: Mapping[str, Any]) -> float | None:
        """Microseconds of both; None where a table is missing."""
        gemm = scenario.compute
        compute_us = self.gemm_us(gemm) if isinstance(gemm, Gemm) else None
        comm_us = self.comm_us(scenario, config)
        if compute_us is None or comm_us is None or not isinstance(gemm, Gemm):
            return None
        if config["order"] == "sequential":
            return compute_us + comm_us
        for op in (scenario.collective, _PARTNERS[scenario.collective]):
            known = [(_apart(config, tried), name) for name, tried in self._tried(op, _side(config)).items()]
            if known and min(known)[0] < math.inf:
                apart, name = min(known)
                compute_us *= self._slower(gemm, config, self._tried(op, _side(config))[name])
                share = self._share(gemm, self.shares[op, name], comm_us / compute_us) + _DOUBT * apart
                return max(compute_us, comm_us) + share * min(compute_us, comm_us)
        compute_us *= self._slower(gemm, config, None)
        return self._by_rates(gemm, config, compute_us, comm_us) + _DOUBT * min(compute_us, comm_us)

    def _tried(self, op: str, side: str) -> dict[str, Config]:
        """The strategies in the tables of a collective, by name."""
        if (op, side) not in self._parsed:
            self._parsed[op, side] = {name: parse_strategy(name, side) for o, name in self.shares if o == op}
        return self._parsed[op, side]

    def _slower(self, gemm: Gemm, config: Mapping[str, Any], measured: Mapping[str, Any] | None) -> float:
        """What ``config`` costs the computation alone, over what ``measured`` (None: the default) does."""
        factor = 1.0
        for name, plain in (("reserve", 0), ("panels", 1), ("threads", 0)):
            if name in config:
                was = plain if measured is None else int(measured[name])
                factor *= self.slowdown(gemm, name, int(config[name])) / self.slowdown(gemm, name, was)
        return factor

    def _share(self, gemm: Gemm, table: Mapping[Gemm, Curve], ratio: float) -> float:
        at = math.log2(ratio)
        shares = {g: min(max(_at(curve, at), _BEST), _WORST) for g, curve in table.items()}
        return _mean_of_like(gemm, shares, _weight)

    def _by_rates(self, gemm: Gemm, config: Mapping[str, Any], compute_us: float, comm_us: float) -> float:
        """Both, from how much slower each goes while the other runs: a GEMM by the SMs that it loses, or by the memory
        that copies take from it."""
        engine, first = config["engine"], config["order"] == "comm_first"
        if "reserve" not in config:
            slow_gemm, slow_comm = 1.3, 1.3  # threads share the cores
        elif engine == "copy":
            slow_gemm, slow_comm = 1.1, 1.05
        elif first or int(config["reserve"]):
            lost = max(int(config["ctas"]) or _BLOCKS - int(config["reserve"]), 0)
            slow_gemm, slow_comm = self.slowdown(gemm, "reserve", lost), 1.1
        else:
            return compute_us + 0.95 * comm_us  # the GEMM holds every SM until its last blocks
        if slow_comm * comm_us <= slow_gemm * compute_us:
            return compute_us + comm_us * slow_comm * (1 - 1 / slow_gemm)
        return comm_us + compute_us * slow_gemm * (1 - 1 / slow_comm)


def predict(scenario: Scenario, config: Mapping[str, Any], figures: Mapping[str, float]) -> float | None:
    """Microseconds of a scenario under a strategy by a calibration's figures; None where they do not tell."""
    return Model.of(figures).predict(scenario, config)


def _strategy(config: Mapping[str, Any]) -> Strategy | HostStrategy:
    return HostStrategy.of(config) if _side(config) == "cpu" else Strategy.of(config)


def _side(config: Mapping[str, Any]) -> str:
    return "cpu" if "threads" in config else "cuda"


def _words(way: str) -> dict[str, Any]:
    """A variant's name as parameters."""
    engine, *rest = way.split(",")
    pairs = [word.partition("=") for word in rest]
    return {"engine": engine, "order": "", **{key if value else "direction": value or key for key, _, value in pairs}}


def _apart(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """In how many parameters two strategies or variants differ (of thread blocks: how often their number doubles);
    infinite with another engine or issue order."""
    if a["engine"] != b["engine"] or a["order"] != b["order"]:
        return math.inf
    blocks = [int(c.get("ctas", 0)) or _BLOCKS for c in (a, b)]
    others = sum(a.get(name) != b.get(name) for name in a.keys() | b.keys() if name != "ctas")
    return float(others + abs(math.log2(blocks[0] / blocks[1])))


def _traffic(g: Gemm) -> int:
    """Bytes that a GEMM reads and writes at least."""
    return ITEMSIZE[g.dtype] * (g.m * g.k + g.k * g.n + g.m * g.n)


def _extents(g: Gemm) -> Features:
    return math.log2(g.m), math.log2(g.n), math.log2(g.k)


def _weight(g: Gemm) -> Features:
    """How long it takes, and how much of that is arithmetic."""
    return math.log2(g.flops) / 2, math.log2(g.flops / _traffic(g))


def _mean_of_like(gemm: Gemm, values: Mapping[Gemm, float], features: Callable[[Gemm], Features]) -> float:
    """Mean of ``values``, those of GEMMs near to ``gemm`` counting most (inverse squared distance)."""
    at = features(gemm)
    total = weights = 0.0
    for other, value in values.items():
        weight = 1 / (0.01 + sum((a - b) ** 2 for a, b in zip(at, features(other), strict=True)))
        total, weights = total + weight * value, weights + weight
    return total / weights


def _at(curve: Curve, x: float) -> float:
    """On the line through the points on both sides of ``x``; beyond the ends their value."""
    if x <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return curve[-1][1]


def _over_sizes(curve: Curve, nbytes: float) -> float:
    """Time at a size: a line in logarithms between two; above the largest in proportion to the size, and below the
    smallest the same time."""
    logs = [(math.log(size), math.log(us)) for size, us in curve]
    beyond = max(nbytes / curve[-1][0], 1.0)
    return math.exp(_at(logs, math.log(nbytes))) * beyond

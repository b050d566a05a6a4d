"""What a strategy will take: a model over the tables that a calibration measured.

The figures are flat, and their names say what they are:

- ``gemm_us.8192x8192x8192.bf16``: a GEMM alone, microseconds;
- ``gemm_slowdown.8192x8192x8192.bf16.reserve=16``: the same with SMs kept from it (or ``panels``, or ``threads``), over
  the time without;
- ``comm_us.all_gather.copy,push.48MiB``: a collective alone, by the way the data moves;
- ``unhidden.all_gather.copy,comm_first.8192x8192x8192.bf16.100pct``: both under a strategy, where the collective alone
  takes 100% of the GEMM's own time: the share of the shorter that was not hidden (0 ideal, 1 sequential).

So ``T = max(T_gemm, T_comm) + unhidden * min(T_gemm, T_comm)``, each term looked up between what was measured: times
over sizes by straight lines, GEMMs by a roofline whose efficiency is a mean over those like them. Where a strategy
slows the GEMM down by itself, it is beside that slower GEMM that a share is looked up: what it costs differs more
between GEMMs than what is not hidden. What no table has, such as an issue order on an engine that failed, follows from
what the two take of each other.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.domains.c3.calibration.curves import Curve, at, extents, mean_of_like, over_sizes, traffic, weight
from autotune.domains.c3.calibration.tables import (
    BLOCKS,
    blocks,
    distance,
    kind,
    parameters,
    parse_strategy,
    side_of,
    variant,
)
from autotune.domains.c3.scenario import ITEMSIZE, Gemm, Scenario, parse_bytes, parse_gemm
from autotune.errors import UserError
from autotune.task import Config

_DOUBT = 0.05
"""Added to the unhidden share for every parameter in which the strategy differs from the one that was measured."""
_UNKNOWN = 0.2
"""What an unhidden share is off by where the tables do not tell."""
_BEST, _WORST = -0.2, 2.0
"""Unhidden shares beyond are noise. One may be below 0: chunks, say, can make a collective faster."""
_SMS = 132
_PARTNERS = {"all_gather": "all_to_all", "all_to_all": "all_gather", "reduce_scatter": "all_reduce",
             "all_reduce": "reduce_scatter"}  # fmt: skip
Table = tuple[str, str]
"""A collective and a strategy, which unhidden shares were measured of."""


@dataclass(frozen=True)
class Expected:
    """What a strategy is expected to take.

    Attributes:
        us: the computation and the collective.
        shorter_us: the shorter of the two alone.
        table: where the unhidden share is from; None where no table has one.
        doubt: how far from ``table`` the strategy and the scenario are, as an unhidden share.
    """

    us: float
    shorter_us: float
    table: Table | None = None
    doubt: float = 0.0


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
        shares: (log2 of T_comm / T_gemm, unhidden share) by collective and strategy, then GEMM; both with T_gemm as it
            is with the SMs and in the panels of the strategy.
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
        for (_, strategy), by_gemm in made.shares.items():
            for gemm, points in by_gemm.items():
                slower = made._slower(gemm, parameters(strategy))
                points[:] = sorted(_beside_slower(ratio, share, slower) for ratio, share in points)
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
        flow = max(traffic(g) / us for g, us in known.items())

        def roof(g: Gemm) -> float:
            return max(g.flops / rate, traffic(g) / flow)

        return roof(gemm) / mean_of_like(gemm, {g: roof(g) / us for g, us in known.items()}, extents)

    def slowdown(self, gemm: Gemm, name: str, value: int) -> float:
        """Time under ``name`` = ``value`` ("reserve", "panels" or "threads") over the time without."""
        plain = {"reserve": 0, "panels": 1, "threads": 0}[name]
        if value == plain:
            return 1.0
        points = [(float(plain), 1.0)] if name != "threads" else []
        for setting, by_gemm in self.slowdowns.items():
            key, _, text = setting.partition("=")
            if key == name and by_gemm:
                points.append((float(text), mean_of_like(gemm, by_gemm, weight)))
        if len(points) > 1:
            return at(sorted(points), float(value))
        return _SMS / max(_SMS - value, 1) if name == "reserve" else 1.0

    def comm_us(self, scenario: Scenario, config: Mapping[str, Any]) -> float | None:
        """The collective alone, by the way of ``config``, or by the nearest one that was measured."""
        op, nbytes = scenario.collective, float(scenario.nbytes)
        wanted = variant(config, op)
        if (op, wanted) in self.comms:
            return over_sizes(self.comms[op, wanted], nbytes)
        known = [(distance(parameters(wanted), parameters(way)), way) for o, way in self.comms if o == op]
        known = [(apart, way) for apart, way in known if apart < math.inf]
        if not known:
            return None
        # So few blocks that nobody tried may be what the time is in proportion to; more than were tried may not help.
        least = min(blocks(parameters(way)) for _, way in known)
        return over_sizes(self.comms[op, min(known)[1]], nbytes) * max(1.0, least / blocks(parameters(wanted)))

    def predict(self, scenario: Scenario, config: Mapping[str, Any]) -> float | None:
        """Microseconds of both; None where a table is missing."""
        expected = self.expect(scenario, config)
        return expected.us if expected is not None else None

    def expect(self, scenario: Scenario, config: Mapping[str, Any]) -> Expected | None:
        """What both take, and how that is known; None where a table is missing."""
        gemm = scenario.compute
        compute_us = self.gemm_us(gemm) if isinstance(gemm, Gemm) else None
        comm_us = self.comm_us(scenario, config)
        if compute_us is None or comm_us is None or not isinstance(gemm, Gemm):
            return None
        if config["order"] == "sequential":
            return Expected(compute_us + comm_us, min(compute_us, comm_us))
        table, apart = self._nearest(scenario.collective, config)
        compute_us *= self._slower(gemm, config)
        shorter = min(compute_us, comm_us)
        if table is None:
            us = self._by_rates(gemm, config, compute_us, comm_us)
            return Expected(us + _UNKNOWN * shorter, shorter)
        ratio = math.log2(comm_us / compute_us)
        share = self._share(gemm, self.shares[table], ratio) + _DOUBT * apart
        doubt = _DOUBT * self._beyond(self.shares[table], ratio)
        return Expected(max(compute_us, comm_us) + share * shorter, shorter, table, doubt)

    def gain(self, scenario: Scenario, new: Expected, old: Expected) -> float:
        """Microseconds that one strategy is expected to save over another, less what such an expectation is off by:
        with every GEMM of the tables in turn left out, and more of those that are like this one."""
        if not isinstance(scenario.compute, Gemm):
            raise ValueError(f"nothing is expected beside {scenario.compute.label}")
        off = self._off(scenario.compute, new.table, old.table) + new.doubt
        return old.us - new.us - off * new.shorter_us

    def _off(self, gemm: Gemm, new: Table | None, old: Table | None) -> float:
        """What the difference between the unhidden shares of two tables is off by (root of the mean square)."""
        if new == old and new is not None:
            return 0.0
        tables = [table for table in (new, old) if table is not None]
        known = [self.shares[table].keys() for table in tables]
        both = set(known[0]).intersection(*known[1:]) if known else set()
        if len(both) < 2:
            return _UNKNOWN
        squares = {}
        for left in both:
            missed = [self._missed(new, left, ratio) - self._missed(old, left, ratio)
                      for ratio, _ in self.shares[tables[0]][left]]  # fmt: skip
            squares[left] = statistics.fmean(m**2 for m in missed)
        return math.sqrt(mean_of_like(gemm, squares, weight)) + _UNKNOWN * (2 - len(tables))

    def _missed(self, table: Table | None, left: Gemm, ratio: float) -> float:
        """How much more is expected of the share beside ``left``, by the other GEMMs, than was measured."""
        if table is None:
            return 0.0
        others = {g: curve for g, curve in self.shares[table].items() if g != left}
        return self._share(left, others, ratio) - _bounded(at(self.shares[table][left], ratio))

    def _nearest(self, op: str, config: Mapping[str, Any]) -> tuple[Table | None, float]:
        """The table of the strategy most like ``config``, and how far it is: of the same collective, of the one most
        like it, or of any."""
        for further, ops in enumerate(((op,), (_PARTNERS[op],), tuple(_PARTNERS))):
            known = []
            for other in ops:
                for name, tried in self._tried(other, side_of(config)).items():
                    if kind(config, op) == kind(tried, other):
                        known.append((distance(config, tried), (other, name)))
            if known:
                apart, table = min(known)
                return table, apart + further
        return None, 0.0

    def _tried(self, op: str, side: str) -> dict[str, Config]:
        """The strategies in the tables of a collective, by name."""
        if (op, side) not in self._parsed:
            self._parsed[op, side] = {name: parse_strategy(name, side) for o, name in self.shares if o == op}
        return self._parsed[op, side]

    def _slower(self, gemm: Gemm, config: Mapping[str, Any]) -> float:
        """What the SMs and panels of a strategy cost the computation alone: its time over that without."""
        names = ("reserve", "panels", "threads")
        return math.prod(self.slowdown(gemm, name, int(config[name])) for name in names if name in config)

    def _share(self, gemm: Gemm, table: Mapping[Gemm, Curve], ratio: float) -> float:
        return mean_of_like(gemm, {g: _bounded(at(curve, ratio)) for g, curve in table.items()}, weight)

    def _beyond(self, table: Mapping[Gemm, Curve], ratio: float) -> float:
        """By how many doublings a ratio is outside those that were measured."""
        ends = [x for curve in table.values() for x, _ in curve]
        return max(min(ends) - ratio, ratio - max(ends), 0.0)

    def _by_rates(self, gemm: Gemm, config: Mapping[str, Any], compute_us: float, comm_us: float) -> float:
        """Both, from how much slower each goes while the other runs: a GEMM by the SMs that it loses, or by the memory
        that copies take from it."""
        engine, first = config["engine"], config["order"] == "comm_first"
        if "reserve" not in config:
            slow_gemm, slow_comm = 1.3, 1.3  # threads share the cores
        elif engine == "copy":
            slow_gemm, slow_comm = 1.1, 1.05
        elif first or int(config["reserve"]):
            lost = max(int(config["ctas"]) or BLOCKS - int(config["reserve"]), 0)
            slow_gemm, slow_comm = self.slowdown(gemm, "reserve", lost), 1.1
        else:
            return compute_us + 0.95 * comm_us  # the GEMM holds every SM until its last blocks
        if slow_comm * comm_us <= slow_gemm * compute_us:
            return compute_us + comm_us * slow_comm * (1 - 1 / slow_gemm)
        return comm_us + compute_us * slow_gemm * (1 - 1 / slow_comm)


def predict(scenario: Scenario, config: Mapping[str, Any], figures: Mapping[str, float]) -> float | None:
    """Microseconds of a scenario under a strategy by a calibration's figures; None where they do not tell."""
    return Model.of(figures).predict(scenario, config)


def _beside_slower(ratio: float, share: float, slower: float) -> tuple[float, float]:
    """A point of a curve, from a GEMM's own time to one so many times as long."""
    comm = 2**ratio
    both = max(1.0, comm) + share * min(1.0, comm)
    return math.log2(comm / slower), unhidden(both, slower, comm)


def _bounded(share: float) -> float:
    return min(max(share, _BEST), _WORST)

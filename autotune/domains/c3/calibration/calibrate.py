"""Calibration: the tables that strategies are chosen by, measured once on a machine with a number of ranks.

Three kinds of probes, after ConCCL's and FiCCO's heuristics: GEMMs alone, with SMs kept from them; collectives alone,
by size and by the way the data moves; and both together under the strategies that heuristics may choose. What is
compared is timed in one interleaved run. The shapes are none that models have: scenarios are inferred, not looked up.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from autotune.domains.c3.calibration.grids import CPU, CUDA, Grid, Settings
from autotune.domains.c3.calibration.model import Model, unhidden
from autotune.domains.c3.calibration.probe import COMPUTE, Probe, Run
from autotune.domains.c3.calibration.tables import gemm_name, strategy_name, variant
from autotune.domains.c3.scenario import ITEMSIZE, REDUCING, Gemm, Scenario, format_bytes
from autotune.domains.c3.strategy import HostStrategy, Strategy, kernel_of, normalize
from autotune.errors import BuildError, Unsupported, UserError
from autotune.task import Config, open_task

_PROBE_S = 60.0  # a probe that takes longer hangs
_FAULTS = 3  # and after so many the calibration ends with what it has
_RATIOS = (1.0, 0.4, 2.2)  # the collective's time over the GEMM's; the most telling first
_APART = 12.0  # beyond, the shorter is lost in the noise of the longer


class Caller(Protocol):
    """What a calibration needs of :class:`autotune.domains.c3.measuring.ranks.Ranks`."""

    @property
    def ranks(self) -> int: ...
    def call(self, function: str, arguments: Mapping[str, Any], timeout_s: float) -> list[Any]: ...


def calibrate(
    ranks: Caller, told: Callable[[str, float | None], None] | None = None, grid: Grid | None = None
) -> dict[str, float]:
    """Measure the machine; a minute and a half at most on GPUs, 15 seconds on CPUs.

    Args:
        told: told every probe with the seconds it took, None where it, or one of its runs, could not be run.
        grid: in place of the side's own.

    Returns:
        Figures by name, as :mod:`autotune.domains.c3.calibration.model` reads them. What could not be run is missing.

    Raises:
        WorkerFault: the ranks cannot be started.
    """
    device = str(ranks.call("autotune.domains.c3.calibration.probe:where", {}, _PROBE_S)[0])
    side = "cuda" if device.startswith("cuda") else "cpu"
    return _Calibration(ranks, grid or (CUDA if side == "cuda" else CPU), device, side, told).run()


@dataclass
class _Calibration:
    """One calibration in progress."""

    ranks: Caller
    grid: Grid
    device: str
    side: str
    told: Callable[[str, float | None], None] | None
    figures: dict[str, float] = field(default_factory=dict)
    faults: int = 0
    _built: dict[tuple[str, str], dict[str, Any] | None] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)

    def run(self) -> dict[str, float]:
        end = time.perf_counter() + self.grid.seconds
        for probe, note in self._probes():
            if time.perf_counter() > end or self.faults >= _FAULTS:
                self._tell(f"{probe.name}: left out, " + ("too many faults" if self.faults else "no time"), None)
                continue
            begin = time.perf_counter()
            us = self._call(probe)
            note(us)
            self._tell(probe.name, time.perf_counter() - begin if us else None)
        return self.figures

    def _tell(self, name: str, seconds: float | None) -> None:
        if self.told is not None:
            self.told(name, seconds)

    def _call(self, probe: Probe) -> dict[str, float]:
        """Medians over samples, of the slowest rank each, by the run's name."""
        from autotune.domains.c3.task import policy
        from autotune.measure.worker import WorkerFault

        own = policy(self.device).to_json()
        arguments = {"probe": asdict(probe), "policy": own, "rounds": self.grid.rounds}
        try:
            answer = self.ranks.call("autotune.domains.c3.calibration.probe:measure", arguments, _PROBE_S)[0]
        except WorkerFault as fault:
            self.faults += 1
            self._tell(f"{probe.name}: {fault}", None)
            return {}
        for name, why in answer["skipped"].items():
            self._tell(f"{probe.name}, {name}: {why}", None)
        return {str(name): float(us) for name, us in answer["us"].items()}

    def _probes(self) -> Iterator[tuple[Probe, Callable[[dict[str, float]], None]]]:
        """Every probe with what notes its times. Lazily: those of both together need the tables of each alone."""
        grid = self.grid
        for index, gemm in enumerate(grid.gemms):
            yield self._alone(gemm, grid.limits if index < grid.limited else ())
        for size in grid.sizes:
            for op in grid.collectives:
                yield self._moved(op, size)
        for ratio in _RATIOS:
            for gemm in grid.gemms[: grid.together]:
                for op in grid.collectives:
                    if (found := self._together(op, gemm, ratio)) is not None:
                        yield found

    def _config(self, part: Mapping[str, Any], scenario: Scenario) -> Config:
        kind = HostStrategy if self.side == "cpu" else Strategy
        return normalize(kind.of(part).config(), scenario, self.side)

    def _scenario(self, gemm: Gemm, op: str, nbytes: float) -> Scenario:
        unit = ITEMSIZE[self.grid.dtype] * self.ranks.ranks * 64
        return Scenario(gemm, op, max(1, round(nbytes / unit)) * unit, self.ranks.ranks, self.grid.dtype)

    def _alone(self, gemm: Gemm, limits: Settings) -> tuple[Probe, Callable[[dict[str, float]], None]]:
        kind = HostStrategy if self.side == "cpu" else Strategy
        settings = {",".join(f"{k}={v}" for k, v in part.items()): part for part in limits}
        runs = [Run(COMPUTE, "compute", kind(order="comm_first").config())]
        runs += [
            Run(name, "compute", kind.of({"order": "comm_first", **part}).config()) for name, part in settings.items()
        ]

        def note(us: dict[str, float]) -> None:
            if COMPUTE in us:
                self.figures[f"gemm_us.{gemm_name(gemm)}"] = us[COMPUTE]
                for name in settings.keys() & us.keys():
                    self.figures[f"gemm_slowdown.{gemm_name(gemm)}.{name}"] = us[name] / us[COMPUTE]

        return Probe(f"GEMM {gemm.label}", asdict(gemm), None, runs), note

    def _moved(self, op: str, size: int) -> tuple[Probe, Callable[[dict[str, float]], None]]:
        scenario = self._scenario(self.grid.gemms[0], op, size)
        runs = {}
        for part in (*self.grid.strategies(op), *self.grid.ways):
            config = self._config({**part, "order": "sequential"}, scenario)
            way = variant(config, op)
            if way not in runs:
                runs[way] = self._run(way, "comm", config, scenario)

        def note(us: dict[str, float]) -> None:
            for way, value in us.items():
                self.figures[f"comm_us.{op}.{way}.{format_bytes(scenario.nbytes)}"] = value

        return Probe(f"{op} {format_bytes(size)}", None, _collective(scenario), list(runs.values())), note

    def _together(self, op: str, gemm: Gemm, ratio: float) -> tuple[Probe, Callable[[dict[str, float]], None]] | None:
        """Both under every strategy, with a size at which the first strategy's collective takes ``ratio`` times the
        GEMM; None where the tables for that are missing."""
        nbytes = self._size_for(op, gemm, ratio)
        if nbytes is None:
            return None
        scenario = self._scenario(gemm, op, nbytes)
        title = f"{gemm.label} beside {op} {format_bytes(scenario.nbytes)}"
        if title in self._seen:  # the next ratio would take more than the largest size, or less than the smallest
            return None
        self._seen.add(title)
        kind = HostStrategy if self.side == "cpu" else Strategy
        runs = {COMPUTE: Run(COMPUTE, "compute", kind(order="comm_first").config())}
        ways: dict[str, str] = {}
        for part in self.grid.strategies(op):
            config = self._config(part, scenario)
            name, way = strategy_name(config), variant(config, op)
            alone = self._config({**part, "order": "sequential", "batch": False, "streams": 1}, scenario)
            if op not in REDUCING:
                alone = {**alone, "chunks": 1}
            if way not in runs:
                runs[way] = self._run(way, "comm", alone, scenario)
            runs[name] = self._run(name, "both", config, scenario)
            ways[name] = way

        def note(us: dict[str, float]) -> None:
            for name, way in ways.items():
                if {name, way, COMPUTE} <= us.keys() and 1 / _APART < us[way] / us[COMPUTE] < _APART:
                    percent = round(100 * us[way] / us[COMPUTE])
                    key = f"unhidden.{op}.{name}.{gemm_name(gemm)}.{percent}pct"
                    self.figures[key] = unhidden(us[name], us[COMPUTE], us[way])

        return Probe(title, asdict(gemm), _collective(scenario), list(runs.values())), note

    def _size_for(self, op: str, gemm: Gemm, ratio: float) -> float | None:
        model = Model.of(self.figures)
        gemm_us = self.figures.get(f"gemm_us.{gemm_name(gemm)}")
        first = self.grid.strategies(op)[0]
        sizes = [self.grid.sizes[0] * 2 ** (k / 4) for k in range(64)]
        best: tuple[float, float] | None = None
        for size in (s for s in sizes if s <= self.grid.most):
            scenario = self._scenario(gemm, op, size)
            comm_us = model.comm_us(scenario, self._config(first, scenario))
            if gemm_us is None or comm_us is None:
                return None
            off = abs(math.log(comm_us / gemm_us / ratio))
            best = min(best or (off, size), (off, size))
        return best[1] if best else None

    def _run(self, name: str, parts: str, config: Config, scenario: Scenario) -> Run:
        return Run(name, parts, config, self._artifact(config, scenario))

    def _artifact(self, config: Config, scenario: Scenario) -> dict[str, Any] | None:
        """The kernels that a collective needs, ready to travel; built once for each way to move data."""
        if not kernel_of(config, scenario.collective):
            return None
        key = (scenario.collective, variant(config, scenario.collective))
        if key not in self._built:
            self._built[key] = _build(config, scenario, self.device)
        return self._built[key]


def _build(config: Config, scenario: Scenario, device: str) -> dict[str, Any] | None:
    from autotune.measure.wire import artifact_to_wire

    try:
        head, code = artifact_to_wire(open_task(scenario.workload(), device).build(config))
    except (BuildError, Unsupported, UserError):
        return None  # the collective says then what it lacks
    return {"head": head, "code": base64.b64encode(code).decode()}


def _collective(scenario: Scenario) -> dict[str, Any]:
    return {"op": scenario.collective, "numel": scenario.numel, "dtype": scenario.dtype}


__all__ = ["CPU", "CUDA", "Grid", "calibrate"]

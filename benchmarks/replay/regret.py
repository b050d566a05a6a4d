"""Search recordings again and print the regret: the distance of the best found from the best candidate there is."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from autotune.cli.options import JSON_HELP, natural_int, positive_int
from autotune.cli.output import console
from autotune.tuner.samplers import DEFAULT, SAMPLERS, make_sampler
from benchmarks.replay.recording import Recording, load_all
from benchmarks.replay.search import Trace, check_help, search

NEAR = 0.03
"""A search is near the best candidate when it has found one that is so much slower, or less."""


@dataclass(frozen=True)
class Regret:
    """Several searches of one recording that differ by their seed.

    Attributes:
        optimum_us: latency of the recording's best candidate.
        traces: one a search.
    """

    optimum_us: float
    traces: tuple[Trace, ...]

    @classmethod
    def of(cls, recording: Recording, traces: Sequence[Trace]) -> Regret:
        """The regret of searches in ``recording``."""
        return cls(recording.optimum_us, tuple(traces))

    def at(self, candidates: int) -> float:
        """Best latency after so many candidates over the optimum, less 1; in the median over the searches."""
        return statistics.median(self._after(trace, candidates) for trace in self.traces)

    def _after(self, trace: Trace, candidates: int) -> float:
        if not trace.best_us:
            return math.inf
        return trace.best_us[min(candidates, len(trace.best_us)) - 1] / self.optimum_us - 1

    def candidates(self, near: float = NEAR) -> float:
        """Candidates until the best is within ``near`` of the optimum, in the median; infinite where it never is."""
        return statistics.median(self._first(trace, near) + 1 for trace in self.traces)

    def seconds(self, near: float = NEAR) -> float:
        """Wall time until then, in the median; infinite where it never is."""
        return statistics.median(
            math.inf if (k := self._first(trace, near)) == math.inf else trace.seconds[int(k)] for trace in self.traces
        )

    def _first(self, trace: Trace, near: float) -> float:
        """Number of the first candidate, from 0, that is near enough."""
        limit = self.optimum_us * (1 + near)
        return next((k for k, us in enumerate(trace.best_us) if us <= limit), math.inf)

    @property
    def proposing_s(self) -> float:
        """Seconds that the search itself took for each candidate, in the mean."""
        return statistics.fmean(t.proposing_s / max(1, len(t.best_us)) for t in self.traces)


def geometric(values: Sequence[float]) -> float:
    """The geometric mean of 1 + each value, less 1; infinite where one is."""
    return math.inf if math.inf in values else math.exp(statistics.fmean(math.log1p(v) for v in values)) - 1


BUDGETS = (20, 40, 80)
"""Candidates after which the regret is told."""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "search",
        help="search recordings again without a device, and print the regret",
        description="Search recordings (of the command `record`) with several seeds. Print how far the best found is "
        "from the best there is (regret), and after how many candidates it is within 3%. Medians over seeds.",
    )
    parser.add_argument("recordings", metavar="FILE", nargs="+", type=Path, help="recordings, or folders of them")
    about = f"who proposes: some of {', '.join(SAMPLERS)}, by comma (default: {DEFAULT})"
    parser.add_argument("--sampler", default=DEFAULT, metavar="NAME[,NAME]", help=about)
    about = "leave out what helps the sampler: some of seeds, model, neighbours, pruning, by comma"
    parser.add_argument("--without", default="", metavar="HELP", help=about)
    parser.add_argument("--candidates", type=positive_int, default=BUDGETS[-1], metavar="N", help="a search's budget")
    parser.add_argument("--seeds", type=positive_int, default=10, metavar="N", help="searches of each (default: 10)")
    parser.add_argument("--seed", type=natural_int, default=0, metavar="N", help="of the first search (default: 0)")
    about = "compilers ahead of measuring (default: as many as the recording machine had)"
    parser.add_argument("--processes", type=positive_int, metavar="N", help=about)
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay; returns 0."""
    samplers, without = _names(args.sampler), _names(args.without)
    for name in samplers:  # fails before recordings are read
        make_sampler(name, args.seed)
    check_help(without)
    answers = []
    for recording in load_all(args.recordings):
        for sampler in samplers:
            traces = [
                search(
                    recording,
                    sampler,
                    candidates=args.candidates,
                    seed=args.seed + k,
                    without=without,
                    processes=args.processes,
                )
                for k in range(args.seeds)
            ]
            answers.append(_answer(recording.workload.label, sampler, args.candidates, Regret.of(recording, traces)))
    if args.json:
        print(json.dumps({"without": without, "seeds": args.seeds, "searches": answers}))
    else:
        _show(answers, samplers)
    return 0


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _budgets(candidates: int) -> list[int]:
    return sorted({*(b for b in BUDGETS if b < candidates), candidates})


def _answer(label: str, sampler: str, candidates: int, found: Regret) -> dict[str, Any]:
    """One line; what never happened in the median is None."""
    near, seconds = found.candidates(), found.seconds()
    return {
        "workload": label,
        "sampler": sampler,
        "optimum_us": found.optimum_us,
        "regret": {str(n): _finite(found.at(n)) for n in _budgets(candidates)},
        "candidates_to_3%": _finite(near),
        "seconds_to_3%": _finite(seconds),
        "proposing_ms": 1e3 * found.proposing_s,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _show(answers: Sequence[Mapping[str, Any]], samplers: Sequence[str]) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("workload", overflow="fold", min_width=12)
    table.add_column("sampler", no_wrap=True)
    budgets = list(answers[0]["regret"])
    for column in (*(f"after {n}" for n in budgets), "to 3%", "seconds", "ms each"):
        table.add_column(column, justify="right", no_wrap=True)
    for a in answers:
        regrets = [_percent(a["regret"][n]) for n in budgets]
        near = "never" if a["candidates_to_3%"] is None else f"{a['candidates_to_3%']:.0f}"
        took = "–" if a["seconds_to_3%"] is None else f"{a['seconds_to_3%']:.1f}"
        table.add_row(escape(a["workload"]), a["sampler"], *regrets, near, took, f"{a['proposing_ms']:.1f}")
    if len(answers) > len(samplers):
        table.add_section()
        for sampler in samplers:
            own = [a for a in answers if a["sampler"] == sampler]
            means = [_percent(_mean([a["regret"][n] for a in own])) for n in budgets]
            nears = [math.inf if a["candidates_to_3%"] is None else a["candidates_to_3%"] for a in own]
            middle = statistics.median(nears)
            near = f"{middle:.0f}" if math.isfinite(middle) else "never"
            table.add_row("all (geometric mean; median)", sampler, *means, near, "", "")
    console().print(table)


def _mean(values: Sequence[float | None]) -> float | None:
    return _finite(geometric([math.inf if v is None else v for v in values]))


def _percent(value: float | None) -> str:
    return "fails" if value is None else f"{value:.1%}"

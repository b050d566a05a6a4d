"""``autotune replay``: search recordings again, without a device, and tell how good the searches are."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli.options import JSON_HELP, natural_int, positive_int
from autotune.cli.output import console
from autotune.tuner.proposals.samplers import DEFAULT, SAMPLERS, make_sampler

if TYPE_CHECKING:
    from autotune.tuner.replay.regret import Regret

BUDGETS = (20, 40, 80)
"""Candidates after which the regret is told."""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "replay",
        help="search recordings again without a device: how near do searches come to the best?",
        description="Search recordings (`autotune record` makes them) with several seeds, and tell how far the best "
        "found is from the best there is (regret), and after how many candidates it is within 3%. Medians over seeds.",
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
    from autotune.tuner.replay import replay
    from autotune.tuner.replay.recording import load_all
    from autotune.tuner.replay.regret import Regret

    samplers, without = _names(args.sampler), _names(args.without)
    for name in samplers:  # told before recordings are read
        make_sampler(name, args.seed)
    replay.check_help(without)
    answers = []
    for recording in load_all(args.recordings):
        for sampler in samplers:
            traces = [
                replay.search(
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
    from rich import box
    from rich.markup import escape
    from rich.table import Table

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
    from autotune.tuner.replay.regret import geometric

    return _finite(geometric([math.inf if v is None else v for v in values]))


def _percent(value: float | None) -> str:
    return "fails" if value is None else f"{value:.1%}"

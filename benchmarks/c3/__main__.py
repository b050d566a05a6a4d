"""The suite of C3: the scenarios, what each family of strategies and the tuned one reach of the ideal.

    python -m benchmarks.c3 --list
    python -m benchmarks.c3 --trials 4 --timeout 30 --db c3.db --out benchmarks/results/h200x4/c3.json

The JSON file, a Markdown table and pictures in the same folder are written after every scenario.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from autotune.cli import app
from autotune.cli.output import machine_output
from autotune.device import resolve_device
from autotune.domains.c3.cli import add_ranks, ranks_of, serves
from autotune.domains.c3.scenario import named_scenarios
from autotune.runtime.deployment import deployment
from benchmarks.c3.report import render
from benchmarks.c3.run import Settings, choose
from benchmarks.c3.run import run as run_suite
from benchmarks.suite_options import add_options, command, result_file

_NOTED = ("scenarios", "cases", "ranks", "device", "out", "trials", "timeout", "seed", "timeline")


def build_parser() -> argparse.ArgumentParser:
    """The parser."""
    parser = app.Parser(prog="python -m benchmarks.c3", description=(__doc__ or "").partition("\n")[0])
    add_options(parser, "c3")
    about = "scenarios of your own, a file such as benchmarks/c3_scenarios.toml"
    parser.add_argument("--scenarios", metavar="FILE", help=about)
    add_ranks(parser)
    about = "do not measure the strategy that the rule chooses without a search"
    parser.add_argument("--no-rule", action="store_true", help=about)
    about = "at the end, compare the tuned strategies with the best one that is fixed"
    parser.add_argument("--fixed", action="store_true", help=about)
    about = "the scenario whose timeline is drawn (default: the first of the equal class)"
    parser.add_argument("--timeline", metavar="NAME", help=about)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the suite; returns 0, or 1 if a scenario could not be measured."""
    with machine_output(args.json) as emit:
        if args.list:
            return _list(args, emit)
        device, out = resolve_device(args.device), result_file(args)
        settings = Settings(
            device=device,
            ranks=ranks_of(args, device),
            out=out,
            command=command("benchmarks.c3", args, _NOTED, ("no_search", "no_rule", "fixed")),
            scenarios=args.scenarios,
            cases=args.cases,
            dtype="bf16" if device.startswith("cuda") else "f32",
            db=args.db,
            trials=args.trials,
            timeout=args.timeout,
            seed=args.seed,
            resume=args.resume,
            search=not args.no_search,
            measure=not args.search_only,
            rule=not args.no_rule,
            fixed=args.fixed,
            timeline=args.timeline,
        )
        if serves():
            return 0
        with deployment().deploying_from(args.db):
            data, missing = run_suite(settings)
        if data is not None:
            emit(data)
    if data is not None and not args.json:
        print(render(data))
    for line in missing:
        print(f"autotune: NOT MEASURED: {line}", file=sys.stderr)
    return 1 if missing else 0


def _list(args: argparse.Namespace, emit: Any) -> int:
    entries = choose(named_scenarios(args.scenarios), args.cases)
    emit(
        {
            "cases": [
                {"name": e.name, "collective": e.collective, "class": e.expected, "about": e.label} for e in entries
            ]
        }
    )
    if not args.json:
        for entry in entries:
            print(f"{entry.name:24s} {entry.expected:14s} {entry.label}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite; exit codes and errors are those of ``autotune``."""
    return app.main(argv, build_parser)


if __name__ == "__main__":
    raise SystemExit(main())

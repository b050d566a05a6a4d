"""The suite of regions: search every case, then time it against eager, Inductor and XLA in one process, in turn.

    python -m benchmarks.fusion --device cuda:0 --out benchmarks/results/h200/fusion.json --db fusion.db --timeout 60
    python -m benchmarks.fusion --device cpu --out benchmarks/results/cpu/fusion.json --db fusion-cpu.db --timeout 30

The JSON file and a Markdown table in the same folder are written after every case. A killed run loses at most one
case: the same command with ``--resume`` continues.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from autotune.cli import app
from autotune.cli.options import positive_int
from autotune.cli.output import machine_output
from autotune.device import resolve_device
from autotune.errors import UserError
from benchmarks.fusion.report import render
from benchmarks.fusion.run import Settings
from benchmarks.fusion.run import run as run_suite
from benchmarks.fusion.suite import CASES
from benchmarks.suite_options import add_options, command, names, result_file

_NOTED = ("device", "size", "out", "cases", "peers", "ablation", "trials", "timeout", "seed", "jobs")


def build_parser() -> argparse.ArgumentParser:
    """The parser."""
    parser = app.Parser(prog="python -m benchmarks.fusion", description=(__doc__ or "").partition("\n")[0])
    add_options(parser, "fusion")
    parser.add_argument("--size", choices=["gpu", "cpu"], help="of the inputs (default: as the device)")
    about = "what to measure besides autotune: eager, inductor, inductor-best, xla, names of option sets (default: all)"
    parser.add_argument("--peers", metavar="A,B,...", type=names, help=about)
    about = "searches that lack a part, to be measured beside the full one"
    parser.add_argument("--ablation", metavar="A,B,...", type=names, default=[], help=about)
    about = "cases to prepare and measure side by side, on a GPU; they take turns on the device (default: 1)"
    parser.add_argument("--jobs", type=positive_int, metavar="N", help=about)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the suite; returns 0, or 1 if a case could not be measured."""
    with machine_output(args.json) as emit:
        if args.list:
            return _list(args, emit)
        device = resolve_device(args.device)
        if device == "cpu" and (args.jobs or 1) > 1:
            raise UserError(f"--jobs {args.jobs}: on a CPU, what compiles a case would disturb the timing of another")
        out = result_file(args)
        data, missing = run_suite(
            Settings(
                device=device,
                size=args.size or ("cpu" if device == "cpu" else "gpu"),
                out=out,
                command=command("benchmarks.fusion", args, _NOTED, ("no_search",)),
                cases=args.cases,
                db=args.db,
                trials=args.trials,
                timeout=args.timeout,
                seed=args.seed,
                peers=args.peers,
                ablations=args.ablation,
                resume=args.resume,
                search=not args.no_search,
                measure=not args.search_only,
                jobs=args.jobs or 1,
            )
        )
        if data is not None:
            emit(data)
    if data is not None and not args.json:
        print(render(data))
    for line in missing:
        print(f"autotune: NOT MEASURED: {line}", file=sys.stderr)
    return 1 if missing else 0


def _list(args: argparse.Namespace, emit: Any) -> int:
    rows = [{"name": c.name, "kind": c.kind, "gpu": c.label("gpu"), "cpu": c.label("cpu")} for c in CASES.values()]
    emit({"cases": rows})
    if not args.json:
        for row in rows:
            print(f"{row['name']:36s} {row['kind']:9s} {row['gpu']}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite; exit codes and errors are those of ``autotune``."""
    return app.main(argv, build_parser)


if __name__ == "__main__":
    raise SystemExit(main())

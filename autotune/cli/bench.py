"""``autotune bench``: run a suite against the peers that are there, and write down what came out."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from autotune.cli.options import (
    add_db,
    add_device,
    add_json,
    add_ranks,
    natural_int,
    only_of,
    positive_int,
    result_file,
    seconds,
)
from autotune.cli.output import machine_output
from autotune.errors import UserError


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "bench",
        help="run a benchmark suite against eager, Inductor and XLA",
        description="Search every case of a suite, then time what is deployed beside eager, Inductor (by default and "
        "with the options that help it) and XLA, in one process, in turn. The suite c3 compares, for each scenario, "
        "naive overlap, the best issue order, SM partition and copy-engine strategy, and the tuned one with the ideal. "
        "The JSON file and a Markdown table beside it (for c3 pictures too) are written anew after every case.",
    )
    parser.add_argument("suite", metavar="SUITE", choices=["fusion", "c3"], help="fusion, c3")
    add_device(parser)
    parser.add_argument("--size", choices=["gpu", "cpu"], help="of fusion's inputs (default: as the device)")
    parser.add_argument("--out", metavar="FILE", help="the JSON file (default: bench-SUITE.json)")
    about = (
        "cases to run, or kinds: forward, backward, mixed; of c3 collectives, classes, COLLECTIVE.CLASS (default: all)"
    )
    parser.add_argument("--cases", metavar="A,B,...", type=_names, default=[], help=about)
    about = "what to measure besides autotune: eager, inductor, inductor-best, xla, names of option sets (default: all)"
    parser.add_argument("--peers", metavar="A,B,...", type=_names, help=about)
    about = "searches that lack a part, to be measured beside the full one"
    parser.add_argument("--ablation", metavar="A,B,...", type=_names, default=[], help=about)
    parser.add_argument("--trials", type=positive_int, metavar="N", help="candidates to measure for each region")
    parser.add_argument("--timeout", type=seconds, metavar="S", help="seconds to search for each case")
    parser.add_argument("--seed", type=natural_int, default=0, metavar="N", help="of the sampler (default: 0)")
    add_db(parser)
    about = "cases to prepare and measure side by side, on a GPU; they take turns on the device (default: 1)"
    parser.add_argument("--jobs", type=positive_int, metavar="N", help=about)
    parser.add_argument("--resume", action="store_true", help="keep the cases that FILE has and run the others")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--no-search", action="store_true", help="measure with what the database holds")
    parts.add_argument("--search-only", action="store_true", help="fill the database and measure nothing")
    parser.add_argument("--list", action="store_true", help="list the cases and run nothing")
    group = parser.add_argument_group("c3")
    about = "scenarios of your own, a file such as benchmarks/c3_scenarios.toml"
    group.add_argument("--scenarios", metavar="FILE", help=about)
    add_ranks(group)
    about = "do not measure what would be chosen without a search"
    group.add_argument("--no-heuristics", action="store_true", help=about)
    about = "at the end, compare the tuned strategies with the best one that is fixed"
    group.add_argument("--fixed", action="store_true", help=about)
    about = "the scenario whose timeline is drawn (default: the first of the equal class)"
    group.add_argument("--timeline", metavar="NAME", help=about)
    add_json(parser)
    parser.set_defaults(run=run)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("no name is given")
    return names


def run(args: argparse.Namespace) -> int:
    """Run the suite; returns 0, or 1 if a case could not be measured."""
    if args.suite == "c3":
        from autotune.domains.c3.cli import bench as c3_bench

        return c3_bench.run(args)
    only_of("c3", args, ("scenarios", "ranks", "no_heuristics", "fixed", "timeline"))
    with machine_output(args.json) as emit:
        if args.list:
            return _list(args, emit)
        from autotune.bench.report import render
        from autotune.bench.run import Settings
        from autotune.bench.run import run as run_suite
        from autotune.device import resolve_device

        device = resolve_device(args.device)
        if device == "cpu" and (args.jobs or 1) > 1:
            raise UserError(f"--jobs {args.jobs}: on a CPU, what compiles a case would disturb the timing of another")
        out = result_file(args)
        data, missing = run_suite(
            Settings(
                device=device,
                size=args.size or ("cpu" if device == "cpu" else "gpu"),
                out=out,
                command=_command(args),
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
    from autotune.bench.suite import CASES

    rows = [{"name": c.name, "kind": c.kind, "gpu": c.label("gpu"), "cpu": c.label("cpu")} for c in CASES.values()]
    emit({"cases": rows})
    if not args.json:
        for row in rows:
            print(f"{row['name']:36s} {row['kind']:9s} {row['gpu']}")
    return 0


def _command(args: argparse.Namespace) -> str:
    """The command to note in the file; without the database's URL, which may hold a password."""
    words = ["autotune", "bench", args.suite]
    for name in ("device", "size", "out", "cases", "peers", "ablation", "trials", "timeout", "seed", "jobs"):
        value = getattr(args, name)
        if value is not None and value != []:
            words += [f"--{name}", ",".join(value) if isinstance(value, list) else str(value)]
    words += ["--no-search"] if args.no_search else []
    return shlex.join(words)

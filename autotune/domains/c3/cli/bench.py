"""``autotune bench c3``: the scenarios, what each family of strategies and the tuned one make of them."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from autotune.cli.options import result_file
from autotune.cli.output import machine_output
from autotune.domains.c3.cli.scenario import ranks_of, serves
from autotune.runtime.database import deploying_from


def run(args: argparse.Namespace) -> int:
    """Run the suite; returns 0, or 1 if a scenario could not be measured."""
    with machine_output(args.json) as emit:
        if args.list:
            return _list(args, emit)
        from autotune.device import resolve_device
        from autotune.domains.c3.suite.report import render
        from autotune.domains.c3.suite.run import Settings
        from autotune.domains.c3.suite.run import run as run_suite

        device, out = resolve_device(args.device), result_file(args)
        settings = Settings(
            device=device,
            ranks=ranks_of(args, device),
            out=out,
            command=_command(args),
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
        with deploying_from(args.db):
            data, missing = run_suite(settings)
        if data is not None:
            emit(data)
    if data is not None and not args.json:
        print(render(data))
    for line in missing:
        print(f"autotune: NOT MEASURED: {line}", file=sys.stderr)
    return 1 if missing else 0


def _list(args: argparse.Namespace, emit: Any) -> int:
    from autotune.domains.c3.suite.suite import choose, load

    entries = choose(load(args.scenarios), args.cases)
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


def _command(args: argparse.Namespace) -> str:
    """The command to note in the file; without the database's URL, which may hold a password."""
    words = ["autotune", "bench", "c3"]
    for name in ("scenarios", "cases", "ranks", "device", "out", "trials", "timeout", "seed", "timeline"):
        value = getattr(args, name)
        if value is not None and value != []:
            words += [f"--{name}", ",".join(value) if isinstance(value, list) else str(value)]
    words += ["--no-search"] if args.no_search else []
    words += ["--no-rule"] if args.no_rule else []
    words += ["--fixed"] if args.fixed else []
    return shlex.join(words)

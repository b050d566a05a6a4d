"""``autotune bench fusion``: the cases, searched and measured beside the peers that are there."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from autotune.cli.options import result_file
from autotune.cli.output import machine_output
from autotune.errors import UserError


def run(args: argparse.Namespace) -> int:
    """Run the suite; returns 0, or 1 if a case could not be measured."""
    with machine_output(args.json) as emit:
        if args.list:
            return _list(args, emit)
        from autotune.bench.fusion.report import render
        from autotune.bench.fusion.run import Settings
        from autotune.bench.fusion.run import run as run_suite
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
    from autotune.bench.fusion.suite import CASES

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

"""``autotune lookup fusion``: what is stored for the regions of a program."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from autotune.cli import decided
from autotune.cli.commands.lookup import answer_of, check_target, print_ladders
from autotune.cli.output import TUNABLE, machine_output
from autotune.errors import UserError

if TYPE_CHECKING:
    from autotune.store import Verdict


def run(args: argparse.Namespace) -> int:
    """Look up; returns 0 whatever the match."""
    check_target(args)
    verdicts: list[Verdict] = []
    with machine_output(args.json) as emit:
        from autotune.cli.report import print_table
        from autotune.device import resolve_device
        from autotune.ir.precision import asking
        from autotune.runtime.deployment import deployment
        from autotune.runtime.lookup import ID, lookup, lookup_stored
        from autotune.store import attach_named

        if (store := attach_named(args.db, args.db_read)) is not None:
            store.close()
        device = resolve_device(args.device)
        if ID.fullmatch(args.target) and args.inputs is None:
            if args.train:
                raise UserError("--train: only of a target that is traced, and a region's id stands for itself")
            label = args.target
            with deployment().deploying_from(args.db, args.db_read):
                found = lookup_stored(args.target, device=device, strict=args.strict, explain=args.explain)
        else:
            from autotune.domains.fusion.program_spec import resolve, training

            fn, (inputs, kwargs), label = resolve(args.target, args.inputs, device, args.matmul_precision)
            given = training(fn, inputs, kwargs, label, train=args.train)
            source = deployment().deploying_from(args.db, args.db_read)
            with given as (positional, named), asking(args.precision), source:
                found = lookup(
                    fn, positional, kwargs=named, device=device, strict=args.strict, explain=args.explain, label=label
                )
            verdicts = decided.verdicts_on(args, label, device)
        answer = answer_of(label, device, found)
        emit({**answer, "verdicts": [decided.to_json(verdict) for verdict in verdicts]})
        if not args.json:
            if answer["workloads"]:
                print_table(answer)
                print_ladders(found)
                for verdict in verdicts:
                    print(*decided.lines(verdict), sep="\n")
            else:
                print(f"{label} has no memory-intensive region that this version can tune: {TUNABLE}")
            if found.unsupported:
                reasons = sorted({region.reason for region in found if region.workload is None})
                print(f"{found.unsupported} more cannot be tuned: {'; '.join(reasons)}", file=sys.stderr)
    return 0

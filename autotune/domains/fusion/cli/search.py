"""``autotune search fusion``: the regions of a program, whose step decides at the end what of them is deployed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autotune import numerics
from autotune.cli.commands.search import Program, search, search_in_step
from autotune.cli.decided import decide_step, is_decided
from autotune.cli.options import check_modes
from autotune.cli.output import BOTH_WAYS, TUNABLE
from autotune.errors import UserError

if TYPE_CHECKING:
    from autotune.cli.searched import Searched
    from autotune.domains.fusion.program_spec import Captured
    from autotune.store import Store
    from autotune.workload import Workload


def run(args: argparse.Namespace) -> int:
    """Search; returns 0, 1 if nothing could be measured, or 130 if it was interrupted."""
    return search(args, Program(_check, _capture, _finish))


def _check(args: argparse.Namespace, devices: Sequence[str]) -> None:
    from autotune.space import load_space

    if args.rows and args.missed:
        raise UserError("--rows goes with a target: what was missed has its own numbers of rows")
    if args.mode != ["default"]:
        check_modes(args.mode)
    if args.space:  # a mistake in the file is told before the target is captured, which takes seconds
        load_space("fusion", devices[0].partition(":")[0], args.space)


def _capture(
    args: argparse.Namespace, device: str, store: Store
) -> tuple[Sequence[tuple[Workload, int]], Mapping[str, Any]]:
    found = captured_target(args, device, store)
    if len(found.gradients) > 1:
        print(f"{args.target} {BOTH_WAYS}; --train searches training alone", file=sys.stderr)
    counts = dict(found.workloads)
    for rows in args.rows or ():
        for workload, count in captured_target(args, device, store, rows).workloads:
            counts.setdefault(workload, count)
    return list(counts.items()), {"capture": found.to_json(), "numerics": numerics.read()}


def _finish(args: argparse.Namespace, device: str, store: Store, searched: Searched, command: str) -> Searched:
    if not is_decided(args):
        return searched
    from autotune.bench.decide import lying_otherwise

    steps = decide_step(args, device, store, searched, command)
    missed = lying_otherwise(steps, searched.captured)
    others = [workload for where, workload in missed.values() if where == device]
    results = search_in_step(args, device, store, searched, others) if others else []
    if any(result.winner == "autotune" for result in results):
        searched = replace(searched, captured=searched.captured | missed.keys())
        steps = decide_step(args, device, store, searched, command) or steps
    answer = {
        **searched.answer,
        "in_step": [result.to_json() for result in results],
        "steps": [step.record() for step in steps],
    }
    return replace(searched, answer=answer, results=[*searched.results, *(r for r in results if r.interrupted)])


def captured_target(args: argparse.Namespace, device: str, store: Store, rows: int | None = None) -> Captured:
    """The regions of the command's target, captured or as an earlier run has stored them.

    Args:
        rows: another number of rows of its inputs.
    """
    from autotune.domains.fusion.program_spec import captured
    from autotune.domains.fusion.rederive import check_graph, check_source
    from autotune.ir.precision import asking

    def known(signature: str) -> list[tuple[Workload, int]] | None:
        """What an earlier run captured, if it is in the database as it was: else the target is captured again."""
        stored = store.captured(signature)
        intact = stored and not any(check_graph(w) or check_source(w) for w, _ in stored)
        return stored if intact else None

    with asking(args.precision):
        found = captured(
            args.target,
            args.inputs,
            device,
            train=args.train,
            rows=rows,
            known=known,
            matmul_precision=args.matmul_precision,
        )
    if not found.workloads:
        raise UserError(f"{args.target} has no memory-intensive region that this version can tune: {TUNABLE}")
    return found

"""Fusion's commands: options, ``search``, ``lookup`` and ``calibrate``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autotune import numerics
from autotune.cli import step_verdicts
from autotune.cli.commands.lookup import answer_of, check_target, print_ladders
from autotune.cli.commands.search import Search, SearchHooks
from autotune.cli.commands.search import search as search_with
from autotune.cli.options import check_modes, command_line, positive_int
from autotune.cli.output import BOTH_WAYS, TUNABLE, machine_output, microseconds
from autotune.compiler.planner.beam import PLANS
from autotune.errors import UserError, quoted_command
from autotune.ir.nodes import PRECISIONS, asking
from autotune.measure.policy import CACHES, default_policy
from autotune.runtime.deployment import deployment
from autotune.runtime.ladder import Level
from autotune.space import load_space
from autotune.store import attached
from autotune.words import plural
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.cli.searching import SearchOutcome
    from autotune.domains.fusion.program_spec import Captured
    from autotune.store import Store, Verdict

_TRAIN = {
    "search": "search the forward and the backward pass of TARGET, even if none of its tensors requires a gradient",
    "lookup": "also look up the backward pass, even if no tensor of TARGET requires a gradient",
    "compare": "a step is the forward and the backward pass, as for `autotune search --train` (default: the forward"
    " pass)",
}


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    """Add fusion's options of ``command``."""
    if command not in _TRAIN:
        return
    parser.add_argument("--train", action="store_true", help=_TRAIN[command])
    if command == "search":
        _add_search(parser)
    about = (
        "precision of the kernels: default, or strict, without fast math and other approximations; a program uses"
        " schedules of its own $AUTOTUNE_PRECISION (default: that variable, else default)"
    )
    parser.add_argument("--precision", choices=PRECISIONS, help=about)
    about = (
        "precision of the target's fp32 matrix products, as torch.set_float32_matmul_precision sets it; a verdict"
        " applies to programs with the same setting (default: the setting of TARGET's module)"
    )
    parser.add_argument("--matmul-precision", choices=numerics.MATMUL, help=about)


def _add_search(parser: argparse.ArgumentParser) -> None:
    about = (
        "also search the target with these numbers of rows (the inputs' first axis), such as 1,64,4096; another number"
        " of rows uses the schedule of the nearest one"
    )
    parser.add_argument("--rows", type=_rows, metavar="N,N,...", help=about)
    about = (
        "how a region is divided into kernels: by measuring the most promising plans (measured, the default), by the"
        " cost model (model), or into the largest groups (greedy)"
    )
    parser.add_argument("--plans", choices=PLANS, default="measured", help=about)
    about = (
        "caches when a candidate is timed: without its inputs (cold, the default), or as the previous run left them"
        " (warm), for regions whose inputs the step has just written, as in recurrences; programs use the result of"
        " the last search"
    )
    parser.add_argument("--caches", choices=CACHES, default="cold", help=about)
    step_verdicts.add_step(parser)


def _rows(text: str) -> list[int]:
    """argparse type: distinct numbers of rows, separated by commas."""
    return list(dict.fromkeys(positive_int(part.strip()) for part in text.split(",")))


def search(args: argparse.Namespace) -> int:
    """Search the regions of a program; a measurement of its whole step then decides what is deployed."""
    if args.missed and (args.target or args.inputs or args.train or args.precision or args.matmul_precision):
        left_out = "TARGET, --inputs, --train, --precision and --matmul-precision"
        raise UserError(f"--missed takes its workloads from the database: leave out {left_out}")
    return search_with(args, FusionHooks())


class FusionHooks(SearchHooks):
    """Hooks of the search of a program's regions."""

    def check(self, args: argparse.Namespace, devices: Sequence[str]) -> None:
        if args.rows and args.missed:
            raise UserError("--rows goes with a target: missed workloads have their own numbers of rows")
        if args.mode != ["default"]:
            check_modes(args.mode)
        if args.space:  # report an error in the file before the target is captured, which takes seconds
            load_space("fusion", devices[0].partition(":")[0], args.space)
        if args.ray:  # remote hosts do not inherit this host's variable
            args.precision = args.precision or os.environ.get("AUTOTUNE_PRECISION") or None

    def confines(self, args: argparse.Namespace) -> bool:
        return bool(args.space or args.plans != "measured" or args.caches != "cold")

    def capture(
        self, args: argparse.Namespace, device: str, store: Store
    ) -> tuple[Sequence[tuple[Workload, int]], Mapping[str, Any]]:
        found = captured_target(args, device, store)
        if len(found.gradients) > 1:
            print(f"{args.target} {BOTH_WAYS}; --train searches training alone", file=sys.stderr)
        counts = dict(found.workloads)
        for rows in args.rows or ():
            for workload, count in captured_target(args, device, store, rows).workloads:
                counts.setdefault(workload, count)
        return list(counts.items()), {"capture": found.to_json(), "numerics": numerics.read()}

    def options(self, args: argparse.Namespace, device: str) -> Mapping[str, Any]:
        policy = default_policy(device, args.caches) if args.caches != "cold" else None
        return {"plans": args.plans, "policy": policy}

    def reserved_s(self, args: argparse.Namespace) -> float:
        return step_verdicts.reserved_s(args) if _has_step(args) else 0.0

    def finish(
        self, args: argparse.Namespace, device: str, store: Store, searched: SearchOutcome, command: str
    ) -> SearchOutcome:
        if not _has_step(args):
            return searched
        from autotune.bench.decide import regions_in_other_layout

        steps = step_verdicts.decide_step(args, device, store, searched, command)
        missed = regions_in_other_layout(steps, searched.captured)
        others = [workload for where, workload in missed.values() if where == device]
        results = Search(args, [device], store, self).in_step(searched, others) if others else []
        if any(result.winner == "autotune" for result in results):
            searched = replace(searched, captured=searched.captured | missed.keys())
            steps = step_verdicts.decide_step(args, device, store, searched, command) or steps
        answer = {
            **searched.answer,
            "in_step": [result.to_json() for result in results],
            "steps": [step.record() for step in steps],
        }
        return replace(searched, answer=answer, results=[*searched.results, *(r for r in results if r.interrupted)])

    def advice(self, args: argparse.Namespace) -> str:
        if args.missed or ":" not in args.target:
            return ""
        from autotune.store.connection.urls import for_command

        given = {"AUTOTUNE_DB": args.db and for_command(args.db), "AUTOTUNE_PRECISION": args.precision}
        env = " ".join(f"{name}={quoted_command(value)}" for name, value in given.items() if value)
        use = f"{f'with {env}, ' if env else ''}torch.compile(model, backend='autotune') uses these results"
        return f"{use}; `{command_line('compare', args)}` times a step"

    def words(self, args: argparse.Namespace) -> list[str]:
        words = ["--rows", ",".join(map(str, args.rows))] if args.rows else []
        words += ["--train"] if args.train else []
        words += ["--precision", args.precision] if args.precision else []
        words += ["--matmul-precision", args.matmul_precision] if args.matmul_precision else []
        words += ["--plans", args.plans] if args.plans != "measured" else []
        return words + (["--caches", args.caches] if args.caches != "cold" else [])


def _has_step(args: argparse.Namespace) -> bool:
    """True if the command ends with a measurement of the target's step; a built-in target has none."""
    return not args.no_step and not args.missed and ":" in args.target


def captured_target(args: argparse.Namespace, device: str, store: Store, rows: int | None = None) -> Captured:
    """The regions of the command's target, captured or taken from an earlier run's entry in the database.

    Args:
        rows: another number of rows of the inputs.
    """
    from autotune.domain import domain_of
    from autotune.domains.fusion.program_spec import captured

    def known(signature: str) -> list[tuple[Workload, int]] | None:
        """Workloads captured by an earlier run, if the database still has all of them undamaged."""
        stored = store.captured(signature)
        intact = stored and not any(domain_of(w.kind).damage(w) for w, _ in stored)
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


def lookup(args: argparse.Namespace) -> int:
    """Look up the stored schedules of a program's regions; returns 0 at every match level."""
    check_target(args)
    verdicts: list[Verdict] = []
    with machine_output(args.json) as emit:
        from autotune.cli.output import print_table
        from autotune.device import resolve_device
        from autotune.runtime.lookup import ID, lookup, lookup_stored

        with attached(args.db, args.db_read):  # report an unusable database first
            pass
        device = resolve_device(args.device)
        by_id = ID.fullmatch(args.target) is not None and args.inputs is None
        if by_id:
            if args.train:
                raise UserError("--train goes with a target to trace, not with the id of a region")
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
            verdicts = step_verdicts.verdicts_on(args, label, device)
        answer = answer_of(label, device, found)
        emit({**answer, "verdicts": [step_verdicts.to_json(verdict) for verdict in verdicts]})
        if not args.json:
            if answer["workloads"]:
                print_table(answer)
                print_ladders(found)
                for verdict in verdicts:
                    print(*step_verdicts.lines(verdict), sep="\n")
                if (missing := sum(region.level is Level.NONE for region in found if region.workload)) and not by_id:
                    has, them = ("has", "it") if missing == 1 else ("have", "them")
                    of = f"{missing} of {plural(len(answer['workloads']), 'region')}"
                    print(f"{of} {has} no schedule: `{command_line('search', args)}` searches {them}")
            else:
                print(f"{label} has no memory-intensive region that this version can tune: {TUNABLE}")
            if found.unsupported:
                reasons = sorted({region.reason for region in found if region.workload is None})
                many = plural(found.unsupported, "more region")
                print(f"{many} cannot be tuned: {'; '.join(reasons)}", file=sys.stderr)
    return 0


def calibrate(args: argparse.Namespace) -> int:
    """Measure a device for the cost models.

    Returns:
        0, or 1 if nothing could be measured.
    """
    with machine_output(args.json) as emit:
        from autotune.device import identify, resolve_device
        from autotune.store import Store

        device = resolve_device(args.device)
        with Store.open(args.db) as store:
            figures = _measure(store, device, store.put_device(identify(device)))
        label = identify(device).label
        emit({"device": label, "figures": figures})
    if not args.json:
        missing = [f"{_ABOUT[n]}: not measured, so the built-in figure is used" for n in _ABOUT if n not in figures]
        print("\n".join([label, *(f"{_ABOUT[n]}: {value:.4g}" for n, value in figures.items()), *missing]))
    return 0 if figures else 1


def _measure(store: Any, device: str, fingerprint: str) -> Mapping[str, float]:
    from autotune.domains.fusion.calibrate import calibrate
    from autotune.domains.fusion.task import FusionTask
    from autotune.measure.worker import Measurer, Worker
    from autotune.store import Calibration

    policy = default_policy(device)
    workers: list[Worker] = []

    def measurer(task: FusionTask) -> Measurer:
        if not workers:
            workers.append(Worker(task.workload, device, policy))
        workers[0].open(task.workload)
        return workers[0]

    def show(name: str, us: float | None) -> None:
        print(f"{name}: {microseconds(us) if us is not None else 'failed'}", file=sys.stderr, flush=True)

    try:
        figures = calibrate(device, measurer, show)
    finally:
        for worker in workers:
            worker.close()
    if figures:
        store.put_calibration(Calibration(fingerprint, "fusion", figures))
    return figures


_ABOUT = {
    "copy_gbs": "copy, 10^9 bytes a second",
    "l2_gbs": "the same through the last-level cache",
    "first_us": "a single launch, us",
    "next_us": "each further launch, us",
    "ops_gs": "light operators, 10^9 a second",
    "heavy_gs": "special functions, 10^9 a second in the cost of light ones",
}

"""Verdicts on whole steps on the command line: timing the step, and printing the verdicts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune import numerics
from autotune.cli.options import modes, seconds
from autotune.cli.output import microseconds, ratio, ruled_table
from autotune.device import DeviceIdentity
from autotune.errors import printable
from autotune.numerics import Numerics, text
from autotune.space import is_number
from autotune.store import named_snapshot

if TYPE_CHECKING:
    from rich.table import Table

    from autotune.bench.decide import Decision
    from autotune.cli.searching import SearchOutcome
    from autotune.store import Store, Verdict

LIMIT_S = 120.0
STEP_SHARE = 0.15
"""Share of ``--timeout`` for the step in all modes together, if ``--step-timeout`` is not given."""
STEP_BUSY_NOTE = "busy: other processes disturbed the step's timing; search again on a quiet machine."


def add_step(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``autotune search`` for timing a program's step."""
    about = (
        "do not time the program's step at the end of the search: no new verdict is stored, and an earlier one stays"
    )
    parser.add_argument("--no-step", action="store_true", help=about)
    about = "modes of torch.compile in which the step is timed, separated by commas (default: default)"
    parser.add_argument("--mode", default=["default"], type=modes, metavar="M,...", help=about)
    about = (
        f"seconds to compile and time the step in each mode (default: {LIMIT_S:.0f}; with --timeout,"
        f" {STEP_SHARE:.0%}% of it for all modes)"
    )
    parser.add_argument("--step-timeout", type=seconds, metavar="S", help=about)


def reserved_s(args: argparse.Namespace) -> float:
    """Seconds of ``--timeout`` for the step; 0 if ``--step-timeout`` is given."""
    if args.timeout is None or args.step_timeout is not None:
        return 0.0
    return float(min(STEP_SHARE * args.timeout, LIMIT_S * len(args.mode)))


def decide_step(
    args: argparse.Namespace, device: str, store: Store, searched: SearchOutcome, command: str
) -> list[Decision]:
    """Time the step of the searched program, store the verdicts and print the decision on stderr.

    Returns:
        The decisions; empty if the search was cut short or found nothing.
    """
    if searched.interrupted or any(r.fault for r in searched.results) or not any(r.winner for r in searched.results):
        return []
    from autotune.api import decide_target

    return decide_target(
        store,
        args.target,
        args.inputs,
        device=device,
        matmul_precision=args.matmul_precision,
        train=args.train,
        modes=args.mode,
        limit_s=args.step_timeout or reserved_s(args) / len(args.mode) or LIMIT_S,
        command=printable(command),
        say=lambda line: print(f"autotune: {line}", file=sys.stderr, flush=True),
        searched=searched.captured,
    )


def steps(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """One verdict for each step, newest first: the verdicts on a step's graphs share one record."""
    found: dict[str, Verdict] = {}
    for verdict in verdicts:
        key = [verdict.device, verdict.environment, verdict.mode, verdict.record]
        found.setdefault(json.dumps(key, sort_keys=True, default=str), verdict)
    return list(found.values())


def verdicts_of(store: Store, args: argparse.Namespace, label: str, where: DeviceIdentity) -> list[Verdict]:
    """A database's verdicts on a command's target, newest first, timed under torch's current settings.

    Args:
        args: of a command with the options of a target.
        label: of the target.
        where: the device.
    """
    wanted = (printable(label), printable(args.inputs or ""), args.train)
    under = numerics.read([where.kind])
    own = (v for v in store.verdicts() if tuple(map(v.record.get, ("target", "inputs", "train"))) == wanted)
    return [v for v in own if v.device == where.fingerprint and numerics_of(v.record) == under]


def verdicts_on(args: argparse.Namespace, label: str, device: str, names: Sequence[str] | None = None) -> list[Verdict]:
    """The newest verdict of each mode on the target's step in the command's database, for the current software.

    Empty for a snapshot, which does not store the programs of its verdicts, and without a database.

    Args:
        args: of a command with the options of a target and of a database.
        label: of the target.
        device: "cpu" or "cuda:N".
        names: of the modes; None for all.
    """
    from autotune.device import environment, identify
    from autotune.store import Store

    store = None if named_snapshot(args.db) is not None else Store.attach(args.db, args.db_read)
    if store is None:
        return []
    with store:
        own = verdicts_of(store, args, label, identify(device))
        known = store.get_environments(v.environment for v in own)
    loose = environment(device).loose
    found: dict[str, Verdict] = {}
    for v in own:
        if v.environment in known and known[v.environment].loose == loose and (names is None or v.mode in names):
            found.setdefault(v.mode, v)
    return list(found.values())


def to_json(verdict: Verdict) -> dict[str, Any]:
    """A step's verdict for ``--json``."""
    return {**verdict.record, "mode": verdict.mode, "device": verdict.device, "created": verdict.when}


def numerics_of(record: Mapping[str, Any]) -> Numerics:
    """Torch's settings during a step's timing, from a verdict's record or a gate's; {} for an older record."""
    found = record.get("numerics")
    return found if isinstance(found, Mapping) else {}


def families(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The families in a record, without malformed entries: it may be from an untrusted source."""
    listed = record.get("families")
    return [f for f in listed if isinstance(f, Mapping)] if isinstance(listed, list) else []


def lines(verdict: Verdict, most: int = 8) -> list[str]:
    """A verdict as text: the step's times, and the gain of each family, at most ``most`` families."""
    record, every = verdict.record, families(verdict.record)
    left = [f for f in every if not f.get("kept")]
    kept = len(every) - len(left)
    said = f"{kept} of {len(every)} families of regions run stored kernels"
    said += f", {len(left)} are left to Inductor" if left else ""
    ours, best = record.get("autotune_us"), record.get("ratio")
    nothing = ours is None and is_number(best)  # with all regions left to Inductor the step is torch.compile's
    rewritten = record.get("attention_us")
    peer = f", {_us(rewritten)} with attention rewritten" if is_number(rewritten) else ""
    tried = " at best" if record.get("tries") else " with every stored kernel"
    took = f"{_us(record.get('compile_us'))}{peer}, autotune {f'{best:.3f}x{tried}' if nothing else _us(ours)}"
    said += " (the time was up before all were tried)" if left and record.get("cut") else ""
    found = [f"verdict, mode {printable(verdict.mode)}: torch.compile {took}; {said}"]
    if under := numerics_of(record):
        found.append(f"  timed with {printable(text(under))}")
    if verdict.busy:
        found.append(f"  {STEP_BUSY_NOTE}")
    shown = sorted(every, key=lambda f: bool(f.get("kept")))[:most]
    for f in shown:
        gain = f.get("gain_us")
        brings = "–"
        if is_number(gain):
            sign, where = "-" if gain < 0 else "+", "in the step" if f.get("gain_of") == "step" else "alone"
            brings = f"{sign}{_us(abs(gain))} {where}"
        fate = "kept" if f.get("kept") else "left"
        found.append(f"  {fate}  {brings}  {printable(str(f.get('count', '')))} x {printable(str(f.get('label', '')))}")
    if len(every) > len(shown):
        found.append(f"  and {len(every) - len(shown)} more: --json lists them")
    return found


def table(verdicts: Sequence[Verdict]) -> Table:
    """A table of steps with a verdict, one per line; a search in a program has no target, and lists no families."""
    from rich.markup import escape

    made = ruled_table("steps")
    made.add_column("target", overflow="fold", min_width=12)
    for column in ("mode", "torch.compile", "autotune", "speedup", "kept", "left"):
        made.add_column(column, justify="left" if column == "mode" else "right", no_wrap=True)
    for v in verdicts:
        record, every = v.record, families(v.record)
        kept = sum(bool(f.get("kept")) for f in every)
        theirs, ours = record.get("compile_us"), record.get("autotune_us")
        speedup = ratio(theirs / ours) if is_number(theirs) and is_number(ours) and ours else "–"
        target = str(record.get("target") or record.get("command", ""))
        target += " (training)" if record.get("train") else ""
        target += f" ({text(under)})" if (under := numerics_of(record)) else ""
        target += " (busy)" if v.busy else ""
        counts = (str(kept), str(len(every) - kept)) if every or "target" in record else ("–", "–")
        cells = (_us(theirs), _us(ours), speedup, *counts)
        made.add_row(escape(printable(target)), escape(printable(v.mode)), *cells)
    return made


def _us(value: Any) -> str:
    return microseconds(value if is_number(value) else None)

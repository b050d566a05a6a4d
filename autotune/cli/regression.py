"""``autotune compare --against`` and ``--save``: a step's record, and the check for a slower step."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune import numerics
from autotune.cli.options import share
from autotune.cli.output import aligned, microseconds
from autotune.cli.step_verdicts import numerics_of, verdicts_of
from autotune.device import DeviceIdentity
from autotune.errors import UserError, quoted_command
from autotune.files import check_output, commit

if TYPE_CHECKING:
    from autotune.bench.gate import Change
    from autotune.bench.step import Comparison
    from autotune.store import Verdict

SLOWER = 3
"""Exit code if a step became slower than its record, which is neither a failure nor a user error."""

WAYS = ("auto", "relative", "absolute")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the gate."""
    about = (
        "compare with an earlier record of the step, in a file that --save wrote, or with the verdict in a database;"
        f" exit code {SLOWER} if autotune's step became slower by more than the noise"
    )
    parser.add_argument("--against", metavar="FILE|URL", help=about)
    parser.add_argument("--save", metavar="FILE", help="add a record of the step to FILE, which may hold several")
    about = (
        "compare times (absolute), or ratios to eager mode's time in the same round (relative); auto is relative on a"
        " CPU and absolute on a GPU (default: auto; with a database, ratios to torch.compile's time)"
    )
    parser.add_argument("--gate", choices=WAYS, default="auto", help=about)
    about = "slowdown to accept, since times differ from run to run (default: 0.03, which is 3%%)"
    parser.add_argument("--tolerance", type=share, metavar="X", help=about)


def is_database(name: str) -> bool:
    return "://" in name or name.endswith((".db", ".sqlite", ".sqlite3"))


def check(args: argparse.Namespace) -> None:
    """Check that the record can be read and written, before anything is measured.

    Raises:
        UserError: invalid options, or a record that cannot be read or written.
    """
    from autotune.bench import gate

    if args.against is None and (args.gate != "auto" or args.tolerance is not None):
        raise UserError("--gate and --tolerance need --against FILE|URL")
    if "" in (args.save, args.against):  # an unset variable of a script would disable the gate
        raise UserError("--against and --save need a file name, which is empty")
    if args.save:
        check_output(Path(args.save), f"--save {args.save}", make=True)
        if Path(args.save).exists():
            gate.read(Path(args.save))
    if args.against and not is_database(args.against):
        gate.read(Path(args.against))
    elif args.against:
        from autotune.store import Store

        Store.open(args.against, migrate=False, readonly=True).close()


def recorded(args: argparse.Namespace, label: str, where: DeviceIdentity) -> Mapping[str, Any] | list[Verdict] | None:
    """The record of the step on this device in the file of ``--against``, or a database's verdicts, newest first.

    Raises:
        UserError: the record has no such step, or was made on another device, with other settings of torch, or by an
            earlier autotune.
    """
    from autotune.bench import gate

    if args.against is None:
        return None
    if is_database(args.against):
        return _verdicts(args, label, where)
    name = gate.name_of(label, args.inputs or "", args.train)
    record = gate.read(Path(args.against)).get(name)
    if record is None:
        add = quoted_command("--save", args.against)
        raise UserError(f"--against {args.against}: no record of step {name}: add one with {add}")
    if record["device"] != where.label:
        raise UserError(f"--against {args.against}: the record of {name} is of {record['device']}, not {where.label}")
    if (then := numerics_of(record)) != (now := numerics.read([where.kind])):
        was, under = (numerics.text(found) or "torch's defaults" for found in (then, now))
        raise UserError(f"--against {args.against}: the record of {name} was timed with {was}, not with {under}")
    if not _timed_alike(record, where):
        again = quoted_command("--save", args.against)
        raise UserError(f"--against {args.against}: the record of {name} was timed {_RESTED}: replace it with {again}")
    return record


_RESTED = "by an earlier autotune at another clock of the GPU"


def _timed_alike(record: Mapping[str, Any], where: DeviceIdentity) -> bool:
    from autotune.bench.step import lead_s

    return float(record.get("lead_s", 0.0)) == lead_s(where.kind)


def _verdicts(args: argparse.Namespace, label: str, where: DeviceIdentity) -> list[Verdict]:
    from autotune.store import Store

    if args.gate == "absolute":
        raise UserError("--gate absolute needs samples: compare --against a file that --save wrote")
    with Store.open(args.against, migrate=False, readonly=True) as store:
        own = verdicts_of(store, args, label, where)
    if not any(v.mode in args.mode for v in own):
        raise UserError(_NONE)
    alike = [v for v in own if _timed_alike(v.record, where)]
    if not any(v.mode in args.mode for v in alike):
        raise UserError(f"--against: the database's verdict on this step was timed {_RESTED}: search the target again")
    return alike


_NONE = (
    "--against: the database has no verdict on this step, device, mode and precision: search the target, or compare"
    " --against a file that --save wrote"
)


def judged(
    args: argparse.Namespace,
    label: str,
    where: DeviceIdentity,
    found: Comparison,
    record: Mapping[str, Any] | list[Verdict] | None,
) -> list[Change]:
    """Write the record if ``--save`` is given, and compare with the result of :func:`recorded`."""
    from autotune.bench import gate
    from autotune.bench.step import AUTOTUNE, EAGER, lead_s
    from autotune.device import environment

    samples = {who: step.samples for who, step in found.steps.items()}
    subjects = [who for who in found.of(AUTOTUNE) if who in found.steps]
    changes: list[Change] = []
    if record is not None and subjects:
        tolerance = gate.TOLERANCE if args.tolerance is None else args.tolerance
        if isinstance(record, list):
            changes = _against(record, found, tolerance)
        else:
            relative = args.gate == "relative" or (args.gate == "auto" and found.device == "cpu")
            changes = gate.changes(record, samples, subjects, relative=relative, tolerance=tolerance)
    if args.save:
        kept = {who: [round(us, 3) for us in samples[who]] for who in (EAGER, *subjects) if who in samples}
        about = {"device": where.label, "lead_s": lead_s(found.device), "commit": commit()}
        about["numerics"] = numerics.read([found.device])
        about["environment"] = environment(found.device).to_json()
        name = gate.name_of(label, args.inputs or "", args.train)
        gate.save(Path(args.save), name, {**about, "samples": kept})
    return changes


def _against(verdicts: list[Verdict], found: Comparison, tolerance: float) -> list[Change]:
    """Changes against the newest verdict of each mode."""
    from autotune.bench import gate
    from autotune.bench.step import AUTOTUNE, COMPILE

    samples = {who: step.samples for who, step in found.steps.items()}
    changes = []
    for mode, ours, peer in zip(found.modes, found.of(AUTOTUNE), found.of(COMPILE), strict=True):
        verdict = next((v for v in verdicts if v.mode == mode), None)
        if verdict is None or ours not in samples or peer not in samples:
            continue
        change = gate.against_verdict(verdict.record, ours, samples, peer, tolerance)
        changes += [change] if change else []
    if not changes:
        raise UserError(_NONE)
    return changes


def lines(args: argparse.Namespace, changes: Sequence[Change]) -> list[str]:
    """The lines of a short table and its explanation."""
    from autotune.bench.gate import ALPHA

    if not changes:
        return [f"record saved in {args.save}"] if args.save else []
    rows = [("against the record", "was", "now", "change", "at least", "")]
    for c in changes:
        numbers = (microseconds(c.was_us), microseconds(c.now_us), f"{c.change:+.1%}", f"{c.low:+.1%}")
        rows.append((c.contender, *numbers, "SLOWER" if c.slower else "ok"))
    over = f"; the change is that of the time over {changes[0].over}'s in the same rounds" if changes[0].over else ""
    allowed = f"at least {changes[0].tolerance:.0%} counts as SLOWER, with {ALPHA:.0%} of false alarms{over}"
    return [*aligned(rows, left=(0, 5)), allowed, *([f"record saved in {args.save}"] if args.save else [])]

"""``autotune show``: list the contents of the database; and ``autotune workloads``: the built-in targets."""

from __future__ import annotations

import argparse
import functools
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from autotune.cli.options import add_db, add_json, every_domain, natural_int
from autotune.cli.output import BUSY_NOTE, console, figure_text, machine_output, ratio, ruled_table
from autotune.cli.step_verdicts import STEP_BUSY_NOTE, steps, to_json
from autotune.cli.step_verdicts import table as table_of_steps
from autotune.domain import Figure, figure_of, has_figures
from autotune.errors import UserError, quoted_command
from autotune.store import named_snapshot
from autotune.words import plural

if TYPE_CHECKING:
    from autotune.store import Miss, Overview, Snapshot, Store, Verdict

    Units = dict[str, Figure]
    """Workload to the conversion of its latency to a number and a unit."""

NEWEST = 200
"""Default number of lines of the table."""


def add_parser(subparsers: Any) -> None:
    """Add ``show`` to the command line."""
    parser = subparsers.add_parser(
        "show",
        help="list the schedules, verdicts and misses of the database",
        description="List the searched workloads with their best times, the verdicts on steps, and the number of "
        "misses.",
    )
    about = f"list only the newest N workloads (default: {NEWEST}, with --json all; 0: all)"
    parser.add_argument("--limit", type=natural_int, metavar="N", help=about)
    about = (
        "list the device hours that stored kernels saved, by program, device and week; programs count their steps if"
        " AUTOTUNE_SAVINGS=1 is set"
    )
    parser.add_argument("--saved", action="store_true", help=about)
    add_db(parser)
    add_json(parser)
    parser.set_defaults(run=show)


def show(args: argparse.Namespace) -> int:
    """Print one line for each workload and device, newest first, and the misses."""
    from autotune.store import Store

    if args.saved:
        return _show_saved(args)
    limit = (None if args.json else NEWEST) if args.limit is None else args.limit or None
    if (frozen := named_snapshot(args.db)) is not None:
        return _show(args, *_frozen(frozen, limit))
    with Store.open(args.db, migrate=False, readonly=True) as store:
        rows, misses, name = store.overview(limit), store.misses(), store.name
        known = store.names(m.workload for m in misses)
        units = _units(rows, store)
        verdicts = steps(store.verdicts())
        count = store.tuned_count() if len(rows) == limit else len(rows)
    return _show(args, rows, count, name, misses, known, verdicts, units)


def _show_saved(args: argparse.Namespace) -> int:
    from autotune.runtime.savings import saved
    from autotune.store import Store

    if named_snapshot(args.db) is not None:
        raise UserError("a snapshot has no counted steps: name a database with --db")
    with Store.open(args.db, migrate=False, readonly=True) as store:
        found, name = saved(store.savings(), store.verdicts()), store.name
        devices = store.get_devices({one.device for one in found})
    labels = {key: device.label for key, device in devices.items()}
    if args.json:
        entries = [{**one.to_json(), "device_name": labels.get(one.device, "")} for one in found]
        print(json.dumps({"database": name, "saved": entries}))
        return 0
    from rich.markup import escape

    out = console()
    if not found:
        text = f"No steps are counted in {name}: set AUTOTUNE_SAVINGS=1 for programs to count them."
        out.print(text, markup=False, highlight=False, soft_wrap=True)
        return 0
    table = ruled_table(name)
    for column in ("program", "device", "week of"):
        table.add_column(column, overflow="fold")
    for column in ("steps", "measured", "assumed", "saved"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in found:
        hours = [f"{h:.3g} h" for h in (one.measured_h, one.assumed_h, one.hours)]
        table.add_row(
            escape(one.program), escape(labels.get(one.device, one.device[:8])), one.week, str(one.steps), *hours
        )
    out.print(table)
    measured, total = sum(one.measured_h for one in found), sum(one.hours for one in found)
    share = f", {measured / total:.0%} of it measured in whole steps" if total else ""
    out.print(f"{total:.3g} device hours saved{share}; the rest is assumed from regions alone.", highlight=False)
    return 0


Frozen = tuple[list["Overview"], int, str, list["Miss"], dict[str, tuple[str, str]], list["Verdict"], "Units"]


def _frozen(file: str, limit: int | None) -> Frozen:
    """A snapshot's schedules, newest first, their number in all, and its name; it has no misses and no steps."""
    from autotune.store import Overview, Snapshot

    snapshot = Snapshot(file)
    every = sorted(snapshot.schedules(), key=lambda s: -s.when)
    workloads = snapshot.get_workloads(s.key.workload for s in every[:limit])
    names = {device.fingerprint: device.name for device in snapshot.devices}
    rows = []
    for s in every[:limit]:
        w, best = workloads.get(s.key.workload), min(s.rivals.values(), default=None)
        rows.append(
            Overview(
                s.key.workload, w.label if w else "", w.kind if w else "", s.key.device, names[s.key.device],
                best_us=s.latency_us, winner=s.winner, baselines=s.rivals,
                speedup=best / s.latency_us if best else None, busy=s.busy, when=s.when,
            )
        )  # fmt: skip
    about = snapshot.about
    software = ", ".join(f"{name} {about[name]}" for name in ("autotune", "torch", "cuda", "driver") if about.get(name))
    signed = ", signed" if snapshot.signed else ""
    units = _units(rows, snapshot)
    snapshot.close()
    name = f"{snapshot.name} (snapshot of {about.get('created', '?')}, {software}{signed})"
    return rows, len(every), name, [], {}, [], units


def _units(rows: list[Overview], source: Store | Snapshot) -> Units:
    """The units of workloads whose domain measures another quantity than time."""
    kinds = {kind for kind in {row.kind for row in rows} if has_figures(kind)}
    workloads = source.get_workloads({row.workload for row in rows if row.kind in kinds})
    return {name: unit for name, workload in workloads.items() if (unit := figure_of(workload)) is not None}


def _show(
    args: argparse.Namespace,
    rows: list[Overview],
    count: int,
    name: str,
    misses: list[Miss],
    known: dict[str, tuple[str, str]],
    verdicts: list[Verdict],
    units: Units,
) -> int:
    if args.json:
        missed = [
            {"workload": m.workload, "label": known.get(m.workload, ("", ""))[0],
             "device": m.device, "count": m.count, "reason": m.reason} for m in misses
        ]  # fmt: skip
        print(json.dumps({"database": name, "tuned": [_to_json(r, units.get(r.workload)) for r in rows],
                          "steps": [to_json(v) for v in verdicts], "missed": missed}))  # fmt: skip
        return 0
    from rich.markup import escape

    out = console()
    if not rows:
        first = quoted_command("autotune", "search", "fusion", "layer_norm", *_db_words(args))
        hint = "" if misses else f": `{first}` makes one"  # a line below has the command for misses
        out.print(f"{name} has no schedules yet{hint}.", markup=False, highlight=False, soft_wrap=True)
    else:
        table = ruled_table(name)
        table.add_column("workload", overflow="fold", min_width=12)
        table.add_column("id", no_wrap=True)
        table.add_column("device", overflow="fold", min_width=8)
        failures = any(r.failed for r in rows)
        metrics = any(r.metrics for r in rows)
        optional = {"failed": failures, "figures": metrics}
        for column in ("tried", "failed", "best", "figures", "baselines", "speedup"):
            if not optional.get(column, True):
                continue
            table.add_column(column, justify="right", no_wrap=True)
        for r in rows:
            failed = sum(r.failed.values())
            written = functools.partial(figure_text, units.get(r.workload))
            table.add_row(
                escape(r.label or r.kind),
                r.workload[:8],
                escape(r.device_name or r.device[:8]),
                str(r.measured),
                *([str(failed) if failed else "–"] if failures else []),
                escape(written(r.best_us))
                + (f"\n({escape(r.winner)})" if r.winner and r.winner != "autotune" else "")
                + ("\n(busy)" if r.busy else ""),
                *(["\n".join(escape(f"{v:.4g} {n}") for n, v in sorted(r.metrics.items())) or "–"] if metrics else []),
                "\n".join(escape(f"{n} {written(us)}") for n, us in sorted(r.baselines.items())) or "–",
                ratio(r.speedup),
            )
        out.print(table)
        if count > len(rows):
            more = f"These are the newest {len(rows)} of {count}: --limit N shows more."
            out.print(more, highlight=False, soft_wrap=True)
        if any(r.busy for r in rows):
            out.print(BUSY_NOTE, highlight=False)
    if timed := [v for v in verdicts if v.timed]:
        out.print(table_of_steps(timed))
        if any(v.busy for v in timed):
            out.print(STEP_BUSY_NOTE, highlight=False)
    kinds = Counter(known.get(m.workload, ("", "fusion"))[1] for m in misses)
    for kind, count in sorted(kinds.items()):
        domain = [] if kind == "fusion" else [kind]
        command = quoted_command("autotune", "search", *domain, "--missed", *_db_words(args))
        line = f"{plural(count, 'missed workload')}: `{command}` searches {'it' if count == 1 else 'them'}."
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def _db_words(args: argparse.Namespace) -> list[str]:
    from autotune.store.connection.urls import for_command

    return ["--db", for_command(args.db)] if args.db else []


def _to_json(row: Overview, unit: Figure | None) -> dict[str, Any]:
    """The JSON object of a row, with ``figure`` if the workload is measured in something other than time."""
    data = row.to_json()
    if unit is not None and row.best_us is not None:
        data["figure"] = dict(zip(("value", "unit"), unit(row.best_us), strict=True))
    return data


def add_workloads(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "workloads", help="list the built-in targets", description="List the built-in targets."
    )
    add_json(parser)
    parser.set_defaults(run=run_workloads)


def run_workloads(args: argparse.Namespace) -> int:
    """Print names and descriptions."""
    with machine_output(args.json) as emit:
        rows = [
            {"domain": kind, "name": name, "about": about}
            for kind, domain in every_domain().items()
            for name, about in domain.targets().items()
        ]
        emit({"workloads": rows})
        if not args.json:
            _print_targets(rows)
    return 0


def _print_targets(rows: list[dict[str, str]]) -> None:
    from rich.table import Table

    table = Table("domain", "name", "computes", box=None, pad_edge=False)
    for row in rows:
        table.add_row(row["domain"], row["name"], row["about"])
    console().print(table)

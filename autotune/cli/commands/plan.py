"""``autotune plan``: preview a target's kernels, without a search and without the device."""

from __future__ import annotations

import argparse
import dataclasses
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli.options import add_db, add_json, add_replica, add_target, command_line
from autotune.cli.output import BOTH_WAYS, TUNABLE, machine_output
from autotune.compiler.schedules.cuda import schemes
from autotune.errors import Unsupported, UserError
from autotune.files import check_output, whole_file
from autotune.store import attached
from autotune.task import Config
from autotune.words import NARROW, microseconds, plural, size, wrapped_table
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.domains.fusion.anatomy import Anatomy, GroupAnatomy, Operator
    from autotune.domains.fusion.inspection import EagerCost, Outside, Planned
    from autotune.store import Reader

WIDTH = NARROW
PLACES = {
    "thread": "thread (registers)",
    "warp": "warp (shuffles)",
    "block": "block (shared memory)",
    "cluster": "cluster (shared memory of several blocks)",
    "grid": "grid (global memory)",
    "again": "nowhere (recomputed)",
    "output": "global memory",
}


@dataclass(frozen=True)
class RegionPlan:
    """One region of the output.

    Attributes:
        label: short human name.
        count: number of occurrences in the target.
        schedule: "default", or the origin of the stored schedule.
        before: cost in eager mode.
        after: the region's kernels; None without kernels, for the reason in ``reason``.
        predicted_us: time of these kernels on an H200 by the cost model; None on a CPU and for schemes without one.
        bytes_us: time of the bytes of the region alone; None on a CPU.
    """

    label: str
    count: int
    workload: Workload | None
    schedule: str
    before: EagerCost
    after: Anatomy | None
    reason: str = ""
    predicted_us: float | None = None
    bytes_us: float | None = None

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "workload": self.workload.fingerprint if self.workload else None,
            "label": self.label,
            "count": self.count,
            "schedule": self.schedule,
            "before": self.before.to_json(),
            "after": self.after.to_json() if self.after else None,
            "reason": self.reason,
            "predicted_us": self.predicted_us and round(self.predicted_us, 1),
            "bytes_us": self.bytes_us and round(self.bytes_us, 1),
        }


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "plan",
        help="show the regions and kernels of a target, without a search",
        description="Show the regions of a target, the kernels of each region, the memory that holds values between "
        "operators, and the number of kernels and bytes in eager mode and with autotune. A region without a stored "
        "schedule is shown with the default schedule. This command compiles and runs nothing, and needs no device.",
    )
    add_target(parser, names=("fusion",))
    about = "kind of device to plan for, which this machine need not have (default: cuda)"
    parser.add_argument("--device", default="cuda", metavar="cpu|cuda", help=about)
    about = "also plan the backward pass, even if no input requires a gradient"
    parser.add_argument("--train", action="store_true", help=about)
    about = "list the operators that Inductor compiles: the number of calls, the bytes moved, and the reason"
    parser.add_argument("--why", action="store_true", help=about)
    parser.add_argument("--svg", metavar="FILE", help="write a drawing of the regions to FILE")
    add_db(parser)
    add_replica(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan; returns 0."""
    with machine_output(args.json) as emit:
        from autotune.domains.fusion.program_spec import side_of

        side = side_of(args.device)
        file = _writable(args.svg) if args.svg else None
        with attached(args.db, args.db_read) as store:
            regions, found = plan_target(args.target, args.inputs, args.device, store, train=args.train)
        if not regions and not (args.why and found.why):
            raise UserError(f"{args.target} has no memory-intensive region that this version can tune: {TUNABLE}")
        if file:
            _draw(file, args.target, args.device, regions)
        emit(
            {
                "target": args.target,
                "device": side,
                **totals(regions),
                "regions": [region.to_json() for region in regions],
                "outside": dict(found.outside),
                **({"why": [dataclasses.asdict(calls) for calls in found.why]} if args.why else {}),
            }
        )
    if not args.json:
        print("\n".join(text(args.target, side, regions, found, why=args.why)))
        if any(region.schedule == "default" for region in regions):
            from autotune.domains.fusion.inspection import here

            where = "" if here(args.device) else f", on a machine with a device {args.device}"
            print(f"\n`{command_line('search', args)}` searches faster schedules{where}")
        if file:
            print(f"\ndrawing written to {file}")
    return 0


def plan_target(
    target: str, inputs: str | None, device: str, store: Reader | None = None, *, train: bool = False
) -> tuple[list[RegionPlan], Planned]:
    """The regions of a target with their plans, and the capture that contains them.

    Args:
        target, inputs: as for ``autotune search``.
        device: "cpu", "cuda" or "cuda:N"; need not exist.
        store: database of schedules; None for the defaults.
        train: plan the backward pass too.

    Raises:
        UserError: invalid target or inputs.
    """
    from autotune.domains.fusion.anatomy import dissect
    from autotune.domains.fusion.inspection import eager_cost, planned
    from autotune.domains.fusion.program_spec import side_of
    from autotune.domains.fusion.task import FusionTask

    side = side_of(device)
    found = planned(target, inputs, device, train=train)
    out = []
    for distinct in found.regions:
        region, workload, count = distinct.region, distinct.region.workload, distinct.count
        before = eager_cost(region.submodule)
        if workload is None or distinct.reason:
            label = workload.label if workload else ", ".join(before.operators)
            out.append(RegionPlan(label, count, workload, "", before, None, distinct.reason))
            continue
        try:
            task = FusionTask(workload, device, "sm_90", _SMS)
            config, schedule = _stored(store, workload, side, device) or (task.default(), "default")
            after = dissect(task.graph, config, side, _SMS)
            predicted = task.predict(config) if side == "cuda" else None
            known = predicted if predicted and math.isfinite(predicted) else None
            alone = task.estimates.copy_us(task.graph.bytes_moved) if side == "cuda" else None
        except Unsupported as error:
            out.append(RegionPlan(workload.label, count, workload, "", before, None, str(error)))
            continue
        out.append(RegionPlan(workload.label, count, workload, schedule, before, after, "", known, alone))
    return out, found


_SMS = 132
"""Multiprocessors assumed for grids that depend on them: those of an H100 or H200."""


def _stored(store: Reader | None, workload: Workload, side: str, device: str) -> tuple[Config, str] | None:
    """(configuration, origin) of the newest stored schedule for the workload; only of this machine's device if it
    exists."""
    if store is None:
        return None
    from autotune.device import identify
    from autotune.domains.fusion.inspection import here

    own = identify(device).fingerprint if here(device) else ""
    found = [s for s in store.schedules(own or None, workload=workload.fingerprint) if s.config]
    for schedule in sorted(found, key=lambda s: -s.when):
        where = store.get_device(schedule.key.device)
        if where is not None and where.kind == side and schedule.config is not None:
            return schedule.config, f"stored, {schedule.latency_us:.3g} us on {where.label}"
    return None


def totals(regions: Sequence[RegionPlan]) -> dict[str, Any]:
    """Sums over the regions, each times its count; a region without kernels counts with its eager cost in both."""
    before = {"kernels": 0, "bytes": 0}
    after = {"kernels": 0, "bytes": 0, "scratch_bytes": 0, "cost": 0}
    for r in regions:
        before["kernels"] += r.count * r.before.kernels
        before["bytes"] += r.count * r.before.bytes
        after["kernels"] += r.count * (r.after.kernels if r.after else r.before.kernels)
        after["bytes"] += r.count * (r.after.bytes if r.after else r.before.bytes)
        if r.after:
            after["scratch_bytes"] = max(after["scratch_bytes"], r.after.scratch_bytes)
            after["cost"] += r.count * r.after.cost
    return {"before": before, "after": after}


def _writable(name: str) -> Path:
    """Check that the file can be written, before the seconds of capturing the target; raises UserError."""
    path = Path(name)
    if path.suffix.lower() not in {"", ".svg"}:
        raise UserError(f"--svg {name}: pictures are SVG; name it {path.with_suffix('.svg')}")
    check_output(path, f"--svg {name}")
    return path


def _draw(file: Path, target: str, device: str, regions: Sequence[RegionPlan]) -> None:
    from autotune.domains.fusion.picture import draw
    from autotune.domains.fusion.svg_layout import Drawing

    drawings = [
        Drawing(_title(r), _before(r), _after(r.after), r.after) for r in regions if r.after is not None
    ]  # fmt: skip
    try:
        with whole_file(file) as out:
            out.write(draw(f"{target} on {device}", drawings).encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise UserError(f"--svg {file}: {error.strerror}") from error


# Text ---------------------------------------------------------------------------------------------


def text(target: str, side: str, regions: Sequence[RegionPlan], found: Planned, *, why: bool = False) -> Iterator[str]:
    """The plan as lines of at most :data:`WIDTH` columns; ``why`` adds a table of operators that Inductor compiles."""
    sums = totals(regions)
    before, after = sums["before"], sums["after"]
    yield f"{target} for {side}: {plural(len(regions), 'region')}"
    yield f"in eager mode: {plural(before['kernels'], 'kernel')}, {size(before['bytes'])} moved"
    yield f"with autotune: {plural(after['kernels'], 'kernel')}, {size(after['bytes'])} moved"
    timed = [r for r in regions if r.bytes_us]
    if timed:
        alone = sum(r.count * (r.bytes_us or 0.0) for r in timed)
        line = _predicted(sum(r.count * (r.predicted_us or r.bytes_us or 0.0) for r in timed), alone)
        unknown = sum(not r.predicted_us for r in timed)
        yield line + (f" ({unknown} without a model)" if unknown else "")
    if len(found.gradients) > 1:
        yield from _wrapped(f"{target} {BOTH_WAYS}; --train plans training alone", "")
    if why:
        yield from why_lines(found.why)
    elif found.outside:
        yield from _wrapped(f"outside of regions, left to Inductor: {_counts(found.outside)}", "")
    for n, region in enumerate(regions):
        yield ""
        yield _cut(f"{n + 1}. {_title(region)}")
        yield from _wrapped(f"before: {_before(region)} ({_counts(region.before.operators)})", "   ")
        if region.after is None:
            yield from _wrapped(f"left to Inductor: {region.reason}", "   ")
            continue
        yield from _wrapped(f"after:  {_after(region.after)}", "   ")
        if region.bytes_us:
            yield f"   {_predicted(region.predicted_us, region.bytes_us)}"
        yield from _wrapped(f"plan:   {region.after.plan} ({region.schedule})", "   ")
        for number, launch in enumerate(region.after.launches):
            yield from _launch(number, launch)


def _predicted(us: float | None, bytes_us: float) -> str:
    known = "no model" if us is None else microseconds(us)
    return f"predicted for an H200: {known}, {microseconds(bytes_us)} by bytes alone"


def why_lines(outside: Sequence[Outside]) -> Iterator[str]:
    """A table of the operators that Inductor compiles, at most :data:`autotune.words.NARROW` columns wide."""
    if not outside:
        yield "Inductor compiles only views"
        return
    yield ""
    head = ("operator", "calls", "moved", "why Inductor compiles it")
    rows = [
        (calls.operator, str(calls.count), "unknown" if calls.bytes is None else size(calls.bytes), calls.reason)
        for calls in outside
    ]
    yield from wrapped_table(head, rows)


def _title(region: RegionPlan) -> str:
    return region.label + (f", {region.count} times" if region.count > 1 else "")


def _before(region: RegionPlan) -> str:
    return f"{plural(region.before.kernels, 'kernel')}, {size(region.before.bytes)} moved"


def _after(after: Anatomy | None) -> str:
    assert after is not None
    scratch = f", {size(after.scratch_bytes)} of scratch" if after.scratch_bytes else ""
    return f"{plural(after.kernels, 'kernel')}, {size(after.bytes)} moved{scratch}, {quantity(after.cost)} operations"


def _counts(operators: Any) -> str:
    return ", ".join(f"{n} {name}" if n > 1 else name for name, n in operators.items())


def _launch(number: int, groups: Sequence[GroupAnatomy]) -> Iterator[str]:
    from autotune.domains.fusion.svg_layout import folded

    yield f"   launch {number + 1}" + (f", {len(groups)} groups" if len(groups) > 1 else "")
    for group, many in folded(groups):
        yield from _group(group, many)


def _group(group: GroupAnatomy, many: int) -> Iterator[str]:
    kernels = f", {group.kernels} kernels" if group.kernels > 1 else ""
    times = f"{many} groups of this form, the first of " if many > 1 else ""
    yield from _wrapped(f"{times}{group.shape}; scheme {group.scheme}{kernels}; {', '.join(group.roots)}", "     ")
    yield from _wrapped(schedule_words(group), "       ")
    stored = dict(group.stores)
    for step in range(group.steps):
        ops = [o for o in group.operators if o.step == step]
        parts = []
        reads = [o for o in ops if o.kind == "load"]
        if reads:
            parts.append("read " + ", ".join(dict.fromkeys(o.name.rpartition(" ")[0] for o in reads)))
        point = [o for o in ops if o.kind in ("pointwise", "leaf")]
        if point:
            parts.append(_counts(Counter(o.name for o in point)))
        for home in dict.fromkeys(o.home for o in ops if o.kind == "reduction"):
            reduced = [o for o in ops if o.kind == "reduction" and o.home == home]
            parts.append(f"{_counts(Counter(o.name for o in reduced))} in {PLACES[home]}")
        writes = [stored[o.value] for o in ops if o.value in stored and not _finished(o)]
        if writes:
            parts.append("write " + ", ".join(writes))
        late = {value for o in group.operators if o.step > step for value in o.args}
        waits = [o for o in ops if o.kind != "reduction" and o.value in late]
        for home in dict.fromkeys(o.home for o in waits):
            values = plural(sum(o.home == home for o in waits), "value")
            parts.append(f"{values} recomputed later" if home == "again" else f"keep {values} in {PLACES[home]}")
        label = f"pass {step + 1}: " if group.steps > 1 else ""
        yield from _wrapped(label + "; ".join(parts), "       ")
    if group.private_bytes:
        after = [stored[o.value] for o in group.operators if o.value in stored and _finished(o)]
        line = f"{size(group.private_bytes)} of partial results in global memory"
        yield from _wrapped(line + (f"; from them {', '.join(after)}" if after else ""), "       ")


def _finished(o: Operator) -> bool:
    """Return True if a result is only available when all blocks are done."""
    return o.kind == "reduction" and o.home == "grid"


def schedule_words(group: GroupAnatomy) -> str:
    """A group's schedule as text."""
    c = group.config
    if group.scheme == "cpu":
        parts, block = int(c.get("parts", 0)), int(c.get("row_block", 1))
        how = f"{plural(parts, 'part')} a thread" if parts else f"{plural(block, 'row')} at a time"
        how += ", streaming stores" if c.get("stream") else ""
        how += ", fetching ahead" if c.get("prefetch") else ""
        return f"{plural(int(c.get('threads', 1)), 'thread')}, {how}"
    words = [schemes()[group.scheme].threads(c)] if "threads_per_row" in c else []
    if "vector_bytes" in c:
        words.append(f"{c['vector_bytes']}-byte accesses")
    if int(c.get("cluster", 1) or 1) > 1:
        words.append(f"clusters of {c['cluster']} blocks")
    if int(c.get("blocks_per_sm", 0) or 0):
        words.append(f"a grid of {c['blocks_per_sm']} blocks an SM")
    return ", ".join(words) or "its own schedule"


def _wrapped(line: str, indent: str) -> list[str]:
    return textwrap.wrap(
        line, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )  # fmt: skip


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def quantity(n: int) -> str:
    """A large number with three significant digits."""
    value = float(n)
    for unit in ("", " thousand", " million", " billion"):
        if value < 1000 or unit == " billion":
            return f"{value:.3g}{unit}"
        value /= 1000
    return str(n)

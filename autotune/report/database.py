"""Pages from a database: a search's own results."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune import charts
from autotune.charts import Exhibit
from autotune.device import DeviceIdentity
from autotune.domain import Figure, figure_of, known_domain
from autotune.errors import printable, requoted_command
from autotune.report.site import (
    KINDS,
    Cell,
    Page,
    Point,
    count_cell,
    microseconds,
    page_id,
    percent,
    ratio,
    ratio_cell,
    time_cell,
)
from autotune.runtime.savings import Saved, saved
from autotune.space import is_number
from autotune.store.records import Key, Measurement, Schedule
from autotune.task import Status
from autotune.words import figure_text, size
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.store import Overview, Store, Verdict

log = logging.getLogger(__name__)

_REASONS = 12
"""Maximum number of listed failure reasons."""

_CONFIG = 160
"""Maximum characters of a configuration in a point's tooltip."""


def pages(store: Store) -> Iterator[Page]:
    """Yield a page for each workload and device, and for each decided step; damaged rows are left out."""
    overview = store.overview()
    devices = store.get_devices({row.device for row in overview})
    workloads = store.get_workloads({row.workload for row in overview})
    schedules: dict[tuple[str, str], Schedule] = {}
    for schedule in (s for fingerprint in devices for s in store.schedules(fingerprint)):  # fastest first
        schedules.setdefault((schedule.key.workload, schedule.key.device), schedule)
    bandwidths: dict[str, float | None] = {}
    for row in overview:
        device = devices.get(row.device)
        workload = workloads.get(row.workload)
        if device is None or workload is None:
            continue
        if row.device not in bandwidths:
            calibration = store.get_calibration(row.device, "fusion")
            bandwidths[row.device] = calibration.figures.get("copy_gbs") if calibration else None
        deployed = schedules.get((row.workload, row.device))
        yield _workload(store, row, workload, device, bandwidths[row.device], deployed)
    yield from steps(store, {(row.workload, row.device): row for row in overview})
    yield from savings(store)


def _workload(
    store: Store,
    row: Overview,
    workload: Workload,
    device: DeviceIdentity,
    bandwidth: float | None,
    schedule: Schedule | None,
) -> Page:
    measured = _of_one_key(store.measurements(row.workload, row.device), schedule)
    moved = _bytes(workload)
    winner = schedule.winner if schedule else ""
    figure = figure_of(workload)
    point = Point(moved, row.best_us) if moved and row.best_us and not figure else None
    share = moved / bandwidth / 1e3 / row.best_us if point and bandwidth and row.best_us and moved else None
    levels = {**row.baselines, **({"autotune": row.best_us} if row.best_us and winner in ("", "autotune") else {})}
    exhibits = list(_own(workload, _config(schedule, measured), schedule, device))
    exhibits += _times(levels, figure)
    exhibits += _search(measured, levels, figure)
    if moved and levels and not figure:
        reached = {name: (moved, us) for name, us in levels.items()}
        exhibits.append(_roofline(reached, moved, bandwidth, [us for _, us in reached.values()]))
    tuned = figure_text(figure, row.best_us, "µs")
    facts = [
        ("tuned", tuned + (f", by {winner}" if winner else "")),
        ("speedup", f"{ratio(row.speedup)} over the fastest baseline" if row.speedup else "–"),
        *([("moves at least", size(moved))] if moved else []),
        *([("of the copy bandwidth", percent(share))] if share else []),
        ("candidates", f"{row.measured}, of which {sum(row.failed.values())} failed"),
        *([("trust", "busy: other processes disturbed the final comparison")] if row.busy else []),
        ("fingerprint", row.workload),
    ]
    facts[1:1] = [(name, f"{value:.4g}") for name, value in sorted(row.metrics.items())]
    label = row.label or f"{row.kind} {row.workload[:12]}"
    return Page(
        kind=_kind(row),
        id=page_id(label, row.workload, row.device),
        title=label,
        device=device.label,
        domain=row.kind,
        source=Path(store.name).stem,
        cells={
            "tuned": Cell(tuned + (" (busy)" if row.busy else ""), row.best_us),
            "winner": Cell(winner or "–"),
            "speedup": ratio_cell(row.speedup),
            "bandwidth": Cell(percent(share), share),
            "tried": count_cell(row.measured),
            "failed": count_cell(sum(row.failed.values())),
        },
        facts=facts,
        exhibits=exhibits,
        speedup=None if row.busy else row.speedup,
        point=point,
    )


def _bytes(workload: Workload) -> int:
    """Return the bytes that a perfect implementation moves; 0 if the domain has no figure."""
    try:
        domain = known_domain(workload.kind)
        return domain.bytes_moved(workload) if domain else 0
    except Exception as error:  # a stored workload of another version, or a damaged one
        log.warning("bytes of %s: %s", workload.fingerprint[:12], error)
        return 0


def _own(
    workload: Workload, config: Mapping[str, Any] | None, schedule: Schedule | None, device: DeviceIdentity
) -> Sequence[Exhibit]:
    try:
        domain = known_domain(workload.kind)
        return domain.exhibits(workload, config, schedule, device) if domain else ()
    except Exception as error:
        log.warning("exhibits of %s: %s", workload.fingerprint[:12], error)
        return (Exhibit("Plan", f"It cannot be shown: {printable(str(error))}"),)


def _config(schedule: Schedule | None, measured: Sequence[Measurement]) -> Mapping[str, Any] | None:
    if schedule and schedule.config:
        return schedule.config
    works = [m for m in measured if m.latency_us is not None]
    return min(works, key=lambda m: m.latency_us or 0.0).config if works else None


def _of_one_key(measured: Sequence[Measurement], schedule: Schedule | None) -> list[Measurement]:
    """Return the measurements of one key: the schedule's, else the newest one's. Different keys are never mixed."""
    if not measured:
        return []
    key: Key = schedule.key if schedule else measured[-1].key
    return [m for m in measured if m.key == key]


def _axis(figure: Figure | None) -> tuple[Callable[[float], float], str]:
    """Return a chart's conversion of stored latencies, and its unit."""
    return (float, charts.MICROSECONDS) if figure is None else (lambda cost: figure(cost)[0], figure(1.0)[1])


def _times(levels: Mapping[str, float], figure: Figure | None) -> list[Exhibit]:
    if len(levels) < 2:
        return []
    shown, unit = _axis(figure)
    values = {name: shown(us) for name, us in sorted(levels.items(), key=lambda item: item[1])}
    return [Exhibit("Final comparison", "Medians, taken in turn.", chart=charts.bars(values, unit))]


def _search(measured: Sequence[Measurement], levels: Mapping[str, float], figure: Figure | None) -> Iterator[Exhibit]:
    """Yield exhibits of the search: candidates in order, failure reasons, parameter importances."""
    from autotune.tuner.studies import importances

    first = [m for m in measured if m.stage == "screen"]
    if not first:
        return
    varied = _varied([m.config for m in first])
    candidates = [
        {
            "n": n,
            "us": m.latency_us,
            "status": str(m.status),
            "configuration": ", ".join(f"{k}={m.config[k]}" for k in varied if k in m.config)[:_CONFIG],
        }
        for n, m in enumerate(first, 1)
    ]
    about = "Each candidate's first timing, in order. Lines across are the final comparison's."
    shown, unit = _axis(figure)
    yield Exhibit("Search", about, chart=charts.history(candidates, levels, shown=shown, unit=unit))
    fates = Counter(str(m.status) for m in first)
    if len(fates) > 1:
        shares = {name: float(n) for name, n in fates.most_common()}
        failed = len(first) - fates[str(Status.OK)]
        about = f"{failed} of {len(first)} candidates failed."
        yield Exhibit("What became of candidates", about, chart=charts.bars(shares, "candidates"))
        reasons = Counter((str(m.status), m.reason[:300]) for m in first if m.status is not Status.OK)
        rows = [(status, n, reason) for (status, reason), n in reasons.most_common(_REASONS)]
        yield Exhibit("Reasons of failures", heads=("status", "times", "reason"), rows=rows, folded=True)
    if shares := importances(first):
        about = "PED-ANOVA: what sets the fastest tenth of the candidates apart from the others."
        yield Exhibit("Importance of parameters", about, chart=charts.bars(shares, "share"))


def _varied(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the parameters that took several values, or that some candidates lack."""
    values: dict[str, set[str]] = {}
    for config in configs:
        for name, value in config.items():
            values.setdefault(name, set()).add(str(value))
    seen = Counter(name for config in configs for name in config)
    return sorted(n for n, found in values.items() if len(found) > 1 or seen[n] < len(configs))


def _roofline(
    own: Mapping[str, tuple[int, float]], moved: int, bandwidth: float | None, times: Sequence[float]
) -> Exhibit:
    """Return the chart; without a calibration, the bandwidth line passes through the fastest measured time."""
    measured = bandwidth is not None
    gbs = bandwidth if bandwidth is not None else moved / min(times) / 1e3
    about = (
        f"The line is the device's copy bandwidth, {gbs:.4g} GB/s. What lies below it was read from caches."
        if measured
        else "The device is not calibrated (`autotune calibrate fusion`): the line goes through the fastest time here."
    )
    chart = charts.roofline(own, gbs, (moved / 30, moved * 30))
    return Exhibit("Place on the roofline", f"{about} Grey: other workloads of the device.", chart=chart)


def steps(store: Store, known: Mapping[tuple[str, str], Overview]) -> Iterator[Page]:
    """Yield a page for each decided step, newest first."""
    found: dict[tuple[Any, ...], Verdict] = {}
    verdicts = [v for v in store.verdicts() if v.timed]
    for v in verdicts:
        r = v.record
        target = str(r.get("target") or json.dumps(r, sort_keys=True, default=str))  # a search in a program has none
        found.setdefault((target, r.get("train"), v.mode, v.device, v.environment), v)
    devices = store.get_devices({v.device for v in verdicts})
    for verdict in found.values():
        if verdict.device in devices:
            yield _step(store, verdict, devices[verdict.device], known)


def _step(store: Store, verdict: Verdict, device: DeviceIdentity, known: Mapping[tuple[str, str], Overview]) -> Page:
    record = verdict.record
    every = [f for f in record.get("families") or () if isinstance(f, Mapping)]
    theirs, every_us, ours = (_number(record.get(name)) for name in ("compile_us", "all_us", "autotune_us"))
    speedup = theirs / ours if theirs and ours else None
    rewritten = _number(record.get("attention_us"))
    took = {"torch.compile": theirs, "attention rewritten": rewritten, "all regions": every_us, "autotune": ours}
    target = str(record.get("target") or verdict.graph[:12])
    name = target + (", training" if record.get("train") else "") + f", mode {verdict.mode}"
    kept = sum(bool(f.get("kept")) for f in every)
    about = (
        "As measured by the search. Attention rewritten: torch.compile of rewritten graphs."
        " All regions: with every stored kernel; autotune: with those that are kept."
    )
    step = {n: us for n, us in took.items() if us}
    exhibits = [Exhibit("The whole step", about, chart=charts.bars(step, charts.MICROSECONDS))]
    gains = {
        f"{f.get('count')} × {f.get('label')}": gain for f in every if (gain := _number(f.get("gain_us"))) is not None
    }
    if gains:
        about = "What each region's kernels bring the step; below zero they cost."
        exhibits.append(Exhibit("Gains by region", about, chart=charts.bars(gains, charts.MICROSECONDS)))
    rows = [
        (str(f.get("label")), int(_number(f.get("count")) or 0), _number(f.get("gain_us")), str(f.get("gain_of")),
         "kept" if f.get("kept") else "left to Inductor") for f in every
    ]  # fmt: skip
    heads = ("region", "times", "gain, µs", "seen", "decision")
    exhibits.append(Exhibit("Regions", heads=heads, rows=rows))
    links = []
    for f in every:
        row = known.get((str(f.get("workload")), verdict.device))
        if row is not None:
            label = row.label or f"{row.kind} {row.workload[:12]}"
            links.append((f"../{KINDS[_kind(row)].folder}/{page_id(label, row.workload, row.device)}.html", label))
    facts = [
        ("torch.compile", microseconds(theirs)),
        ("autotune", microseconds(ours) if ours else "left to Inductor"),
        ("speedup", ratio(speedup)),
        ("noise", percent(_number(record.get("noise")))),
        ("regions", f"{kept} of {len(every)} kept"),
        ("command", requoted_command(record["command"]) if record.get("command") else "–"),
    ]
    return Page(
        kind="model",
        id=page_id(name, verdict.graph, verdict.device, verdict.environment, verdict.mode),
        title=name,
        device=device.label,
        domain="fusion",
        source=Path(store.name).stem,
        cells={
            "torch.compile": time_cell(theirs),
            "autotune": time_cell(ours),
            "speedup": ratio_cell(speedup),
            "regions kept": Cell(f"{kept} of {len(every)}", kept),
        },
        facts=facts,
        exhibits=exhibits,
        speedup=speedup,
        links=links,
    )


def savings(store: Store) -> Iterator[Page]:
    """Yield a page for each program with counted steps, on each device."""
    found: dict[tuple[str, str], list[Saved]] = {}
    for one in saved(store.savings(), store.verdicts()):
        found.setdefault((one.program, one.device), []).append(one)
    devices = store.get_devices({device for _, device in found})
    for (program, device), weeks in found.items():
        if device not in devices:
            continue
        measured, assumed = (sum(getattr(w, name) for w in weeks) for name in ("measured_h", "assumed_h"))
        count = sum(w.steps for w in weeks)
        about = "Measured: by verdicts on whole steps. Assumed: each region saves in its step what it saved alone."
        rows = [(w.week, w.steps, w.measured_h, w.assumed_h) for w in weeks]
        yield Page(
            kind="saved",
            id=page_id(program, device),
            title=program,
            device=devices[device].label,
            domain="fusion",
            source=Path(store.name).stem,
            cells={
                "hours saved": Cell(f"{measured + assumed:.3g}", measured + assumed),
                "of these measured": Cell(f"{measured:.3g}", measured),
                "steps": count_cell(count),
            },
            facts=[("measured", f"{measured:.3g} h"), ("assumed", f"{assumed:.3g} h"), ("steps", str(count))],
            exhibits=[Exhibit("Weeks", about, heads=("week of", "steps", "measured, h", "assumed, h"), rows=rows)],
        )


def _kind(row: Overview) -> str:
    return "scenario" if row.kind == "c3" else "workload"


def _number(value: Any) -> float | None:
    """Return a number of a record, which may be from another source; None if it is not a number."""
    return float(value) if is_number(value) else None

"""The suite run: all cases searched in one go, then measured, one or several at a time, each written down when done."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.bench.contenders import ProcessLock
from autotune.errors import quoted_command
from autotune.measure.policy import Policy, default_policy
from benchmarks import form
from benchmarks.fusion import ablation, peers, report
from benchmarks.fusion.cases.case import Case
from benchmarks.fusion.entry import Plan, use
from benchmarks.fusion.floor import copy_bandwidth
from benchmarks.fusion.lane import measured
from benchmarks.fusion.measure import forget
from benchmarks.fusion.suite import choose

if TYPE_CHECKING:
    from autotune.tuner.result import Progress
    from autotune.workload import Workload

SUITE = "fusion"


@dataclass(frozen=True)
class Settings:
    """Options of a run.

    Attributes:
        device: "cpu" or "cuda:N".
        size: "gpu" or "cpu".
        cases: names of cases or kinds; empty for all.
        out: the JSON file; a Markdown table is written to the same folder.
        command: how to do it again, noted in the file.
        db: database to tune into and to deploy from; None for the default.
        trials, timeout, seed: of each case's search.
        peers: names as of ``benchmarks.fusion.peers.wanted``; None for all.
        ablations: names; the full search is always among what is run.
        resume: go on with the cases that ``out`` does not have.
        search, measure: False leaves that part out.
        jobs: cases that are prepared and measured at a time, each in a separate process; timings run
            one at a time.
    """

    device: str
    size: str
    out: Path
    command: str
    cases: Sequence[str] = ()
    db: str | None = None
    trials: int | None = None
    timeout: float | None = None
    seed: int = 0
    peers: Sequence[str] | None = None
    ablations: Sequence[str] = ()
    resume: bool = False
    search: bool = True
    measure: bool = True
    jobs: int = 1


def run(settings: Settings) -> tuple[dict[str, Any] | None, list[str]]:
    """Run the suite.

    Returns:
        The content of the result file as it is at the end, None where there is none, and a line for each case that
        could not be measured.

    Raises:
        UserError: a mistake in the settings, or a result file that this run does not continue.
    """
    from autotune.device import identify

    if settings.measure:
        form.check_commit()
    cases = choose(settings.cases)
    names = ablation.choose(settings.ablations)
    databases = {name: ablation.database(settings.db, name) for name in names}
    groups, sets = peers.wanted(list(settings.peers) if settings.peers is not None else None, settings.device)
    device = identify(settings.device).label
    done = form.finished(settings.out, device=device, suite=SUITE) if settings.resume else {}
    data: dict[str, Any] | None = None
    policy, bandwidth = _prepare(settings) if settings.measure else (None, 0.0)
    left = [case for case in cases if case.label(settings.size) not in done]
    searched: dict[str, dict[str, dict[str, Any]]] = {}
    if settings.search and left:
        searched = {name: search(left, settings, name, databases[name]) for name in names}
    if policy is None:
        return data, []
    plan = Plan(
        device=settings.device,
        size=settings.size,
        db=settings.db,
        policy=policy,
        bandwidth=bandwidth,
        groups=frozenset(groups),
        sets=sets,
        databases=databases,
        jobs=settings.jobs,
    )
    begun = itertools.count(1)

    def begin(case: Case) -> None:
        _say(f"[{next(begun)}/{len(left)}] {case.label(settings.size)}")

    why: dict[str, str] = {}
    with contextlib.closing(measured(plan, left, begin)) as answers:
        for case, answer in answers:
            label = case.label(settings.size)
            who = f"{label}: " if settings.jobs > 1 else "  "
            if answer.entry is None:
                why[label] = answer.missing
                _say(f"{who}NOT MEASURED: {answer.missing}")
                continue
            entry = answer.entry
            for name, reason in entry["failed"].items():
                _say(f"{who}{name} not run: {reason}")
            for name, reason in entry.get("not_profiled", {}).items():
                _say(f"{who}no kernel times of {name}: {reason}")
            if settings.search:
                own = {name: found[case.name] for name, found in searched.items()}
                entry |= {"search_s": own[ablation.FULL]["seconds"], "searches": own}
            done[label] = entry
            data = _write(settings, device, done)
            _say(f"{who}{_line(entry)}")
    missing = [f"{label}: {why[label]}" for case in left if (label := case.label(settings.size)) in why]
    if data is None and done:
        data = form.read(settings.out)
    return data, missing


def _prepare(settings: Settings) -> tuple[Policy, float]:
    use(settings.device)
    policy = default_policy(settings.device)
    if settings.device.startswith("cuda"):
        policy = dataclasses.replace(policy, final_rounds=100, final_s=30.0)
    else:
        policy = dataclasses.replace(policy, final_rounds=60, final_s=15.0)
    with ProcessLock(settings.device, policy.lock_s).exclusive():
        bandwidth = copy_bandwidth(policy, settings.device)
    if not settings.device.startswith("cuda"):
        policy = dataclasses.replace(policy, final_rounds=200)  # no sweeps from here on: rounds are cheap
    _say(f"copy: {bandwidth / 1e6:.3g} TB/s")
    return policy, bandwidth


def search(cases: Sequence[Case], settings: Settings, name: str, db: str | None) -> dict[str, dict[str, Any]]:
    """Search the regions of all cases in one go, so that compilers and the measuring worker are started once.

    Args:
        name: the ablation.
        db: its database.

    Returns:
        For each case, by name, the seconds its regions took and a line of JSON for each region.
    """
    from autotune.api import time_weights, tune_workloads
    from autotune.domains.fusion.program_spec import workloads_of
    from autotune.store import Store
    from autotune.tuner.result import BusyMachine

    regions: dict[str, dict[str, int]] = {}
    workloads: dict[str, Workload] = {}
    weights: dict[str, float] = {}
    for case in cases:
        counted = workloads_of(case.fn, case.arguments(settings.size, settings.device), label=case.name)
        forget()
        regions[case.name] = {workload.fingerprint: count for workload, count in counted}
        workloads |= {workload.fingerprint: workload for workload, _ in counted}
        # Every case gets the same time, which its regions share by their bytes.
        share = time_weights(counted)
        whole = sum(share.values())
        weights |= {key: value / whole for key, value in share.items()}
    results = []
    if workloads:
        with (
            Store.open(db) as store,
            ablation.search_options(name, settings.device) as options,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", BusyMachine)  # kept with each region, and measured again here
            results = tune_workloads(
                list(workloads.values()),
                settings.device,
                store,
                trials=settings.trials,
                timeout=settings.timeout and settings.timeout * len(cases),
                seed=settings.seed,
                weights=weights,
                every=True,
                command=quoted_command("python", "-m", f"benchmarks.{SUITE}", "--ablation", name),
                progress=_progress,
                **options,
            )
    if any(result.interrupted for result in results):
        raise KeyboardInterrupt
    tried = sum(result.measured for result in results)
    seconds = sum(result.seconds for result in results)
    _say(f"searched{'' if name == ablation.FULL else f' ({name})'}: {seconds:.0f} s, {tried} candidates measured")
    kept = ("label", "measured", "reused", "failed", "winner", "deployed_us", "default_us", "stop", "error")
    by_key = {r.workload: r for r in results}
    return {
        case: {
            "seconds": round(sum(by_key[key].seconds for key in counts if key in by_key), 1),
            "regions": [
                {"count": count, **{name: value for name, value in by_key[key].to_json().items() if name in kept}}
                for key, count in counts.items()
                if key in by_key
            ],
        }
        for case, counts in regions.items()
    }


def _progress(now: Progress) -> None:
    if now.phase == "done":
        best = "nothing works" if now.best_us is None else f"{now.best_us:.1f} us"
        _say(
            f"  {now.workload}: {best}, {now.measured} measured, {now.failed} failed, {now.elapsed_s:.0f} s: {now.note}"
        )


def _write(settings: Settings, device: str, done: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Rewrite the file and its table, with the cases in the suite's order."""
    from autotune.device import environment

    order = [case.name for case in choose([])]
    cases = sorted(done.values(), key=lambda c: order.index(c["case"]) if c["case"] in order else len(order))
    env = environment(settings.device)
    versions = {"cuda": str(env.cuda or ""), "driver": str(env.driver or "")}
    for case in cases:
        versions |= case.get("instrument_versions") or {}
    data = form.write(
        settings.out,
        device,
        cases,
        {name: version for name, version in versions.items() if version},
        command=settings.command,
        extra={"suite": SUITE, "size": settings.size, "summary": report.summary(cases)},
    )
    table = report.render(data)
    if any(case["ablations"] for case in cases):
        table += "\n" + report.render_ablations(data, {n: a.about for n, a in ablation.ABLATIONS.items()})
    settings.out.with_suffix(".md").write_text(table)
    return data


def _line(entry: Mapping[str, Any]) -> str:
    ratios = [("Inductor's best", report.over_best(entry)), ("eager", report.over_eager(entry))]
    ratios.append(("XLA", report.over_xla(entry)))
    told = ", ".join(f"{report.times(ratio)} over {name}" for name, ratio in ratios if ratio is not None)
    best = f" [{entry['inductor_best']}]" if entry["inductor_best"] else ""
    return f"autotune {report.number(entry['autotune_us'])} us: {told}{best}; measured in {entry['measure_s']} s"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


__all__ = ["SUITE", "Settings", "run", "search"]

"""The suite run: each scenario is searched, compared and written down before the next one begins."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.domains.c3 import scenario as suite
from autotune.domains.c3.scenario import Scenario
from autotune.errors import UserError, first_line
from benchmarks import form, pictures
from benchmarks.c3 import figure, report
from benchmarks.c3.case import SCHEMA, timeline
from benchmarks.c3.measure import Case, Means, NotMeasured, say

if TYPE_CHECKING:
    from autotune.domains.c3.scenario import Entry
    from autotune.tuner.result import Progress

SUITE = "c3"
_NCCL_SETTINGS = ("NCCL_NVLS_ENABLE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_P2P_DISABLE")


def choose(entries: Mapping[str, Entry], names: Sequence[str]) -> list[Entry]:
    """The entries of these names, or all, in the file's order.

    Args:
        names: names of scenarios, collectives or classes, or a collective and a class such as "all_gather.equal".

    Raises:
        UserError: one is none of these.
    """
    chosen: set[str] = set()
    for name in names:
        titles = {e.name: (e.name, e.collective, e.expected, f"{e.collective}.{e.expected}") for e in entries.values()}
        matching = {own for own, known in titles.items() if name in known}
        if not matching:
            raise UserError(f"there is no scenario {name!r}; {suite.similar_name(name, entries)}")
        chosen |= matching
    return [e for e in entries.values() if not names or e.name in chosen]


@dataclass(frozen=True)
class Settings:
    """Options of a run.

    Attributes:
        device: "cpu" or "cuda:N".
        ranks: processes, one device each.
        out: the JSON file; a Markdown table and pictures are written to the same folder.
        command: how to do it again, noted in the file.
        scenarios: the TOML file; None for the project's own.
        cases: names as of :func:`choose`; empty for all.
        dtype: of scenarios whose file names none.
        db: database to tune into; None for the default.
        trials, timeout, seed: of each scenario's search; the families' members come on top of ``trials``.
        resume: go on with the scenarios that ``out`` does not have.
        search, measure: False leaves that part out.
        rule: also measure the strategy that the rule chooses without a search.
        fixed: at the end, compare the tuned strategies with the best fixed one.
        timeline: the scenario whose timeline is drawn; None for the first of the equal class, or the first.
    """

    device: str
    ranks: int
    out: Path
    command: str
    scenarios: str | None = None
    cases: Sequence[str] = ()
    dtype: str = "bf16"
    db: str | None = None
    trials: int | None = None
    timeout: float | None = None
    seed: int = 0
    resume: bool = False
    search: bool = True
    measure: bool = True
    rule: bool = True
    fixed: bool = False
    timeline: str | None = None


def run(settings: Settings) -> tuple[dict[str, Any] | None, list[str]]:
    """Run the suite.

    Returns:
        The content of the result file as it is at the end, None where there is none, and a line for each scenario that
        could not be measured.

    Raises:
        UserError: a mistake in the settings, or a result file that this run does not continue.
    """
    from autotune.domain import identity_of, policy_for
    from autotune.domains.c3.measuring.ranks import Ranks
    from autotune.measure.pool import CompilePool
    from autotune.store import Store

    if settings.measure:
        form.check_commit()
    listed = suite.named_scenarios(settings.scenarios)
    entries = choose(listed, settings.cases)
    scenarios = {e.name: e.scenario(settings.ranks, e.dtype or settings.dtype) for e in entries}
    drawn = _drawn(settings, entries)
    first = scenarios[entries[0].name].workload()
    _check_devices(settings)
    device = identity_of(first, settings.device).label
    same = {"device": device, "suite": SUITE, "ranks": settings.ranks, "schema": SCHEMA}
    done = form.finished(settings.out, **same) if settings.resume else {}
    data = form.read(settings.out) if done else None
    left = [entry for entry in entries if entry.name not in done]
    missing: list[str] = []
    if not left and not settings.fixed:
        return data, missing
    policy = policy_for(first, settings.device)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Store.open(settings.db))
        ranks = stack.enter_context(Ranks(first, settings.device, policy))
        pool = stack.enter_context(CompilePool(timeout_s=policy.build_s))
        means = Means(store, settings.device, policy, ranks, pool, settings.seed, settings.rule)
        for k, entry in enumerate(left, 1):
            say(f"[{k}/{len(left)}] {entry.name}: {scenarios[entry.name].label}")
            try:
                found = _one(entry, scenarios[entry.name], means, settings)
            except (NotMeasured, RuntimeError) as error:  # RuntimeError: out of memory, or a device that gave up
                why = str(error) if isinstance(error, NotMeasured) else first_line(error)
                missing.append(f"{entry.name}: {why}")
                say(f"  NOT MEASURED: {why}")
                continue
            if found is None:
                continue
            if entry.name != drawn:
                found.pop("timeline", None)
            done[entry.name] = found
            data = _write(settings, device, list(listed), done)
            say(f"  {report.line(found)}; {found['search_s']} s searched, {found['measure_s']} s measured")
        if settings.fixed and settings.measure and done:
            data = _beside_fixed(done, listed, means, settings, device)
    return data, missing


def _beside_fixed(
    done: dict[str, dict[str, Any]], listed: Mapping[str, Entry], means: Means, settings: Settings, device: str
) -> dict[str, Any]:
    """Compare the best fixed strategy with the tuned one of every case that has not been."""
    best = report.best_fixed(list(done.values()))
    for name, case in done.items():
        if best is None or name not in listed or (case.get("fixed") or {}).get("label") == best["strategy"]:
            continue
        own = Case(listed[name], Scenario.from_json(case["scenario"]), means)
        try:
            case["fixed"] = own.beside_tuned(best["strategy"])
        except NotMeasured as why:
            say(f"{name}: not compared with {best['strategy']}: {why}")
            continue
        if case["fixed"] is not None:
            ratio = case["fixed"]["ms"] / case["fixed"]["tuned_ms"]
            say(f"{name}: {best['strategy']} takes {ratio:.3f} times the tuned strategy")
    return _write(settings, device, list(listed), done)


def _one(entry: Entry, scenario: Scenario, means: Means, settings: Settings) -> dict[str, Any] | None:
    """A scenario's case; None where nothing is to be measured."""
    begin = time.monotonic()
    case = Case(entry, scenario, means)
    search = case.search(settings.trials, settings.timeout, _progress) if settings.search else None
    if search is not None and search["error"]:
        raise NotMeasured(search["error"])
    if not settings.measure:
        return None
    middle = time.monotonic()
    found = case.compare()
    own = {"search_s": round(middle - begin, 1), "measure_s": round(time.monotonic() - middle, 1)}
    return {**found, **own, "search": search}


def _check_devices(settings: Settings) -> None:
    from autotune.domains.c3.task import check_devices

    check_devices(settings.ranks, settings.device)


def _drawn(settings: Settings, entries: Sequence[Entry]) -> str:
    names = [entry.name for entry in entries]
    if settings.timeline is None:
        return next((e.name for e in entries if e.expected == "equal"), names[0])
    if settings.timeline not in names:
        raise UserError(f"--timeline {settings.timeline}: not among the scenarios of this run")
    return settings.timeline


def _progress(now: Progress) -> None:
    if now.phase == "done":
        best = "nothing works" if now.best_us is None else f"{now.best_us / 1e3:.3g} ms"
        say(f"  {best}, {now.measured} measured, {now.failed} failed, {now.elapsed_s:.0f} s: {now.note}")


def _write(settings: Settings, device: str, order: Sequence[str], done: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Rewrite the file, its table and its pictures, with the cases in the list's order."""
    from autotune.device import environment

    cases = sorted(done.values(), key=lambda c: order.index(c["name"]) if c["name"] in order else len(order))
    env = environment(settings.device)
    versions = {"cuda": str(env.cuda or ""), "driver": str(env.driver or ""), **_nccl(settings.device)}
    data = form.write(
        settings.out,
        device,
        cases,
        {name: version for name, version in versions.items() if version},
        command=settings.command,
        extra={
            "suite": SUITE,
            "schema": SCHEMA,
            "ranks": settings.ranks,
            "nccl": _nccl_settings(),
            "summary": report.summary(cases),
        },
    )
    settings.out.with_suffix(".md").write_text(report.render(data))
    stem = settings.out.with_suffix("")
    if not pictures.installed():
        return data  # a message at the start has reported it
    Path(f"{stem}-bars.svg").write_text(pictures.svg(figure.bars(data)))
    pictured = next((case for case in cases if case.get("timeline")), None)
    if pictured is not None:
        Path(f"{stem}-timeline.svg").write_text(pictures.svg(figure.picture(timeline(pictured))))
    return data


def _nccl(device: str) -> dict[str, str]:
    if not device.startswith("cuda"):
        return {}
    import torch

    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return {"nccl": ".".join(map(str, version))}


def _nccl_settings() -> dict[str, str]:
    """NCCL's settings in the environment, which change its figures (multicast, for example)."""
    return {name: os.environ[name] for name in _NCCL_SETTINGS if name in os.environ}


__all__ = ["SUITE", "Settings", "run"]

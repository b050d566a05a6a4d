"""Pages of ``autotune report --results``: what result files have, which the programs of this folder write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune import charts
from autotune.charts import Exhibit
from autotune.errors import UserError, requoted_command
from autotune.report.site import (
    Cell,
    Page,
    Point,
    microseconds,
    page_id,
    percent,
    ratio,
    ratio_cell,
    time_cell,
)
from autotune.words import size
from benchmarks.c3.case import case_exhibits
from benchmarks.form import read

_CONTENDERS = {
    "floor_us": "copy floor",
    "autotune_us": "autotune",
    "inductor_best_us": "inductor best",
    "inductor_us": "inductor",
    "xla_us": "xla",
    "eager_us": "eager",
}
_RIVALS = ("eager_us", "inductor_us", "inductor_best_us", "xla_us")
_SHORTEST = 0.004
"""Share of a bar below which kernels are drawn as one piece."""


def pages(folder: Path) -> Iterator[Page]:
    """The pages of every result file in ``folder`` and the folders below it.

    Raises:
        UserError: there is none, or one is not of the form.
    """
    files = sorted(folder.rglob("*.json"))
    if not files:
        raise UserError(f"--results {folder}: no result file (.json) is in it")
    for file in files:
        try:
            data = read(file)
        except (ValueError, OSError) as error:
            raise UserError(f"--results: {error}") from None
        yield from _file(data, file.relative_to(folder).as_posix())


def _file(data: Mapping[str, Any], source: str) -> Iterator[Page]:
    suite = data.get("suite")
    if suite == "c3":
        for case in data["cases"]:
            yield _scenario(case, data, source)
    elif suite == "real_models":
        for case in data["cases"]:
            yield from _real_model(case, data, source)
    elif suite == "fusion" or (suite is None and all("modes" in c or "search_s" in c for c in data["cases"])):
        for case in data["cases"]:
            yield _model(case, data, source) if "modes" in case else _region(case, data, source)
    else:
        yield _other(data, source)


def _origin(data: Mapping[str, Any], source: str) -> list[tuple[str, str]]:
    versions = data["versions"]
    return [
        ("file", source),
        ("measured", f"{data['when']}, commit {str(data['commit'])[:12]}"),
        (
            "with",
            ", ".join(f"{name} {versions[name]}" for name in ("torch", "cuda", "driver", "nccl") if name in versions),
        ),
        ("again by", requoted_command(data["command"])),
    ]


def _name(source: str, name: str) -> str:
    return page_id(name, source)


def _contenders(case: Mapping[str, Any]) -> dict[str, float]:
    return {words: float(case[key]) for key, words in _CONTENDERS.items() if case.get(key)}


def _speedup(case: Mapping[str, Any]) -> float | None:
    rivals = [float(case[key]) for key in _RIVALS if case.get(key)]
    return min(rivals) / case["autotune_us"] if rivals else None


def _region(case: Mapping[str, Any], data: Mapping[str, Any], source: str) -> Page:
    """A case of the suite of regions."""
    moved, ours, floor = int(case["bytes"]), float(case["autotune_us"]), float(case["floor_us"])
    speedup, share = _speedup(case), floor / ours
    times = _contenders(case)
    bandwidth = moved / floor / 1e3
    exhibits = [
        Exhibit("Comparison", "Medians, taken in turn, caches cold.", chart=charts.bars(times, "microseconds")),
        Exhibit(
            "Place on the roofline",
            f"The line is a copy in the same run, {bandwidth:.4g} GB/s. Grey: other workloads of the device.",
            chart=charts.roofline(
                {n: (moved, us) for n, us in times.items() if n != "copy floor"}, bandwidth, (moved / 30, moved * 30)
            ),
        ),
    ]
    if case.get("ablations"):
        parts = {"whole method": ours, **{n: float(us) for n, us in case["ablations"].items() if us}}
        about = "The search without a part of its method, each in the same comparison."
        exhibits.append(Exhibit("Ablation", about, chart=charts.bars(parts, "microseconds")))
    if counts := case.get("kernels"):
        columns = ("contender", "kernels", "their time, µs")
        rows = [(who, n, case.get(f"{who}_kernels_us")) for who, n in counts.items()]
        exhibits.append(Exhibit("Kernels", heads=columns, rows=rows))
    full = (case.get("searches") or {}).get("full") or {}
    regions = [r for r in full.get("regions", ()) if isinstance(r, Mapping)]
    if regions:
        heads = ("region", "times", "measured", "failed", "default, µs", "deployed, µs", "winner", "ended since")
        searches = [
            (r["label"], r["count"], r["measured"], sum(r["failed"].values()), r["default_us"], r["deployed_us"],
             r["winner"], r["stop"]) for r in regions
        ]  # fmt: skip
        exhibits.append(Exhibit("Search", f"{full['seconds']} s.", heads=heads, rows=searches))
    facts = [
        ("autotune", microseconds(ours)),
        ("speedup", f"{ratio(speedup)} over the fastest other"),
        ("moves at least", size(moved)),
        ("of the copy bandwidth", percent(share)),
        *_origin(data, source),
    ]
    return Page(
        kind="workload",
        id=_name(source, case["name"]),
        title=case["name"],
        device=data["device"],
        domain="fusion",
        source=source,
        cells={
            "tuned": time_cell(ours),
            "speedup": ratio_cell(speedup),
            "bandwidth": Cell(percent(share), share),
            "tried": Cell(str(sum(r["measured"] for r in regions)) if regions else "–"),
        },
        facts=facts,
        exhibits=exhibits,
        speedup=speedup,
        point=Point(moved, ours),
    )


def _model(case: Mapping[str, Any], data: Mapping[str, Any], source: str) -> Page:
    """A whole step of ``benchmarks.fusion_models``."""
    best = case.get("inductor_best_us") or case.get("inductor_us")
    ours = float(case["autotune_us"])
    speedup = best / ours if best else None
    times = {n: us for n, us in _contenders(case).items() if n != "copy floor"}
    exhibits = [Exhibit("The whole step", "Medians, taken in turn.", chart=charts.bars(times, "microseconds"))]
    kernels = {who: k for who, k in (case.get("kernels") or {}).items() if isinstance(k, Mapping)}
    if kernels:
        exhibits.append(_time_line(kernels))
        exhibits += [_longest(who, k) for who, k in kernels.items()]
    if case.get("modes"):
        rows = [(mode, m.get("inductor_us"), m.get("autotune_us")) for mode, m in case["modes"].items()]
        exhibits.append(Exhibit("Modes", heads=("mode", "torch.compile, µs", "autotune, µs"), rows=rows))
    counters = case.get("counters") or {}
    facts = [
        ("autotune", microseconds(ours)),
        ("torch.compile", microseconds(best)),
        ("speedup", ratio(speedup)),
        ("regions", f"{case.get('regions')}, {case.get('different_regions')} of them different"),
        ("looked up", ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in counters.items()) or "–"),
        *_origin(data, source),
    ]
    return _model_page(case["name"], data, source, exhibits, facts, (best, ours))


def _real_model(case: Mapping[str, Any], data: Mapping[str, Any], source: str) -> Iterator[Page]:
    """A model of ``benchmarks.real_models``, a page for each mode that was measured."""
    for mode in ("default", "max-autotune"):
        found = case.get(mode)
        if not isinstance(found, Mapping):
            continue
        theirs, ours = found["compile_us"], found["autotune_us"]
        who = {"eager": case, "torch.compile": found, "autotune": found}
        prefix = {"eager": "eager", "torch.compile": "compile", "autotune": "autotune"}
        times = {n: float(who[n][f"{prefix[n]}_us"]) for n in who if who[n].get(f"{prefix[n]}_us")}
        pieces = []
        for n in times:
            library, memory = (float(who[n].get(f"{prefix[n]}_{kind}_us") or 0) for kind in ("library", "memory"))
            parts = {"library": library, "memory-intensive": memory, "no kernel": max(0.0, times[n] - library - memory)}
            pieces += [
                {"of": n, "kind": kind, "name": kind, "value": us, "order": k}
                for k, (kind, us) in enumerate(parts.items())
            ]
        exhibits = [
            Exhibit("The whole step", "Medians, taken in turn.", chart=charts.bars(times, "microseconds")),
            Exhibit(
                "Where the time goes",
                "Kernels of libraries, kernels of memory-intensive operators, and what is left of the step.",
                chart=_stacks(pieces, list(_PIECES), "microseconds"),
            ),
        ]
        counters = case.get("counters") or {}
        facts = [
            ("model", f"{case.get('model')}, {case.get('kind')}, {case.get('dtype')}, batch {case.get('batch')}"),
            ("autotune", microseconds(ours)),
            ("torch.compile", microseconds(theirs)),
            ("speedup", ratio(theirs / ours)),
            ("regions", f"{case.get('regions')}, {case.get('different_regions')} of them different"),
            ("looked up", ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in counters.items()) or "–"),
            *_origin(data, source),
        ]
        yield _model_page(f"{case['name']}, mode {mode}", data, source, exhibits, facts, (theirs, ours))


def _model_page(
    name: str,
    data: Mapping[str, Any],
    source: str,
    exhibits: list[Exhibit],
    facts: list[tuple[str, str]],
    took: tuple[float | None, float],
) -> Page:
    theirs, ours = took
    speedup = theirs / ours if theirs else None
    return Page(
        kind="model",
        id=_name(source, name),
        title=name,
        device=data["device"],
        domain="fusion",
        source=source,
        cells={"torch.compile": time_cell(theirs), "autotune": time_cell(ours), "speedup": ratio_cell(speedup)},
        facts=facts,
        exhibits=exhibits,
        speedup=speedup,
    )


_PIECES = ("library", "memory-intensive", "no kernel")


def _stacks(rows: Sequence[Mapping[str, Any]], names: Sequence[str], title: str) -> charts.Chart:
    """A bar for each ``of``, in pieces one after the other as they come; ``kind`` colours a piece.

    Args:
        rows: with ``of``, ``kind``, ``name``, ``value``, ``order``.
        names: kinds, in the legend's order.
    """
    return {
        "data": {"values": list(rows)},
        "height": 46 * len({row["of"] for row in rows}),
        "mark": {"type": "bar", "stroke": "#ffffff", "strokeWidth": 0.4},
        "encoding": {
            "y": {"field": "of", "type": "nominal", "sort": None, "title": None},
            "x": {"field": "value", "type": "quantitative", "title": title},
            "order": {"field": "order", "type": "quantitative"},
            "color": {
                "field": "kind",
                "type": "nominal",
                "title": None,
                "scale": {"domain": list(names), "range": ["#3b82f6", "#d97706", "#d1d5db"][: len(names)]},
            },
            "tooltip": [{"field": "name"}, {"field": "kind"}, {"field": "value", "format": ".4~g", "title": title}],
        },
    }


def _time_line(kernels: Mapping[str, Mapping[str, Any]]) -> Exhibit:
    """The parts of each contender's step. Their order in the step is not stored: the longest come first."""
    pieces: list[dict[str, Any]] = []

    def add(who: str, kind: str, name: str, us: float) -> None:
        if us > 0:
            pieces.append({"of": who, "kind": kind, "name": name, "value": round(us, 2), "order": len(pieces)})

    for who, found in kernels.items():
        library, memory = (float(found.get(name) or 0) for name in ("library_us", "memory_intensive_us"))
        times = {str(name): float(us) for name, us in (found.get("names_us") or {}).items()}
        longest = sorted(times.items(), key=lambda item: -item[1])
        shown = {name: us for name, us in longest if us >= _SHORTEST * (library + memory)}
        add(who, "library", f"{found.get('library')} kernels", library)
        for name, us in shown.items():
            add(who, "memory-intensive", short_name(name), us)
        add(who, "memory-intensive", "shorter ones together", memory - sum(shown.values()))
    about = "Kernels of libraries together, then each memory-intensive kernel with all its launches, the longest first."
    return Exhibit("Kernels of the step", about, chart=_stacks(pieces, _PIECES[:2], "microseconds"))


def _longest(who: str, found: Mapping[str, Any], most: int = 15) -> Exhibit:
    times, counts = found.get("names_us") or {}, found.get("names") or {}
    longest = sorted(times.items(), key=lambda item: -item[1])[:most]
    rows = [(short_name(str(name)), counts.get(name), us) for name, us in longest]
    title = f"Longest memory-intensive kernels: {who}"
    return Exhibit(title, heads=("kernel", "launches", "µs"), rows=rows, folded=True)


def short_name(kernel: str, most: int = 70) -> str:
    """A C++ kernel's name without its templates, arguments and namespaces."""
    if kernel.startswith("void "):
        plain, depth = "", 0
        for c in kernel.removeprefix("void ").replace("(anonymous namespace)::", ""):
            depth += (c in "<({") - (c in ">)}")
            plain += c if depth == 0 and c not in ">)}" else ""
        kernel = plain.rpartition("::")[2].strip() or kernel
    return kernel if len(kernel) <= most else kernel[: most - 1] + "…"


def _scenario(case: Mapping[str, Any], data: Mapping[str, Any], source: str) -> Page:
    """A case of the C3 suite."""
    tuned = (case.get("strategies") or {}).get("tuned") or {}
    speedup = case["sequential_ms"] / tuned["ms"] if tuned.get("ms") else None
    facts = [
        ("scenario", f"{case['compute']} beside {case['collective']} of {size(case['nbytes'])}"),
        ("longer is", case["kind"]),
        ("ideal", ratio(case["ideal"])),
        ("tuned", f"{tuned.get('ms', float('nan')):.4g} ms, {tuned.get('label', '–')}" if tuned else "–"),
        ("speedup", f"{ratio(speedup)} over one after another"),
        ("of the ideal", percent(tuned.get("fraction"))),
        *_origin(data, source),
    ]
    return Page(
        kind="scenario",
        id=_name(source, case["name"]),
        title=case["name"],
        device=data["device"],
        domain=str(data["suite"]),
        source=source,
        cells={
            "tuned": time_cell(tuned["ms"] * 1e3 if tuned.get("ms") else None),
            "winner": Cell(str(tuned.get("label", "–"))),
            "speedup": ratio_cell(speedup),
            "ideal": ratio_cell(case["ideal"]),
            "of the ideal": Cell(percent(tuned.get("fraction")), tuned.get("fraction")),
        },
        facts=facts,
        exhibits=case_exhibits(case),
        speedup=speedup,
    )


def _other(data: Mapping[str, Any], source: str) -> Page:
    """Any other file: its cases as a table of their plain values."""
    cases = data["cases"]
    names = list(dict.fromkeys(k for case in cases for k, v in case.items() if isinstance(v, (str, int, float))))[:10]
    rows = [
        [
            str(v) if isinstance(v := case.get(name), bool) else v if isinstance(v, (str, int, float)) else None
            for name in names
        ]
        for case in cases
    ]
    return Page(
        kind="result",
        id=page_id(source),
        title=source,
        device=data["device"],
        domain=str(data.get("suite") or "fusion"),
        source=source,
        cells={"cases": Cell(str(len(cases)), len(cases)), "measured": Cell(str(data["when"]))},
        facts=_origin(data, source)[1:],
        exhibits=[Exhibit("Cases", heads=names, rows=rows)],
    )

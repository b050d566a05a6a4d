"""The summary of the C3 suite, and Markdown tables of a result file."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autotune.domains.c3.scenario import LONG, REDUCING, format_bytes
from benchmarks.c3.case import FAMILIES
from benchmarks.form import measured_by
from benchmarks.fusion.report import geometric_mean

Case = Mapping[str, Any]

WITHIN = 1.1
"""What is chosen without a search is good where it takes no longer than so many times the tuned strategy."""


def summary(cases: Sequence[Case]) -> dict[str, Any]:
    """The figures of all cases, of those that only move data (the paper's), of each collective, and of its classes."""
    moving = [c for c in cases if c["collective"] not in REDUCING]
    by_collective: dict[str, Any] = {}
    for collective in dict.fromkeys(c["collective"] for c in cases):
        own = [c for c in cases if c["collective"] == collective]
        classes = dict.fromkeys(c["class"] for c in own)
        by_collective[collective] = {
            "all": _group(own),
            **{kind: _group([c for c in own if c["class"] == kind]) for kind in classes},
        }
    return {
        "all": _group(cases),
        "all_gather_and_all_to_all": _group(moving),
        "by_collective": by_collective,
        "best_fixed": best_fixed(cases),
        "default": _beside_tuned(cases),
    }


def _group(cases: Sequence[Case]) -> dict[str, Any] | None:
    """For each family: the mean fraction of the ideal, each case counted as 1 at most; the worst among cases with
    something to gain; the least speedup over sequential; the best over the two alone; and the mean time over the
    longer of the two."""
    if not cases:
        return None
    found: dict[str, Any] = {"cases": len(cases)}
    for name in FAMILIES:
        if all(name not in c["strategies"] for c in cases):
            continue
        own = [(c, c["strategies"][name]) for c in cases if c["strategies"].get(name)]
        if not own:
            found[name] = None
            continue
        fractions = [min(1.0, s["fraction"]) for _, s in own if s["fraction"] is not None]
        worth = [(s["fraction"], c["name"]) for c, s in own if c["ideal"] > LONG and s["fraction"] is not None]
        least = min((c["sequential_ms"] / s["ms"], c["name"]) for c, s in own)
        best = max((s["speedup"], c["name"]) for c, s in own)
        found[name] = {
            "cases": len(own),
            "mean_fraction": _round(statistics.fmean(fractions)) if fractions else None,
            "worst_fraction": _round(min(worth)[0]) if worth else None,
            "worst_case": min(worth)[1] if worth else None,
            "least_over_sequential": _round(least[0]),
            "least_over_sequential_case": least[1],
            "best_speedup": _round(best[0]),
            "best_speedup_case": best[1],
            "mean_t_over_max": _round(statistics.fmean(s["t_over_max"] for _, s in own)),
        }
    return found


def best_fixed(cases: Sequence[Case]) -> dict[str, Any] | None:
    """The strategy that, used in all scenarios, takes least in the geometric mean, and how much more than tuned.

    Its times are of the final comparisons, as the tuned ones', where it took part in them, else of the searches, which
    had it alone. ``compared`` is of comparisons of the two, where there were such.

    Returns:
        None where no strategy was measured in every case.
    """
    tuned = {c["name"]: c["strategies"]["tuned"]["ms"] for c in cases if c["strategies"].get("tuned")}
    if not cases or len(tuned) < len(cases):
        return None
    times = [(tuned[c["name"]], {n: ms for n, ms in c["measured"].items() if ms} | c.get("beside", {})) for c in cases]
    everywhere = set.intersection(*({*own} for _, own in times))
    over = {name: geometric_mean([own[name] / best for best, own in times]) for name in sorted(everywhere)}
    if not over:
        return None
    best = min(over, key=lambda name: over[name])
    beside = [c["fixed"] for c in cases if c.get("fixed") and c["fixed"]["label"] == best]
    compared = geometric_mean([f["ms"] / f["tuned_ms"] for f in beside]) if len(beside) == len(cases) else None
    return {
        "strategy": best,
        "candidates": len(over),
        "geomean_over_tuned": _round(over[best]),
        "compared": None if compared is None else _round(compared),
    }


def _beside_tuned(cases: Sequence[Case]) -> dict[str, Any] | None:
    """The strategy of the rule compared with the tuned one, in the same comparisons."""
    pairs = [(c["default"]["ms"], c["strategies"]["tuned"]["ms"]) for c in cases
             if c.get("default") and c["strategies"].get("tuned")]  # fmt: skip
    if not pairs:
        return None
    ratios = [ms / tuned for ms, tuned in pairs]
    return {
        "cases": len(ratios),
        "within_10_percent": _round(sum(r <= WITHIN for r in ratios) / len(ratios)),
        "geomean_over_tuned": _round(geometric_mean(ratios)),
        "worst_over_tuned": _round(max(ratios)),
    }


def render(data: Mapping[str, Any]) -> str:
    """A result file as Markdown."""
    head = (
        f"C3 on {data['device']}, {data['ranks']} ranks, torch {data['versions']['torch']}, {data['when'][:10]}:"
        f" {measured_by(data)}\n\nTimes in ms, the slowest rank's, medians of one comparison in"
        " turn. In parentheses the share of the ideal speedup, (T_gemm + T_comm) / max, that is realised."
    )
    if data["schema"] > 1:
        head += " T_gemm and T_comm are the fastest of the isolated runs among the others."
    if data.get("nccl", {}).get("NCCL_NVLS_ENABLE") == "0":
        head += " NCCL ran without NVLink multicast (NCCL_NVLS_ENABLE=0)."
    tables = [_table(data["cases"]), *_summary_tables(data["summary"])]
    return "\n\n".join([head, *tables, _lines(data["summary"]) + _beyond(data["cases"])]) + "\n"


def _table(cases: Sequence[Case]) -> str:
    names = [name for name in FAMILIES if any(name in c["strategies"] for c in cases)]
    titles = ["scenario", "computation", "bytes", "T_gemm", "T_comm", "engine", "kind", "ideal", "sequential",
              *(n.replace("_", " ") for n in names), "tuned / max", "tuned strategy"]  # fmt: skip
    rows = []
    for c in cases:
        tuned = c["strategies"].get("tuned")
        rows.append([
            c["name"], c["compute"], format_bytes(c["nbytes"]), number(c["t_gemm_ms"]), number(c["t_comm_ms"]),
            c["t_comm_engine"], c["kind"], f"{c['ideal']:.2f}", number(c["sequential_ms"]),
            *(_told(c["strategies"].get(name)) for name in names),
            f"{tuned['t_over_max']:.3f}" if tuned else "–", tuned["label"] if tuned else "–",
        ])  # fmt: skip
    return _markdown(titles, rows, left=(0, 1, 5, 6, len(titles) - 1))


def _told(entry: Mapping[str, Any] | None) -> str:
    if not entry:
        return "–"
    return f"{number(entry['ms'])} ({percent(entry['fraction'])})"


def _summary_tables(found: Mapping[str, Any]) -> list[str]:
    groups: list[tuple[str, Mapping[str, Any]]] = []
    if found["all_gather_and_all_to_all"]:
        groups.append(("all_gather, all_to_all", found["all_gather_and_all_to_all"]))
    for collective, classes in found["by_collective"].items():
        groups.append((collective, classes["all"]))
        if len(classes) > 2:  # of one class only that would be the same again
            groups += [(f"{collective}, {kind}", group) for kind, group in classes.items() if kind != "all"]
    figures: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
        ("Mean share of the ideal, 100% at most", "mean_fraction", percent),
        ("Worst share of the ideal where that is above 1.15", "worst_fraction", percent),
        ("Least speedup over sequential", "least_over_sequential", _times),
        ("Best speedup over T_gemm + T_comm", "best_speedup", _times),
        ("Mean time over the longer of the two", "mean_t_over_max", _plain),
    )
    names = [name for name in FAMILIES if any(name in group for _, group in groups)]
    titles = [" ", "cases", *(n.replace("_", " ") for n in names)]
    tables = []
    for title, key, told in figures:
        rows = [
            [name, str(group["cases"]), *(told(group[f][key]) if group.get(f) else "–" for f in names)]
            for name, group in groups
        ]
        tables.append(f"{title}\n\n" + _markdown(titles, rows, left=(0,)))
    return tables


def _lines(found: Mapping[str, Any]) -> str:
    lines = []
    if fixed := found["best_fixed"]:
        beside = "" if fixed["compared"] is None else f"; side by side {fixed['compared']:.3f} times"
        lines.append(
            f"- Best fixed strategy of {fixed['candidates']} that work everywhere: `{fixed['strategy']}`, taking"
            f" {fixed['geomean_over_tuned']:.3f} times the tuned ones' time in the geometric mean, by the searches"
            f"{beside}."
        )
    if own := found["default"]:
        lines.append(
            f"- The default: within 10% of tuned in {percent(own['within_10_percent'])} of"
            f" {own['cases']} scenarios, {own['geomean_over_tuned']:.3f} times tuned in the geometric mean,"
            f" {own['worst_over_tuned']:.2f} at worst."
        )
    return "\n".join(lines)


def _beyond(cases: Sequence[Case]) -> str:
    """A line on the tuned strategies that realise more than the ideal, where the parts alone have medians too."""
    told = []
    for c in cases:
        tuned, longer = c["strategies"].get("tuned"), max(c["t_gemm_ms"], c["t_comm_ms"])
        if tuned and "t_gemm_median_ms" in c and tuned["ms"] < longer:
            told.append(f"{c['name']} ({number(tuned['ms'])} of {number(longer)} ms)")
    return f"\n- Faster than the longer part alone ever was: {', '.join(told)}." if told else ""


def _markdown(titles: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> str:
    rule = ["---" if k in left else "---:" for k in range(len(titles))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, rule, *rows))


def line(case: Case) -> str:
    """A case in one line, for the one who waits."""
    told = [f"{n} {_told(case['strategies'].get(n))}" for n in FAMILIES if case["strategies"].get(n)]
    return f"ideal {case['ideal']:.2f}, sequential {number(case['sequential_ms'])} ms, {', '.join(told)}"


def number(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


def _plain(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _round(value: float) -> float:
    return round(value, 4)

"""The table of :mod:`benchmarks.user_programs`: a line a program, and geometric means."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.fusion.report import geometric_mean

Case = Mapping[str, Any]
HEADS = (
    "program",
    "torch.compile",
    "+ attention",
    "autotune",
    "gain",
    "kernels",
    "first s",
    "added s",
    "warm s",
    "memory-intensive",
    "peak",
)
ABOUT = (
    "A step in ms, launched from Python with its optimizer. + attention: rewritten attention without other kernels.",
    "gain: over torch.compile, by blocks of steps in turn (least and most of the rounds). kernels: the gain beyond",
    "attention's. first s: first step of torch.compile with empty caches. added s: the search's addition to it.",
    "warm s: first step of a second process, torch.compile -> autotune, and so for the last two: ms of",
    "memory-intensive kernels in a step by the profiler, the optimizer's among them; peak memory of a step in GiB.",
)


def gain(case: Case, name: str = "search") -> float | None:
    """Over torch.compile: the median of rounds, None where there is none."""
    ratios = case["ratios"].get(name)
    return statistics.median(ratios) if ratios else None


def beyond_attention(case: Case) -> float | None:
    """The gain over torch.compile with attention rewritten, both by way of torch.compile."""
    ours, theirs = gain(case), gain(case, "attention")
    return ours / theirs if ours and theirs else None


def predicted(case: Case) -> float | None:
    """The gain over torch.compile without a search."""
    return gain(case, "unsearched")


def of(case: Case, contender: str, key: str) -> Any:
    """A fact of a contender, None where it is not known."""
    return case["contenders"].get(contender, {}).get(key)


def added_s(case: Case) -> float | None:
    """Seconds that a search added to the first step of torch.compile."""
    ours, theirs = of(case, "search", "first_s"), of(case, "compile", "first_s")
    return None if ours is None or theirs is None else ours - theirs


def text(data: Mapping[str, Any]) -> str:
    """For a terminal, of a result file's content."""
    rows = [HEADS, *(_cells(case) for case in data["cases"])]
    widths = [max(len(row[k]) for row in rows) for k in range(len(HEADS))]
    lines = []
    if data["cases"]:
        for row in rows:
            cells = [c.ljust(w) if not k else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True))]
            lines.append("  ".join(cells).rstrip())
        lines += ["", *ABOUT, *means(data["cases"])]
    return "\n".join([*lines, *_left_out(data)])


def markdown(data: Mapping[str, Any]) -> str:
    """For a document, of a result file's content."""
    rows = [HEADS, *(_cells(case) for case in data["cases"])]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "| --- |" + " ---: |" * (len(HEADS) - 1))
    made = f"measured {data['when'][:10]} by `{data['command']}`"
    caption = f"{data['device']}, torch {data['versions']['torch']}; {made}."
    notes = [*means(data["cases"]), *_left_out(data)]
    return "\n".join([*lines, "", *ABOUT, "", *(f"- {line}" for line in notes), "", caption]) + "\n"


def means(cases: Sequence[Case]) -> list[str]:
    """Geometric means of gains, a line each."""
    lines = []
    of_all = (
        ("over torch.compile", gain),
        ("beyond attention", beyond_attention),
        ("without a search, over torch.compile", predicted),
    )
    for title, value in of_all:
        found = {case["name"]: ratio for case in cases if (ratio := value(case)) is not None}
        if found:
            worst, best = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
            count = f"{len(found)} program{'s' if len(found) > 1 else ''}"
            ends = f"; worst {worst} {found[worst]:.3f}x, best {best} {found[best]:.3f}x" if len(found) > 1 else ""
            lines.append(f"{title}: {geometric_mean(list(found.values())):.3f}x in the geometric mean of {count}{ends}")
    return lines


def _left_out(data: Mapping[str, Any]) -> list[str]:
    lines = [f"{case['name']}: {name}: {why}" for case in data["cases"] for name, why in case["missing"].items()]
    lines += [f"{name} failed: {why}" for name, why in data.get("failed", {}).items()]
    return lines + [f"{name} skipped: {why}" for name, why in data.get("skipped", {}).items()]


def _cells(case: Case) -> tuple[str, ...]:
    ratios, kernels = case["ratios"].get("search"), beyond_attention(case)
    span = f" ({min(ratios):.3f}-{max(ratios):.3f})" if ratios else ""
    warm = [of(case, who, "first_s") for who in ("compile again", "again")]
    memory = [(of(case, who, "kernels") or {}).get("memory_intensive_us") for who in ("compile", "search")]
    peak = [of(case, who, "peak_bytes") for who in ("compile", "search")]
    return (
        case["name"],
        *(_number(case[f"{who}_ms"], 2) for who in ("compile", "attention", "search")),
        _times(gain(case)) + span,
        _times(kernels),
        _number(of(case, "compile", "first_s"), 1),
        _number(added_s(case), 1),
        _arrow([_number(s, 1) for s in warm]),
        _arrow([_number(us and us / 1e3, 2) for us in memory]),
        _arrow([_number(b and b / 2**30, 1) for b in peak]),
    )


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}x"


def _arrow(both: Sequence[str]) -> str:
    return "–" if set(both) == {"–"} else " -> ".join(both)

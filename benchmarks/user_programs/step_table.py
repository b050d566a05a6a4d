"""The tables of :mod:`benchmarks.user_programs`, of steps and of kernels, and geometric means."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.fusion.report import geometric_mean

Case = Mapping[str, Any]
STEPS = (
    "program",
    "torch.compile",
    "+ attention",
    "autotune",
    "again",
    "gain",
    "kernels",
    "CUDA graph",
    "first s",
    "added s",
    "warm s",
    "peak",
)
KERNELS = ("program", "memory-intensive", "floor", "won", "library")
ABOUT_STEPS = (
    "A step in ms, launched from Python with its optimizer. + attention: rewritten attention without other kernels.",
    "again: a second process, with the database that the search filled.",
    "gain: over torch.compile, by blocks of steps in turn (least and most of the rounds). kernels: the gain beyond",
    "attention's. CUDA graph: the gain where whole steps are CUDA graphs. first s: first step of torch.compile with",
    "empty caches. added s: the search's addition to it. torch.compile -> autotune: warm s, first step of a second",
    "process; peak, memory of a step in GiB.",
)
ABOUT_KERNELS = (
    "ms of a step by the profiler, torch.compile -> autotune; the optimizer's kernels are memory-intensive. floor: the",
    "bytes of compiled memory-intensive operators by the speed of a copy, and the kernels of eager mode as they are.",
    "won: the share of the time above the floor that autotune saves.",
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


def graph_gain(case: Case) -> float | None:
    """Over torch.compile, where both steps are replays of CUDA graphs."""
    ours, theirs = of(case, "search", "graph_ms"), of(case, "compile", "graph_ms")
    return theirs / ours if ours and theirs else None


def above_floor(case: Case) -> tuple[float, float] | None:
    """The floor of a step's memory-intensive kernels, and the time of torch.compile's above it, in us."""
    kernels = of(case, "compile", "kernels") or {}
    moved = next((found for who in ("search", "attention") if (found := of(case, who, "moved_bytes"))), None)
    if not moved or "compiled_us" not in kernels:
        return None
    least = moved / kernels["copy_bytes_us"]
    return kernels["memory_intensive_us"] - kernels["compiled_us"] + least, kernels["compiled_us"] - least


def won(case: Case) -> float | None:
    """The share of the time above the floor that autotune saves; None where nothing is above it."""
    before, after = ((of(case, who, "kernels") or {}).get("memory_intensive_us") for who in ("compile", "search"))
    found = above_floor(case)
    if found is None or found[1] <= 0 or before is None or after is None:
        return None
    return float(before - after) / found[1]


def limit(case: Case) -> float | None:
    """The gain with memory-intensive kernels at their floor, or the measured gain if that is more.

    Library kernels are as fast as they are with autotune. The host's time stays.
    """
    found, measured = above_floor(case), gain(case)
    library = [(of(case, who, "kernels") or {}).get("library_us") for who in ("compile", "search")]
    if found is None or found[1] <= 0 or measured is None or None in library:
        return None
    saved = found[1] + max(0.0, library[0] - library[1])
    return max(measured, case["compile_ms"] / (case["compile_ms"] - saved / 1e3))


def text(data: Mapping[str, Any]) -> str:
    """For a terminal, of a result file's content."""
    lines: list[str] = []
    for head, cells, about in _tables():
        rows = [head, *(cells(case) for case in data["cases"])]
        widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
        for row in rows if data["cases"] else ():
            placed = [c.ljust(w) if not k else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True))]
            lines.append("  ".join(placed).rstrip())
        lines += ["", *about, ""] if data["cases"] else []
    return "\n".join([*lines, *means(data["cases"]), *_left_out(data)])


def markdown(data: Mapping[str, Any]) -> str:
    """For a document, of a result file's content; a column without any figure is left out."""
    lines: list[str] = []
    for head, cells, about in _tables():
        body = [cells(case) for case in data["cases"]]
        shown = [k for k in range(len(head)) if not k or any(row[k] != "–" for row in body)]
        rows = ["| " + " | ".join(row[k] for k in shown) + " |" for row in (head, *body)]
        rows.insert(1, "| --- |" + " ---: |" * (len(shown) - 1))
        lines += [*rows, "", *about, ""]
    made = f"measured {data['when'][:10]} by `{data['command']}`"
    caption = f"{data['device']}, torch {data['versions']['torch']}; {made}."
    notes = [*means(data["cases"]), *_left_out(data)]
    return "\n".join([*lines, *(f"- {line}" for line in notes), "", caption]) + "\n"


Cells = Callable[[Case], tuple[str, ...]]


def _tables() -> Iterator[tuple[tuple[str, ...], Cells, tuple[str, ...]]]:
    yield STEPS, _step_cells, ABOUT_STEPS
    yield KERNELS, _kernel_cells, ABOUT_KERNELS


def means(cases: Sequence[Case]) -> list[str]:
    """Geometric means of gains, a line each."""
    lines = []
    kinds = (
        ("over torch.compile", gain),
        ("beyond attention", beyond_attention),
        ("without a search, over torch.compile", predicted),
        ("CUDA graphs", graph_gain),
        ("with memory-intensive kernels at their floor, over torch.compile", limit),
    )
    for title, value in kinds:
        found = {case["name"]: ratio for case in cases if (ratio := value(case)) is not None}
        if found:
            worst, best = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
            count = f"{len(found)} program{'s' if len(found) > 1 else ''}"
            ends = f"; worst {worst} {found[worst]:.3f}x, best {best} {found[best]:.3f}x" if len(found) > 1 else ""
            lines.append(f"{title}: {geometric_mean(list(found.values())):.3f}x in the geometric mean of {count}{ends}")
    shares = [share for case in cases if (share := won(case)) is not None]
    if shares:
        lines.append(f"won of the time above the floor: {statistics.mean(shares):.0%} in the mean of {len(shares)}")
    return lines


def _left_out(data: Mapping[str, Any]) -> list[str]:
    lines = [f"{case['name']}: {name}: {why}" for case in data["cases"] for name, why in case["missing"].items()]
    lines += [f"{name} failed: {why}" for name, why in data.get("failed", {}).items()]
    return lines + [f"{name} skipped: {why}" for name, why in data.get("skipped", {}).items()]


def _step_cells(case: Case) -> tuple[str, ...]:
    ratios = case["ratios"].get("search")
    span = f" ({min(ratios):.3f}-{max(ratios):.3f})" if ratios else ""
    return (
        case["name"],
        *(_number(case[f"{who}_ms"], 2) for who in ("compile", "attention", "search", "again")),
        _times(gain(case)) + span,
        _times(beyond_attention(case)),
        _times(graph_gain(case)),
        _number(of(case, "compile", "first_s"), 1),
        _number(added_s(case), 1),
        _arrow([_number(of(case, who, "first_s"), 1) for who in ("compile again", "again")]),
        _arrow([_number(b and b / 2**30, 1) for b in (of(case, who, "peak_bytes") for who in ("compile", "search"))]),
    )


def _kernel_cells(case: Case) -> tuple[str, ...]:
    kernels = [of(case, who, "kernels") or {} for who in ("compile", "search")]
    found, share = above_floor(case), won(case)
    return (
        case["name"],
        _arrow([_number(k["memory_intensive_us"] / 1e3 if k else None, 2) for k in kernels]),
        _number(found and found[0] / 1e3, 2),
        "–" if share is None else f"{share:.0%}",
        _arrow([_number(k["library_us"] / 1e3 if k else None, 2) for k in kernels]),
    )


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}x"


def _arrow(both: Sequence[str]) -> str:
    return "–" if set(both) == {"–"} else " -> ".join(both)

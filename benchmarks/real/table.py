"""The table of :mod:`benchmarks.real_models`: a line a model, geometric means, and totals by kind of kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autotune.store.records import BUSY
from benchmarks.fusion.report import geometric_mean
from benchmarks.real.measure import COMPARED

Case = Mapping[str, Any]
ABOUT = (
    "A step in ms; autotune's speedup over torch.compile in each mode, and each at its best. + attention:",
    "torch.compile of graphs in which autotune has rewritten attention, in mode default. On a GPU also:",
    "time by kind of kernel and peak memory, torch.compile's -> autotune's, in the mode in which autotune is fastest.",
)
RESTED = "Marked *: timed between steps of other contenders, at a clock that the step may not hold for long."
HEADS = ("model", "eager", "compile", "+ attention", "Liger", "autotune", *COMPARED, "best", "memory-intensive",
         "floor", "library", "peak GiB")  # fmt: skip


def speedup(case: Case, mode: str) -> float | None:
    """Over ``torch.compile`` in the same mode; None where one is missing."""
    found = case[mode]
    return (
        found["compile_us"] / found["autotune_us"] if found and found["compile_us"] and found["autotune_us"] else None
    )


def rested(case: Case, mode: str) -> bool:
    """Return True if a GPU's step was timed without a separate lead, as up to November 2026."""
    found = case[mode]
    of_run = case.get("runs", {}).get(mode, case)
    return bool(found and found["autotune_peak_bytes"]) and not of_run.get("lead_s")


def fastest(case: Case, who: str) -> float | None:
    """The time of "compile" or "autotune" in the mode that is fastest for it; the former may have used CUDA graphs of
    its own (reduce-overhead)."""
    found = [case[mode][f"{who}_us"] for mode in COMPARED if case[mode]]
    found += [case["reduce_overhead_us"]] if who == "compile" else []
    return min((us for us in found if us), default=None)


def over_best(case: Case) -> float | None:
    """Over the fastest ``torch.compile`` of any mode, each at its best."""
    theirs, ours = fastest(case, "compile"), fastest(case, "autotune")
    return theirs / ours if theirs and ours else None


def best_mode(case: Case) -> str:
    """The mode in which autotune is fastest."""
    there = [mode for mode in COMPARED if case[mode] and case[mode]["autotune_us"]]
    return min(there, key=lambda mode: case[mode]["autotune_us"])


def text(cases: Sequence[Case], failed: Mapping[str, str] | None = None) -> str:
    """For a terminal; times in milliseconds, peaks in GiB."""
    rows = [HEADS, *(_cells(case) for case in cases)]
    keep = [k for k in range(len(HEADS)) if any(row[k] not in ("–", "") for row in rows[1:])]
    widths = [max(len(row[k]) for row in rows) for k in keep]
    lines = ["  ".join(_placed(row, keep, widths)).rstrip() for row in rows] if cases else []
    lines += ["", *_about(cases), *means(cases)] if cases else []
    if busy := [case["name"] for case in cases if case["others_busy"] > BUSY or case["searched"]["busy"]]:
        lines.append(f"busy: other processes disturbed {', '.join(busy)}; measure again on a quiet machine")
    lines += [
        f"{case['name']}: {len(missed)} regions of the step are none that a search captures: {', '.join(missed)}"
        for case in cases
        if (missed := case.get("not_captured"))
    ]
    lines += [f"{name} failed: {why}" for name, why in (failed or {}).items()]
    return "\n".join(lines)


def markdown(data: Mapping[str, Any]) -> str:
    """Of a result file's content, for a document."""
    rows = [HEADS, *(_cells(case) for case in data["cases"])]
    keep = [k for k in range(len(HEADS)) if any(row[k] not in ("–", "") for row in rows[1:])]
    lines = ["| " + " | ".join(row[k] for k in keep) + " |" for row in rows]
    lines.insert(1, "| --- |" + " ---: |" * (len(keep) - 1))
    made = f"measured {data['when'][:10]} by `{data['command']}`"
    caption = f"{data['device']}, torch {data['versions']['torch']}; {made}."
    lines += ["", *_about(data["cases"]), "", *(f"- {line}" for line in means(data["cases"])), "", caption]
    return "\n".join(lines) + "\n"


def _about(cases: Sequence[Case]) -> list[str]:
    marked = any(rested(case, mode) for case in cases for mode in COMPARED)
    return [*ABOUT, *([RESTED] if marked else [])]


def means(cases: Sequence[Case]) -> list[str]:
    """Geometric means and totals, a line each."""
    kinds: list[tuple[str, Callable[[Case], float | None]]] = [
        *((f"over torch.compile, {mode}", lambda case, mode=mode: speedup(case, mode)) for mode in COMPARED),  # type: ignore[misc]
        ("over torch.compile, each at its best", over_best),
        (
            "over torch.compile with attention rewritten",
            lambda case: _over(case.get("attention_us"), case["default"] and case["default"]["autotune_us"]),
        ),
        ("over eager", lambda case: _over(case["eager_us"], fastest(case, "autotune"))),
        ("over Liger Kernel", lambda case: _over(case["liger_us"], fastest(case, "autotune"))),
    ]
    lines = []
    for title, of in kinds:
        found = {case["name"]: value for case in cases if (value := of(case)) is not None}
        if found:
            worst, best = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
            count = f"{len(found)} model{'s' if len(found) > 1 else ''}"
            ends = f"; worst {worst} {found[worst]:.3f}x, best {best} {found[best]:.3f}x" if len(found) > 1 else ""
            lines.append(f"{title}: {geometric_mean(list(found.values())):.3f}x in the geometric mean of {count}{ends}")
    for mode in COMPARED:
        for kind, title in (("memory", "memory-intensive"), ("library", "library")):
            pairs = [_pair(case, mode, kind) for case in cases]
            known = [p for p in pairs if p]
            if known:
                theirs, ours = (sum(p[k] for p in known) for k in (0, 1))
                lines.append(f"{title} kernels, {mode}: {ours / 1e3:.1f} ms of torch.compile's {theirs / 1e3:.1f} ms")
    return lines


def _over(theirs: float | None, ours: float | None) -> float | None:
    return theirs / ours if theirs and ours else None


def _pair(case: Case, mode: str, kind: str) -> tuple[float, float] | None:
    found = case[mode]
    both = [found[f"{who}_{kind}_us"] for who in ("compile", "autotune")] if found else []
    return (both[0], both[1]) if all(both) and both else None


def _cells(case: Case) -> tuple[str, ...]:
    cut = (
        f" ({case['layers']} of {case['published_layers']} layers)" if case["layers"] < case["published_layers"] else ""
    )
    best = case[best_mode(case)]
    both = [
        [best[f"{who}_{what}"] for who in ("compile", "autotune")] for what in ("memory_us", "library_us", "peak_bytes")
    ]
    memory, library, peak = both
    return (
        case["name"] + cut,
        _ms(case["eager_us"]),
        _ms(fastest(case, "compile")),
        _ms(case.get("attention_us")),
        _ms(case["liger_us"]),
        _ms(fastest(case, "autotune")),
        *(_times(speedup(case, mode)) + "*" * rested(case, mode) for mode in COMPARED),
        _times(over_best(case)),
        _arrow([_ms(us) for us in memory]),
        _ms(best["floor_us"]) if any(memory) else "–",
        _arrow([_ms(us) for us in library]),
        _arrow(["–" if b is None else f"{b / 2**30:.1f}" for b in peak]),
    )


def _ms(us: float | None) -> str:
    return "–" if us is None else f"{us / 1e3:.2f}" if us < 1e5 else f"{us / 1e3:.1f}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}x"


def _arrow(both: Sequence[str]) -> str:
    return "–" if set(both) == {"–"} else " -> ".join(both)


def _placed(row: Sequence[str], keep: Sequence[int], widths: Sequence[int]) -> list[str]:
    return [row[k].rjust(w) if k else row[k].ljust(w) for k, w in zip(keep, widths, strict=True)]

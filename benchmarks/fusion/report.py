"""The summary of the suite, and Markdown tables of a result file."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autotune.store.records import BUSY
from benchmarks.form import measured_by

LARGE = 64 << 20
"""Bytes above which a case cannot live in the L2, and copy bandwidth is what bounds it."""

Case = Mapping[str, Any]


def geometric_mean(values: Sequence[float]) -> float:
    """Of at least one positive number."""
    return math.exp(sum(map(math.log, values)) / len(values))


def over_best(case: Case) -> float | None:
    """How many times faster autotune is than Inductor's best; None where that was not run."""
    return _ratio(case["inductor_best_us"], case["autotune_us"])


def over_eager(case: Case) -> float | None:
    """The same over eager."""
    return _ratio(case["eager_us"], case["autotune_us"])


def over_xla(case: Case) -> float | None:
    """XLA's kernel time over autotune's kernel time, by one instrument; None where either is missing."""
    return _ratio(case["xla_us"], case.get("autotune_kernels_us"))


def of_floor(case: Case) -> float:
    """Share of the copy bandwidth that autotune reaches."""
    share: float = case["floor_us"] / case["autotune_us"]
    return share


def _ratio(theirs: float | None, ours: float | None) -> float | None:
    return theirs / ours if theirs and ours else None


def summary(cases: Sequence[Case]) -> dict[str, Any]:
    """Means, best and worst over the cases, as the result file keeps them.

    Returns:
        ``cases``; ``inductor_best``, ``eager`` and ``xla``, each with ``cases``, ``geometric_mean``,
        ``arithmetic_mean``, ``best``, ``worst`` and their cases' names, or null where the peer was not run; and
        ``copy_share``, with ``cases`` (those over 64 MiB) and ``geometric_mean``, or null.
    """
    large = [of_floor(case) for case in cases if case["bytes"] > LARGE]
    return {
        "cases": len(cases),
        "inductor_best": _speedups(cases, over_best),
        "eager": _speedups(cases, over_eager),
        "xla": _speedups(cases, over_xla),
        "copy_share": {"cases": len(large), "geometric_mean": round(geometric_mean(large), 4)} if large else None,
    }


def _speedups(cases: Sequence[Case], of: Callable[[Case], float | None]) -> dict[str, Any] | None:
    found = {case["name"]: ratio for case in cases if (ratio := of(case)) is not None}
    if not found:
        return None
    best, worst = max(found, key=lambda n: found[n]), min(found, key=lambda n: found[n])
    ratios = list(found.values())
    return {
        "cases": len(ratios),
        "geometric_mean": round(geometric_mean(ratios), 4),
        "arithmetic_mean": round(statistics.fmean(ratios), 4),
        "best": round(found[best], 4),
        "best_case": best,
        "worst": round(found[worst], 4),
        "worst_case": worst,
    }


def summary_lines(found: Mapping[str, Any]) -> list[str]:
    """A summary for people, a sentence a line."""
    lines = []
    for key, title in (("inductor_best", "Inductor's best"), ("eager", "eager"), ("xla", "XLA")):
        s = found[key]
        if s is not None:
            lines.append(
                f"Over {title}, {s['cases']} cases: geometric mean {s['geometric_mean']:.2f}x, arithmetic mean"
                f" {s['arithmetic_mean']:.2f}x, best {s['best']:.2f}x ({s['best_case']}), worst {s['worst']:.2f}x"
                f" ({s['worst_case']})."
            )
    share = found["copy_share"]
    if share is not None:
        lines.append(
            f"Cases that move more than 64 MiB, {share['cases']} of them: {share['geometric_mean']:.0%} of the copy"
            " bandwidth in the geometric mean."
        )
    return lines


def render(data: Mapping[str, Any]) -> str:
    """The suite's table in Markdown, times in microseconds, with the summary and where it comes from below it.

    Columns of peers that no case ran are left out.
    """
    cases: Sequence[Case] = data["cases"]
    columns: list[tuple[str, Callable[[Case], str]]] = [
        ("copy floor", lambda c: number(c["floor_us"])),
        ("eager", lambda c: number(c["eager_us"])),
        ("Inductor", lambda c: number(c["inductor_us"])),
        ("its best", lambda c: number(c["inductor_best_us"]) if c.get("inductor_options") else NOTHING),
        ("XLA", lambda c: number(c["xla_us"])),
        ("autotune", lambda c: number(c["autotune_us"])),
        ("over Inductor's best", lambda c: times(over_best(c))),
        ("over XLA", lambda c: times(over_xla(c))),
        ("of the floor's speed", lambda c: f"{of_floor(c):.0%}"),
        ("kernels: eager, Inductor, XLA, autotune", _kernels),
    ]
    shown = [(title, [cell(case) for case in cases]) for title, cell in columns]
    shown = [(title, cells) for title, cells in shown if any(cell != NOTHING for cell in cells)]
    made = f"measured {data['when'][:10]} by {measured_by(data)}"
    caption = f"{data['device']}, torch {data['versions']['torch']}; times in us, {made}."
    busy = sum(case.get("others_busy", 0.0) > BUSY for case in cases)
    if busy:
        caption += f" Other processes kept the machine busy during {busy} of {len(cases)} cases."
    if any(case["xla_us"] is not None for case in cases):
        caption += (
            " XLA's times are sums over its kernels; what it is compared with is the same sum over autotune's, by the"
            " same profiler."
        )
    table = _table([case["name"] for case in cases], shown)
    return "\n".join([*table, "", *_list(summary_lines(summary(cases))), "", caption]) + "\n"


def render_ablations(data: Mapping[str, Any], about: Mapping[str, str]) -> str:
    """The contribution of each part of the search, in Markdown: times in microseconds by ablation, and the loss.

    Args:
        about: a few words about an ablation by name, for the lines below the table.

    Raises:
        ValueError: the file has none.
    """
    cases = [case for case in data["cases"] if case.get("ablations")]
    names = list(dict.fromkeys(name for case in cases for name in case["ablations"]))
    if not names:
        raise ValueError("the result file has no ablations: measure it with --ablation NAME")
    columns = [("full", [number(case["autotune_us"]) for case in cases])]
    losses: dict[str, list[float]] = {}
    for name in names:
        columns.append((name, [number(case["ablations"].get(name)) for case in cases]))
        losses[name] = [case["ablations"][name] / case["autotune_us"] for case in cases if name in case["ablations"]]
    rows = [case["name"] for case in cases]
    means = [("full", "1.00x"), *((name, times(geometric_mean(losses[name]))) for name in names)]
    columns = [(title, [*cells, mean]) for (title, cells), (_, mean) in zip(columns, means, strict=True)]
    lines = _table([*rows, "times as long, geometric mean"], columns)
    notes = [f"`{name}`: {about[name]}." for name in names if name in about]
    return "\n".join([*lines, "", *_list(notes), "", f"{data['device']}; times in us."]) + "\n"


NOTHING = "–"


def number(value: float | None) -> str:
    """A time for a table."""
    if value is None:
        return NOTHING
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def times(value: float | None) -> str:
    """A ratio for a table."""
    return NOTHING if value is None else f"{value:.2f}x"


def _kernels(case: Case) -> str:
    counts = case.get("kernels") or {}
    names = ("eager", "inductor_best" if "inductor_best" in counts else "inductor", "xla", "autotune")
    found = [str(counts[name]) if name in counts else NOTHING for name in names]
    return NOTHING if all(cell == NOTHING for cell in found) else ", ".join(found)


def _table(rows: Sequence[str], columns: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    lines = [["case", *(title for title, _ in columns)], ["---", *("---:" for _ in columns)]]
    lines += [[row, *(cells[k] for _, cells in columns)] for k, row in enumerate(rows)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _list(lines: Sequence[str]) -> list[str]:
    return [f"- {line}" for line in lines]

"""The README's table and picture of :mod:`benchmarks.user_programs`: steps, gains, first steps and memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autotune.words import plural
from benchmarks.fusion.report import geometric_mean
from benchmarks.user_programs.step_table import Case, added_s, gain, of

SEARCHED, LATER = "process that searched", "later process"
FIRST = "\N{DAGGER}"
"""Mark of a later process that was compared with torch.compile's first process."""


def later_gain(case: Case) -> float | None:
    """Return the gain of a later process over torch.compile, in a later process too if one was measured."""
    theirs = case.get("compile_again_ms") or case["compile_ms"]
    return theirs / case["again_ms"] if theirs and case.get("again_ms") else None


def gains(data: Mapping[str, Any]) -> list[tuple[str, str, float | None]]:
    """Program, kind of process and gain over torch.compile, for each program that ran to its end."""
    return [
        (case["about"], kind, value)
        for case in data["cases"]
        for kind, value in ((SEARCHED, gain(case)), (LATER, later_gain(case)))
    ]


def markdown(data: Mapping[str, Any]) -> str:
    """Return the table: times of a step in ms, and gains over torch.compile."""
    lines = ["| program | torch.compile | autotune | gain | later process |", "|---|---:|---:|---:|---:|"]
    for case in data["cases"]:
        times = [_number(case[key]) for key in ("compile_ms", "search_ms")]
        later = _times(later_gain(case)) + (FIRST if _by_first(case) else "")
        lines.append(f"| {case['about']} | {' | '.join(times)} | {_times(gain(case))} | {later} |")
    found = [[g for case in data["cases"] if (g := of_case(case))] for of_case in (gain, later_gain)]
    means = " | ".join(_times(geometric_mean(values) if values else None) for values in found)
    lines.append(f"| geometric mean of {len(found[0])} | | | {means} |")
    searched = sorted({case["search_s"] for case in data["cases"] if case.get("search_s")}) or [0.0]
    seconds = " and ".join(f"{s:.0f}" for s in searched)
    about = [f"{data['device']}, torch {data['versions']['torch']}, {data['when'][:10]}; searches of {seconds} s."]
    if any(map(_by_first, data["cases"])):
        about.append(f"{FIRST} is over torch.compile's first process: its second one was not measured.")
    about += [*_starts(data["cases"]), *_peaks(data["cases"])]
    return "\n".join([*lines, "", *about]) + "\n"


def _by_first(case: Case) -> bool:
    """True if torch.compile has no later process to compare the later process with."""
    return later_gain(case) is not None and not case.get("compile_again_ms")


def _starts(cases: Sequence[Case]) -> list[str]:
    """Return sentences about first steps in seconds: of the first process, and of later ones if both have one."""
    first = _span((of(case, "compile", "first_s") for case in cases), ".0f")
    added = _span(map(added_s, cases), ".0f")
    later = [(of(case, "again", "first_s"), of(case, "compile again", "first_s")) for case in cases]
    more = [a - b for a, b in later if a is not None and b is not None]
    told = []
    if first and added:
        told.append(
            f"The first step took {first} s under torch.compile; the search and the second compilation added {added} s."
        )
    if more:
        ours, both = _span((value for value, _ in later), ".1f"), plural(len(more), "program")
        told.append(
            f"The first step of a later process took {ours} s. In {both} torch.compile's was timed too: autotune's"
            f" differs by {_span(more, '+.1f')} s."
        )
    return told


def _peaks(cases: Sequence[Case]) -> list[str]:
    """Return a sentence about the peak memory of a step, as a multiple of torch.compile's."""
    searched, later = (
        _span((_ratio(of(case, who, "peak_bytes"), of(case, "compile", "peak_bytes")) for case in cases), ".2f")
        for who in ("search", "again")
    )
    if not searched or not later:
        return []
    return [f"A step's peak memory was {searched} times torch.compile's in the {SEARCHED}, and {later} in a {LATER}."]


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours and theirs else None


def _span(values: Iterable[float | None], form: str) -> str:
    """Return the least and the greatest known value; "" if there is none."""
    known = [value for value in values if value is not None]
    return f"{min(known):{form}} to {max(known):{form}}" if known else ""


def chart(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return bars of the gains over torch.compile, as Vega-Lite."""
    known = [(program, kind, value) for program, kind, value in gains(data) if value]
    values = [{"program": program, "process": kind, "gain": value} for program, kind, value in known]
    least = min([1.0, *(value for _, _, value in known)])
    shared = {
        "y": {"field": "program", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 420}},
        "yOffset": {"field": "process", "sort": [SEARCHED, LATER]},
    }
    axis = {"title": "speed of a step, torch.compile = 1", "format": ".2f", "tickCount": 6}
    scale = {"domainMin": round(least - 0.05, 2), "zero": False}
    bar = {
        "mark": {"type": "bar"},
        "encoding": {
            **shared,
            "x": {"field": "gain", "type": "quantitative", "scale": scale, "axis": axis},
            "x2": {"datum": 1},
            "color": {
                "field": "process",
                "title": None,
                "legend": {"columnPadding": 40},
                "scale": {"domain": [SEARCHED, LATER], "range": ["#86efac", "#16a34a"]},
            },
        },
    }
    label = {
        "mark": {"type": "text", "align": "left", "dx": 4, "fontSize": 10},
        "encoding": {
            **shared,
            "x": {"field": "gain", "type": "quantitative"},
            "text": {"field": "gain", "type": "quantitative", "format": ".2f"},
        },
    }
    one = {"mark": {"type": "rule"}, "encoding": {"x": {"datum": 1, "type": "quantitative"}}}
    padding = {
        "left": 60,
        "right": 20,
        "top": 5,
        "bottom": 5,
    }  # a browser's font is wider than the one that is measured
    return {
        "data": {"values": values},
        "width": 420,
        "height": {"step": 13},
        "padding": padding,
        "layer": [bar, label, one],
    }


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"

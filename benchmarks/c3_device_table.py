"""Markdown tables of a result file of :mod:`benchmarks.c3_device`, and findings in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autotune.domains.c3.scenario import format_bytes

SLOW = 1.02
"""What is below this is no slowdown."""


def render(data: Mapping[str, Any]) -> str:
    """The tables of the parts that the file has, the findings, and the list of failed measurements."""
    parts: dict[str, list[Mapping[str, Any]]] = {}
    for case in data["cases"]:
        parts.setdefault(case["part"], []).append(case)
    makers = {"bandwidth": _bandwidth, "power": _power, "partition": _partition}
    blocks = [f"{data['device']}, {data['ranks']} ranks, torch {data['versions']['torch']}, {data['when'][:10]}"]
    blocks += ["\n".join(maker(parts[name])) for name, maker in makers.items() if name in parts]
    blocks.append("\n".join(f"- {line}" for line in findings(data)))
    if data["notes"]:
        blocks.append("\n".join(["Not measured:", "", *(f"- {line}" for line in data["notes"])]))
    return "\n\n".join(block for block in blocks if block) + "\n"


def findings(data: Mapping[str, Any]) -> list[str]:
    """One line for each collective, and for each GEMM during copies."""
    lines = []
    for op, found in data["summary"].items():
        size = found["crossover_bytes"]
        since = f"as fast from {format_bytes(size)} on" if size else "slower at the largest size"
        said = {None: "", True: "at least 90%", False: "NOT everywhere 90%"}[found["enough_from_64MiB"]]
        enough = f"; {said} of NCCL's bandwidth from 64 MiB up" if said else ""
        lines.append(f"{op} by copies is {since}{enough}")
    return [*lines, *(finding(case) for case in data["cases"] if case["part"] == "power")]


def finding(case: Mapping[str, Any]) -> str:
    """The reason why copies slowed a GEMM down, in a line: its clock, or another one."""
    slower, clock, rest = case["slowdown"], case["clock_drop"], case["slowdown_at_equal_clock"]
    line = f"{case['name']}: {slower:.3f} times as long during copies"
    if clock is None:
        return f"{line}; the clock is not known"
    cap = case["held"]["both"].get("power cap")
    line += f", its clock {1 / clock:.1%} of that alone" + (f", at the power cap {cap:.0%} of the time" if cap else "")
    if slower < SLOW:
        return line
    return f"{line}; at an equal clock {rest:.3f}: " + (
        "the clock explains it" if rest < SLOW else "the clock explains a part" if clock >= SLOW else "not the clock"
    )


def _bandwidth(cases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Microseconds and bus bandwidth of each engine's fastest way."""
    there = {engine for case in cases for engine in case["best"]}
    engines = [engine for engine in ("nccl", "gloo", "copy", "sm") if engine in there]
    base = "gloo" if "gloo" in there else "NCCL"
    titles = [title for engine in engines for title in (f"{engine} us", "GB/s")]
    yield from _head("collective", *titles, "fastest copies", f"copies over {base}", "90%")
    for case in cases:
        best, cells = case["best"], list[str]()
        for engine in engines:
            name = best.get(engine)
            cells += [f"{case['us'][name]:.1f}", f"{case['gb_s'][name]:.1f}"] if name else ["–", "–"]
        ratio = case["copy_over_base"]
        enough = {None: "–", True: "yes", False: "no"}[case["enough"]]
        yield _row(case["name"], *cells, best.get("copy", "–"), "–" if ratio is None else f"{ratio:.2f}", enough)


def _power(cases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Times, clocks and power, alone / during copies."""
    yield from _head("GEMM during copies", "GEMM us", "copies us", "both us", "both, first 50 ms", "slowdown",
                     "MHz alone", "MHz during", "W alone", "W during", "clock limited by")  # fmt: skip
    for case in cases:
        us, mhz, watt = case["us"], case["mhz"], case["watt"]
        held = ", ".join(f"{why} {share:.0%}" for why, share in case["held"]["both"].items())
        figures = [us["gemm"], us["copies"], us["both"], case["us_at_first"]["both"]]
        sensed = [mhz.get("gemm"), mhz.get("both"), watt.get("gemm"), watt.get("both")]
        cells = [*(f"{t:.1f}" for t in figures), f"{case['slowdown']:.3f}"]
        yield _row(case["name"], *cells, *("–" if v is None else f"{v:.0f}" for v in sensed), held or "–")


def _partition(cases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Microseconds, and in brackets the SMs that the GEMM really had."""
    names = list(dict.fromkeys(name for case in cases for name in case["us"]))
    yield from _head("GEMM, us (SMs)", *(f"{name} SMs less" if name != "0" else "all SMs" for name in names))
    for case in cases:
        us, sms = case["us"], case["sms"]
        yield _row(case["name"], *(f"{us[n]:.1f} ({sms[n]})" if n in us else "–" for n in names))


def _head(*titles: str) -> Iterator[str]:
    yield _row(*titles)
    yield _row("---", *("---:" for _ in titles[1:]))


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"

"""The C3 suite as SVG pictures, written by hand as text: bars of all scenarios, and the timeline of one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from autotune.domains.c3.suite.families import NAMES

_COLOURS = {
    "sequential": "#d1d5db",
    "naive": "#9ca3af",
    "order": "#93c5fd",
    "partition": "#c4b5fd",
    "copy_engine": "#fcd34d",
    "tuned": "#16a34a",
}
_ROWS = {
    "compute": ("#2563eb", "computation"),
    "nccl": ("#9333ea", "NCCL kernels"),
    "copies": ("#d97706", "copies"),
    "kernels": ("#16a34a", "Numba kernels"),
    "gloo": ("#9333ea", "gloo"),
    "copy": ("#d97706", "copies through shared memory"),
}
_FONT = 12
_TITLE = 15
_PAD = 16
_LEFT = 44  # for the scale
_BAR, _GAP = 8, 14
_HEIGHT = 160  # of the bars of a panel
_BELOW = 150  # for the names, which stand on their heads
_WIDE, _LANE = 760, 26  # of a timeline, and the height of a row


def bars(data: Mapping[str, Any]) -> str:
    """Speedups over sequential of every scenario, a panel for each collective; a mark is the ideal."""
    cases = data["cases"]
    panels = [[c for c in cases if c["collective"] == name] for name in dict.fromkeys(c["collective"] for c in cases)]
    group = len(_COLOURS) * _BAR + _GAP
    width = 2 * _PAD + _LEFT + max(max(map(len, panels)) * group, 720 - _LEFT)
    title = f"Speedup over one after the other: {data['device']}"
    out = [_text(_PAD, _PAD + _TITLE, title, size=_TITLE, bold=True), *_legend(_PAD, 2 * _PAD + _TITLE)]
    y = 3.0 * _PAD + _TITLE + _FONT
    for panel in panels:
        out += _panel(panel, y, group, width)
        y += _PAD + _FONT + _HEIGHT + _BELOW
    return _document(title, width, y + _PAD, out)


def _legend(x: float, y: float) -> list[str]:
    out = []
    for name, colour in _COLOURS.items():
        words = name.replace("_", " ")
        out.append(_rect(x, y, 10, 10, colour) + _text(x + 14, y + 9.5, words))
        x += 14 + len(words) * 7.2 + 16
    return [*out, _line(x, y + 5, x + 12, y + 5, "#dc2626", 2), _text(x + 16, y + 9.5, "ideal")]


def _panel(cases: Sequence[Mapping[str, Any]], y: float, group: float, width: float) -> list[str]:
    bottom = y + _PAD + _FONT + _HEIGHT
    speedups = [c["sequential_ms"] / s["ms"] for c in cases for s in c["strategies"].values() if s]
    most = max(2.0, *(_over_sequential(c) for c in cases), *speedups) * 1.05
    x, out = float(_PAD + _LEFT), [_text(_PAD, y + _FONT, cases[0]["collective"], bold=True)]
    tick = 0.5 if most < 4 else 1.0
    for step in range(math.floor(most / tick) + 1):
        at = bottom - step * tick / most * _HEIGHT
        out.append(_line(x, at, width - _PAD, at, "#e5e7eb", 1))
        out.append(_text(x - 6, at + 4, f"{step * tick:g}", anchor="end", colour="#6b7280"))
    for case in cases:
        values: dict[str, float | None] = {"sequential": 1.0}
        for name in NAMES:
            entry = case["strategies"].get(name)
            values[name] = case["sequential_ms"] / entry["ms"] if entry else None
        for k, (name, value) in enumerate(values.items()):
            if value is not None:
                high = value / most * _HEIGHT
                told = f"{case['name']}, {name.replace('_', ' ')}: {value:.2f}x"
                out.append(_rect(x + k * _BAR, bottom - high, _BAR - 1, high, _COLOURS[name], told))
        at = bottom - _over_sequential(case) / most * _HEIGHT
        out.append(_line(x - 2, at, x + len(_COLOURS) * _BAR + 1, at, "#dc2626", 2))
        middle = x + len(_COLOURS) * _BAR / 2
        out.append(
            f'<text transform="translate({_n(middle + 4)} {_n(bottom + 8)}) rotate(90)">{escape(case["name"])}</text>'
        )
        x += group
    return out


def _over_sequential(case: Mapping[str, Any]) -> float:
    """The ideal over what one after the other took in the same comparison."""
    longest: float = max(case["t_gemm_ms"], case["t_comm_ms"])
    return float(case["sequential_ms"]) / longest


def timeline(case: Mapping[str, Any]) -> str:
    """What ran when in a case, naively overlapped and tuned, on one scale."""
    runs = {name: case["timeline"][name] for name in ("naive", "tuned") if name in case["timeline"]}
    longest = max((run["us"] for run in runs.values()), default=0.0) or 1.0
    left = _PAD + 190.0
    width = left + _WIDE + _PAD
    out = [_text(_PAD, _PAD + _TITLE, f"{case['name']}: what ran when, on rank 0", size=_TITLE, bold=True)]
    y = 2.0 * _PAD + _TITLE
    for name, run in runs.items():
        entry = case["strategies"].get(name)
        words = f"{name}: {run['us'] / 1e3:.3g} ms here" + (f", {entry['label']}" if entry else "")
        out.append(_text(_PAD, y + _FONT, words, bold=True))
        y += _PAD + 4
        for row in [r for r in _ROWS if any(span["row"] == r for span in run["spans"])]:
            colour, about = _ROWS[row]
            out.append(_text(_PAD, y + _LANE / 2 + 4, about))
            for span in run["spans"]:
                if span["row"] == row:
                    x, w = left + span["start_us"] / longest * _WIDE, max(span["us"] / longest * _WIDE, 0.6)
                    told = f"{span['name']}: {span['us']:.1f} us from {span['start_us']:.1f} us on"
                    out.append(_rect(x, y + 3, w, _LANE - 6, colour, told, seam=True))
            out.append(_line(left, y + _LANE, left + _WIDE, y + _LANE, "#e5e7eb", 1))
            y += _LANE
        y += _PAD
    out += _axis(left, y, longest)
    return _document(f"Timeline of {case['name']}", width, y + 2 * _PAD + _FONT, out)


def _axis(x: float, y: float, longest_us: float) -> list[str]:
    """A scale in milliseconds with three to seven ticks."""
    step = 10.0 ** math.floor(math.log10(longest_us))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if longest_us / s <= 7)
    out = [_line(x, y, x + _WIDE, y, "#6b7280", 1)]
    for k in range(math.floor(longest_us / step) + 1):
        at = x + k * step / longest_us * _WIDE
        out.append(_line(at, y, at, y + 5, "#6b7280", 1))
        out.append(_text(at, y + 8 + _FONT, f"{k * step / 1e3:g}", anchor="middle", colour="#6b7280"))
    return [*out, _text(x - 10, y + 8 + _FONT, "ms", anchor="end", colour="#6b7280")]


def _document(title: str, width: float, height: float, body: Sequence[str]) -> str:
    size = f'width="{_n(width)}" height="{_n(height)}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_n(width)} {_n(height)}"'
        f' font-family="system-ui, sans-serif" font-size="{_FONT}">'
    )
    begin = [head, f"<title>{escape(title)}</title>", f'<rect {size} fill="#ffffff"/>']
    return "\n".join([*begin, *body, "</svg>", ""])


def _text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = _FONT,
    bold: bool = False,
    anchor: str = "start",
    colour: str = "#111827",
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    where = f'x="{_n(x)}" y="{_n(y)}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {where}{weight}>{escape(words)}</text>"


def _rect(x: float, y: float, w: float, h: float, colour: str, told: str = "", *, seam: bool = False) -> str:
    where = f'x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}"'
    edge = ' stroke="#ffffff" stroke-width="0.5"' if seam else ""
    title = f"<title>{escape(told)}</title>" if told else ""
    return f'<rect {where} fill="{colour}"{edge}>{title}</rect>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, wide: int) -> str:
    where = f'x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"'
    return f'<line {where} stroke="{colour}" stroke-width="{wide}"/>'


def _n(value: float) -> str:
    """A number with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")

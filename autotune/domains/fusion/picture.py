"""SVG pictures of plans, and a report's sections about a region: its picture, and the bytes moved by each kernel.

Boxes are operators, nested in passes, groups (one kernel body each), launches and the region. An edge's colour shows
the storage of the value between two operators. :mod:`autotune.domains.fusion.svg_layout` computes the geometry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from autotune.charts import Exhibit
from autotune.device import DeviceIdentity
from autotune.domains.fusion.anatomy import Anatomy, dissect
from autotune.domains.fusion.svg_layout import (
    FONT,
    GLYPH,
    LINE,
    PAD,
    Box,
    Drawing,
    Edge,
    lay_out,
    text_width,
)
from autotune.errors import Unsupported
from autotune.ir.graph import Graph
from autotune.store.records import Schedule
from autotune.words import plural
from autotune.workload import Workload

_HOMES = {
    "thread": ("#6b7280", "registers of a thread"),
    "warp": ("#2563eb", "shuffles of a warp"),
    "block": ("#d97706", "shared memory of a block"),
    "cluster": ("#7c3aed", "shared memory of a cluster"),
    "grid": ("#dc2626", "global memory: scratch"),
    "again": ("#9ca3af", "made again where it is used"),
    "output": ("#15803d", "global memory: a result"),
}
_FILL = {
    "region": ("#ffffff", "#111827"),
    "launch": ("#f3f4f6", "#9ca3af"),
    "group": ("#ffffff", "#374151"),
    "pass": ("#f9fafb", "#e5e7eb"),
    "load": ("#dbeafe", "#2563eb"),
    "leaf": ("#f3f4f6", "#9ca3af"),
    "pointwise": ("#ffffff", "#6b7280"),
    "reduction": ("#fef3c7", "#d97706"),
    "output": ("#dcfce7", "#15803d"),
    "scratch": ("#fee2e2", "#dc2626"),
}
_LEGEND_BOXES = (
    ("load", "read"),
    ("pointwise", "operator"),
    ("reduction", "reduction"),
    ("output", "result"),
    ("scratch", "scratch"),
)
_INNER = ("load", "leaf", "pointwise", "reduction", "output", "scratch")
_TITLE = 16
_LEGEND_WIDTH = 640


_DARK = {
    "#ffffff": "#0f1319", "#f9fafb": "#141922", "#f3f4f6": "#171c24", "#dbeafe": "#172554", "#fef3c7": "#422006",
    "#dcfce7": "#052e16", "#fee2e2": "#450a0a", "#111827": "#e5e7eb", "#374151": "#9ca3af", "#e5e7eb": "#374151",
    "#2563eb": "#60a5fa", "#d97706": "#f59e0b", "#15803d": "#22c55e", "#dc2626": "#f87171", "#7c3aed": "#a78bfa",
}  # fmt: skip
"""Replacement colours for dark mode; the viewer selects them by its colour scheme."""
_OPERATORS = 400
"""Maximum number of operators in a picture; a larger plan is shown as a table only."""


def _style() -> str:
    """CSS rules for dark mode; attributes of the elements have the colours of light mode."""
    rules = [
        f"{element}[{kind}='{light}'] {{ {kind}: {dark} }}"
        for light, dark in _DARK.items()
        for element, kind in (
            ("rect", "fill"),
            ("rect", "stroke"),
            ("path", "stroke"),
            ("line", "stroke"),
            ("text", "fill"),
        )
    ]
    text = f"text:not([fill]) {{ fill: {_DARK['#111827']} }}"
    return f"<style>@media (prefers-color-scheme: dark) {{ {text} {' '.join(rules)} }}</style>"


def draw(title: str, drawings: Sequence[Drawing]) -> str:
    """An SVG document of regions from top to bottom, with a legend; deterministic."""
    legend, legend_width, legend_height = _legend(PAD, PAD + _TITLE + PAD)
    page = lay_out(drawings, PAD + _TITLE + PAD + legend_height)
    width = max(page.width, legend_width + PAD, PAD * 2 + len(title) * _TITLE * 0.62)
    fonts = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
    size = f'width="{_n(width)}" height="{_n(page.height)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_n(width)} {_n(page.height)}" '
    out = [
        head + f'font-family="{fonts}" font-size="{FONT}">',
        _style(),
        f"<title>{escape(title)}</title>",
        f'<rect {size} fill="#ffffff"/>',
        f'<text x="{PAD}" y="{PAD + _TITLE}" font-size="{_TITLE}" font-weight="bold">{escape(title)}</text>',
        *legend,
    ]
    boxes = [b for b in page.every() if b.kind != "via"]
    out += [_rectangle(b) for b in boxes if b.kind not in _INNER]
    out += [_edge(e) for e in page.edges]
    out += [_rectangle(b) for b in boxes if b.kind in _INNER]
    out.append("</svg>")
    return "\n".join(out) + "\n"


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _rectangle(b: Box) -> str:
    fill, stroke = _FILL[b.kind]
    where = f'x="{_n(b.x)}" y="{_n(b.y)}" width="{_n(b.w)}" height="{_n(b.h)}"'
    parts = [f'<rect class="{b.kind}" {where} rx="4" fill="{fill}" stroke="{stroke}"/>']
    if b.kind in _INNER:
        middle, base = b.x + b.w / 2, b.y + b.h / 2 + FONT * 0.35
        parts.append(f'<text x="{_n(middle)}" y="{_n(base)}" text-anchor="middle">{escape(b.lines[0])}</text>')
    else:
        for k, line in enumerate(b.lines):
            bold = ' font-weight="bold"' if b.kind == "region" and k == 0 else ""
            colour = ' fill="#6b7280"' if b.kind == "pass" else ""
            y = b.y + LINE * (k + 1)
            parts.append(f'<text x="{_n(b.x + PAD)}" y="{_n(y)}"{bold}{colour}>{escape(line)}</text>')
    if b.label:
        colour = _HOMES[b.home][0]
        parts.append(
            f'<text x="{_n(b.x)}" y="{_n(b.y + b.h + FONT)}" fill="{colour}" font-size="{FONT - 1}">'
            f"{escape(b.label)}</text>"
        )
    return "".join(parts)


def _edge(e: Edge) -> str:
    colour = _HOMES[e.home][0]
    x, y = e.source.x + e.source.w / 2, e.source.y + e.source.h
    way = [f"M{_n(x)} {_n(y)}"]
    for box in (*e.via, e.sink):
        to_x, to_y = box.x + box.w / 2, box.y
        bend = max(10.0, (to_y - y) / 2)
        way.append(f"C{_n(x)} {_n(y + bend)} {_n(to_x)} {_n(to_y - bend)} {_n(to_x)} {_n(to_y)}")
        x, y = to_x, to_y
        if box is not e.sink:
            y += box.h
            way.append(f"V{_n(y)}")
    dashes = ' stroke-dasharray="4 3"' if e.home == "again" else ""
    wide = 1 if e.home == "thread" else 2
    return (
        f'<path class="edge" d="{" ".join(way)}" fill="none" stroke="{colour}" stroke-width="{wide}" opacity="0.8"'
        f"{dashes}/>"
    )


def _legend(x: float, y: float) -> tuple[list[str], float, float]:
    """(elements, right edge, height)."""
    out = []
    at, right = x, 0.0
    for kind, text in _LEGEND_BOXES:
        fill, stroke = _FILL[kind]
        out.append(
            f'<rect x="{_n(at)}" y="{_n(y)}" width="14" height="12" rx="3" fill="{fill}" stroke="{stroke}"/>'
            f'<text x="{_n(at + 19)}" y="{_n(y + 10)}">{text}</text>'
        )
        at += 19 + text_width(text) + 2 * GLYPH
        right = max(right, at)
    at = x
    y += 26
    for colour, text in _HOMES.values():
        width = 23 + text_width(text) + 2 * GLYPH
        if at > x and at + width > _LEGEND_WIDTH:
            at, y = x, y + LINE
        out.append(
            f'<line x1="{_n(at)}" y1="{_n(y)}" x2="{_n(at + 18)}" y2="{_n(y)}" stroke="{colour}" '
            f'stroke-width="2"/><text x="{_n(at + 23)}" y="{_n(y + 4)}">{text}</text>'
        )
        at += width
        right = max(right, at)
    return out, right, 40.0 + 2 * LINE


def exhibits(
    workload: Workload, config: Mapping[str, Any] | None, schedule: Schedule | None, device: DeviceIdentity
) -> Sequence[Exhibit]:
    """See ``autotune.domain.Domain``. Shows the plan of the winner, or the greedy plan without a winner."""
    graph = Graph.from_json(workload.spec)
    try:
        anatomy = dissect(graph, dict(config or {}), device.kind, device.units)
    except Unsupported as error:
        return (Exhibit("Plan", f"It has no kernels of ours: {error}"),)
    left = schedule is not None and schedule.config is None
    about = f"{plural(anatomy.kernels, 'kernel')}, {_size(anatomy.bytes)} moved, {_size(graph.bytes_moved)} at least."
    about += " A baseline won: the region is left as it was." if left else ""
    rows = [
        (
            f"{number}.{place}" if len(launch) > 1 else str(number),
            group.scheme,
            group.shape,
            ", ".join(t.label for t in group.reads),
            ", ".join(t.label for t in group.writes),
            group.bytes / 2**20,
            group.private_bytes / 2**20,
        )
        for number, launch in enumerate(anatomy.launches, 1)
        for place, group in enumerate(launch, 1)
    ]
    heads = ("launch", "scheme", "shape", "reads", "writes", "MiB moved", "MiB of partial results")
    shown = [Exhibit("Plan", about, svg=_picture(workload, graph, anatomy))]
    shown.append(Exhibit("Bytes by kernel", heads=heads, rows=rows))
    if config:
        settings = [(str(name), str(value)) for name, value in config.items()]
        shown.append(Exhibit("Configuration", heads=("parameter", "value"), rows=settings, folded=True))
    return shown


def _picture(workload: Workload, graph: Graph, anatomy: Anatomy) -> str:
    if sum(len(group.operators) for group in anatomy.groups) > _OPERATORS:
        return ""
    after = f"{plural(anatomy.kernels, 'kernel')}, {_size(anatomy.bytes)} moved"
    before = f"at least {_size(graph.bytes_moved)} in and out"
    return draw(workload.label, [Drawing("region", before, after, anatomy)])


def _size(n: int) -> str:
    return f"{n / 2**20:.3g} MiB"

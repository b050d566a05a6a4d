"""Layout of a plan's picture: nested boxes, and the edges between them. This module does not draw.

From top to bottom: a region contains launches, a launch its groups, a group its passes, a pass its operators, with one
row per level of dependence. A group's results are a row of their own at the bottom. The layout is deterministic.
Lengths are in CSS pixels; text widths assume a monospaced font.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autotune.domains.fusion.anatomy import Anatomy, GroupAnatomy, Operator

FONT = 11
GLYPH = FONT * 0.62  # widest advance of the usual monospaced fonts
LINE = 15  # height of a line of text
BOX_H = 24
GAP_X = 14
GAP_Y = 30  # room for edges, and for the label under a box
PAD = 12
ABREAST = 8  # maximum number of operators in a row
WIDEST_GAP = 160  # maximum gap that moves a box under its arguments
PAGE = 1500  # width beyond which the groups of a launch wrap


@dataclass
class Box:
    """A rectangle with text.

    Attributes:
        kind: "region", "launch", "group", "pass", "load", "leaf", "pointwise", "reduction", "output",
            "scratch", or "via": space reserved for an edge.
        lines: text; centred in operators, at the top left of all other boxes.
        label: text under the box: where its value is stored.
        home: one of :data:`autotune.domains.fusion.anatomy.HOMES`; selects the colour of ``label``.
        inside: child boxes, at positions relative to this box's corner until :func:`place` is called.
    """

    kind: str
    lines: tuple[str, ...] = ()
    x: float = 0.0
    y: float = 0.0
    w: float = 0.0
    h: float = 0.0
    label: str = ""
    home: str = ""
    inside: list[Box] = field(default_factory=list)

    @property
    def header(self) -> float:
        """Height of the text at the top of a box with children."""
        return LINE * len(self.lines) + (PAD / 2 if self.lines else 0)

    def fit(self) -> None:
        """Set the size from the children and the text."""
        right = max([b.x + b.w for b in self.inside] + [PAD + text_width(line) for line in self.lines], default=0.0)
        bottom = max((b.y + b.h + (LINE if b.label else 0) for b in self.inside), default=self.header)
        self.w, self.h = right + PAD, bottom + PAD


@dataclass(frozen=True)
class Edge:
    """An edge from the bottom of one box to the top of another, through the boxes ``via``.

    ``home`` is where the value is stored in between.
    """

    source: Box
    sink: Box
    home: str
    via: tuple[Box, ...] = ()


@dataclass(frozen=True)
class Page:
    """A finished layout; boxes have absolute positions."""

    boxes: list[Box]
    edges: list[Edge]
    width: float
    height: float

    def every(self) -> Iterable[Box]:
        """All boxes, parents before children."""
        stack = list(reversed(self.boxes))
        while stack:
            box = stack.pop()
            yield box
            stack.extend(reversed(box.inside))


@dataclass(frozen=True)
class Drawing:
    """A region to draw: its title, text about its cost before and after fusion, and its anatomy."""

    title: str
    before: str
    after: str
    anatomy: Anatomy


LABELS = {
    "warp": "shuffles",
    "block": "shared memory",
    "cluster": "shared memory of a cluster",
    "grid": "global memory",
    "again": "made again",
}
"""Labels under operators; values in registers have none."""


def text_width(text: str) -> float:
    return len(text) * GLYPH


def folded(launch: Sequence[GroupAnatomy]) -> list[tuple[GroupAnatomy, int]]:
    """One group of each form in a launch, with the number of groups of that form."""
    found: dict[object, list[GroupAnatomy]] = {}
    for group in launch:
        found.setdefault(group.form, []).append(group)
    return [(groups[0], len(groups)) for groups in found.values()]


def lay_out(drawings: Sequence[Drawing], top: float = 0.0) -> Page:
    """Compute the layout of regions from top to bottom, starting at ``top``."""
    boxes: list[Box] = []
    edges: list[Edge] = []
    y, width = top, 0.0
    for drawing in drawings:
        box = _region(drawing, edges)
        box.x, box.y = PAD, y + PAD
        place(box, 0.0, 0.0)
        boxes.append(box)
        y, width = box.y + box.h, max(width, box.x + box.w)
    return Page(boxes, edges, width + PAD, y + PAD)


def place(box: Box, x: float, y: float) -> None:
    """Make the positions of a box and its descendants absolute."""
    box.x, box.y = box.x + x, box.y + y
    for inner in box.inside:
        place(inner, box.x, box.y)


def _region(drawing: Drawing, edges: list[Edge]) -> Box:
    region = Box("region", (drawing.title, f"before: {drawing.before}", f"after: {drawing.after}"))
    made: dict[str, Box] = {}  # scratch tensor -> the box that writes it
    y = region.header + PAD
    for number, launch in enumerate(drawing.anatomy.launches):
        box = _launch(number, launch, made, edges)
        box.x, box.y = PAD, y
        region.inside.append(box)
        y += box.h + PAD
    region.fit()
    return region


def _launch(number: int, groups: Sequence[GroupAnatomy], made: dict[str, Box], edges: list[Edge]) -> Box:
    kernels = sum(g.kernels for g in groups)
    launch = Box("launch", (f"launch {number + 1}" + (f": {kernels} kernels" if kernels > 1 else ""),))
    x, y, row_h = 0.0, launch.header + PAD, 0.0
    for group, many in folded(groups):
        box = _group(group, many, made, edges)
        if x and x + box.w > PAGE:
            y, x, row_h = y + row_h + PAD, 0.0, 0.0
        box.x, box.y = PAD + x, y
        launch.inside.append(box)
        x, row_h = x + box.w + PAD, max(row_h, box.h)
    launch.fit()
    return launch


def _group(group: GroupAnatomy, many: int, made: dict[str, Box], edges: list[Edge]) -> Box:
    times = f"{many} x " if many > 1 else ""
    more = f",... ({len(group.roots)} roots)" if len(group.roots) > 8 else ""
    outer = Box("group", (f"{times}{group.scheme}: {group.shape}", ",".join(group.roots[:8]) + more))
    lines = _Lines(group)
    lines.arrange(outer)
    for (_, name), (_, box) in zip(group.stores, lines.results, strict=True):
        if box.kind == "scratch":
            made[name] = box
    for o in group.operators:
        source = o.name.split(" ")[-2] if o.kind == "load" else ""
        if source in made:
            edges.append(Edge(made[source], lines.boxes[o.value], "grid"))
    edges.extend(lines.edges())
    return outer


def _depths(ops: Sequence[Operator]) -> dict[int, int]:
    """The row of each operator of a pass: below its arguments; a load is one row above its first user."""
    here = {o.value for o in ops}
    depth: dict[int, int] = {}
    for o in ops:
        depth[o.value] = max((depth[a] + 1 for a in o.args if a in here), default=0)
    takers: dict[int, list[int]] = {}
    for o in ops:
        for a in o.args:
            takers.setdefault(a, []).append(depth[o.value])
    for o in ops:
        if o.kind in ("load", "leaf") and not o.args and o.value in takers:
            depth[o.value] = max(0, min(takers[o.value]) - 1)
    return depth


class _Lines:
    """The rows of a group's operators, and the route of each value through the rows between its producer and its users.

    Uses the method of Sugiyama, Tagawa and Toda (1981): layers, space reserved for long edges, and an order within each
    row by the mean position of the predecessors.
    """

    def __init__(self, group: GroupAnatomy) -> None:
        self.group = group
        self.boxes: dict[int, Box] = {}
        self.line: dict[int, int] = {}
        self.steps: list[int] = []  # the pass of each row
        self.made_by = {o.value: o for o in group.operators}
        extents = {t.name: "x".join(map(str, t.extents)) for t in group.reads}
        for o in group.operators:
            direct = o.kind == "load" and not o.name.startswith("gather")
            text = f"{o.name} {extents.get(o.name.split(' ')[0], '')}".rstrip() if direct else o.name
            self.boxes[o.value] = _box(o.kind, text, LABELS.get(o.home, ""))
            self.boxes[o.value].home = o.home
        for step in range(group.steps):
            ops = [o for o in group.operators if o.step == step]
            depth = _depths(ops)
            for d in range(1 + max(depth.values(), default=-1)):
                abreast = [o.value for o in ops if depth[o.value] == d]
                for start in range(0, len(abreast), ABREAST):
                    self.line.update(dict.fromkeys(abreast[start : start + ABREAST], len(self.steps)))
                    self.steps.append(step)
        sizes = {t.name: t.label for t in group.writes}
        self.results = [
            (value, _box("scratch" if name.startswith("s") else "output", sizes[name], ""))
            for value, name in group.stores
        ]
        self.via: dict[int, list[Box]] = {}
        last: dict[int, int] = {}
        for o in group.operators:
            for a in o.args:
                last[a] = max(last.get(a, 0), self.line[o.value])
        last.update({value: len(self.steps) for value, _ in self.results if value in self.boxes})
        for value, end in last.items():
            self.via[value] = [Box("via", w=6, h=BOX_H) for _ in range(self.line[value] + 1, end)]

    def arrange(self, outer: Box) -> None:
        """Set the positions of all boxes inside the group's box, and its size."""
        y = outer.header + PAD
        bands: list[Box] = []
        for n, step in enumerate(self.steps):
            if n == 0 or step != self.steps[n - 1]:
                bands.append(Box("pass", (f"pass {step + 1}",) if self.group.steps > 1 else (), PAD, y + PAD * (n > 0)))
                y = bands[-1].y + bands[-1].header + PAD / 2
            items = self._items(n)
            self._place(items, y)
            bands[-1].inside += items
            y += BOX_H + GAP_Y
            bands[-1].h = y - bands[-1].y
        for value, box in self.results:
            box.x = self._above(value, len(self.steps))
        ordered = [box for _, box in sorted(self.results, key=lambda r: r[1].x)]
        self._place(ordered, y + PAD)
        outer.inside = [*bands, *ordered]
        right = max(b.x + max(b.w, text_width(b.label)) for band in bands for b in band.inside)
        right = max([right] + [b.x + b.w for b in ordered] + [text_width(line) for line in outer.lines])
        for band in bands:
            band.w = right + PAD - band.x
            for b in band.inside:
                b.x, b.y = b.x - band.x, b.y - band.y
        outer.fit()

    def _items(self, n: int) -> list[Box]:
        found = []
        for value, line in self.line.items():
            if line == n:
                args = [a for a in self.made_by[value].args if a in self.boxes]
                above = [self._above(a, n) for a in args]
                found.append((sum(above) / len(above) if above else 0.0, value, self.boxes[value]))
            elif line < n <= line + len(self.via.get(value, [])):
                found.append((self._above(value, n), value, self.via[value][n - line - 1]))
        found.sort(key=lambda f: f[:2])
        for centre, _, box in found:
            box.x = centre  # preferred position
        return [box for _, _, box in found]

    def _above(self, value: int, n: int) -> float:
        """The x coordinate at which the edge of ``value`` leaves row ``n - 1``."""
        if value not in self.boxes:
            return 0.0
        way = [self.boxes[value], *self.via.get(value, [])]
        box = way[min(n - self.line[value], len(way)) - 1]
        return box.x + box.w / 2

    def _place(self, items: Sequence[Box], y: float) -> None:
        """Place one row: each box as close below its arguments as its neighbours allow."""
        x = 2.0 * PAD
        for box in items:
            box.x, box.y = max(x, min(box.x - box.w / 2, x + WIDEST_GAP)), y
            x = box.x + max(box.w, text_width(box.label)) + GAP_X

    def edges(self) -> Iterable[Edge]:
        for o in self.group.operators:
            for a in o.args:
                if a in self.boxes:
                    maker = self.made_by[a]
                    passed = maker.step != o.step or maker.kind == "reduction"
                    home = maker.home if passed and maker.home != "output" else "thread"
                    way = self.via.get(a, [])[: self.line[o.value] - self.line[a] - 1]
                    yield Edge(self.boxes[a], self.boxes[o.value], home, tuple(way))
        for value, box in self.results:
            if value in self.boxes:
                home = "grid" if box.kind == "scratch" else "output"
                yield Edge(self.boxes[value], box, home, tuple(self.via.get(value, [])))


def _box(kind: str, text: str, label: str) -> Box:
    return Box(kind, (text,), w=text_width(text) + PAD, h=BOX_H, label=label)

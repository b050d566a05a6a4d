"""Pages of a report, before they are laid out; :mod:`autotune.report.site` writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autotune import words
from autotune.charts import Exhibit
from autotune.workload import digest


@dataclass(frozen=True)
class Cell:
    """What a table shows, and the number that it is sorted by (None: by its text)."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Point:
    """A workload's place on the roofline: bytes that a perfect implementation moves, and microseconds."""

    bytes: int
    us: float


@dataclass(frozen=True)
class Page:
    """One page, and its line in the overview.

    Attributes:
        kind: a name of :data:`KINDS`.
        id: what its file is named by; the same for the same thing in every report.
        device: in words, as :attr:`autotune.device.DeviceIdentity.label`.
        source: where it is from: a database, or a result file.
        cells: of its line, by the column's name.
        facts: shown at the top, name and text.
        speedup: over the fastest baseline.
        links: workload fingerprint to label, of other pages that it names.
    """

    kind: str
    id: str
    title: str
    device: str
    domain: str
    source: str
    cells: Mapping[str, Cell] = field(default_factory=dict)
    facts: Sequence[tuple[str, str]] = ()
    exhibits: Sequence[Exhibit] = ()
    speedup: float | None = None
    point: Point | None = None
    links: Sequence[tuple[str, str]] = ()

    @property
    def path(self) -> str:
        """Relative to the site's folder."""
        return f"{KINDS[self.kind].folder}/{self.id}.html"


@dataclass(frozen=True)
class Kind:
    """A kind of pages: its folder, the heading of its table and what that says."""

    folder: str
    heading: str
    about: str


KINDS: Mapping[str, Kind] = {
    "model": Kind("models", "Models", "Whole steps, library calls included. Speedups are over torch.compile."),
    "workload": Kind("workloads", "Workloads", "Regions, each timed alone. Speedups are over the fastest baseline."),
    "scenario": Kind(
        "scenarios", "Scenarios", "A computation beside a collective. Speedups are over one after another."
    ),
    "result": Kind("results", "Other results", "Files of measurements that have no pages of their own kind."),
}


def page_id(*parts: str) -> str:
    """A file's name without its ending: words of the first part, and 12 digits that tell it from all others."""
    text = re.sub(r"[^a-z0-9]+", "-", parts[0].lower()).strip("-")[:40].strip("-")
    return f"{text or 'page'}-{digest(list(parts))[:12]}"


def time_cell(us: float | None) -> Cell:
    """A time given in microseconds."""
    return Cell(microseconds(us), us)


def ratio_cell(value: float | None) -> Cell:
    return Cell(ratio(value), value)


def count_cell(n: int) -> Cell:
    return Cell(str(n) if n else "–", n)


def microseconds(us: float | None) -> str:
    """As :func:`autotune.words.microseconds`, for pages."""
    return words.microseconds(us, "µs")


def ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"

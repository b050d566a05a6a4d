"""Pages of a report and their static site: HTML by Jinja2 with autoescape.

Charts are JSON, drawn by scripts of the site.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune import __version__, charts, words
from autotune.charts import Exhibit
from autotune.errors import UserError
from autotune.space import is_number
from autotune.workload import digest


@dataclass(frozen=True)
class Cell:
    """A cell's text, and the number for sorting the table (None: by the text)."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Point:
    """A workload's point on the roofline: bytes that a perfect implementation moves, and microseconds."""

    bytes: int
    us: float


@dataclass(frozen=True)
class Page:
    """One page, and its line in the overview.

    Attributes:
        kind: a name of :data:`KINDS`.
        id: the name of its file, the same in every report.
        device: in words, as :attr:`autotune.device.DeviceIdentity.label`.
        source: its origin: a database, or a result file.
        cells: of its line, by the column's name.
        facts: shown at the top, name and text.
        speedup: over the fastest baseline.
        links: workload fingerprint to label, of linked pages.
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
        """Path relative to the site's folder."""
        return f"{KINDS[self.kind].folder}/{self.id}.html"


@dataclass(frozen=True)
class Kind:
    """A kind of pages: its folder, the heading of its table and a sentence on it."""

    folder: str
    heading: str
    about: str


KINDS: Mapping[str, Kind] = {
    "model": Kind("models", "Models", "Whole steps, library calls included. Speedups are over torch.compile."),
    "workload": Kind("workloads", "Workloads", "Regions, each timed alone. Speedups are over the fastest baseline."),
    "scenario": Kind(
        "scenarios", "Scenarios", "A computation beside a collective. Speedups are over one after another."
    ),
    "saved": Kind("saved", "Savings", "Device hours that stored kernels saved, by steps that programs counted."),
    "result": Kind("results", "Other results", "Files of measurements that have no pages of their own kind."),
}


def page_id(*parts: str) -> str:
    """Return a file name without its extension: words of the first part, and 12 digits of a digest."""
    text = re.sub(r"[^a-z0-9]+", "-", parts[0].lower()).strip("-")[:40].strip("-")
    return f"{text or 'page'}-{digest(list(parts))[:12]}"


def time_cell(us: float | None) -> Cell:
    """Return the cell of a time given in microseconds."""
    return Cell(microseconds(us), us)


def ratio_cell(value: float | None) -> Cell:
    return Cell(ratio(value), value)


def count_cell(n: int) -> Cell:
    return Cell(str(n) if n else "–", n)


def microseconds(us: float | None) -> str:
    """Format a time for pages; see :func:`autotune.words.microseconds`."""
    return words.microseconds(us, "µs")


def ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


if TYPE_CHECKING:
    from jinja2 import Environment

MARK = ".autotune-report"
"""File that marks a folder as a report, which may be replaced."""

_HERE = Path(__file__).parent


def check_folder(out: Path) -> None:
    """Check that a report can be written to ``out``: a new folder, an empty one, or an earlier report.

    Raises:
        UserError: ``out`` is none of these.
    """
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UserError(f"-o {out}: this is not a folder: name a new one")
    if out.is_dir() and any(out.iterdir()) and not (out / MARK).is_file():
        raise UserError(f"-o {out}: the folder has other files than a report: name a new folder, or empty this one")
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"-o {out}: {error.strerror}") from None


def write(pages: Sequence[Page], out: Path, title: str) -> int:
    """Write the site; an earlier one at ``out`` stays until the new one is complete.

    Returns:
        Size of the site in bytes.

    Raises:
        UserError: nothing to show, a package is missing, or the folder cannot be written.
    """
    if not pages:
        raise UserError("there is nothing to report: search a target first")
    check_folder(out)
    environment = _environment()
    script = charts.javascript()
    try:
        made = Path(tempfile.mkdtemp(prefix=".autotune-report-", dir=out.absolute().parent))
        made.chmod(0o755)
        try:
            _write(pages, made, title, environment, script)
            if out.exists():
                shutil.rmtree(out)
            made.rename(out)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise UserError(f"-o {out}: {error.strerror}") from None
    return sum(file.stat().st_size for file in out.rglob("*") if file.is_file())


def _environment() -> Environment:
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise UserError("a report needs Jinja2: run `pip install 'autotune-torch[report]'`") from None
    made = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(anchor=anchor, cell=cell, is_number=is_number)
    made.globals |= {"kinds": KINDS, "version": __version__}
    return made


def anchor(title: str) -> str:
    """Return the anchor of a section of a page."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def cell(value: str | float | None) -> str:
    """Format a table's cell; numbers have four significant digits."""
    if value is None:
        return "–"
    if isinstance(value, int) or not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e6 else f"{value:.0f}"


def _write(pages: Sequence[Page], out: Path, title: str, environment: Environment, script: str) -> None:
    (out / MARK).write_text(f"{__version__}\n")
    for folder in ("assets", "data", "pictures", *(kind.folder for kind in KINDS.values())):
        (out / folder).mkdir()
    for file in (_HERE / "assets").iterdir():
        if file.suffix in (".js", ".css"):
            shutil.copyfile(file, out / "assets" / file.name)
    (out / "assets" / "vega.js").write_text(script)
    themes = {"light": charts.theme(), "dark": charts.theme(dark=True)}
    (out / "assets" / "themes.js").write_text(f"window.autotuneThemes = {_ascii(themes)};\n")
    data = _device_data(pages, out)
    whole = environment.get_template("index.html")
    index = whole.render(title=title, root="", data=sorted(data.values()), **_index(pages))
    (out / "index.html").write_text(index, errors="backslashreplace")
    single = environment.get_template("page.html")
    for page in pages:
        exhibits = [(exhibit, _picture(exhibit, out)) for exhibit in page.exhibits]
        own = [data[page.device]] if page.device in data else []
        text = single.render(
            title=page.title, root="../", page=page, kind=KINDS[page.kind], exhibits=exhibits, data=own
        )
        (out / page.path).write_text(text, errors="backslashreplace")


def _picture(exhibit: Exhibit, out: Path) -> str:
    """Write an exhibit's picture, once for equal ones; return its path relative to the site, or "" without one."""
    if not exhibit.svg:
        return ""
    name = f"pictures/{digest(exhibit.svg)[:16]}.svg"
    file = out / name
    if not file.exists():
        file.write_text(exhibit.svg, errors="backslashreplace")
    return name


def _device_data(pages: Sequence[Page], out: Path) -> dict[str, str]:
    """Write a script per device with the points of all its workloads, for its rooflines; return them by device."""
    points: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for page in pages:
        if page.point is not None:
            points[page.device].append({"name": page.title, "bytes": page.point.bytes, "us": page.point.us})
    names = {}
    for device, found in points.items():
        names[device] = f"data/{digest(device)[:12]}.js"
        text = f"(window.autotuneData ??= {{}}).{charts.OTHERS} = {_ascii(found)};\n"
        (out / names[device]).write_text(text)
    return names


def _ascii(value: object) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False)


@dataclass(frozen=True)
class _Table:
    kind: str
    heads: Sequence[str]
    pages: Sequence[Page]

    @property
    def more(self) -> list[str]:
        """Columns hidden on a narrow screen: the device, and those in which lines differ."""
        found = ("domain", "source")
        return ["device", *(name for name in found if len({getattr(page, name) for page in self.pages}) > 1)]

    def cells(self, page: Page) -> list[Cell]:
        """Return one cell for each of ``heads``."""
        return [page.cells.get(name, Cell("–")) for name in self.heads]


def _index(pages: Sequence[Page]) -> dict[str, Any]:
    tables = []
    for kind in KINDS:
        own = [p for p in pages if p.kind == kind]
        if own:
            heads = list(dict.fromkeys(name for p in own for name in p.cells))
            tables.append(_Table(kind, heads, own))
    groups: dict[tuple[str, str, str], list[Page]] = defaultdict(list)
    for page in pages:
        if page.kind != "result":
            groups[page.device, page.domain, page.kind].append(page)
    summary = []
    for (device, domain, kind), own in sorted(groups.items()):
        found = [p.speedup for p in own if p.speedup]
        summary.append(
            {
                "device": device,
                "domain": domain,
                "what": KINDS[kind].heading.lower(),
                "pages": len(own),
                "mean": ratio(math.exp(sum(map(math.log, found)) / len(found)) if found else None),
                "least": ratio(min(found, default=None)),
                "most": ratio(max(found, default=None)),
            }
        )
    compared = [
        {
            "of": f"{p.device.split(' (')[0]}, {KINDS[p.kind].heading.lower()}",
            "name": p.title,
            "speedup": round(p.speedup, 4),
        }
        for p in pages
        if p.speedup
    ]
    chart: Mapping[str, Any] | None = charts.speedups(compared) if compared else None
    return {"tables": tables, "summary": summary, "chart": chart}

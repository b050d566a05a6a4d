"""Output of commands: one JSON object on stdout, or text and tables for people."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from autotune.errors import printable
from autotune.store.records import BUSY
from autotune.words import figure_text as figure_text
from autotune.words import microseconds as microseconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

TUNABLE = (
    "it tunes operators between library calls, on tensors of float32, float16, bfloat16, float8, integers or bool that"
    " are not empty"
)
"""The operators that can be tuned, for the message on a target without any."""

BOTH_WAYS = "requires a gradient, so it is captured twice: under torch.no_grad() and in training"
"""Text after the name of a target that requires a gradient."""

BUSY_NOTE = "busy: other processes disturbed the final comparison; search again on a quiet machine."
"""Note below a table with rows marked busy."""

NARROWEST = 80
"""Minimum width of a table in columns: wrapped lines in a narrow terminal are better than cut numbers."""

Emit = Callable[[Mapping[str, Any]], None]
Region = Mapping[str, Any]
LEVELS = ("exact", "other_rows", "other_device", "packaged", "none")
"""Match levels, best first."""


@contextmanager
def machine_output(enabled: bool) -> Iterator[Emit]:
    """Reserve stdout for one JSON object.

    While the context is open, all other output to stdout goes to stderr instead: of the user's module, of a compiler
    that a library starts, or of a worker process. The file descriptor itself is redirected, not only ``sys.stdout``.
    The object passed to the yielded function is written when the context ends without an exception.

    Args:
        enabled: False yields a function that does nothing, and does not redirect stdout.
    """
    if not enabled:
        yield lambda data: None
        return
    kept: list[Mapping[str, Any]] = []
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield kept.append
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
    for data in kept:
        print(json.dumps(data, allow_nan=False), flush=True)


def console() -> Console:
    """A console on stdout for tables. Without a terminal it is 180 columns wide, so that lines are not wrapped."""
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with code 1; main() returns 0

        def render_str(self, text: str, **options: Any) -> Text:
            # Text from a database may contain terminal control characters.
            return super().render_str("\n".join(printable(line) for line in text.split("\n")), **options)

    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 180
    out = Piped(width=wide)
    out.width = max(out.width, NARROWEST)
    return out


def ruled_table(title: str | None = None) -> Table:
    """An empty table with a line below its heads."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    shown = None if title is None else escape(title)
    return Table(title=shown, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Lines of a plain table; the columns with these indices are aligned on the left, the others on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ways = [str.ljust if k in left else str.rjust for k in range(len(widths))]
    return ["  ".join(way(c, w) for way, c, w in zip(ways, row, widths, strict=True)).rstrip() for row in rows]


def ratio(value: float | None) -> str:
    """A speedup for a table."""
    return "–" if value is None else f"{value:.2f}x"


def total(target: str, device: str, regions: Sequence[Region]) -> dict[str, Any]:
    """The JSON object of a whole target.

    ``match`` is the worst among the regions. ``best`` is the sum of the fastest candidates, with the configuration for
    a target of one region; null if a region has none. ``deployed_us`` is the sum of the winners, which may be
    baselines. A baseline's latency is null, with the ``error``, unless it was measured for every region.
    ``speedup`` is the fastest baseline over ``deployed_us``.

    Args:
        regions: objects with ``workload``, ``label``, ``count``, ``match``, ``best``, ``baselines``, ``deployed_us``
            and, from a search, ``measured``, ``reused`` and ``failed``.
    """
    failed: Counter[str] = Counter()
    for region in regions:
        failed.update(region.get("failed", {}))
    best = _sum(regions, [_latency(region["best"]) for region in regions])
    config = regions[0]["best"]["config"] if best is not None and len(regions) == 1 else None
    deployed = _sum(regions, [region["deployed_us"] for region in regions])
    names = dict.fromkeys(name for region in regions for name in region["baselines"])
    baselines = {name: _baseline(regions, name) for name in names}
    fastest = min((b["latency_us"] for b in baselines.values() if b["latency_us"] is not None), default=None)
    return {
        "workload": target,
        "device": device,
        "match": max((region["match"] for region in regions), key=LEVELS.index, default="none"),
        "measured": sum(region.get("measured", 0) for region in regions),
        "reused": sum(region.get("reused", 0) for region in regions),
        "failed": dict(failed),
        "best": None if best is None else {"config": config, "latency_us": best},
        "baselines": baselines,
        "deployed_us": deployed,
        "speedup": fastest / deployed if fastest and deployed else None,
        "workloads": [dict(region) for region in regions],
    }


def _baseline(regions: Sequence[Region], name: str) -> dict[str, Any]:
    found = [region["baselines"].get(name, {}) for region in regions]
    out: dict[str, Any] = {"latency_us": _sum(regions, [_latency(baseline) for baseline in found])}
    errors = [baseline["error"] for baseline in found if "error" in baseline]
    return {**out, "error": errors[0]} if errors else out


def _latency(timed: Mapping[str, Any] | None) -> float | None:
    latency: float | None = (timed or {}).get("latency_us")
    return latency


def _sum(regions: Sequence[Region], latencies: Sequence[float | None]) -> float | None:
    """Sum weighted by count; None without regions or if one lacks its latency."""
    known = [latency for latency in latencies if latency is not None]
    if not regions or len(known) < len(regions):
        return None
    weighted: float = sum(latency * region["count"] for latency, region in zip(known, regions, strict=True))
    return weighted


def print_table(answer: Mapping[str, Any]) -> None:
    """Print the regions of an answer as a table on stdout, in the order given, and their sum.

    ``noise`` is the interquartile range over the median of the winner's samples. ``runs`` is the winner that a
    deployment runs, marked if other processes kept the machine too busy to trust the comparison. In the sum ``runs`` is
    the winners' latency, which ``speedup`` refers to. ``autotune`` is the best candidate even if a baseline won.
    """
    from rich.table import Table

    regions = answer["workloads"]
    names = list(dict.fromkeys(name for region in regions for name in region["baselines"]))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0) if console().width > NARROWEST else (0, 1, 0, 0))
    table.add_column("region", overflow="fold", min_width=12)
    noisy = ["noise"] if any(region.get("noise") is not None for region in regions) else []
    for title in ("times", "match", *names, "autotune", *noisy, "speedup"):
        table.add_column(title, justify="left" if title == "match" else "right", no_wrap=True)
    table.add_column("runs", overflow="fold", min_width=len("autotune"))
    for region in regions:
        baselines = [microseconds(_latency(region["baselines"].get(name))) for name in names]
        table.add_row(
            region["label"] or region["workload"][:12],
            str(region["count"]),
            region["match"],
            *baselines,
            microseconds(_latency(region["best"])),
            *("–" if region.get("noise") is None else f"{region['noise']:.0%}" for _ in noisy),
            ratio(region["speedup"]),
            _runs(region),
        )
    if len(regions) > 1 and answer["best"] is not None:
        sums = [microseconds(_latency(answer["baselines"].get(name))) for name in names]
        latency = microseconds(answer["best"]["latency_us"])
        table.add_section()
        table.add_row(
            "sum",
            "",
            answer["match"],
            *sums,
            latency,
            *("" for _ in noisy),
            ratio(answer["speedup"]),
            _deployed(answer),
        )
    console().print(table)
    print_busy_note(regions)


def print_busy_note(regions: Sequence[Region]) -> None:
    """Print the note on busy rows below a table that has some."""
    if any(map(is_busy, regions)):
        console().print(BUSY_NOTE, highlight=False)


def _deployed(answer: Mapping[str, Any]) -> str:
    """A deployment's latency for all regions, which is below the candidates' sum if baselines won."""
    latency = answer["deployed_us"]
    return "" if latency is None else f"{microseconds(latency)} in all"


def is_busy(region: Region) -> bool:
    """Return True if other processes disturbed the final comparison too much to trust it."""
    return (region.get("others_busy") or 0.0) > BUSY


def _runs(region: Region) -> str:
    winner = region.get("winner") or "–"
    return f"{winner} (busy)" if is_busy(region) else winner

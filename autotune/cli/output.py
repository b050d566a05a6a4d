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
    from rich.text import Text

TUNABLE = (
    "it tunes what lies between library calls, on tensors of float32, float16, bfloat16, float8, integers or bool that"
    " are not empty"
)
"""What can be tuned, for a target that has nothing of it."""

BOTH_WAYS = "requires a gradient, so it is captured twice: under torch.no_grad() and in training"
"""What is said after the name of such a target."""

BUSY_NOTE = "busy: other processes disturbed the final comparison; search again on a quiet machine."
"""Below a table with rows that are marked so."""

NARROWEST = 80
"""Columns below which a table is not squeezed: a terminal that wraps lines shows more than one that cuts numbers."""

Emit = Callable[[Mapping[str, Any]], None]
Region = Mapping[str, Any]
LEVELS = ("exact", "other_rows", "other_device", "packaged", "none")
"""Match levels, best first."""


@contextmanager
def machine_output(enabled: bool) -> Iterator[Emit]:
    """Keep stdout for one JSON object.

    While the context is open everything else that writes to stdout, be it the user's module, a compiler that a library
    starts or a worker process, goes to stderr instead: the file descriptor itself is turned, not only ``sys.stdout``.
    The object given to the yielded function is written when the context ends without an exception.

    Args:
        enabled: False yields a function that does nothing and leaves stdout alone.
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
    """A console on stdout for tables. Without a terminal it is wide, so that a log or a pipe gets whole lines."""
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with code 1; main() knows that it is no error

        def render_str(self, text: str, **options: Any) -> Text:
            # What comes out of a database may hold what a terminal takes for a command.
            return super().render_str("\n".join(printable(line) for line in text.split("\n")), **options)

    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 180
    out = Piped(width=wide)
    out.width = max(out.width, NARROWEST)
    return out


def ratio(value: float | None) -> str:
    """A speedup for a table."""
    return "–" if value is None else f"{value:.2f}x"


def total(target: str, device: str, regions: Sequence[Region]) -> dict[str, Any]:
    """The JSON object of a whole target.

    ``match`` is the worst among the regions. ``best`` is the sum of the fastest candidates, with the configuration for
    a target of one region; null if a region has none. ``deployed_us`` is the sum of what is deployed, where a baseline
    may have won. A baseline's latency is null, with the ``error``, where it could not be measured for every region.
    ``speedup`` is the fastest baseline over what is deployed.

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
    """Weighted by count; None if there is no region or one lacks its latency."""
    known = [latency for latency in latencies if latency is not None]
    if not regions or len(known) < len(regions):
        return None
    weighted: float = sum(latency * region["count"] for latency, region in zip(known, regions, strict=True))
    return weighted


def print_table(answer: Mapping[str, Any]) -> None:
    """The regions of an answer as a table on stdout, in the order given, and their sum.

    ``noise`` is the interquartile range over the median of the winner's samples; ``runs`` is what a deployment runs,
    marked where other processes kept the machine too busy for that to be trusted; in the sum it is the
    latency of all that, to which ``speedup`` refers, whereas ``autotune`` is the best candidate even where a baseline
    won.
    """
    from rich.table import Table

    regions = answer["workloads"]
    names = list(dict.fromkeys(name for region in regions for name in region["baselines"]))
    table = Table(box=None, pad_edge=False)
    table.add_column("region", overflow="fold", min_width=12)
    noisy = ["noise"] if any(region.get("noise") is not None for region in regions) else []
    for title in ("times", "match", *names, "autotune", *noisy, "speedup", "runs"):
        table.add_column(title, justify="left" if title in ("match", "runs") else "right", no_wrap=True)
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
    """Say below a table why some of its rows are marked."""
    if any(map(is_busy, regions)):
        console().print(BUSY_NOTE, highlight=False)


def _deployed(answer: Mapping[str, Any]) -> str:
    """What a deployment takes for all regions; where baselines won that is less than the sum of the candidates."""
    latency = answer["deployed_us"]
    return "" if latency is None else f"{microseconds(latency)} in all"


def is_busy(region: Region) -> bool:
    """Return True where other processes disturbed the final comparison too much to trust it."""
    return (region.get("others_busy") or 0.0) > BUSY


def _runs(region: Region) -> str:
    winner = region.get("winner") or "–"
    return f"{winner} (busy)" if is_busy(region) else winner

"""Markdown tables made from result files, and the documents that hold them.

A document marks a table with the file it comes from, relative to ``benchmarks/results``::

    <!-- results: h200/fusion_slice.json -->
    ...
    <!-- end results -->

and one of the ablations in a file with ``ablations: h200/fusion.json`` in place of ``results: ...``. ``summary:
h200/user_programs.json`` is the README's short table of users' programs.

``python -m benchmarks.table FILE...`` prints tables of result files, and ``--update README.md`` renders a document's
marked tables again. A test does the same and fails if a document differs.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import c3_device_table, fsdp, precision_table, tensor_parallel
from benchmarks.c3 import report as c3_report
from benchmarks.form import RESULTS, read
from benchmarks.fusion import report
from benchmarks.fusion.ablation import ABLATIONS
from benchmarks.fusion.report import geometric_mean
from benchmarks.real import table as real_table
from benchmarks.user_programs import step_table, summary

MARKED = re.compile(r"(<!-- (results|ablations|summary): (\S+) -->\n)(.*?)(<!-- end \2 -->)", re.DOTALL)
COLUMNS = (
    ("floor", "floor_us"),
    ("eager", "eager_us"),
    ("Inductor", "inductor_us"),
    ("Inductor, best flags", "inductor_best_us"),
    ("XLA", "xla_us"),
    ("autotune", "autotune_us"),
)


def render(data: Mapping[str, Any]) -> str:
    """The table of a result file's content, times in microseconds; a column that no case ran is left out.

    The last columns are the speedup over the fastest peer that was run, and how near the floor autotune comes. The last
    row is the geometric mean of both. Files of the suites have tables of their own.
    """
    if data.get("suite") == "c3":
        return c3_report.render(data)
    if data.get("suite") == "c3_device":
        return c3_device_table.render(data)
    if data.get("suite") == "real_models":
        return real_table.markdown(data)
    if data.get("suite") == "precision":
        return precision_table.markdown(data)
    if data.get("suite") == "user_programs":
        return step_table.markdown(data)
    if data.get("suite") == "fsdp":
        return fsdp.markdown(data)
    if data.get("suite") == "tensor_parallel":
        return tensor_parallel.markdown(data)
    if data.get("suite"):
        return report.render(data)
    cases = data["cases"]
    columns = [(title, key) for title, key in COLUMNS if any(case[key] is not None for case in cases)]
    head = ["case", *(title for title, _ in columns), "over the fastest peer", "of the floor's speed"]
    rows = []
    speedups, shares = [], []
    for case in cases:
        times = [_number(case[key]) for _, key in columns]
        speedup, share = over_peers(case), case["floor_us"] / case["autotune_us"]
        shares.append(share)
        if speedup is not None:
            speedups.append(speedup)
        rows.append([case["name"], *times, "–" if speedup is None else f"{speedup:.2f}x", f"{share:.0%}"])
    mean = f"{geometric_mean(speedups):.2f}x" if speedups else "–"
    rows.append(["geometric mean", *("" for _ in columns), mean, f"{geometric_mean(shares):.0%}"])
    made = f"measured {data['when'][:10]} by `{data['command']}`"
    caption = f"{data['device']}, torch {data['versions']['torch']}; times in us, {made}."
    lines = [_row(head), _row(["---", *("---:" for _ in head[1:])]), *map(_row, rows), "", caption]
    return "\n".join(lines) + "\n"


def over_peers(case: Mapping[str, Any]) -> float | None:
    """How many times faster autotune is than the fastest peer that was run; None if none was."""
    peers = [case[key] for _, key in COLUMNS[1:-1] if case[key] is not None]
    return min(peers) / case["autotune_us"] if peers else None


def render_ablations(data: Mapping[str, Any]) -> str:
    """The table of each search part's contribution; ValueError if the file has no ablations."""
    return report.render_ablations(data, {name: ablation.about for name, ablation in ABLATIONS.items()})


def refresh(text: str, results: Path = RESULTS) -> str:
    """``text`` with each marked table rendered from its file.

    Raises:
        ValueError: a marker has no end, or its file is not of the form.
        FileNotFoundError: a marker names a file that is not there.
    """
    if sum(text.count(f"<!-- {kind}:") for kind in ("results", "ablations", "summary")) != len(MARKED.findall(text)):
        raise ValueError("a `<!-- results: FILE -->` has no `<!-- end results -->`, or no file (or one of ablations)")
    made = {"results": render, "ablations": render_ablations, "summary": summary.markdown}
    return MARKED.sub(lambda m: m[1] + made[m[2]](read(results / m[3])) + m[5], text)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Render tables from result files.")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="result files whose tables are printed")
    parser.add_argument("--ablations", action="store_true", help="print the files' tables of ablations instead")
    parser.add_argument(
        "--update", action="append", default=[], type=Path, metavar="DOC", help="render DOC's tables anew"
    )
    args = parser.parse_args()
    if not args.files and not args.update:
        parser.error("name a result file, or --update a document")
    for path in args.files:
        print((render_ablations if args.ablations else render)(read(path)))
    for path in args.update:
        path.write_text(refresh(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

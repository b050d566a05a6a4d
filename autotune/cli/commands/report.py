"""``autotune report``: a static site of what was tuned."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli.options import add_db
from autotune.errors import UserError
from autotune.words import plural

if TYPE_CHECKING:
    from autotune.report.site import Page


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "report",
        help="write a site of what was tuned, to look at and to share",
        description="Write a folder of HTML pages, which load nothing from elsewhere: an overview with search, and a"
        " page for each model, workload and scenario. They show a database, or a folder of result files.",
    )
    source = parser.add_mutually_exclusive_group()
    add_db(source)
    about = "result files (.json) of benchmarks/, in this folder and those below it"
    source.add_argument("--results", metavar="FOLDER", help=about)
    about = "the folder to write: a new one, or an earlier report, which is replaced (default: report)"
    parser.add_argument("-o", "--out", default="report", metavar="FOLDER", help=about)
    parser.add_argument("--title", metavar="TEXT", help="of the overview (default: what the report is of)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the report; returns 0."""
    from autotune.report import site

    begin = time.monotonic()
    out = Path(args.out)
    site.check_folder(out)
    name, found = _source(args)
    pages = list(found)
    size = site.write(pages, out, args.title or f"autotune: {name}")
    took = time.monotonic() - begin
    print(
        f"{plural(len(pages), 'page')}, {size / 1e6:.1f} MB, in {took:.1f} s: open {out / 'index.html'}",
        file=sys.stderr,
    )
    return 0


def _source(args: argparse.Namespace) -> tuple[str, Iterator[Page]]:
    """Its name, and what it has."""
    if args.results:
        from autotune.report import results

        folder = Path(args.results)
        if not folder.is_dir():
            raise UserError(f"--results {folder}: there is no such folder")
        return folder.name, results.pages(folder)
    from autotune.report import database
    from autotune.store import Store

    with Store.open(args.db, migrate=False, readonly=True) as store:
        # A report is shared: it names the database, and not where it lies.
        return Path(store.name).stem, iter(list(database.pages(store)))

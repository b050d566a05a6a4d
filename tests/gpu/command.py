"""Shared parts of the scripts that compile candidates in a pool: command line, pool, and the results' file."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any


def parser(about: str | None, names: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Options for the device, the processes and a dry run, and for a choice of ``names``, all by default."""
    made = argparse.ArgumentParser(allow_abbrev=False, description=(about or "").partition("\n")[0])
    if names:
        made.add_argument("--only", nargs="+", default=list(names), choices=list(names), metavar="NAME")
    made.add_argument("--device", default="cuda:0")
    made.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--dry", action="store_true", help="compile only, without a GPU")
    return made


def parsed(made: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; a dry run compiles for an H200 or for AUTOTUNE_CUDA_TARGET."""
    options = made.parse_args(argv)
    if options.dry:
        os.environ.setdefault("AUTOTUNE_CUDA_TARGET", "sm_90:132")
    return options


def pool(options: argparse.Namespace) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn"))


def keep(name: str, result: Any) -> None:
    """Write ``$OUT/<name>.json`` if OUT is set."""
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")

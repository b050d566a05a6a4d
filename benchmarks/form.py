"""The form of result files, as :mod:`autotune.bench.form` has it, and where the committed ones lie."""

from __future__ import annotations

from pathlib import Path

from autotune.bench.form import ALWAYS, WHERE_RUN, commit, problems, read, write

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

__all__ = ["ALWAYS", "RESULTS", "ROOT", "WHERE_RUN", "commit", "problems", "read", "write"]

"""The flat scheme: a group without reductions, every element independent."""

from __future__ import annotations

from autotune.compiler.schedules.cuda.rows import RowsScheme

SCHEME = RowsScheme("flat", 30)

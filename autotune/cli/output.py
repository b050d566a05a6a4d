"""Where a command's words go: one JSON object on stdout, or text for people."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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

    from autotune.errors import printable

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

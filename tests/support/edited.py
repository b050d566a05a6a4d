"""Kernels whose finished text is changed, to show that a mistake in it is found."""

from __future__ import annotations

from collections.abc import Callable

from autotune.compiler.targets.cuda.source import CudaSource
from tests.support.fake_cuda import with_text


def edited(source: CudaSource, change: Callable[[str], str]) -> CudaSource:
    """A copy of ``source`` with its text changed, line by line; a line that becomes empty goes."""
    lines = source.text.splitlines()
    changed = [change(line) for line in lines]
    assert changed != lines
    return with_text(source, "\n".join(new for new, old in zip(changed, lines, strict=True) if new or not old) + "\n")

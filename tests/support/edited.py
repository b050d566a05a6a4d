"""Kernels whose finished text is changed, to show that a mistake in it is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from autotune.compiler.targets.cuda.source import CudaSource, Listing

Kernel = TypeVar("Kernel", CudaSource, Listing)


def with_text(source: Kernel, text: str) -> Kernel:
    """A copy of the kernel with another text."""
    made = replace(source)
    made.__dict__["text"] = text
    return made


def edited(source: CudaSource, change: Callable[[str], str]) -> CudaSource:
    """A copy of ``source`` with its text changed, line by line; a line that becomes empty goes."""
    lines = source.text.splitlines()
    changed = [change(line) for line in lines]
    assert changed != lines
    return with_text(source, "\n".join(new for new, old in zip(changed, lines, strict=True) if new or not old) + "\n")

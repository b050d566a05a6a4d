"""The code blocks of a page of the documentation, to be run as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

_FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file it is (or ""), its text, and its first line's number in the page."""

    language: str
    title: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        title = _TITLE.search(found[2])
        yield Block(found[1], title[1] if title else "", found[3], text.count("\n", 0, found.start()) + 2)


def run_page(page: Path, folder: Path, timeout_s: float = 250.0) -> list[str]:
    """Write the titled blocks of a page to ``folder`` and run the others there, in order.

    A block of ``text`` is for the eye. ``autotune`` and ``python`` are those of this checkout.

    Returns:
        What each block that ran has printed.

    Raises:
        AssertionError: a block fails, or is of a language that nothing runs.
    """
    programs = folder / ".programs"
    programs.mkdir(parents=True)
    for name, module in (("python", ""), ("autotune", " -m autotune")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}"{module} "$@"\n')
        program.chmod(0o755)
    path = os.pathsep.join([str(programs), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    printed = []
    for block in blocks(page):
        if block.language == "text":
            continue
        if block.title:
            (folder / block.title).write_text(block.text)
            continue
        assert block.language == "bash", f"{page.name}:{block.line}: nothing runs a block of {block.language}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s,
        )  # fmt: skip
        assert done.returncode == 0, f"{page.name}:{block.line}: exit code {done.returncode}\n{done.stderr[-3000:]}"
        printed.append(done.stdout)
    return printed

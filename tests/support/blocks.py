"""The code blocks of a page of the documentation, to be run as a reader would."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

_FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')
_SHELL = re.compile(r"[|&;<>$`(){}*?\\]")
_PROGRAMS = {"python": [sys.executable], "autotune": [sys.executable, "-m", "autotune"]}


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

    A block of ``text`` is for the eye. A block of ``bash`` is simple commands, one a line, which may begin with
    variables; ``autotune`` and ``python`` are those of this checkout. Searches end after two seconds, whatever the page
    gives them.

    Returns:
        What each block that ran has printed.

    Raises:
        AssertionError: a command fails or needs a shell, or a block is of a language that nothing runs.
    """
    folder.mkdir(parents=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    printed = []
    for block in blocks(page):
        if block.language == "text":
            continue
        if block.title:
            (folder / block.title).write_text(block.text)
            continue
        assert block.language == "bash", f"{page.name}:{block.line}: nothing runs a block of {block.language}"
        printed.append("")
        for number, line in enumerate(block.text.splitlines(), block.line):
            assert not _SHELL.search(line), f"{page.name}:{number}: only a shell could run {line}"
            variables, words = _command(line)
            done = subprocess.run(
                words, cwd=folder, env=environment | variables, capture_output=True, text=True, timeout=timeout_s
            )
            assert done.returncode == 0, f"{page.name}:{number}: exit code {done.returncode}\n{done.stderr[-3000:]}"
            printed[-1] += done.stdout
    return printed


def _command(line: str) -> tuple[dict[str, str], list[str]]:
    """The variables that a line sets, and the words of its command."""
    words = shlex.split(line)
    own = list(itertools.takewhile(lambda word: "=" in word, words))
    first, *rest = words[len(own) :]
    if "--timeout" in rest:
        rest[rest.index("--timeout") + 1] = "2"
    return dict(word.split("=", 1) for word in own), [*_PROGRAMS.get(first, [first]), *rest]

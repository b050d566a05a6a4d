"""The worked example of ARCHITECTURE.md: what it shows is what ``examples/stages.py`` prints."""

from __future__ import annotations

import re

import pytest

from examples import stages
from tests.support import ROOT


def test_the_document_shows_the_output_of_the_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["stages.py"])
    stages.main()
    printed = capsys.readouterr().out
    text = (ROOT / "ARCHITECTURE.md").read_text()
    text = text[text.index("## One example") : text.index("## How a search runs")]
    (fingerprint,) = re.findall(r"is hashed: `(\w+)`", text)
    assert f"fingerprint {fingerprint}" in printed
    shown = [line.strip() for block in re.findall(r"```\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    columns = r"\s{2,}(?=[vy]\d+\[)|\s+(?=# )"  # two values in a line, and comments
    shown = [part for line in shown for part in re.split(columns, line) if not part.startswith("#")]
    kernels = [line.split()[0] for line in shown if line.startswith("autotune_")]
    assert len(kernels) == 2
    plain = {" ".join(line.split()) for line in printed.splitlines()}
    for part in shown:
        if part != "..." and not part.startswith("autotune_"):
            assert " ".join(part.split()) in plain, part
    figures = re.findall(r"(\d+) registers, no stack, (\d+) bytes of shared memory, (\d+) blocks an SM", text)
    for name, (registers, shared, blocks) in zip(kernels, figures, strict=True):
        of = printed[printed.index(f"-- cubin {name},") :].split("\n\n")[0]
        for line in (f"registers = {registers}", "stack = 0", f"shared_total = {shared}", f"blocks_per_sm = {blocks}"):
            assert line in of

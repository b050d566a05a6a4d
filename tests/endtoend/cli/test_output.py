"""With --json, stdout holds one object whatever else writes there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from autotune.cli.output import NARROWEST, console, microseconds, ratio

NOISY = """
import os, subprocess, sys
from autotune.cli.output import machine_output
print("before", file=sys.stderr)
with machine_output({enabled}) as emit:
    print("from python")
    os.write(1, b"from a library\\n")
    subprocess.run(["echo", "from a child"])
    emit({{"answer": 42}})
    {then}
"""


def run(enabled: bool, then: str = "pass") -> subprocess.CompletedProcess[str]:
    code = NOISY.format(enabled=enabled, then=then)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_stdout_is_kept_for_the_object() -> None:
    done = run(True)
    assert json.loads(done.stdout) == {"answer": 42}
    for text in ("from python", "from a library", "from a child"):
        assert text in done.stderr


def test_an_error_leaves_stdout_empty() -> None:
    done = run(True, "raise ValueError('no')")
    assert done.returncode == 1
    assert done.stdout == ""


def test_without_json_stdout_is_left_alone() -> None:
    done = run(False)
    assert "from a library" in done.stdout
    assert "answer" not in done.stdout


def test_a_value_outside_of_json_is_an_error_not_invalid_json() -> None:
    done = run(True, "emit({'x': float('nan')})")
    assert done.returncode == 1
    assert "NaN" not in done.stdout


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.1234, "0.123 us"), (12.34, "12.3 us"), (999.4, "999 us"), (1234.0, "1.23 ms"), (2.5e6, "2.5 s")],
)
def test_latencies_have_three_digits(value: float | None, text: str) -> None:
    assert microseconds(value) == text


def test_ratios() -> None:
    assert ratio(1.256) == "1.26x"
    assert ratio(None) == "–"


@pytest.mark.parametrize(("columns", "width"), [("20", NARROWEST), ("100", 100)])
def test_a_table_is_not_squeezed_into_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert console().width == width

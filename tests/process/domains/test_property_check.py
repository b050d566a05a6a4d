"""The GPU host's script, without a GPU: it checks programs, and outlives candidates that kill or hang its process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.gpu.property_check import Child
from tests.support import ROOT

SCRIPT = ROOT / "tests" / "gpu" / "property_check.py"


def serve(pipe: Connection) -> None:
    """Answers its process's number; dies of "die", sleeps on "hang"."""
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        if message == "die":
            os._exit(9)
        if message == "hang":
            time.sleep(600)
        pipe.send(("right", str(os.getpid())))


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_is_replaced() -> None:
    child = Child(serve, (), patience=600.0)
    try:
        first = child.ask("work")
        assert child.ask("more") == first
        assert child.ask("die") == ("crashed", "the process ended with 9")
        second = child.ask("work")
        assert (second[0], second != first) == ("right", True)
        child.patience = 0.5
        assert child.ask("hang") == ("timeout", "no answer in 0 s")
        child.patience = 600.0
        assert child.ask("work")[0] == "right"
        assert child.deaths == 2
    finally:
        child.stop()


def test_one_program_again(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--only", "3", "--device", "cpu", "--configs", "1", "--processes", "1"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "property_check.json").read_text())
    assert found["cases"] == 1
    assert found["right"] == found["candidates"] >= 1
    assert found["bad"] == []
    assert "# program(3)" in done.stdout
    assert "# program(3)" in (tmp_path / "current.txt").read_text()

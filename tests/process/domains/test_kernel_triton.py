"""Triton's own kernels with its interpreter: converted, verified, searched and called. The interpreter's times mean
nothing on a GPU, and no test uses them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib import NumpyVersion

from tests.support import ROOT


def _lacking() -> str:
    """The reason why Triton's interpreter runs no kernel here, if any."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    triton = importlib.metadata.version("triton").split(".")
    if [int(part) for part in triton[:2]] < [3, 7] and NumpyVersion(np.__version__) >= "2.4.0":
        return "the interpreter of this torch's Triton needs NumPy below 2.4"  # int() of an array with an axis
    return ""


pytestmark = pytest.mark.skipif(bool(_lacking()), reason=_lacking() or "all is there")

_PROGRAM = """
import json, sys
from tests.support.own import triton_kernels as k
from tests.support.toy.policy import QUICK

answers = {}
for name in sys.argv[1:]:
    made = getattr(k, name)
    (result,) = made.search(device="cpu", policy=QUICK, sampler="brute", trials=8)
    given = k.make(100)
    made[k.grid](given["x"], given["y"], given["n"])
    match = made.lookup(given["x"], given["y"], given["n"])
    right = {"product": given["x"] ** 2, "added": given["x"]}.get(name, 2 * given["x"])
    answers[name] = {
        "measured": result.measured, "failed": dict(result.failed), "best": result.best, "level": str(match.level),
        "config": match.config, "right": bool((given["y"] == right).all()), "error": result.error,
    }
print("ANSWERS", json.dumps(answers))
"""


def run(tmp_path: Path, *names: str) -> dict[str, Any]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TRITON_INTERPRET": "1"}
    env["AUTOTUNE_DB"] = str(tmp_path / "triton.db")
    words = [sys.executable, "-c", _PROGRAM, *names]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env, timeout=550)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.partition("ANSWERS")[2])
    return found


@pytest.mark.slow
def test_kernels_of_triton_are_searched_and_called(tmp_path: Path) -> None:
    answers = run(tmp_path, "tuned", "added", "product")
    assert {name: (a["measured"], a["failed"]) for name, a in answers.items()} == {
        "tuned": (3, {}),
        "added": (3, {}),
        "product": (4, {}),
    }
    for name, answer in answers.items():
        assert (answer["level"], answer["right"]) == ("exact", True), name
    assert set(answers["tuned"]["config"]) == {"BLOCK", "num_warps", "num_stages"}

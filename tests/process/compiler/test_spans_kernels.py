"""The Triton kernels of attention by spans and of rows of key masks, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.slow
@pytest.mark.parametrize(("checks", "count"), [("spans_checks", 32), ("rows_checks", 60)])
def test_results_and_gradients_of_any_mask(checks: str, count: int) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TRITON_INTERPRET": "1"}
    words = [sys.executable, "-m", f"tests.support.compiler.{checks}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env, timeout=550)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == count
    assert {bool(max(some)) for _, _, some, _ in found} == {False, True}
    assert [one for one in found if not one[3] < 1e-5] == []

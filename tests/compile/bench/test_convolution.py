"""The convolution of ``benchmarks/search_quality``, in Numba's simulator of CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from benchmarks.search_quality.gpu_kernels import convolve
from tests.support import ROOT

_PROGRAM = """
import json
import numpy as np
from benchmarks.search_quality import gpu_kernels as g

made, found = g.make_image(32, "cpu", 1), []
want = g.convolved(**made).numpy()
for x, y, across, down, keep in [(16, 4, 2, 2, "global"), (16, 8, 2, 1, "padded"), (32, 2, 1, 4, "shared")]:
    out = np.full((32, 32), np.nan, np.float32)
    grid = (32 // (x * across), 32 // (y * down))
    g.compiled(x, y, across, down, keep)[grid, (x, y)](made["image"].numpy(), made["weights"].numpy(), out)
    found.append(float(np.abs(out - want).max()))
print("ANSWERS", json.dumps(found))
"""


def test_every_way_to_keep_the_image_is_right() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False, env=env, timeout=550
    )
    assert done.returncode == 0, done.stderr
    assert max(json.loads(done.stdout.partition("ANSWERS")[2])) < 1e-3


def test_the_space_is_small_enough_to_be_measured_whole() -> None:
    made = convolve.kernel.space
    points = [made.space.at(k) for k in range(made.space.size)]
    assert len([p for p in points if made.reject(p, {}) is None]) == 271
    assert made.reject(made.default, {}) is None

"""torchvision whose library does not fit the installed torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

_PROGRAM = """
from benchmarks.real.vision import declare_operators
print(declare_operators() is not None, declare_operators() is declare_operators())
import torchvision
"""


def _ran(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)


def test_a_library_for_another_torch_does_not_stop_the_import(tmp_path: Path) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "_C.so").write_bytes(b"built for another torch")
    describes = "import torch\n" + "".join(
        f"torch.library.register_fake('torchvision::{name}')(lambda dets, scores, limit: dets)\n"
        for name in ("nms", "qnms")
    )
    (package / "__init__.py").write_text(describes)
    assert "operator torchvision::nms does not exist" in _ran(tmp_path, "import torchvision").stderr
    done = _ran(tmp_path, _PROGRAM)
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr

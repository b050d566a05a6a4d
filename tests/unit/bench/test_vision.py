"""torchvision whose library does not fit the installed torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

_PROGRAM = """
from benchmarks.real.vision import declare_operators
print(declare_operators() is not None, declare_operators() is declare_operators())
import torchvision
"""


def _ran(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)


_LOADS = """
import benchmarks.real.vision as vision, torch
loaded = []
torch.ops.load_library = lambda path: loaded.append(path.name)
print(vision.declare_operators() is not None, loaded)
"""


def _package(folder: Path, *names: str) -> Path:
    package = folder / "torchvision"
    package.mkdir()
    for name in names:
        (package / name).write_bytes(b"built for another torch")
    return package


@pytest.mark.parametrize(
    ("names", "declared", "loaded"),
    [(("_C.so",), False, ["_C.so"]), (("_C_stable.so",), False, ["_C_stable.so"]), ((), True, [])],
)
def test_operators_of_a_library_that_loads_are_not_declared(
    names: tuple[str, ...], declared: bool, loaded: list[str], tmp_path: Path
) -> None:
    """torchvision 0.29.2 calls its library ``_C_stable.so``, and a second declaration ended the process."""
    _package(tmp_path, "__init__.py", *names)
    assert _ran(tmp_path, _LOADS).stdout == f"{declared} {loaded}\n"


def test_a_library_for_another_torch_does_not_stop_the_import(tmp_path: Path) -> None:
    package = _package(tmp_path, "_C.so")
    describes = "import torch\n" + "".join(
        f"torch.library.register_fake('torchvision::{name}')(lambda dets, scores, limit: dets)\n"
        for name in ("nms", "qnms")
    )
    (package / "__init__.py").write_text(describes)
    assert "operator torchvision::nms does not exist" in _ran(tmp_path, "import torchvision").stderr
    done = _ran(tmp_path, _PROGRAM)
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr

"""PTX that Numba has made of a kernel's text, kept on disk: typing takes a second a kernel, and few texts change."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import autotune
from tests.support import ROOT

FOLDER = ROOT / "build" / "ptx"
MAKERS = tuple(
    f"compiler/targets/cuda/{name}.py" for name in ("compile", "frontend", "operation_intrinsics", "memory_intrinsics")
)
"""Files of the package that PTX depends on, in addition to a kernel's text."""


@functools.cache
def _makers() -> str:
    """A digest of the code that makes PTX: the versions of Numba and NVVM, and autotune's part."""
    package = Path(autotune.__file__).parent
    found = hashlib.sha256(repr([version(p) for p in ("numba", "numba-cuda", "llvmlite", "nvidia-nvvm")]).encode())
    for maker in MAKERS:
        found.update((package / maker).read_bytes())
    return found.hexdigest()


def kept(numba_ptx: Callable[..., str]) -> Callable[..., str]:
    """``numba_ptx`` with a cache on disk. Refusals are not cached."""

    @functools.cache
    def ptx(*arguments: object) -> str:
        key = hashlib.sha256(repr((_makers(), arguments)).encode()).hexdigest()
        path = FOLDER / key[:2] / key
        if path.exists():
            return path.read_text()
        made = numba_ptx(*arguments)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(made)
        os.replace(file.name, path)  # other processes see all of it or nothing
        return made

    return ptx

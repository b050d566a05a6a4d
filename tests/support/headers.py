"""Inductor's precompiled header, which takes ten seconds, is one for all processes and runs of the tests."""

from __future__ import annotations

import getpass
from pathlib import Path

from tests.support import ROOT


def share_headers(temporary: Path) -> None:
    """Let processes whose temporary folder this is find it there."""
    shared = ROOT / "build" / "inductor_headers"
    shared.mkdir(parents=True, exist_ok=True)
    own = temporary / f"torchinductor_{getpass.getuser()}"  # Inductor's default
    own.mkdir(exist_ok=True)
    (own / "precompiled_headers").symlink_to(shared)

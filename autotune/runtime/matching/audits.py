"""Audits of stored kernels, and the memory of those that passed, in the user's own cache.

An audit (:mod:`autotune.compiler.audit`) plans a region and prints its kernels again: 10 ms, and more for a large one.
What it says depends on nothing but the workload, the configuration, the artifact with its code, the device's size and
this version. So a digest of these names an empty file in a folder that nobody else writes to, and the next look-up of
the very same takes 0.1 ms. A database cannot put anything there; whatever is changed in one has another digest.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from autotune import __version__
from autotune.ir.graph import Graph
from autotune.store.codec import artifact_json
from autotune.task import Artifact, Config
from autotune.user_cache import cache_folder, make_own
from autotune.workload import Workload, digest

RULES = 1
"""Raised where an audit comes to refuse what it let pass."""


def foreign_kernels(artifact: Artifact, tuned: Workload, config: Config, sms: int) -> str:
    """Why an artifact for CUDA is not what a configuration of a workload compiles to; "" where it is.

    Args:
        sms: multiprocessors of the device.
    """
    from autotune.compiler.audit import foreign
    from autotune.compiler.targets.cuda.source import GENERATOR

    # The code is in it by its SHA-256, which artifact_json computes anew.
    about = [RULES, __version__, GENERATOR, tuned.fingerprint, dict(config), artifact_json(artifact), sms]
    mark = _mark(digest(about))
    if mark is not None and mark.exists():
        return ""
    why = foreign(artifact, Graph.from_json(tuned.spec), config, sms)
    if not why and mark is not None:
        _keep(mark)
    return why


def _mark(name: str) -> Path | None:
    folder = _own_folder(cache_folder("audits"))
    return None if folder is None else folder / name[:2] / name


@lru_cache(maxsize=4)
def _own_folder(folder: Path) -> Path | None:
    """The folder, made for this user alone; None where that cannot be: every process audits for itself then."""
    try:
        make_own(folder)
    except OSError:
        return None
    return folder


def _keep(mark: Path) -> None:
    try:
        mark.parent.mkdir(exist_ok=True, mode=0o700)
        os.close(os.open(mark, os.O_CREAT | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0), 0o600))
    except OSError:  # a full disk: the next process audits again
        return

"""Compiling on any processor of a cluster: what a task does, and the pool of a lane that hands tasks out."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from autotune import __version__
from autotune import task as tasks
from autotune.measure.outcome import Blame
from autotune.measure.pool import Built, CompilePool
from autotune.task import Config
from autotune.workload import Workload

Remote = Callable[[Workload, str, Config], Built | None]
"""Builds a candidate somewhere; None where nobody did."""


@functools.cache
def compilers() -> Mapping[str, str]:
    """The versions that decide what a candidate is compiled to; "" for a package that is not there.

    A build of torch for CPUs compiles to the same as one for GPUs: what is after the ``+`` does not count.
    """
    found = {"autotune": __version__}
    for package in ("torch", "numba", "numba-cuda"):
        try:
            found[package] = metadata.version(package).partition("+")[0]
        except metadata.PackageNotFoundError:
            found[package] = ""
    return found


def build(
    workload: Workload,
    module: str,
    device: str,
    config: Config,
    timeout_s: float,
    wanted: Mapping[str, str],
    search: str,
) -> Built | None:
    """Build a candidate on this node, in a process that may crash or hang; see :class:`CompilePool`.

    Args:
        module: of the workload's domain.
        wanted: :func:`compilers` of the node that measures.
        search: a secret of the search; its builds on this node share what they have in common.

    Returns:
        None where this node has others, and would make another kernel.
    """
    if compilers() != wanted:
        return None
    tasks.DOMAINS[workload.kind] = module
    return _pool(timeout_s, search).submit(workload, device, config).result()


@functools.lru_cache(maxsize=4)
def _pool(timeout_s: float, search: str) -> CompilePool:
    """One process, kept for the next task that this worker is given: it has imported what compiles."""
    return CompilePool(1, timeout_s=timeout_s, shared=shared_folder(search))


def _folder(search: str) -> Path:
    return Path(tempfile.gettempdir(), f"autotune-build-{search}")


def drop_shared(search: str) -> None:
    """Remove this node's folder of a search that has ended: Ray kills those who would."""
    shutil.rmtree(_folder(search), ignore_errors=True)


@functools.cache
def shared_folder(search: str) -> Path | None:
    """The folder of this node that all who build for a search share; the last of them to end removes it, unless it is
    killed. None where there is none to be had."""
    import fcntl

    folder = _folder(search)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            return None
        lock = os.open(folder / "users", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
    except OSError:
        return None

    def leave() -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a killed process holds none
        except OSError:
            return
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(leave)
    return folder


class ClusterPool(CompilePool):
    """Builds on other nodes, and here what they cannot.

    Args:
        remote: who builds; called from several threads.
        processes: how many builds are asked for at once.
    """

    def __init__(self, remote: Remote, processes: int, timeout_s: float) -> None:
        super().__init__(processes, timeout_s)
        self._remote = remote

    def _build(
        self, number: int, workload: Workload, device: str, config: Config, opened: tuple[Workload, str] | None
    ) -> Built:
        built = self._remote(workload, device, config)
        if built is None or (built.artifact is None and built.fault not in (Blame.CANDIDATE, Blame.USER)):
            built = super()._build(number, workload, device, config, None)
        return built

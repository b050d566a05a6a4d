"""Kernels resolved from the user's target, and their search task; see :class:`autotune.task.Task`.

A measuring process imports a kernel by its name, ``package.module:function``. It imports only targets that the user
named for the current command (:func:`allow`): a workload from a database cannot cause an import.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.domains.kernel.declare import declared, from_converted, from_file, narrow
from autotune.domains.kernel.kernel import Kernel
from autotune.domains.kernel.space import KernelSpace
from autotune.domains.kernel.triton import Converted, is_autotuner, precompile
from autotune.errors import UserError
from autotune.files import import_object
from autotune.space import Space
from autotune.task import Artifact, Config, Task
from autotune.task import Kernel as Launch
from autotune.workload import Workload


class KernelTask(Task):
    """Search task of a kernel for one key.

    Raises:
        UserError: the current command does not name the kernel, or its source changed.
    """

    def __init__(self, workload: Workload, device: str) -> None:
        self.workload, self.device = workload, device
        self.kernel = kernel_of(workload)
        self.key: Mapping[str, object] = workload.spec["key"]
        self._whole = _left(self.kernel.space, workload)

    def space(self, file: str | None = None) -> Space:
        if file is None:
            return self._whole.space
        return narrow(replace(self.kernel, space=self._whole), Path(file).expanduser()).space.space

    def default(self) -> Config:
        return dict(self._whole.default)

    def seeds(self) -> Sequence[Config]:
        return []

    def reject(self, config: Config) -> str | None:
        return self._whole.reject(config, self.key)

    def normalize(self, config: Config) -> Config:
        return self._whole.nearest(config)

    def adapt(self, config: Config) -> Config | None:
        fitted = self._whole.space.project(config)
        fitted = None if fitted is None else self.normalize(fitted)
        return fitted if fitted is not None and self.reject(fitted) is None else None

    def build(self, config: Config) -> Artifact:
        """An artifact without code: the kernel's own compiler runs in the measuring process.

        A Triton kernel is compiled here into Triton's cache, from which the measuring process loads it.
        """
        if description := self.workload.source.get("triton"):
            precompile(self.kernel, description, config)
        return Artifact(self.device.partition(":")[0], (Launch(self.kernel.name),), generator="kernel-1")


def _left(space: KernelSpace, workload: Workload) -> KernelSpace:
    """Restrict a space to the configurations that ``prune_configs_by`` kept, and the default."""
    left = workload.source.get("left")
    if not isinstance(left, list):
        return space
    points = tuple(p for p in space.points if p in left or p == space.default)
    if not points:
        raise UserError(f"{workload.label}: no configuration is left")
    return replace(space, points=points)


# ---- targets that may be imported -----------------------------------------------------------------------------------


ALLOWED = "AUTOTUNE_KERNEL_TARGETS"
"""The environment variable with the targets that may be imported, separated by commas: ``package.module:function``, or
``package.module:function=FILE`` if a file declares the kernel. A search sets it for its subprocesses. A user sets it
for commands that read their workloads from a database."""


def resolve(target: str, file: str = "") -> Kernel:
    """Import the kernel that a user named, and narrow its space if a file is given.

    Args:
        target: ``package.module:function``; the current directory is importable.
        file: a TOML file that declares a plain function, or narrows a declared kernel.

    Raises:
        UserError: the target or the file is invalid; a one-line message.
    """
    found = load(target)
    kernel = from_converted(found.fn, Converted.of(found), {}) if is_autotuner(found) else declared(found)
    if kernel is not None:
        return narrow(kernel, Path(file).expanduser()) if file else kernel
    if not callable(found):
        raise UserError(f"{target} is a {type(found).__name__}, which cannot be called")
    if not file:
        raise UserError(
            f"{target} is not tunable: decorate it with @autotune.tunable, or declare it in a file, --space FILE"
        )
    kernel = from_file(found, Path(file).expanduser(), {})
    kernel.file = file
    return kernel


def is_declared(target: str) -> bool:
    """True if the target declares its own space; a file then only narrows it."""
    found = load(target)
    return declared(found) is not None or is_autotuner(found)


def load(target: str) -> Any:
    """Import the object ``package.module:function``; raises UserError."""
    module_name, _, path = target.partition(":")
    if not module_name or not path or not all(part.isidentifier() for part in path.split(".")):
        raise UserError(f"TARGET {target!r} is not of the form package.module:function")
    return import_object(module_name, path, target)


def allow(target: str, file: str) -> None:
    """Allow subprocesses of this process to import a target.

    Raises:
        UserError: the file's name has a comma, the separator of targets.
    """
    if "," in file:
        raise UserError(f"--space {file}: its name has a comma: rename the file")
    known = _allowed()
    if _entry(target, file) not in known:
        os.environ[ALLOWED] = ",".join([*known, _entry(target, file)])


def _entry(target: str, file: str) -> str:
    return f"{target}={file}" if file else target


def _allowed() -> list[str]:
    return [entry.strip() for entry in os.environ.get(ALLOWED, "").split(",") if entry.strip()]


def refused(workload: Workload) -> str | None:
    """The reason why a workload's kernel is not imported (only a database names it); None if it may be."""
    target, file = _named(workload)
    if _entry(target, file) in _allowed():
        return None
    name = workload.label or workload.fingerprint[:12]
    return (
        f"{name}: what a database says is not imported: name its kernel, as in autotune search kernel TARGET, or in"
        f" ${ALLOWED}"
    )


def _named(workload: Workload) -> tuple[str, str]:
    return str(workload.source.get("target", "")), str(workload.source.get("file", ""))


def kernel_of(workload: Workload) -> Kernel:
    """The kernel of a workload of this search.

    Raises:
        UserError: the user did not name its target, or the kernel's source changed since the search began.
    """
    if why := refused(workload):
        raise UserError(why)
    target, file = _named(workload)
    kernel = resolve(target, file)
    if kernel.source != workload.spec.get("source") or kernel.name != workload.spec.get("kernel"):
        raise UserError(f"{target} was edited since {workload.label} was searched: search it again")
    return kernel

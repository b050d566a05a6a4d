"""From what the user named to a kernel, and the search's side of it; see :class:`autotune.task.Task`.

A measuring process imports a kernel by its name, ``package.module:function``. It imports only what the user of this
very command has named (:func:`allow`): a workload that came out of a database cannot have anything imported.
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
from autotune.domains.kernel.triton import Converted, compile_ahead, is_autotuner
from autotune.errors import UserError
from autotune.files import import_object
from autotune.space import Space
from autotune.task import Artifact, Config, Task
from autotune.task import Kernel as Launch
from autotune.workload import Workload


class KernelTask(Task):
    """A kernel for one key.

    Raises:
        UserError: nobody named the kernel on this command, or it was edited meanwhile.
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
        """Nothing: a kernel is compiled by its own compiler, in the process that measures it. A Triton kernel is
        compiled here, into Triton's cache, where that process finds it."""
        if told := self.workload.source.get("triton"):
            compile_ahead(self.kernel, told, config)
        return Artifact(self.device.partition(":")[0], (Launch(self.kernel.name),), generator="kernel-1")


def _left(space: KernelSpace, workload: Workload) -> KernelSpace:
    """The configurations that ``prune_configs_by`` left, and the default."""
    left = workload.source.get("left")
    if not isinstance(left, list):
        return space
    points = tuple(p for p in space.points if p in left or p == space.default)
    if not points:
        raise UserError(f"{workload.label}: none of its configurations is left")
    return replace(space, points=points)


# ---- what may be imported -------------------------------------------------------------------------------------------


ALLOWED = "AUTOTUNE_KERNEL_TARGETS"
"""The environment variable that says what may be imported: ``package.module:function``, or that and ``=FILE`` where a
file declares it; several by comma. A search sets it for the processes it starts; a user sets it for commands that take
their workloads from a database."""


def resolve(target: str, file: str = "") -> Kernel:
    """The kernel that a user named, confined to a file's space where he gave one.

    Args:
        target: ``package.module:function``; the current directory is importable.
        file: a TOML file that declares a plain function, or narrows a declared kernel.

    Raises:
        UserError: whatever is wrong with either, in one line.
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
    """True if the target declares its own space, so that a file only narrows that."""
    found = load(target)
    return declared(found) is not None or is_autotuner(found)


def load(target: str) -> Any:
    """Import the object ``package.module:function``; raises UserError."""
    module_name, _, path = target.partition(":")
    if not module_name or not path or not all(part.isidentifier() for part in path.split(".")):
        raise UserError(f"TARGET {target!r} is not of the form package.module:function")
    return import_object(module_name, path, target)


def allow(target: str, file: str) -> None:
    """Let the processes that this one starts import a target.

    Raises:
        UserError: the file's name has a comma, which parts the targets.
    """
    if "," in file:
        raise UserError(f"--space {file}: its name has a comma: give the file another one")
    known = _allowed()
    if _entry(target, file) not in known:
        os.environ[ALLOWED] = ",".join([*known, _entry(target, file)])


def _entry(target: str, file: str) -> str:
    return f"{target}={file}" if file else target


def _allowed() -> list[str]:
    return [entry.strip() for entry in os.environ.get(ALLOWED, "").split(",") if entry.strip()]


def refused(workload: Workload) -> str | None:
    """The reason why a workload's kernel is not imported (only a database has named it), or None."""
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
        UserError: it is of a target that nobody named, or the kernel's source has changed since the search began.
    """
    if why := refused(workload):
        raise UserError(why)
    target, file = _named(workload)
    kernel = resolve(target, file)
    if kernel.source != workload.spec.get("source") or kernel.name != workload.spec.get("kernel"):
        raise UserError(f"{target} was edited since {workload.label} was searched: search it again")
    return kernel

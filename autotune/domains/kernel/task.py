"""The search's side of a kernel; see :class:`autotune.task.Task`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from autotune.domains.kernel.declare.file import narrow
from autotune.domains.kernel.declare.space import KernelSpace
from autotune.domains.kernel.measuring.ahead import compile_ahead
from autotune.domains.kernel.target import kernel_of
from autotune.errors import UserError
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
    """What ``prune_configs_by`` left of a list, and the default."""
    left = workload.source.get("left")
    if not isinstance(left, list):
        return space
    points = tuple(p for p in space.points if p in left or p == space.default)
    if not points:
        raise UserError(f"{workload.label}: none of its configurations is left")
    return replace(space, points=points)

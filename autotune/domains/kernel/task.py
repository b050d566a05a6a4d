"""The search task of a kernel (:class:`autotune.task.Task`), and the workloads of its shapes.

Inputs may not fit in memory, and a factory or a reference may raise, hang or crash. So the subprocess
``python -m autotune.domains.kernel.task`` makes the inputs of each shape once and reads its key. The command then
reports one line before the search begins.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.domains.kernel.declare import allow, kernel_of, narrow, resolve
from autotune.domains.kernel.kernel import Kernel
from autotune.domains.kernel.space import KernelSpace
from autotune.domains.kernel.triton import described, precompile
from autotune.errors import UserError, first_line
from autotune.measure.child import Child, ChildDied, ChildSilent, Link, serve
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


# ---- the workloads of shapes -----------------------------------------------------------------------------------------


def workloads_of(
    kernel: Kernel, target: str, shapes: Sequence[Mapping[str, Any]] | None, device: str, *, reference: bool = True
) -> list[Workload]:
    """The distinct workloads of a kernel's shapes; a subprocess makes the inputs and reads their keys.

    Args:
        target: import name of the kernel, ``package.module:name``.
        shapes: arguments of the inputs factory; None for the declared ones.
        reference: also run the reference on the inputs.

    Raises:
        UserError: inputs cannot be made, the reference fails on them, or the kernel cannot be imported by its name.
    """
    if kernel.inputs is None:
        raise UserError(f"{kernel.name}: a search needs inputs: give inputs=, a callable that returns arguments")
    try:
        again = resolve(target, kernel.file)
    except UserError as error:
        raise UserError(f"{kernel.name}: a measuring process has to import it as {target}: {error}") from None
    if again.source != kernel.source:
        raise UserError(f"{kernel.name}: {target} is another function: define the kernel at a module's top level")
    allow(target, kernel.file)
    if isinstance(kernel.inputs, (list, tuple)):
        if shapes:
            raise UserError(f"{kernel.name}: inputs= is a list: leave out the shapes")
        wanted: list[dict[str, Any]] = [{"": nth} for nth in range(len(kernel.inputs))]
    else:
        wanted = [dict(s) for s in (kernel.shapes if shapes is None else shapes)] or [{}]
    found: dict[str, Workload] = {}
    for arguments, seen in zip(wanted, probe(target, kernel.file, wanted, device, reference=reference), strict=True):
        kernel.space.check(seen.key)
        source: dict[str, Any] = {"target": target, "file": kernel.file, "arguments": arguments, "bytes": seen.nbytes}
        source["default"] = dict(kernel.space.default)
        if seen.left is not None:
            source["left"] = seen.left
        if seen.triton is not None:
            source["triton"] = dict(seen.triton)
        workload = kernel.workload(seen.key, **source)
        found.setdefault(workload.fingerprint, workload)
    return list(found.values())


# ---- the process ----------------------------------------------------------------------------------------------------


START_S = 180.0
STEP_S = 120.0
"""Seconds for the process to start, and for each of its steps: making inputs, running the reference."""


@dataclass(frozen=True)
class Seen:
    """The key and size of one set of inputs.

    Attributes:
        key: key under which their configuration is looked up.
        nbytes: bytes of their arrays.
        left: configurations that ``prune_configs_by`` keeps; None without ``prune_configs_by``.
        triton: the inputs of Triton's compilation; None if Triton does not compile the kernel.
    """

    key: Mapping[str, Any]
    nbytes: int
    left: Sequence[Mapping[str, Any]] | None = None
    triton: Mapping[str, Any] | None = None


def probe(
    target: str,
    file: str,
    wanted: Sequence[Mapping[str, Any]],
    device: str,
    *,
    reference: bool = True,
    step_s: float | None = None,
) -> list[Seen]:
    """Make the inputs for each entry of ``wanted`` and read their keys.

    Args:
        reference: also run the reference once on each.
        step_s: seconds for a step; None for :data:`STEP_S`.

    Raises:
        UserError: an entry failed, hung or crashed; a one-line message that names it.
    """
    limit, step = STEP_S if step_s is None else step_s, "starting"
    found: list[Seen] = []
    child = Child("autotune.domains.kernel.task")
    try:
        child.send(
            {
                "target": target,
                "file": file,
                "wanted": [dict(w) for w in wanted],
                "device": device,
                "reference": reference,
            }
        )
        while len(found) < len(wanted):
            deadline = time.monotonic() + (START_S if step == "starting" else limit)
            answer, _ = child.receive(deadline)
            if "mistake" in answer:
                raise UserError(str(answer["mistake"]))
            if "seen" in answer:
                found.append(Seen(**answer["seen"]))
            step = str(answer.get("step", step))
    except ChildSilent:
        raise UserError(f"{target}: {step} took more than {limit:.0f} s and was stopped: make it faster") from None
    except (ChildDied, ValueError) as death:
        raise UserError(f"{target}: {step}: the process {death}") from None
    finally:
        child.kill()
    return found


def _answer(link: Link, message: dict[str, Any], blob: bytes) -> None:
    try:
        for arguments in message["wanted"]:
            seen = _look(link, message, arguments)
            link.send({"seen": seen})
    except UserError as mistake:
        link.send({"mistake": str(mistake)})
    except BaseException as error:
        link.send({"mistake": f"{message['target']}: {first_line(error)}"})


def _look(link: Link, message: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    from autotune.domains.kernel.bench import make

    kernel = resolve(message["target"], message["file"])
    if message["device"].startswith("cuda"):
        import torch

        torch.cuda.set_device(message["device"])
    shape = ", ".join(f"{k}={v}" for k, v in arguments.items() if k)
    link.send({"step": f"making inputs ({shape})" if shape else "making inputs"})
    made = make(kernel, arguments, message["device"], 0)
    seen: dict[str, Any] = {"key": kernel.reader.read(made.args, made.kwargs), "nbytes": made.nbytes}
    if message["device"].startswith("cuda"):
        seen["triton"] = described(kernel, made.args, made.kwargs)
    if kernel.prune is not None:
        seen["left"] = [dict(p) for p in kernel.prune(made.named(kernel), [dict(p) for p in kernel.space.points])]
    if message["reference"] and kernel.reference is not None:
        link.send({"step": f"the reference ({shape})" if shape else "the reference"})
        try:
            kernel.reference(*made.args, **made.kwargs)
        except Exception as error:
            raise UserError(f"{kernel.name}: the reference failed on inputs({shape}): {first_line(error)}") from error
    return seen


if __name__ == "__main__":
    serve(_answer)

"""From shapes to workloads: the inputs of each are made once, in a process of their own, and their keys read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.domains.kernel.kernel import Kernel
from autotune.domains.kernel.measuring.probe import probe
from autotune.domains.kernel.target import allow, resolve
from autotune.errors import UserError
from autotune.workload import Workload


def workloads_of(
    kernel: Kernel, target: str, shapes: Sequence[Mapping[str, Any]] | None, device: str, *, reference: bool = True
) -> list[Workload]:
    """The workloads of a kernel's shapes, each once; a process of its own makes the inputs and reads their keys.

    Args:
        target: how other processes import it, ``package.module:name``.
        shapes: what the inputs factory is called with; None for the declared ones.
        reference: try it on the inputs, too.

    Raises:
        UserError: inputs cannot be made, the reference fails on them, or the kernel cannot be imported by its name.
    """
    if kernel.inputs is None:
        raise UserError(
            f"{kernel.name}: there are no inputs to search with: give inputs=, a callable that makes arguments"
        )
    try:
        again = resolve(target, kernel.file)
    except UserError as error:
        raise UserError(f"{kernel.name}: a measuring process has to import it as {target}: {error}") from None
    if again.source != kernel.source:
        raise UserError(f"{kernel.name}: {target} is another function than this one: define it at a module's top level")
    allow(target, kernel.file)
    if isinstance(kernel.inputs, (list, tuple)):
        if shapes:
            raise UserError(f"{kernel.name}: its inputs are a list: leave the shapes out")
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

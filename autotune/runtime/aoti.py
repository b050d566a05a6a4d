"""AOTInductor's packages with stored kernels in them: nothing is compiled or looked up where they run.

Example::

    autotune.load("schedules.atdb")
    autotune.aoti_compile_and_package(torch.export.export(model, inputs), package_path="model.pt2")
    # later, in another process
    run = autotune.aoti_load_package("model.pt2")
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import UserError

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def aoti_compile_and_package(
    exported: ExportedProgram | Any, *, package_path: Any = None, inductor_configs: Mapping[str, Any] | None = None
) -> str:
    """``torch._inductor.aoti_compile_and_package`` with the kernels that the database or the loaded snapshot holds.

    The package holds the kernels. :func:`aoti_load_package`, torch's function of that name or a C++ program runs it.
    Kernels of a CPU, regions of dynamic sizes and results that are to be verified stay Inductor's. A warning says so.

    Args:
        exported: of ``torch.export.export``; on the device that the package is for.
        package_path, inductor_configs: as torch takes them.

    Returns:
        The path of the package. ``autotune.counters()["hits"]`` counts the regions that run stored kernels.

    Raises:
        UserError: ``exported`` is no exported program.
    """
    from torch._inductor import aoti_compile_and_package as torch_s
    from torch.export import ExportedProgram

    from autotune.runtime.backend import passes, takes_kernels

    if not isinstance(exported, ExportedProgram):
        kind = type(exported).__name__
        raise UserError(f"aoti_compile_and_package takes what torch.export.export returns, not {kind}")
    patches = dict(inductor_configs or {})
    # AOTInductor's code believes what it is given: a call with other types or sizes would read what is not there.
    patches["aot_inductor.metadata"] = {**patches.get("aot_inductor.metadata", {}), _INPUTS: _described(exported)}
    if takes_kernels(patches):
        patches |= passes(patches, "default", cpp=True)
    made: str = torch_s(exported, package_path=package_path, inductor_configs=patches)
    return made


_INPUTS = "autotune.inputs"


def _described(exported: Any) -> str:
    """The tensors that a call takes, as JSON: type, device, sizes and strides, null where any number will do."""
    import torch

    names = set(exported.graph_signature.user_inputs)
    values = [n.meta.get("val") for n in exported.graph.nodes if n.op == "placeholder" and n.name in names]
    return json.dumps([_layout(value) for value in values if isinstance(value, torch.Tensor)])


def _layout(tensor: Any) -> list[Any]:
    """A stride that is never used, and one that follows from symbolic sizes, may be any."""
    sizes = [n if isinstance(n, int) else None for n in tensor.shape]
    strides = [s if isinstance(s, int) and n != 1 else None for n, s in zip(sizes, tensor.stride(), strict=True)]
    return [str(tensor.dtype), tensor.device.type, sizes, strides]


def _differ(expected: Sequence[Any], tensor: Any) -> bool:
    dtype, device, sizes, strides = expected
    return (
        str(tensor.dtype) != dtype
        or tensor.device.type != device
        or len(tensor.shape) != len(sizes)
        or any(n is not None and n != m for n, m in zip(sizes, tensor.shape, strict=True))
        or any(s is not None and s != t for s, t in zip(strides, tensor.stride(), strict=True))
    )


def aoti_load_package(
    path: str | os.PathLike[str], *, run_single_threaded: bool = False, device_index: int = -1, num_runners: int = 1
) -> PackagedModel:
    """A package of AOTInductor's, ready to call; it may hold kernels of autotune's or not.

    ``torch._inductor.aoti_load_package`` does the same, and imports Dynamo and sympy first, which takes two seconds.

    Args:
        path: of a ``.pt2`` file that holds one model.
        run_single_threaded: one thread calls it at a time. A CUDA graph captures such calls alone, after a first one.
        device_index: number of the GPU; -1 for the one that the package was made on.
        num_runners: calls that may run at a time.

    Raises:
        UserError: there is no such file, or torch cannot load it.
    """
    import torch

    if not Path(path).is_file():
        raise UserError(f"there is no package {path}; make one with autotune.aoti_compile_and_package")
    try:
        loader = torch._C._aoti.AOTIModelPackageLoader(
            os.fspath(path), "model", run_single_threaded, num_runners, device_index
        )
    except RuntimeError as e:
        raise UserError(f"torch cannot load the package {path}: {str(e).splitlines()[0]}") from e
    return PackagedModel(loader)


def _told(layout: Sequence[Any]) -> str:
    dtype, device, sizes, strides = layout
    shape, steps = ("x".join("any" if n is None else str(n) for n in numbers) for numbers in (sizes, strides))
    return f"{dtype.removeprefix('torch.')} {shape or 'scalar'} (strides {steps or 'none'}) on {device}"


class PackagedModel:
    """A model that AOTInductor compiled, called as the model that was exported."""

    def __init__(self, loader: Any) -> None:
        from torch.utils import _pytree as pytree

        self._loader, self._pytree = loader, pytree
        self._takes, self._gives = (pytree.treespec_loads(spec) for spec in loader.get_call_spec())
        self._inputs: list[Any] | None = json.loads(loader.get_metadata().get(_INPUTS, "null"))
        _, keywords = self._takes.children()
        self._keywords = list(keywords.context)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            UserError: the arguments are not those of the exported model, in number, type, size or stride. Types, sizes
                and strides are not compared where torch's own function made the package.
            RuntimeError: the device failed.
        """
        import torch

        if kwargs.keys() != set(self._keywords):
            raise UserError(f"the package takes the keywords {self._keywords}, not {sorted(kwargs)}")
        given = (args, {name: kwargs[name] for name in self._keywords})
        flat, structure = self._pytree.tree_flatten(given)
        if structure != self._takes:
            took = " ".join(str(self._takes).split())
            raise UserError(f"the package takes arguments {took}, not {' '.join(str(structure).split())}")
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        for k, (expected, x) in enumerate(zip(self._inputs or (), tensors, strict=False)):
            if _differ(expected, x):
                raise UserError(f"the package was made for {_told(expected)} as tensor {k}, not {_told(_layout(x))}")
        made = self._loader.boxed_run(tensors)
        return self._pytree.tree_unflatten(made, self._gives)


__all__ = ["PackagedModel", "aoti_compile_and_package", "aoti_load_package"]

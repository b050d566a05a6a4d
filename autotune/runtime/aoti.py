"""AOTInductor's packages with stored kernels in them: nothing is compiled or looked up where they run.

Example::

    autotune.load("schedules.atdb")
    autotune.aoti_compile_and_package(torch.export.export(model, inputs), package_path="model.pt2")
    # later, in another process
    run = autotune.aoti_load_package("model.pt2")
"""

from __future__ import annotations

import os
from collections.abc import Mapping
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
    if takes_kernels(patches):
        patches |= passes(patches, "default", cpp=True)
    made: str = torch_s(exported, package_path=package_path, inductor_configs=patches)
    return made


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


class PackagedModel:
    """A model that AOTInductor compiled, called as the model that was exported."""

    def __init__(self, loader: Any) -> None:
        from torch.utils import _pytree as pytree

        self._loader, self._pytree = loader, pytree
        self._takes, self._gives = (pytree.treespec_loads(spec) for spec in loader.get_call_spec())
        _, keywords = self._takes.children()
        self._keywords = list(keywords.context)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            UserError: the arguments are not those of the exported model.
            RuntimeError: of the package: sizes or types are not those it was made for, or the device failed.
        """
        import torch

        if kwargs.keys() != set(self._keywords):
            raise UserError(f"the package takes the keywords {self._keywords}, not {sorted(kwargs)}")
        given = (args, {name: kwargs[name] for name in self._keywords})
        flat, structure = self._pytree.tree_flatten(given)
        if structure != self._takes:
            raise UserError(f"the package takes arguments {self._takes}, not {structure}")
        made = self._loader.boxed_run([x for x in flat if isinstance(x, torch.Tensor)])
        return self._pytree.tree_unflatten(made, self._gives)


__all__ = ["PackagedModel", "aoti_compile_and_package", "aoti_load_package"]

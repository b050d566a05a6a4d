"""AOTInductor's packages with stored kernels.

A package contains the kernels, so that running it needs no compilation and no look-up::

    autotune.load("schedules.atdb")
    autotune.aoti_compile_and_package(torch.export.export(model, inputs), package_path="model.pt2")
    # later, in another process
    run = autotune.aoti_load_package("model.pt2")

AOTInductor's code does not check its arguments. With other sizes it reads out of bounds, and it ignores a number in
place of the exported one. So a package has a description of the exported arguments, and :class:`PackagedModel` compares
each call with it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autotune.compiler.regions.aten import evaluate, expression_of
from autotune.errors import Unsupported, UserError
from autotune.runtime.backend import passes, takes_kernels

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def aoti_compile_and_package(
    exported: ExportedProgram | Any, *, package_path: Any = None, inductor_configs: Mapping[str, Any] | None = None
) -> str:
    """``torch._inductor.aoti_compile_and_package`` with the kernels of the database or the loaded snapshot.

    The package contains the kernels. :func:`aoti_load_package`, torch's function of that name or a C++ program runs it.
    CPU regions, regions of dynamic sizes and results to be verified are left to Inductor, with a warning.

    Args:
        exported: result of ``torch.export.export``, on the device that the package is for.
        package_path, inductor_configs: as for torch's function.

    Returns:
        The path of the package. ``autotune.counters()["hits"]`` counts the regions that run stored kernels.

    Raises:
        UserError: ``exported`` is not an exported program.
    """
    from torch._inductor import aoti_compile_and_package as torch_s
    from torch.export import ExportedProgram

    if not isinstance(exported, ExportedProgram):
        kind = type(exported).__name__
        raise UserError(f"aoti_compile_and_package takes what torch.export.export returns, not {kind}")
    patches = dict(inductor_configs or {})
    described = json.dumps(_described(exported))
    patches["aot_inductor.metadata"] = {**patches.get("aot_inductor.metadata", {}), _ARGUMENTS: described}
    if takes_kernels(patches):
        patches |= passes(patches, "default", cpp=True)
    made: str = torch_s(exported, package_path=package_path, inductor_configs=patches)
    return made


def aoti_load_package(
    path: str | os.PathLike[str], *, run_single_threaded: bool = False, device_index: int = -1, num_runners: int = 1
) -> PackagedModel:
    """Load an AOTInductor package, with or without autotune's kernels, as a callable.

    ``torch._inductor.aoti_load_package`` does the same, but first imports Dynamo and sympy, which takes two seconds.

    Args:
        path: of a ``.pt2`` file with one model.
        run_single_threaded: only one thread calls it at a time. A CUDA graph can only capture such calls, after a first
            one.
        device_index: index of the GPU; -1 for the one that the package was compiled on.
        num_runners: number of calls that may run concurrently.

    Raises:
        UserError: the file does not exist, or torch cannot load it.
    """
    if not Path(path).is_file():
        raise UserError(f"no such package {path}: make one with autotune.aoti_compile_and_package")
    try:
        loader = torch._C._aoti.AOTIModelPackageLoader(
            os.fspath(path), "model", run_single_threaded, num_runners, device_index
        )
    except RuntimeError as e:
        raise UserError(f"torch cannot load the package {path}: {str(e).splitlines()[0]}") from e
    return PackagedModel(loader)


class PackagedModel:
    """A model compiled by AOTInductor, called like the exported model."""

    def __init__(self, loader: Any) -> None:
        from torch.utils import _pytree as pytree

        self._loader, self._pytree = loader, pytree
        self._takes, self._gives = (pytree.treespec_loads(spec) for spec in loader.get_call_spec())
        self._described: Mapping[str, Any] | None = json.loads(loader.get_metadata().get(_ARGUMENTS, "null"))
        _, keywords = self._takes.children()
        self._keywords = list(keywords.context)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            UserError: the arguments differ from the exported ones in number, type, size or stride, a size is out of the
                exported range, or a number, string or None has another value. Packages from torch's own function only
                have the number of arguments checked.
            RuntimeError: the device failed.
        """
        if kwargs.keys() != set(self._keywords):
            raise UserError(f"the package takes the keyword arguments {self._keywords}, not {sorted(kwargs)}")
        given = (args, {name: kwargs[name] for name in self._keywords})
        flat, structure = self._pytree.tree_flatten(given)
        if structure != self._takes:
            took = " ".join(str(self._takes).split())
            raise UserError(f"the package takes arguments {took}, not {' '.join(str(structure).split())}")
        if self._described is not None:
            _check(self._described, flat)
        made = self._loader.boxed_run([x for x in flat if isinstance(x, torch.Tensor)])
        for place, value in (self._described or {}).get("numbers", ()):
            made[place] = made[place].item() if value is None else value
        return self._pytree.tree_unflatten(made, self._gives)


# ---- the description of arguments ----------------------------------------------------------------------------------

_ARGUMENTS = "autotune.arguments"
"""Key of the description in a package's metadata."""


def _described(exported: Any) -> dict[str, Any]:
    """The arguments of a call, flat, the ranges of symbolic sizes, and the results that are numbers, as JSON.

    An argument is its name with a tensor's type, device, sizes and strides, or with the text of another value.
    """
    values = {n.name: n.meta.get("val") for n in exported.graph.nodes if n.op == "placeholder"}
    arguments = []
    for spec in exported.graph_signature.input_specs:
        if spec.kind is not torch.export.graph_signature.InputKind.USER_INPUT:
            continue
        name, value = spec.arg.name, values.get(spec.arg.name)
        if isinstance(value, torch.Tensor):
            sizes, strides = ([_size(n) for n in numbers] for numbers in (value.shape, value.stride()))
            arguments.append([name, [str(value.dtype), value.device.type, sizes, strides]])
        else:
            arguments.append([name, repr(value) if hasattr(spec.arg, "value") else None])
    ranges = {
        str(symbol): [_end(bounds.lower), _end(bounds.upper)] for symbol, bounds in exported.range_constraints.items()
    }
    return {"arguments": arguments, "ranges": ranges, "numbers": _numbers(exported.graph_signature.output_specs)}


def _numbers(specs: Sequence[Any]) -> list[tuple[int, Any]]:
    """The results that are numbers, which AOTInductor makes tensors of: place and value, None for one that varies."""
    from torch.export.graph_signature import ConstantArgument, OutputKind, TensorArgument

    results = [spec.arg for spec in specs if spec.kind is OutputKind.USER_OUTPUT]
    return [
        (place, getattr(arg, "value", None))
        for place, arg in enumerate(results)
        if not isinstance(arg, TensorArgument)
        and (not isinstance(arg, ConstantArgument) or isinstance(arg.value, (int, float)))
    ]


def _size(size: Any) -> Any:
    """As ``expression_of``; None for an expression that is not checked."""
    try:
        return expression_of(size)
    except Unsupported:
        return None


def _end(bound: Any) -> int | None:
    """The end of a range; None for infinity."""
    return int(bound) if getattr(bound, "is_Integer", False) else None


def _check(described: Mapping[str, Any], flat: Sequence[Any]) -> None:
    """Raise UserError if a call's arguments, flat, differ from a description."""
    symbols: dict[str, int] = {}
    tensors = []
    for (name, expected), x in zip(described["arguments"], flat, strict=True):
        if isinstance(expected, str):
            if repr(x) != expected:
                raise UserError(f"argument {name} must be {expected}, as exported, not {_text_of(x)}")
        elif expected is not None:
            _check_tensor(name, expected, x, symbols, described["ranges"])
            tensors.append((name, expected, x))
    if not described["ranges"]:
        return
    for name, (_, _, sizes, _), x in tensors:
        for dim, (size, extent) in enumerate(zip(sizes, x.shape, strict=True)):
            _solve(f"size {dim} of argument {name}", size, extent, symbols, described["ranges"])
    for name, expected, x in tensors:  # again, since their sizes may be made of symbols of later arguments
        _check_tensor(name, expected, x, symbols, described["ranges"])


def _solve(
    what: str, size: Any, extent: int, symbols: dict[str, int], ranges: Mapping[str, Sequence[int | None]]
) -> None:
    """Add the symbol of a size such as ``2 * symbol``, if it is the size of no argument by itself.

    Args:
        what: the size in a message.
        symbols: sizes by symbol; extended.
    """
    unknown = _symbols_of(size) - symbols.keys()
    if len(unknown) != 1:
        return
    (symbol,) = unknown
    first, second, third = (evaluate(size, {**symbols, symbol: n}) for n in range(3))
    step = second - first
    if step == 0 or third - second != step:
        return
    low, high, bounds = _range(symbol, ranges)
    value, rest = divmod(extent - first, step)
    if rest or not low <= value <= high:
        text = f"{step} * {symbol}" + (f" {'-' if first < 0 else '+'} {abs(first)}" if first else "")
        raise UserError(f"{what} must be {text} with {symbol} of {bounds}, as exported, not {extent}")
    symbols[symbol] = value


def _range(symbol: str, ranges: Mapping[str, Sequence[int | None]]) -> tuple[int, float, str]:
    """The least and the largest size of a symbol, and both as text."""
    low, high = ranges.get(symbol, (None, None))
    least = low or 0
    return least, math.inf if high is None else high, f"{least} {'or more' if high is None else f'to {high}'}"


def _symbols_of(size: Any) -> set[str]:
    """The symbols of a sum of products; none for another expression."""
    if isinstance(size, list):
        return set().union(*map(_symbols_of, size[1:])) if size[0] in ("Add", "Mul") else set()
    return {size} if isinstance(size, str) else set()


def _check_tensor(
    name: str, expected: Sequence[Any], x: Any, symbols: dict[str, int], ranges: Mapping[str, Sequence[int | None]]
) -> None:
    """Compare a tensor.

    Args:
        symbols: sizes by symbol, of the tensors before this one; extended.
        ranges: of symbols.
    """
    dtype, device, sizes, strides = expected
    if isinstance(x, torch.Tensor) and len(x.shape) == len(sizes):
        for dim, (size, extent) in enumerate(zip(sizes, x.shape, strict=True)):
            if isinstance(size, str) and size not in symbols:
                low, high, bounds = _range(size, ranges)
                if not low <= extent <= high:
                    raise UserError(f"size {dim} of argument {name} must be {bounds}, as exported, not {extent}")
                symbols[size] = extent
    layout = dtype, device, [_value(n, symbols) for n in sizes], [_value(n, symbols) for n in strides]
    if isinstance(x, torch.Tensor) and x.is_neg():  # such as the imaginary part of a conjugate
        raise UserError(f"argument {name} has torch's negative bit, which packages ignore: pass its resolve_neg()")
    if not isinstance(x, torch.Tensor) or not _is_like(layout, x):
        raise UserError(f"argument {name} must be {_describe(layout)} for this package, not {_text_of(x)}")


def _value(size: Any, symbols: Mapping[str, int]) -> int | None:
    """The value of a size or stride; None if it is unknown."""
    try:
        return None if size is None else evaluate(size, symbols)
    except KeyError:
        return None


Layout = tuple[str, str, Sequence[int | None], Sequence[int | None]]
"""A tensor's type, device, sizes and strides; None for any number."""


def _is_like(layout: Layout, x: torch.Tensor) -> bool:
    dtype, device, sizes, strides = layout
    if str(x.dtype) != dtype or x.device.type != device or x.layout != torch.strided or len(x.shape) != len(sizes):
        return False
    if any(n is not None and n != m for n, m in zip(sizes, x.shape, strict=True)):
        return False
    steps = zip(strides, x.stride(), x.shape, strict=True)
    return x.numel() == 0 or all(n == 1 or s is None or s == t for s, t, n in steps)


def _text_of(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return repr(x)
    if x.layout != torch.strided:
        return f"{str(x.dtype).removeprefix('torch.')} of layout {str(x.layout).removeprefix('torch.')}"
    return _describe((str(x.dtype), x.device.type, list(x.shape), list(x.stride())))


def _describe(layout: Layout) -> str:
    dtype, device, sizes, strides = layout
    shape, steps = ("x".join("any" if n is None else str(n) for n in numbers) for numbers in (sizes, strides))
    return f"{dtype.removeprefix('torch.')} {shape or 'scalar'} (strides {steps or 'none'}) on {device}"

"""A kernel from all that was said of it, seen to fit together."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from autotune.domains.kernel.declare.space import KernelSpace, declare_space
from autotune.domains.kernel.declare.triton import META, Converted, is_autotuner, is_triton
from autotune.domains.kernel.identity import kernel_name, module_of, plain_function
from autotune.domains.kernel.kernel import Kernel, Objective, check_parameters, parameters_of
from autotune.errors import UserError

_named: dict[str, tuple[str, str]] = {}
"""Names of kernels to the module and the file that declared them."""


def declared(found: Any) -> Kernel | None:
    """The kernel of what ``autotune.tunable`` made; None where it is something else."""
    kernel = getattr(found, "kernel", None)
    return kernel if isinstance(kernel, Kernel) else None


def from_converted(fn: Any, found: Converted, more: Mapping[str, Any]) -> Kernel:
    """A kernel from what ``triton.autotune`` was told, and ``more`` of what ``autotune.tunable`` takes; raises
    UserError."""
    given = {k: v for k, v in more.items() if k != "db"}
    if wrong := given.keys() & {"space", "key"}:
        raise UserError(f"{kernel_name(fn)}: {', '.join(sorted(wrong))} comes from triton.autotune: leave it out")
    if wrong := given.keys() - {f.name for f in fields(Kernel)} - {"default", "constraints"}:
        raise UserError(f"{kernel_name(fn)}: autotune.tunable has no argument {sorted(wrong)[0]!r}")
    kernel = make_kernel(fn, space=list(found.points), key=found.key, **given)
    kernel.reset, kernel.restore, kernel.prune = found.reset, found.restore, found.prune
    known = [p.name for p in parameters_of(fn) or ()]
    for name in (*found.reset, *found.restore):
        if name not in known:
            raise UserError(f"{kernel.name}: reset_to_zero and restore_value name {name!r}, which is no argument")
    return kernel


def make_kernel(fn: Any, *, space: Any, name: str = "", **given: Any) -> Kernel:
    """A kernel from what was given; raises UserError, in one line."""
    if not callable(fn) and not is_triton(fn):
        raise UserError(f"autotune.tunable was given a {type(fn).__name__}, which cannot be called")
    where = name or kernel_name(fn)
    if is_autotuner(fn):
        raise UserError(f"{where} has triton.autotune: leave that out, or use autotune.tunable.from_triton(kernel)")
    if space is None:
        raise UserError(f"{where}: give a space, such as space={{'BLOCK': [64, 128]}}")
    if declared(fn) is not None:
        raise UserError(f"{where} is tunable already: declare it once")
    first = space[0] if isinstance(space, (list, tuple)) and space else space
    names = [str(name) for name in first] if isinstance(first, Mapping) else []
    known = check_parameters(fn, names, where, META if is_triton(fn) else ())
    made = _space(fn, space, given.pop("default", None), given.pop("constraints", None) or (), known, where)
    given = {k: v for k, v in given.items() if v is not None}
    key = given.get("key")
    if isinstance(key, str):
        given["key"] = [key]
    kernel = Kernel(fn, made, name=name, **given)
    _check(kernel)
    return kernel


def _space(
    fn: Any, space: Any, default: Any, constraints: Sequence[Any], known: Mapping[str, Any], where: str
) -> KernelSpace:
    if is_triton(fn):
        known = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, **known}
    return declare_space(space, default, constraints, known, where)


def _check(kernel: Kernel) -> None:
    """Raise UserError for what does not fit together."""
    where = kernel.name
    kernel.reader  # noqa: B018 - a mistake in the key is told now
    for name, what in (("reference", kernel.reference), ("distance", kernel.distance)):
        if what is not None and not callable(what):
            raise UserError(f"{where}: {name}= is a {type(what).__name__}: give a callable")
    if kernel.inputs is not None and not callable(kernel.inputs) and not isinstance(kernel.inputs, (list, tuple)):
        raise UserError(
            f"{where}: inputs= is a {type(kernel.inputs).__name__}: give a callable, or a list of arguments"
        )
    if isinstance(kernel.inputs, (list, tuple)) and kernel.shapes:
        raise UserError(f"{where}: shapes= goes with inputs= as a callable: leave one out")
    if bad := [s for s in kernel.shapes if not isinstance(s, Mapping)]:
        raise UserError(f"{where}: shapes= has {bad[0]!r}: give dicts of arguments for inputs=")
    if wrong := [n for n, metric in kernel.metrics.items() if not callable(metric)]:
        raise UserError(f"{where}: the metric {wrong[0]!r} is no callable of a Call")
    o = kernel.objective
    if o is not None and (not isinstance(o, Objective) or o.direction not in ("min", "max") or not callable(o.measure)):
        raise UserError(f"{where}: objective= needs autotune.Objective(measure, unit, direction='min' or 'max')")
    signature = kernel.signature
    if signature is not None and (wrong := [n for n in kernel.outputs if n not in signature]):
        raise UserError(f"{where}: outputs= names {wrong[0]!r}, which is no argument of the kernel")
    if kernel.tolerance is not None and not kernel.tolerance > 0:
        raise UserError(f"{where}: tolerance= {kernel.tolerance}: give a relative error above 0")
    _claim(kernel)


def _claim(kernel: Kernel) -> None:
    """See that no other kernel has the name: the database could not tell the two apart."""
    own = (module_of(kernel.fn), str(file_of(kernel.fn) or ""))
    other = _named.setdefault(kernel.name, own)
    if other[0] == own[0] or (own[1] and other[1] == own[1]):  # declared again, or the same file as a script
        return
    raise UserError(f"two kernels are called {kernel.name}, in {other[0]} and in {own[0]}: give one of them name=")


def file_of(fn: Any) -> Path | None:
    """The file that a kernel is in; None for one that was typed in, or compiled from a text."""
    try:
        found = inspect.getsourcefile(plain_function(fn))
    except TypeError:
        return None
    # Not a name such as "<string>", which all texts share that exec compiles.
    return Path(found).resolve() if found and Path(found).is_file() else None

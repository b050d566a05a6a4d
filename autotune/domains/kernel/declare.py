"""Declarations of kernels from code, a TOML file, ``triton.autotune`` or a target's name; and files of shapes.

A measuring process imports a kernel by its name, ``package.module:function``. It imports only targets that the user
named for the current command (:func:`allow`): a workload from a database cannot cause an import.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from autotune.domains.kernel.identity import kernel_name, module_of, path_of, plain_function
from autotune.domains.kernel.kernel import Kernel, Objective, check_parameters, parameters_of
from autotune.domains.kernel.space import KernelSpace, declare_space, narrowed
from autotune.domains.kernel.triton import META, Converted, is_autotuner, is_triton
from autotune.errors import UserError, first_line
from autotune.files import import_object, read_toml
from autotune.workload import Workload

_named: dict[str, tuple[str, str]] = {}
"""Kernel name to the module and file that declared it."""


def declared(found: Any) -> Kernel | None:
    """The kernel of an object made by ``autotune.tunable``; None for other objects."""
    kernel = getattr(found, "kernel", None)
    return kernel if isinstance(kernel, Kernel) else None


def from_converted(fn: Any, found: Converted, more: Mapping[str, Any]) -> Kernel:
    """Make a kernel from the arguments of ``triton.autotune`` and ``more`` arguments of ``autotune.tunable``.

    Raises:
        UserError: the arguments are invalid or conflict.
    """
    given = {k: v for k, v in more.items() if k != "db"}
    if wrong := given.keys() & {"space", "key"}:
        raise UserError(f"{kernel_name(fn)}: {', '.join(sorted(wrong))}is taken from triton.autotune: leave it out")
    if wrong := given.keys() - {f.name for f in fields(Kernel)} - {"default", "constraints"}:
        raise UserError(f"{kernel_name(fn)}: autotune.tunable has no argument {sorted(wrong)[0]!r}")
    kernel = make_kernel(fn, space=list(found.points), key=found.key, **given)
    kernel.reset, kernel.restore, kernel.prune = found.reset, found.restore, found.prune
    known = [p.name for p in parameters_of(fn) or ()]
    for name in (*found.reset, *found.restore):
        if name not in known:
            raise UserError(f"{kernel.name}: reset_to_zero or restore_value has {name!r}, which is not an argument")
    return kernel


def make_kernel(fn: Any, *, space: Any, name: str = "", **given: Any) -> Kernel:
    """Make a kernel from the arguments of ``autotune.tunable``.

    Raises:
        UserError: an argument is invalid; a one-line message.
    """
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
    where = kernel.name
    kernel.reader  # noqa: B018 - the property raises if the key is invalid
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
        raise UserError(f"{where}: the metric {wrong[0]!r} is not a callable that takes a Call")
    o = kernel.objective
    if o is not None and (not isinstance(o, Objective) or o.direction not in ("min", "max") or not callable(o.measure)):
        raise UserError(f"{where}: objective= needs autotune.Objective(measure, unit, direction='min' or 'max')")
    signature = kernel.signature
    if signature is not None and (wrong := [n for n in kernel.outputs if n not in signature]):
        raise UserError(f"{where}: outputs= has {wrong[0]!r}, which is not an argument of the kernel")
    if kernel.tolerance is not None and not kernel.tolerance > 0:
        raise UserError(f"{where}: tolerance= {kernel.tolerance}: give a relative error above 0")
    _claim(kernel)


def _claim(kernel: Kernel) -> None:
    """Register the kernel's name; raises UserError if another kernel has it, since names are database keys."""
    own = (module_of(kernel.fn), str(file_of(kernel.fn) or ""))
    other = _named.setdefault(kernel.name, own)
    if other[0] == own[0] or (own[1] and other[1] == own[1]):  # a repeated declaration, or the file run as a script
        return
    raise UserError(f"two kernels have the name {kernel.name}, in {other[0]} and {own[0]}: give one of them name=")


def file_of(fn: Any) -> Path | None:
    """The source file of a kernel; None if it was typed interactively or compiled from a string."""
    try:
        found = inspect.getsourcefile(plain_function(fn))
    except TypeError:
        return None
    # "<string>" is no file: all code that exec compiles shares that name.
    return Path(found).resolve() if found and Path(found).is_file() else None


# ---- in a file ------------------------------------------------------------------------------------------------------


_WHAT = "file of kernels"
_KEYS = ("space", "configs", "default", "constraints", "key", "reference", "inputs", "shapes", "outputs", "tolerance",
         "within", "name", "distance", "metrics", "grid")  # fmt: skip
_CODE = ("reference", "inputs", "distance", "grid")
"""Keys whose value names code: ``function`` of the kernel's own module, or ``package.module:function``."""
_LARGEST = 4 << 20


def from_file(fn: Any, path: Path, given: Mapping[str, Any], name: str = "") -> Kernel:
    """Declare a function as a kernel by a TOML file.

    Args:
        given: arguments from the code; the file must not repeat them.

    Raises:
        UserError: the file is invalid; a one-line message.
    """
    table, where = _table(fn, path)
    if not isinstance(table.get("space", table.get("configs")), (dict, list)):
        raise UserError(f"{where}: needs a table [{path_of(fn)}.space] of parameters, or a list configs = [...]")
    if twice := given.keys() & table.keys():
        raise UserError(f"{where}: {sorted(twice)[0]} is also declared in the code: declare it once")
    declared: dict[str, Any] = {k: v for k, v in table.items() if k not in ("space", "configs", "name")}
    for what in _CODE:
        if what in declared:
            declared[what] = _code(declared[what], fn, f"{where}: {what}")
    if "metrics" in declared:
        declared["metrics"] = {n: _code(m, fn, f"{where}: metric {n}") for n, m in dict(declared["metrics"]).items()}
    space = table.get("space", table.get("configs"))
    return make_kernel(fn, space=space, name=name or str(table.get("name", "")), **{**given, **declared})


def narrow(kernel: Kernel, path: Path) -> Kernel:
    """Narrow a declared kernel's space by the table ``[kernel.space]`` of a user's file.

    Raises:
        UserError: the file is invalid; a one-line message.
    """
    table, where = _table(kernel.fn, path)
    if wrong := table.keys() - {"space"}:
        raise UserError(f"{where}: {sorted(wrong)[0]} is declared in the code: this file may only narrow the space")
    return replace(kernel, space=narrowed(kernel.space, dict(table.get("space", {})), where))


def _table(fn: Any, path: Path) -> tuple[dict[str, Any], str]:
    """The function's table in a file, and the prefix of messages about it."""
    data, name = read_toml(path, _WHAT), path_of(fn)
    if data.get("domain", "kernel") != "kernel":
        raise UserError(f"{path}: the file is of domain {data['domain']!r}, not of a kernel")
    table = data.get(name)
    if not isinstance(table, dict):
        there = ", ".join(k for k, v in data.items() if isinstance(v, dict)) or "none"
        raise UserError(f"{path}: no table [{name}] for {module_of(fn)}:{name}; its tables are {there}")
    if unknown := table.keys() - set(_KEYS):
        raise UserError(f"{path}: unknown key {sorted(unknown)[0]!r} in [{name}]; the keys are {', '.join(_KEYS)}")
    return dict(table), f"{path}: [{name}]"


def _code(text: object, fn: Any, where: str) -> Any:
    if not isinstance(text, str):
        raise UserError(f"{where} is {text!r}: name a function, such as 'make_inputs' or 'package.module:make_inputs'")
    module, _, path = text.rpartition(":")
    try:
        found: Any = importlib.import_module(module or module_of(fn))
    except Exception as error:
        raise UserError(f"{where}: importing {module} failed: {first_line(error)}") from error
    for part in path.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise UserError(f"{where}: {module or module_of(fn)} has no {path!r}")
    return found


def read_shapes(file: str) -> list[dict[str, Any]]:
    """Read shapes from a file: ``[[shapes]]`` tables in TOML, or one JSON object per line.

    Raises:
        UserError: the file cannot be read, is empty, or holds something other than objects.
    """
    path = Path(file).expanduser()
    if path.suffix == ".toml":
        found = read_toml(path, "file of shapes").get("shapes")
        if not isinstance(found, list):
            raise UserError(f"{path}: needs tables [[shapes]], each with the arguments of the inputs factory")
        shapes = found
    else:
        shapes = _json_lines(path)
    for nth, shape in enumerate(shapes, 1):
        if not isinstance(shape, dict):
            raise UserError(f"{path}: shape {nth} is {shape!r}: give an object of names and values")
    if not shapes:
        raise UserError(f"{path}: the file has no shapes")
    return shapes


def _json_lines(path: Path) -> list[Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
        text = data.decode()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file of shapes") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(
            f"{path}: cannot read the file of shapes: {getattr(error, 'strerror', None) or error}"
        ) from None
    if len(data) > _LARGEST:
        raise UserError(f"{path}: cannot read the file of shapes: it is larger than {_LARGEST >> 20} MiB")
    shapes = []
    for nth, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                shapes.append(json.loads(line))
            except (ValueError, RecursionError):
                raise UserError(f'{path}: line {nth} is not a JSON object such as {{"n": 4096}}') from None
    return shapes


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
    target, file = _target_of(workload)
    if _entry(target, file) in _allowed():
        return None
    name = workload.label or workload.fingerprint[:12]
    return (
        f"{name}: what a database says is not imported: name its kernel, as in autotune search kernel TARGET, or in"
        f" ${ALLOWED}"
    )


def _target_of(workload: Workload) -> tuple[str, str]:
    return str(workload.source.get("target", "")), str(workload.source.get("file", ""))


def kernel_of(workload: Workload) -> Kernel:
    """The kernel of a workload of this search.

    Raises:
        UserError: the user did not name its target, or the kernel's source changed since the search began.
    """
    if why := refused(workload):
        raise UserError(why)
    target, file = _target_of(workload)
    kernel = resolve(target, file)
    if kernel.source != workload.spec.get("source") or kernel.name != workload.spec.get("kernel"):
        raise UserError(f"{target} was edited since {workload.label} was searched: search it again")
    return kernel

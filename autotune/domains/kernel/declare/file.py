"""A kernel's declaration in TOML beside the code, and files of shapes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.domains.kernel.declare.make import make_kernel
from autotune.domains.kernel.declare.space import narrowed
from autotune.domains.kernel.identity import module_of, path_of
from autotune.domains.kernel.kernel import Kernel
from autotune.errors import UserError, first_line
from autotune.toml import read_toml

_WHAT = "file of kernels"
_KEYS = ("space", "configs", "default", "constraints", "key", "reference", "inputs", "shapes", "outputs", "tolerance",
         "within", "name", "distance", "metrics", "grid")  # fmt: skip
_CODE = ("reference", "inputs", "distance", "grid")
"""What a file names of the code: ``function`` of the kernel's own module, or ``package.module:function``."""
_LARGEST = 4 << 20


def from_file(fn: Any, path: Path, given: Mapping[str, Any], name: str = "") -> Kernel:
    """The kernel of a function that a file declares.

    Args:
        given: what the code says besides, which the file must not say again.

    Raises:
        UserError: whatever is wrong with the file, in one line.
    """
    table, where = _table(fn, path)
    if not isinstance(table.get("space", table.get("configs")), (dict, list)):
        raise UserError(f"{where}: needs a table [{path_of(fn)}.space] of parameters, or a list configs = [...]")
    if twice := given.keys() & table.keys():
        raise UserError(f"{where}: {sorted(twice)[0]} is said in the code too: say it once")
    told: dict[str, Any] = {k: v for k, v in table.items() if k not in ("space", "configs", "name")}
    for what in _CODE:
        if what in told:
            told[what] = _code(told[what], fn, f"{where}: {what}")
    if "metrics" in told:
        told["metrics"] = {n: _code(m, fn, f"{where}: metric {n}") for n, m in dict(told["metrics"]).items()}
    space = table.get("space", table.get("configs"))
    return make_kernel(fn, space=space, name=name or str(table.get("name", "")), **{**given, **told})


def narrow(kernel: Kernel, path: Path) -> Kernel:
    """The part of a declared kernel's space that a user's file leaves: ``[kernel.space]``.

    Raises:
        UserError: whatever is wrong with the file, in one line.
    """
    table, where = _table(kernel.fn, path)
    if wrong := table.keys() - {"space"}:
        raise UserError(f"{where}: {sorted(wrong)[0]} is the code's to say: here the file may narrow the space only")
    return replace(kernel, space=narrowed(kernel.space, dict(table.get("space", {})), where))


def _table(fn: Any, path: Path) -> tuple[dict[str, Any], str]:
    """The function's table of a file, and how messages about it begin."""
    data, name = read_toml(path, _WHAT), path_of(fn)
    if data.get("domain", "kernel") != "kernel":
        raise UserError(f"{path}: a file of domain {data['domain']!r}, but this is a kernel")
    table = data.get(name)
    if not isinstance(table, dict):
        there = ", ".join(k for k, v in data.items() if isinstance(v, dict)) or "none"
        raise UserError(f"{path}: no table [{name}] for {module_of(fn)}:{name}; there is {there}")
    if unknown := table.keys() - set(_KEYS):
        raise UserError(f"{path}: unknown key {sorted(unknown)[0]!r} in [{name}]; there is {', '.join(_KEYS)}")
    return dict(table), f"{path}: [{name}]"


def _code(text: object, fn: Any, where: str) -> Any:
    """What a file names of the code."""
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
    """The shapes of a file: ``[[shapes]]`` tables of TOML, or a JSON object a line.

    Raises:
        UserError: it cannot be read, holds none, or anything but objects.
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
        raise UserError(f"{path}: there is no shape in it")
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
                raise UserError(f'{path}: line {nth} is no JSON object, such as {{"n": 4096}}') from None
    return shapes

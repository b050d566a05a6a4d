"""What a module's capture depends on, so that a search need not capture again what an earlier one has captured.

Tracing a large model takes longer than a search that has nothing left to do. The signature covers what tracing sees:
the classes and plain attributes of every submodule, parameters and inputs by shape, type and stride, the sources of all
loaded modules that are not installed packages, this package's sources, and the versions of what traces. Of installed
packages, the sources that have a submodule's class and the package's version count. Sources count by what they say,
wherever they lie and whenever they were written. Where anything in the module is of a kind that cannot be told so, or a
class has no source file (typed into an interpreter), there is no signature, and the module is captured.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import autotune
from autotune import numerics
from autotune.ir.precision import asked
from autotune.workload import digest

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
_SKIPPED = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has: hooks, which must be empty, and the tables of parameters and submodules."""


class _Unknown(Exception):
    """Something that a signature cannot tell."""


def signature(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, *, train: bool, device: str
) -> str | None:
    """SHA-256 of what capturing ``fn`` depends on; None where that cannot be told, and for what is no module.

    Args:
        fn: the callable; ``args`` and ``kwargs`` its inputs.
        train: whether its backward pass is captured whatever requires grad.
        device: "cpu" or "cuda:N".
    """
    if not isinstance(fn, nn.Module):
        return None
    seen: dict[int, int] = {}
    kind = device.partition(":")[0]
    try:
        modules = [[name, *_module(m)] for name, m in fn.named_modules(remove_duplicate=False)]
        classes = _classes({c.__module__ for m in fn.modules() for c in type(m).__mro__})
        tensors = [[name, *_tensor(t, seen)] for name, t in fn.named_parameters(remove_duplicate=False)]
        tensors += [[name, *_tensor(t, seen)] for name, t in fn.named_buffers(remove_duplicate=False)]
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
        inputs = [_tensor(t, seen) if isinstance(t, torch.Tensor) else _plain(t) for t in leaves]
    except _Unknown:
        return None
    return digest(
        {
            "autotune": [autotune.__version__, _own()],
            "versions": [torch.__version__, sys.version],
            "how": [train, kind, torch.is_grad_enabled(), torch.is_autocast_enabled(kind), asked()],
            "numerics": numerics.read([device]),
            "modules": modules,
            "classes": classes,
            "tensors": tensors,
            "inputs": [inputs, str(spec)],
            "sources": _sources(),
        }
    )


def _module(m: nn.Module) -> list[Any]:
    own = {}
    for name, value in sorted(vars(m).items()):
        if name in _SKIPPED:
            if name.endswith("_hooks") and value:
                raise _Unknown(name)
            continue
        own[name] = _plain(value)
    return [f"{type(m).__module__}.{type(m).__qualname__}", own]


def _classes(modules: Iterable[str]) -> dict[str, list[str]]:
    """By the names of the Python modules that classes are from: version of the package, digest of the source."""
    found = {}
    for name in modules:
        package = name.partition(".")[0]
        if package in ("builtins", "torch") or package in sys.stdlib_module_names:  # versions of which are told
            continue
        text = _digest(getattr(sys.modules.get(name), "__file__", None) or "")
        if not text:
            raise _Unknown(name)
        found[name] = [str(getattr(sys.modules.get(package), "__version__", "")), text]
    return found


def _plain(value: Any, depth: int = 0) -> Any:
    """A value as JSON that tells it from any other."""
    if depth > 4:
        raise _Unknown("too deep")
    if isinstance(value, _PLAIN):
        return f"{type(value).__qualname__} {value!r}"
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [_plain(v, depth + 1) for v in value]
        return [type(value).__qualname__, sorted(items, key=repr) if isinstance(value, (set, frozenset)) else items]
    if isinstance(value, dict):
        return ["dict", [[_plain(k, depth + 1), _plain(v, depth + 1)] for k, v in value.items()]]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _plain(getattr(value, f.name), depth + 1) for f in dataclasses.fields(value)}
        return [f"{type(value).__module__}.{type(value).__qualname__}", fields]
    if isinstance(value, BuiltinFunctionType) or _found_by_name(value):
        return f"{value.__module__}.{value.__qualname__}"
    raise _Unknown(type(value).__qualname__)


def _found_by_name(value: Any) -> bool:
    """Whether a class's or a function's name leads to it, in a module whose file is digested or whose version counts.

    Lambdas of a module share a name, as do a function's local classes; what ``python -c`` or ``exec`` made has no file.
    """
    if not isinstance(value, (type, FunctionType)):
        return False
    found: Any = sys.modules.get(value.__module__)
    if getattr(found, "__file__", None) is None and value.__module__ not in sys.builtin_module_names:
        return False
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def _tensor(t: torch.Tensor, seen: dict[int, int]) -> list[Any]:
    alias = seen.setdefault(id(t), len(seen))
    return [list(t.shape), list(t.stride()), t.storage_offset() % 16, str(t.dtype), t.device.type, t.requires_grad,
            type(t).__qualname__, alias]  # fmt: skip


def _sources() -> dict[str, str]:
    """Loaded modules that are the user's own, by name, and digests of their files.

    Which modules of Python, of installed packages and of autotune are loaded depends on what was done before (an empty
    database was given its tables, say), which is nothing that a capture depends on.
    """
    skipped, folders = _installed(), dict[str, str]()
    found = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and not _real(file, folders).startswith(skipped) and (text := _digest(file)):
            # Not its name there: multiprocessing gives the main module a second one.
            found[getattr(module, "__name__", file)] = text
    return found


def _real(file: str, folders: dict[str, str]) -> str:
    """Its real path. Thousands of modules lie in hundreds of folders, whose real paths are kept in ``folders``."""
    folder, name = os.path.split(file)
    if folder not in folders:
        folders[folder] = os.path.realpath(folder)
    path = os.path.join(folders[folder], name)
    return os.path.realpath(path) if os.path.islink(path) else path


def _installed() -> tuple[str, ...]:
    """Folders of Python's library, of installed packages and commands, and of autotune; and installed single files."""
    folders = [sysconfig.get_path(n) for n in ("stdlib", "purelib", "platlib", "scripts")]
    folders += [sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix})]
    folders += [*site.getsitepackages(), site.getusersitepackages(), str(_PACKAGE)]
    known = {os.path.realpath(f) + os.sep for f in folders}
    elsewhere = {os.path.realpath(f) + os.sep for f in sys.path} - known
    return (*known, *(path for folder in elsewhere for path in _recorded(folder)))


def _recorded(folder: str) -> set[str]:
    """What ``pip install --target`` put into a folder: first parts of the paths that its records list, real ones."""
    firsts = set()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        for line in record.read_text("utf-8", errors="replace").splitlines() if os.access(record, os.R_OK) else ():
            first, slash, _ = line.partition(",")[0].strip('"').partition("/")
            firsts.add((first, os.sep if slash else ""))
    return {os.path.realpath(folder + first) + end for first, end in firsts if first not in ("", ".", "..")}


_PACKAGE = Path(autotune.__file__).resolve().parent


@functools.cache
def _own() -> dict[str, str]:
    """Autotune's files, loaded or not, and their digests."""
    return {str(p.relative_to(_PACKAGE)): _digest(p) for p in _PACKAGE.rglob("*.py")}


def _digest(path: str | Path) -> str:
    """SHA-256 of a file; empty where it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""

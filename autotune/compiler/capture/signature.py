"""Signatures of modules, by which a search reuses the capture of an earlier search.

Tracing a large model takes longer than a search that has nothing left to do. The signature covers everything that
tracing depends on:

- The classes and plain attributes of every submodule.
- Parameters and inputs by shape, type and stride.
- The sources of all loaded modules outside installed packages, and of this package.
- The versions of autotune, PyTorch and Python.
- The source file of each submodule's class in an installed package, and the package's version.

Source files are compared by content alone, not by path or modification time. A module has no signature, and is always
captured, if an attribute has no such description or a class has no source file (typed into an interpreter).
"""

from __future__ import annotations

import dataclasses
import enum
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
from autotune.files import code_digest
from autotune.ir.nodes import asked
from autotune.workload import digest

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
_SKIPPED = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of every ``nn.Module``: hooks, which must be empty, and the dicts of parameters and submodules."""


class _Unknown(Exception):
    """A value that a signature cannot describe."""


def signature(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, *, train: bool, device: str
) -> str | None:
    """SHA-256 of everything that the capture of ``fn`` depends on; None without a signature or for other callables.

    Args:
        fn: the callable; ``args`` and ``kwargs`` its inputs.
        train: True if the backward pass is captured even if no tensor requires grad.
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
            "autotune": [autotune.__version__, code_digest(_PACKAGE)],
            "versions": [torch.__version__, sys.version],
            "how": [train, kind, torch.is_grad_enabled(), torch.is_autocast_enabled(kind), asked()],
            "types": [str(torch.get_autocast_dtype(kind)), str(torch.get_default_dtype())],
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
    """For each Python module that defines a class: the version of its package and the digest of its source."""
    found = {}
    for name in modules:
        package = name.partition(".")[0]
        if package in ("builtins", "torch") or package in sys.stdlib_module_names:  # the signature has their versions
            continue
        text = _digest(getattr(sys.modules.get(name), "__file__", None) or "")
        if not text:
            raise _Unknown(name)
        found[name] = [str(getattr(sys.modules.get(package), "__version__", "")), text]
    return found


def _plain(value: Any, depth: int = 0) -> Any:
    """A value as JSON that differs for different values."""
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
    """True if a class or function is found by its name, in a module whose file or version is in the signature.

    A module's lambdas share a name, as do a function's local classes. Code from ``python -c`` or ``exec`` has no file.
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
    """Loaded modules of the user's code, by name, and digests of their files.

    Modules of Python, of installed packages and of autotune are left out. Their set depends on earlier work in the
    process, such as creating a database's tables, and a capture does not depend on that.
    """
    skipped, folders = _installed(), dict[str, str]()
    found = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and not _real(file, folders).startswith(skipped) and (text := _digest(file)):
            # Not its key in sys.modules: multiprocessing registers the main module under a second name.
            found[getattr(module, "__name__", file)] = text
    return found


def _real(file: str, folders: dict[str, str]) -> str:
    """The real path of a file; ``folders`` caches those of folders, of which thousands of modules have hundreds."""
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
    """The real paths of the top-level files and folders that ``pip install --target`` installed into a folder."""
    firsts = set()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        for line in record.read_text("utf-8", errors="replace").splitlines() if os.access(record, os.R_OK) else ():
            first, slash, _ = line.partition(",")[0].strip('"').partition("/")
            firsts.add((first, os.sep if slash else ""))
    return {os.path.realpath(folder + first) + end for first, end in firsts if first not in ("", ".", "..")}


_PACKAGE = Path(autotune.__file__).resolve().parent


def _digest(path: str | Path) -> str:
    """SHA-256 of a file; "" if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""

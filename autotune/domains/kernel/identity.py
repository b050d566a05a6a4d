"""The identity of a kernel: its name, and a fingerprint of its source.

Measurements of a kernel must not be used after an edit. The fingerprint covers the syntax tree of the function, of the
functions and plain constants of its module that it uses, and the names of its tuned parameters. Docstrings, comments
and tuning decorators are excluded: a new comment or choice keeps the fingerprint, a new statement changes it.
"""

from __future__ import annotations
import __future__

import ast
import functools
import hashlib
import inspect
import itertools
import operator
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from autotune.device import package_version
from autotune.workload import digest

_PLAIN = (bool, int, float, str, type(None))


def plain_function(fn: Any) -> Any:
    """Unwrap the decorators of Numba, Triton, functools and this package; returns ``fn`` if it is not wrapped."""
    for _ in range(16):
        inner = next((found for name in _INSIDE if callable(found := getattr(fn, name, None))), None)
        if inner is None or (isinstance(fn, FunctionType) and not hasattr(fn, "__wrapped__")):
            return fn
        fn = inner
    return fn


_INSIDE = ("py_func", "fn", "func", "__wrapped__")
"""Attributes in which Numba's dispatchers, Triton's kernels, ``functools.partial`` and ``wraps`` keep the function."""


def module_of(fn: Any) -> str:
    """The module from which other processes import the kernel; for a script, the file's stem."""
    return _importable(str(getattr(plain_function(fn), "__module__", "") or ""))


def target_of(declared: Any, fn: Any) -> str:
    """The name ``package.module:name`` by which another process imports a declared kernel.

    It is a module attribute that holds the object; it may differ from the kernel's name and its module.
    """
    own = str(getattr(plain_function(fn), "__module__", "") or "")
    for name in (own, *list(sys.modules)):
        for attribute, value in list(vars(sys.modules[name]).items()) if name in sys.modules else ():
            if value is declared:
                return f"{_importable(name)}:{attribute}"
    return f"{_importable(own)}:{path_of(fn)}"


def _importable(name: str) -> str:
    """The name of a module in other processes."""
    if name != "__main__":
        return name
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    file = getattr(main, "__file__", None)
    return str(spec.name) if spec is not None else Path(file).stem if file else name


def path_of(fn: Any) -> str:
    """The kernel's name inside its module."""
    plain = plain_function(fn)
    return str(getattr(plain, "__qualname__", type(plain).__qualname__))


def kernel_name(fn: Any) -> str:
    """A short name such as ``kernels:matmul``: the module's last component and the function."""
    return f"{module_of(fn).rpartition('.')[2]}:{path_of(fn)}"


def source_fingerprint(fn: Any, parameters: Iterable[str]) -> str:
    """SHA-256 (64 hex digits) of the kernel's source within its module, and of its tuned parameters' names."""
    texts: dict[str, Any] = {}
    _collect(plain_function(fn), texts, set())
    return digest({"source": texts, "parameters": sorted(parameters)})


def _collect(fn: Any, texts: dict[str, Any], seen: set[int]) -> None:
    """Add a function and the parts of its module that it uses to ``texts``; ``seen`` has visited functions' ids."""
    if id(fn) in seen:  # recursion
        return
    seen.add(id(fn))
    _add(texts, path_of(fn), _tree_of(fn))
    if not isinstance(fn, FunctionType):
        return
    for used, value in _used(fn):
        inner = plain_function(value)
        if isinstance(inner, FunctionType):
            if inner.__module__ == fn.__module__:
                _collect(inner, texts, seen)
        elif _is_plain(value) and texts.get(name := f"{fn.__module__}.{used}") != repr(value):
            _add(texts, name, repr(value))


def _add(texts: dict[str, Any], name: str, text: Any) -> None:
    """Add a text; a repeated name, such as another closure of the same function, gets a number."""
    free = itertools.chain([name], (f"{name} {n}" for n in itertools.count(2)))
    texts[next(key for key in free if key not in texts)] = text


def _used(fn: FunctionType) -> Iterator[tuple[str, Any]]:
    """Globals and closure variables that a function reads, by name, without globals that it writes (state)."""
    names, written = _names(fn.__code__)
    for name in sorted(names - written):
        if name in fn.__globals__:
            yield name, fn.__globals__[name]
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue


def _names(code: CodeType) -> tuple[set[str], set[str]]:
    """Names that a code object and its nested code objects may read, and those that they write, as globals."""
    import dis

    read, written = set(code.co_names), set()
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            written.add(str(step.argval))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            more, also = _names(constant)
            read, written = read | more, written | also
    return read, written


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    inner = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value  # Triton's constants
    return isinstance(inner, _PLAIN)


def _tree_of(fn: Any) -> Any:
    """The syntax tree of a function as nested lists; its compiled code if the source is not available."""
    text = source_of(fn)
    if text is None:
        return _without_source(fn)
    try:
        body = ast.parse(text).body
    except SyntaxError:  # a lambda inside a longer expression
        return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()
    return [_dump(node) for node in body]


def source_of(fn: Any) -> str | None:
    """The source of a function; None if it is not available, or may be another function's.

    ``inspect`` finds source by file name and line. All code that ``exec`` compiles shares the name ``<string>``, for
    which Python 3.13 has the text of ``python -c``. So if the file does not exist, the text must compile to ``fn``'s
    code.

    """
    try:
        text = textwrap.dedent(inspect.getsource(fn))
        lines, _ = inspect.findsource(fn)
    except (OSError, TypeError):
        return None
    code = getattr(fn, "__code__", None)
    if isinstance(code, CodeType):
        if code.co_name == "<lambda>" and text.count("lambda") > 1:  # inspect finds lines, not expressions
            return None
        if not os.path.isfile(code.co_filename) and not _compiles_to(code, "".join(lines)):
            return None
    return text


def _compiles_to(code: CodeType, text: str) -> bool:
    """True if a module's source compiles to a function with the code ``code``."""
    flags = code.co_flags & functools.reduce(operator.or_, (f.compiler_flag for f in _FUTURE))
    try:
        module = compile(text, code.co_filename, "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    inside = [module]
    for found in inside:
        inside += [c for c in found.co_consts if isinstance(c, CodeType)]
    return code in inside


_FUTURE = [getattr(__future__, name) for name in __future__.all_feature_names]


def _without_source(fn: Any) -> Any:
    """The compiled code of a function; for other callables, the name and the package's version."""
    package = str(getattr(fn, "__module__", "") or "").partition(".")[0]
    code = getattr(fn, "__code__", None)
    if isinstance(code, CodeType):
        defaults = [*(fn.__defaults__ or ()), *sorted((fn.__kwdefaults__ or {}).items())]
        return [_constant(code), [_constant(value) for value in defaults]]
    return [package, path_of(fn), _version(package)]


def _constant(value: Any) -> Any:
    """A constant of compiled code, or a code object without its file and line numbers, as lists and strings."""
    if isinstance(value, CodeType):
        shape = [value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags]
        names = [value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars]
        code = [value.co_code.hex(), value.co_exceptiontable.hex()]
        return [*code, shape, [list(n) for n in names], [_constant(c) for c in value.co_consts]]
    if isinstance(value, (tuple, list)):
        return [type(value).__name__, *map(_constant, value)]
    if isinstance(value, frozenset):
        return ["frozenset", *sorted(map(repr, value))]
    return repr(value) if isinstance(value, (*_PLAIN, bytes, complex)) else type(value).__qualname__


_version = functools.cache(package_version)


def _dump(node: Any) -> Any:
    """A tree without positions, tuning decorators and docstrings; equal in all Python versions that have its syntax."""
    if isinstance(node, ast.AST):
        fields: dict[str, Any] = {}
        for name, value in ast.iter_fields(node):
            if name in ("type_comment", "ctx", "kind"):
                continue
            if name == "decorator_list":
                value = [decorator for decorator in value if not _declares(decorator)]
            if name == "body" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                value = _without_docstring(value)
            if value not in (None, []):
                fields[name] = _dump(value)
        return [type(node).__name__, fields]
    if isinstance(node, list):
        return [_dump(item) for item in node]
    return node if isinstance(node, (str, bool, int)) else repr(node)


def _declares(decorator: ast.expr) -> bool:
    """True for a decorator that configures the tuning and does not change the kernel's result."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called).rpartition(".")[2] in ("tunable", "autotune", "triton_autotune")


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body

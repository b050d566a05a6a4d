"""Compile emitted CUDA source to a cubin, without a GPU or a driver.

Numba CUDA generates PTX, and the CUDA linker (nvJitLink) generates the cubin. Neither needs a GPU, so candidates
compile in a pool of ordinary processes while others are measured.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import linecache
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

from autotune.compiler.targets.cuda.cubin import blocks_per_sm, capability, limits, taken
from autotune.compiler.targets.cuda.source import CudaSource, Listing
from autotune.errors import BuildError
from autotune.files import whole_file
from autotune.task import SHARED_BUILDS, Kernel


def _namespace(code: CodeType) -> dict[str, Any]:
    """The globals of a kernel's module."""
    import numpy as np
    from numba import cuda, types
    from numba.cuda import libdevice

    from autotune.compiler.targets.cuda.intrinsics import resolve

    space: dict[str, Any] = {"cuda": cuda, "math": math, "libdevice": libdevice}
    space |= {"inf": np.float32(np.inf), "nan": np.float32(np.nan)}
    space |= {name: getattr(types, name) for name in ("float32", "int32", "uint32", "int64", "boolean")}
    intrinsics = {name: resolve(name) for name in _names(code) - space.keys()}
    return space | {name: found for name, found in intrinsics.items() if found is not None}


def _names(code: CodeType) -> set[str]:
    """Every name that code refers to, inner functions included."""
    inner = [_names(c) for c in code.co_consts if isinstance(c, CodeType)]
    return set(code.co_names).union(*inner)


@functools.cache
def _import_arrays() -> None:
    """Import the module of numba-cuda 0.30 that needs ``np.row_stack``, which numpy 2.5 no longer has.

    The module uses it once, to register an implementation. No code compiled here calls it. numpy is not changed.
    """
    import numpy as np

    if hasattr(np, "row_stack"):
        return
    np.__dict__["row_stack"] = np.vstack
    try:
        importlib.import_module("numba.cuda.np.arrayobj")
    finally:
        del np.__dict__["row_stack"]


@contextlib.contextmanager
def _without_device(cc: tuple[int, int]) -> Iterator[None]:
    """Let numba-cuda compile device functions without a driver.

    It reads the current device's compute capability only to choose the target, which is given here.
    """
    import numba.cuda.dispatcher as dispatcher

    real = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc)
    try:
        yield
    finally:
        dispatcher.get_current_device = real


def last_line(error: BaseException) -> str:
    """The last line of an error's message, which has the reason in messages of compilers."""
    return (str(error).strip().splitlines() or ["without a reason"])[-1][:300]


def _numba_ptx(text: str, params: tuple[str, ...], dynamic: bool, block: int, cc: tuple[int, int], fast: bool) -> str:
    """Numba's PTX of a kernel's text; Numba chooses the name of the entry."""
    from numba import cuda, types

    from autotune.compiler.targets.cuda.intrinsics.memory import POINTER

    _import_arrays()
    filename = f"<autotune {abs(hash(text)):x}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    code = compile(text, filename, "exec")
    space = _namespace(code)
    exec(code, space)
    for name, obj in list(space.items()):
        if isinstance(obj, FunctionType) and obj.__code__.co_filename == filename and name != "kernel":
            space[name] = cuda.jit(device=True, fastmath=fast)(obj)
    extent0 = [types.int64] if dynamic else []
    sig = types.void(*(types.CPointer(POINTER[s]) for s in params), *extent0)
    options = {"cc": cc, "output": "ptx", "abi": "numba", "fastmath": fast, "launch_bounds": block}
    try:
        with _without_device(cc):
            ptx, _ = cuda.compile(space["kernel"], sig, device=False, **options)
    except Exception as error:  # numba raises many types; all mean this candidate does not compile
        raise BuildError(f"numba: {type(error).__name__}: {last_line(error)}") from error
    return ptx.decode() if isinstance(ptx, bytes) else str(ptx)


def _shared_ptx(*parts: Any) -> str:
    """:func:`_numba_ptx`, or the result of another build of this search for the same source.

    A group is compiled when it is searched alone, and again in every plan that contains it.
    """
    folder = os.environ.get(SHARED_BUILDS)
    if not folder:
        return _numba_ptx(*parts)
    name = hashlib.sha256(repr(parts).encode()).hexdigest()
    path = Path(folder, name)
    with contextlib.suppress(OSError):
        return path.read_text()
    ptx = _numba_ptx(*parts)
    with contextlib.suppress(OSError), whole_file(path) as out:  # a full disk costs time only
        out.write(ptx.encode())
    return ptx


def compile_ptx(source: CudaSource | Listing, target: str) -> tuple[str, str]:
    """(PTX text, entry name). Raises BuildError if Numba rejects the source."""
    cc = capability(target)
    text = _shared_ptx(source.text, source.params, bool(source.launch["dynamic"]), source.block, cc, source.fast)
    entry = next((line.split("(")[0].split()[-1] for line in text.splitlines() if ".entry" in line), "")
    if not entry:
        raise BuildError("numba made no kernel entry")
    if source.cluster > 1 and cc < (9, 0):
        raise BuildError(f"{target} has no thread-block clusters")
    # A stable entry name, as the environment pointers go: equal candidates are equal cubins, and stored once.
    return _completed(text, source).replace(entry, source.name), source.name


def _completed(ptx: str, source: CudaSource | Listing) -> str:
    """PTX with the directives that Numba does not write, and without its environment pointers.

    No kernel reads those, and their names contain a counter that differs between processes.
    """
    out = []
    for line in ptx.splitlines(keepends=True):
        if not (line.startswith(".common .global ") and "NumbaEnv" in line):
            out.append(line)
        if line.startswith(".maxntid"):
            if source.cluster > 1:
                out.append(f".explicitcluster\n.reqnctapercluster {source.cluster}, 1, 1\n")
            if source.max_registers:
                # ptxas ignores its own register option where the kernel states its block size: it states both.
                out.append(f".maxnreg {source.max_registers}\n")
    return "".join(out)


def build(source: CudaSource | Listing, target: str = "sm_90") -> Kernel:
    """Compile ``source`` and read its resources.

    Raises BuildError if it does not compile, spills too much, or does not fit an SM.
    """
    from cuda.core import Linker, LinkerOptions, ObjectCode

    ptx, entry = compile_ptx(source, target)
    options = LinkerOptions(arch=target)
    try:
        cubin = bytes(Linker(ObjectCode.from_ptx(ptx.encode()), options=options).link("cubin").code)
    except Exception as error:
        raise BuildError(f"ptxas: {type(error).__name__}: {last_line(error)}") from error
    used = taken(cubin, entry, target)
    shared = used["shared"] + int(source.launch["shared"])
    fit = blocks_per_sm(used["registers"], shared, source.block, target)
    if shared > limits(target).shared_block:
        raise BuildError(f"{shared} bytes of shared memory a block, the device has {limits(target).shared_block}")
    if fit < 1:
        raise BuildError(f"{used['registers']} registers in {source.block} threads do not fit one SM")
    used.update(shared_total=shared, blocks_per_sm=fit, threads=source.block)
    return Kernel(entry=entry, code=cubin, launch=dict(source.launch), resources=used)

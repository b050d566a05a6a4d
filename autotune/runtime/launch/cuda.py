"""Launching stored cubins: loaded once a process, launched through the driver with packed arguments.

Numba, which compiled the kernels, is not used here. torch's launcher launches kernels, and ``cuLaunchKernelEx`` through
ctypes those that it refuses. So a launch costs less than allocating its outputs.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from autotune.task import Kernel

_CUDA_ERROR_INVALID_CONTEXT = 201
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_DEFAULT_SHARED = 48 * 1024  # available to a kernel without setting the attribute
_TORCH_ARGUMENTS = 25  # maximum of torch's launcher


class LaunchError(RuntimeError):
    """The driver refused to load or to launch a kernel.

    Attributes:
        code: the driver's, or 0.
    """

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code

    @property
    def deterministic(self) -> bool:
        """True if the kernel caused the error and would fail again, and not a shortage or an earlier kernel's fault."""
        return self.code in _REFUSALS


_REFUSALS = frozenset((1, 200, 209, 218, 220, 221, 500, 701))
"""CUDA_ERROR_INVALID_VALUE, _INVALID_IMAGE, _NO_BINARY_FOR_GPU, _INVALID_PTX, two of unsupported PTX, _NOT_FOUND and
_LAUNCH_OUT_OF_RESOURCES."""


_RANGES = {
    "block": (1, 1024),
    "shared": (0, 1 << 18),
    "grid": (1, (1 << 31) - 1),
    "inner": (0, 1 << 62),
    "per_block": (1, 1 << 31),
    "blocks_per_sm": (0, 64),
    "cap": (0, 1 << 20),
    "cluster": (1, 16),
    "group": (0, 1 << 20),
}
"""Upper limits of devices or of autotune's kernels."""


def check_rule(kernel: Kernel) -> None:
    """Refuse launch data that no device could launch, from any source.

    Raises:
        LaunchError: a field is not a number, or out of range.
    """
    rule = kernel.launch
    for name, (low, high) in _RANGES.items():
        value = rule.get(name, low)
        if type(value) is not int or not low <= value <= high:
            raise LaunchError(f"the launch data of {kernel.entry!r} are damaged: {name} = {repr(value)[:40]}")
    if not isinstance(rule.get("args"), list) or "block" not in rule:
        raise LaunchError(f"the launch data of {kernel.entry!r} are damaged")


@lru_cache(maxsize=1)
def driver() -> ctypes.CDLL:
    """The initialised library of the CUDA driver.

    Raises:
        LaunchError: no driver.
    """
    for name in ("libcuda.so.1", "libcuda.so", "nvcuda.dll"):
        try:
            lib = ctypes.CDLL(name)
        except OSError:
            continue
        check(lib, lib.cuInit(0), "initialising the driver")
        return lib
    raise LaunchError("no CUDA driver library was found")


def check(lib: ctypes.CDLL, code: int, doing: str) -> None:
    """Raise LaunchError with the driver's message unless ``code`` is 0."""
    if code:
        text = ctypes.c_char_p()
        lib.cuGetErrorString(code, ctypes.byref(text))
        raise LaunchError(f"{doing}: {(text.value or b'unknown error').decode()} (CUDA error {code})", code)


_libraries: dict[tuple[int, str], ctypes.c_void_p] = {}
_functions: dict[tuple[int, str, str], int] = {}
_contexts: dict[int, ctypes.c_void_p] = {}
_load_lock = threading.Lock()


def _primary_context(device: int) -> ctypes.c_void_p:
    """The primary context of ``device``, as in torch; retained for the life of the process."""
    if device not in _contexts:
        lib = driver()
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        check(lib, lib.cuDeviceGet(ctypes.byref(handle), device), f"finding device {device}")
        check(lib, lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), f"opening device {device}")
        _contexts[device] = context
    return _contexts[device]


def load_function(kernel: Kernel, device: int) -> int:
    """The ``CUfunction`` of a stored kernel on device number ``device``, as an integer.

    Equal cubins are loaded once per device and never unloaded, since a captured graph may use them.

    Raises:
        LaunchError: the cubin is empty, not for this device, or needs more shared memory than available.
    """
    if not kernel.code:
        raise LaunchError(f"the stored kernel {kernel.entry!r} has no code")
    sha = hashlib.sha256(kernel.code).hexdigest()
    key = (device, sha, kernel.entry)
    with _load_lock, _on(device) as lib:
        found = _functions.get(key)
        if found is None:
            found = _functions[key] = _load(lib, kernel, device, sha)
        if asks_for_shared(kernel):
            _allow_shared(lib, found, kernel)
        return found


@contextlib.contextmanager
def _on(device: int) -> Iterator[ctypes.CDLL]:
    """Context manager that makes a device's context current; yields the driver."""
    lib, previous = driver(), ctypes.c_void_p()
    check(lib, lib.cuCtxGetCurrent(ctypes.byref(previous)), "asking for the context")
    check(lib, lib.cuCtxSetCurrent(_primary_context(device)), f"using device {device}")
    try:
        yield lib
    finally:
        lib.cuCtxSetCurrent(previous)


def _load(lib: ctypes.CDLL, kernel: Kernel, device: int, sha: str) -> int:
    module = _libraries.get((device, sha))
    if module is None:
        module = ctypes.c_void_p()
        check(lib, lib.cuModuleLoadData(ctypes.byref(module), kernel.code), f"loading {kernel.entry!r}")
        _libraries[device, sha] = module
    function = ctypes.c_void_p()
    code = lib.cuModuleGetFunction(ctypes.byref(function), module, kernel.entry.encode())
    check(lib, code, f"finding {kernel.entry!r} in its cubin")
    # Load now: a function loaded lazily at its first launch fails if that is during graph capture.
    if hasattr(lib, "cuFuncLoad"):
        check(lib, lib.cuFuncLoad(function), f"loading {kernel.entry!r}")
    assert function.value is not None
    return function.value


def asks_for_shared(kernel: Kernel) -> bool:
    """True for a kernel that needs more shared memory than the default limit."""
    # The sum of its static and its dynamic shared memory.
    return int(kernel.launch.get("shared", 0)) + int(kernel.resources.get("shared", 0)) > _DEFAULT_SHARED


def _allow_shared(lib: ctypes.CDLL, function: int, kernel: Kernel) -> None:
    shared, now = int(kernel.launch.get("shared", 0)), ctypes.c_int()
    # The attribute belongs to the function, which several schedules may share: never lower it.
    code = lib.cuFuncGetAttribute(ctypes.byref(now), _MAX_DYNAMIC_SHARED, ctypes.c_void_p(function))
    check(lib, code, "reading the shared memory limit")
    if now.value < shared:
        code = lib.cuFuncSetAttribute(ctypes.c_void_p(function), _MAX_DYNAMIC_SHARED, shared)
        check(lib, code, f"asking for {shared} bytes of shared memory for {kernel.entry!r}")


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("n_attributes", ctypes.c_uint),
    )


class _Arguments:
    """The arguments of one launch: the values, the pointers to them, and the launch's shape.

    Only ``values`` and the stream change from launch to launch, and the stream rarely.
    """

    __slots__ = ("config", "config_ref", "params", "stream", "values")

    def __init__(self, n: int, grid: int, block: int, shared: int) -> None:
        self.values = (ctypes.c_uint64 * n)()
        base = ctypes.addressof(self.values)
        self.params = (ctypes.c_void_p * n)(*(base + 8 * i for i in range(n)))
        self.config = _Config((grid, 1, 1), (block, 1, 1), shared, None, None, 0)
        self.config_ref = ctypes.byref(self.config)
        self.stream = 0


Launch = Callable[[int, Sequence[int]], None]
"""``launch(stream, pointers)``: enqueue one kernel on a raw stream of the current device."""


def make_launch(kernel: Kernel, device: int, grid: int, extent0: int) -> Launch:
    """A function that launches ``kernel`` with everything but stream and pointers fixed.

    Args:
        kernel: from a stored artifact.
        device: index of its device; the caller makes it current.
        grid: number of blocks, at least one.
        extent0: extent of axis 0, passed after the pointers if the kernel takes it.

    Raises:
        LaunchError: see :func:`load_function`; or its launch data are damaged.
    """
    rule = kernel.launch
    check_rule(kernel)
    n_pointers, dynamic = len(rule["args"]), bool(rule.get("dynamic"))
    function = ctypes.c_void_p(load_function(kernel, device))
    lib = driver()
    call, context = lib.cuLaunchKernelEx, _primary_context(device)
    write = struct.Struct(f"{n_pointers}Q").pack_into

    # A launch reads its arguments before it returns, but without the GIL, so two threads must not share them. Each call
    # pops some from this list (pop and append are atomic), and creates new ones if it is empty.
    free: list[_Arguments] = []

    def new() -> _Arguments:
        made = _Arguments(n_pointers + dynamic, grid, int(rule["block"]), int(rule.get("shared", 0)))
        if dynamic:
            made.values[n_pointers] = extent0
        return made

    def run(stream: int, pointers: Sequence[int]) -> None:
        try:
            arguments = free.pop()
        except IndexError:
            arguments = new()
        write(arguments.values, 0, *pointers)
        if arguments.stream != stream:
            arguments.stream = arguments.config.stream = stream
        code = call(arguments.config_ref, function, arguments.params, None)
        if code == _CUDA_ERROR_INVALID_CONTEXT:
            # A thread that only used torch's caching allocator so far has no context yet.
            lib.cuCtxSetCurrent(context)
            code = call(arguments.config_ref, function, arguments.params, None)
        free.append(arguments)
        if code:
            check(lib, code, f"launching {kernel.entry!r}")

    return _through_torch(run, function.value or 0, kernel, grid, extent0) or run


@dataclass(frozen=True)
class Direct:
    """The parts of a launch through torch, for generated code: ``call(*head, (*pointers, *tail), stream)``.

    If it raises one of :data:`REFUSED`, the caller launches with ``general``.
    """

    call: Callable[..., None]
    head: tuple[Any, ...]
    tail: tuple[int, ...]
    general: Launch


REFUSED = (RuntimeError, TypeError, ValueError)


def _through_torch(general: Launch, function: int, kernel: Kernel, grid: int, extent0: int) -> Launch | None:
    """The same launch through Inductor's launcher for its own cubins, which is C++, in place of ctypes.

    None if this torch has no such launcher, if it cannot take as many arguments, or with ``AUTOTUNE_LAUNCHER=ctypes``.
    Launches that it refuses (in a thread without a context, for example) use ``general``, which raises autotune's
    errors. Measured on an H200 host, alternating with ctypes: 5 to 15% less host time a call.
    """
    import torch

    static: Any = getattr(torch._C, "_StaticCudaLauncher", None)
    threads, n_pointers = int(kernel.launch["block"]), len(kernel.launch["args"])
    if not hasattr(static, "_launch_kernel") or threads % 32 or n_pointers >= _TORCH_ARGUMENTS:
        return None
    if os.environ.get("AUTOTUNE_LAUNCHER") == "ctypes":
        return None
    dynamic = bool(kernel.launch.get("dynamic"))
    call, warps, shared = static._launch_kernel, threads // 32, int(kernel.launch.get("shared", 0))
    types = "O" * n_pointers + ("l" if dynamic else "")
    head, tail = (function, grid, 1, 1, warps, shared, types), ((extent0,) if dynamic else ())

    def run(stream: int, pointers: Sequence[int]) -> None:
        try:
            call(*head, (*pointers, *tail), stream)
        except REFUSED:
            general(stream, pointers)

    run.direct = Direct(call, head, tail, general)  # type: ignore[attr-defined]
    return run

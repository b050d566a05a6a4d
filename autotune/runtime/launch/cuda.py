"""Launching stored cubins: loaded once a process, launched through the driver with packed arguments.

Numba, which wrote the kernels, plays no part here. ``cuLaunchKernel`` is called through ctypes: a launch then costs
less than the tensors it writes to, and the interpreter's lock is free while the driver works.
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
_DEFAULT_SHARED = 48 * 1024  # what a kernel may use without asking
_TORCH_ARGUMENTS = 25  # what torch's launcher has room for


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
        """True where the kernel is to blame and would be refused again: no shortage, and no fault of an earlier one."""
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
"""What no device has more of, or no kernel of ours has."""


def check_rule(kernel: Kernel) -> None:
    """Refuse launch data that no device could launch, whoever wrote them.

    Raises:
        LaunchError: a number is none, or out of range.
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
    """The CUDA driver's library, initialised.

    Raises:
        LaunchError: there is no driver.
    """
    for name in ("libcuda.so.1", "libcuda.so", "nvcuda.dll"):
        try:
            lib = ctypes.CDLL(name)
        except OSError:
            continue
        _check(lib, lib.cuInit(0), "initialising the driver")
        return lib
    raise LaunchError("no CUDA driver library was found")


def _check(lib: ctypes.CDLL, code: int, doing: str) -> None:
    if code:
        text = ctypes.c_char_p()
        lib.cuGetErrorString(code, ctypes.byref(text))
        raise LaunchError(f"{doing}: {(text.value or b'unknown error').decode()} (CUDA error {code})", code)


_libraries: dict[tuple[int, str], ctypes.c_void_p] = {}
_functions: dict[tuple[int, str, str], int] = {}
_contexts: dict[int, ctypes.c_void_p] = {}
_load_lock = threading.Lock()


def _primary_context(device: int) -> ctypes.c_void_p:
    """The context torch uses on ``device``; retained for the life of the process, as torch does."""
    if device not in _contexts:
        lib = driver()
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        _check(lib, lib.cuDeviceGet(ctypes.byref(handle), device), f"finding device {device}")
        _check(lib, lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), f"opening device {device}")
        _contexts[device] = context
    return _contexts[device]


def load_function(kernel: Kernel, device: int) -> int:
    """The ``CUfunction`` of a stored kernel on device number ``device``, as an integer.

    Equal cubins are loaded once a device and stay loaded: a captured graph may hold them.

    Raises:
        LaunchError: the cubin is empty, not for this device, or needs more shared memory than there is.
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
    """The driver, while the context of a device is current."""
    lib, previous = driver(), ctypes.c_void_p()
    _check(lib, lib.cuCtxGetCurrent(ctypes.byref(previous)), "asking for the context")
    _check(lib, lib.cuCtxSetCurrent(_primary_context(device)), f"using device {device}")
    try:
        yield lib
    finally:
        lib.cuCtxSetCurrent(previous)


def _load(lib: ctypes.CDLL, kernel: Kernel, device: int, sha: str) -> int:
    module = _libraries.get((device, sha))
    if module is None:
        module = ctypes.c_void_p()
        _check(lib, lib.cuModuleLoadData(ctypes.byref(module), kernel.code), f"loading {kernel.entry!r}")
        _libraries[device, sha] = module
    function = ctypes.c_void_p()
    code = lib.cuModuleGetFunction(ctypes.byref(function), module, kernel.entry.encode())
    _check(lib, code, f"finding {kernel.entry!r} in its cubin")
    # A function that is loaded lazily at its first launch could not be launched first under graph capture.
    if hasattr(lib, "cuFuncLoad"):
        _check(lib, lib.cuFuncLoad(function), f"loading {kernel.entry!r}")
    assert function.value is not None
    return function.value


def asks_for_shared(kernel: Kernel) -> bool:
    """True for a kernel that needs more shared memory than the default limit."""
    # That covers its static and its dynamic shared memory together.
    return int(kernel.launch.get("shared", 0)) + int(kernel.resources.get("shared", 0)) > _DEFAULT_SHARED


def _allow_shared(lib: ctypes.CDLL, function: int, kernel: Kernel) -> None:
    shared, now = int(kernel.launch.get("shared", 0)), ctypes.c_int()
    # The attribute belongs to the function, which several schedules may share: never lower it.
    code = lib.cuFuncGetAttribute(ctypes.byref(now), _MAX_DYNAMIC_SHARED, ctypes.c_void_p(function))
    _check(lib, code, "reading the shared memory limit")
    if now.value < shared:
        code = lib.cuFuncSetAttribute(ctypes.c_void_p(function), _MAX_DYNAMIC_SHARED, shared)
        _check(lib, code, f"asking for {shared} bytes of shared memory for {kernel.entry!r}")


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

    Nothing but ``values`` and the stream changes from launch to launch, and the stream seldom does.
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
        device: number of the device it will run on; the caller makes it current.
        grid: blocks, at least one.
        extent0: extent of axis 0, passed after the pointers where the kernel takes it.

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

    # A launch reads its arguments before it returns, but without the interpreter's lock, so two threads must not share
    # them: each call takes some from this list (taking and giving back are atomic) and makes some if there are none.
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
            # A thread that used nothing but torch's caching allocator so far has no context yet.
            lib.cuCtxSetCurrent(context)
            code = call(arguments.config_ref, function, arguments.params, None)
        free.append(arguments)
        if code:
            _check(lib, code, f"launching {kernel.entry!r}")

    return _through_torch(run, function.value or 0, kernel, grid, extent0) or run


@dataclass(frozen=True)
class Direct:
    """A launch through torch in parts, for code that spells it out: ``call(*head, (*pointers, *tail), stream)``.

    What it refuses, with one of :data:`REFUSED`, goes to ``general``.
    """

    call: Callable[..., None]
    head: tuple[Any, ...]
    tail: tuple[int, ...]
    general: Launch


REFUSED = (RuntimeError, TypeError, ValueError)


def _through_torch(general: Launch, function: int, kernel: Kernel, grid: int, extent0: int) -> Launch | None:
    """The same launch through the launcher that Inductor uses for its own cubins, which is C++ where ours is ctypes.

    None where this torch has none, it has no room for the arguments, or ``AUTOTUNE_LAUNCHER=ctypes``. Whatever it
    refuses (a thread without a context, say) goes to ``general``, whose errors are ours. Measured on an H200 host in
    turns with ctypes: 5 to 15% less host time a call.
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

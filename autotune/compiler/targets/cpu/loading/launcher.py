"""Compiled CPU kernels, kept on disk by ``cache``, and the launch over OpenMP threads.

Threads are those of the OpenMP runtime that PyTorch has loaded already (``GOMP_parallel``, which GNU's, LLVM's and
Intel's runtimes all export): its workers are warm after any torch operator, nothing is oversubscribed, and any number
of Python threads may launch at once, each with its own team. Numba's own threading layers are not used: the default
one aborts the process when entered from two threads. Without such a runtime, threads of a Python pool run the same
kernel.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from autotune.compiler.targets import intrinsic
from autotune.compiler.targets.cpu import intrinsics
from autotune.compiler.targets.cpu.loading.cache import compiled_at
from autotune.device import usable_processors

Kernel = Callable[[Sequence[int], int], None]


@dataclass(frozen=True)
class Entry:
    """Where a compiled kernel is entered, and how it is launched.

    Attributes:
        address: of a function of one argument, the address of its block (``builder``).
        threads: of a launch that is worth them.
        serial_below: value of ``n0`` under which one thread does the work sooner.
    """

    address: int
    threads: int
    serial_below: int


_lock = threading.Lock()
_compiled: dict[str, Any] = {}
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


# The OpenMP team of a forked process is gone, and waiting for it would hang: run serially there.
os.register_at_fork(after_in_child=_after_fork)


@cache
def _intrinsics() -> str:
    """What the machine code depends on besides the source: the intrinsics that it calls, as they are in this version.

    Numba's cache sees only the source file, and would go on with what an older autotune compiled.
    """
    paths = [Path(str(intrinsic.__file__)), *Path(intrinsics.__path__[0]).glob("*.py")]
    code = b"".join(path.read_bytes() for path in sorted(paths))
    return hashlib.sha256(code).hexdigest()


def _import(digest: str, path: Path) -> Any:
    name = f"autotune_cpu_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    # Numba's cache names the module a function belongs to, and imports it by that name when it loads.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_source(text: str) -> Any:
    """The compiled kernel (a Numba ``CFunc``) of generated source, from this process, the disk cache or LLVM."""
    digest = hashlib.sha256(f"{_intrinsics()}\n{text}".encode()).hexdigest()
    with _lock:  # Numba compiles one function at a time anyway
        found = _compiled.get(digest)
        if found is None:
            found = _compiled[digest] = compiled_at(f"k{digest}.py", text, lambda path: _import(digest, path).kernel)
    return found


@cache
def _gomp_parallel() -> Any:
    """``GOMP_parallel(fn, data, threads, flags)`` of the process's OpenMP runtime, or None."""
    import torch

    folder = Path(torch.__file__).parent / "lib"
    bundled = sorted(p for pattern in ("libgomp*", "libomp*", "libiomp5*") for p in folder.glob(pattern))
    for name in (None, *map(str, bundled), "libgomp.so.1", "libomp.so"):
        try:
            fn = ctypes.CDLL(name).GOMP_parallel
        except (OSError, AttributeError):
            continue
        fn.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        fn.restype = None
        return fn
    return None


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=_most_threads(), thread_name_prefix="autotune-cpu")


@cache
def _most_threads() -> int:
    """Processors this process may run on when it loads its first kernel: the pool has as many threads from then on."""
    return usable_processors()


def starter(address: int, threads: int) -> Callable[[int, int], None]:
    """A function of (address of an argument block, number of threads) that runs the function at ``address`` in each.

    Args:
        threads: of any call, at most.
    """
    run = ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)  # ctypes lets go of the GIL for the call
    gomp = _gomp_parallel() if threads > 1 else None

    def start(at: int, n: int) -> None:
        if n == 1 or _forked:
            run(at)
        elif gomp is not None:
            gomp(address, at, n, 0)
        else:
            others = [_pool().submit(run, at) for _ in range(n - 1)]
            run(at)
            for o in others:
                o.result()

    return start


def _bound(address: int, n0: int, n: int, count: int) -> Callable[[int, Sequence[int]], None]:
    """A function of (nothing, ``count`` addresses) that runs the kernel at ``address`` with ``n`` threads.

    As :func:`launcher`'s for one ``n0``, but two Python functions less: data that come and go between the calls drive
    their code out of the caches, and it then takes microseconds to come back.
    """
    form = ctypes.c_int64 * (count + 3)
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
    gomp = _gomp_parallel() if n > 1 else None
    start = starter(address, n)

    def alone(nothing: int, addresses: Sequence[int]) -> None:
        run(form(*addresses, n0, 1, 0))

    def together(nothing: int, addresses: Sequence[int]) -> None:
        if _forked:
            alone(nothing, addresses)
        elif gomp is not None:
            gomp(address, form(*addresses, n0, n, 0), n, 0)
        else:
            block = form(*addresses, n0, n, 0)
            start(ctypes.addressof(block), n)

    return alone if n == 1 else together


def launcher(text: str, threads: int, serial_below: int, rows: Callable[[int], int] | None = None) -> Kernel:
    """A callable that runs the kernel of ``text``.

    Args:
        text: generated source.
        threads: threads of a launch, the caller's included; no more than there are processors are used.
        serial_below: value of ``n0`` under which the launch is not worth waking other threads for.
        rows: pieces that the work can be cut into, as a function of ``n0``; None where there is no such limit.
    """
    kernel = compile_source(text)
    address = int(kernel.address)
    threads = min(threads, _most_threads())
    start = starter(address, threads)

    def team(n0: int) -> int:
        n = threads if n0 >= serial_below else 1
        return max(1, min(n, rows(n0))) if n > 1 and rows is not None else n

    def launch(addresses: Sequence[int], n0: int) -> None:
        n = team(n0) if not _forked else 1
        block = (ctypes.c_int64 * (len(addresses) + 3))(*addresses, n0, n, 0)
        start(ctypes.addressof(block), n)

    launch.kernel = kernel  # type: ignore[attr-defined]
    launch.bind = lambda n0, count: _bound(address, n0, team(n0), count)  # type: ignore[attr-defined]
    launch.entry = Entry(address, threads, serial_below)  # type: ignore[attr-defined]
    return launch

"""Compiled CPU kernels: kept on disk, and launched over OpenMP threads.

Threads are those of the OpenMP runtime that PyTorch has loaded already (``GOMP_parallel``, which GNU's, LLVM's and
Intel's runtimes all export): its workers are warm after any torch operator, and any number of Python threads may launch
at once, each with its own team. A team has no more threads than torch's operators (``torch.set_num_threads``,
``OMP_NUM_THREADS``), so that ranks that share a host do not oversubscribe it. Numba's own threading layers are not
used: the default one aborts the process when entered from two threads. Without such a runtime, the calling thread does
all the work.

The folder of compiled kernels has a source file for each, and Numba's cache of pickles and machine code. A user with
write access to the folder can run code as every user who loads a kernel from it. So only the owner has access to a new
folder, and a folder of another user is not used.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import importlib.util
import os
import shutil
import struct
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from autotune.compiler import targets
from autotune.compiler.targets.cpu import intrinsics
from autotune.device import usable_processors
from autotune.errors import UserError
from autotune.files import cache_folder, code_digest, make_own

TAIL = 3
"""Words of an argument block after the addresses: extent of axis 0, threads, counter."""


class CpuKernel:
    """A compiled kernel: ``kernel(addresses, n0)`` runs it.

    Args:
        text: generated source.
        threads: threads of a launch, the caller's included; no more than there are processors are used.
        serial_below: value of ``n0`` under which the launch is not worth waking other threads for.
        rows: pieces that the work can be split into, as a function of ``n0``; None without such a limit.

    Attributes:
        compiled: Numba's ``CFunc``.
        address: of a function of one argument, the address of its block (``builder``).
    """

    def __init__(self, text: str, threads: int, serial_below: int, rows: Callable[[int], int] | None = None) -> None:
        self.compiled = compile_source(text)
        self.address = int(self.compiled.address)
        self.threads, self.serial_below = min(threads, _most_threads()), serial_below
        self._rows, self._start = rows, starter(self.address, self.threads)

    def __call__(self, addresses: Sequence[int], n0: int) -> None:
        n = self._team(n0)
        n = 1 if _forked or n == 1 else min(n, _torch_threads()())
        block = (ctypes.c_int64 * (len(addresses) + TAIL))(*addresses, n0, n, 0)
        self._start(ctypes.addressof(block), n)

    def _team(self, n0: int) -> int:
        n = self.threads if n0 >= self.serial_below else 1
        return max(1, min(n, self._rows(n0))) if n > 1 and self._rows is not None else n

    def bind(self, n0: int, count: int) -> Callable[[int, Sequence[int]], None]:
        """A function of (nothing, ``count`` addresses) that runs the kernel for one ``n0``.

        It saves two Python function calls. Data accessed between the calls evict their code from the caches, and
        reloading it takes microseconds.
        """
        address, n = self.address, self._team(n0)
        blocks = Blocks(count + TAIL)
        take, fill, give = blocks.take, blocks.fill, blocks.give
        run = ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)
        gomp: Any = _gomp_parallel() if n > 1 else None
        allowed: Any = _torch_threads() if n > 1 else None

        def alone(nothing: int, addresses: Sequence[int]) -> None:
            words, at = block = take()
            fill(words, 0, *addresses, n0, 1, 0)
            run(at)
            give(block)

        def together(nothing: int, addresses: Sequence[int]) -> None:
            team = 1 if _forked else min(n, allowed())
            if team == 1:
                alone(nothing, addresses)
            else:
                words, at = block = take()
                fill(words, 0, *addresses, n0, team, 0)
                gomp(address, at, team, 0)
                give(block)

        return alone if gomp is None else together


class Blocks:
    """Argument blocks of a launch, each for one call at a time. To make one takes longer than to fill an old one: 1 us
    for a kernel of a few tensors, 40 us for 40 kernels in a launch.

    Args:
        words: of 64 bits in a block.

    Attributes:
        fill: writes words to a block, from a byte of it on.
        give: takes back a block that no thread uses any more.
    """

    def __init__(self, words: int) -> None:
        self._form, self._free = ctypes.c_int64 * words, list[tuple[Any, int]]()
        self.fill, self.give = struct.Struct(f"{words}q").pack_into, self._free.append

    def take(self) -> tuple[Any, int]:
        """A block and its address."""
        try:
            return self._free.pop()
        except IndexError:
            made = self._form()
            return made, ctypes.addressof(made)


def starter(address: int, threads: int) -> Callable[[int, int], None]:
    """A function of (address of an argument block, number of threads) that runs the function at ``address`` in each.

    Args:
        threads: the most threads of any call.
    """
    run = ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)  # ctypes releases the GIL for the call
    gomp: Any = _gomp_parallel() if threads > 1 else None
    allowed: Any = _torch_threads() if threads > 1 else None

    def start(at: int, n: int) -> None:
        team = 1 if n == 1 or gomp is None or _forked else min(n, allowed())
        if team == 1:
            run(at)
        else:
            gomp(address, at, team, 0)

    return start


_lock = threading.Lock()
_compiled: dict[str, Any] = {}
_forked = False


def _after_fork() -> None:
    global _forked, _lock
    _forked, _lock = True, threading.Lock()


# The threads of a forked process are gone. Waiting for its OpenMP team or for the lock would hang: run serially there.
os.register_at_fork(after_in_child=_after_fork)


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
    # Numba's cache depends on the source file alone, and would reuse the code of another version's intrinsics.
    of_intrinsics = code_digest(Path(str(targets.__file__)), Path(intrinsics.__path__[0]))
    digest = hashlib.sha256(f"{of_intrinsics}\n{text}".encode()).hexdigest()
    with _lock:  # Numba compiles one function at a time anyway
        found = _compiled.get(digest)
        if found is None:
            found = _compiled[digest] = _compiled_at(f"k{digest}.py", text, lambda path: _import(digest, path).kernel)
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
def _torch_threads() -> Callable[[], int]:
    """The function that gives the number of threads of torch's operators in the calling thread; it takes 40 ns."""
    import torch

    return torch.get_num_threads


@cache
def _most_threads() -> int:
    """The number of processors available when the process loads its first kernel."""
    return usable_processors()


# ---- the folder ----------------------------------------------------------------------------------------------------


def _compiled_at(name: str, text: str, load: Callable[[Path], Any]) -> Any:
    """The result of ``load`` for the path of a file called ``name`` that holds ``text``.

    A damaged result of an earlier compilation is deleted. If the user's cache directory cannot be written, or the disk
    is full, a private folder of the process replaces it. Raises UserError if ``$AUTOTUNE_CACHE_DIR`` cannot be written,
    or belongs to another user.
    """
    folder = cache_folder("cpu")
    try:
        _own(folder)
        return _load(folder, name, text, load)
    except OSError as e:
        if os.environ.get("AUTOTUNE_CACHE_DIR"):
            why = e.strerror or str(e)
            raise UserError(f"AUTOTUNE_CACHE_DIR: cannot write {folder} ({why}): set it to a writable folder") from e
        return _load(_private_dir(), name, text, load)


def _load(folder: Path, name: str, text: str, load: Callable[[Path], Any]) -> Any:
    path = folder / name
    _write_once(path, text)
    try:
        return load(path)
    except OSError:
        raise
    except Exception:  # a damaged pickle raises anything
        if not _forget(path):
            raise
    return load(path)


def _forget(path: Path) -> bool:
    """Delete the compiled code of a source file; return False if there was none."""
    from numba import config

    found = list((path.parent / "__pycache__").glob(f"{path.stem}.*"))
    if config.CACHE_DIR:
        found += Path(config.CACHE_DIR).glob(f"*/{path.stem}.*")
    for file in found:
        file.unlink(missing_ok=True)
    return bool(found)


def _own(folder: Path) -> None:
    """As :func:`make_own`.

    Raises:
        UserError: another user's, where the user has named it.
        PermissionError: another user's, where it is the default one.
    """
    try:
        make_own(folder)
    except PermissionError as e:
        if e.errno is not None:
            raise
        if os.environ.get("AUTOTUNE_CACHE_DIR"):
            raise UserError(f"AUTOTUNE_CACHE_DIR: {e}: set it to a folder of your own") from e
        warnings.warn(f"autotune: {e}: each process compiles its kernels again", stacklevel=2)
        raise


def _write_once(path: Path, text: str) -> None:
    """Create ``path`` with ``text`` unless it exists.

    An existing good file is never replaced: Numba's cache depends on its modification time, so a second writer would
    invalidate the compiled code of the first.
    """
    with contextlib.suppress(FileNotFoundError):
        if path.read_bytes() == text.encode():
            return
        path.unlink()  # cut short or tampered with
    fd, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(fd, "w") as f:
            f.write(text)
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            os.replace(temporary, path)
            return
    finally:
        Path(temporary).unlink(missing_ok=True)


@cache
def _private_dir() -> Path:
    """A private folder of the process, for machines without a writable cache directory (mostly containers)."""
    folder = tempfile.mkdtemp(prefix="autotune-cpu-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)

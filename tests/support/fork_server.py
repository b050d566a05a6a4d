"""A process that has imported what commands and workers import, and forks one of them on request.

:mod:`tests.support.forks` starts it and requests forks. It has no threads, since these do not survive a fork.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import os
import random
import runpy
import signal
import socket
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any, NoReturn
from unittest import mock

_PRELOADED = (
    "numba.core.compiler",
    "numba.np.arraymath",
    "optuna",
    "psycopg",
    "rich.progress",
    "scipy.special",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.repro.after_dynamo",
    "torch._inductor.bounds",
    "torch._inductor.choices",
    "torch._inductor.codegen.memory_planning",
    "torch._inductor.compile_fx",
    "torch._inductor.cpp_builder",
    "torch._inductor.fx_passes.freezing_patterns",
    "torch._inductor.fx_passes.mkldnn_fusion",
    "torch.utils.cpp_extension",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "autotune.cli.app",
    "autotune.compiler.assemble",
    "autotune.compiler.capture.attention",
    "autotune.domains.fusion.bench",
    "autotune.domains.fusion.domain",
    "autotune.runtime.backend",
    "autotune.runtime.inductor.region_op",
    "autotune.store.connection.migrate",
    "autotune.store.store",
    "autotune.tuner.context",
    "autotune.tuner.dealing",
    "tests.support.brief",
    "tests.support.forks",
)
"""What takes a process seconds to import."""

_SPAWN_NOTHING = ("autotune.measure.", "autotune.domains.c3.measuring.rank_server")
"""Programs that start no Python processes, and so need no server of their own."""

_installed: list[str] = []  # where modules are found without PYTHONPATH


def main(descriptor: int, many: bool) -> None:
    """Serve the requests that come through a socket; in a forked process, run its program.

    Args:
        many: whether forks are so many that it pays to make them cheap.
    """
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    _installed.extend(p for p in sys.path if p and p not in given)
    _preload(many)
    if many:
        _take_huge_pages()
    _finish(_serve(socket.socket(fileno=descriptor)))


def _preload(many: bool) -> None:
    gc.disable()
    for name in _PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):  # the processes that need it report it
            importlib.import_module(name)
    from numba.core.registry import cpu_target
    from torch._inductor.codegen.common import init_backend_registration

    from tests.support.lean import compile_lean

    importlib.import_module("tqdm").tqdm.monitor_interval = 0  # or it has a thread; optuna has it, torch uses it
    init_backend_registration()
    compile_lean()
    cpu_target.typing_context.refresh()  # saves each CPU kernel's process 0.15 seconds
    cpu_target.target_context.refresh()
    if many:
        _compile_once()
    for made in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        made.atexit = False  # a process need not free torch's operators at its end, a third of a fork's time
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # a tenth of the time of those that compile
    gc.enable()


def _compile_once() -> None:
    """Have Dynamo and Inductor look up once what they look up in the first step that a process compiles.

    Inductor makes patterns of attention then, hashes torch's files, and looks for the module of each function: 0.4
    CPU seconds. g++ runs later.
    """
    import torch
    import torch._dynamo.utils
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import torch_key

    torch_key()
    # No call here may start a thread, which a fork would lack: no kernel, and no autograd, which starts one for each
    # kind of device that torch was built for. After that autograd refuses to work in any fork. A step with a backward
    # pass still finds nine tenths of its look-ups cached.
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Softmax(-1)), torch.ones(2, 8)
    with (
        torch.no_grad(),
        mock.patch.object(AsyncCompile, "cpp_pybinding", return_value=lambda *_: None) as kernel,
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        torch.compile(model)(x)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    _name_header(*kernel.call_args.args)


def _name_header(*kernel: Any) -> None:
    """Find out which precompiled header a kernel is compiled with, which reads all that it includes: 0.2 CPU seconds.

    Whoever compiles first makes the header still, and all others wait for that.
    """
    from torch._inductor import codecache

    cache = codecache.CppPythonBindingsCodeCache
    with mock.patch.object(codecache, "_worker_compile_cpp") as compiled:
        cache.load_pybinding_async(*kernel)
    cache.cache_clear()
    ((lock, builders),) = (call.args for call in compiled.call_args_list)
    named, header = codecache._precompile_header, builders[0].get_target_file_path()

    @functools.cache
    def wait() -> None:
        codecache._worker_compile_cpp(lock, builders)

    def precompile(*given: Any, **options: Any) -> str:
        if f"{(path := named(*given, **options))}.gch" == header:
            wait()
        return path

    codecache._precompile_header = precompile  # type: ignore[assignment]


_HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25


def _take_huge_pages() -> None:
    """Have the memory in pages of 2 MiB, where the kernel can: a fork copies the table of pages, and frees it again.

    It takes a second, and a fork 5 ms of processor time instead of 20.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with open("/proc/self/maps") as file:
        maps = [line.split() for line in file]
    for place, access, _, _, _, *name in maps:
        if access == "rw-p" and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in place.split("-"))
            for page in range(-(-begin // _HUGE_PAGE) * _HUGE_PAGE, end - _HUGE_PAGE + 1, _HUGE_PAGE):
                madvise(page, _HUGE_PAGE, _MADV_COLLAPSE)  # what cannot be collapsed stays as it is


def _serve(requests: socket.socket) -> Callable[[], None]:
    """Fork a process for each request. Returns in a forked process only: what that has to run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        request, standard = _receive(requests)
        begin, let_begin = os.pipe()
        answer, tell = os.pipe()
        if (between := os.fork()) == 0:
            if program := os.fork():
                os.write(tell, program.to_bytes(8, "little"))
                os._exit(0)
            requests.close()
            for fd in (let_begin, answer, tell):
                os.close(fd)
            os.read(begin, 1)  # ends when the process between is gone: who asked is the parent now
            os.close(begin)
            return _become(request, standard)
        os.close(tell)
        pid = os.read(answer, 8) or bytes(8)  # none, if the system refused the second process
        os.waitpid(between, 0)
        for fd in (begin, let_begin, answer, *standard):
            os.close(fd)
        requests.sendall(pid)


def _receive(requests: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request, and the standard input, output and error of the process to be."""
    fds = array.array("i")
    try:
        head, ancillary, _, _ = requests.recvmsg(8, socket.CMSG_SPACE(3 * fds.itemsize))
    except ConnectionResetError:  # killed before it read an answer
        head = b""
    if not head:
        os._exit(0)  # who asked is gone
    for _, _, payload in ancillary:
        fds.frombytes(payload)
    left, text = int.from_bytes(head, "little"), b""
    while len(text) < left:
        text += requests.recv(left - len(text))
    return json.loads(text), list(fds)


def _become(request: dict[str, Any], standard: list[int]) -> Callable[[], None]:
    """Turn this process into a new interpreter, except for imported modules."""
    from tests.support import brief, forks

    if request["brief"]:
        brief.measure_briefly()  # as tests/conftest.py does in processes of pytest
    if request["session"]:
        os.setsid()
    args: list[str] = request["args"]
    leaf = args[0] == "-m" and args[1].startswith(_SPAWN_NOTHING)
    forks.adopt(None if leaf else forks.Server(*_own_server(standard)))
    for number, fd in enumerate(standard):
        os.dup2(fd, number)
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    _set_threads()
    os.chdir(request["cwd"])
    os.sched_setaffinity(0, request["processors"])
    tempfile.tempdir = None
    random.seed()
    sys.modules["numpy"].random.seed()
    _open_standard_streams()
    return _program(args, request["safe"])


def _set_threads() -> None:
    """As libraries do when they are imported."""
    import numba
    import torch
    import torch._inductor.config

    numba.config.reload_config()
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    if threads := os.environ.get("TORCHINDUCTOR_COMPILE_THREADS"):
        torch._inductor.config.compile_threads = int(threads)


def _finish(program: Callable[[], None]) -> NoReturn:
    """Run it, and end without taking all modules apart, which costs half a second."""
    try:
        program()
        code: Any = 0
    except SystemExit as end:
        code = end.code or 0
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except Exception:  # an interpreter prints it too, and ends with its code: an executor's pipe may close meanwhile
        traceback.print_exc()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def _own_server(standard: list[int]) -> tuple[socket.socket, Callable[[], int]]:
    """Fork a server for this process's later children, while it has no threads: its socket, and a wait for its end."""
    ours, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        ours.close()
        for fd in standard:
            os.close(fd)
        _finish(_serve(theirs))
    theirs.close()
    return ours, functools.cache(lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _open_standard_streams() -> None:
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc] # noqa: SIM115
    out: io.TextIOWrapper
    if os.environ.get("PYTHONUNBUFFERED"):
        raw = open(1, "wb", 0, closefd=False)  # noqa: SIM115
        out = io.TextIOWrapper(raw, "utf-8", write_through=True)  # type: ignore[arg-type]
    else:
        out = open(1, "w", 1 if os.isatty(1) else -1, encoding="utf-8", closefd=False)  # noqa: SIM115
    err = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = out  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = err  # type: ignore[misc]


def _program(args: list[str], safe: bool) -> Callable[[], None]:
    """A call with the effect of ``python *args``, or of ``python -P *args`` if it is safe."""
    path = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    first, rest = args[0], args[1:]
    begin = {"-m": os.getcwd(), "-c": ""}.get(first, os.path.dirname(os.path.abspath(first)))
    sys.path[:] = [*([] if safe else [begin]), *path, *(p for p in _installed if p not in path)]
    if first == "-m":
        sys.argv = rest
        return lambda: _run_module(rest[0])
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        return lambda: _run(rest[0], "<string>")
    sys.argv = args
    with open(first) as file:
        text = file.read()
    return lambda: _run(text, first)


def _run_module(name: str) -> None:
    if not hasattr(sys.modules.get(name), "__path__"):
        sys.modules.pop(name, None)  # Python warns where a module that is run has been imported before
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run(text: str, path: str) -> None:
    main = sys.modules["__main__"].__dict__
    main.pop("fork_server", None)
    if path != "<string>":
        main["__file__"] = path
    exec(compile(text, path, "exec"), main)

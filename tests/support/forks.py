"""Python processes that start at once: forked from one that has imported torch, Inductor, Numba and the package.

A process of ours imports for three to eight CPU seconds, and the tests start hundreds. While :func:`installed` is in
force, ``subprocess`` answers ``[sys.executable, "-m", ...]`` with a fork of the server. The fork is a child of the
caller, with separate session, environment, folder and streams; signals, pipes and ``waitpid`` are the real ones. It may
request forks too. The processes of a run of pytest are such forks themselves. Tests of interpreters' start and end use
the fixture ``new_interpreters`` instead. A new interpreter also runs programs that check their imports
(``sys.modules``), or that have other settings of libraries in their environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests.support import ROOT

REAL = subprocess.Popen

_PR_SET_CHILD_SUBREAPER = 36

_AT_IMPORT = (
    "CUDA", "KMP_", "LANG", "LC_", "LD_", "MKL_", "NUMBA_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH", "TORCH", "TRITON",
)  # fmt: skip
_LATER = (
    "CUDA_DEVICE_MAX_CONNECTIONS", "PYTHONBREAKPOINT", "PYTHONPATH", "PYTHONUNBUFFERED", "TORCHELASTIC_",
    "TORCHINDUCTOR_CACHE_DIR", "NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE",
    "TORCHINDUCTOR_COMPILE_THREADS", "TORCH_NCCL_",
)  # fmt: skip
"""Variables that libraries read when they are imported, and those among them that are read again, or by a fork."""


class ForkError(RuntimeError):
    """The server forked no process."""


class Server:
    """This process's end of a server. Starts with the first request."""

    def __init__(
        self,
        requests: socket.socket | None = None,
        wait: Callable[[], int] | None = None,
        tests: Path | None = None,
    ) -> None:
        self._requests = requests
        self._wait = wait
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._environment = dict(os.environ)
        self.tests = tests

    def serves(self, env: Mapping[str, str]) -> bool:
        """Return True if the server can fork a process with this environment."""
        return os.getpid() == self._owner and _settings(env) == _settings(self._environment)

    def fork(self, request: dict[str, Any], standard: Sequence[int]) -> int:
        """The number of a new process, which is a child of this one.

        Raises:
            ForkError: the server has ended, or the system refused it a process.
        """
        text = json.dumps(request).encode()
        with self._lock:
            requests = self._requests = self._requests or self._start()
            try:
                with _adopting():
                    socket.send_fds(requests, [len(text).to_bytes(8, "little")], list(standard))
                    requests.sendall(text)
                    answer = requests.recv(8, socket.MSG_WAITALL)
            except ConnectionError:
                answer = b""
            if pid := int.from_bytes(answer, "little"):
                return pid
            how = "got no process from the system" if answer else f"ended with exit code {self._wait and self._wait()}"
            raise ForkError(f"The tests' fork server {how}. Standard error has its traceback.")

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        code = f"from tests.support import fork_server; fork_server.main({theirs.fileno()}, {self.tests is not None})"
        path = self._environment.get("PYTHONPATH")  # dependencies may be found by it alone
        env = {**self._environment, "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT)}
        if self.tests:
            env["TMPDIR"] = str(self.tests)
        with theirs:
            self._wait = REAL(
                [sys.executable, "-c", code], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            ).wait
        return ours

    def close(self) -> None:
        if self._requests is not None:
            assert self._wait is not None
            self._requests.close()
            self._wait()


def _settings(env: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if k.startswith(_AT_IMPORT) and not k.startswith(_LATER)}


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Be the parent of processes below whose own parent ends."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


_server: Server | None = None

_SPECIAL = ("executable", "preexec_fn", "pass_fds", "shell", "gid", "gids", "uid")
"""What only a new interpreter is given."""

_OURS = ("autotune", "benchmarks", "examples", "tests")


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Has Python programs forked, and starts all else as ever."""

    def _execute_child(self, *given: Any) -> None:
        asked = inspect.signature(super()._execute_child).bind(*given).arguments  # type: ignore[misc]
        env = os.environ if asked["env"] is None else asked["env"]
        special = any(asked[name] for name in _SPECIAL) or asked["umask"] != -1
        program = _program(asked["args"])
        if _server is None or special or program is None or not _server.serves(env):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        request = {
            "args": program.args,
            "safe": program.safe,
            "env": dict(env),
            "cwd": os.fspath(asked["cwd"] or os.getcwd()),
            "session": asked["start_new_session"],
            "brief": _server.tests is None,
            "processors": sorted(os.sched_getaffinity(0)),
        }
        streams = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        try:
            self.pid = _server.fork(request, [own if fd == -1 else fd for own, fd in enumerate(streams)])
            self._child_created = True
        finally:
            names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(asked[name] for name in names))  # type: ignore[attr-defined]


class _Program(NamedTuple):
    """A program for a fork.

    Attributes:
        args: Python's arguments without its options.
        safe: whether ``-P`` keeps the program's folder, or the working directory, out of ``sys.path``.
    """

    args: list[str]
    safe: bool


def _program(args: Any) -> _Program | None:
    """The program of a command of Python, if it is the project's or torchrun and does not inspect imports."""
    if not isinstance(args, list | tuple) or not args or args[0] != sys.executable:
        return None
    program = [os.fspath(a) for a in args[1:]]
    safe = False
    while program and program[0] in ("-u", "-P"):  # -u is torchrun's: a fork writes what it has when it ends
        safe |= program.pop(0) == "-P"
    if not program:
        return None
    how = program[0]
    if how == "-m":
        known = program[1] == "torch.distributed.run" or program[1].split(".")[0] in _OURS
    else:
        known = "sys.modules" not in program[1] if how == "-c" else not how.startswith("-")
    return _Program(program, safe) if known else None


def adopt(server: Server | None) -> None:
    """In a forked process: use this server, or none."""
    global _server
    _server = server
    subprocess.Popen = Popen if server is not None else REAL  # type: ignore[misc]


@contextlib.contextmanager
def installed(tests: Path | None = None) -> Iterator[None]:
    """Have Python processes forked. A process that is a fork itself has a server already.

    Args:
        tests: where they are processes of pytest, the temporary folder that Inductor remembers for all of them.
    """
    global _server
    _server = _server or Server(tests=tests)
    with mock.patch.object(subprocess, "Popen", Popen):
        yield
    _server.close()
    _server = None


@contextlib.contextmanager
def new_interpreters() -> Iterator[None]:
    """Have nothing forked: for tests of how interpreters start, import and end."""
    with mock.patch.object(subprocess, "Popen", REAL):
        yield

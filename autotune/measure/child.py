"""Child processes that may be killed at any time: start, frames, deadlines, and reports of their death.

A frame is a JSON object with raw bytes; nothing is ever unpickled. The child's side (:func:`serve`) is a loop that
answers frames, after safety measures (:func:`prepare`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import psutil

from autotune.measure.outcome import Blame, blame_text, one_line
from autotune.task import Artifact, Kernel

_HEADER = struct.Struct("!IQ")  # length of the JSON text, length of the bytes
_MAX_TEXT = 1 << 30
_PR_SET_PDEATHSIG = 1


def pack(message: Mapping[str, Any], blob: bytes = b"") -> bytes:
    """Return one frame. Non-finite floats use the spelling of Python's JSON, since both sides use this module."""
    text = json.dumps(message).encode()
    return _HEADER.pack(len(text), len(blob)) + text + blob


class Reader:
    """Assembles frames from the chunks read from a pipe."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> tuple[dict[str, Any], bytes] | None:
        """Return the next whole frame, or None while it is incomplete.

        Raises:
            ValueError: the stream does not consist of frames.
        """
        if len(self._buffer) < _HEADER.size:
            return None
        text_size, blob_size = _HEADER.unpack_from(self._buffer)
        if text_size > _MAX_TEXT:
            raise ValueError("a child process sent something that is not a frame")
        end = _HEADER.size + text_size + blob_size
        if len(self._buffer) < end:
            return None
        text = bytes(self._buffer[_HEADER.size : _HEADER.size + text_size])
        blob = bytes(self._buffer[_HEADER.size + text_size : end])
        del self._buffer[:end]
        message = json.loads(text)
        if not isinstance(message, dict):
            raise ValueError("a child process sent a frame that is not an object")
        return message, blob


def artifact_to_wire(artifact: Artifact) -> tuple[dict[str, Any], bytes]:
    """Return an artifact as JSON and the concatenated code of its kernels."""
    head = {
        "target": artifact.target,
        "generator": artifact.generator,
        "scratch": [list(s) for s in artifact.scratch],
        "kernels": [
            {"entry": k.entry, "launch": dict(k.launch), "resources": dict(k.resources), "size": len(k.code)}
            for k in artifact.kernels
        ],
    }
    return head, b"".join(k.code for k in artifact.kernels)


def artifact_from_wire(head: Mapping[str, Any], blob: bytes) -> Artifact:
    """Return the artifact of :func:`artifact_to_wire`'s results."""
    kernels, at = [], 0
    for k in head["kernels"]:
        size = int(k["size"])
        kernels.append(
            Kernel(entry=str(k["entry"]), code=blob[at : at + size], launch=k["launch"], resources=k["resources"])
        )
        at += size
    return Artifact(
        target=str(head["target"]),
        kernels=tuple(kernels),
        scratch=tuple((str(t), int(n)) for t, n in head["scratch"]),
        generator=str(head["generator"]),
    )


class _File(Protocol):
    def fileno(self) -> int: ...


_End = TypeVar("_End", bound=int | _File)


def ready(ends: Iterable[_End], seconds: float | None = None, event: int = select.POLLIN) -> list[_End]:
    """The descriptors that can be read, or have been closed by the other side, after ``seconds`` at most.

    ``select.select`` rejects descriptors of 1024 and above, which a program with many open files has.

    Args:
        ends: descriptors, or objects that have one.
        seconds: None waits for any time.
        event: ``select.POLLOUT`` for those that can be written.
    """
    numbers = {end if isinstance(end, int) else end.fileno(): end for end in ends}
    poll = select.poll()
    for number in numbers:
        poll.register(number, event)
    return [numbers[number] for number, _ in poll.poll(None if seconds is None else math.ceil(1e3 * seconds))]


class Link:
    """Frames to and from the parent. File descriptor 1 is redirected to stderr, so that candidates can print."""

    def __init__(self) -> None:
        self._in = os.dup(0)
        self._out = os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        self._reader = Reader()

    def send(self, message: Mapping[str, Any], blob: bytes = b"") -> None:
        data = memoryview(pack(message, blob))
        while data:
            data = data[os.write(self._out, data) :]

    def receive(self) -> tuple[dict[str, Any], bytes] | None:
        """Return the next frame, or None when the parent has closed the pipe."""
        while True:
            frame = self._reader.next()
            if frame is not None:
                return frame
            data = os.read(self._in, 1 << 20)
            if not data:
                return None
            self._reader.feed(data)


def prepare() -> None:
    """Prepare this process to die without a core dump, before others when memory runs out, and with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")  # if a candidate exhausts the memory, the kernel should kill this process
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(os.environ.get("AUTOTUNE_PARENT", os.getppid())):
        os._exit(0)  # the parent died before the line above


def serve(handle: Callable[[Link, dict[str, Any], bytes], None]) -> None:
    """Answer frames with ``handle`` until the parent closes the pipe. Does not return."""
    prepare()
    link = Link()
    code = 0
    try:
        while (frame := link.receive()) is not None:
            handle(link, *frame)
    except BrokenPipeError:
        pass
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    # Not sys.exit: a candidate may have left threads, or a device, in a state whose teardown hangs.
    sys.stderr.flush()
    os._exit(code)


_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGXCPU)
"""Signals from outside: the kernel's when memory runs out, a user's, a batch system's."""

_LOOK_S = 1.0  # between checks for SIGSTOP of a child that does not answer

_QUIET = (
    "PYTHONFAULTHANDLER", "PYTHONDEVMODE", "TORCH_LOGS", "TORCH_LOGS_OUT", "TORCH_TRACE", "TORCH_COMPILE_DEBUG",
)  # fmt: skip
"""Variables that are not inherited. Crash dumps of expected crashes would only fill the log that contains the reason,
and torch's logs, traces and debugging folders are about the user's program."""


class ChildDied(Exception):
    """The child ended; ``str(error)`` contains the signal or exit code, and its last line on stderr.

    Attributes:
        fault: the one to blame; signals of a kill from outside are never a candidate's fault.
    """

    def __init__(self, how: str, fault: Blame = Blame.CANDIDATE) -> None:
        super().__init__(how)
        self.fault = fault


class ChildSilent(Exception):
    """The deadline passed before the child answered."""


def interpreter() -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a Python process that imports what this process does.

    ``-P`` keeps the working directory out of its path: a ``queue.py`` of the user's there would replace Python's. A
    process of autotune compiles by Inductor, whatever ``AUTOTUNE_RUN`` is for the user's program, and inherits no
    variables that debug it.
    """
    environ = {k: v for k, v in os.environ.items() if k not in {"AUTOTUNE_RUN", *_QUIET}}
    paths = [path or os.getcwd() for path in sys.path if isinstance(path, str)]  # Python ignores a pathlib.Path there
    environ["PYTHONPATH"] = os.pathsep.join(paths)
    return [sys.executable, "-P"], environ


class Child:
    """``python -m module`` in its own session, with frames on its standard input and output.

    Its standard error goes to an unnamed temporary file, so that an expected crash does not reach the user's terminal.
    Without ``log``, it is inherited. The child has the same ``sys.path`` as this process. It dies with its parent, even
    one killed by SIGKILL (see :func:`autotune.measure.child.prepare`), and on Linux with the thread that started it.
    :meth:`kill` takes its descendants along.
    """

    def __init__(self, module: str, env: Mapping[str, str] | None = None, *, log: bool = True) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        words, environ = interpreter()
        environ["AUTOTUNE_PARENT"] = str(os.getpid())
        environ.update(env or {})
        self.started = time.monotonic()
        self._process = subprocess.Popen(
            [*words, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log if log else None,
            env=environ,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in = self._process.stdin.fileno()
        self._out = self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        self._reader = Reader()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, message: Mapping[str, Any], blob: bytes = b"", timeout: float = 60.0) -> None:
        """Send one frame.

        Raises:
            ChildDied: the child has ended.
            ChildSilent: it did not read the frame within ``timeout`` seconds.
        """
        data = memoryview(pack(message, blob))
        deadline = time.monotonic() + timeout
        while data:
            left = deadline - time.monotonic()
            if left <= 0 or not ready([self._in], left, select.POLLOUT):
                raise ChildSilent
            try:
                data = data[os.write(self._in, data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._epitaph() from None

    def fileno(self) -> int:
        """Return the descriptor for ``select``, readable when :meth:`poll` has data."""
        return self._out

    def poll(self) -> tuple[dict[str, Any], bytes] | None:
        """Return the next frame if it has arrived, else None; does not wait.

        Raises:
            ChildDied: the child ended, and all of its frames have been returned.
        """
        frame = self._reader.next()
        if frame is None and ready([self._out], 0.0):
            data = os.read(self._out, 1 << 20)
            if not data:
                raise self._epitaph()
            self._reader.feed(data)
            frame = self._reader.next()
        return frame

    def receive(self, deadline: float) -> tuple[dict[str, Any], bytes]:
        """Return the next frame, waiting until ``deadline`` (of ``time.monotonic``).

        Raises:
            ChildDied: the child ended before it answered.
            ChildSilent: the deadline passed.
        """
        while (frame := self.poll()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ChildSilent
            if not ready([self._out], min(left, _LOOK_S)) and self.stopped:
                raise ChildDied("was stopped by a signal from outside", Blame.LACK)
        return frame

    @property
    def stopped(self) -> bool:
        """True if the child was stopped (SIGSTOP), which makes a missed deadline meaningless."""
        with contextlib.suppress(psutil.Error):
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        return False

    def last_words(self) -> str:
        """Return the last line that the child wrote to its standard error."""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), 8192, max(0, size - 8192)).decode(errors="replace")
        lines = [line.strip() for line in tail.splitlines() if line.strip()]
        return one_line(lines[-1]) if lines else ""

    def interrupt(self) -> None:
        """Send SIGINT, which a child without a handler ignores."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGINT)

    def terminate(self) -> None:
        """Kill the child and every process that it started; its pipes stay open. Never fails."""
        victims: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            victims = psutil.Process(self.pid).children(recursive=True)
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        for victim in victims:
            with contextlib.suppress(psutil.Error):
                victim.kill()

    def kill(self) -> None:
        """Terminate the child, wait for its end and close the pipes. Never fails, and may be called again."""
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=30)
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _epitaph(self) -> ChildDied:
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return ChildDied("closed its pipe and hung")
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            how = f"killed by {name}"
            if -code == signal.SIGKILL:
                how += " (by the kernel, for lack of memory, if nobody else did it)"
        else:
            how = f"exited with code {code}"
        words = self.last_words()
        fault = Blame.LACK if -code in _OUTSIDE else blame_text(words) if code > 0 else Blame.CANDIDATE
        return ChildDied(f"{how}: {words}" if words else how, fault)

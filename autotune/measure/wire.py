"""Frames between the search and its child processes: a JSON object and raw bytes. Nothing is ever unpickled.

The child's side (:func:`serve`) is a loop that answers frames, after safety measures (:func:`prepare`). The parent's
side is :mod:`autotune.measure.child`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

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
    if sys.platform == "linux":
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

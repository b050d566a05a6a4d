"""Frames between the search and its child processes: a JSON object and raw bytes. Nothing is ever unpickled."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from autotune.task import Artifact, Kernel

_HEADER = struct.Struct("!IQ")  # length of the JSON text, length of the bytes
_MAX_TEXT = 1 << 30


def pack(message: Mapping[str, Any], blob: bytes = b"") -> bytes:
    """One frame. Non-finite floats travel as Python's JSON spells them; both ends are this module."""
    text = json.dumps(message).encode()
    return _HEADER.pack(len(text), len(blob)) + text + blob


class Reader:
    """Puts frames together from whatever pieces a pipe hands over."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> tuple[dict[str, Any], bytes] | None:
        """The next whole frame, or None while it is incomplete.

        Raises:
            ValueError: the stream is not one of frames.
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
    """An artifact as JSON and the code of its kernels, one after the other."""
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
    """The inverse of :func:`artifact_to_wire`."""
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

"""Measuring in turns: several processes prepare contenders side by side, one at a time times something on the device.

Compiling peers takes most of a benchmark, and most of that is one processor's work. Side by side it takes a fraction,
provided that nobody's timing meets another's kernels: what is measured here, and what Inductor measures to choose among
its own kernels, is done under the lock that searches hold as well (:mod:`autotune.measure.timing.quiet`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from autotune.measure.timing.quiet import device_lock

_METHODS = ("benchmark", "benchmark_gpu", "benchmark_gpu_with_cuda_graph")


class Turns:
    """The lock of a device for a whole process: whoever asks while one of its threads holds it goes on at once.

    A thread must not wait for another of its process, which may be waiting for it: autograd runs a backward pass in a
    thread of its own, and a step that is recompiled while it is timed has Inductor time kernels there.

    Args:
        device: "cuda:N" or "cpu".
        timeout_s: as of ``measure.timing.quiet.device_lock``.

    Attributes:
        waited_s: seconds spent waiting for other processes so far.
    """

    def __init__(self, device: str, timeout_s: float) -> None:
        self.device, self.timeout_s = device, timeout_s
        self._counting = threading.Lock()
        self._depth = 0
        self._held = contextlib.ExitStack()
        self.waited_s = 0.0

    @contextlib.contextmanager
    def mine(self) -> Iterator[None]:
        """While open, no other process measures on the device."""
        with self._counting:
            if self._depth == 0:
                begin = time.monotonic()
                self._held.enter_context(device_lock(self.device, self.timeout_s))
                self.waited_s += time.monotonic() - begin
            self._depth += 1
        try:
            yield
        finally:
            with self._counting:
                self._depth -= 1
                if self._depth == 0:
                    self._held.close()


@contextlib.contextmanager
def inductor_takes_turns(turns: Turns) -> Iterator[None]:
    """While open, what Inductor times in this process it times with ``turns`` held; what it compiles, without."""
    from torch._inductor.runtime.benchmarking import benchmarker

    kind = type(benchmarker)
    before = {name: kind.__dict__.get(name) for name in _METHODS}
    for name in _METHODS:
        if (method := getattr(kind, name, None)) is not None:
            setattr(kind, name, _in_turn(method, turns))
    try:
        yield
    finally:
        for name, method in before.items():
            if method is not None:
                setattr(kind, name, method)
            elif name in kind.__dict__:
                delattr(kind, name)


def _in_turn(method: Callable[..., Any], turns: Turns) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with turns.mine():
            return method(*args, **kwargs)

    return call

"""Tools for timing contenders in turn: device lock, templates in threads, capture checks, differences.

Several processes prepare contenders in parallel, and only one at a time measures on the device. Compilation takes most
of a benchmark's time, mostly on one processor, so parallel compilation takes a fraction of it. Measurements must not
overlap with another process's kernels. The measurements of this module and Inductor's autotuning therefore hold the
same lock as searches (:mod:`autotune.measure.quiet`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autotune.measure.quiet import device_lock

_METHODS = ("benchmark", "benchmark_gpu", "benchmark_gpu_with_cuda_graph")
_PIECE = 1 << 24
"""Elements compared at a time, which avoids an fp64 copy of a large tensor."""


class ProcessLock:
    """Device lock of a whole process: while one thread holds it, other threads of the process enter without waiting.

    Threads of one process must not block each other, since the holder may wait for the other thread. Autograd runs a
    backward pass in a separate thread, and during a recompilation within a timed step, Inductor times kernels there.

    Args:
        device: "cuda:N" or "cpu".
        timeout_s: see ``measure.timing.quiet.device_lock``.

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
    def exclusive(self) -> Iterator[None]:
        """Return a context in which no other process measures on the device."""
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
def inductor_takes_lock(lock: ProcessLock) -> Iterator[None]:
    """Return a context in which Inductor holds ``lock`` while it times kernels, but not while it compiles."""
    from torch._inductor.runtime.benchmarking import benchmarker

    kind = type(benchmarker)
    before = {name: kind.__dict__.get(name) for name in _METHODS}
    for name in _METHODS:
        if (method := getattr(kind, name, None)) is not None:
            setattr(kind, name, _locked(method, lock))
    try:
        yield
    finally:
        for name, method in before.items():
            if method is not None:
                setattr(kind, name, method)
            elif name in kind.__dict__:
                delattr(kind, name)


def _locked(method: Callable[..., Any], lock: ProcessLock) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with lock.exclusive():
            return method(*args, **kwargs)

    return call


def room_for(contenders: int) -> contextlib.AbstractContextManager[object]:
    """Return a context in which Dynamo's recompile limit applies to each contender separately.

    Dynamo counts recompilations by code object, which the contenders share. With the default limit, later contenders
    could fall back to eager.
    """
    config: Any = torch._dynamo.config
    found: contextlib.AbstractContextManager[object] = config.patch(recompile_limit=contenders * config.recompile_limit)
    return found


@contextlib.contextmanager
def without_graph_caches() -> Iterator[None]:
    """Return a context in which Inductor uses no cached graphs, since cached ones do not count missed regions."""
    from torch._functorch import config as aot_config
    from torch._inductor import config

    with config.patch(fx_graph_cache=False), aot_config.patch(enable_autograd_cache=False):
        yield


class Watched:
    """Contender wrapper that detects a refused capture: a plain call after a call within a capture."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call, self.tried, self.refused = call, False, False

    def __call__(self) -> object:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self.tried = True
        elif self.tried:
            self.refused = True
        return self.call()


@contextlib.contextmanager
def templates_in_threads(wanted: bool = True) -> Iterator[None]:
    """Let Inductor compile matrix-product templates in threads of this process; its choices are the same.

    Results of Inductor's compile processes (torch 2.11) do not reach this process for templates. Each of a product's
    twenty templates is then compiled again when it is timed, one after the other: 10 s per product, against 2 s in
    threads. All other kernels stay in the compile processes, since compiling them in this process took most of the
    time.

    Args:
        wanted: False changes nothing.
    """
    if not wanted:
        yield
        return
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    AsyncCompile.wait_pool_ready()  # until the pool is ready, all kernels compile here, one after the other
    begin = AlgorithmSelectorCache.make_precompile_fn

    def in_threads(*args: Any, **kwargs: Any) -> Any:
        with config.patch(compile_threads=1):
            return begin(*args, **kwargs)

    # Not with config.patch, which is local to a thread: autograd's threads compile backward passes.
    displays = {name: getattr(config, name) for name in ("autotune_num_choices_displayed",) if hasattr(config, name)}
    AlgorithmSelectorCache.make_precompile_fn = in_threads  # type: ignore[method-assign]
    for name in displays:
        setattr(config, name, 0)  # suppresses a table for each product
    try:
        yield
    finally:
        AlgorithmSelectorCache.make_precompile_fn = begin  # type: ignore[method-assign]
        for name, value in displays.items():
            setattr(config, name, value)


def difference(got: Any, want: Any) -> float:
    """Return the root mean square of the difference of all floating-point results, relative to that of ``want``.

    A None gradient counts as zeros, since compilers return either for a parameter without contributions. Equal
    infinities, and NaN at the same position, are no difference.

    Returns:
        Infinity if the results differ from ``want`` in number, shape, type or the positions of non-finite elements.
    """
    ours, theirs = pytree.tree_leaves(got), pytree.tree_leaves(want)
    if len(ours) != len(theirs):
        return float("inf")
    apart = whole = 0.0
    for a, b in zip(ours, theirs, strict=True):
        known = b if isinstance(b, Tensor) else a
        if not isinstance(known, Tensor) or not (known.is_floating_point() or known.is_complex()):
            continue
        x, y = (torch.zeros_like(known) if t is None else t for t in (a, b))
        if not isinstance(x, Tensor) or not isinstance(y, Tensor) or x.shape != y.shape or x.dtype != y.dtype:
            return float("inf")
        for p, q in zip(_pieces(x), _pieces(y), strict=True):
            off = torch.where((p == q) | (p.isnan() & q.isnan()), 0.0, p - q)
            apart += float(off.square().sum())
            whole += float(torch.where(q.isfinite(), q, 0.0).square().sum())
    ratio = (apart / max(whole, 1e-60)) ** 0.5
    return ratio if ratio == ratio else float("inf")


def largest(results: Any) -> float | None:
    """Return the largest magnitude in the first floating-point result: the loss, in training.

    None without such a result, or if it is empty.
    """
    for t in pytree.tree_leaves(results):
        if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()):
            return float(t.abs().max()) if t.numel() else None
    return None


def _pieces(t: Tensor) -> Iterator[Tensor]:
    """Yield a tensor's elements as fp64, :data:`_PIECE` at a time; complex numbers as real and imaginary parts."""
    t = t.detach()
    t = t.to_dense() if t.layout is not torch.strided else t
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    flat = t.reshape(-1)
    for begin in range(0, len(flat), _PIECE):
        yield flat[begin : begin + _PIECE].double()

"""Tools to run contenders in turn: a turn on the device, templates in threads, watched captures, differences.

Several processes prepare contenders side by side, and one at a time times something on the device. Compiling peers
takes most of a benchmark, and most of that is one processor's work. Side by side it takes a fraction, provided that
nobody's timing meets another's kernels: what is measured here, and what Inductor measures to choose among its own
kernels, is done under the lock that searches hold as well (:mod:`autotune.measure.timing.quiet`).
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

from autotune.measure.timing.quiet import device_lock

_METHODS = ("benchmark", "benchmark_gpu", "benchmark_gpu_with_cuda_graph")
_PIECE = 1 << 24
"""Elements that are compared at a time, so that doubles of a large tensor need not lie in memory beside it."""


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


def room_for(contenders: int) -> contextlib.AbstractContextManager[object]:
    """While open, Dynamo compiles a function as often for each of the contenders as it would for one.

    It counts by code, which they share: the later one would be left to run as it is where the earlier took all.
    """
    config: Any = torch._dynamo.config
    found: contextlib.AbstractContextManager[object] = config.patch(recompile_limit=contenders * config.recompile_limit)
    return found


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
    """While open, Inductor takes no graph from its caches: of a cached one, nothing that is missed is counted."""
    from torch._functorch import config as aot_config
    from torch._inductor import config

    with config.patch(fx_graph_cache=False), aot_config.patch(enable_autograd_cache=False):
        yield


class Watched:
    """A contender that notices when it could not be captured: it is called plainly after it was called in a capture."""

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
    """Let Inductor compile the templates of matrix products in threads of this process; what it chooses is the same.

    In its compiling processes (torch 2.11) their results do not reach this one: each of the twenty of a product is
    compiled again when it is timed, one after the other, 10 s a product where threads take 2. All its other kernels
    stay with the processes: compiled in this one they were most of the time.

    Args:
        wanted: False changes nothing.
    """
    if not wanted:
        yield
        return
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    AsyncCompile.wait_pool_ready()  # until it is, everything compiles here, one kernel after the other
    begin = AlgorithmSelectorCache.make_precompile_fn

    def in_threads(*args: Any, **kwargs: Any) -> Any:
        with config.patch(compile_threads=1):
            return begin(*args, **kwargs)

    # Not by config.patch, which other threads do not see: autograd's compile backward passes.
    told = {name: getattr(config, name) for name in ("autotune_num_choices_displayed",) if hasattr(config, name)}
    AlgorithmSelectorCache.make_precompile_fn = in_threads  # type: ignore[method-assign]
    for name in told:
        setattr(config, name, 0)  # a table for each product otherwise
    try:
        yield
    finally:
        AlgorithmSelectorCache.make_precompile_fn = begin  # type: ignore[method-assign]
        for name, value in told.items():
            setattr(config, name, value)


def difference(got: Any, want: Any) -> float:
    """Root mean square of the difference of all floating results over that of ``want``'s.

    A gradient that is None counts as zeros, since compilers differ in which they make of one that nothing contributes
    to. Equal infinities, and NaN in the same place, are no difference.

    Returns:
        Infinity where results are of another number, shape or type, or finite in other places than ``want``'s.
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
    """Largest magnitude in the first floating result: the loss, in training. None if there is none, or it is empty."""
    for t in pytree.tree_leaves(results):
        if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()):
            return float(t.abs().max()) if t.numel() else None
    return None


def _pieces(t: Tensor) -> Iterator[Tensor]:
    """The elements of a tensor as doubles, :data:`_PIECE` at a time; complex numbers as their parts."""
    t = t.detach()
    t = t.to_dense() if t.layout is not torch.strided else t
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    flat = t.reshape(-1)
    for begin in range(0, len(flat), _PIECE):
        yield flat[begin : begin + _PIECE].double()

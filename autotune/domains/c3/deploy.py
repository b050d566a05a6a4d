"""``autotune.overlap``: run a computation and a collective concurrently on the caller's tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from autotune.domains.c3.caller import (
    NAMES,
    Args,
    Buffers,
    Kwargs,
    attach,
    known_as,
    records,
    shapes_of,
    stored_as,
)
from autotune.domains.c3.group import deploy_group
from autotune.domains.c3.match import C3Match
from autotune.domains.c3.ready import Ready, decide, make_ready
from autotune.domains.c3.scenario import COLLECTIVES, REDUCING, Compute, Gemm, Program, Scenario, parse_gemm
from autotune.errors import UserError

Shape = Gemm | str | tuple[int, int, int]
Result = tuple[Any, Tensor]


def overlap(
    compute: Callable[..., Any] | Shape,
    collective: str,
    *,
    like: Tensor | None = None,
    inputs: Any = None,
    gemm: Shape | None = None,
    program: Program | str | None = None,
    group: dist.ProcessGroup | None = None,
    differentiable: bool = False,
    db: str | None = None,
    strict: bool = False,
) -> Overlapped:
    """Run a computation and a collective concurrently, with the strategy that a search found for them.

    ::

        op = autotune.overlap(layer, "all_gather", like=shard, inputs=x)
        for x, shard in batches:
            y, gathered = op(x, shard)

    Every rank of the group makes the same calls in the same order.

    Args:
        compute: a callable; or the shape of a GEMM ((m, n, k), "MxNxK" or a Gemm), which is called with both matrices.
        collective: "all_gather", "all_to_all", "reduce_scatter" or "all_reduce" (sums).
        like: a tensor with the shape and dtype of this rank's input. With it, and ``inputs``, ``gemm`` or ``program``,
            buffers and streams are made at once; else in the first call.
        inputs: example inputs of ``compute`` (a tuple or list of positional ones, or a single one), for the look-up.
        gemm: the matrix product that dominates the computation's time, for the look-up. Derived automatically if
            ``compute`` is ``torch.nn.Linear``, ``torch.mm``, ``torch.matmul`` or ``F.linear``.
        program: the name under which the computation was searched, if it is no GEMM.
        group: process group; None for the default one.
        differentiable: propagate gradients from the collective's result to its input tensor.
        db: database; None for $AUTOTUNE_DB or the default file.
        strict: require exactly the current software, instead of equal minor versions of torch and CUDA.

    Raises:
        UserError: an argument is invalid; torch.distributed is not initialised.
    """
    if collective not in COLLECTIVES:
        raise UserError(f"unknown collective {collective!r}: use {', '.join(COLLECTIVES)}")
    known: Compute | None = Program(program) if isinstance(program, str) else program
    shape = gemm if callable(compute) else compute
    if shape is not None:
        known = _gemm(shape)
    run = compute if callable(compute) else _gemm(compute)
    op = Overlapped(run, collective, known, group, differentiable, db, strict, typed=isinstance(shape, Gemm))
    if like is not None and (known is not None or inputs is not None):
        op.open(inputs if inputs is not None else (), like)
    return op


def _gemm(shape: Any) -> Gemm:
    if isinstance(shape, Gemm):
        return shape
    if isinstance(shape, str):
        return parse_gemm(shape)
    try:
        m, n, k = (int(extent) for extent in shape)
    except (TypeError, ValueError):
        raise UserError(f"{shape!r} is not a computation: give a callable, or (m, n, k) of a GEMM") from None
    return Gemm(m, n, k)


class Overlapped:
    """A computation and a collective that run concurrently; made by :func:`overlap`.

    Attributes:
        match: the strategy in use and its match level. None until the tensors are known.
    """

    def __init__(
        self,
        compute: Callable[..., Any] | Gemm,
        collective: str,
        known: Compute | None,
        group: dist.ProcessGroup | None,
        differentiable: bool,
        db: str | None,
        strict: bool,
        *,
        typed: bool = False,
    ) -> None:
        self._compute, self._collective, self._known, self._group = compute, collective, known, group
        self._differentiable, self._db, self._strict, self._typed = differentiable, db, strict, typed
        self._ready: Ready | None = None
        self._busy = threading.Lock()
        untraced: Any = torch.compiler.disable  # a graph break in a compiled caller; the computation may be compiled
        self._run: Callable[..., Result] = untraced(self._run_both)

    def __repr__(self) -> str:
        if self._ready is None:
            return f"Overlapped({self._collective}, not opened)"
        return f"Overlapped({self._ready.scenario.label}: {self._ready.match.level}, {self._ready.match.label})"

    @property
    def match(self) -> C3Match | None:
        return self._ready.match if self._ready else None

    @property
    def scenario(self) -> Scenario | None:
        """The scenario of the look-up. None until the tensors are known."""
        return self._ready.scenario if self._ready else None

    @property
    def buffers(self) -> Buffers:
        """The collective's own tensors: data written to ``buffers.input`` needs no copy (call without a tensor).

        Raises:
            UserError: the tensors are unknown so far.
        """
        if self._ready is None:
            raise UserError(
                "the buffers are allocated for known tensors: give like= and inputs=, or call the overlap once"
            )
        return self._ready.buffers

    def open(self, inputs: Any, like: Tensor, *, kwargs: Kwargs | None = None) -> None:
        """Look up the scenario and make buffers and streams before the first call. A collective call.

        Args:
            inputs, kwargs: example inputs of the computation, for their shapes.
            like: a tensor with the shape and dtype of this rank's input.

        Raises:
            UserError: the tensor does not fit the collective.
        """
        if self._ready is not None:
            return
        if like.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                raise UserError(
                    "autotune.overlap allocates its buffers in the first call: call it once before the capture"
                )
            if like.device.index != torch.cuda.current_device():
                raise UserError(
                    f"the tensors are on {like.device}: call torch.cuda.set_device({like.device.index}) first"
                )
        args = _positional(inputs)
        with torch.inference_mode(False), torch.no_grad():
            group = deploy_group(self._group, like.device)
            dtype = stored_as(like.dtype, exact=self._collective in REDUCING)
            shapes = shapes_of(self._collective, tuple(like.shape), group.ranks)
            known = self._known or known_as(self._compute, args, kwargs or {})
            if isinstance(known, Gemm) and self._known is not None and not self._typed:
                types = [NAMES[t.dtype] for t in (*args, like) if isinstance(t, torch.Tensor) and t.dtype in NAMES]
                known = replace(known, dtype=types[0] if types else known.dtype)
            nbytes = like.element_size() * max(shapes.numel)
            scenario = Scenario(known, self._collective, nbytes, group.ranks, dtype)
            match = decide(scenario, group, db=self._db, strict=self._strict)
            self._ready = make_ready(self._compute, scenario, match, group, like.dtype, shapes)

    def __call__(
        self, inputs: Any = (), tensor: Tensor | None = None, *, kwargs: Kwargs | None = None, out: Tensor | None = None
    ) -> Result:
        """Run both.

        Args:
            inputs: inputs of the computation: a tuple or list of positional ones, or a single one.
            tensor: this rank's input of the collective, with the shape and dtype it was opened with; None for the
                current content of ``buffers.input``.
            kwargs: keyword inputs of the computation.
            out: a tensor of the caller to which the collective's result is copied.

        Returns:
            The computation's result, with its autograd graph; and the collective's, in ``buffers.output`` until the
            next call, or in ``out``.

        Raises:
            UserError: a tensor does not fit, or another call is in progress.
        """
        return self._run(inputs, tensor, kwargs, out)

    def _run_both(self, inputs: Any, tensor: Tensor | None, kwargs: Kwargs | None, out: Tensor | None) -> Result:
        ready = self._ready
        if ready is None:
            if tensor is None:
                raise UserError("the first call needs this rank's input tensor, unless like= was given")
            self.open(inputs, tensor, kwargs=kwargs)
            ready = self._ready
            assert ready is not None
        if not self._busy.acquire(blocking=False):
            raise UserError("an overlap runs one call at a time: make another autotune.overlap for a second call")
        try:
            args = _positional(inputs)
            ready.buffers.check(tensor, out)
            ready.buffers.fill(tensor)
            ready.compute.bind(args, kwargs or {})
            cuda = ready.group.device.type == "cuda"
            # Another thread would lack the caller's autocast state, and its hooks on tensors saved by autograd.
            stays = records(self._compute, args, kwargs or {}) or (not cuda and torch.is_autocast_enabled("cpu"))
            (ready.still if stays else ready.whole)()
            result = ready.compute.take()
            if cuda and not stays:
                _used_here(result)
        finally:
            self._busy.release()
        moved = ready.buffers.take(out)
        if self._differentiable and tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            moved = attach(tensor, moved, self._collective, ready.group.data)
        return result, moved

    def capture(self, inputs: Any = (), tensor: Tensor | None = None, *, kwargs: Kwargs | None = None) -> Captured:
        """Capture both on fixed tensors as one CUDA graph; on a CPU this is a normal call. A collective call.

        Args:
            inputs, tensor, kwargs: as of a call; replays read their contents at the time of the replay.
        """
        with torch.no_grad():
            results = self(inputs, tensor, kwargs=kwargs)  # lazily made objects must exist before a capture
            if self.buffers.input.device.type != "cuda":
                return Captured(None, lambda: self(inputs, tensor, kwargs=kwargs), results)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # NCCL's watchdog queries events from another thread, which a global capture would forbid.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                results = self(inputs, tensor, kwargs=kwargs)
            return Captured(graph, None, results)

    def close(self) -> None:
        """Free the buffers. A collective call; results of earlier calls must not be used afterwards."""
        ready, self._ready = self._ready, None
        if ready is not None:
            ready.close()


@dataclass
class Captured:
    """A repeatable call on fixed tensors; calling it returns the same as :meth:`Overlapped.__call__`."""

    graph: torch.cuda.CUDAGraph | None
    again: Callable[[], Result] | None
    results: Result

    def __call__(self) -> Result:
        if self.graph is not None:
            self.graph.replay()
            torch.autograd.graph.increment_version(self.results[1])
        elif self.again is not None:
            with torch.no_grad():
                self.results = self.again()
        return self.results


def _positional(inputs: Any) -> Args:
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)


def _used_here(result: Any) -> None:
    """Record for the allocator that the caller's stream uses tensors allocated on the strategy's stream."""
    stream = torch.cuda.current_stream()
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
            leaf.record_stream(stream)

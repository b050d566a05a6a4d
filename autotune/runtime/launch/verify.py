"""Comparing a stored kernel's results with those of the region's own operators, on the tensors of a call.

The user's operators are the reference. They round after each step, while a kernel rounds once. If the results differ by
more than the tolerance, the fp64 oracle (:mod:`autotune.ir.oracle`) decides, as in a search.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from autotune.runtime.deployment import deployment

if TYPE_CHECKING:
    from autotune.ir.graph import Graph

log = logging.getLogger("autotune")

Operators = Callable[..., Sequence[torch.Tensor]]


class WrongResult(RuntimeError):
    """A stored kernel does not compute its region's results."""


class Check:
    """A comparison of kernels with the region's operators on a call's tensors.

    Attributes:
        always: compare at every call instead of the first.
    """

    def __init__(
        self, graph: Graph, slots: Sequence[int], results: Sequence[int], operators: Operators, *, always: bool
    ) -> None:
        """Prepare to check.

        Args:
            graph, slots, results: as in ``executor.load_executor``.
            operators: takes the region's inputs, and returns its outputs in new memory.
        """
        self._graph, self._slots, self._results = graph, slots, results
        self._operators, self.always = operators, always

    def expected(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The results of the region's operators. None during capture of a CUDA graph, which would record them, or
        without enough memory."""
        if inputs and inputs[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        try:
            return list(self._operators(*inputs))
        except torch.OutOfMemoryError:
            log.debug("a stored kernel is not checked: out of memory", exc_info=True)
            return None

    def wrong(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
    ) -> str:
        """The error of the outputs of kernels that ran on ``inputs``; "" for none."""
        from autotune.ir.graph import FLOATS, REDUCTIONS
        from autotune.ir.oracle import from_float, is_exact, may_explain
        from autotune.measure.verify import compare, is_other

        graph = self._graph
        terms = max((graph.size(v.over) for v in graph.values if v.op in REDUCTIONS), default=1)
        oracle: _Oracle | None = None
        for k, i in enumerate(self._results):
            out, got, want = graph.outputs[k], outputs[i], expected[i]
            off_by_one = out.dtype not in FLOATS and from_float(graph, k)
            lost = None
            if out.dtype in FLOATS:  # after an overflow in the user's operators, inf or NaN depends on the order
                lost = _laid_out(~want.isfinite(), got)
            verdict = compare(got, want, out.dtype, terms, off_by_one=off_by_one, lost=lost)
            if verdict.ok:
                continue
            if is_exact(graph, k):  # nothing rounds, and the oracle may share a mistake in the graph
                return f"output {i}: {verdict.detail}"
            oracle = oracle or _Oracle(graph, self._slots, inputs)
            shape = [graph.extents[a] for a in out.axes]
            try:
                stored = got.as_strided(shape, out.strides, got.storage_offset() + out.offset)
                lost = None if lost is None else lost.as_strided(shape, out.strides, out.offset)
                verdict = compare(stored, oracle.want[k], out.dtype, terms, off_by_one=off_by_one, lost=lost)
                if not verdict.ok and may_explain(out.dtype, verdict.error):
                    slack = oracle.slack(k)
                    verdict = compare(stored, oracle.want[k], out.dtype, terms, slack=slack, lost=lost)
                if verdict.ok and out.dtype != "bool":
                    theirs = _laid_out(want, got).as_strided(shape, out.strides, out.offset)
                    if is_other(theirs, oracle.want[k], partial(oracle.slack, k), overflows=True):
                        return f"output {i}: the region's graph does not compute what its operators compute"
            except (RuntimeError, MemoryError):  # not enough memory for the oracle: the operators decide
                log.debug("the oracle could not be asked", exc_info=True)
            if not verdict.ok:
                return f"output {i}: {verdict.detail}"
        return ""


def _laid_out(t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of ``like``, from the start of its memory."""
    return torch.empty_strided(like.shape, like.stride(), dtype=t.dtype, device=t.device).copy_(t)


class _Oracle:
    """The fp64 oracle's results on a call's inputs, computed at their first use."""

    def __init__(self, graph: Graph, slots: Sequence[int], inputs: Sequence[torch.Tensor]) -> None:
        self._graph = graph
        # As in kernels: memory from the first element on, as far as the graph reads.
        self._flat = [inputs[i].as_strided((graph.input_numel(slot),), (1,)) for slot, i in enumerate(slots)]

    @cached_property
    def want(self) -> list[torch.Tensor]:
        from autotune.ir.oracle import interpret

        return interpret(self._graph, self._flat)

    @cached_property
    def _slack(self) -> list[torch.Tensor | None]:
        from autotune.ir import oracle

        return oracle.slack(self._graph, self._flat, self.want, self._flat[0].device)

    def slack(self, k: int) -> torch.Tensor | None:
        return self._slack[k]


def copies_of_overwritten(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The inputs, with copies of those at the address of an output."""
    written = {t.data_ptr() for t in outputs}
    return tuple(t.clone() if t.data_ptr() in written else t for t in inputs)


def checked_calls(proven: bool, how: str = "") -> bool | None:
    """The calls that check a kernel: the first for False, every call for True, no call for None.

    Args:
        proven: a search verified it under the current conditions.
        how: replaces the setting, if not empty.
    """
    how = how or deployment().settings.verify
    return True if how == "always" else False if how == "first" or (how == "auto" and not proven) else None

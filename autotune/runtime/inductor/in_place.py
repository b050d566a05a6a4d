"""Results that are written where an input lies that nobody needs any more, as Inductor's own kernels do it.

A region's kernels say which inputs they may overwrite (``autotune.compiler.program.in_place``). Whether an input is
needed later is known when Inductor lowers its graph: :func:`over` gives the tensor to write, or None.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autotune.compiler.targets.cuda.source import OVERWRITES
from autotune.task import Artifact

Pairs = tuple[tuple[int, int], ...]
"""An input and an output each, by number."""


def permitted(artifact: Artifact | None, slots: Sequence[int], results: Sequence[int]) -> Pairs:
    """The region's inputs and outputs that its kernels take as one tensor.

    Args:
        artifact: a schedule's; its launch data have been compared with its configuration
            (:mod:`autotune.compiler.audit`).
        slots, results: as in :class:`autotune.compiler.regions.find.Binding`.
    """
    if artifact is None or artifact.target == "cpu" or len(artifact.kernels) != 1:
        return ()
    pairs = artifact.kernels[0].launch.get(OVERWRITES, ())
    return tuple((slots[slot], results[k]) for slot, k in pairs)


def over(read: Any, region: fx.Node, number: int, like: torch.Tensor) -> Any:
    """A region's input as the tensor that a result may be written to; None where somebody else needs it.

    Args:
        read: the input as Inductor has it, realized.
        region: the node being lowered; ``number`` of the input among those it reads.
        like: fake, the result.
    """
    from torch._inductor import config, ir, lowering
    from torch._inductor.virtualized import V

    reads: Any = region.args[1]
    if not config.inplace_buffers or not _is_last(reads[number], region, reads):
        return None
    name = read.get_name()
    buffer = V.graph.graph_inputs_original.get(name) or V.graph.try_get_buffer(name)
    if not isinstance(buffer, ir.Buffer) or (isinstance(buffer, ir.InputBuffer) and not _is_donated(buffer)):
        return None
    layout: Any = buffer.maybe_get_layout()
    if type(layout) not in (ir.FixedLayout, ir.FlexibleLayout):  # memory that is part of another's
        return None
    same = (layout.dtype, layout.device) == (like.dtype, like.device)
    begins = _is(layout.offset, 0) and _is(read.get_layout().offset, 0)
    if not same or not begins or not _is(layout.storage_size(), like.numel()) or not _is_dense(like):
        return None
    if _read_later(region, V.graph.env, name):
        return None
    return lowering.lowerings[torch.ops.aten.as_strided.default](read, list(like.shape), list(like.stride()), 0)


def _is_donated(given: Any) -> bool:
    """Whether autograd kept an input of a backward graph for that graph alone. Where Inductor captures CUDA graphs, one
    that changes an input might not be captured."""
    from torch._inductor import config, ir

    return isinstance(given, ir.DonatedBuffer) and not config.triton.cudagraphs


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a node's memory, be it through views."""
    for user in node.users:
        yield from readers(user) if _is_view(user) else (user,)


def memory_of(node: fx.Node) -> fx.Node:
    """The node that a node is a view of, or the node itself."""
    base = node.args[0] if _is_view(node) else None
    return memory_of(base) if isinstance(base, fx.Node) else node


def _is_last(node: fx.Node, region: fx.Node, reads: Sequence[fx.Node]) -> bool:
    """Whether a region alone reads a node, and all that the node is a view of, and an operator of the graph made it, or
    it is an input of the graph."""
    if reads.count(node) != 1:
        return False
    reader = region
    while node.op == "call_function" and set(node.users) == {reader}:
        if node.target is operator.getitem:
            made_by = node.args[0]
            return isinstance(made_by, fx.Node) and _makes_new(made_by)
        if _makes_new(node):
            return True
        if not _is_view(node) or not isinstance(node.args[0], fx.Node):
            return False
        node, reader = node.args[0], node
    return node.op == "placeholder" and set(node.users) == {reader} and _is_apart(node)


def _is_apart(placeholder: fx.Node) -> bool:
    """Whether no other input of the graph lies in the same memory, as a tensor and its view may both be kept."""
    values = [n.meta.get("val") for n in placeholder.graph.find_nodes(op="placeholder")]
    lies = [v.untyped_storage()._cdata for v in values if isinstance(v, torch.Tensor) and v.layout == torch.strided]
    return lies.count(placeholder.meta["val"].untyped_storage()._cdata) == 1


def _makes_new(node: fx.Node) -> bool:
    """Whether an operator's results are memory of their own."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op.namespace not in ("aten", "prims", "autotune"):
        return False  # a collective, say, whose other end may still be at work
    return not op._schema.is_mutable and all(r.alias_info is None for r in op._schema.returns)


def _is_view(node: fx.Node) -> bool:
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable or len(op._schema.returns) != 1:
        return False
    return op._schema.returns[0].alias_info is not None


def _read_later(region: fx.Node, env: Mapping[fx.Node, Any], name: str) -> bool:
    """Whether a node that is still to be lowered reads the buffer through another node: a cast that did nothing, say,
    shares it."""
    waited_for = (node for node in env if any(u is not region and u not in env for u in node.users))
    return any(name in _names(env[node]) for node in waited_for)


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, list | tuple):
        for x in value:
            yield from _names(x)
    elif hasattr(value, "get_name"):
        try:
            yield value.get_name()
        except (NotImplementedError, AttributeError):  # not realized: it has no buffer yet
            return


def _is_dense(t: torch.Tensor) -> bool:
    return t.numel() == 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def _is(size: Any, number: int) -> bool:
    from torch._inductor.virtualized import V

    return bool(V.graph.sizevars.statically_known_equals(size, number))


__all__ = ["Pairs", "memory_of", "over", "permitted", "readers"]

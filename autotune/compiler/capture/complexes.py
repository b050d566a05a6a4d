"""Rewrite of complex arithmetic as arithmetic of real and imaginary parts, if its results are read as real numbers.

Rotary position embeddings are often a product of complex numbers, made by ``view_as_complex`` and read by
``view_as_real``. A region cannot hold complex numbers. It can hold their parts, and the products fuse with their
neighbours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autotune.compiler.capture.rewriting import Calls

aten = torch.ops.aten

Parts = tuple[fx.Node, fx.Node | None]
"""Real and imaginary part, each with the complex tensor's shape; an imaginary part of None is 0."""

_VIEWS = frozenset(
    {
        aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.expand, aten.slice, aten.select,
        aten.transpose, aten.permute, aten.alias, aten.detach,
    }
)  # fmt: skip
_ARITHMETIC = frozenset({aten.mul, aten.add, aten.sub, aten.rsub, aten.sum, aten.neg, aten._conj, aten.polar})
_KNOWN = _VIEWS | _ARITHMETIC | {aten.clone, aten.view_as_complex}


def split_parts(gm: fx.GraphModule) -> None:
    """Rewrite a graph of aten calls in place; tensors with another complex reader stay complex."""
    inner = _inner(gm.graph)
    ends = [n for n in gm.graph.nodes if _is_end(n) and _computed(n.args[0], inner)]
    needed: set[fx.Node] = set()
    stack = [n.args[0] for n in ends]
    while stack:
        n = stack.pop()
        if n in inner and n not in needed:
            needed.add(n)
            stack += n.all_input_nodes
    split = _Split()
    for n in list(gm.graph.nodes):
        if n in needed:
            split.compute(n)
    for n in ends:
        n.replace_all_uses_with(split.joined(n))
    for n in reversed(list(gm.graph.nodes)):
        if (n in needed or n in ends) and not n.users:
            gm.graph.erase_node(n)
    if ends:
        gm.recompile()


def _packet(node: Any) -> Any:
    return getattr(node.target, "overloadpacket", None) if isinstance(node, fx.Node) else None


def _is_end(node: fx.Node) -> bool:
    """True for a node that reads complex numbers as pairs of real numbers.

    Inductor's sums view them as twice as many real numbers.
    """
    return _packet(node) is aten.view_as_real or (node.target is aten.view.dtype and not _is_complex(node))


def _is_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.complex64


def _inner(graph: fx.Graph) -> set[fx.Node]:
    """Complex results whose readers are all in this set or reinterpret them as real numbers."""
    found = {n for n in graph.nodes if _packet(n) in _KNOWN and _is_complex(n) and _is_plain(n)}
    while True:
        out = {n for n in found if not all(u in found or _reads_parts(u) for u in n.users) or _reads_lazy(n, found)}
        if not out:
            return found
        found -= out


def _reads_lazy(node: fx.Node, found: set[fx.Node]) -> bool:
    """True if an argument outside ``found`` is a lazy conjugate or negative: its memory does not hold its parts."""
    stays = (i.meta["val"] for i in node.all_input_nodes if i not in found and _is_complex(i))
    return any(v.is_conj() or v.is_neg() for v in stays)


def _is_plain(node: fx.Node) -> bool:
    """True for a call in a form that :class:`_Split` supports."""
    if _packet(node) is aten.rsub and node.args[2:] not in ((), (1,)):
        return False
    if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("dtype") or any(isinstance(a, complex) for a in node.args):
        return False
    return all(
        _is_complex(i) or getattr(i.meta.get("val"), "dtype", None) == torch.float32 for i in node.all_input_nodes
    )


def _reads_parts(node: fx.Node) -> bool:
    """True for a ``view_as_real`` with the strides of a stack of the parts, for which its readers were traced."""
    return _is_end(node) and node.meta["val"].dtype == torch.float32 and bool(node.meta["val"].is_contiguous())


def _computed(node: Any, inner: set[fx.Node]) -> bool:
    """True if a complex tensor results from arithmetic (including a sum in Inductor's form), not from views alone."""
    while node in inner:
        if _packet(node) in _ARITHMETIC or node.target is aten.view.dtype:
            return True
        node = node.args[0]
    return False


class _Split:
    """Parts of complex tensors, made at their first use."""

    def __init__(self) -> None:
        self.parts: dict[fx.Node, Parts] = {}

    def of(self, operand: Any, at: fx.Node) -> tuple[Any, fx.Node | None]:
        """The parts of an operand of ``at``; a real one has no imaginary part."""
        if not isinstance(operand, fx.Node) or not _is_complex(operand):
            return operand, None
        if operand not in self.parts:
            real = Calls(at)(aten.view_as_real.default, operand)
            self.parts[operand] = self._ends(real, at)
        return self.parts[operand]

    def _ends(self, real: fx.Node, at: fx.Node) -> tuple[fx.Node, fx.Node]:
        return Calls(at)(aten.select.int, real, -1, 0), Calls(at)(aten.select.int, real, -1, 1)

    def joined(self, end: fx.Node) -> fx.Node:
        """The result of a ``view_as_real``, built from the parts."""
        real, imaginary = self.of(end.args[0], end)
        if imaginary is None:
            imaginary = Calls(end)(aten.mul.Tensor, real, 0)
        ends = [Calls(end)(aten.unsqueeze.default, part, -1) for part in (real, imaginary)]
        pairs = Calls(end)(aten.cat.default, ends, -1)
        shape = list(end.meta["val"].shape)
        return pairs if end.target is not aten.view.dtype else Calls(end)(aten.reshape.default, pairs, shape)

    def compute(self, n: fx.Node) -> None:
        """Compute the parts of a result from those of its arguments."""
        packet = _packet(n)
        if packet is aten.view_as_complex:
            self.parts[n] = self._ends(n.args[0], n)  # type: ignore[arg-type]
        elif n.target is aten.view.dtype:
            pairs = Calls(n)(aten.reshape.default, n.args[0], [*n.meta["val"].shape, 2])
            self.parts[n] = self._ends(pairs, n)
        elif packet is aten.polar:
            size, angle = n.args
            self.parts[n] = tuple(  # type: ignore[assignment]
                Calls(n)(aten.mul.Tensor, size, Calls(n)(wave, angle)) for wave in (aten.cos.default, aten.sin.default)
            )
        elif packet in _VIEWS or packet is aten.sum:
            # A copy before a traced view may be gone, so that the parts have the strides from before the copy.
            target: Any = aten.reshape.default if packet in (aten.view, aten._unsafe_view) else n.target
            self.parts[n] = tuple(  # type: ignore[assignment]
                part if part is None else Calls(n)(target, part, *n.args[1:], **n.kwargs)
                for part in self.of(n.args[0], n)
            )
        elif packet is aten.clone:
            self.parts[n] = self.of(n.args[0], n)
        elif packet in (aten.neg, aten._conj):
            real, imaginary = self.of(n.args[0], n)
            negative = imaginary and Calls(n)(aten.neg.default, imaginary)
            self.parts[n] = Calls(n)(aten.neg.default, real) if packet is aten.neg else real, negative
        else:
            self.parts[n] = self._combined(n, packet)

    def _combined(self, n: fx.Node, packet: Any) -> Parts:
        (a, b), (c, d) = (self.of(x, n) for x in (n.args[:2] if packet is not aten.rsub else n.args[1::-1]))

        def two(op: Any, x: Any, y: Any) -> Any:
            """``op`` of two parts; a missing part is 0."""
            if op is aten.mul and (x is None or y is None):
                return None
            if x is None or y is None:
                return Calls(n)(aten.neg.default, y) if x is None and y is not None and op is aten.sub else x or y
            if not isinstance(x, fx.Node):  # a number before a tensor
                x, y = (x, y) if op is aten.sub else (y, x)
            if not isinstance(x, fx.Node):
                x, y, op = Calls(n)(aten.neg.default, y), x, aten.add
            return Calls(n)(op.Tensor, x, y)

        if packet is aten.mul:
            real = two(aten.sub, two(aten.mul, a, c), two(aten.mul, b, d))
            return real, two(aten.add, two(aten.mul, a, d), two(aten.mul, b, c))
        op = aten.add if packet is aten.add else aten.sub
        real, imaginary = two(op, a, c), two(op, b, d)
        if imaginary is not None and real.meta["val"].shape != imaginary.meta["val"].shape:
            imaginary = Calls(n)(aten.expand.default, imaginary, list(real.meta["val"].shape))
        return real, imaginary

"""The facts about each node of an aten graph, computed once. Grouping and all later passes over the graph read them.

A call is *memory-intensive* if a rule translates it and it has no reason to be outside of regions. ``autotune plan
--why`` prints this ``reason``. A node whose translation fails in a region gets its reason later, by
:meth:`GraphFacts.leave_outside`.

Float64 may be in a region between float32 and float32, where it is computed in float32 in registers. torchao computes a
scale in this way: the largest magnitude becomes float64, is clamped and divided, and becomes float32 again. None of
these operators adds, so each loses one rounding of float32, like the other operators of a region. All other float64
stays outside.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import fx

from autotune.compiler.lower.nodes import (
    aten_name,
    is_random,
    is_written_back,
    op_name,
    origin_name,
    stream_of,
    tensors_of,
    used_results,
    value_of,
)
from autotune.compiler.lower.op_names import CASTS, GENERATORS, PRODUCTS, SCATTERS, VIEWS
from autotune.compiler.lower.rules import RULES, pointwise, table
from autotune.compiler.lower.rules.reductions import is_memory_intensive
from autotune.ir.graph import EIGHT_BIT_FLOATS, FLOATS, STORAGE_BYTES

LIBRARY_CALL = "a library call"
NO_RULE = "an operator without a rule"
UNKNOWN_BYTES = 1 << 62
"""The size of tensors with symbolic extents."""
_ALIGNMENT = 16
"""Bytes of a kernel's widest load and store. An unaligned window would have to be copied before each launch."""
_WINDOWS = frozenset(["getitem", "select", "slice", "narrow", "diagonal"])
_FINDING = frozenset(["argmax", "argmin", "max", "min"])
"""Operators of positions, which no rule makes. Inductor's kernel of one computes the elements that it compares."""
_LARGEST = frozenset(["amax", "max"])
_SCALING = frozenset(["clamp", "clamp_min", "clamp_max", "maximum", "minimum", "mul", "div", "reciprocal", "abs"])
_PICKING = frozenset(["gather", "index_select", "embedding", "index", "take"])
"""Operators that read no more of their table than they return."""
_LIBRARIES = (
    *("convolution", "cudnn", "_cudnn", "mkldnn", "_mkl", "miopen", "_conv", "_fft", "linalg", "_linalg"),
    *("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_fused_sdp"),
    *("_scaled_mm", "_scaled_grouped_mm", "_grouped_mm", "_int_mm", "_addmm", "_weight_int"),
)
"""Prefixes of the names of aten operators that call a library, in addition to the products."""
_LIBRARY_NAMESPACES = ("_c10d_functional", "autotune", "mkldnn", "onednn", "quantized")


class Kind(Enum):
    """The role of a node in regions. Views and generators are free: each region copies those that it needs."""

    COMPUTE = "memory-intensive"
    VIEW = "view"
    GENERATOR = "generator"
    LIBRARY = "library call"
    OUTSIDE = "outside"


@dataclass(frozen=True)
class NodeFacts:
    """The facts about one node.

    Attributes:
        operator: the aten or prims name without its overload ("layer_norm"), "getitem", or "" for anything else.
        origin: the name of the operator that it was decomposed from ("native_layer_norm" for a "var_mean").
        value: the fake tensor that it computes, a tuple of them, or None if the graph does not have it.
        tensors: all tensors of ``value``.
        bytes: the total size of ``tensors``.
        factors: the two operands of a matrix product; fewer if they are keyword arguments.
        is_random: True if it draws from a generator, whose state orders such nodes.
        kind: its role in regions.
        reason: the reason why it is outside of regions; "" for a node that may be in one, and for one that is no call.
    """

    operator: str
    origin: str
    value: Any
    tensors: tuple[torch.Tensor, ...]
    bytes: int
    factors: tuple[fx.Node, ...]
    is_random: bool
    kind: Kind = Kind.OUTSIDE
    reason: str = ""

    @property
    def touched_bytes(self) -> int:
        """The bytes of memory behind its tensors: broadcast dimensions count once."""
        return UNKNOWN_BYTES if self.bytes == UNKNOWN_BYTES else sum(map(_touched, self.tensors))

    @property
    def is_free(self) -> bool:
        """True if it costs nothing inside of a region."""
        return self.kind in (Kind.VIEW, Kind.GENERATOR)

    @property
    def is_tensor(self) -> bool:
        """True if its value is one tensor."""
        return isinstance(self.value, torch.Tensor)

    @property
    def is_pointwise(self) -> bool:
        """True if a rule of pointwise operators translates it; none translates an element of a tuple."""
        return getattr(RULES.get(self.operator), "__module__", "") == pointwise.__name__

    @property
    def is_move(self) -> bool:
        """True if a rule of views, generators or gathers translates it: it computes nothing."""
        return getattr(RULES.get(self.operator), "__module__", "") == table.__name__

    @property
    def is_window(self) -> bool:
        """True for a view that omits elements, so that its result may have another offset than its argument."""
        return self.operator in _WINDOWS

    @property
    def is_float64(self) -> bool:
        """True if it returns a float64 tensor."""
        return isinstance(self.value, torch.Tensor) and self.value.dtype == torch.float64

    @property
    def is_float8(self) -> bool:
        """True if it returns 8-bit floats."""
        return any(_dtype(t) in EIGHT_BIT_FLOATS for t in self.tensors)

    def is_aligned_in(self, source: NodeFacts) -> bool:
        """True if it is a tensor whose offset in its source is aligned for a kernel's widest load."""
        if not self.is_tensor or not source.is_tensor:
            return False
        return is_aligned(self.value.storage_offset() - source.value.storage_offset(), self.value.dtype)


def is_aligned(elements: Any, dtype: torch.dtype) -> bool:
    """True if an offset of so many elements is aligned for a kernel's widest load or store; false for a symbol."""
    return type(elements) is int and elements * dtype.itemsize % _ALIGNMENT == 0


class GraphFacts:
    """The facts about a graph's nodes, and their readers and producers through views and generators.

    Args:
        graph: aten calls, with fake tensors in ``meta["val"]``; it must not change while the facts are in use.
        side: "cpu" or "cuda", for a graph that was captured on another device than its target.
    """

    def __init__(self, graph: fx.Graph, side: str | None = None) -> None:
        self.graph, self.side = graph, side
        self.nodes = list(graph.nodes)
        self.place = {n: k for k, n in enumerate(self.nodes)}
        self._of = {n: _described(n) for n in self.nodes}
        scales = self._float64_scales()
        for n in self.nodes:
            if n.op == "call_function":
                kind, reason = self._classified(n, scales)
                self._of[n] = replace(self._of[n], kind=kind, reason=reason)
        for n in self.nodes:
            if self._finds_positions(n) and self._on_cuda(n):
                self._leave_compared(n)

    def __getitem__(self, node: fx.Node) -> NodeFacts:
        return self._of[node]

    def factors(self, product: fx.Node) -> list[torch.Tensor]:
        """The two tensors that a matrix product multiplies."""
        return [self[n].value for n in self[product].factors]

    def leave_outside(self, node: fx.Node, reason: str) -> None:
        """Keep a node, and the elements of a tuple, out of regions."""
        while node.target is operator.getitem:
            node = node.args[0]  # type: ignore[assignment]
        kind = Kind.LIBRARY if reason == LIBRARY_CALL else Kind.OUTSIDE
        for n in (node, *(u for u in node.users if u.target is operator.getitem)):
            self._of[n] = replace(self._of[n], kind=kind, reason=reason)

    def producers(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that ``node`` reads, directly or through views and generators, in order, each once."""
        out: dict[fx.Node, None] = {}
        seen: set[fx.Node] = set()
        stack = list(reversed(node.all_input_nodes))
        while stack:
            n = stack.pop()
            if n in seen:
                continue
            seen.add(n)
            if self[n].is_free:
                stack.extend(reversed(n.all_input_nodes))
            else:
                out[n] = None
        return list(out)

    def makers(self, node: fx.Node) -> list[fx.Node]:
        """The node itself, or the nodes that a view or a generator reads."""
        return self.producers(node) if self[node].is_free else [node]

    def readers(self, node: fx.Node, copied: AbstractSet[fx.Node] = frozenset()) -> set[fx.Node]:
        """The nodes that read ``node``, directly or through views and ``copied`` nodes."""
        found, seen, stack = set(), set(), list(node.users)
        while stack:
            user = stack.pop()
            if user in seen:
                continue
            seen.add(user)
            if self[user].is_free or user in copied:
                stack += user.users
            else:
                found.add(user)
        return found

    def _classified(self, node: fx.Node, scales: AbstractSet[fx.Node]) -> tuple[Kind, str]:
        name = self[node].operator
        if name == "getitem":
            owner = node.args[0]
            return (self[owner].kind, self[owner].reason) if isinstance(owner, fx.Node) else (Kind.OUTSIDE, NO_RULE)
        if reason := self._reason(node, scales):
            return Kind.LIBRARY if reason == LIBRARY_CALL else Kind.OUTSIDE, reason
        return Kind.VIEW if name in VIEWS else Kind.GENERATOR if name in GENERATORS else Kind.COMPUTE, ""

    def _reason(self, node: fx.Node, scales: AbstractSet[fx.Node]) -> str:
        """The reason why a call is outside of regions; "" if there is none.

        Args:
            scales: the float64 nodes that a region may hold.
        """
        name, target = self[node].operator, node.target
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            return "it writes into its arguments"
        if name not in RULES:
            space = getattr(target, "namespace", "")
            called = space in _LIBRARY_NAMESPACES or (name or _wrapped(node)).startswith(_LIBRARIES)
            return LIBRARY_CALL if called else NO_RULE
        if is_written_back(node):
            return "its result is copied into an input"
        if stream_of(node) is not None:  # Inductor uses that stream; a region's kernels run on the current one
            return "the program selects its stream"
        read = [self[n] for n in node.all_input_nodes]
        made, given = tensors_of(used_results(node, self[node].value)), [t for facts in read for t in facts.tensors]
        if not made or not all(facts.tensors for facts in read):
            return "an argument or result is not a tensor"
        wide = all(n in scales for n in (node, *node.all_input_nodes) if self[n].is_float64)
        for t in (*made, *given):
            if problem := _unfit(t, wide):
                return problem
        if len({t.device for t in (*made, *given)}) != 1:
            return "tensors of several devices"
        if any(facts.is_float8 for facts in (self[node], *read)) and not _converts_float8(made[0].device):
            return "dtype float8 on a GPU before compute capability 8.9"
        if name in PRODUCTS and not self._is_light(node):
            return LIBRARY_CALL
        if name in SCATTERS and not self._on_cuda(node):
            return "a sum at indices on a CPU" if _adds(node, name) else "a write at indices"
        return ""

    def _finds_positions(self, node: fx.Node) -> bool:
        """True for an operator that returns positions, as its only result or as its second one, which is read."""
        if self[node].operator not in _FINDING or not self[node].tensors:
            return False
        positions = [u for u in node.users if u.target is operator.getitem and u.args[1] == 1 and u.users]
        return self[node].operator not in RULES or bool(positions)

    def _leave_compared(self, finder: fx.Node) -> None:
        """Leave the elements that ``finder`` alone reads to its own kernel, which would load what a region stores.

        They stay in a region if the finder's kernel would load more than twice their bytes, or if the region would
        store more than half of them for it.
        """
        self.leave_outside(finder, NO_RULE)
        found = {finder}
        for n in reversed(self.nodes[: self.place[finder]]):
            if self[n].kind is Kind.COMPUTE and self[n].is_pointwise and n.users and self.readers(n) <= found:
                found.add(n)
        compared = sum(self[n].bytes for n in self.producers(finder) if n in found)
        given = {p for n in found for p in self.producers(n)} - found
        stored = sum(self[p].bytes for p in given if self[p].kind is Kind.COMPUTE)
        if sum(self[p].bytes for p in given) <= 2 * compared and 2 * stored <= compared:
            for n in found - {finder}:
                self.leave_outside(n, f"the kernel of {self[finder].operator} computes it")

    def _on_cuda(self, node: fx.Node) -> bool:
        return (self.side or self[node].tensors[0].device.type) == "cuda"

    def _is_light(self, product: fx.Node) -> bool:
        """True if a region may hold a product; never on a CPU, where a library call costs almost nothing."""
        plain = getattr(product.target, "_overloadname", "") == "default"  # others name the result's type
        pair = self.factors(product)
        return self._on_cuda(product) and plain and len(pair) == 2 and is_memory_intensive(*pair)

    def _float64_scales(self) -> set[fx.Node]:
        """The float64 nodes of a scale: from a cast of a largest element to casts to narrower types."""
        scaling = CASTS | _SCALING | VIEWS
        found = {n for n in self.nodes if self[n].is_float64 and self[n].operator in scaling and n.users}
        while True:
            kept = {
                n
                for n in found
                if all(i in found or self._begins(n, i) for i in n.all_input_nodes)
                and all(u in found or (self[u].operator in CASTS and self._is_narrow(u)) for u in n.users)
            }
            if kept == found:
                return found
            found = kept

    def _begins(self, node: fx.Node, source: fx.Node) -> bool:
        if self[node].operator not in CASTS or not self._is_narrow(source):
            return False
        while self[source].operator in CASTS | VIEWS | {"getitem"}:
            source = source.all_input_nodes[0]
        return self[source].operator in _LARGEST

    def _is_narrow(self, node: fx.Node) -> bool:
        return self[node].is_tensor and _dtype(self[node].value) in FLOATS


def moved_bytes(facts: GraphFacts, nodes: Sequence[fx.Node], name: str) -> int:
    """Lower bound on the bytes that one kernel for ``nodes``, which are operator ``name``, reads and writes.

    It is at least ``UNKNOWN_BYTES`` if a size is symbolic.
    """
    inside = set(nodes)
    given = dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in inside)
    read = [facts[n].touched_bytes for n in given]
    made = sum(facts[n].touched_bytes for n in nodes if any(u not in inside for u in n.users))
    if name in _PICKING and read:
        table = max(range(len(read)), key=read.__getitem__)
        read[table] = min(read[table], made)
    return sum(read) + made


def _described(node: fx.Node) -> NodeFacts:
    name, value = op_name(node), value_of(node)
    tensors, factors = tuple(tensors_of(value)), tuple[fx.Node, ...]()
    if name in PRODUCTS:
        first = PRODUCTS[name]
        factors = tuple(a for a in node.args[first : first + 2] if isinstance(a, fx.Node))
    return NodeFacts(name, origin_name(node), value, tensors, _bytes(tensors), factors, is_random(node))


def _wrapped(node: fx.Node) -> str:
    """The operator that a higher-order operator runs, such as attention under activation checkpointing; "" if none."""
    runs = isinstance(node.target, torch._ops.HigherOrderOperator)
    found = [aten_name(given) for given in node.args if isinstance(given, torch._ops.OpOverload)] if runs else []
    return found[0] if found else ""


def _adds(node: fx.Node, name: str) -> bool:
    """True if an operator of :data:`SCATTERS` adds; False if it replaces elements."""
    given = node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False)
    return bool(given) or not name.endswith("index_put")


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    if not all(type(n) is int for t in tensors for n in t.shape):
        return UNKNOWN_BYTES
    return sum(t.numel() * t.element_size() for t in tensors)


def _touched(t: torch.Tensor) -> int:
    shown = t.element_size()
    for extent, stride in zip(t.shape, t.stride() if t.layout == torch.strided else t.shape, strict=True):
        shown *= extent if stride or not extent else 1
    return shown


def _dtype(t: torch.Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _unfit(t: torch.Tensor, float64: bool) -> str:
    """The reason why no region may hold a tensor, or ""; with ``float64``, that type is permitted."""
    if t.layout != torch.strided:
        return f"layout {str(t.layout).removeprefix('torch.')}"
    if _dtype(t) not in STORAGE_BYTES and not (float64 and t.dtype == torch.float64):
        return f"dtype {_dtype(t)}"
    if not all(type(n) is int for n in (*t.shape, *t.stride())):
        return "data-dependent sizes"
    if 0 in t.shape:
        return "a tensor without elements"
    return "a lazily conjugated or negated tensor" if t.is_conj() or t.is_neg() else ""


def _converts_float8(device: torch.device) -> bool:
    """True if a device has conversions of 8-bit floats, as GPUs do from sm_89 on."""
    here = device.type == "cuda" and torch.cuda.is_available()
    return not here or torch.cuda.get_device_capability(device) >= (8, 9)

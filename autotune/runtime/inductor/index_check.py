"""Checks that the indices read by stored kernels are in range, as eager mode and Inductor's kernels check them.

Stored kernels never access memory outside a table: they clamp an index on a CPU and skip the access on a GPU. The check
is a separate node in Inductor's graph, so that it also covers kernels that were stored without one. Inductor's option
``assert_indirect_indexing`` disables it. Inductor generates a kernel for it, and may fuse that. On a GPU the kernel has
device-side assertions. On a CPU it returns whether an index is out of range, and IndexError is raised before the step
continues.

A launch takes the host longer than the check takes a GPU, so one check takes several indices. A recommender has an
index for each of its tables.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import has_side_effect

if TYPE_CHECKING:  # a warm start imports this module without finding regions
    from autotune.compiler.lower.facts import GraphFacts
    from autotune.compiler.regions.find import Region

_library: Any = torch.library.Library("autotune", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("index_check(Tensor[] indices, str name) -> ()")
torch.library.register_fake("autotune::index_check", lambda indices, name: None, lib=_library)
has_side_effect(torch.ops.autotune.index_check.default)

_ALONG = frozenset(["gather", "scatter", "scatter_add", "index_add"])
"""Operators with arguments (table, dimension, index): negative indices are out of range."""

_LISTED = frozenset(["index", "index_put"])
"""Operators with arguments (table, indices by dimension): negative indices count from the end."""

MOST = 32
"""Most indices of one check: as many arguments of its kernel."""

Extent = int | torch.SymInt


class Range(NamedTuple):
    """The index must be in ``[low, extent)``, which may be symbols; ``text`` is of the error."""

    low: Any
    extent: Any
    text: str


_pending: dict[str, tuple[Range, ...]] = {}
"""Name of a node to the ranges of its indices."""
_lock = threading.Lock()


@dataclass(frozen=True)
class Indexed:
    """One index tensor of an operator and its range.

    Attributes:
        index: the node that computes it.
        low, extent: the index must be in ``[low, extent)``.
        operand: name of the index and the operator in errors.
    """

    index: fx.Node
    low: Extent
    extent: Extent
    operand: str


def indices_of(facts: GraphFacts, region: Region, origin: Mapping[fx.Node, fx.Node]) -> Iterator[Indexed]:
    """The index tensors of a region's operators. Operators that torch does not check (``_unsafe_index``) are omitted.

    Args:
        facts: about the graph that the region was found in.
        origin: maps the region's nodes to those of Inductor's graph; empty if it is the same graph.
    """
    for n in region.nodes:
        node = origin.get(n, n)
        for index, dim, negative in index_arguments(facts[n].operator, node):
            if index.meta["val"].dtype not in (torch.int32, torch.int64):
                continue  # a mask
            shape = _argument(node, 0).meta["val"].shape
            extent = shape[dim] if shape else 1
            operand = f"the index {index.name} of {facts[n].origin}"
            yield Indexed(_unrepeated(index), -extent if negative else 0, extent, operand)


def _unrepeated(index: fx.Node) -> fx.Node:
    """The index without the repetition of elements: attention's heads share relative positions."""
    while index.target is torch.ops.aten.expand.default:
        index = index.args[0]  # type: ignore[assignment]
    return index


def index_arguments(name: str, node: fx.Node) -> Iterator[tuple[fx.Node, int, bool]]:
    """The index tensors of a call of operator ``name``, with their dimensions, and True if they may be negative."""
    if name in _ALONG:
        yield _argument(node, 2), _argument(node, 1), False
    elif name == "embedding":
        yield _argument(node, 1), 0, False
    elif name in _LISTED:
        yield from ((index, dim, True) for dim, index in enumerate(_argument(node, 1)) if index is not None)


def _argument(node: fx.Node, number: int) -> Any:
    """An argument by its position, also if the graph passes it by name."""
    schema = node.target._schema  # type: ignore[union-attr]
    return node.args[number] if number < len(node.args) else node.kwargs[schema.arguments[number].name]


@dataclass
class Check:
    """A check to insert.

    Attributes:
        indices: with equal numbers of elements; ``kernels``: that errors name for each.
        before: the node to insert it before.
    """

    indices: list[Indexed]
    kernels: list[str]
    before: fx.Node


def together(reads: Iterable[tuple[Iterable[Indexed], str, fx.Node]]) -> list[Check]:
    """The checks of a graph: each index once for each range, several indices in one check.

    Inductor fuses the check of a computed index with the kernel that computes it, so only those of one region are
    together. It has no kernel for an input of the graph. Such indices are together if they are of one length.

    Args:
        reads: the indices of each region, the kernel that errors name, and the node before which the check belongs.
    """
    from autotune.runtime.inductor.region_op import memory_of

    made, last = list[Check](), dict[tuple[Any, ...], Check]()
    known = set[tuple[Any, ...]]()
    for region, (indices, kernel, before) in enumerate(reads):
        for indexed in indices:
            key = indexed.index, str(indexed.low), str(indexed.extent)
            if key in known:
                continue
            value, memory = indexed.index.meta["val"], memory_of(indexed.index)
            given = memory.op in ("placeholder", "get_attr")
            of = (str(value.numel()), None) if given else (str(value.shape), region)
            check = last.get((value.device, *of))
            if check is None or len(check.indices) == MOST:
                check = last[value.device, *of] = Check([], [], before)
                made.append(check)
            known.add(key)
            check.indices.append(indexed)
            check.kernels.append(kernel)
            check.before = min(check.before, before)
    return made


def add_check(graph: fx.Graph, check: Check) -> fx.Node:
    """Insert the node of a check."""
    ranges = (
        Range(one.low, one.extent, f"autotune: kernel {kernel}: {one.operand} is out of range")
        for one, kernel in zip(check.indices, check.kernels, strict=True)
    )
    with _lock:
        name = f"index_check_{len(_pending)}"
        _pending[name] = tuple(ranges)
    indices = [one.index for one in check.indices]
    with graph.inserting_before(check.before):
        node = graph.call_function(torch.ops.autotune.index_check.default, (indices, name))
    node.meta["val"] = None
    _register_lowering()
    return node


def pending(name: str) -> tuple[Range, ...]:
    """The ranges of a check's indices."""
    return _pending[name]


def check_index(index: torch.Tensor, low: int, extent: int, text: str) -> None:
    """Raise IndexError unless every element of a CPU tensor is in ``[low, extent)``."""
    if index.numel() == 0:
        return
    least, most = (int(x) for x in torch.aminmax(index))
    if least < low or most >= extent:
        raise IndexError(f"{text}: {least if least < low else most} is not in [{low}, {extent})")


@lru_cache(maxsize=1)
def _register_lowering() -> None:
    from torch._inductor import ir, lowering
    from torch._inductor.utils import convert_shape_to_inductor
    from torch._inductor.virtualized import V, ops

    class CheckOnCpu(ir.ExternKernel):
        """A check as a line of Python: in Inductor's C++ an exception inside a parallel loop would end the process."""

        def __init__(self, flag: Any, indices: Sequence[Any], ranges: Sequence[Range]) -> None:
            read = [self.unwrap_storage_for_input(self.realize_input(x)) for x in (flag, *indices)]
            self.device = flag.get_device()
            super().__init__(None, ir.NoneLayout(device=self.device), read)
            self.checked = ranges
            self.name = V.graph.register_buffer(self)
            V.graph.register_operation(self)

        def has_side_effects(self) -> bool:
            return True

        def get_device(self) -> Any:
            return self.device

        def codegen(self, wrapper: Any) -> None:
            from autotune.runtime.inductor.region_op import outermost

            outermost(wrapper).add_import_once(
                "from autotune.runtime.inductor.index_check import check_index as autotune_check_index"
            )
            tensors: Sequence[Any] = self.inputs
            flag, *indices = (x.codegen_reference() for x in tensors)
            size = wrapper.codegen_sizevar
            calls = (
                f"autotune_check_index({index}, {size(low)}, {size(extent)}, {text!r})"
                for index, (low, extent, text) in zip(indices, self.checked, strict=True)
            )
            wrapper.writeline(f"if {flag}.item(): {'; '.join(calls)}")

    @lowering.register_lowering(torch.ops.autotune.index_check.default, type_promotion_kind=None)
    def lower(indices: Sequence[Any], name: str) -> None:
        ranges = []
        for one in pending(name):
            low, extent = convert_shape_to_inductor((one.low, one.extent))
            ranges.append(Range(low, extent, one.text))
        device = indices[0].get_device()
        if device.type == "cpu":
            for x in indices:
                x.realize()  # for the error's text, before it is loaded, so that it is computed once
        size = list(indices[0].get_size())
        flat = indices if all(list(x.get_size()) == size for x in indices) else [_flat(x) for x in indices]
        size = list(flat[0].get_size())
        loaded = [(x.get_dtype(), x.make_loader(), one) for x, one in zip(flat, ranges, strict=True)]

        def bounds(one: Range, dtype: torch.dtype) -> list[Any]:
            return [ops.index_expr(end, dtype) for end in one[:2]]

        def is_outside(at: Any) -> Any:
            found = []
            for dtype, load, one in loaded:
                x, (low, extent) = load(at), bounds(one, dtype)
                found += [ops.lt(x, low), ops.ge(x, extent)]
            return reduce(ops.logical_or, found)

        def assertions(at: Any) -> Any:
            # The assertion has no mask: lanes past the tensor's end have 0, also where the index is not loaded.
            ends = (ops.lt(*(ops.index_expr(e, torch.int64) for e in pair)) for pair in zip(at, size, strict=True))
            mask = reduce(ops.and_, ends, ops.constant(True, torch.bool))
            for dtype, load, one in loaded:
                x, (low, extent) = ops.masked(mask, partial(load, at), 0), bounds(one, dtype)
                inside = ops.and_(ops.ge(x, low), ops.lt(x, extent))
                made = ops.device_assert_async(inside, f"{one.text}: not in [{one.low}, {one.extent})")
            return made

        if device.type == "cpu":
            outside = ir.Pointwise.create(device=device, dtype=torch.bool, inner_fn=is_outside, ranges=size)
            CheckOnCpu(lowering.lowerings[torch.ops.aten.any.default](outside), indices, ranges)
        else:
            ir.Pointwise.create(device=device, dtype=torch.bool, inner_fn=assertions, ranges=size).realize()

    def _flat(x: Any) -> Any:
        return lowering.view(x, [x.get_numel()])

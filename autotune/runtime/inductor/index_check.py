"""Checks that the indices read by stored kernels are in range, as eager mode and Inductor's kernels check them.

Stored kernels never access memory outside a table: they clamp an index on a CPU and skip the access on a GPU. The check
is a separate node in Inductor's graph, so that it also covers kernels that were stored without one. Inductor's option
``assert_indirect_indexing`` disables it. On a CPU it raises IndexError before the step continues. On a GPU it is a
device-side assertion, in a pointwise kernel that Inductor generates and may fuse.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import has_side_effect

if TYPE_CHECKING:  # a warm start imports this module without finding regions
    from autotune.compiler.lower.facts import GraphFacts
    from autotune.compiler.regions.find import Region

_library: Any = torch.library.Library("autotune", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("index_check(Tensor index, str name) -> ()")
torch.library.register_fake("autotune::index_check", lambda index, name: None, lib=_library)
has_side_effect(torch.ops.autotune.index_check.default)

_ALONG = frozenset(["gather", "scatter", "scatter_add", "index_add"])
"""Operators with arguments (table, dimension, index): negative indices are out of range."""

_LISTED = frozenset(["index", "index_put"])
"""Operators with arguments (table, indices by dimension): negative indices count from the end."""

Extent = int | torch.SymInt
_pending: dict[str, tuple[Any, Any, str]] = {}
"""Node's name to the range, whose bounds may be symbols, and the text of the error."""
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
            yield Indexed(index, -extent if negative else 0, extent, operand)


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


def add_check(graph: fx.Graph, indexed: Indexed, kernel: str) -> fx.Node:
    """Insert a check at the current insertion point. The error names ``kernel``."""
    with _lock:
        name = f"index_check_{len(_pending)}"
        _pending[name] = indexed.low, indexed.extent, f"autotune: kernel {kernel}: {indexed.operand} is out of range"
    node = graph.call_function(torch.ops.autotune.index_check.default, (indexed.index, name))
    node.meta["val"] = None
    _register_lowering()
    return node


def pending(name: str) -> tuple[Any, Any, str]:
    """The lower and upper bound of a check's range, which may be symbols, and the text of its error."""
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

    from autotune.runtime.inductor.region_op import outermost

    class CheckOnCpu(ir.ExternKernel):
        """A check as a line of Python: in Inductor's C++ an exception inside a parallel loop would end the process."""

        def __init__(self, index: Any, low: Any, extent: Any, text: str) -> None:
            read = self.unwrap_storage_for_input(self.realize_input(index))
            self.device = index.get_device()
            super().__init__(None, ir.NoneLayout(device=self.device), [read])
            self.low, self.extent, self.text = low, extent, text
            self.name = V.graph.register_buffer(self)
            V.graph.register_operation(self)

        def has_side_effects(self) -> bool:
            return True

        def get_device(self) -> Any:
            return self.device

        def codegen(self, wrapper: Any) -> None:
            outermost(wrapper).add_import_once(
                "from autotune.runtime.inductor.index_check import check_index as autotune_check_index"
            )
            tensors: Sequence[Any] = self.inputs
            (index,) = (x.codegen_reference() for x in tensors)
            low, extent = (wrapper.codegen_sizevar(x) for x in (self.low, self.extent))
            wrapper.writeline(f"autotune_check_index({index}, {low}, {extent}, {self.text!r})")

    @lowering.register_lowering(torch.ops.autotune.index_check.default, type_promotion_kind=None)
    def lower(index: Any, name: str) -> None:
        *ends, text = pending(name)
        low, extent = convert_shape_to_inductor(ends)
        if index.get_device().type == "cpu":
            CheckOnCpu(index, low, extent, text)
            return
        dtype, load, size = index.get_dtype(), index.make_loader(), list(index.get_size())

        def assertion(at: Any) -> Any:
            # The assertion has no mask: lanes past the tensor's end have 0, also where the index is not loaded.
            ends = (ops.lt(*(ops.index_expr(e, torch.int64) for e in pair)) for pair in zip(at, size, strict=True))
            x = ops.masked(reduce(ops.and_, ends, ops.constant(True, torch.bool)), lambda: load(at), 0)
            inside = ops.and_(ops.ge(x, ops.index_expr(low, dtype)), ops.lt(x, ops.index_expr(extent, dtype)))
            return ops.device_assert_async(inside, f"{text}: not in [{low}, {extent})")

        made = ir.Pointwise.create(device=index.get_device(), dtype=torch.bool, inner_fn=assertion, ranges=size)
        made.realize()

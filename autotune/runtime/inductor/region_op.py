"""The node of a region in Inductor's graph, and the line of code that Inductor generates for it.

The line is Python, or C++ if Inductor generates C++ (:mod:`autotune.runtime.inductor.region_cpp`).

Inductor allocates the region's results by its own memory planning and passes them to autotune's function. The generated
code calls the launcher without torch's dispatcher, as it calls that of a Triton kernel.

A result may overwrite an input without later readers, as in Inductor's own kernels. A region's kernels permit that for
some of their inputs (``autotune.compiler.program.program``). :func:`over` checks for later readers when Inductor
lowers its graph.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from autotune.compiler.lower.facts import is_aligned
from autotune.runtime.inductor.region_call import Pairs
from autotune.runtime.inductor.region_cpp import write_call

_library: Any = torch.library.Library("autotune", "DEF")  # type: ignore[no-untyped-call]
_library.define("region(str name, Tensor[] inputs) -> Tensor[]")


@dataclass(frozen=True)
class Pending:
    """A region whose node is in a graph.

    Attributes:
        text: of its call.
        label: part of generated names.
        inputs, outputs: fake tensors with the graph's symbolic extents. Later passes of Inductor may change the strides
            of a node that the region reads, so these are the strides that its kernels expect.
        overwrites: inputs and outputs that may be one tensor.
    """

    text: str
    label: str
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    overwrites: Pairs


_pending: dict[str, Pending] = {}
_lock = threading.Lock()


def pending(name: str) -> Pending:
    """The region that a node names."""
    return _pending[name]


def _fake(name: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in pending(name).outputs]


torch.library.register_fake("autotune::region", _fake, lib=_library)


def region_node(
    graph: fx.Graph,
    text: str,
    label: str,
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    overwrites: Pairs = (),
) -> fx.Node:
    """Insert a call of a region at the current insertion point; its value is the list of the results.

    Args:
        text: of a :class:`autotune.runtime.inductor.region_call.RegionCall`.
        label: part of names in the generated code.
        inputs: the nodes that it reads, each in the present strides of its ``meta["val"]``.
        outputs: the nodes whose values it computes.
        overwrites: inputs and outputs that may be one tensor.
    """
    values = [n.meta["val"] for n in outputs]
    with _lock:
        name = f"{label}_{len(_pending)}"
        _pending[name] = Pending(text, label, [n.meta["val"] for n in inputs], values, overwrites)
    node = graph.call_function(torch.ops.autotune.region.default, (name, list(inputs)))
    node.meta["val"] = values
    register_lowering()
    return node


@lru_cache(maxsize=1)
def register_lowering() -> None:
    """Register the node's lowering with Inductor, once a process."""
    from torch._inductor import ir, lowering
    from torch._inductor.utils import convert_shape_to_inductor
    from torch._inductor.virtualized import V

    class Result(ir.InputsKernel):
        """A result of a region. Inductor allocates it at the call, so its order of calls can keep memory's peak low."""

        def __init__(self, layout: Any, kernel: Any) -> None:
            super().__init__(name=None, layout=layout, inputs=[])
            self.kernel = kernel
            self.name = V.graph.register_buffer(self)

        def get_defining_op(self) -> Any:
            return self.kernel

        def should_allocate(self) -> bool:
            return True

    class RegionKernel(ir.ExternKernel):
        """A call of a region.

        Args:
            inputs: tensors that it reads.
            results: for each result its layout, or the tensor that it is written over.

        Attributes:
            arguments: buffers of inputs and results.
        """

        def __init__(self, text: str, label: str, inputs: Sequence[Any], results: Sequence[Any]) -> None:
            written = [x for x in results if not isinstance(x, ir.Layout)]
            tensors = [self.unwrap_storage_for_input(self.realize_input(x)) for x in (*inputs, *written)]
            self.device = results[0].get_device()
            super().__init__(None, ir.NoneLayout(device=self.device), tensors)
            self.text, self.label = text, label
            over = iter(tensors[len(inputs) :])
            made = [Result(x, self) if isinstance(x, ir.Layout) else next(over) for x in results]
            self.arguments = [*tensors[: len(inputs)], *made]
            none = ir.NoneLayout(device=self.device)
            self.made = [x if isinstance(x, Result) else ir.MutationOutput(none, x, self) for x in made]
            V.graph.register_operation(self)

        def get_outputs(self) -> list[Any]:
            return list(self.made)

        def get_device(self) -> Any:
            return self.device

        def get_unbacked_symbol_defs(self) -> Any:
            from torch.utils._ordered_set import OrderedSet

            return OrderedSet()

        def codegen(self, wrapper: Any) -> None:
            unread = [x for x in self.made if isinstance(x, Result) and x.get_name() in V.graph.removed_buffers]
            for x in unread:  # Inductor allocates no buffer without readers, but the kernel writes it
                V.graph.removed_buffers.discard(x.get_name())
                wrapper.codegen_allocation(x)
            self.write(wrapper)
            for x in unread:
                wrapper.codegen_free(x)

        def write(self, wrapper: Any) -> None:
            arguments = [x.codegen_reference() for x in self.arguments]
            if V.graph.cpp_wrapper:
                self.codegen_comment(wrapper)
                write_call(wrapper, self.text, self.label, arguments, self.device.index, ahead_of_time=V.graph.aot_mode)
                return
            if self.device.type == "cuda":
                arguments.append(type(wrapper).write_get_raw_stream(wrapper, self.device.index, V.graph.name))
            self.codegen_comment(wrapper)
            wrapper.writeline(f"{_named(self.text, self.label, wrapper)}({', '.join(arguments)})")

    @lowering.register_lowering(torch.ops.autotune.region.default, type_promotion_kind=None)
    def lower(name: str, inputs: Sequence[Any]) -> list[Any]:
        region = pending(name)
        read = [
            ir.ExternKernel.require_exact_strides(x, convert_shape_to_inductor(value.stride()))
            for x, value in zip(inputs, region.inputs, strict=True)
        ]
        made: list[Any] = [None] * len(region.outputs)
        overwritten = set[int]()
        for i, k in region.overwrites:
            if made[k] is None and i not in overwritten:
                made[k] = over(read[i], V.graph.current_node, i, region.outputs[k])
                overwritten |= {i} if made[k] is not None else set()
        for k, t in enumerate(region.outputs):
            if made[k] is None:
                size, stride = convert_shape_to_inductor(t.shape), convert_shape_to_inductor(t.stride())
                made[k] = ir.FixedLayout(t.device, t.dtype, size, stride)
        kernel = RegionKernel(region.text, region.label, read, made)
        return [
            ir.TensorBox.create(x) if isinstance(x, Result) else over for x, over in zip(kernel.made, made, strict=True)
        ]


def outermost(wrapper: Any) -> Any:
    """The wrapper of Inductor's module, which contains those of subgraphs."""
    while getattr(wrapper, "parent_wrapper", None) is not None:
        wrapper = wrapper.parent_wrapper
    return wrapper


def _named(text: str, label: str, wrapper: Any) -> str:
    """The name of a region's function, one for each call; equal calls share one text in Inductor's module."""
    root = outermost(wrapper)
    texts: dict[str, str] = root.__dict__.setdefault("_autotune_texts", {})
    calls: list[str] = root.__dict__.setdefault("_autotune_calls", [])
    if text not in texts:
        root.add_import_once("from autotune.runtime.inductor.region_call import load_call as autotune_load")
        texts[text] = f"autotune_text_{len(texts)}"
        root.add_import_once(f"{texts[text]} = {text!r}")
    calls.append(f"autotune_{label}_{len(calls)}")
    root.add_import_once(f"{calls[-1]} = autotune_load({texts[text]})")
    return calls[-1]


def over(read: Any, region: fx.Node, number: int, like: torch.Tensor) -> Any:
    """A region's input as the tensor for a result; None if the input is needed later.

    Args:
        read: the input in Inductor's IR, realized.
        region: the node being lowered; ``number``: index of the input among those that it reads.
        like: the result as a fake tensor.
    """
    from torch._inductor import config, ir, lowering
    from torch._inductor.virtualized import V

    reads: Any = region.args[1]
    if not config.inplace_buffers or not _is_last(reads[number], region, reads):
        return None
    name = read.get_name()
    buffer = V.graph.graph_inputs_original.get(name) or V.graph.try_get_buffer(name)
    given = isinstance(buffer, ir.InputBuffer)
    if not isinstance(buffer, ir.Buffer) or (given and not (_is_donated(buffer) and _is_aligned(reads[number]))):
        return None
    layout: Any = buffer.maybe_get_layout()
    if type(layout) not in (ir.FixedLayout, ir.FlexibleLayout):  # memory that is part of another buffer
        return None
    same = (layout.dtype, layout.device) == (like.dtype, like.device)
    begins = _is(layout.offset, 0) and _is(read.get_layout().offset, 0)
    if not same or not begins or not _is(layout.storage_size(), like.numel()) or not _is_dense(like):
        return None
    if _read_later(region, V.graph.env, name):
        return None
    return lowering.lowerings[torch.ops.aten.as_strided.default](read, list(like.shape), list(like.stride()), 0)


def _is_donated(given: Any) -> bool:
    """True for an input that autograd saved only for this backward graph. False if Inductor captures CUDA graphs: it
    may not capture a graph that changes an input."""
    from torch._inductor import config, ir

    return isinstance(given, ir.DonatedBuffer) and not config.triton.cudagraphs


def _is_aligned(node: fx.Node) -> bool:
    """True if a node's memory, an input of the graph, is aligned for stores of vectors. Autograd may save a part of a
    tensor without the rest."""
    value = memory_of(node).meta["val"]
    return is_aligned(value.storage_offset(), value.dtype)


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """The readers of a node's memory, through views too."""
    for user in node.users:
        yield from readers(user) if _is_view(user) else (user,)


def memory_of(node: fx.Node) -> fx.Node:
    """The node that a node is a view of, or the node itself."""
    base = node.args[0] if _is_view(node) else None
    return memory_of(base) if isinstance(base, fx.Node) else node


def _is_last(node: fx.Node, region: fx.Node, reads: Sequence[fx.Node]) -> bool:
    """True if only a region reads a node and the memory that it is a view of. The memory is an operator's result or an
    input of the graph."""
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
    """True if no other input of the graph shares the memory: autograd may save both a tensor and its view."""
    values = [n.meta.get("val") for n in placeholder.graph.find_nodes(op="placeholder")]
    lies = [v.untyped_storage()._cdata for v in values if isinstance(v, torch.Tensor) and v.layout == torch.strided]
    return lies.count(placeholder.meta["val"].untyped_storage()._cdata) == 1


def _makes_new(node: fx.Node) -> bool:
    """True if an operator's results have their own memory."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op.namespace not in ("aten", "prims", "autotune"):
        return False  # for example a collective, whose peer may not have finished
    return not op._schema.is_mutable and all(r.alias_info is None for r in op._schema.returns)


def _is_view(node: fx.Node) -> bool:
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable or len(op._schema.returns) != 1:
        return False
    return op._schema.returns[0].alias_info is not None


def _read_later(region: fx.Node, env: Mapping[fx.Node, Any], name: str) -> bool:
    """True if a node that is lowered later reads the buffer through another node, such as a cast without effect."""
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

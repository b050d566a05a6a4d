"""The node that stands for a region in Inductor's graph, and the line of code that Inductor writes for it.

That line is Python, or C++ where Inductor writes C++ (:mod:`autotune.runtime.inductor.region_cpp`).

Inductor allocates the region's results by its own memory planning and calls our function with them. A result may also
lie where an input lies, which the node then mutates. Nothing goes
through torch's dispatcher: the generated code calls the launcher as it calls that of a Triton kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from autotune.runtime.inductor.in_place import Pairs, over
from autotune.runtime.inductor.region_cpp import write_call

_library: Any = torch.library.Library("autotune", "DEF")  # type: ignore[no-untyped-call]
_library.define("region(str name, Tensor[] inputs) -> Tensor[]")


@dataclass(frozen=True)
class Pending:
    """A region whose node is in a graph: its call's text, a word for names, its results, and the inputs that may be
    overwritten."""

    text: str
    label: str
    outputs: Sequence[torch.Tensor]  # fake, with symbolic extents where the graph has them
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
    """Put a call of a region before the current insertion point; it gives the list of its results.

    Args:
        text: of a :class:`autotune.runtime.inductor.region_call.RegionCall`.
        label: a word for the generated code's names.
        inputs: what it reads, each in the strides of its ``meta["val"]``.
        outputs: the nodes whose values it makes.
        overwrites: inputs and outputs that may be one tensor.
    """
    values = [n.meta["val"] for n in outputs]
    with _lock:
        name = f"{label}_{len(_pending)}"
        _pending[name] = Pending(text, label, values, overwrites)
    node = graph.call_function(torch.ops.autotune.region.default, (name, list(inputs)))
    node.meta["val"] = values
    register_lowering()
    return node


@lru_cache(maxsize=1)
def register_lowering() -> None:
    """Tell Inductor what to make of the node, once a process."""
    from torch._inductor import ir, lowering
    from torch._inductor.utils import convert_shape_to_inductor
    from torch._inductor.virtualized import V

    class RegionKernel(ir.ExternKernel):
        """A call that reads ``inputs`` and writes ``outputs``, buffers of Inductor's."""

        def __init__(self, text: str, label: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            tensors = [self.unwrap_storage_for_input(self.realize_input(x)) for x in (*inputs, *outputs)]
            self.device = outputs[0].get_device()
            super().__init__(None, ir.NoneLayout(device=self.device), tensors)
            self.text, self.label = text, label
            self.mutation_outputs = [ir.MutationOutput(ir.NoneLayout(device=self.device), out, self) for out in outputs]
            V.graph.register_operation(self)

        def get_outputs(self) -> list[Any]:
            return list(self.mutation_outputs)

        def get_device(self) -> Any:
            return self.device

        def get_unbacked_symbol_defs(self) -> Any:
            from torch.utils._ordered_set import OrderedSet

            return OrderedSet()

        def codegen(self, wrapper: Any) -> None:
            tensors: Sequence[Any] = self.inputs
            arguments = [x.codegen_reference() for x in tensors]
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
        reads: Any = V.graph.current_node.args[1]
        given = [n.meta["val"] for n in reads]
        read = [
            ir.ExternKernel.require_exact_strides(x, convert_shape_to_inductor(value.stride()))
            for x, value in zip(inputs, given, strict=True)
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
                made[k] = lowering.empty_strided(size, stride, dtype=t.dtype, device=t.device)
        RegionKernel(region.text, region.label, read, made)
        return made


def outermost(wrapper: Any) -> Any:
    """The wrapper that writes the top of Inductor's module; those of subgraphs are inside it."""
    while getattr(wrapper, "parent_wrapper", None) is not None:
        wrapper = wrapper.parent_wrapper
    return wrapper


def _named(text: str, label: str, wrapper: Any) -> str:
    """The name of a region's function, one for each call; equal ones have one text at the top of Inductor's module."""
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


__all__ = ["Pending", "outermost", "pending", "region_node", "register_lowering"]

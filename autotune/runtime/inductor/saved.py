"""Tensors that a forward pass saves for its backward pass: their strides, and the reuse of their memory.

A backward graph may reuse the memory of tensors that autograd saved for it alone. So torch refuses to run it with
``retain_graph=True``. ``torch.compile`` compiles a backward graph in the first backward pass, and without such reuse if
that pass retains its graph. A search compiles it earlier (``force_non_lazy_backward_lowering``). Here it is compiled
again in such a pass. torch 2.11 and 2.12 do not compile it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._inductor import config

if TYPE_CHECKING:
    from autotune.compiler.lower.facts import GraphFacts
    from autotune.compiler.regions.find import Region

_NAME = "_AutogradBackwardCompiler"
_COMPILABLE = "AutogradLazyBackwardCompileInfo"
"""torch's record of a backward graph that it can still compile; a graph from its caches has another record."""


def keep_strides(facts: GraphFacts, regions: Iterable[Region]) -> None:
    """Have Inductor save the results of regions in the strides that kernels give them, in place.

    Inductor pads the rows of saved tensors (``config.comprehensive_padding``), and a kernel does not. A search measures
    the regions of a backward pass before the forward pass has kernels. With other strides, these regions would be other
    workloads. An example is the loss of a language model, which reads labels with one more column.

    Args:
        facts: about a post-grad graph; the metadata of its output changes.
        regions: of the graph.
    """
    output = facts.nodes[-1]
    visible, strides = output.meta.get("user_visible_output_idxs"), output.meta.get("original_output_strides")
    results: object = output.args[0]
    if visible is None or strides is None or not isinstance(results, (list, tuple)):
        return
    stored = {n for region in regions if region.workload is not None for n in region.outputs}
    saved = [
        k
        for k, n in enumerate(results)
        if isinstance(n, fx.Node) and k not in visible and stored.issuperset(facts.makers(n) or (n,))
        if isinstance(value := n.meta["val"], torch.Tensor) and value.stride() == strides[k] and _is_padded(value)
    ]
    output.meta["user_visible_output_idxs"] = [*visible, *saved]


def _is_padded(value: torch.Tensor) -> bool:
    """True if Inductor may pad rows of such a tensor."""
    align = config.padding_alignment_bytes // value.dtype.itemsize
    return value.is_contiguous() and any(
        step > config.padding_stride_threshold and step % align for step in value.stride()
    )


@contextlib.contextmanager
def compiled_again(retained: Callable[[], object]) -> Iterator[None]:
    """Context manager: backward graphs compiled in it are compiled again in a backward pass that retains its graph.

    Args:
        retained: called in that backward pass.
    """
    from torch._functorch._aot_autograd import runtime_wrappers  # torch has a circle here until Dynamo is imported

    real: Any = getattr(runtime_wrappers, _NAME, None)
    compilable: Any = getattr(runtime_wrappers, _COMPILABLE, None)
    if real is None or compilable is None:
        yield
        return

    class Compiler(real):  # type: ignore[misc]
        compiled_bw: Callable[..., Any] | None

        def get_or_compile(self, *, saved_tensors_use_once: bool) -> Callable[..., Any]:
            if saved_tensors_use_once and self.compiled_bw is not None:
                return self.compiled_bw  # as torch's, in each step
            donates = bool(getattr(self.fw_metadata, "bw_donated_idxs", None))
            may = isinstance(self.lazy_backward_info, compilable) and self.bw_compiler is not None
            if self.compiled_bw is not None and donates and may:
                self.compiled_bw = None
                self.try_save_cache_entry = None
                retained()
            found: Callable[..., Any] = super().get_or_compile(saved_tensors_use_once=saved_tensors_use_once)
            return found

    setattr(runtime_wrappers, _NAME, Compiler)
    try:
        yield
    finally:
        setattr(runtime_wrappers, _NAME, real)

"""Strides of the tensors that a forward pass saves for its backward pass."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx
from torch._inductor import config

from autotune.compiler.lower.facts import GraphFacts
from autotune.compiler.regions.find import Region


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

"""Elements that gradients of maxima and minima compare: which of them the partition has to save."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from autotune.compiler.capture.extremes import save_compared

Made = Callable[[Tensor], Tensor]
INDEX = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]).expand(4, 8)


def marked(elements: Made, extreme: Made, *, checkpointed: bool = False) -> list[str]:
    """The operators that are saved for the gradient of ``extreme(elements(x))``."""

    def joint(x: Tensor) -> Tensor:
        out = extreme(elements(x))
        return torch.autograd.grad(out.sum(), x)[0]

    norm = torch.ops.aten.linalg_vector_norm.default
    gm = make_fx(joint, {norm: select_decomp_table()[norm]})(torch.randn(4, 8, requires_grad=True))
    for node in gm.graph.nodes if checkpointed else ():
        node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    save_compared(gm.graph)
    return [str(n.target) for n in gm.graph.nodes if n.meta.get("recompute") == CheckpointPolicy.MUST_SAVE]


@pytest.mark.parametrize(
    "extreme",
    [
        lambda y: y.amax(-1),
        lambda y: y.amin(0, keepdim=True),
        lambda y: y.max(),
        lambda y: y.view(2, 16).min().expand(3),
    ],
)
def test_elements_of_functions_that_are_not_exact_are_saved(extreme: Made) -> None:
    assert marked(F.gelu, extreme) == ["aten.gelu.default"]
    assert marked(lambda x: (x / 3).abs(), extreme) == ["aten.abs.default"]


@pytest.mark.parametrize(
    "extreme",
    [
        lambda y: torch.linalg.vector_norm(y, torch.inf, -1),
        lambda y: torch.linalg.vector_norm(y, -torch.inf),
        lambda y: torch.linalg.vector_norm(y, torch.inf, 0, dtype=torch.float64),
        lambda y: (-y.double()).amax(-1),
        lambda y: y.new_zeros(4, 3).scatter_reduce(1, INDEX, y, "amax"),
        lambda y: y.new_zeros(4, 3).scatter_reduce(1, INDEX, y, "amin", include_self=False),
        lambda y: y.scatter_reduce(1, INDEX, y.new_zeros(4, 8), "amax"),
        lambda y: y.new_zeros(4, 3).index_reduce(1, INDEX[0], y, "amax"),
    ],
)
def test_elements_that_a_gradient_compares_in_another_form_are_saved(extreme: Made) -> None:
    assert marked(F.gelu, extreme) == ["aten.gelu.default"]


def test_equal_nodes_of_which_the_partition_keeps_one_are_saved() -> None:
    assert marked(lambda x: x, lambda x: F.gelu(x).amax(-1) * F.gelu(x).sum(-1)) == ["aten.gelu.default"] * 2


def test_a_tensor_is_saved_in_place_of_its_parts() -> None:
    parts = marked(F.gelu, lambda y: torch.cat([part.amax(-1) for part in y.chunk(2, -1)]))
    assert parts == ["aten.gelu.default"]


@pytest.mark.parametrize("elements", [lambda x: x, lambda x: (x @ torch.ones(8, 8)).relu(), lambda x: x.abs().t()])
def test_elements_that_every_kernel_rounds_alike_stay(elements: Made) -> None:
    assert marked(elements, lambda y: y.amax(-1)) == []


def test_what_checkpointing_computes_again_stays() -> None:
    assert marked(F.gelu, lambda y: y.amax(-1), checkpointed=True) == []


def test_other_comparisons_stay() -> None:
    assert marked(lambda x: torch.where(F.gelu(x) == F.silu(x).amax(), x, 0), lambda y: y.sum(-1)) == []

"""Rewrites of maxima: those of scaled softmaxes, and elements that gradients compare, which a partition saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from autotune.compiler.capture import hooks
from autotune.compiler.capture.extremes import save_compared, scale_before_maxima
from autotune.compiler.capture.recording import capture

Made = Callable[[Tensor], Tensor]
CONVERT = torch.ops.prims.convert_element_type.default
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


def below_maximum(x: Tensor) -> Tensor:
    return x - x.amax(-1, keepdim=True)


def all_finite(x: Tensor, axis: int) -> Tensor:
    return torch.all(torch.isfinite(x), dim=axis, keepdim=True)


def in_two_forms(scaled: Tensor, stable: Tensor) -> Tensor:
    """What Inductor's joint passes make of ``scaled - amax(scaled)`` from torch 2.13 on."""
    return torch.where(all_finite(scaled, -1), stable, below_maximum(scaled)).exp()


def rewritten(fn: Callable[..., Tensor], *args: Any) -> torch.fx.GraphModule:
    """The graph of a function after the rewrite, with results like the function's."""
    ops = [torch.ops.aten.all.dim, torch.ops.aten.isfinite.default]
    gm = make_fx(fn, {op: select_decomp_table()[op] for op in ops if op in select_decomp_table()})(*args)
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten._to_copy.default:  # Inductor's graphs have the other operator
            node.target, node.args, node.kwargs = CONVERT, (node.args[0], node.kwargs["dtype"]), {}
    scale_before_maxima(gm.graph)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    torch.testing.assert_close(gm(*args), fn(*args), equal_nan=True)
    return gm


def maxima(gm: torch.fx.GraphModule) -> int:
    return sum(node.target is torch.ops.aten.amax.default for node in gm.graph.nodes)


ROWS = torch.randn(6, 40)
ROWS[1, 3], ROWS[2, 4], ROWS[3] = torch.inf, torch.nan, -torch.inf
ROWS[4, :20] = -torch.inf


def scales(x: Tensor) -> Tensor:
    """One factor a row, of either sign."""
    return torch.where(x[:, :1] > 0, 2.0, -0.5)


def sign_of(s: Tensor) -> Tensor:
    one = torch.scalar_tensor(1.0)
    return torch.where(s >= 0, one, -one)


@pytest.mark.parametrize(
    "softmax",
    [
        lambda x: in_two_forms(x * 0.125, below_maximum(x * 1) * 0.125),
        lambda x: in_two_forms(0.125 * x, below_maximum(x * 1) * 0.125),
        lambda x: in_two_forms(x * -0.5, below_maximum(x * -1) * 0.5),
        lambda x: in_two_forms(x / -8, below_maximum(x * -1) / 8),
        lambda x: in_two_forms(x * (s := scales(x)), below_maximum(x * (sign := sign_of(s))) * (sign * s)),
        lambda x: in_two_forms(x / (s := scales(x)), below_maximum(x * (sign := sign_of(s))) / (sign * s)),
        lambda x: in_two_forms((y := x.bfloat16().float()) / 2, below_maximum(y * 1) / 2),
        lambda x: in_two_forms(((y := x.bfloat16()) / 2).float(), below_maximum(y.float() * 1) / 2),
    ],
)
def test_a_scaled_softmax_has_one_form(softmax: Made) -> None:
    gm = rewritten(softmax, ROWS)
    assert maxima(gm) == 1
    assert "any" not in gm.code


@pytest.mark.parametrize(
    "other",
    [
        lambda x: in_two_forms(x * 0.125, below_maximum(x.sin() * 1) * 0.125),
        lambda x: in_two_forms(x * 0.125, below_maximum(x * 1) * 0.25),
        lambda x: in_two_forms(x * 0.125, below_maximum(x * 1) / 8),
        lambda x: in_two_forms(x * 0.125, below_maximum(x * 1)),
        lambda x: in_two_forms(x * (s := scales(x)), below_maximum(x * sign_of(s)) * 0.5),
        lambda x: in_two_forms(x * (s := scales(x)), below_maximum(x * (sign := sign_of(s))) * (sign + s)),
        lambda x: in_two_forms(x * (s := scales(x)), below_maximum(x * (sign := sign_of(-s))) * (sign * s)),
        lambda x: in_two_forms(x * (s := scales(x)), below_maximum(x * (sign := s.cos())) * (sign * s)),
        lambda x: in_two_forms(x * (s := scales(x)), below_maximum(x * 2 * sign_of(s)) * (sign_of(s) * s)),
        lambda x: in_two_forms(x * (s := scales(x)), below_maximum(x * 1) * s),
        lambda x: in_two_forms(x * 2, below_maximum(x * -1) * 2),
        lambda x: in_two_forms(x * 2, below_maximum(x * 1) * -2),
        lambda x: in_two_forms(scales(x) / x, below_maximum(x * (sign := sign_of(scales(x)))) / (sign * scales(x))),
        lambda x: torch.where(all_finite(y := x * 2, -1), below_maximum(x * 1) * 2, y.sub(y.amax(-1, True), alpha=2)),
        lambda x: torch.where(torch.all((y := x * 2) > 0, -1, True), below_maximum(x * 1) * 2, below_maximum(y)),
        lambda x: torch.where(
            torch.any(torch.isfinite(x * 2), -1, True), below_maximum(x * 1) * 2, below_maximum(x * 2)
        ),
        lambda x: torch.where(torch.isfinite(y := x * 2), below_maximum(x * 1) * 2, below_maximum(y)),
        lambda x: torch.where(all_finite(x, -1), below_maximum(x * 1) * 2, below_maximum(x * 2)),
        lambda x: torch.where(all_finite(y := x * 2, 0), below_maximum(x * 1) * 2, below_maximum(y)),
        lambda x: torch.where(all_finite(y := x * 2, -1), (z := x * 1).sub(z.amax(0, True)) * 2, below_maximum(y)),
    ],
)
def test_other_choices_between_two_forms_stay(other: Made) -> None:
    gm = rewritten(other, ROWS)
    assert maxima(gm) == 2
    assert "where" in gm.code


def test_a_softmax_that_is_scaled_by_a_size_has_one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[torch.fx.Graph] = []
    monkeypatch.setattr(hooks, "scale_before_maxima", lambda graph: (scale_before_maxima(graph), graphs.append(graph)))
    fn = torch.compile(lambda x: torch.softmax(x * x.shape[0], -1), backend="autotune", dynamic=True)
    torch.testing.assert_close(fn(ROWS), torch.softmax(ROWS * 6, -1), equal_nan=True)
    assert [node for graph in graphs for node in graph.nodes if node.target is torch.ops.aten.where.self] == []
    assert len(graphs) == 1


@pytest.mark.parametrize("softmax", [lambda x: F.softmax(x / 8, -1), lambda x: F.cross_entropy(x * 3.0, INDEX[0, :6])])
def test_a_captured_softmax_of_scaled_elements_has_one_maximum(softmax: Made) -> None:
    # The form that this torch writes is recognised.
    for graph in capture(softmax, (ROWS.clone().requires_grad_(),), grad=True):
        assert maxima(graph.module) <= 1
        assert "where.self(logical_not" not in graph.module.code


def test_rows_that_are_not_finite_are_those_of_eager_mode() -> None:
    large = torch.full((2, 40), 3e38)
    for x in (ROWS, large):
        for scale in (0.125, 4.0, -2.0):
            softmax = torch.compile(lambda x, scale=scale: F.softmax(x * scale, -1), backend="autotune")
            torch.testing.assert_close(softmax(x), F.softmax(x * scale, -1), equal_nan=True)

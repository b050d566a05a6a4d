"""Products and the regions that their epilogues compute: recognized forms, and others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autotune import numerics
from autotune.compiler.capture.recording import capture
from autotune.compiler.lower.facts import GraphFacts
from autotune.compiler.regions import epilogues
from autotune.compiler.regions.epilogues import Product, products_of
from autotune.compiler.regions.find import regions_from

ROWS, TERMS, COLUMNS = 32, 32, 64
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epilogues, "DEVICES", {"cpu"})


def found(fn: Callable[..., Any], *args: Tensor) -> list[Product]:
    """The products of all graphs of a function; with its backward pass where an input requires a gradient."""
    products = []
    for graph in capture(fn, args):
        facts = GraphFacts(graph.module.graph)
        products += products_of(facts, regions_from(facts), "tests")
    return products


def names(products: Sequence[Product]) -> list[str]:
    return [str(product.workload.spec["epilogue"]) for product in products]


def tensors(dtype: torch.dtype = BF16, *, grad: bool = False, columns: int = COLUMNS) -> tuple[Tensor, ...]:
    made = torch.randn(4, ROWS // 4, TERMS), torch.randn(columns, TERMS), torch.randn(columns), torch.randn(8, columns)
    return tuple(t.to(dtype).requires_grad_(grad) for t in made)


def written_out(x: Tensor) -> Tensor:
    """GELU as GPT-2 writes it."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def layer(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, w, b, v: F.linear(activation(F.linear(x, w, b)), v)


TANH = layer(lambda x: F.gelu(x, approximate="tanh"))


@pytest.mark.parametrize(
    ("activation", "epilogue"),
    [
        (lambda x: F.gelu(x, approximate="tanh"), ["gelu"]),
        (written_out, ["gelu"]),
        (F.relu, ["relu"]),
        (F.gelu, []),
        (F.silu, []),
        (lambda x: F.gelu(x, approximate="tanh") + 1e-3, []),
        (lambda x: x * torch.sigmoid(1.702 * x), []),
    ],
)
@torch.no_grad()
def test_an_activation_is_known_by_its_values(activation: Callable[[Tensor], Tensor], epilogue: list[str]) -> None:
    assert names(found(layer(activation), *tensors())) == epilogue


@torch.no_grad()
def test_a_bias_that_is_added_behind_the_product_is_the_epilogue_s() -> None:
    def apart(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
        made = (x.view(-1, TERMS) @ w.t()).view(4, -1, COLUMNS)
        return F.linear(F.gelu(made + b, approximate="tanh"), v)

    (product,) = found(apart, *tensors())
    assert product.product.target is torch.ops.aten.mm.default
    assert product.workload.spec["epilogue"] == "gelu"
    assert product.workload.source["roles"] == [0, 1, 2, -1]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_half_precision_alone_is_taken(dtype: torch.dtype) -> None:
    assert names(found(TANH, *tensors(dtype))) == (["gelu"] if dtype == torch.float16 else [])


@torch.no_grad()
def test_rows_that_are_not_aligned_are_left() -> None:
    assert found(TANH, *tensors(columns=60)) == []


@torch.no_grad()
def test_strict_precision_keeps_the_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_PRECISION", "strict")
    assert found(TANH, *tensors()) == []


def test_training_epilogue_stores_the_input_of_gelu() -> None:
    products = found(TANH, *tensors(grad=True))
    assert names(products)[0] == "gelu_aux"
    assert len(products[0].outputs) == 2


def test_the_derivative_is_an_epilogue_and_the_bias_s_gradient_is_left() -> None:
    x, w, b, v = tensors(grad=True)
    alone = found(TANH, x, w, b.detach(), v)
    assert names(alone) == ["gelu_aux", "dgelu"]
    with_sum = found(TANH, x, w, b, v)
    assert names(with_sum) == ["gelu_aux", "dgelu"]
    assert alone[1].rest is None
    assert with_sum[1].rest is not None
    assert with_sum[1].rest.label.startswith("sum")
    assert "dgelu" not in names(found(layer(F.gelu), x, w, b, v)), "the exact form"


@torch.no_grad()
@pytest.mark.parametrize("how", ["plain", "other order", "no bias", "added apart"])
def test_a_residual_connection_is_added_by_the_product(how: str) -> None:
    def step(r: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        if how == "added apart":
            made = (x.reshape(-1, COLUMNS) @ w.t()).view(r.shape) + b
        else:
            made = F.linear(x, w, None if how == "no bias" else b)
        return F.layer_norm(made + r if how == "other order" else r + made, (TERMS,))

    r, w, b, _ = tensors()
    (product,) = found(step, r, r.repeat(1, 1, 2), w.t().contiguous(), b[:TERMS])
    assert product.workload.spec["epilogue"] == ("add" if how == "no bias" else "bias_add")
    assert product.rest is not None
    assert len(product.outputs) == 1


@torch.no_grad()
def test_a_sum_that_is_no_residual_connection_is_left() -> None:
    x, w, b, _ = tensors()
    wide, other = torch.randn(4, ROWS // 4, COLUMNS).to(BF16), torch.randn(COLUMNS).to(BF16)
    assert found(lambda x, w, b: torch.softmax(F.linear(x, w, b) + other, -1), x, w, b) == [], "a second bias"
    assert found(lambda x, w, b: torch.softmax(wide.float() + F.linear(x, w, b), -1), x, w, b) == [], "in fp32"
    assert found(lambda x, w, b: torch.softmax(torch.add(wide, F.linear(x, w, b), alpha=2), -1), x, w, b) == []

    def twice(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        made = F.linear(x, w, b)
        return torch.softmax(wide + made, -1) * made

    assert found(twice, x, w, b) == [], "the product is read again"


@torch.no_grad()
def test_wide_products_are_workloads_alone() -> None:
    x, w, b = torch.randn(1024, 32), torch.randn(64, 32), torch.randn(64)
    args = tuple(t.to(BF16) for t in (x, w, b))
    assert names(found(lambda x, w, b: x @ w.t(), *args)) == [""]
    assert names(found(F.linear, *args)) == ["bias"]
    assert found(lambda x, w, b: x[:512] @ w.t(), *args) == [], "too few rows"
    assert names(found(lambda x, w, b: x @ w[:32].t(), *args)) == [""]
    assert found(lambda x, w, b: x @ w[:24].t(), *args) == [], "too few columns"


@torch.no_grad()
@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_products_in_fp32_are_workloads_where_tf32_is_allowed(precision: str) -> None:
    x, w, b = torch.randn(1024, 768), torch.randn(768, 768), torch.randn(768)
    numerics.restore({"cuda.matmul.fp32_precision": precision})
    searched = [names(found(F.linear, x, w, b)), names(found(lambda x: x.t() @ x, x))]
    assert searched == ([["bias"], [""]] if precision == "tf32" else [[], []])
    assert found(F.linear, x[:512], w, b) == [], "too little work"
    assert found(F.linear, x[:, :766].contiguous(), w[:, :766].contiguous(), b) == [], "rows that are not aligned"
    assert found(TANH, *tensors(torch.float32)) == [], "epilogues are for half precision"


@torch.no_grad()
def test_the_same_product_has_one_workload_under_any_operator() -> None:
    x, w, b, v = tensors()
    (one,), (other,) = found(TANH, x, w, b, v), found(layer(written_out), x, w, b, v)
    assert one.workload == other.workload
    (third,) = found(TANH, x[:2].contiguous(), w, b, v)
    assert third.workload != one.workload


@torch.no_grad()
def test_no_library_finds_no_product() -> None:
    (graph,) = capture(TANH, tensors())
    facts = GraphFacts(graph.module.graph)
    assert products_of(facts, regions_from(facts), "") == []

"""Capture leaves no traces and sees what a backend sees; programs of aten calls survive JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotune.compiler.assemble import kernel_name, program_ops
from autotune.compiler.capture import hooks
from autotune.compiler.capture.recording import capture
from autotune.compiler.lower.facts import GraphFacts
from autotune.compiler.lower.nodes import op_name
from autotune.compiler.regions import aten
from autotune.compiler.regions.find import find_regions, regions_from
from autotune.errors import Unsupported
from autotune.runtime.backend import deploy_backend
from autotune.runtime.inductor import region_pass
from tests.support.capture_helpers import regions_of, uncached
from tests.unit.compiler.lower.test_translate import FORWARD, t


def names(captured: Any) -> list[str]:
    return [op_name(n) for g in captured for n in g.module.graph.nodes if n.op == "call_function"]


def test_captured_graphs_are_decomposed_and_named_by_their_modules() -> None:
    def f(x: Tensor) -> Tensor:
        return F.gelu(F.layer_norm(torch.softmax(x, -1), (8,)))

    captured = capture(f, (t(4, 8),))
    assert {"amax", "exp", "var_mean", "rsqrt", "erf"} <= set(names(captured))
    (region,) = find_regions(captured[0].module)
    assert region.workload is not None
    assert region.workload.label == "softmax+layer_norm+gelu f32 4x8"
    assert kernel_name(program_ops(region.workload.source)) == "autotune_softmax_layer_norm_gelu"


def test_branches_are_graphs_too() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: torch.tanh(x) * 2, lambda x: torch.exp(x) * 2, (x.relu(),))  # type: ignore[no-any-return]

    x = t(4, 8)
    captured = capture(f, (x,), grad=False)
    assert [{*names([g])} - {"getitem", ""} for g in captured] == [
        {"tanh", "mul"}, {"exp", "mul"}, {"relu", "sum", "gt"},
    ]  # fmt: skip


def test_capture_keeps_side_effects_equal_to_eager_mode() -> None:
    """The passes of Inductor that graphs go through rewrite copies: what a program prints or keeps stays right."""
    seen: list[Tensor] = []

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 1e6, lambda x: x - 1, lambda x: torch.softmax(x, -1), (x,))
        seen.append(torch.add(y @ w, x))
        return seen[-1].sum()

    x, w = t(4, 8), t(8, 8)
    capture(f, (x, w), grad=False)
    torch.testing.assert_close(seen[0], torch.softmax(x, -1) @ w + x)


def test_gradients_are_not_accumulated() -> None:
    layer = nn.LayerNorm(8)
    x = t(4, 8, grad=True)
    captured = capture(layer, (x,))
    assert [g.kind for g in captured] == ["forward", "backward"]
    assert x.grad is None
    assert all(p.grad is None for p in layer.parameters())


def test_grad_mode_is_given_back() -> None:
    layer = nn.LayerNorm(8)
    assert [g.kind for g in capture(layer, (t(4, 8),), grad=False)] == ["inference"]
    assert torch.is_grad_enabled()


def test_captures_are_independent() -> None:
    """Neither an earlier capture nor the caller's own compilation of the same function is found again."""

    def f(x: Tensor) -> Tensor:
        return x * 2

    for rows in range(2, 14):
        assert names(capture(f, (t(rows, 4),))) == ["mul"]
    assert names(capture(f, (t(2, 4),))) == ["mul"]


def test_graph_breaks_give_several_graphs() -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    assert [names([g]) for g in capture(f, (t(4),))] == [["mul"], ["add"]]


def test_keyword_arguments() -> None:
    assert names(capture(lambda x, *, y: x + y, (t(4),), {"y": t(4)})) == ["add"]


@pytest.mark.slow
def test_deployment_looks_at_the_same_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str | None]] = []

    def looking(facts: GraphFacts) -> Any:
        found = regions_from(facts)
        seen.append([r.workload and r.workload.fingerprint for r in found])
        return found

    monkeypatch.setattr(region_pass, "regions_from", looking)
    layer, x = nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.2), nn.Linear(8, 8), nn.Softmax(-1)), t(4, 8)
    with uncached():
        torch.compile(layer, backend=deploy_backend, dynamic=False)(x).square().sum().backward()
    graphs = capture(layer, (x,))
    assert seen == [[r.workload and r.workload.fingerprint for r in find_regions(g.module)] for g in graphs]
    assert len(seen) == 2
    assert all(seen)


@pytest.mark.parametrize("name", ["layer_norm", "lstm", "rope", "embedding", "cross_entropy", "triangle", "arange"])
def test_programs_survive_json(name: str) -> None:
    fn, args = FORWARD[name]
    for region in regions_of(fn, *args, grad=False):
        assert region.workload is not None
        again = aten.from_json(json.loads(json.dumps(region.workload.source)))
        inputs = []
        for spec in region.workload.source["inputs"]:
            dtype = getattr(torch, spec["dtype"])
            numel = 1 + sum((n - 1) * s for n, s in zip(spec["shape"], spec["strides"], strict=True))
            flat = torch.zeros(numel, dtype=dtype) if not dtype.is_floating_point else torch.randn(numel).to(dtype)
            inputs.append(flat.as_strided(spec["shape"], spec["strides"]))
        for got, want in zip(again(*inputs), region.submodule(*inputs), strict=True):
            assert got.stride() == want.stride()
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_devices_are_put_in_place_of_those_recorded() -> None:
    (region,) = regions_of(lambda x: F.dropout(x), t(4, 8))
    assert region.workload is not None
    program = aten.from_json(region.workload.source, device="meta")
    assert {n.kwargs["device"].type for n in program.graph.nodes if "device" in n.kwargs} == {"meta"}


BASE = {"format": 1, "inputs": [{}], "result": [{"node": 1}]}


@pytest.mark.parametrize(
    "call",
    [
        {"op": "os.system.default", "args": ["true"]},
        {"op": "builtins.eval", "args": ["1"]},
        {"op": "aten.no_such_thing.default", "args": []},
        {"op": "aten.add.__class__", "args": []},
        {"op": "aten.add.Tensor", "args": [{"node": 5}, 1]},
        {"op": "aten.add.Tensor", "args": [{"dtype": "load"}, 1]},
        {"op": "aten.add.Tensor", "args": [{"module": "os"}, 1]},
    ],
)
def test_only_aten_is_let_in(call: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        aten.from_json({**BASE, "calls": [call]})


def test_only_aten_is_written() -> None:
    graph = torch.fx.Graph()
    graph.output((graph.call_function(print, ("x",)),))
    with pytest.raises(Unsupported):
        aten.to_json(torch.fx.GraphModule(nn.Module(), graph))


def test_the_bias_of_a_convolution_is_captured_where_deployment_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "DEVICES", {"cpu"})
    module = nn.Sequential(nn.Conv2d(8, 16, 3), nn.GELU())
    met: list[Any] = []
    monkeypatch.setattr(region_pass, "regions_from", lambda facts: met.append(regions_from(facts)) or met[-1])
    with torch.no_grad(), uncached():
        torch.compile(module, backend=deploy_backend, dynamic=False)(t(2, 8, 9, 9))
    (captured,) = capture(module, (t(2, 8, 9, 9),), grad=False)
    here, (there,) = find_regions(captured.module), met
    assert "add" in {op_name(n) for n in here[-1].nodes}
    assert [r.workload for r in here] == [r.workload for r in there]

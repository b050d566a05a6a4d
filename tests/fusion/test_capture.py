"""Capture leaves no traces and sees what a backend sees; programs of aten calls survive JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_helpers import regions_of
from test_translate import FORWARD, t
from torch import Tensor, nn

from autotune.errors import Unsupported
from autotune.fusion import aten
from autotune.fusion.capture import aot_backend, capture
from autotune.fusion.regions import find_regions
from autotune.fusion.translate import op_name


def names(captured: Any) -> list[str]:
    return [op_name(n) for g in captured.graphs for n in g.module.graph.nodes if n.op == "call_function"]


def test_composites_stay_whole() -> None:
    def f(x: Tensor) -> Tensor:
        return F.gelu(F.layer_norm(torch.softmax(x, -1), (8,)))

    assert [n for n in names(capture(f, (t(4, 8),))) if n != "getitem"] == ["_softmax", "native_layer_norm", "gelu"]


def test_gradients_are_not_accumulated() -> None:
    layer = nn.LayerNorm(8)
    x = t(4, 8, grad=True)
    captured = capture(layer, (x,))
    assert [g.kind for g in captured.graphs] == ["forward", "backward"]
    assert x.grad is None
    assert all(p.grad is None for p in layer.parameters())


def test_grad_mode_is_given_back() -> None:
    layer = nn.LayerNorm(8)
    assert [g.kind for g in capture(layer, (t(4, 8),), grad=False).graphs] == ["inference"]
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

    assert [names(type("C", (), {"graphs": [g]})) for g in capture(f, (t(4),)).graphs] == [["mul"], ["add"]]


def test_keyword_arguments() -> None:
    assert names(capture(lambda x, *, y: x + y, (t(4),), {"y": t(4)})) == ["add"]


def test_a_backend_of_ones_own_sees_the_same_graphs() -> None:
    seen: list[tuple[str, list[str | None]]] = []

    def compiler(gm: torch.fx.GraphModule, example_inputs: Any, kind: str) -> Any:
        seen.append((kind, [r.workload and r.workload.fingerprint for r in find_regions(gm)]))
        return gm.forward

    layer, x = nn.LayerNorm(8), t(4, 8)
    torch.compile(layer, backend=aot_backend(compiler), dynamic=False)(x).sum().backward()
    (graphs,) = [capture(layer, (x,)).graphs]
    ours = [(g.kind, [r.workload and r.workload.fingerprint for r in find_regions(g.module)]) for g in graphs]
    assert seen == ours
    assert all(found for _, found in ours)


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
    (region,) = regions_of(lambda x: x * torch.arange(4.0), t(4))
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

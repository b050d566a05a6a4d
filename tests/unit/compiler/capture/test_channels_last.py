"""Convolutions with their channels last: the same numbers in the same strides, and no pass over memory between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor import config
from torch.utils import _pytree as pytree

from autotune.compiler.capture import convolutions as layouts
from autotune.compiler.capture import hooks
from autotune.compiler.capture.convolutions import cudnn_converts, inductor_wants, put_channels_last
from autotune.compiler.capture.recording import capture
from autotune.compiler.regions.find import find_regions
from tests.support.node_strides import checking_backend, strides_apart

aten = torch.ops.aten
LAST = torch.channels_last


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Channels last on a CPU too, in every graph; what was asked is kept."""
    asked: list[bool] = []

    def always(gm: fx.GraphModule, inference: bool) -> bool:
        asked.append(inference)
        return True

    def every(volumes: Any) -> bool:
        return always(volumes[0].graph.owning_module, not hooks.takes_gradients(volumes[0].graph))

    monkeypatch.setattr(layouts, "inductor_wants", always)
    monkeypatch.setattr(layouts, "cudnn_converts", every)
    yield asked
    torch._dynamo.reset()


def conv(a: int, b: int, k: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(a, b, k, padding=k // 2, **options)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.short = conv(4, 6), conv(6, 6, bias=False), conv(4, 6, 1)
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.relu(self.norm(self.second(F.relu(self.first(x)))) + self.short(x))
        return y


class Kept(nn.Module):
    """Results, one of them a view, in the strides of eager mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.conv(x)
        return y, y.transpose(1, 2), F.gelu(y).permute(0, 2, 3, 1)


class Rigid(nn.Module):
    """Reads the memory of a result by its strides."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        windows = torch.as_strided(y, (3, 20), (7, 1))
        return F.relu(windows) + y.mean()


class Gaps(Rigid):
    """The same of a view with gaps."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_strided(self.conv(x)[:, 1:, :, ::2], (3, 20), (7, 1)) * 2


class Views(nn.Module):
    """Results that share memory, with gaps, overlaps and repetitions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.conv(x)
        return y, y.transpose(1, 2), *y.split(2, 1), y[:1].expand(3, -1, -1, -1), y.unfold(3, 2, 1), y[:, 0, ::2]


class Crossed(nn.Module):
    """Attention between channels: its kernels take no tensors but those whose pixels are next to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = conv(4, 24, 1), conv(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 3, 2, 4, 120).unbind(1)
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).view(2, 8, 10, 12))
        return y


def spatial() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 4, 10, 12)


def volume() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 4, 6, 4, 8)


class Volumes(nn.Module):
    """A 3D U-Net of two levels, with instance norms."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = self.double(1, 6), self.double(6, 8, 2)
        self.across, self.up, self.head = nn.ConvTranspose3d(8, 6, 2, 2), self.double(12, 6), nn.Conv3d(6, 3, 1)

    @staticmethod
    def double(given: int, made: int, stride: int = 1) -> nn.Sequential:
        first = [nn.Conv3d(given, made, 3, stride, 1), nn.InstanceNorm3d(made, affine=True), nn.LeakyReLU(0.01)]
        return nn.Sequential(*first, nn.Conv3d(made, made, 3, 1, 1), nn.InstanceNorm3d(made), nn.LeakyReLU(0.01))

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        y: Tensor = self.head(self.up(torch.cat([self.across(self.deep(x)), x], dim=1)))
        return y


MODULES: dict[str, tuple[Callable[[], Callable[..., Any]], Callable[[], Tensor]]] = {
    "residual": (Residual, spatial),
    "one channel": (lambda: nn.Sequential(conv(1, 6), nn.ReLU(), conv(6, 5)), lambda: spatial()[:, :1]),
    "pooled, flat": (lambda: nn.Sequential(conv(4, 6), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(180, 3)), spatial),
    "averaged": (lambda: nn.Sequential(conv(4, 6), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()), spatial),
    "grouped": (lambda: nn.Sequential(conv(4, 8, groups=2), nn.ReLU(), conv(8, 8, groups=8)), spatial),
    "group norm": (lambda: nn.Sequential(conv(4, 8), nn.GroupNorm(2, 8), nn.SiLU(), conv(8, 4)), spatial),
    "upwards": (lambda: nn.Sequential(conv(4, 6), nn.ConvTranspose2d(6, 4, 2, 2), nn.Tanh()), spatial),
    "pixels": (lambda: nn.Sequential(conv(4, 8, 1), nn.PixelShuffle(2), conv(2, 3)), spatial),
    "already": (lambda: nn.Sequential(conv(4, 6), nn.ReLU()), lambda: spatial().to(memory_format=LAST)),
    "kept": (Kept, spatial),
    "rigid": (Rigid, spatial),
    "gaps": (Gaps, spatial),
    "views": (Views, spatial),
    "crossed": (Crossed, spatial),
    "no channels to tell": (
        lambda: nn.Sequential(nn.Mish(), conv(1, 4), nn.Flatten()),
        lambda: spatial()[:, :1].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    ),
    "nor a kernel": (lambda: nn.Sequential(conv(1, 4, 1), nn.ReLU()), lambda: spatial()[:, :1].clone()),
    "instance norm": (lambda: nn.Sequential(nn.InstanceNorm2d(4, affine=True), conv(4, 6)), lambda: spatial()[:1]),
    "hard": (lambda: nn.Sequential(nn.ReLU6(), conv(4, 6)), spatial),
    "one row, flat": (lambda: nn.Sequential(conv(4, 6), nn.Flatten(), nn.Linear(72, 3)), lambda: spatial()[:, :, :1]),
    "volumes": (Volumes, lambda: volume()[:, :1]),
    "batch norm of volumes": (
        lambda: nn.Sequential(nn.Conv3d(4, 6, 3), nn.BatchNorm3d(6), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(6, 4, 1)),
        volume,
    ),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(conv(4, 6)), spatial),
}


def run_graphs(fn: Callable[..., Any], seen: list[fx.GraphModule]) -> Callable[..., Any]:
    """``fn`` through the captured graphs, run node by node: each result has to have the graph's strides."""

    wrong: list[str] = []
    compiled = torch.compile(fn, backend=checking_backend(seen, wrong), dynamic=False)

    def run(*args: Any) -> Any:
        results = compiled(*args)
        assert wrong == []
        return results

    return run


def agree(ours: Any, eager: Any) -> None:
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(eager), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert not strides_apart(a, b), f"{a.stride()}, not {b.stride()}"


def convolutions(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.target is aten.convolution.default]


@pytest.mark.parametrize("name", MODULES)
def test_inference_is_that_of_eager_mode(name: str, forced: list[bool]) -> None:
    make, given = MODULES[name]
    torch.manual_seed(0)
    module, x = make(), given()
    if isinstance(module, nn.Module):
        module.eval()
    seen: list[fx.GraphModule] = []
    with torch.no_grad():
        agree(run_graphs(module, seen)(x), module(x))
    for node in (n for gm in seen for n in convolutions(gm)):
        form = LAST if node.meta["val"].ndim == 4 else torch.channels_last_3d
        assert node.meta["val"].is_contiguous(memory_format=form), node.format_node()
    assert forced == [True]


@pytest.mark.parametrize("name", MODULES)
def test_training_is_that_of_eager_mode(name: str, forced: list[bool]) -> None:
    make, given = MODULES[name]
    torch.manual_seed(0)
    module, x = make(), given().requires_grad_()
    parameters = [x, *module.parameters()] if isinstance(module, nn.Module) else [x]

    def step(run: Callable[..., Any]) -> Any:
        results = pytree.tree_leaves(run(x))
        grads = torch.autograd.grad([r.square().mean() for r in results], parameters, allow_unused=True)
        return [r.detach() for r in results], [g for g in grads if g is not None]

    eager = step(module)
    seen: list[fx.GraphModule] = []
    agree(step(run_graphs(module, seen)), eager)
    assert forced == [False]
    assert len(seen) == 2


def test_results_that_shared_memory_share_it(forced: list[bool]) -> None:
    module = Views()
    with torch.no_grad():
        results = run_graphs(module, [])(spatial())
    assert forced
    assert len({r.untyped_storage().data_ptr() for r in results}) == 1


def test_attention_gets_the_strides_that_it_was_chosen_for(forced: list[bool]) -> None:
    (graph,) = capture(Crossed(), [spatial()], grad=False)
    (attention,) = (n for n in graph.module.graph.nodes if "attention" in str(n.target))
    assert convolutions(graph.module)[0].meta["val"].is_contiguous(memory_format=LAST)
    assert all(n.meta["val"].stride(-1) == 1 for n in attention.all_input_nodes)


def test_nothing_is_converted_between_convolutions(forced: list[bool]) -> None:
    module = nn.Sequential(conv(4, 6), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), conv(6, 8), nn.ReLU(), conv(8, 4))
    (graph,) = capture(module.eval(), [spatial()], grad=False)
    copies = [n for n in graph.module.graph.nodes if n.target is aten.clone.default]
    sources = [n.args[0] for n in copies]
    assert [s.op for s in sources[:4]] == ["placeholder"] * 4, "of the input and three weights alone"
    assert len(copies) == 5, "and the result, put back"
    regions = [r for r in find_regions(graph.module) if r.workload is not None]
    between = [r for r in regions if any(n.target is aten.relu.default for n in r.nodes)]
    assert len(between) == 2
    for r in between:
        assert all(n.meta["val"].is_contiguous(memory_format=LAST) for n in r.outputs)


def test_a_graph_stays_as_it_is_where_it_is_not_wanted_or_not_of_that_device(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(conv(4, 6), nn.ReLU())
    with config.patch(layout_optimization=False):
        (graph,) = capture(module, [spatial()], grad=False)
    assert not convolutions(graph.module)[0].meta["val"].is_contiguous(memory_format=LAST)
    before = str(graph.module.graph)
    monkeypatch.setattr(layouts, "inductor_wants", lambda gm, inference: False)
    put_channels_last(graph.module, True)
    monkeypatch.setattr(layouts, "inductor_wants", lambda gm, inference: True)
    monkeypatch.setattr(layouts, "FORMAT_DEVICES", {"cuda"})
    put_channels_last(graph.module, True)
    assert str(graph.module.graph) == before
    monkeypatch.setattr(layouts, "FORMAT_DEVICES", {"cpu"})
    put_channels_last(graph.module, True)
    assert convolutions(graph.module)[0].meta["val"].is_contiguous(memory_format=LAST)


def test_of_one_dimension_or_symbolic_shapes_it_stays_as_it_is(forced: list[bool]) -> None:
    capture(nn.Sequential(nn.Conv1d(4, 6, 3), nn.ReLU()), [torch.randn(2, 4, 9)], grad=False)
    seen: list[fx.GraphModule] = []
    run = torch.compile(
        nn.Sequential(conv(4, 6), nn.ReLU()),
        backend=checking_backend(seen, []),
        dynamic=True,
    )
    with torch.no_grad():
        run(spatial())
    assert seen
    assert not forced


@pytest.mark.parametrize(
    ("module", "given"),
    [(Volumes, volume), (lambda: nn.Sequential(conv(1, 6), nn.ReLU(), conv(6, 4)), spatial)],
    ids=["3D", "2D"],
)
def test_a_first_convolution_of_one_channel_takes_its_gradient_channels_last(
    module: Callable[[], nn.Module], given: Callable[[], Tensor], forced: list[bool]
) -> None:
    """PyTorch chooses the format by the input and the kernel, whose strides say nothing with one channel."""
    seen: list[fx.GraphModule] = []
    x = given()[:, :1].contiguous()
    run_graphs(module(), seen)(x).square().mean().backward()
    assert forced == [False]
    backward = [n for gm in seen for n in gm.graph.nodes if n.target is aten.convolution_backward.default]
    (first,) = {n for n in backward if n.args[1].meta["val"].shape[1] == 1}
    gradient, image = (n.meta["val"] for n in first.args[:2])
    assert gradient.stride(1) == image.stride(1) == image.stride(-1) == 1
    assert x.stride(1) > 1


def test_volumes_are_converted_in_half_precision_on_gpus() -> None:
    def wanted(
        *kernels: tuple[int, int], dtype: torch.dtype = torch.float16, cuda: bool = True, groups: int = 1
    ) -> bool:
        graph, nodes = fx.Graph(), list[fx.Node]()
        for made, given in kernels:
            x, weight = graph.placeholder("x"), graph.placeholder("weight")
            weight.meta["val"] = SimpleNamespace(is_cuda=cuda, dtype=dtype, shape=(made, given, 3, 3, 3))
            ones = [1, 1, 1]
            args = (x, weight, None, ones, ones, ones, False, [0, 0, 0], groups)
            nodes.append(graph.call_function(aten.convolution.default, args))
        return cudnn_converts(nodes)

    unet = ((32, 1), (32, 32), (64, 32))
    assert wanted(*unet)
    assert wanted(*unet, dtype=torch.bfloat16)
    assert not wanted(*unet, dtype=torch.float32)
    assert not wanted(*unet, cuda=False)
    assert not wanted((32, 1))
    assert not wanted((32, 32), groups=2)
    with config.patch(layout_optimization=False):
        assert not wanted(*unet)


def test_torch_is_asked_and_not_relied_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.graph import GraphLowering

    (graph,) = capture(nn.Sequential(conv(4, 6), nn.ReLU()), [spatial()], grad=False)
    assert isinstance(inductor_wants(graph.module, True), bool)
    for answer in (True, False):
        monkeypatch.setattr(GraphLowering, "decide_layout_opt", staticmethod(lambda gm, is_inference, a=answer: a))
        assert inductor_wants(graph.module, True) is answer
    monkeypatch.delattr(GraphLowering, "decide_layout_opt")
    assert inductor_wants(graph.module, True) is False

"""Results that are written over an input which nobody needs any more.

Kernels of a CPU are not deployed so. Here they are, since what decides about the graph is the same for all devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotune
from autotune.compiler.program.program import overwritable
from autotune.compiler.targets.cuda import OVERWRITES
from autotune.ir.graph import Graph
from autotune.runtime.inductor import region_call, region_op, region_pass
from autotune.runtime.inductor.region_call import Pairs
from autotune.runtime.launch.cuda import LaunchError
from autotune.runtime.launch.executor import load_executor
from autotune.runtime.launch.verify import Check, copies_of_overwritten
from autotune.store.records import Schedule
from autotune.task import Artifact, Kernel
from autotune.workload import Workload
from tests.support.deployment import Tune
from tests.support.memory import peak_bytes
from tests.support.runtime.models import twin

ROWS, WIDTH = 256, 64


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules of pointwise regions say which inputs their kernels may overwrite."""

    real = region_call.permitted

    def permitted(artifact: Artifact | None, slots: tuple[int, ...], results: tuple[int, ...]) -> Pairs:
        assert artifact is not None
        return real(replace(artifact, target="sm_90"), slots, results)

    monkeypatch.setattr(region_pass, "permitted", permitted)
    monkeypatch.setattr(region_call, "permitted", permitted)


Made = tuple[Tensor, ...]


def store(tune: Tune, fn: Callable[..., Any], *args: Tensor) -> None:
    """Store kernels for all regions of a function that say what they may overwrite."""
    workloads: list[Workload] = []

    def select(workload: Workload) -> bool:
        workloads.append(workload)
        return True

    def edit(schedule: Schedule) -> Schedule:
        assert schedule.artifact is not None
        pairs = [list(pair) for pair in overwritable(Graph.from_json(workloads[-1].spec))]
        kernels = tuple(replace(k, launch={**k.launch, OVERWRITES: pairs}) for k in schedule.artifact.kernels)
        return replace(schedule, artifact=replace(schedule.artifact, kernels=kernels))

    tune(fn, args, select=select, edit=edit)


def compiled(fn: Callable[..., Any], *args: Tensor, backend: str = "autotune") -> Callable[..., Any]:
    torch._dynamo.reset()
    made: Callable[..., Any] = torch.compile(fn, backend=backend)
    made(*args)
    return made


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


@torch.no_grad()
def test_an_activation_overwrites_its_input(tune: Tune) -> None:
    model, x = Mlp().eval(), torch.randn(4, ROWS // 4, WIDTH)
    hidden = 8 * WIDTH * ROWS * 4

    def peak(backend: str = "autotune") -> int:
        step = compiled(model, x, backend=backend)
        torch.testing.assert_close(step(x), model(x), atol=2e-5, rtol=2e-5)
        return peak_bytes(lambda: step(x))

    tune(model, (x,))
    apart = peak()
    store(tune, model, x)
    over = peak()
    assert autotune.counters().hits == 2
    assert abs(apart - over - hidden) < hidden / 4
    assert over <= 1.02 * peak("inductor")


def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """True for every input that a kernel overwrote, of those that it may."""
    asked: list[bool] = []
    real = region_op.over

    def over(*args: Any) -> Any:
        made = real(*args)
        asked.append(made is not None)
        return made

    monkeypatch.setattr(region_op, "over", over)
    return asked


W = torch.randn(WIDTH, WIDTH) / 8


def later_reader(x: Tensor) -> Made:
    h = x @ W
    return F.gelu(h), h @ W


def a_view_of_it_is_returned(x: Tensor) -> Made:
    h = x @ W
    return F.gelu(h), h.view(-1)[3:]


def a_view_is_read_later(x: Tensor) -> Made:
    h = x @ W
    v = h.view(2, -1, WIDTH)
    return F.gelu(v) @ W, h.t() @ v.reshape(-1, WIDTH)


def what_the_caller_gave(x: Tensor) -> Made:
    return F.gelu(x) @ W, x @ W


def a_weight(x: Tensor) -> Made:
    return x @ F.gelu(W)


def half_of_a_tensor(x: Tensor) -> Tensor:
    gate, up = (x @ torch.cat([W, W], 1)).chunk(2, -1)
    return (F.silu(gate) * up) @ W


def other_strides(x: Tensor) -> Tensor:
    return F.gelu((x @ W).t()) @ x


def a_bias_and_rows(x: Tensor) -> Tensor:
    h = x @ W
    return (F.gelu(h) + (x @ W[:, :1]) + W[0]) @ W


def both_halves(x: Tensor) -> Tensor:
    return (F.silu(x @ W) * (x @ W.t())) @ W


def two_results(x: Tensor) -> Tensor:
    a, b = x @ W, x @ W.t()
    return (a.sin() * b) @ (a * b.cos()).t()


def a_scan_made_it(x: Tensor) -> Tensor:
    return F.gelu(torch.cumsum(x, 0)) @ W


def again_and_again(x: Tensor) -> Tensor:
    for _ in range(3):
        x = F.gelu(x @ W)
    return x @ W


def changed_by_the_user(x: Tensor) -> Made:
    h = x @ W
    h[:, 3] += 1
    y = F.gelu(h)
    h.mul_(2)
    return y, h


def a_picture(x: Tensor) -> Tensor:
    image = x[:, :48].reshape(4, 3, 8, -1).contiguous(memory_format=torch.channels_last)
    weight = W[:16, :27].reshape(16, 3, 3, 3).contiguous(memory_format=torch.channels_last)
    return F.conv2d(F.gelu(F.conv2d(image, weight)), weight[:, :1].expand(16, 16, 3, 3).contiguous())


@pytest.mark.parametrize(
    ("fn", "overwritten"),
    [
        (later_reader, 0), (a_view_of_it_is_returned, 0), (a_view_is_read_later, 0), (what_the_caller_gave, 0),
        (a_weight, 0), (half_of_a_tensor, 0), (changed_by_the_user, 0), (other_strides, 1), (a_bias_and_rows, 1),
        (both_halves, 1), (two_results, 2), (a_scan_made_it, 1), (again_and_again, 3), (a_picture, 1),
    ],
)  # fmt: skip
@torch.no_grad()
def test_only_inputs_without_other_readers(
    tune: Tune, monkeypatch: pytest.MonkeyPatch, fn: Callable[[Tensor], Any], overwritten: int
) -> None:
    asked, x = taken(monkeypatch), torch.randn(ROWS, WIDTH)
    before, want = x.clone(), fn(x)
    store(tune, fn, x)
    torch.testing.assert_close(compiled(fn, x)(x), want, atol=2e-4, rtol=2e-5)
    assert sum(asked) == overwritten
    assert torch.equal(x, before)
    assert autotune.counters().hits
    assert autotune.counters().fallbacks == 0


@torch.no_grad()
def test_inductors_own_switch(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, x = taken(monkeypatch), torch.randn(ROWS, WIDTH)
    store(tune, both_halves, x)
    with torch._inductor.config.patch(inplace_buffers=False):
        torch.testing.assert_close(compiled(both_halves, x)(x), both_halves(x), atol=2e-4, rtol=2e-5)
    assert asked
    assert not any(asked)


def test_gradients(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass keeps its tensors; the backward pass writes the gradient over them."""
    asked, model, x = taken(monkeypatch), Mlp(), torch.randn(ROWS, WIDTH)
    mine = twin(model)
    store(tune, twin(model), x)
    asked.clear()
    torch._dynamo.reset()
    for step in (model, torch.compile(mine, backend="autotune")):
        step(x).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, atol=1e-6, rtol=2e-5, msg=lambda m, name=name: f"{name}: {m}")
    assert asked == [False, True]  # forward; backward, what was kept for it
    assert autotune.counters().hits >= 2


def capped_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(30 * torch.tanh(x @ weight / 30), target)


def test_a_loss_gradient_is_written_over_the_logits(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.compile does it: autograd keeps the logits for the backward pass alone."""
    asked, words = taken(monkeypatch), 64 * WIDTH
    x, weight, target = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, words), torch.randint(words, (ROWS,))
    x.requires_grad_()

    def step(run: Callable[..., Any]) -> Tensor:
        (gradient,) = torch.autograd.grad(run(x, weight, target), [x])
        return gradient

    def peak(backend: str = "autotune") -> int:
        torch._dynamo.reset()
        run: Callable[..., Any] = torch.compile(capped_loss, backend=backend)
        torch.testing.assert_close(step(run), step(capped_loss), atol=1e-6, rtol=2e-5)
        return peak_bytes(lambda: step(run))

    store(tune, capped_loss, x, weight, target)
    over = peak()
    assert any(asked)
    assert over <= 1.02 * peak("inductor")
    asked.clear()
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert peak() - over >= ROWS * words * 4 / 2
    assert not any(asked)


@pytest.mark.parametrize(("first", "overwritten"), [(48, True), (49, False)])
def test_only_an_aligned_part_that_autograd_saved(
    tune: Tune, monkeypatch: pytest.MonkeyPatch, first: int, overwritten: bool
) -> None:
    """Rows of 33 floats: kernels of a GPU write 16 bytes at a time."""

    def fn(x: Tensor, weight: Tensor) -> Made:
        hidden, part = x[:15] @ weight, (x.detach() @ weight)[first : first + 15]
        return (torch.tanh(hidden) * part).sum(), hidden

    asked, x, weight = taken(monkeypatch), torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, 33)
    x.requires_grad_()
    store(tune, fn, x, weight)
    asked.clear()
    torch._dynamo.reset()
    got, want = (torch.autograd.grad(f(x, weight)[0], x) for f in (torch.compile(fn, backend="autotune"), fn))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert any(asked) == overwritten
    assert asked


def test_only_the_last_of_several_kernels_overwrites() -> None:
    plain, writing = Kernel("k"), Kernel("k", launch={OVERWRITES: [[1, 0]]})
    for kernels, pairs in (((plain, writing), ((7, 2),)), ((writing, plain), ()), ((writing,), ((7, 2),)), ((), ())):
        assert region_call.permitted(Artifact("sm_90", kernels), [5, 7], [2]) == pairs


def test_in_place_keeps_inputs_with_a_live_view() -> None:
    kept = torch.randn(4, 4)
    for values, apart in (((kept, kept.clone()), True), ((kept, kept[1:]), False)):
        graph = torch.fx.Graph()
        nodes = [graph.placeholder(f"x{n}") for n in range(2)]
        for node, value in zip(nodes, values, strict=True):
            node.meta["val"] = value
        region = graph.call_function(torch.sin, (nodes[0],))
        assert region_op._is_last(nodes[0], region, nodes[:1]) == apart


@pytest.mark.parametrize("trouble", ["checked", "fails", "stored anew"])
@torch.no_grad()
def test_in_place_copies_inputs_that_are_read_again(tune: Tune, monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    """A check of the results, operators after a failure, and kernels that may not overwrite anything."""
    asked, x = taken(monkeypatch), torch.randn(ROWS, WIDTH)
    store(tune, both_halves, x)
    again: list[str] = []

    def wrong(self: Check, inputs: Any, outputs: Any, expected: Any) -> str:
        again.append("checked")
        torch.testing.assert_close(list(self.expected(inputs) or ()), expected)
        return ""

    def copied(*tensors: Any) -> Any:
        again.append(trouble)
        made = copies_of_overwritten(*tensors)
        assert not {t.data_ptr() for t in made} & {t.data_ptr() for t in tensors[1]}
        return made

    monkeypatch.setattr(Check, "wrong", wrong)
    monkeypatch.setattr(region_call, "copies_of_overwritten", copied)
    if trouble == "fails":
        monkeypatch.setattr(region_call, "prepare", failing)
    if trouble == "stored anew":
        monkeypatch.setattr(region_call, "permitted", lambda *_: ())
    torch._dynamo.reset()
    step = autotune.compile(both_halves, verify="always" if trouble == "checked" else "never")
    for _ in range(3):
        torch.testing.assert_close(step(x), both_halves(x), atol=2e-4, rtol=2e-5)
    assert any(asked)
    assert again == [trouble] * 3
    assert autotune.counters().fallbacks == (trouble == "fails")


def failing(*args: Any) -> Any:
    """An executor whose launches fail."""
    executor = load_executor(*args)
    executor._steps = tuple((refused, order) for _, order in executor._steps)
    return executor


def refused(*_: Any) -> None:
    raise LaunchError("refused")

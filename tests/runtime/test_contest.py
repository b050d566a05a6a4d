"""Pieces of library calls between regions: Inductor's code or torch's own calls, whichever is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autotune.runtime import assemble, contest
from tests.runtime.conftest import Tune
from tests.runtime.test_backend import close, compiled

aten = torch.ops.aten


def piece(fn: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    """An aten graph with fake tensors in ``meta``, as the assembler cuts it out."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        gm: fx.GraphModule = make_fx(lambda *a: (fn(*a),))(*map(mode.from_tensor, args))
    return gm


def product() -> fx.GraphModule:
    return piece(torch.mm, torch.empty(8, 4), torch.empty(4, 6))


@pytest.mark.parametrize(
    ("patches", "asks"),
    [({}, False), ({"max_autotune": True}, True), ({"max_autotune_gemm": False}, False), ({"epilogue": True}, False)],
)
def test_who_asks_for_alternatives(patches: dict[str, Any], asks: bool) -> None:
    assert contest.wanted(patches) is asks


@pytest.mark.parametrize(("times", "torch_wins"), [((5.0, 9.0), True), ((9.0, 5.0), False), ((9.0, 9.1), False)])
def test_the_faster_one_and_inductor_where_they_tie(
    monkeypatch: pytest.MonkeyPatch, times: tuple[float, float], torch_wins: bool
) -> None:
    monkeypatch.setattr(
        contest, "_timed", lambda calls, device: [call() and us for call, us in zip(calls, times, strict=True)]
    )
    assert contest.torch_is_faster(product(), lambda x, w: (x @ w,)) is torch_wins


def test_what_is_slow_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]  # a busy machine may take longer over a product than any time that a test would sleep
    monkeypatch.setattr(contest, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def wait() -> None:
        now[0] += 0.005

    def slow(x: Tensor, w: Tensor) -> tuple[Tensor]:
        wait()
        return (x @ w,)

    assert contest.torch_is_faster(product(), slow)
    module = product()
    assert not contest.torch_is_faster(_waiting(module, wait), module.forward)


def _waiting(module: fx.GraphModule, wait: Callable[[], None]) -> fx.GraphModule:
    class Slow(fx.GraphModule):
        def forward(self, *args: Tensor) -> Any:
            wait()
            return module.forward(*args)

    return Slow(module, module.graph)


def test_inputs_are_as_they_will_be() -> None:
    state = torch.get_rng_state()
    like = [
        torch.empty(6, 4).t(), torch.empty(5, 1, dtype=torch.bfloat16).expand(5, 7), torch.empty(0, 3),
        torch.empty(4, dtype=torch.int64), torch.empty((), dtype=torch.float16), torch.empty(3, 8)[:, 2:5],
    ]  # fmt: skip
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in like]
    made = contest._random(fakes)
    assert made is not None
    for a, b in zip(made, like, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    assert made[0].unique().numel() > 20
    assert not made[3].any(), "an index that every table has"
    assert torch.equal(state, torch.get_rng_state())


def test_what_is_not_to_be_run_twice_stays_with_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "_timed", lambda *_: pytest.fail("it was timed"))
    attention = piece(
        lambda q: aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5)[0], torch.empty(1, 2, 8, 16)
    )
    written = piece(lambda x, y: x.copy_(y), torch.empty(4), torch.empty(4))
    for module in (attention, written):
        assert not contest.torch_is_faster(module, lambda *_: None)


def test_failing_leaves_it_to_inductor() -> None:
    def fails(*_: Tensor) -> Any:
        raise RuntimeError("no")

    assert not contest.torch_is_faster(product(), fails)


def test_a_gpu_is_timed_while_it_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []

    @contextmanager
    def made_current(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    timed: list[list[torch.device]] = []

    def on_gpu(call: object) -> Callable[[], float]:
        return lambda: timed.append(list(current)) or 1.0

    monkeypatch.setattr(torch.cuda, "device", made_current)
    monkeypatch.setattr(contest, "_on_gpu", on_gpu)
    other = torch.device("cuda:1")
    assert contest._timed((lambda: None, lambda: None), other) == [1.0, 1.0]
    assert timed == [[other]] * 2 * contest.ROUNDS  # events are recorded on the current device's stream
    assert not current


@pytest.mark.parametrize("torch_wins", [True, False])
def test_the_winner_runs(tune: Tune, monkeypatch: pytest.MonkeyPatch, torch_wins: bool) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.softmax(torch.softmax(x, -1) @ w, -1)

    asked: list[fx.GraphModule] = []
    graphs: list[fx.GraphModule] = []
    boxed = assemble._boxed

    def decide(module: fx.GraphModule, run: object) -> bool:
        asked.append(module)
        return torch_wins

    def look(gm: fx.GraphModule) -> Any:
        graphs.append(gm)
        return boxed(gm)

    monkeypatch.setattr(contest, "torch_is_faster", decide)
    monkeypatch.setattr(assemble, "_boxed", look)
    args = torch.randn(32, 48), torch.randn(48, 16)
    with torch.no_grad():
        tune(fn, args, select=lambda w: "softmax" in w.label)
        close(compiled(fn)(*args), fn(*args))
        assert not asked, "only max-autotune asks"
        torch._dynamo.reset()
        close(compiled(fn, mode="max-autotune-no-cudagraphs")(*args), fn(*args))
    assert [n.target for n in asked[0].graph.nodes if n.op == "call_function"] == [aten.mm.default]
    assert (aten.mm.default in {n.target for n in graphs[-1].graph.nodes}) is torch_wins

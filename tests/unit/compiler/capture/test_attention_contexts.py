"""Attention is not rewritten across a change of grad mode, autocast, level or stream: gradients are eager mode's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

from autotune.compiler.capture.attention import rewrite_attention
from autotune.compiler.capture.attention.effects import Contexts
from autotune.compiler.lower.nodes import stream_of

B, H, S, D = 2, 4, 6, 8
SMALLEST = torch.finfo(torch.float32).min


@pytest.fixture(autouse=True)
def forgotten(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert "a rule failed" not in caplog.text


def joined(out: Tensor) -> Tensor:
    return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1)


def turned(table: Tensor) -> Tensor:
    """A learned bias with gaps between neighbours."""
    return table.permute(2, 0, 1).unsqueeze(0)


def as_it_is(bias: Tensor) -> Tensor:
    return bias


def chosen(bias: Tensor) -> Tensor:
    """T5's: a choice that is known when the graph is compiled."""
    seen = (torch.arange(S)[None, None, :, None] >= 0).expand(B, -1, S, S)
    return torch.where(seen, bias, SMALLEST)


def expanded(bias: Tensor) -> Tensor:
    return bias.expand(B, H, S, S)


def by_interleaving(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 1)


def by_expanding(x: Tensor) -> Tensor:
    return x[:, :, None].expand(B, 2, 2, S, D).reshape(B, H, S, D)


Program = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def shared(first: bool, second: bool, made: bool, bias: Callable[[Tensor], Tensor]) -> Program:
    """Two calls with one bias; whether gradients are wanted where it is made, and of each call."""

    def program(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        outside = turned(table)
        with torch.set_grad_enabled(made):
            mask = bias(outside)
        with torch.set_grad_enabled(first):
            a = sdpa(q, k, v, attn_mask=mask)
        with torch.set_grad_enabled(second):
            b = sdpa(q, k, v, attn_mask=mask)
        return joined(a), joined(b)

    return program


def repeated(made: bool, called: bool, repeat: Callable[[Tensor], Tensor]) -> Program:
    def program(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        k, v = k[:, :2], v[:, :2]
        with torch.set_grad_enabled(made):
            k, v = repeat(k), repeat(v)
        with torch.set_grad_enabled(called):
            return (joined(sdpa(q[:, :, :1], k, v)),)

    return program


def partly_repeated(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    """Only the values are repeated where no gradients are wanted."""
    k, few = by_expanding(k[:, :2]), v[:, :2]
    with torch.no_grad():
        v = by_expanding(few)
    return (joined(sdpa(q[:, :, :1], k, v)),)


def partly_viewed(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    """The first step of a repetition, and no other, is made where no gradients are wanted."""
    few = k[:, :2], v[:, :2]
    with torch.no_grad():
        inserted = [x[:, :, None] for x in few]
    whole = [x.expand(B, 2, 2, S, D).reshape(B, H, S, D) for x in inserted]
    return (joined(sdpa(q[:, :, :1], *whole)),)


def in_checkpoints(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    def body(x: Tensor, table: Tensor) -> Tensor:
        bias = turned(table)
        with torch.no_grad():
            mask = chosen(bias)
            a = sdpa(x, k, v, attn_mask=mask)
        return sdpa(x, k, v, attn_mask=mask) + sdpa(x, k, v, attn_mask=bias) + a

    return (joined(checkpoint(body, q, table, use_reentrant=False)),)


def in_transformations(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    """The bias of two levels, each of which ends."""
    mask, x, y, z = turned(table.detach()), q.detach(), k.detach(), v.detach()

    def inner(x: Tensor) -> Tensor:
        return (sdpa(x, y, z, attn_mask=mask) ** 2).sum()

    return torch.func.grad(inner)(x), torch.func.grad(inner)(2 * x), joined(sdpa(q, k, v, attn_mask=mask))


def in_autocast(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    mask = turned(table)
    with torch.autocast("cpu", torch.bfloat16):
        a = sdpa(q, k, v, attn_mask=mask.to(torch.bfloat16))
        few = [by_interleaving(x[:, :2]) for x in (k, v)]
        b = sdpa(q, k, v, attn_mask=mask.to(torch.bfloat16))
    return joined(a).float(), joined(b).float(), joined(sdpa(q[:, :, :1], *few)), joined(sdpa(q, k, v, attn_mask=mask))


MODES = [(True, True, True), (False, True, True), (True, False, True), (False, True, False), (True, True, False)]
PROGRAMS: dict[str, Program] = {
    **{
        f"{bias.__name__}-{first}-{second}-{made}": shared(first, second, made, bias)
        for bias in (as_it_is, chosen, expanded)
        for first, second, made in MODES
    },
    **{
        f"{repeat.__name__}-{made}-{called}": repeated(made, called, repeat)
        for repeat in (by_interleaving, by_expanding)
        for made, called in ((True, True), (False, True), (True, False))
    },
    "partly_repeated": partly_repeated,
    "partly_viewed": partly_viewed,
    "in_checkpoints": in_checkpoints,
    "in_transformations": in_transformations,
    "in_autocast": in_autocast,
}


def aot_eager(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    rewrite_attention(gm)
    gm.graph.lint()
    return lookup_backend("aot_eager")(gm, list(inputs))


def inputs(learned: bool = True) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = [*[(B, H, S, D)] * 3, (S, S, H)]
    return [torch.randn(shape, generator=rng).requires_grad_(learned) for shape in shapes]


def step(program: Callable[..., tuple[Tensor, ...]]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Results, and the gradients by numbers that differ."""
    given = inputs()
    out = list(program(*given))
    wanted = [t for t in out if t.requires_grad]
    if not wanted:
        return out, []
    ramps = [torch.linspace(-1, 1, t.numel()).view(t.shape) for t in wanted]
    return out, list(torch.autograd.grad(wanted, given, ramps, allow_unused=True))


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_and_gradients_are_those_of_eager_mode(name: str) -> None:
    program = PROGRAMS[name]
    (want, want_grads), (got, got_grads) = (
        step(fn) for fn in (program, torch.compile(program, backend=aot_eager, fullgraph=True, dynamic=False))
    )
    apart = 2e-2 if name == "in_autocast" else 1e-4
    assert [t.requires_grad for t in got] == [t.requires_grad for t in want]
    assert [g is None for g in got_grads] == [g is None for g in want_grads]
    for a, b in zip((*got, *got_grads), (*want, *want_grads), strict=True):
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=apart, atol=apart)


def rewritten(program: Callable[..., Any], learned: bool = True) -> tuple[fx.Graph, list[fx.Node]]:
    """The graph of a program, and its calls of attention."""
    kept: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        rewrite_attention(gm)
        kept.append(fx.GraphModule(gm, gm.graph))
        return gm.forward

    torch.compile(program, backend=keep, fullgraph=True, dynamic=False)(*inputs(learned))
    graph = kept[0].graph
    return graph, list(graph.find_nodes(op="call_function", target=sdpa))


def test_one_copy_serves_the_calls_of_one_mode_and_no_others() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        mask = turned(table)
        with torch.no_grad():
            a, b = sdpa(q, k, v, attn_mask=mask), sdpa(k, q, v, attn_mask=mask)
        return joined(a), joined(b), joined(sdpa(q, k, v, attn_mask=mask)), joined(sdpa(v, k, q, attn_mask=mask))

    graph, calls = rewritten(program)
    masks = [call.kwargs["attn_mask"] for call in calls]
    assert [mask.target for mask in masks] == ["contiguous"] * 4  # type: ignore[union-attr]
    assert masks[0] is masks[1]
    assert masks[2] is masks[3]
    contexts = Contexts(graph)
    assert all(contexts.alike(call, mask) for call, mask in zip(calls, masks, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("enter", [
    torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", enabled=False), lambda: torch.Stream("cpu"),
])  # fmt: skip
def test_results_of_another_context_are_not_looked_through(enter: Callable[[], Any]) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        with enter():
            mask, few = chosen(turned(table)), by_interleaving(k[:, :2])
        return joined(sdpa(q, k, v, attn_mask=mask)), joined(sdpa(q[:, :, :1], few, few))

    _, (biased, grouped) = rewritten(program, learned=False)
    mask: Any = biased.kwargs["attn_mask"]
    assert (mask.target, mask.args[0].target) == ("contiguous", torch.where)
    assert grouped.args[1].target == "repeat_interleave"  # type: ignore[union-attr]


def test_new_nodes_run_on_the_stream_of_their_call() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        with torch.Stream("cpu"):
            few = by_interleaving(k[:, :2])
            a, b = sdpa(q, k, v, attn_mask=chosen(turned(table))), sdpa(q[:, :, :1], few, few)
        return joined(a), joined(b)

    _, (biased, grouped) = rewritten(program)
    mask: Any = biased.kwargs["attn_mask"]
    assert (mask.target, mask.args[0].target) == ("contiguous", "unsqueeze")
    assert grouped.args[0].target == "reshape"  # type: ignore[union-attr]
    numbers = {stream_of(node) for node in (biased, grouped, mask, grouped.args[0], *grouped.users)}  # type: ignore[arg-type]
    assert len(numbers) == 1
    assert None not in numbers

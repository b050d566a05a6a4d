"""Attention is rewritten if a graph has all of its operands, with the same results and gradients."""

from __future__ import annotations

import functools
import logging
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

from autotune.compiler.capture.attention import rewrite_attention, what_hides
from autotune.compiler.capture.attention import rules as attention

B, H, S, D = 2, 4, 6, 8
SMALLEST = torch.finfo(torch.float32).min
Found = list[tuple[fx.GraphModule, int]]


@pytest.fixture(autouse=True)
def forgotten(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    failed = [r for r in caplog.get_records("call") if "a rule failed" in r.getMessage()]
    assert len(failed) == request.node.name.startswith("test_a_rule_that_fails")


def rewriting(found: Found) -> Callable[..., Any]:
    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        changed = rewrite_attention(gm)
        gm.graph.lint()
        found.append((gm, changed))
        return lookup_backend("aot_eager")(gm, list(inputs))

    return backend


def results(fn: Callable[..., Any], args: Sequence[Tensor], grad: bool) -> list[Tensor]:
    """The results of ``fn`` on copies of ``args`` and, where ``grad``, the gradients by those of numbers."""
    given = [a.clone() if a.is_contiguous() else a for a in args]
    if not grad:
        with torch.no_grad():
            out = fn(*given)
        return list(out) if isinstance(out, tuple) else [out]
    leaves = [a.requires_grad_() for a in given if a.is_floating_point()]
    out = fn(*given)
    ramp = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, ramp)]


def agree(fn: Callable[..., Any], *args: Tensor, changed: int = 1, grad: bool = True) -> list[fx.Node]:
    """The calls of attention as rewritten, once results, and gradients too, are found to be those of eager mode."""
    torch._dynamo.reset()
    want = results(fn, args, grad)
    found: Found = []
    got = results(torch.compile(fn, backend=rewriting(found), fullgraph=True, dynamic=False), args, grad)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    ((gm, count),) = found
    assert count == changed
    return calls(gm)


def calls(gm: fx.GraphModule) -> list[fx.Node]:
    modules = [m for m in gm.modules() if isinstance(m, fx.GraphModule)]
    return [n for m in modules for n in m.graph.nodes if n.target is sdpa]


def value(node: Any) -> Tensor:
    found: Tensor = node.meta["example_value"]
    return found


def masked(node: fx.Node) -> tuple[bool, bool]:
    """Two flags: the call has a mask, and it is causal."""
    return node.kwargs.get("attn_mask") is not None, node.kwargs.get("is_causal") is True


def qkv(s: int = S, keys: int = S, heads: int = H) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, s, D), torch.randn(B, heads, keys, D), torch.randn(B, heads, keys, D)


def joined(out: Tensor) -> Tensor:
    return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1)


def ones(q: Tensor, keys: int = S) -> Tensor:
    """BERT's, as transformers 5 makes it under a compiler."""
    return (torch.arange(q.shape[2])[None, None, :, None] >= 0).expand(q.shape[0], -1, q.shape[2], keys)


def later(s: int = S) -> Tensor:
    place = torch.arange(s)
    return place[None, :] <= place[:, None]


def window() -> Tensor:
    place = torch.arange(S)
    return later() & (place[:, None] - place[None, :] < 3)


def attend(
    mask: Callable[..., Tensor], read: Callable[[Tensor], Tensor] = joined, **options: Any
) -> Callable[..., Any]:
    """Attention with a mask made of the queries and the other arguments."""
    return lambda q, k, v, *more: read(sdpa(q, k, v, attn_mask=mask(q, *more), **options))


NOTHING = [
    ones,
    lambda q: torch.arange(S)[:, None].expand(S, S) >= 0,
    lambda q: torch.zeros(B, 1, S, S),
    lambda q: torch.where(ones(q), 0.0, SMALLEST),
]
LATER = [
    lambda q: later()[None, None].expand(B, -1, -1, -1),
    lambda q: torch.full((S, S), -math.inf).triu(1),
    lambda q: torch.zeros(S, S).masked_fill(~later(), SMALLEST)[None, None].expand(B, 1, S, S),
]
OTHER = [
    lambda q: window(),
    lambda q: torch.ones(S, S, dtype=torch.bool).tril(1),
    lambda q: torch.full((S, S), -1e4).triu(1),
    lambda q: torch.stack([later(), window()])[:, None],
    lambda q: (torch.rand(S, S) >= 0) & later(),
]


@pytest.mark.parametrize("mask", [*NOTHING, *LATER, *OTHER])
def test_a_mask_that_is_known_and_has_a_name_is_left_out(mask: Callable[[Tensor], Tensor]) -> None:
    (call,) = agree(attend(mask), *qkv(), changed=mask not in OTHER)
    assert masked(call) == (mask in OTHER, mask in LATER)


def test_between_other_lengths_and_of_an_input_it_stays() -> None:
    found = agree(attend(lambda q: later()[:4]), *qkv(4), changed=0)
    found += agree(attend(lambda q, mask: mask), *qkv(), later(), changed=0)
    assert [masked(call) for call in found] == [(True, False)] * 2
    (call,) = agree(attend(ones), *qkv(4))
    assert masked(call) == (False, False), "where nothing is hidden, lengths may differ"


def biased(q: Tensor, k: Tensor, v: Tensor, table: Tensor, seen: Any = ones) -> Tensor:
    """Two layers of T5 with one bias."""
    mask = torch.where(seen(q), table.permute(2, 0, 1)[None], SMALLEST)
    once = sdpa(q, k, v, attn_mask=mask, scale=1.0)
    return joined(sdpa(once, k, v, attn_mask=mask, scale=1.0))


def test_a_bias_is_laid_out_once_and_learns() -> None:
    one, two = agree(biased, *qkv(), torch.randn(S, S, H), changed=2)
    bias = one.kwargs["attn_mask"]
    assert bias is two.kwargs["attn_mask"]
    assert value(bias).is_contiguous()
    assert bias.target == "contiguous"
    assert bias.args[0].target is not torch.where, "of a choice that is known, its branch"
    assert one.kwargs["scale"] == two.kwargs["scale"] == 1.0


def test_a_bias_behind_a_copy() -> None:
    """transformers 5.24 makes its choice of mask contiguous."""

    def fn(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        mask = torch.where(ones(q), table.permute(2, 0, 1)[None], SMALLEST)
        for _ in range(2):
            q = sdpa(q, k, v, attn_mask=mask.contiguous())
        return joined(q)

    one, two = agree(fn, *qkv(), torch.randn(S, S, H), changed=2)
    bias = one.kwargs["attn_mask"]
    assert bias is two.kwargs["attn_mask"]
    assert (bias.target, bias.args[0].target) == ("contiguous", operator.getitem)


def test_a_bias_behind_a_copy_that_is_written_over() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        mask = torch.where(ones(q), table.permute(2, 0, 1)[None], SMALLEST).contiguous()
        mask[:, :, :, 0] = SMALLEST
        return joined(sdpa(q, k, v, attn_mask=mask))

    agree(fn, *qkv(), torch.randn(S, S, H), changed=0)


def test_the_other_branch_a_method_and_no_branch() -> None:
    for chosen in (
        lambda q, bias: torch.where(~ones(q), torch.zeros(B, 1, S, S), bias),
        lambda q, bias: bias.where(ones(q), torch.tensor(SMALLEST)),
    ):
        (call,) = agree(attend(chosen), *qkv(), torch.randn(1, H, S, S))
        assert call.kwargs["attn_mask"].op == "placeholder"
    (call,) = agree(attend(lambda q, bias: torch.where(ones(q), bias, 0.0)), *qkv(), torch.randn(S, S), changed=0)
    assert value(call.kwargs["attn_mask"]).ndim == 4
    for call in agree(functools.partial(biased, seen=lambda q: later()), *qkv(), torch.randn(S, S, H), changed=2):
        assert masked(call) == (True, False)
        assert call.kwargs["attn_mask"].args[0].target is torch.where, "it hides some, and is laid out"


def test_a_given_mask_with_gaps_is_laid_out_and_stays_a_mask() -> None:
    hidden = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 0, 1]]).bool()
    for given in (hidden, torch.randn(B, S)):
        (call,) = agree(attend(lambda q, seen: seen[:, None, :, None].expand(-1, 1, -1, S)), *qkv(), given)
        assert value(call.kwargs["attn_mask"]).shape == (B, 1, S, S)
        assert value(call.kwargs["attn_mask"]).is_contiguous()
    (call,) = agree(attend(lambda q, seen: seen), *qkv(), hidden[:1, None, :, None].expand(B, H, S, S))
    assert value(call.kwargs["attn_mask"]).shape == (1, 1, S, S), "what is repeated is laid out once"
    (call,) = agree(attend(lambda q, bias: bias[:, :1, None].broadcast_to(B, H, S, S)), *qkv(), torch.randn(1, S, 1))
    assert value(call.kwargs["attn_mask"]).shape == (B, H, S, S), "its gradient is not put back piece by piece"


def one_repeat(x: Tensor) -> Tensor:
    return x[:, :, None].expand(B, 2, 2, S, D).reshape(B, H, S, D)


REPEATS: list[Callable[[Tensor], Tensor]] = [
    one_repeat,
    lambda x: x.unsqueeze(-3).expand(-1, -1, 2, -1, -1).flatten(1, 2),
    lambda x: x.repeat_interleave(2, 1),
    lambda x: torch.repeat_interleave(x, repeats=2, dim=-3),
]
OTHERS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.repeat(1, 2, 1, 1),
    lambda x: x[:, None].expand(B, 2, 2, S, D).reshape(B, H, S, D),
    lambda x: x.unsqueeze(1).expand(B, 2, 2, S, D).reshape(B, H, S, D),
    lambda x: x.unsqueeze(3).expand(B, 2, S, S, D).reshape(B, 2 * S, S, D),
    lambda x: x.repeat_interleave(2, 2),
]


@pytest.mark.parametrize("repeat", REPEATS)
def test_queries_of_a_group_become_positions(repeat: Callable[[Tensor], Tensor]) -> None:
    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return joined(sdpa(q, repeat(k), repeat(v), None, 0.0, False, scale=0.3))

    def beside(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return joined(sdpa(q, repeat(k), repeat(v), attn_mask=mask[:, None, None, :]))

    (call,) = agree(alone, *qkv(1, heads=2))
    assert [value(n).shape for n in call.args] == [(B, 2, 2, D), (B, 2, S, D), (B, 2, S, D)]
    assert call.kwargs["scale"] == 0.3
    (call,) = agree(beside, *qkv(1, heads=2), torch.rand(B, S) < 0.7)
    assert value(call.args[0]).shape == (B, 2, 2, D)
    assert value(call.kwargs["attn_mask"]).shape == (B, 1, 2, S)


def test_attention_groups_only_repeated_heads_of_one_position() -> None:
    def by(repeat: Callable[..., Tensor], other: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
        return lambda q, k, v: joined(sdpa(q, repeat(k), other(v), **options))

    for other in OTHERS:
        torch._dynamo.reset()
        _, k, v = qkv(heads=2)
        agree(by(other, other), torch.randn(B, other(k).shape[1], 1, D), k, v, changed=0)
    torch._dynamo.reset()
    agree(by(one_repeat, OTHERS[0]), *qkv(1, heads=2), changed=0)
    agree(by(one_repeat, one_repeat, attn_mask=torch.rand(B, H, 1, S) < 0.7), *qkv(1, heads=2), changed=0)
    agree(by(one_repeat, one_repeat, attn_mask=torch.rand(3, S) < 0.7), *qkv(3, heads=2), changed=0)
    agree(by(one_repeat, one_repeat), *qkv(3, heads=2), changed=0)


@pytest.mark.parametrize(("device", "order", "fit", "told"), [
    ("cuda", [1, 2, 0, 3], {1}, True), ("cuda", [1, 2, 0, 3], {2}, True), ("cuda", [3, 1, 2, 0], {3}, True),
    ("cuda", [1, 2, 0, 3], {3}, False), ("cuda", [1, 2, 0, 3], {4, 0}, False), ("cpu", [1, 2, 0, 3], {1, 2}, False),
    ("cuda", None, {1, 2}, False),
])  # fmt: skip
def test_torch_is_asked_whether_a_kernel_takes_groups(
    device: str, order: Any, fit: set[int], told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole = [x.unsqueeze(2).expand(B, 2, 2, S, 64).reshape(B, H, S, 64) for x in (k, v)]
        return joined(sdpa(q, *whole, dropout_p=0.25, is_causal=True))

    asked: list[Any] = []
    for number, name in enumerate(("flash", "efficient", "cudnn"), 1):
        can = lambda params, debug, number=number: asked.append(params) or number in fit  # noqa: E731
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{name}_attention", can)
    monkeypatch.setattr(torch._C, "_get_sdp_priority_order", lambda: order)
    kept: list[fx.GraphModule] = []
    with FakeTensorMode():
        args = [torch.empty(shape, dtype=torch.half, device=device) for shape in ((B, H, S, 64), *[(B, 2, S, 64)] * 2)]
        torch.compile(fn, backend=lambda gm, inputs: kept.append(gm) or gm.forward, fullgraph=True)(*args)
    (call,) = calls(kept[0])
    with value(call).fake_mode:  # type: ignore[attr-defined]
        assert rewrite_attention(kept[0]) == told
    assert (call.kwargs.get("enable_gqa") is True) is told
    assert value(call.args[1]).shape[1] == (2 if told else H)
    assert call.kwargs["is_causal"] is True
    for params in asked:
        assert (params.dropout, params.is_causal, params.enable_gqa, params.key.shape[1]) == (0.25, True, True, 2)


@pytest.mark.parametrize("length", [1, 3])
def test_attention_call_with_groups_keeps_fewer_heads_of_keys(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "fused_takes", lambda call: True)

    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return joined(sdpa(q, one_repeat(k), one_repeat(v), attn_mask=mask, scale=0.3))

    (call,) = agree(fn, *qkv(length, heads=2), torch.rand(B, H, length, S) < 0.7)
    assert call.kwargs["enable_gqa"] is True
    assert [value(n).shape[1] for n in call.args] == [H, 2, 2]
    assert (masked(call), call.kwargs["scale"]) == ((True, False), 0.3)


def test_inside_of_checkpoints() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = ones(q)

        def layer(x: Tensor) -> Tensor:
            return sdpa(x, k, v, attn_mask=mask) * 2

        def both(x: Tensor) -> Tensor:
            return sdpa(checkpoint(layer, x, use_reentrant=False), k, v, attn_mask=later())

        return joined(checkpoint(layer, checkpoint(both, q, use_reentrant=False), use_reentrant=False))

    assert sorted(map(masked, agree(fn, *qkv(), changed=3))) == [(False, False), (False, False), (False, True)]


@pytest.mark.parametrize(("asked", "read"), [
    (True, lambda out: out.view(B, H, S * D)), (True, lambda out: out.transpose(1, 2).view(B, S, H, D)),
    (True, lambda out: out), (True, lambda out: out * 2), (False, joined),
    (False, lambda out: out.transpose(1, 2).contiguous()), (False, lambda out: out.to(torch.float64).flatten()),
])  # fmt: skip
def test_who_reads_a_result_by_its_strides_gets_them(asked: bool, read: Callable[[Tensor], Tensor]) -> None:
    (call,) = agree(attend(ones, read), *qkv())
    assert [n.target == "contiguous" for n in call.users] == [asked]


def turned() -> list[Tensor]:
    """Arguments with positions before heads in memory, as in models; results have the same strides."""
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv()]


def same(out: Tensor) -> Tensor:
    """The operator that transformers puts behind attention from 5.23 on."""
    return out.reshape(out.shape[0], -1, out.shape[2], out.shape[3])


@pytest.mark.parametrize("read", [
    lambda out: joined(same(out)), lambda out: joined(same(same(out).view(out.shape))),
    lambda out: joined(out.flatten(1, 1)), lambda out: out.transpose(1, 2).view(B, S, H, D).contiguous(),
])  # fmt: skip
def test_a_view_in_the_same_shape_is_no_copy(read: Callable[[Tensor], Tensor]) -> None:
    (call,) = agree(attend(lambda q: later(), read), *turned())
    assert masked(call) == (False, True)
    copies = [n for n in call.graph.nodes if n.target == "contiguous"]
    assert (B, H, S, D) not in [tuple(value(n).shape) for n in copies], "neither the result nor its view is copied"


def test_who_reads_a_view_by_its_strides_gets_them() -> None:
    for read in (lambda out: same(out).view(B, H, S * D), lambda out: same(out).transpose(1, 2).view(B, S, H, D)):
        (call,) = agree(attend(ones, read), *qkv())
        assert [n.target for n in call.users] == ["contiguous"]
    agree(attend(lambda q: later(), lambda out: same(out) * 2), *turned(), changed=0)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_a_scale_that_is_not_positive_stays(scale: float) -> None:
    """A hidden score times a negative number is infinite in torch's kernels for causal attention."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, attn_mask=torch.ones(S, S, dtype=torch.bool).tril(), scale=scale)

    agree(fn, *(torch.randn(B, H, S, D) for _ in range(3)), changed=0)


def test_other_arguments_are_kept() -> None:
    (call,) = agree(lambda q, k, v: joined(sdpa(q, k, v, ones(q), 0.0, False, scale=0.7)), *qkv())
    assert call.kwargs["scale"] == 0.7
    for fn in (
        lambda q, k, v: joined(sdpa(q, k, v, later(), 0.5)),
        lambda q, k, v: joined(sdpa(key=k, query=q, value=v, dropout_p=0.5, attn_mask=later())),
    ):
        found: Found = []
        torch.compile(fn, backend=rewriting(found), fullgraph=True)(*qkv())
        (call,) = calls(found.pop()[0])
        assert masked(call) == (False, True)
        assert call.kwargs["dropout_p"] == 0.5
        assert [n.name for n in call.args] == ["l_q_", "l_k_", "l_v_"]
    (call,) = agree(lambda q, k, v: sdpa(q, k, v, later()).transpose(0, 1).flatten(1), *(x[0] for x in qkv()))
    assert masked(call) == (False, True), "of three axes"


def test_a_batch_of_any_size_is_compiled_once() -> None:
    def fn(q: Tensor) -> Tensor:
        return joined(sdpa(q, q, q, attn_mask=ones(q)))

    found: Found = []
    run = torch.compile(fn, backend=rewriting(found), fullgraph=True)
    for batch in (3, 5, 2):
        q = torch.randn(batch, H, S, D)
        torch._dynamo.mark_dynamic(q, 0)
        torch.testing.assert_close(run(q), fn(q))
    ((gm, changed),) = found
    assert changed == 1
    assert masked(calls(gm)[0]) == (False, False)


@pytest.mark.parametrize("rule", ["_with_mask", "_with_groups"])
def test_a_rule_that_fails_leaves_the_calls(
    rule: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[Any]:
        return [(n.args, n.kwargs, list(n.users)) for n in calls(kept[0])]

    kept: list[fx.GraphModule] = []
    torch.compile(biased, backend=lambda gm, inputs: kept.append(gm) or gm.forward)(*qkv(), torch.randn(S, S, H))
    before = told()
    monkeypatch.setattr(attention._Walk, rule, lambda self, *given: 1 / 0)
    assert rewrite_attention(kept[0]) == 0
    assert told() == before
    (warned,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warned == "autotune: attention is left as it is: a rule failed"


def test_attention_modules_with_a_causal_mask_stay() -> None:
    heads, layer = nn.MultiheadAttention(32, 4, batch_first=True), nn.TransformerEncoderLayer(32, 4, 64, 0.0)

    def attend(x: Tensor) -> Tensor:
        return heads(x, x, x, attn_mask=torch.full((S, S), -math.inf).triu(1), need_weights=False)[0]

    for fn in (attend, lambda x: layer(x.transpose(0, 1), src_mask=~later(), is_causal=True)):
        agree(fn, torch.randn(B, S, 32), changed=0)
        heads.eval(), layer.eval()
        agree(fn, torch.randn(B, S, 32), changed=0, grad=False)


def test_queries_for_the_keys_of_several_sequences_stay() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return joined(sdpa(q[:1], k, v, attn_mask=ones(q[:1])))

    agree(fn, *qkv(), changed=0, grad=False)


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(("mask", "hides"), [
    ([[True, True], [True, True]], "nothing"), ([[True, False], [True, True]], "what comes later"),
    ([[False, False], [True, True]], None), ([[True, True], [False, True]], None), ([[False, False]] * 2, None),
    ([[0.0, -0.0], [0.0, 0.0]], "nothing"), ([[0.0, -INF], [0.0, 0.0]], "what comes later"),
    ([[0.0, SMALLEST], [0.0, 0.0]], "what comes later"), ([[0.0, -1e30], [0.0, 0.0]], None),
    ([[0.0, NAN], [0.0, 0.0]], None), ([[NAN] * 2] * 2, None), ([[0.0, INF], [0.0, 0.0]], None),
    ([[1.0, 1.0], [1.0, 1.0]], None), ([[1, 1], [1, 1]], None), ([[0, 0], [0, 0]], None), ([[True]], "nothing"),
    ([True, True], "nothing"), ([True, False], None), ([[True, False]], None), ([[True], [True]], "nothing"),
    ([[[True, False], [True, True]], [[True, True], [True, True]]], None),
])  # fmt: skip
def test_mask_pattern_names_the_keys_it_hides(mask: list[Any], hides: str | None) -> None:
    assert what_hides(torch.tensor(mask), True) == hides
    assert what_hides(torch.tensor(mask), False) == (hides if hides == "nothing" else None)
    half = torch.tensor(mask)
    if half.is_floating_point() and SMALLEST not in half:
        assert what_hides(half.to(torch.bfloat16), True) == (hides if -1e30 not in half else None)


def chosen_then_written(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    mask = torch.where(ones(q), bias, SMALLEST)
    bias.zero_()
    return joined(sdpa(q, k, v, attn_mask=mask))


def repeated_then_written(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    few = k[:, :2].contiguous()
    whole = one_repeat(few)
    few.zero_()
    return joined(sdpa(q[:, :, :1], whole, one_repeat(v[:, :2])))


def written_between(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    turned = bias.transpose(-1, -2)
    first = joined(sdpa(q, k, v, attn_mask=turned))
    bias.mul_(3)
    return first, joined(sdpa(q, k, v, attn_mask=turned))


def two_lengths(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    few = bias[..., :1]
    return joined(sdpa(q, k, v, attn_mask=few)), joined(sdpa(q, k[:, :, :3], v[:, :, :3], attn_mask=few))


def one_query(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return joined(sdpa(q[:1, :, :1], one_repeat(k[:, :2]), one_repeat(v[:, :2])))


def written_in_a_checkpoint(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    mask = torch.ones(S, S, dtype=torch.bool)

    def body(x: Tensor) -> Tensor:
        mask.tril_()
        return sdpa(x, k, v, attn_mask=mask) * 2

    return joined(checkpoint(body, q, use_reentrant=False))


ORDERED = [chosen_then_written, repeated_then_written, written_between, two_lengths, one_query, written_in_a_checkpoint]


@pytest.mark.parametrize("fn", ORDERED)
def test_order_lengths_and_batches(fn: Callable[..., Any]) -> None:
    args = (*qkv(), torch.randn(1, H, S, S))
    got = results(torch.compile(fn, backend=rewriting([]), fullgraph=True), args, False)
    for a, b in zip(got, results(fn, args, False), strict=True):
        torch.testing.assert_close(a, b)


def step_with_caches(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The keys are written over before and after attention, and others in between."""
    few, other = k.clone(), v.clone()
    few[:, :, 2] = 1.0
    whole = one_repeat(few)
    other.mul_(2)
    out = joined(sdpa(q, whole, whole))
    few.zero_()
    return out + few.sum() + other.sum()


def test_writing_at_other_times_and_elsewhere_does_not_matter() -> None:
    (call,) = agree(step_with_caches, *qkv(1, heads=2), grad=False)
    assert value(call.args[1]).shape[1] == 2


def test_but_afterwards_where_gradients_are_wanted() -> None:
    """The backward pass would need what is written over."""
    agree(step_with_caches, *qkv(1, heads=2), changed=0)


# Lengths that are symbols


def encoder(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return joined(sdpa(q, k, v, attn_mask=ones(q, k.shape[2])))


def decoder(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return joined(sdpa(q, k, v, attn_mask=later(q.shape[2])[None, None].expand(q.shape[0], 1, -1, -1)))


def across(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """T5's: a choice between zeros and the smallest number, where all is seen."""
    zeros = torch.zeros(1, q.shape[1], q.shape[2], k.shape[2])
    return joined(sdpa(q, k, v, attn_mask=torch.where(ones(q, k.shape[2]), zeros, SMALLEST)))


def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = ones(q, k.shape[2])
    return checkpoint(lambda x: joined(sdpa(x, k, v, attn_mask=mask)) * 2, q, use_reentrant=False)  # type: ignore[no-any-return]


def windowed(q: Tensor, k: Tensor, v: Tensor, width: int = 4) -> Tensor:
    place = torch.arange(q.shape[2])
    return joined(sdpa(q, k, v, attn_mask=later(q.shape[2]) & (place[:, None] - place[None, :] < width)))


def later_in_the_middle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of more keys than queries, whose triangle torch would place elsewhere."""
    seen = torch.arange(k.shape[2])[None, :] <= torch.arange(q.shape[2])[:, None]
    return joined(sdpa(q, k, v, attn_mask=seen))


@pytest.mark.parametrize(
    ("fn", "keys", "mask"),
    [
        (encoder, 0, (False, False)),
        (encoder, 3, (False, False)),
        (across, 3, (False, False)),
        (checkpointed, 0, (False, False)),
        (decoder, 0, (False, True)),
        (windowed, 0, (True, False)),
        (later_in_the_middle, 3, (True, False)),
    ],
)
def test_graphs_of_any_length(fn: Callable[..., Any], keys: int, mask: tuple[bool, bool]) -> None:
    def kept(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        plain.append(gm)
        return lookup_backend("aot_eager")(gm, list(inputs))

    found: Found = []
    plain: list[fx.GraphModule] = []
    for backend in (kept, rewriting(found)):
        torch._dynamo.reset()
        run = torch.compile(fn, backend=backend, fullgraph=True, dynamic=True)
        for length in (6, 9, 20):
            args = qkv(length, length + keys)
            for a, b in zip(results(run, args, True), results(fn, args, True), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert len(found) == len(plain), "no more compilations"
    assert [masked(call) for call in calls(found[-1][0])] == [mask], (
        "of the last: Dynamo empties one that is compiled again"
    )
    assert {changed for _, changed in found} == {int(not mask[0])}


def wide(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return windowed(q, k, v, 12)


def wide_in_a_checkpoint(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.shape[2])
    mask = later(q.shape[2]) & (place[:, None] - place[None, :] < 12)
    return checkpoint(lambda x: joined(sdpa(x, k, v, attn_mask=mask)), q, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("fn", [wide, wide_in_a_checkpoint])
def test_a_window_that_is_wider_than_the_sequence(fn: Callable[..., Any]) -> None:
    """It hides what comes later, until a sequence is longer: that is another graph."""
    found: Found = []
    run = torch.compile(fn, backend=rewriting(found), fullgraph=True, dynamic=True)
    graphs = []
    for length in (6, 12, 9, 13, 20, 7):
        args = qkv(length, length)
        for a, b in zip(results(run, args, True), results(fn, args, True), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        graphs.append(len(found))
    assert graphs == [1, 1, 1, 2, 2, 2]
    assert [changed for _, changed in found] == [1, 0]

"""Masks of packed documents: which become attention by spans, and that results stay those of eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

from autotune.compiler.capture.attention import masks, rewrite_attention
from autotune.compiler.capture.attention.kernels import has_spans
from autotune.compiler.capture.attention.operators import SPANNED, SPANS, _spans
from tests.support.compiler import spanned_attention

B, H, S, D = 2, 4, 12, 8
Made = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin without compiled code, and with kernels for CPUs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(masks, "has_spans", lambda *call: not call[3])
    yield
    torch._dynamo.reset()


def numbers(batch: int = B, length: int = S) -> dict[str, Tensor]:
    """int64 [B, S], the number of each position's document."""
    starts = torch.rand(batch, length) < 0.3
    tail = torch.arange(length).expand(batch, length) >= length * 2 // 3
    return {
        "one": torch.ones(batch, length, dtype=torch.int64),
        "several": starts.cumsum(-1),
        "padded": torch.where(tail, 0, 1 + starts.cumsum(-1)),
        "padded before": torch.where(tail.flip(1), 0, 1 + starts.cumsum(-1)),
        "one a position": torch.arange(length).expand(batch, length).contiguous(),
        "without order": 7 - starts.cumsum(-1) % 7,
        "apart": torch.randint(0, 3, (batch, length)),
        "no padding alone": torch.zeros(batch, length, dtype=torch.int64),
    }


def positions(which: Tensor) -> Tensor:
    """Positions that begin at 0 at each change of number."""
    begins = torch.diff(which, prepend=which[:, :1] - 1) != 0
    place = torch.arange(which.shape[1]).expand_as(which)
    return place - torch.where(begins, place, 0).cummax(-1).values


def of_transformers(which: Tensor) -> Tensor:
    return of_positions(positions(which))


def of_positions(at: Tensor) -> Tensor:
    """Llama's, as transformers 5.24 makes it under a compiler."""
    number = (torch.diff(at, prepend=at[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch, length = at.shape
    row, place = torch.arange(batch)[:, None, None, None], torch.arange(length)
    query, key = place[None, None, :, None], place[None, None, None, :]
    later = at[row, key] <= at[row, query]
    return (later & (number[row, query] == number[row, key])).expand(batch, -1, length, length)


def by_numbers(which: Tensor) -> Tensor:
    return (which[:, :, None] == which[:, None, :])[:, None]


def causal(which: Tensor) -> Tensor:
    return by_numbers(which) & torch.ones(which.shape[1], which.shape[1], dtype=torch.bool).tril()


def lower(which: Tensor) -> Tensor:
    return torch.eq(which.unsqueeze(1).unsqueeze(-1), which[:, None, None]).tril().expand(-1, H, -1, -1)


def without_padding(which: Tensor) -> Tensor:
    """Rows of padding see no key."""
    return torch.logical_and(causal(which), (which > 0)[:, None, None, :])


def windowed(which: Tensor) -> Tensor:
    place = torch.arange(which.shape[1])
    return causal(which) & (place[None, :] > place[:, None] - 3)


def first_row(which: Tensor) -> Tensor:
    """Of two axes, for the whole batch."""
    return which[0][:, None] == which[0][None, :]


def of_three(which: Tensor) -> Tensor:
    return first_row(which)[None] & torch.ones(which.shape[1], which.shape[1], dtype=torch.bool).tril()


def a_window(which: Tensor) -> Tensor:
    """A constant: keys on both sides."""
    place = torch.arange(S)
    return ((place[:, None] - place).abs() < 3).expand(B, 1, S, S)


def a_padded_window(which: Tensor) -> Tensor:
    return a_window(which) & (which > 0)[:, None, None, :]


BY_SPANS: dict[str, Made] = {
    "transformers": of_transformers, "numbers": by_numbers, "causal": causal, "lower": lower,
    "padding": without_padding, "window": windowed, "two axes": first_row, "three axes": of_three,
    "a window": a_window, "a padded window": a_padded_window,
}  # fmt: skip


def either(which: Tensor) -> Tensor:
    return by_numbers(which) | torch.ones(which.shape[1], which.shape[1], dtype=torch.bool).tril()


def added(which: Tensor) -> Tensor:
    return torch.where(causal(which), 0.0, -1e30).double()


def of_heads(which: Tensor) -> Tensor:
    return by_numbers(which) & (torch.arange(H)[:, None, None] * 3 >= torch.arange(S)[None, :, None])


def negated(which: Tensor) -> Tensor:
    return ~by_numbers(which)


def of_the_keys(which: Tensor) -> Tensor:
    return (which[:, None, None, :] == which[:, None, None, :1]).expand(B, 1, S, S) & (torch.rand(S, S) < 2)


def a_wide_window(which: Tensor) -> Tensor:
    """A constant that hides too little."""
    place = torch.arange(S)
    return ((place[:, None] - place).abs() < S - 2).expand(B, 1, S, S)


def two_windows(which: Tensor) -> Tensor:
    place = torch.arange(S)
    return (((place[:, None] - place).abs() < 2) | (place == 0)).expand(B, 1, S, S)


LEFT_ALONE: dict[str, Made] = {
    "either": either, "added": added, "of heads": of_heads, "negated": negated, "of the keys": of_the_keys,
    "two windows": two_windows, "a wide window": a_wide_window,
}  # fmt: skip


def compiled(fn: Callable[..., Any], found: list[tuple[fx.GraphModule, int]], dynamic: bool | None = False) -> Any:
    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        changed = rewrite_attention(gm)
        gm.graph.lint()
        found.append((gm, changed))
        return lookup_backend("aot_eager")(gm, list(inputs))

    return torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)


def attention(make: Made, heads: int = H, layers: int = 1, **options: Any) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, which: Tensor) -> Tensor:
        mask = make(which)
        for _ in range(layers):
            b, s = q.shape[0], q.shape[2]
            keys = (x[:, :, None].expand(b, heads, H // heads, s, D).reshape(b, H, s, D) for x in (k, v))
            q = sdpa(q, *keys, attn_mask=mask, **options).transpose(1, 2).contiguous().transpose(1, 2)
        return q.transpose(1, 2).reshape(q.shape[0], -1, H * D)

    return run


def qkv(heads: int = H, batch: int = B, length: int = S) -> list[Tensor]:
    made = (torch.randn(batch, length, n, D, dtype=torch.float64).transpose(1, 2) for n in (H, heads, heads))
    return [x.requires_grad_() for x in made]


def step(fn: Callable[..., Tensor], given: Sequence[Tensor], which: Tensor) -> list[Tensor]:
    out = fn(*given, which)
    ramp = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, list(given), ramp)]


def agree(fn: Callable[..., Tensor], given: Sequence[Tensor], changed: int) -> fx.GraphModule:
    """The graph, once results and gradients of all documents are those of eager mode."""
    found: list[tuple[fx.GraphModule, int]] = []
    run = compiled(fn, found)
    for which in numbers().values():
        for ours, theirs in zip(step(run, given, which), step(fn, given, which), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    ((gm, count),) = found
    assert count == changed
    return gm


def named(gm: fx.GraphModule, operator: Any) -> list[fx.Node]:
    return [n for m in gm.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes if n.target is operator]


@pytest.mark.parametrize("make", BY_SPANS.values(), ids=BY_SPANS)
def test_results_and_gradients_are_those_of_eager_mode(make: Made) -> None:
    gm = agree(attention(make), qkv(), changed=1)
    assert (len(named(gm, sdpa)), len(named(gm, SPANNED))) == (0, 1)


@pytest.mark.parametrize("make", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_a_mask_of_another_form_stays(make: Made) -> None:
    found: list[tuple[fx.GraphModule, int]] = []
    run, given = compiled(attention(make), found), qkv()
    which = numbers()["several"]
    torch.testing.assert_close(run(*given, which), attention(make)(*given, which))
    assert len(named(found[0][0], sdpa)) == 1


@pytest.mark.parametrize("heads", [1, 2])
def test_repeated_keys_are_handed_over_once(heads: int) -> None:
    gm = agree(attention(causal, heads), qkv(heads), changed=1)
    (call,) = named(gm, SPANNED)
    assert call.args[1].meta["example_value"].shape == (B, heads, S, D)  # type: ignore[union-attr]


def test_spans_are_found_once_for_all_layers() -> None:
    gm = agree(attention(of_transformers, layers=3), qkv(), changed=3)
    assert len(named(gm, SPANS)) == 1


def test_positions_that_no_input_sets_are_causal() -> None:
    gm = agree(attention(lambda which: of_positions(torch.arange(S).expand(B, S))), qkv(), changed=1)
    (call,) = named(gm, sdpa)
    assert call.kwargs["is_causal"] is True
    assert "attn_mask" not in call.kwargs


def test_a_mask_that_is_written_over() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, which: Tensor) -> Tensor:
        mask = causal(which)
        out = sdpa(q, k, v, attn_mask=mask).transpose(1, 2)
        mask = mask & True
        mask[:, :, :, 0] = True
        return out.contiguous() + sdpa(q, k, v, attn_mask=mask).transpose(1, 2).contiguous()

    agree(fn, qkv(), changed=2)


def in_checkpoints(q: Tensor, k: Tensor, v: Tensor, which: Tensor) -> Tensor:
    mask, k, v = of_transformers(which), k.expand_as(q), v.expand_as(q)  # one symbol for the batch

    def inner(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, attn_mask=mask).transpose(1, 2).contiguous().transpose(1, 2)

    for _ in range(2):
        q = checkpoint(inner, q, k, v, use_reentrant=False)  # type: ignore[no-untyped-call]
    return q


def test_under_activation_checkpointing() -> None:
    agree(in_checkpoints, qkv(), changed=2)


@pytest.mark.parametrize(("options", "changed"), [({"dropout_p": 0.5}, 0), ({"scale": 0.3}, 1)])
def test_options_of_the_call(options: dict[str, Any], changed: int) -> None:
    found: list[tuple[fx.GraphModule, int]] = []
    assert compiled(attention(causal, **options), found)(*qkv(), numbers()["several"]).shape == (B, S, H * D)
    assert [count for _, count in found] == [changed]
    if changed:
        agree(attention(causal, **options), qkv(), changed=1)


def both_sides(which: Tensor) -> Tensor:
    """A window of keys that depends on no input."""
    place = torch.arange(which.shape[1])
    near = (place[None, :] <= place[:, None] + 1) & (place[None, :] > place[:, None] - 3)
    return near.expand(which.shape[0], 1, -1, -1)


SIZES = (2, 12), (3, 5), (4, 2), (5, 33)


@pytest.mark.parametrize(
    ("fn", "heads", "changed", "sizes"),
    [
        (attention(of_transformers, 2, layers=2), 2, [2, 2, 0], (*SIZES, (1, 9), (2, 1))),
        (attention(of_three), H, [1], SIZES),
        (attention(both_sides), H, [1], SIZES),
        (in_checkpoints, H, [2], SIZES),
        (attention(either), H, [0], SIZES),
    ],
    ids=["transformers", "three axes", "a window", "in checkpoints", "either"],
)
def test_batches_and_lengths_that_are_symbols(
    fn: Callable[..., Tensor], heads: int, changed: list[int], sizes: Sequence[tuple[int, int]]
) -> None:
    """A batch of 1 and a length of 1 have graphs of their own."""
    found: list[tuple[fx.GraphModule, int]] = []
    run = compiled(fn, found, dynamic=None)
    for batch, length in sizes:
        for which in numbers(batch, length).values():
            given = qkv(heads, batch, length)
            for axis, size in enumerate((batch, length)):
                for x, place in ((which, axis), *((x, (0, 2)[axis]) for x in given)):
                    if size > 1:
                        torch._dynamo.mark_dynamic(x, place)
            for ours, theirs in zip(step(run, given, which), step(fn, given, which), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    assert [count for _, count in found] == changed
    assert len(named(found[0][0], SPANS)) == (2 if fn is in_checkpoints else bool(changed[0])), "once, or in each graph"


def test_a_cpu_keeps_its_masks() -> None:
    assert not has_spans(*qkv(), 0.0)


def test_spans_are_those_of_each_row_and_key() -> None:
    masks = [make(which)[:, 0] for make in (of_transformers, without_padding, windowed) for which in numbers().values()]
    for mask in [*masks, torch.rand(B, S, S) < 0.5, torch.rand(B, 5, S) < 0.5]:
        rows, keys, holes = _spans(mask)
        assert rows.dtype == keys.dtype == holes.dtype == torch.int32
        for b in range(B):
            whole = True
            for spans, seen in ((rows, mask[b]), (keys, mask[b].T)):
                for place, row in enumerate(seen):
                    there = row.nonzero().flatten().tolist()
                    low, high = spans[b, :, place].tolist()
                    assert (low, high) == ((there[0], there[-1] + 1) if there else (len(row), 0))
                    whole = whole and (spans is keys or there == list(range(low, high)))
            assert bool(holes[b]) is not whole
        spanned_attention.seen(mask, rows, keys, holes)

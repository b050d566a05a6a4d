"""Masks that come with the data: which are seen through, what their lengths are, and that results stay eager mode's."""

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
from autotune.compiler.capture.attention.kernels import kernel_of
from autotune.compiler.capture.attention.padded import _bounds
from tests.support.compiler.padded_attention import REFERENCE

B, H, S, D = 3, 4, 9, 8
WINDOW = 4
Made = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin without compiled code, and with a kernel for CPUs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(masks, "kernel_of", lambda *call: None if call[5] else REFERENCE)
    yield
    torch._dynamo.reset()


def kinds(length: int = S) -> dict[str, Tensor]:
    """int64 [B, S], 1 where a key is seen."""
    place, count = torch.arange(length)[None, :], torch.tensor([length, length // 2, 1])[:, None]
    some = (torch.rand(B, length) < 0.5).long()
    return {
        "ones": torch.ones(B, length, dtype=torch.int64),
        "right": (place < count).long(),
        "left": (place >= length - count).long(),
        "both sides": ((place >= 2) & (place < 2 + count)).long(),
        "empty": torch.ones(B, length, dtype=torch.int64) * torch.tensor([1, 0, 1])[:, None],
        "holes": some,
        "more holes": 1 - some,
    }


def of_transformers(given: Tensor) -> Tensor:
    """BERT's mask of transformers 5 under a compiler."""
    place = torch.arange(given.shape[1])
    keys = given.to(torch.bool)[torch.arange(B)[:, None, None, None], place[None, None, None, :]]
    return ((place[None, None, :, None] >= 0) & keys).expand(B, -1, S, S)


def causal(given: Tensor) -> Tensor:
    """Llama's."""
    place = torch.arange(S)
    later = place[None, None, None, :] <= place[None, None, :, None]
    keys = given.to(torch.bool)[torch.arange(B)[:, None, None, None], place[None, None, None, :]]
    return (later.new_ones(()) & later & keys).expand(B, -1, S, S)


def windowed(given: Tensor) -> Tensor:
    """Mistral's."""
    place = torch.arange(S)
    return causal(given) & (place[None, :] > place[:, None] - WINDOW)


def plain(given: Tensor) -> Tensor:
    return given.bool()[:, None, None, :]


def by_ones(given: Tensor) -> Tensor:
    return torch.logical_and((given > 0).view(B, 1, 1, S), torch.ones(S, S, dtype=torch.bool).tril())


SEEN_THROUGH: dict[str, Made] = {
    "transformers": of_transformers, "causal": causal, "window": windowed, "plain": plain, "by ones": by_ones,
}  # fmt: skip


def per_query(given: Tensor) -> Tensor:
    return given.bool()[:, None, :, None] & given.bool()[:, None, None, :]


def documents(given: Tensor) -> Tensor:
    """Packed sequences: a query sees the keys of one document."""
    which = given.cumsum(-1)
    return which[:, None, :, None] == which[:, None, None, :]


def first_two(given: Tensor) -> Tensor:
    """A structure without a name."""
    place = torch.arange(S)
    return given.bool()[:, None, None, :] & ((place[None, :] <= place[:, None]) | (place < 2)[None, :])


def numbers(given: Tensor) -> Tensor:
    return (1.0 - given[:, None, None, :].double()) * torch.finfo(torch.float64).min


def either(given: Tensor) -> Tensor:
    return given.bool()[:, None, None, :] | torch.ones(S, S, dtype=torch.bool).tril()


def of_a_head(given: Tensor) -> Tensor:
    heads = torch.arange(H)[None, :, None, None] >= 1
    return given.bool()[:, None, None, :] & heads.expand(1, H, S, S)


def two_masks(given: Tensor) -> Tensor:
    return plain(given) & torch.ones(S, S, dtype=torch.bool).tril() & plain(given.flip(-1))


LEFT_ALONE: dict[str, Made] = {
    "per query": per_query, "documents": documents, "first two": first_two, "numbers": numbers, "either": either,
    "of a head": of_a_head, "two masks": two_masks,
}  # fmt: skip


def compiled(fn: Callable[..., Any], found: list[tuple[fx.GraphModule, int]], dynamic: bool = False) -> Any:
    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        changed = rewrite_attention(gm)
        gm.graph.lint()
        found.append((gm, changed))
        return lookup_backend("aot_eager")(gm, list(inputs))

    return torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)


def attention(make: Made, heads: int = H, layers: int = 1, **options: Any) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        mask = make(given)
        for _ in range(layers):
            keys = (x[:, :, None].expand(B, x.shape[1], H // heads, S, D).reshape(B, H, S, D) for x in (k, v))
            q = sdpa(q, *keys, attn_mask=mask, **options).transpose(1, 2).contiguous().transpose(1, 2)
        return q.transpose(1, 2).reshape(B, S, H * D)

    return run


def qkv(heads: int = H) -> list[Tensor]:
    made = (torch.randn(B, S, n, D, dtype=torch.float64).transpose(1, 2) for n in (H, heads, heads))
    return [x.requires_grad_() for x in made]


def step(fn: Callable[..., Tensor], given: Sequence[Tensor], mask: Tensor) -> list[Tensor]:
    out = fn(*given, mask)
    ramp = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, list(given), ramp)]


def agree(fn: Callable[..., Tensor], given: Sequence[Tensor], changed: int) -> fx.GraphModule:
    """The graph, once results and gradients of all masks are those of eager mode."""
    found: list[tuple[fx.GraphModule, int]] = []
    run = compiled(fn, found)
    for mask in kinds().values():
        for ours, theirs in zip(step(run, given, mask), step(fn, given, mask), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    ((gm, count),) = found
    assert count == changed
    return gm


def named(gm: fx.GraphModule, operator: Any) -> list[fx.Node]:
    return [n for m in gm.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes if n.target is operator]


@pytest.mark.parametrize("make", SEEN_THROUGH.values(), ids=SEEN_THROUGH)
def test_results_and_gradients_are_those_of_eager_mode(make: Made) -> None:
    gm = agree(attention(make), qkv(), changed=1)
    assert not named(gm, sdpa)
    (call,) = named(gm, torch.ops.autotune.padded_attention.default)
    is_causal = make in (causal, windowed, by_ones)
    assert call.args[7:9] == (is_causal, WINDOW if make is windowed else 0)


@pytest.mark.parametrize("make", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_a_mask_of_another_form_stays(make: Made) -> None:
    found: list[tuple[fx.GraphModule, int]] = []
    run, given = compiled(attention(make), found), qkv()
    mask = kinds()["right"]
    torch.testing.assert_close(run(*given, mask), attention(make)(*given, mask))
    assert len(named(found[0][0], sdpa)) == 1


@pytest.mark.parametrize("heads", [1, 2])
def test_repeated_keys_are_handed_over_once(heads: int) -> None:
    gm = agree(attention(causal, heads), qkv(heads), changed=1)
    (call,) = named(gm, torch.ops.autotune.padded_attention.default)
    assert call.args[1].meta["example_value"].shape == (B, heads, S, D)  # type: ignore[union-attr]


def test_lengths_are_found_once_for_all_layers() -> None:
    gm = agree(attention(causal, layers=3), qkv(), changed=3)
    assert len(named(gm, torch.ops.autotune.mask_bounds.default)) == 1


def test_keys_of_another_length() -> None:
    def cross(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        mask = given.bool()[:, None, None, :].expand(B, 1, 4, S)
        return sdpa(q[:, :, :4], k, v, attn_mask=mask).transpose(1, 2).reshape(B, 4, H * D)

    agree(cross, qkv(), changed=1)


def test_a_mask_that_is_written_over_stays() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        keys = given.bool()[:, None, None, :]
        mask = keys & torch.ones(S, S, dtype=torch.bool)
        keys[0, 0, 0, 0] = False
        return sdpa(q, k, v, attn_mask=mask)

    agree(fn, qkv(), changed=0)


@pytest.mark.parametrize("options", [{"dropout_p": 0.5}, {"scale": 0.3}])
def test_options_of_the_call(options: dict[str, Any]) -> None:
    found: list[tuple[fx.GraphModule, int]] = []
    run = compiled(attention(causal, **options), found)
    out = run(*qkv(), kinds()["right"])
    assert out.shape == (B, S, H * D)
    assert [count for _, count in found] == [int("dropout_p" not in options)]
    if "scale" in options:
        agree(attention(causal, **options), qkv(), changed=1)


def test_lengths_that_are_symbols_stay() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        return sdpa(q, k, v, attn_mask=given.bool()[:, None, None, :])

    found: list[tuple[fx.GraphModule, int]] = []
    run, given = compiled(fn, found, dynamic=True), qkv()
    for mask in kinds().values():
        torch.testing.assert_close(run(*given, mask), fn(*given, mask))
    assert named(found[0][0], sdpa)


def test_under_activation_checkpointing() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        mask = causal(given)

        def inner(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sdpa(q, k, v, attn_mask=mask).transpose(1, 2).contiguous().transpose(1, 2)

        for _ in range(2):
            q = checkpoint(inner, q, k, v, use_reentrant=False)  # type: ignore[no-untyped-call]
        return q

    agree(fn, qkv(), changed=2)


def test_a_cpu_keeps_its_masks() -> None:
    q, k, v = qkv()
    assert kernel_of(q, k, v, True, 0, 0.0, 1.0) is None


@pytest.mark.parametrize("queries", [S, 5])
def test_sequences_by_lengths_hold_each_key_and_each_query_once(queries: int) -> None:
    for name, given in kinds().items():
        bounds, cum_query, cum_key = _bounds(given.bool(), queries, causal=False)
        assert bounds.dtype == cum_query.dtype == cum_key.dtype == torch.int32
        ends = ((cum_query, queries), (cum_key, S))
        assert all(c[0] == 0 and c[-1] == B * n and bool((c.diff() >= 0).all()) for c, n in ends)
        for b in range(B):
            places = given[b].nonzero().flatten().tolist()
            one_side = places == list(range(len(places))) or places == list(range(S - len(places), S))
            assert bounds[b, 0] == (queries if one_side else 0), name
            if places:
                assert bounds[b, 1:].tolist() == [places[0], places[-1] + 1]
            # One of the two sequences of a batch row has all queries: by lengths, with the keys that are seen.
            with_queries = [i for i in (2 * b, 2 * b + 1) if cum_query[i + 1] > cum_query[i]]
            (which,) = with_queries
            assert cum_query[which : which + 2].tolist() == [b * queries, (b + 1) * queries]
            if one_side:
                first, end = (int(cum_key[i]) - b * S for i in (which, which + 1))
                assert list(range(first, end)) == places, name


def test_rows_behind_a_hidden_key_are_those_that_a_triangle_gets_wrong() -> None:
    lower = torch.ones(S, S, dtype=torch.bool).tril()
    for given in kinds().values():
        bounds, _, _ = _bounds(given.bool(), S, causal=True)
        wrong = ((lower & given.bool()[:, None, :]) != lower).any(-1)
        for b in range(B):
            assert wrong[b].nonzero().flatten().tolist() == list(range(int(bounds[b, 0]), S))

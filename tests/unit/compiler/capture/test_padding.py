"""Masks that come with the data: which are seen through, what their lengths are, and that results stay eager mode's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.registry import lookup_backend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

from autotune.compiler.capture.attention import masks, operators, rewrite_attention
from autotune.compiler.capture.attention.calls import same_shape
from autotune.compiler.capture.attention.kernels import BY_LENGTHS, CUDNN, FLASH, kernel_of
from autotune.compiler.capture.attention.operators import _bounds
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


def kinds(batch: int = B, length: int = S) -> dict[str, Tensor]:
    """int64 [B, S], 1 where a key is seen."""
    row, place = torch.arange(batch)[:, None], torch.arange(length)[None, :]
    count = torch.where(row == 0, length, torch.where(row == 1, max(length // 2, 1), 1))
    some = (torch.rand(batch, length) < 0.5).long()
    return {
        "ones": torch.ones(batch, length, dtype=torch.int64),
        "right": (place < count).long(),
        "left": (place >= length - count).long(),
        "both sides": ((place >= 2) & (place < 2 + count)).long(),
        "empty": torch.ones(batch, length, dtype=torch.int64) * (row != 1),
        "holes": some,
        "more holes": 1 - some,
    }


def of_transformers(given: Tensor) -> Tensor:
    """BERT's mask of transformers 5 under a compiler."""
    batch, length = given.shape
    place = torch.arange(length)
    keys = given.to(torch.bool)[torch.arange(batch)[:, None, None, None], place[None, None, None, :]]
    return ((place[None, None, :, None] >= 0) & keys).expand(batch, -1, length, length)


def causal(given: Tensor) -> Tensor:
    """Llama's."""
    batch, length = given.shape
    place = torch.arange(length)
    later = place[None, None, None, :] <= place[None, None, :, None]
    keys = given.to(torch.bool)[torch.arange(batch)[:, None, None, None], place[None, None, None, :]]
    return (later.new_ones(()) & later & keys).expand(batch, -1, length, length)


def windowed(given: Tensor) -> Tensor:
    """Mistral's."""
    place = torch.arange(given.shape[1])
    return causal(given) & (place[None, :] > place[:, None] - WINDOW)


def plain(given: Tensor) -> Tensor:
    return given.bool()[:, None, None, :]


def by_ones(given: Tensor) -> Tensor:
    batch, length = given.shape
    return torch.logical_and((given > 0).view(batch, 1, 1, length), torch.ones(length, length, dtype=torch.bool).tril())


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
    return given.bool()[:, None, None, :] | torch.ones(given.shape[1], given.shape[1], dtype=torch.bool).tril()


def of_a_head(given: Tensor) -> Tensor:
    heads = torch.arange(H)[None, :, None, None] >= 1
    return given.bool()[:, None, None, :] & heads.expand(1, H, S, S)


def two_masks(given: Tensor) -> Tensor:
    return causal(given) & plain(given.flip(-1))


LEFT_ALONE: dict[str, Made] = {
    "per query": per_query, "documents": documents, "first two": first_two, "numbers": numbers, "either": either,
    "of a head": of_a_head, "two masks": two_masks,
}  # fmt: skip


def compiled(fn: Callable[..., Any], found: list[tuple[fx.GraphModule, int]], dynamic: bool | None = False) -> Any:
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
            b, s = q.shape[0], q.shape[2]
            keys = (x[:, :, None].expand(b, heads, H // heads, s, D).reshape(b, H, s, D) for x in (k, v))
            q = sdpa(q, *keys, attn_mask=mask, **options).transpose(1, 2).contiguous().transpose(1, 2)
        return q.transpose(1, 2).reshape(q.shape[0], -1, H * D)

    return run


def qkv(heads: int = H, batch: int = B, length: int = S) -> list[Tensor]:
    made = (torch.randn(batch, length, n, D, dtype=torch.float64).transpose(1, 2) for n in (H, heads, heads))
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


def agree_at_sizes(
    fn: Callable[..., Tensor],
    changed: Sequence[int],
    sizes: Sequence[tuple[int, int]] = ((3, 9), (2, 12), (5, 2), (4, 17), (3, 1)),
    heads: int = H,
    axes: tuple[int, ...] = (0, 1),
) -> fx.GraphModule:
    """The first graph, once results and gradients at batches and lengths are those of eager mode.

    Args:
        changed: the changed calls of each graph. Dynamo has another one for a length of 1.
        sizes: batches and lengths. Above 1, no rule may specialize a graph for them.
        axes: of batch and length, those that are symbols.
    """
    found: list[tuple[fx.GraphModule, int]] = []
    run = compiled(fn, found, dynamic=None)
    for batch, length in sizes:
        for mask in kinds(batch, length).values():
            given = qkv(heads, batch, length)
            for axis in axes if length > 1 else ():
                torch._dynamo.mark_dynamic(mask, axis)
                for x in given:
                    torch._dynamo.mark_dynamic(x, (0, 2)[axis])
            for ours, theirs in zip(step(run, given, mask), step(fn, given, mask), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    assert [count for _, count in found] == list(changed)
    return found[0][0]


@pytest.mark.parametrize(("make", "heads"), [(of_transformers, H), (causal, 2)])
def test_batches_and_lengths_that_are_symbols(make: Made, heads: int) -> None:
    gm = agree_at_sizes(attention(make, heads, layers=2), [2, 2], heads=heads)
    assert len(named(gm, torch.ops.autotune.mask_bounds.default)) == 1
    for call in named(gm, torch.ops.autotune.padded_attention.default):
        assert call.args[7:9] == (make is causal, 0)
        assert call.args[1].meta["example_value"].shape[1] == heads  # type: ignore[union-attr]


def test_a_batch_alone_that_is_a_symbol() -> None:
    agree_at_sizes(attention(windowed), [1], [(3, S), (2, S), (7, S)], axes=(0,))


def test_a_window_and_lengths_that_are_symbols() -> None:
    gm = agree_at_sizes(attention(windowed), [1], [(3, 9), (2, 3), (3, 17)])
    (call,) = named(gm, torch.ops.autotune.padded_attention.default)
    assert call.args[7:9] == (True, WINDOW)
    # A graph of sequences shorter than the window holds for those alone.
    torch._dynamo.reset()
    agree_at_sizes(attention(windowed), [1, 1], [(3, 3), (2, 4), (3, 17), (2, 2)])


@pytest.mark.parametrize("kernel", [BY_LENGTHS, CUDNN, FLASH])
def test_shapes_of_a_gpu_s_kernels_keep_their_symbols(kernel: str) -> None:
    """A graph was compiled for one batch, since the gradients of attention by lengths were shaped by a number."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    q = mode.from_tensor(torch.empty(5, 40, H, D), static_shapes=False).transpose(1, 2)
    batch, _, length, _ = q.shape
    valid, how = q.new_empty((batch, length), dtype=torch.bool), (False, 0, 0.0, 0.5, kernel)
    with mode:
        given = q, q, q, valid, *torch.ops.autotune.mask_bounds(valid, length, False)
        out, lse, own, seed, offset = torch.ops.autotune.padded_attention_forward(*given, *how)
        grads = torch.ops.autotune.padded_attention_backward(out, *given, out, lse, own, seed, offset, *how)
    assert all(same_shape(x.shape, q.shape) for x in (out, *grads))
    symbols = mode.shape_env.var_to_range  # type: ignore[union-attr]
    assert not any(known.is_singleton() for known in symbols.values())


@pytest.mark.parametrize(
    "compute",
    [
        pytest.param(lambda x: torch.ops.autotune.mask_bounds(x[0], x.shape[2], True), id="causal"),
        pytest.param(lambda x: torch.ops.autotune.mask_bounds(x[0], x.shape[2], False), id="encoder"),
        pytest.param(torch.ops.autotune.mask_spans, id="spans"),
    ],
)
def test_places_are_reduced_and_stacked_in_one_type(compute: Callable[[Tensor], Any]) -> None:
    """Triton rejects Inductor's loop whose variable begins as int32 and becomes the int64 of a symbolic index.

    torch 2.15 compiles a graph for one batch if it stacks tensors of several dtypes.
    """
    gm = make_fx(compute, tracing_mode="symbolic")(torch.ones(3, 20, 30, dtype=torch.bool))
    aten = torch.ops.aten
    reduced = [n.args[0] for target in (aten.amin.default, aten.amax.default) for n in named(gm, target)]
    assert reduced
    for node in reduced:
        assert isinstance(node, fx.Node)
        for chosen in node.all_input_nodes:
            if chosen.target is aten.scalar_tensor.default:
                assert type(chosen.args[0]) is int
        assert node.meta["val"].dtype == torch.int64  # as Triton counts from a symbol in a part of a reduction
    for node in named(gm, aten.stack.default):
        assert len({stacked.meta["val"].dtype for stacked in node.all_input_nodes}) == 1


def test_masks_of_another_form_and_of_any_length_stay() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        for make in (per_query, numbers, either, two_masks):
            q = attention(make)(q, k, v, given).view(q.shape[0], -1, H, D).transpose(1, 2)
        return q

    agree_at_sizes(fn, [0], [(3, 9), (2, 12)])


def test_lengths_of_queries_and_keys_that_are_symbols() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        k, v = k.expand_as(q), v.expand_as(q)  # one symbol for the batch, and one for the length
        longer = sdpa(torch.cat([q, q[:, :, :1]], 2), k, v, attn_mask=plain(given)).transpose(1, 2).contiguous()
        # Of a length of 2, one query would be left: a kernel that takes symbols may not take one query.
        return longer[:, 2:] + sdpa(q[:, :, 1:], k, v, attn_mask=plain(given)).transpose(1, 2).contiguous()

    agree_at_sizes(fn, [1], [(3, 9), (2, 12), (4, 3)])


def in_checkpoints(q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
    mask, k, v = causal(given), k.expand_as(q), v.expand_as(q)  # one symbol for the batch

    def inner(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, attn_mask=mask).transpose(1, 2).contiguous().transpose(1, 2)

    for _ in range(2):
        q = checkpoint(inner, q, k, v, use_reentrant=False)  # type: ignore[no-untyped-call]
    return q


def test_under_activation_checkpointing() -> None:
    agree(in_checkpoints, qkv(), changed=2)
    torch._dynamo.reset()
    agree_at_sizes(in_checkpoints, [2], [(3, 9), (2, 12), (5, 2)])


def test_a_constant_that_hides_everything_stays() -> None:
    agree(attention(lambda given: plain(given) & torch.zeros(S, S, dtype=torch.bool)), qkv(), changed=0)


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


def test_sequences_of_one_query_keep_their_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch moves the heads of a longest sequence of one query into the queries, and counts empty sequences too."""
    longest: list[int] = []

    def forward(*given: object, scale: float) -> tuple[Tensor, ...]:
        longest.append(given[5])  # type: ignore[arg-type]
        return (given[0], *torch.zeros(4))  # type: ignore[return-value]

    monkeypatch.setattr(operators.aten._flash_attention_forward, "default", forward)
    for queries in (1, 5):
        q, k = torch.randn(B, 8, queries, D), torch.randn(B, 2, S, D)
        out = operators._fused(q, k, k, (torch.zeros(7), torch.zeros(7)), False, 0, 0.0, 1.0, BY_LENGTHS)[0]
        assert torch.equal(out, q)
    assert longest == [2, 5]


def test_rows_behind_a_hidden_key_are_those_that_a_triangle_gets_wrong() -> None:
    lower = torch.ones(S, S, dtype=torch.bool).tril()
    for given in kinds().values():
        bounds, _, _ = _bounds(given.bool(), S, causal=True)
        wrong = ((lower & given.bool()[:, None, :]) != lower).any(-1)
        for b in range(B):
            assert wrong[b].nonzero().flatten().tolist() == list(range(int(bounds[b, 0]), S))

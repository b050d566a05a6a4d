"""torch.compile(backend="autotune") of models whose attention is rewritten, and the setting that leaves it as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from torch import Tensor, fx, nn
from torch.nn.functional import scaled_dot_product_attention

import autotune
from autotune.compiler.capture import attention
from autotune.errors import UserError
from autotune.runtime.deployment import Deployment, deployment, use
from tests.support.runtime.models import assert_same_step, twin

WIDTH, HEADS, PLACES = 32, 4, 12


class Encoder(nn.Module):
    """Two layers with the mask that transformers 5 makes for BERT under a compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        mask = (torch.arange(length)[None, None, :, None] >= 0).expand(batch, -1, length, length)
        for packed, norm in zip(self.packed, self.norms, strict=True):
            q, k, v = packed(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = norm(x + out.transpose(1, 2).reshape(batch, length, WIDTH))
        return x


class Decoder(nn.Module):
    """One step of decoding with a static cache, which it writes to; two queries share a key."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(WIDTH, 2 * WIDTH)
        self.register_buffer("keys", torch.zeros(3, 2, PLACES, 8))
        self.register_buffer("values", torch.zeros(3, 2, PLACES, 8))

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        q, k, v = self.packed(x).view(3, 1, 8, 8).transpose(1, 2).split([HEADS, 2, 2], 1)
        self.keys.index_copy_(2, place, k)
        self.values.index_copy_(2, place, v)
        whole = [t[:, :, None].expand(3, 2, 2, PLACES, 8).reshape(3, 4, PLACES, 8) for t in (self.keys, self.values)]
        seen = (torch.arange(PLACES) <= place)[None, None, None, :].expand(3, 1, 1, -1)
        return scaled_dot_product_attention(q, *whole, attn_mask=seen).transpose(1, 2).reshape(3, 1, WIDTH)


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rewritten attention calls in each compiled graph."""
    counts: list[int] = []
    real = attention.rewrite_attention

    def rewrite(gm: fx.GraphModule) -> int:
        counts.append(real(gm))
        return counts[-1]

    monkeypatch.setattr(attention, "rewrite_attention", rewrite)
    return counts


def compiled(model: Callable[..., Any]) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="autotune", fullgraph=True)


def test_training_of_an_encoder(db: str, changed: list[int]) -> None:
    model = Encoder()
    assert_same_step(compiled(model), model, twin(model), torch.randn(2, 10, WIDTH))
    assert changed == [2]


def test_steps_of_a_decoder_with_a_static_cache(db: str, changed: list[int]) -> None:
    model = Decoder().eval()
    reference = twin(model)
    run = compiled(model)
    with torch.no_grad():
        for place in range(4):
            x, at = torch.randn(3, 1, WIDTH), torch.tensor([place])
            torch.testing.assert_close(run(x, at), reference(x, at), atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert changed == [1]


def test_the_option_leaves_attention_as_written(db: str, changed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace Inductor: its graphs run as they are."""
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", lambda gm, *args, **kwargs: gm.forward)
    model, x = Encoder().eval(), torch.randn(2, 10, WIDTH)

    def compiles_to(counts: list[int]) -> None:
        changed.clear()
        with torch.no_grad():
            torch.testing.assert_close(compiled(model)(x), model(x), atol=1e-5, rtol=1e-5)
        assert changed == counts

    assert autotune.configure(attention="keep").attention == "keep"
    compiles_to([])
    autotune.configure(verify="first")
    compiles_to([])
    autotune.configure(attention="fuse")
    compiles_to([2])
    monkeypatch.setenv("AUTOTUNE_ATTENTION", "keep")
    compiles_to([2])
    use(Deployment())
    assert deployment().settings.attention == "keep"
    compiles_to([])
    autotune.configure(attention="fuse")
    compiles_to([2])


@pytest.mark.parametrize("value", ["Fuse", "yes", True])
def test_a_wrong_value_is_one_line(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError) as told:
        autotune.configure(attention=value)
    assert str(told.value) == f"attention: {value!r} must be one of fuse, keep"
    assert deployment().settings.attention == "fuse"
    monkeypatch.setenv("AUTOTUNE_ATTENTION", str(value))
    use(Deployment())
    with pytest.raises(UserError, match=f"^AUTOTUNE_ATTENTION: '{value}' must be one of fuse, keep$"):
        assert deployment().settings


def test_a_wrong_variable_ends_no_compilation(
    db: str, changed: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AUTOTUNE_ATTENTION", "fast")
    use(Deployment())
    model, x = Encoder().eval(), torch.randn(2, 10, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(x), model(x), atol=1e-5, rtol=1e-5)
    assert changed == []
    assert "AUTOTUNE_ATTENTION: 'fast' must be one of fuse, keep" in caplog.text


def biased(x: Tensor, bias: Tensor) -> Tensor:
    """T5's attention: the choice of a branch is a region where it is left."""
    seen = (torch.arange(10)[None, None, :, None] >= 0).expand(2, -1, 10, 10)
    return scaled_dot_product_attention(x, x, x, attn_mask=torch.where(seen, bias, -1e9)).transpose(1, 2)


def test_lookup_and_deployment_rewrite_attention_alike(db: str) -> None:
    missed: dict[str, int] = {}
    for how in ("keep", "fuse"):
        autotune.configure(attention=how)  # type: ignore[arg-type]
        deployment().reset_counters()
        args = torch.randn(2, HEADS, 10, 8), torch.randn(1, HEADS, 10, 10)
        missed[how] = autotune.lookup(biased, args).misses
        torch.testing.assert_close(compiled(biased)(*args), biased(*args))
        assert autotune.counters().misses == missed[how]
    assert missed == {"keep": 1, "fuse": 0}


def test_a_second_length_is_of_any_length(db: str, changed: list[int]) -> None:
    """A compilation for symbolic lengths rewrites attention as well."""
    model = Encoder()
    run = compiled(model)
    for length in (8, 11, 16, 23):
        x = torch.randn(2, length, WIDTH)
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    assert changed == [2, 2]


def ones() -> Tensor:
    """A mask that hides nothing, of three axes: torch computes by products then."""
    return torch.ones(1, PLACES, PLACES, dtype=torch.bool)


def chosen_and_written(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    mask = torch.where(torch.arange(PLACES)[None, None, :, None] >= 0, bias, -1e9)
    mask[..., 2:] = -1e9
    return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def repeated_and_written(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    k, v = (t[:, :2].repeat_interleave(2, 1) for t in (k, v))
    k[:, 0] = 0
    return scaled_dot_product_attention(q[:, :, :1], k, v).transpose(1, 2).flatten(2)


def copied_and_written(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    out = scaled_dot_product_attention(q, k, v, attn_mask=ones())
    copy = out.transpose(1, 2).contiguous()
    copy.mul_(2)
    return out + copy.transpose(1, 2)


def reshaped_and_viewed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    out = scaled_dot_product_attention(q, k, v, attn_mask=ones())
    return out.reshape(3, HEADS, PLACES, 2, 4).view(-1)


def reshaped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=ones()).reshape(3, HEADS, PLACES, 2, 4)


def written(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    out = scaled_dot_product_attention(q, k, v, attn_mask=ones())
    out *= 2
    return out.sum(-1)


def learned(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    mask = torch.where(torch.arange(PLACES)[None, None, :, None] >= 0, torch.zeros_like(bias), bias)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def one_head(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    k, v = (t[:, :1].repeat_interleave(2, 1) for t in (k, v))
    return scaled_dot_product_attention(q[:, :1, :1], k, v).transpose(1, 2).flatten(2)


def no_queries(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    k, v = (t[:, :2].repeat_interleave(2, 1) for t in (k, v))
    return scaled_dot_product_attention(q[:, :, :0], k, v).transpose(1, 2).flatten(2).sum(1)


def rounded_by_autocast(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    places = torch.arange(PLACES).float() + 1024
    with torch.autocast("cpu", torch.bfloat16):
        product = torch.ones(PLACES, 1) @ places[None]
        mask = (product == places) | (torch.arange(PLACES) == 0)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None]).float().transpose(1, 2).flatten(2)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("fn", [
    chosen_and_written, repeated_and_written, copied_and_written, reshaped_and_viewed, reshaped, written, learned,
    one_head, no_queries, rounded_by_autocast,
])  # fmt: skip
def test_other_operations_of_a_program(
    fn: Callable[..., Tensor], train: bool, db: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Results, gradients and strides are torch.compile's, and no rule fails."""
    rng = torch.Generator().manual_seed(0)
    turned = [torch.randn(3, PLACES, HEADS, 8, generator=rng).transpose(1, 2) for _ in range(3)]
    given = [*turned, torch.randn(3, HEADS, PLACES, PLACES, generator=rng)]
    for t in given:
        t.requires_grad_(train)
    found: list[tuple[Tensor, list[Tensor | None]]] = []
    with torch.set_grad_enabled(train):
        for backend in ("inductor", "autotune"):
            torch._dynamo.reset()
            out = torch.compile(fn, backend=backend, dynamic=False)(*given)
            grads = torch.autograd.grad(out.sum(), given, allow_unused=True) if train else []
            found.append((out, list(grads)))
    (theirs, their_grads), (ours, our_grads) = found
    assert ours.stride() == theirs.stride()
    torch.testing.assert_close(ours, theirs, atol=1e-2 if fn is rounded_by_autocast else 1e-5, rtol=1e-5)
    for a, b in zip(our_grads, their_grads, strict=True):
        assert (a is None) == (b is None)
        if a is not None and fn is not rounded_by_autocast:
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert "rule failed" not in caplog.text


def test_a_length_whose_range_the_user_named(db: str) -> None:
    """A window that is wider than the sequence hides nothing at this length, which must not become their limit."""

    def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])
        seen = (places <= places[:, None]) & (places[:, None] - places < 12)
        return scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)

    run = torch.compile(windowed, backend="autotune")
    for length in (6, 20):
        given = [torch.randn(3, HEADS, length, 8) for _ in range(3)]
        for t in given:
            torch._dynamo.mark_dynamic(t, 2, min=2, max=100)
        torch.testing.assert_close(run(*given), windowed(*given), atol=1e-5, rtol=1e-5)


def shared_across_grad_modes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    mask = bias.transpose(-1, -2)
    with torch.no_grad():
        first = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return first + scaled_dot_product_attention(q, k, v, attn_mask=mask)


def chosen_without_gradients(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    with torch.no_grad():
        mask = torch.where(torch.arange(PLACES)[None, None, :, None] >= 0, bias, -1e9)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def repeated_without_gradients(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    few = k[:, :2], v[:, :2]
    with torch.no_grad():
        k, v = (t.repeat_interleave(2, 1) for t in few)
    return scaled_dot_product_attention(q[:, :, :1], k, v)


@pytest.mark.parametrize("fn", [shared_across_grad_modes, chosen_without_gradients, repeated_without_gradients])
def test_gradients_with_a_part_of_a_program_under_no_grad(fn: Callable[..., Tensor], db: str) -> None:
    """They are those of eager mode, which has none for tensors made under ``no_grad``."""
    rng = torch.Generator().manual_seed(0)
    shapes = [*[(3, HEADS, PLACES, 8)] * 3, (3, HEADS, PLACES, PLACES)]
    given = [torch.randn(shape, generator=rng, requires_grad=True) for shape in shapes]
    found = []
    for run in (fn, compiled(fn)):
        out = run(*given)
        found.append([out, *torch.autograd.grad((out**2).sum(), given, allow_unused=True)])
    want, got = found
    assert [t is None for t in got] == [t is None for t in want]
    for a, b in zip(got, want, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)

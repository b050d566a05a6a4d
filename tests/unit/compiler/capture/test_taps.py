"""A depthwise convolution of one dimension is a sum of shifted inputs, where it may be, and the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autotune.compiler.capture import depthwise
from autotune.compiler.capture.recording import recording_backend
from autotune.compiler.regions.find import Region, find_regions
from tests.support.capture_helpers import rewritten_on_cpus

aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


also_on_cpus = rewritten_on_cpus(depthwise)


def inputs(
    channels: int, taps: int, dtype: torch.dtype = torch.float32, channels_last: bool = False, each: int = 1
) -> list[Tensor]:
    """[2, channels, 17], weights and bias."""
    x = torch.randn(2, 17, channels).transpose(1, 2) if channels_last else torch.randn(2, channels, 17)
    return [t.to(dtype) for t in (x, torch.randn(channels, each, taps), torch.randn(channels))]


def silu_of(options: dict[str, Any]) -> Any:
    def fn(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.silu(F.conv1d(x, weight, bias, **options)[..., :12])

    return fn


def results(run: Any, args: Sequence[Tensor], wanted: Sequence[int] = (0, 1, 2)) -> list[Tensor]:
    """The output, and the gradients of ``wanted``."""
    given = [a.detach().requires_grad_(k in wanted) for k, a in enumerate(args)]
    out = run(*given)
    ramp = torch.linspace(-1, 1, out.numel()).to(out).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, [given[k] for k in wanted], ramp)]


def graphs_of(fn: Any, args: Sequence[Tensor], wanted: Sequence[int] = (0, 1, 2)) -> list[Any]:
    """The graphs of a function, once its results are found to be those of eager mode in fp64."""
    seen: list[Any] = []
    got = results(torch.compile(fn, backend=recording_backend(seen.append), dynamic=False), args, wanted)
    apart = 1e-5 if args[0].dtype == torch.float32 else 2**-7
    for a, b in zip(got, results(fn, [a.double() for a in args], wanted), strict=True):
        assert a.dtype == args[0].dtype
        torch.testing.assert_close(a.double(), b, rtol=apart, atol=apart * float(b.abs().max()))
    return [g.module for g in seen]


def left(modules: Sequence[Any]) -> int:
    return sum(len(m.graph.find_nodes(op="call_function", target=t)) for m in modules for t in CONVOLUTIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("channels", "taps", "options", "channels_last", "wanted"), [
    (6, 4, {"padding": 3}, True, (0, 1, 2)),  # causal, as in state-space layers
    (6, 4, {"padding": 3}, False, (0, 1, 2)), (5, 3, {"padding": "same"}, False, (0, 1)),
    (5, 3, {"padding": 4, "dilation": 2}, True, (1,)), (5, 9, {}, False, (0,)), (5, 1, {}, False, (0, 2)),
    (5, 2, {"padding": 5, "dilation": 3}, True, (0, 1, 2)), (5, 4, {"padding": 20}, True, (0, 1, 2)),
])  # fmt: skip
def test_it_is_a_sum(
    channels: int,
    taps: int,
    options: dict[str, Any],
    channels_last: bool,
    wanted: Sequence[int],
    dtype: torch.dtype,
) -> None:
    args = inputs(channels, taps, dtype, channels_last)
    assert left(graphs_of(silu_of({"groups": channels, **options}), args, wanted)) == 0


def test_an_expanded_input() -> None:
    x, weight, bias = inputs(6, 4)

    def fn(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv1d(x[:1].expand(3, -1, -1), weight, bias, padding=3, groups=6)

    assert left(graphs_of(fn, [x, weight, bias])) == 0


@pytest.mark.parametrize(("args", "options"), [
    (inputs(6, 4), {"stride": 2, "groups": 6}), (inputs(6, 4, each=6), {"groups": 1}),
    (inputs(6, 4, each=2), {"groups": 3}), (inputs(6, 10), {"groups": 6}), (inputs(1, 4), {"groups": 1}),
    (inputs(6, 2), {"padding": 20, "dilation": 37, "groups": 6}),  # the taps read 17 positions of padding alone
])  # fmt: skip
def test_others_stay(args: list[Tensor], options: dict[str, Any]) -> None:
    assert left(graphs_of(silu_of(options), args)) == 2


def test_two_filters_for_each_channel_stay() -> None:
    x, weight, bias = inputs(6, 4)
    assert left(graphs_of(silu_of({"groups": 3}), [x[:, :3].contiguous(), weight, bias])) == 2


def test_other_devices_keep_the_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depthwise, "DEVICES", {"cuda"})
    assert left(graphs_of(silu_of({"groups": 6}), inputs(6, 4))) == 2


def saved_bytes(fn: Any, args: Sequence[Tensor], wanted: Sequence[int] = (0, 1, 2)) -> int:
    """The bytes of the results of a forward graph: the output, and what is saved for the backward pass."""
    (output,) = graphs_of(fn, args, wanted)[0].graph.find_nodes(op="output")
    return sum(n.meta["val"].numel() * n.meta["val"].itemsize for n in output.args[0])


def keeps_no_more(monkeypatch: pytest.MonkeyPatch, fn: Any, args: Sequence[Tensor]) -> None:
    ours = saved_bytes(fn, args)
    monkeypatch.setattr(depthwise, "DEVICES", set())
    torch._dynamo.reset()
    assert ours <= saved_bytes(fn, args)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("taps", "padding"), [(4, 3), (3, 1)])
def test_no_shifted_input_is_saved(
    taps: int, padding: int, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fn(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.silu(F.conv1d(x, weight, bias, padding=padding, groups=64))

    keeps_no_more(monkeypatch, fn, inputs(64, taps, torch.bfloat16, channels_last))


def gate(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.conv1d(x.exp(), weight, bias, padding=3, groups=6))


def checkpointed(policy: CheckpointPolicy | None) -> Any:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts(lambda context, op, *_, **__: policy)

    named = {} if policy is None else {"context_fn": contexts}

    def fn(*args: Tensor) -> Tensor:
        return checkpoint(gate, *args, use_reentrant=False, **named).cos()  # type: ignore[no-untyped-call, no-any-return]

    return fn


@pytest.mark.parametrize("policy", [None, *CheckpointPolicy])
def test_in_a_checkpoint(policy: CheckpointPolicy | None, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = policy in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
    assert left(graphs_of(checkpointed(policy), inputs(6, 4))) == saves, "a policy for the convolution's own result"
    torch._dynamo.reset()
    keeps_no_more(monkeypatch, checkpointed(policy), inputs(6, 4))


def test_two_checkpoints_of_one_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        def convolved(*args: Tensor) -> Tensor:
            return F.silu(F.conv1d(*args, padding=3, groups=6))

        both = (checkpoint(convolved, x, w, bias, use_reentrant=False) for w in (weight, 2 * weight))  # type: ignore[no-untyped-call]
        return torch.add(*both)

    keeps_no_more(monkeypatch, fn, inputs(6, 4, channels_last=True))


def regions_of(fn: Any, args: Sequence[Tensor], side: int) -> list[Region]:
    """The regions of the forward (0) or the backward pass (1)."""
    return find_regions(graphs_of(fn, args)[side], "cuda")


def test_a_costly_gradient_is_stored_once_for_all_shifts() -> None:
    args = inputs(64, 4, torch.bfloat16, channels_last=True)
    costly = regions_of(lambda x, w, b: F.silu(F.conv1d(x, w, b, padding=3, groups=64)), args, 1)
    cheap = regions_of(lambda x, w, b: 3 * F.conv1d(x, w, b, padding=3, groups=64), args, 1)
    assert [len(r.outputs) for r in cheap] == [3], "the gradients, in one region"
    assert len(costly) == 2
    shared = set(costly[1].inputs).intersection(costly[0].outputs)
    (stored,) = [n for n in shared if n.meta["val"].dtype == torch.bfloat16]  # the other one is the weights' copy
    assert stored.meta["val"].shape == (2, 20, 64)
    assert "sigmoid" in costly[0].submodule.code
    assert "sigmoid" not in costly[1].submodule.code


@pytest.mark.parametrize(("taps", "count"), [(2, 1), (4, 2)])
def test_a_norm_is_not_repeated_for_each_of_several_shifts(taps: int, count: int) -> None:
    def fn(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        normed = F.rms_norm(x.transpose(1, 2), (64,)).transpose(1, 2)
        return F.conv1d(normed, weight, bias, padding=taps - 1, groups=64)

    forward = regions_of(fn, inputs(64, taps, channels_last=True), 0)
    assert len(forward) == count
    assert "rsqrt" in forward[0].submodule.code


@pytest.mark.parametrize(("channels_last", "shapes"), [(True, [(4, 1, 64), (2, 64, 803)]), (False, [(2, 64, 803)])])
def test_weights_are_transposed_once_for_vectors_of_channels(channels_last: bool, shapes: list[Any]) -> None:
    x = torch.randn(2, 800, 64).transpose(1, 2) if channels_last else torch.randn(2, 64, 800)
    _, weight, bias = inputs(64, 4)
    args = [t.bfloat16() for t in (x, weight, bias)]
    forward = regions_of(lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=64), args, 0)
    assert [tuple(r.outputs[0].meta["val"].shape) for r in forward] == shapes
    assert all(r.workload is not None for r in forward)


def test_a_costly_tensor_is_stored_before_a_program_shifts_it() -> None:
    def fn(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        return sum(F.pad(y, [k, -k]) for k in range(1, 5))  # type: ignore[return-value]

    seen: list[Any] = []
    torch.compile(fn, backend=recording_backend(seen.append), dynamic=False)(torch.randn(6, 50))
    first, second = find_regions(seen[0].module, "cuda")
    assert ("tanh" in first.submodule.code, "tanh" in second.submodule.code) == (True, False)

"""Features of torch.compile with stored kernels in its graphs: one test for each feature."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import autotune
from autotune.compiler.lower.facts import GraphFacts
from tests.endtoend.runtime.test_backend import close, code_of, compiled, region_calls
from tests.support.deployment import Tune
from tests.support.runtime.models import Block, assert_same_step, twin

aten = torch.ops.aten


def mlp(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.relu(x) @ w, -1)


def test_generated_code_calls_regions_with_buffers_of_inductors(tune: Tune) -> None:
    args = torch.randn(32, 48), torch.randn(48, 48)
    assert len(tune(mlp, args)) == 2
    got, code = code_of(mlp, *args)
    close(got, mlp(*args))
    one, two = region_calls(code)
    assert re.search(r"autotune_relu_0\(arg\d_1, (buf\d+)\)", one)
    assert re.search(r"autotune_softmax_1\((buf\d+), (buf\d+)\)", two)
    for name in re.findall(r"buf\d+", one + two):
        assert f"{name} = empty_strided_cpu((32, 48), (48, 1), torch.float32)" in code or f"{name} = buf" in code
    assert re.search(r"extern_kernels\.mm\(buf\d+, arg\d_1, out=buf\d+\)", code)
    assert "cpp_fused" not in code, "nothing is left over for Inductor to compile"


def test_memory_of_one_region_is_used_again_for_another(tune: Tune) -> None:
    """Inductor plans the memory: the first sum is dead once the product has read it."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.softmax(x, -1) @ w
        return torch.softmax(x, -1)

    args = torch.randn(32, 48), torch.randn(48, 48)
    tune(fn, args)
    got, code = code_of(fn, *args)
    close(got, fn(*args))
    assert len(region_calls(code)) == 4
    assert code.count("empty_strided_cpu((") <= 3, "seven results in three buffers"
    texts = len(re.findall(r"^autotune_text_\d+ = ", code, re.MULTILINE))
    assert texts == 2, "equal regions have one text, but for the one that counts the graph's steps"


def test_a_region_that_reads_another_ones_result(tune: Tune) -> None:
    """``tanh`` is read by the product and by the sum behind it; nothing of it is computed a second time."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x) * 2
        return torch.softmax(h * torch.relu(h @ w), -1)

    args = torch.randn(32, 48), torch.randn(48, 48)
    assert len(tune(fn, args)) == 2
    got, code = code_of(fn, *args)
    close(got, fn(*args))
    one, two = region_calls(code)
    (made,) = re.findall(r"buf\d+", one)
    assert f"{made}," in two
    assert "cpp_fused" not in code


def test_regions_in_a_row(tune: Tune) -> None:
    """Each step reads two earlier regions' results, as they are and through views: what they were cut from is gone."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x
        for _ in range(3):
            h = torch.tanh(h + torch.sigmoid(h @ w).t().contiguous().t()[:, :48]) * 1.5
        return h

    args = torch.randn(32, 48), torch.randn(48, 48)
    tune(fn, args)
    got, code = code_of(fn, *args)
    close(got, fn(*args))
    assert len(region_calls(code)) == autotune.counters().hits >= 3
    assert "cpp_fused" not in code


class _Negate:
    """A pass of a user's: sums become differences. (What is negated shows whether it ran, and ran before ours.)"""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph: fx.Graph) -> None:
        self.runs += 1
        for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
            node.target = aten.sub.Tensor


class _Named(_Negate, CustomGraphPass):
    def uuid(self) -> Any:
        return b"negate"


@pytest.mark.parametrize("make", [_Negate, _Named], ids=["plain", "with an identity"])
@pytest.mark.parametrize("name", ["post_grad_custom_post_pass", "joint_custom_post_pass"])
@pytest.mark.parametrize("way", ["config", "options"])
def test_passes_of_the_users_own_run_before_ours(tune: Tune, make: Callable[[], _Negate], name: str, way: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x + y, -1)

    def meant(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x - y, -1)

    args, theirs = (torch.randn(32, 48), torch.randn(32, 48)), make()
    assert len(tune(meant, args)) == 1
    if way == "config":
        with torch._inductor.config.patch({name: theirs}):
            got, code = code_of(fn, *args)
    else:
        got, code = code_of(fn, *args, options={name: theirs})
    close(got, meant(*args))
    assert theirs.runs == 1
    assert len(region_calls(code)) == 1, "the region is found in what the user's pass left"


def test_a_list_of_passes(tune: Tune) -> None:
    args, theirs = (torch.randn(32, 48), torch.randn(48, 48)), [_Negate(), _Negate()]
    tune(mlp, args)
    with torch._inductor.config.patch(post_grad_custom_post_pass=theirs):
        close(compiled(mlp)(*args), mlp(*args))
    assert [p.runs for p in theirs] == [1, 1]


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ({"mode": "max-autotune-no-cudagraphs"}, {"max_autotune": True}),
        ({"options": {"max_fusion_size": 8}}, {"max_fusion_size": 8}),
        ({"options": {"triton.cudagraphs": False, "epilogue_fusion": False}}, {"epilogue_fusion": False}),
    ],
)
def test_the_users_options_reach_inductor(
    tune: Tune, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], setting: dict[str, Any]
) -> None:
    from autotune.runtime.inductor import region_pass

    seen: list[dict[str, Any]] = []
    found = region_pass.regions_from

    def looking(facts: GraphFacts) -> Any:
        seen.append({name: getattr(torch._inductor.config, name) for name in setting})
        return found(facts)

    model, x = Block(), torch.randn(32, 48)
    stored = tune(twin(model), (x.clone().requires_grad_(),), select=lambda w: "softmax" in w.label)
    monkeypatch.setattr(region_pass, "regions_from", looking)
    assert_same_step(compiled(model, **given), model, twin(model), x)
    assert seen == [setting] * 2, "of the forward and of the backward"
    assert autotune.counters().hits == len(stored)


def test_unknown_inductor_option_is_refused(db: str) -> None:
    with pytest.raises(Exception, match="no_such_option"):
        compiled(mlp, options={"no_such_option": 1})(torch.randn(4, 4), torch.randn(4, 4))


def test_code_without_python_has_no_kernels_of_a_cpu(tune: Tune, caplog: pytest.LogCaptureFixture) -> None:
    args = torch.randn(32, 48), torch.randn(48, 48)
    tune(mlp, args)
    once = torch._inductor.config.patch(
        {"cpp_cache_precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
    )  # no other test needs this mode's headers
    for fn in (mlp, lambda x, w: mlp(x, w) * 2):
        with torch.no_grad(), once:
            (got, code) = run_and_get_code(compiled(fn, options={"cpp_wrapper": True}), *args)
        close(got, fn(*args))
        assert "autotune" not in "".join(code)
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "autotune" and r.levelno >= logging.WARNING]
    assert "is left to Inductor in C++ code: CPU kernels are launched from Python only" in warning
    assert autotune.counters().hits == 0


def test_branches_and_repeated_blocks_have_regions_too(tune: Tune) -> None:
    """Inductor compiles ``torch.cond``'s branches as graphs of their own."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x @ w, -1)
        return torch.cond(y.sum() > 1e6, lambda y: (y * 3).sum(-1), lambda y: torch.tanh(y).sum(-1), (y,))  # type: ignore[no-any-return]

    args = torch.randn(32, 48), torch.randn(48, 48)
    with torch.no_grad():
        want = torch.tanh(torch.softmax(args[0] @ args[1], -1)).sum(-1)
        assert len(tune(fn, args)) >= 3
        got, code = code_of(fn, *args)
    close(got, want)
    assert len(region_calls(code)) == autotune.counters().hits >= 3


def test_freezing(tune: Tune) -> None:
    model, x = Block().eval(), torch.randn(32, 48)
    with torch.no_grad():
        tune(model, (x,))
        with torch._inductor.config.patch(freezing=True):
            got, code = run_and_get_code(compiled(model), x)
    close(got, model(x))
    assert sum(len(region_calls(c)) for c in code) == autotune.counters().hits > 0


def test_autocast(tune: Tune) -> None:
    model, x = Block(), torch.randn(32, 48)

    def step(run: Callable[..., Any], model: nn.Module) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = run(x)
        y.float().square().sum().backward()
        return [y, *(p.grad for p in model.parameters() if p.grad is not None)]

    other = twin(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stored = tune(twin(model), (x,))
    for a, b in zip(step(compiled(model), model), step(other, other), strict=True):
        torch.testing.assert_close(a, b, atol=3e-2, rtol=3e-2)
    assert autotune.counters().hits == len(stored) > 2


def _checkpointed(drop: float, **options: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.gelu(torch.layer_norm(x @ w, (48,))), drop)

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(block, x, w, use_reentrant=False, **options)
        return x

    return fn


def _saved_bytes(run: Callable[..., torch.Tensor], *args: torch.Tensor) -> tuple[torch.Tensor, int]:
    sizes: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        sizes[t.data_ptr()] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = run(*args)
    return y, sum(sizes.values())


def _selective() -> Any:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@pytest.mark.parametrize("selective", [False, True])
def test_checkpointed_regions_are_computed_again(tune: Tune, selective: bool) -> None:
    fn = _checkpointed(0.0, **({"context_fn": _selective} if selective else {}))
    args = torch.randn(64, 48, requires_grad=True), torch.randn(48, 48, requires_grad=True)
    stored = tune(fn, args)
    got, ours = _saved_bytes(compiled(fn), *args)
    want, plain = _saved_bytes(compiled(lambda x, w: _plain(fn, x, w)), *args)
    close(got, want)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), args) for y in (got, want)), strict=True):
        close(a, b)
    assert autotune.counters().hits >= len(stored) > 0
    assert ours <= plain


def _plain(fn: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = F.gelu(torch.layer_norm(x @ w, (48,)))
    return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_in_checkpointed_regions_drops_the_same_again(tune: Tune, reentrant: bool) -> None:
    """The gradient of a sum over what was kept is nonzero where it was kept, only if the mask is the same twice."""

    def block(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.exp(x), 0.4)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    x = torch.randn(64, 48, requires_grad=True)
    stored = tune(fn, (x,))
    y = compiled(fn)(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    close(gradient, y.detach())  # the derivative of exp
    assert 0.3 < (y == 0).float().mean().item() < 0.5
    assert autotune.counters().hits >= len(stored) > 0


def test_compiled_autograd(tune: Tune) -> None:
    model, x = Block(), torch.randn(32, 48)
    stored = tune(twin(model), (x.clone().requires_grad_(),))
    reference = twin(model)
    with torch._dynamo.config.patch(compiled_autograd=True):
        run = compiled(model)

        def loss(x: torch.Tensor) -> torch.Tensor:
            return run(x).square().sum()  # type: ignore[no-any-return]

        ours = x.clone().requires_grad_()
        torch.compile(lambda: loss(ours).backward(), backend="autotune")()
    theirs = x.clone().requires_grad_()
    reference(theirs).square().sum().backward()
    close(ours.grad, theirs.grad)  # type: ignore[arg-type]
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4)
    assert autotune.counters().hits
    assert autotune.counters().graphs >= 2
    assert stored


def test_a_region_that_reads_no_memory(tune: Tune) -> None:
    """Its inputs give only their shape, so torch runs it; a part with values is a kernel."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones_like(x).sum(-1), torch.zeros_like(x) + torch.softmax(y, -1)

    args = torch.full((32, 48), float("nan")), torch.randn(32, 48)
    assert len(tune(fn, args)) == 1
    for got, want in zip(compiled(fn)(*args), fn(*args), strict=True):
        close(got, want)
    alone = torch.ones_like
    close(compiled(lambda x: alone(x).sum(-1))(args[0]), torch.full((32,), 48.0))
    assert autotune.counters().hits == 1
    assert autotune.counters().fallbacks == 0

"""Inductor's options that change results: they take effect in regions, or Inductor compiles the regions."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch import config as aot_config
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

import autotune
from autotune.compiler.capture.options import REQUIREMENTS
from autotune.compiler.capture.recording import capture
from autotune.runtime.deployment import deployment
from tests.support.deployment import Tune

LARGE = torch.full((64, 64), 400.0, dtype=torch.float16)
"""Its square is infinite in 16 bits, and is not in 32."""


def overflows(x: Tensor) -> Tensor:
    return torch.isinf(x * x)


def compiled(fn: Any, options: dict[str, Any] | None = None) -> Any:
    torch._dynamo.reset()
    deployment().reset_counters()
    return torch.compile(fn, backend="autotune", options=options)


def by_inductor(fn: Any, options: dict[str, Any] | None, *args: Tensor) -> Tensor:
    """Results of Inductor alone. Before torch 2.13 its code for CPUs does not emulate casts."""
    torch._dynamo.reset()
    made: Tensor = torch.compile(fn, options=options)(*args)
    return made


def found() -> tuple[int, int, int]:
    counted = autotune.counters()
    return counted.hits, counted.left_by_options, counted.misses


@pytest.mark.parametrize("way", ["options", "config"])
def test_emulated_casts_round_as_inductor_does(tune: Tune, way: str, caplog: pytest.LogCaptureFixture) -> None:
    assert tune(overflows, (LARGE,))
    assert not compiled(overflows)(LARGE).any()
    assert found() == (1, 0, 0)
    assert caplog.text == ""
    asked = {"emulate_precision_casts": True}
    with config.patch(asked if way == "config" else {}):
        ours = compiled(overflows, asked if way == "options" else None)(LARGE)
    assert found() == (0, 1, 0)
    assert torch.equal(ours, by_inductor(overflows, asked, LARGE))
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warning == (
        "autotune: regions are left to Inductor, since its option emulate_precision_casts requires values that are"
        " rounded to 16 bits after each operator"
    )


def test_options_are_spelled_as_inductor_takes_them(tune: Tune) -> None:
    assert tune(overflows, (LARGE,))
    asked = {"emulate-precision-casts": True}
    assert torch.equal(compiled(overflows, asked)(LARGE), by_inductor(overflows, asked, LARGE))
    assert found() == (0, 1, 0)


@pytest.mark.parametrize("asked", [{"epilogue_fushion": True}, {"max_autotune": "yes"}])
def test_a_wrong_option_is_an_error_as_for_inductor(db: str, asked: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError) as expected:
        torch.compile(overflows, options=asked)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=re.escape(str(expected.value)[:40])):
        compiled(overflows, asked)(LARGE)


def test_the_option_holds_in_the_backward_pass(tune: Tune) -> None:
    """Autograd compiles it later than the forward pass."""

    def fn(x: Tensor) -> Tensor:
        return torch.softmax(x * 3, -1) * x

    def step(run: Any) -> tuple[Tensor, Tensor]:
        x = torch.linspace(-3, 3, 64 * 64).view(64, 64).half().requires_grad_()
        y = run(x)
        y.sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    x = torch.randn(64, 64).half().requires_grad_()
    assert len(tune(fn, (x,))) == 2
    step(compiled(fn))
    assert found() == (2, 0, 0)
    options = {"emulate_precision_casts": True}
    ours = step(compiled(fn, options))
    assert found() == (0, 2, 0)
    torch._dynamo.reset()
    theirs = step(torch.compile(fn, options=options))
    assert all(map(torch.equal, ours, theirs))


VALUES: dict[Any, Any] = {False: True, True: False, None: "accuracy", "default": "strict"}
"""A value that requires something, by the one that requires nothing."""
ON_A_CPU = [name for name, required in REQUIREMENTS.items() if required.device != "cuda" and name in config._config]


@pytest.mark.parametrize("name", ON_A_CPU)
def test_a_requirement_leaves_regions_to_inductor(tune: Tune, name: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.log1p(torch.relu(x)) * 2

    x = torch.rand(64, 64)
    assert tune(fn, (x,))
    with torch.no_grad():
        _, code = run_and_get_code(compiled(fn, {name: VALUES[REQUIREMENTS[name].default]}), x)
    assert "autotune" not in "".join(code)
    assert found() == (0, 1, 0)


def test_options_about_a_gpu_leave_a_cpus_regions_alone(tune: Tune) -> None:
    assert tune(overflows, (LARGE,))
    compiled(overflows, {"eager_numerics.division_rounding": True, "triton.codegen_upcast_to_fp32": False})(LARGE)
    assert found() == (1, 0, 0)


def test_a_cached_graph_is_not_used_under_another_option(
    tune: Tune, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert tune(overflows, (LARGE,))
    asked = {"emulate_precision_casts": True}
    with config.patch(fx_graph_cache=True), aot_config.patch(enable_autograd_cache=True):
        for options in (None, asked, None, asked):
            ours = compiled(overflows, options)(LARGE)
            assert autotune.counters().hits == (options is None)
            assert torch.equal(ours, by_inductor(overflows, options, LARGE))


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x * 2, 0.5) + 1


def drawn(fn: Any, *args: Tensor) -> Tensor:
    torch.manual_seed(3)
    made: Tensor = fn(*args)
    return made


def test_random_numbers_are_eager_modes_by_the_option(tune: Tune) -> None:
    x = torch.randn(64, 64)
    with config.patch(fallback_random=True):
        assert tune(dropped, (x,))
        assert torch.equal(drawn(compiled(dropped), x), drawn(dropped, x))
    assert autotune.counters().hits
    assert not autotune.counters().misses


@pytest.mark.parametrize("name", [n for n in ("align_random_eager", "emulate_precision_casts") if n in config._config])
def test_random_numbers_stay_inductors_where_an_option_is_about_them(name: str) -> None:
    for asked, hashed in ((False, True), (True, False)):
        with config.patch({name: asked}):
            (graph,) = capture(dropped, (torch.randn(64, 64),), grad=False)
        calls = {str(n.target) for n in graph.module.graph.nodes}
        assert ("prims.inductor_random.default" not in calls) is hashed


def attended(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(1, 10, 10, dtype=torch.bool))


def test_attention_is_left_as_written() -> None:
    q = torch.randn(2, 4, 10, 8)
    with torch.no_grad():
        compiled(attended)(q)
        rewritten = autotune.counters().attention
        compiled(attended, {"emulate_precision_casts": True})(q)
    assert (rewritten, autotune.counters().attention) == (1, 0)

"""AOTInductor's packages by autotune: made and loaded on a CPU, whose kernels stay Inductor's.

What a GPU's packages launch is checked by tests/compile/runtime/test_region_cpp.py and tests/gpu/cpp_wrapper_check.py.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import autotune
from autotune.errors import UserError
from autotune.runtime.aoti import PackagedModel
from autotune.runtime.backend import takes_kernels
from tests.support.deployment import Tune


class Model(nn.Module):
    """Keywords and nested results, as models of libraries have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 48)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, bias: torch.Tensor) -> dict[str, Any]:
        y = torch.softmax(self.linear(x) * scale + bias, -1)
        return {"probabilities": y, "more": (y.sum(-1), x)}


def arguments() -> tuple[tuple[torch.Tensor], dict[str, torch.Tensor]]:
    return (torch.randn(32, 48),), {"scale": torch.randn(48), "bias": torch.randn(48)}


class Made:
    """A package made beside a stored schedule, and what was seen on the way."""

    def __init__(self, folder: Path, tune: Tune, caplog: pytest.LogCaptureFixture) -> None:
        self.model = Model().eval()
        args, kwargs = arguments()
        assert tune(lambda x, scale, bias: self.model(x, scale=scale, bias=bias), (*args, *kwargs.values()))
        self.passes: list[int] = []

        def theirs(graph: fx.Graph) -> None:
            self.passes.append(len(graph.nodes))

        self.path = str(folder / "model.pt2")
        with torch.no_grad():
            exported = torch.export.export(self.model, args, kwargs)
            configs = {"post_grad_custom_post_pass": theirs}
            made = autotune.aoti_compile_and_package(exported, package_path=self.path, inductor_configs=configs)
        assert made == self.path
        self.warnings = [
            r.getMessage() for r in caplog.records if r.name == "autotune" and r.levelno >= logging.WARNING
        ]
        self.counters = autotune.counters()


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got["probabilities"], want["probabilities"])
    torch.testing.assert_close(got["more"][0], want["more"][0])
    assert torch.equal(got["more"][1], want["more"][1])


def test_a_package_is_the_model(tmp_path: Path, tune: Tune, caplog: pytest.LogCaptureFixture) -> None:
    made = Made(tmp_path, tune, caplog)
    (warning,) = made.warnings
    assert warning.endswith("is left to Inductor in C++: Python alone launches kernels of a CPU")
    assert (made.counters.hits, made.counters.graphs) == (0, 1)
    assert made.passes, "the user's pass ran too"
    (x,), kwargs = arguments()
    with torch.no_grad():
        want = made.model(x, **kwargs)
    run = autotune.aoti_load_package(made.path)
    assert isinstance(run, PackagedModel)
    same(run(x, **kwargs), want)
    same(run(x, **dict(reversed(kwargs.items()))), want)
    same(autotune.aoti_load_package(made.path, run_single_threaded=True)(x, **kwargs), want)
    same(torch._inductor.aoti_load_package(made.path)(x, **kwargs), want)
    with pytest.raises(UserError, match=r"takes the keywords \['scale', 'bias'\], not \['scale'\]"):
        run(x, scale=kwargs["scale"])
    with pytest.raises(UserError, match="takes arguments") as told:
        run((x, x), **kwargs)
    assert "\n" not in str(told.value)
    for wrong, why in (
        (x.double(), r"float32 32x48 \(strides 48x1\) on cpu as tensor 0, not float64 32x48"),
        (torch.randn(33, 48), "not float32 33x48"),
        (torch.randn(48, 32).T, r"not float32 32x48 \(strides 1x32\)"),
        (torch.randn(48), "not float32 48 "),
        (torch.empty(32, 48, device="meta"), "on meta"),
    ):
        with pytest.raises(UserError, match=why):
            run(wrong, **kwargs)
    with pytest.raises(UserError, match="as tensor 2"):
        run(x, scale=kwargs["scale"], bias=torch.randn(47))
    job = f"""
import sys, json, torch, autotune
x, kwargs = torch.load({str(tmp_path / "given.pt")!r})
y = autotune.aoti_load_package({made.path!r})(x, **kwargs)
torch.save(y, {str(tmp_path / "got.pt")!r})
print(json.dumps([name for name in ("sympy", "torch._dynamo", "numba", "sqlalchemy", "optuna") if name in sys.modules]))
"""
    torch.save((x, kwargs), tmp_path / "given.pt")
    done = subprocess.run([sys.executable, "-c", job], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [], "nothing that compiles or looks up was imported"
    same(torch.load(tmp_path / "got.pt"), want)


def test_dynamic_sizes_may_be_any_and_others_not(tmp_path: Path) -> None:
    model = nn.Linear(48, 8)
    rows = torch.export.Dim("rows", min=2, max=1024)
    with torch.no_grad():
        exported = torch.export.export(model, (torch.randn(32, 48),), dynamic_shapes=({0: rows},))
        path = autotune.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
        run = autotune.aoti_load_package(path)
        for n in (2, 32, 77):
            x = torch.randn(n, 48)
            torch.testing.assert_close(run(x), model(x))
    with pytest.raises(UserError, match=r"float32 anyx48 \(strides 48x1\) on cpu as tensor 0, not float32 2x47"):
        run(torch.randn(2, 47))


@pytest.mark.parametrize("content", [b"", b"no package", b"PK\x03\x04" + bytes(40)])
def test_what_is_no_package_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.pt2"
    with pytest.raises(UserError, match="there is no package"):
        autotune.aoti_load_package(path)
    path.write_bytes(content)
    with pytest.raises(UserError, match="torch cannot load the package") as told:
        autotune.aoti_load_package(path)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", ["fx_wrapper", "aot_inductor.use_runtime_constant_folding"])
def test_where_inductor_has_no_place_for_kernels_it_compiles_alone(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert takes_kernels({"max_autotune": False})
    assert not caplog.records
    assert not takes_kernels({name: True})
    (warning,) = [r.getMessage() for r in caplog.records]
    assert warning == f"autotune: stored kernels are not used with Inductor's {name}"


def test_a_model_that_was_not_exported_is_refused() -> None:
    with pytest.raises(UserError, match=r"takes what torch\.export\.export returns, not Linear"):
        autotune.aoti_compile_and_package(nn.Linear(2, 2))

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
from torch.utils import _pytree as pytree

import autotune
from autotune.errors import UserError
from autotune.runtime.backend import takes_kernels
from autotune.runtime.packages import PackagedModel, _described
from tests.support.deployment import Tune


class Model(nn.Module):
    """Keywords, a number, and nested results, as models of libraries have, and two inputs of any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.short = nn.Linear(48, 48), nn.Linear(48, 8)

    def forward(
        self, x: torch.Tensor, *, scale: torch.Tensor, bias: torch.Tensor, rows: torch.Tensor, of: torch.Tensor, n: int
    ) -> dict[str, Any]:
        y = torch.softmax(self.linear(x) * scale + bias, -1)
        return {"probabilities": y, "more": (y.sum(-1), x), "short": self.short(rows)[:, :n], "crossed": of.T @ rows}


def arguments(rows: int = 32) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
    keywords = {"scale": torch.randn(48), "bias": torch.randn(48), "rows": torch.randn(rows, 48)}
    return (torch.randn(32, 48),), {**keywords, "of": torch.randn(48, rows).T, "n": 3}


class Made:
    """A package made with a stored schedule, and the calls of its creation."""

    def __init__(self, folder: Path, tune: Tune, caplog: pytest.LogCaptureFixture) -> None:
        self.model = Model().eval()
        args, kwargs = arguments()
        assert tune(lambda x, *more: self.model(x, **dict(zip(kwargs, more, strict=True))), (*args, *kwargs.values()))
        self.passes: list[int] = []

        def theirs(graph: fx.Graph) -> None:
            self.passes.append(len(graph.nodes))

        self.path = str(folder / "model.pt2")
        with torch.no_grad():
            rows = torch.export.Dim("rows", min=2, max=1024)
            sizes = {"x": None, "scale": None, "bias": None, "rows": {0: rows}, "of": {0: rows}, "n": None}
            exported = torch.export.export(self.model, args, kwargs, dynamic_shapes=sizes)
            # No other test reads these headers.
            configs = {
                "post_grad_custom_post_pass": theirs,
                "aot_inductor.precompile_headers": False,
                "aot_inductor.compile_wrapper_opt_level": "O0",
            }
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
    torch.testing.assert_close(got["short"], want["short"])
    torch.testing.assert_close(got["crossed"], want["crossed"])


def test_a_package_is_the_model(tmp_path: Path, tune: Tune, caplog: pytest.LogCaptureFixture) -> None:
    made = Made(tmp_path, tune, caplog)
    (warning,) = made.warnings
    assert warning.endswith("is left to Inductor in C++ code: CPU kernels are launched from Python only")
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
    with pytest.raises(UserError, match=r"takes the keyword arguments \['scale', .*, 'n'\], not \['scale'\]"):
        run(x, scale=kwargs["scale"])
    with pytest.raises(UserError, match="takes arguments") as told:
        run((x, x), **kwargs)
    assert "\n" not in str(told.value)
    for wrong, why in (
        (x.double(), r"argument x must be float32 32x48 \(strides 48x1\) on cpu for this package, not float64 32x48"),
        (torch.randn(33, 48), "not float32 33x48"),
        (torch.randn(48, 32).T, r"not float32 32x48 \(strides 1x32\)"),
        (torch.randn(48), "not float32 48 "),
        (torch.empty(32, 48, device="meta"), "on meta"),
    ):
        with pytest.raises(UserError, match=why):
            run(wrong, **kwargs)
    with pytest.raises(UserError, match="argument bias must be"):
        run(x, **{**kwargs, "bias": torch.randn(47)})
    for n in (2, 32, 77):
        other = {**kwargs, **{name: arguments(n)[1][name] for name in ("rows", "of")}}
        with torch.no_grad():
            same(run(x, **other), made.model(x, **other))
    for changed, why in (
        ({"rows": torch.randn(2, 47)}, r"rows must be float32 2x48 \(strides 48x1\) on cpu .*, not float32 2x47"),
        ({"rows": torch.randn(77, 48)}, "of must be float32 77x48 .*, not float32 32x48"),
        ({"of": torch.randn(32, 48)}, r"of must be float32 32x48 \(strides 1x32\) .* \(strides 48x1\)"),
        ({"rows": 2.0}, r"rows must be float32 anyx48 \(strides 48x1\) on cpu for this package, not 2.0"),
        ({"n": 4}, "n must be 3, as exported, not 4"),
        ({"n": torch.tensor(3)}, "n must be 3, as exported, not int64 scalar"),
        ({"n": x, "rows": 3}, "rows must be float32"),
    ):
        with pytest.raises(UserError, match=f"argument {why}"):
            run(x, **{**kwargs, **changed})
    with pytest.raises(UserError, match="size 0 of argument rows must be 2 to 1024, as exported, not 1"):
        run(x, **arguments(1)[1])
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


class OnePlace:
    """torch's loader of a package of a single function, which takes a tensor by position only and adds one."""

    def get_call_spec(self) -> list[str]:
        return [pytree.treespec_dumps(pytree.tree_structure(given)) for given in (((0,), {}), 0)]

    def get_metadata(self) -> dict[str, str]:
        return {}

    def boxed_run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [x + 1 for x in tensors]


def test_a_package_without_keywords_and_without_a_description() -> None:
    run, x = PackagedModel(OnePlace()), torch.randn(3)
    assert torch.equal(run(x), x + 1)
    with pytest.raises(UserError, match=r"takes the keyword arguments \[\], not \['x'\]"):
        run(x=x)
    with pytest.raises(UserError, match="takes arguments"):
        run(x, x)


class Described:
    """torch's loader of a package of an exported program, which it runs itself."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self._run, self._spec = program.module(check_guards=False), program.call_spec
        self._metadata = {"autotune.arguments": json.dumps(_described(program))}

    def get_call_spec(self) -> list[str]:
        return [pytree.treespec_dumps(spec) for spec in (self._spec.in_spec, self._spec.out_spec)]

    def get_metadata(self) -> dict[str, str]:
        return self._metadata

    def boxed_run(self, tensors: list[torch.Tensor]) -> list[Any]:
        found = pytree.tree_leaves(self._run(*tensors))
        return [torch.tensor(x) if isinstance(x, int) else x for x in found]  # as AOTInductor's code does


class Halves(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
        return x.view(2, -1, 3) * y, y.shape[0], 3, True, None, 2 * y.shape[0] + 1


class Alone(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[1:].view(2, -1, 3)


def test_sizes_of_symbols_that_a_later_argument_has_or_none() -> None:
    n = torch.export.Dim("n", min=2, max=64)
    both = (torch.randn(10, 3), torch.randn(5, 3))
    run = PackagedModel(Described(torch.export.export(Halves(), both, dynamic_shapes={"x": {0: 2 * n}, "y": {0: n}})))
    x, y = torch.randn(14, 3), torch.randn(7, 3)
    torch.testing.assert_close(run(x, y)[0], Halves()(x, y)[0])
    for rows in (13, 12, 16):
        with pytest.raises(UserError, match=f"argument x must be float32 14x3 .*, not float32 {rows}x3"):
            run(torch.randn(rows, 3), y)
    exported = torch.export.export(Alone(), (torch.randn(11, 3),), dynamic_shapes={"x": {0: 2 * n + 1}})
    alone = PackagedModel(Described(exported))
    torch.testing.assert_close(alone(x[:13]), Alone()(x[:13]))
    for rows in (14, 3, 131):
        with pytest.raises(
            UserError, match=rf"size 0 of argument x must be 2 \* \w+ \+ 1 with .* 2 to 64, .* not {rows}"
        ):
            alone(torch.randn(rows, 3))


def test_results_that_are_numbers() -> None:
    n = torch.export.Dim("n", min=2, max=64)
    both = (torch.randn(10, 3), torch.randn(5, 3))
    run = PackagedModel(Described(torch.export.export(Halves(), both, dynamic_shapes={"x": {0: 2 * n}, "y": {0: n}})))
    numbers = run(torch.randn(14, 3), torch.randn(7, 3))[1:]
    assert numbers == (7, 3, True, None, 15)
    assert list(map(type, numbers)) == [int, int, bool, type(None), int]


def test_tensors_whose_memory_has_other_values_are_refused() -> None:
    example = torch.randn(4, 3, dtype=torch.complex64)
    run = PackagedModel(Described(torch.export.export(nn.Softmax(-1), (example.imag,))))
    torch.testing.assert_close(run(example.imag), torch.softmax(example.imag, -1))
    with pytest.raises(UserError, match=r"argument input has torch's negative bit, .* pass its resolve_neg\(\)"):
        run(example.conj().imag)
    for other, layout in ((example.real.to_sparse_csr(), "csr"), (example.real.to_sparse(), "coo")):
        with pytest.raises(UserError, match=f"argument input must be .*, not float32 of layout sparse_{layout}"):
            run(other)


@pytest.mark.parametrize("content", [b"", b"no package", b"PK\x03\x04" + bytes(40)])
def test_an_invalid_package_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.pt2"
    with pytest.raises(UserError, match="no such package"):
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

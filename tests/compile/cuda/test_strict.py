"""Kernels under ``strict`` precision: no fast math and no approximated functions, on either target."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.compiler.assemble import draft
from autotune.compiler.kernel.nodes import Expr, Op, Select, Var
from autotune.compiler.planner.groups import group_configs
from autotune.compiler.schedules.cuda import scheme_of
from autotune.compiler.targets.cuda.compile import compile_ptx
from autotune.compiler.targets.cuda.printer import CudaPrinter
from autotune.compiler.targets.cuda.source import GroupKernels
from autotune.domains.fusion.bench import FusionBench
from autotune.domains.fusion.program_spec import workloads_of
from autotune.domains.fusion.task import FusionTask
from autotune.errors import BuildError
from autotune.ir.graph import Graph
from autotune.ir.nodes import asking
from autotune.workload import Workload
from tests.support.simulator.groups import check_group
from tests.support.zoo import ZOO, workloads

APPROXIMATE = re.compile(r"\.approx|\.ftz|div\.full|\bfma\.rn\.ftz")


APPROXIMATED = ("ex2", "rcp", "sqrt", "rsqrt", "erf_", "tanh_", "sigmoid_")
"""Names of intrinsics that strict kernels do without."""


def strict(work: Workload) -> Workload:
    """The same under strict precision."""
    return replace(work, spec={**work.spec, "precision": "strict"}, family="")


def everything(x: Tensor, w: Tensor) -> Tensor:
    """All operations that CUDA's fast math and autotune's approximations change, each once."""
    y = F.gelu(x) + torch.tanh(x) + torch.sigmoid(w) + torch.exp(-x.abs()) + torch.exp2(w) + x / (w.abs() + 1)
    y = y + torch.rsqrt(x.abs() + 1) + torch.sqrt(w.abs()) + torch.reciprocal(w.abs() + 2) + torch.log(x.abs() + 1.5)
    return torch.softmax(y, -1) + F.layer_norm(y, (y.shape[-1],))


def captured(fn: Callable[..., Tensor], *inputs: Tensor, precision: str | None = None) -> Workload:
    with asking(precision):
        ((work, _),) = workloads_of(fn, inputs)
    return work


def everything_in(precision: str | None) -> Workload:
    return captured(everything, torch.randn(12, 96), torch.randn(12, 96), precision=precision)


# ---- CUDA


X, Y = Var("x", "float32"), Var("y", "float32")


def of(name: str, *args: Expr) -> Op:
    return Op(name, args, "float32", "float32")


@pytest.mark.parametrize(
    ("x", "want"),
    [
        (of("exp", X - Y), "libdevice.expf((x - y))"),
        (of("exp2", X * Y), "libdevice.exp2f((x * y))"),
        (Select(Var("c", "bool"), of("reciprocal", of("exp", X)), Y), "sel(c, rcp_rn(libdevice.expf(x)), y)"),
        (of("rsqrt", of("sqrt", X)), "rsqrt_rn(sqrt_rn(x))"),
        (of("erf", of("tanh", of("sigmoid", X))), "libdevice.erff(libdevice.tanhf(sigmoid_rn(x)))"),
        (of("log", X) + of("maximum", X, Y), "math.log(x) + fmax(x, y)"),
    ],
)
def test_names_of_accurate_functions(x: Expr, want: str) -> None:
    assert CudaPrinter(strict=True).text(x) == want


def test_no_approximation_is_left_in_ptx() -> None:
    """The default kernels contain all of them, so the test is able to fail."""
    for precision, exact in ((None, False), ("strict", True)):
        work = everything_in(precision)
        task = FusionTask(work, "cuda:0", target="sm_90", sms=132)
        drafts, _ = draft(task.graph, task.plan, group_configs(task.plan, task.default()), 132)
        ptx = "".join(compile_ptx(d.source, "sm_90")[0] for d in drafts)
        found = set(APPROXIMATE.findall(ptx))
        if exact:
            code = re.findall(r"\b(\w+\.approx\S*|div\.full\S*)", ptx)
            # libdevice's own expf, erff and tanhf are made of ex2 and rcp of reduced arguments, and correct them.
            assert {c for c in code if not c.startswith(("ex2.approx", "rcp.approx"))} == set()
            assert "div.rn.f32" in ptx
            assert "sqrt.rn.f32" in ptx
            assert "div.approx" not in ptx
            assert {name.split(".")[0] for name in re.findall(r"\b\w[\w.]*\.ftz\b", ptx)} <= {"ex2", "rcp"}
        else:
            assert ".approx" in found
            assert "rsqrt.approx.ftz.f32" in ptx
            assert "div.rn.f32" not in ptx


@pytest.mark.parametrize("case", ZOO, ids=str)
def test_every_kernel_is_emitted_strictly_and_means_the_same(case) -> None:
    """The rewritten text of every function's default kernel runs, and none of the replaced names is left in it."""
    for work in workloads(case.name):
        task = FusionTask(strict(work), "cuda:0", target="sm_90", sms=3)
        drafts, _ = draft(task.graph, task.plan, group_configs(task.plan, task.default()), 3)
        for d in drafts:
            assert not d.source.fast
            assert not re.search(rf"(?<![\w.])(?:{'|'.join(APPROXIMATED)})\(", d.source.text)


@pytest.mark.parametrize("name", ["ln_f32", "softmax_mask", "cross_entropy_f32", "gelu", "outer_softmax"])
@pytest.mark.parametrize("online", [False, True])
def test_strict_text_against_the_oracle(name: str, online: bool) -> None:
    for work in workloads(name):
        task = FusionTask(strict(work), "cuda:0", target="sm_90", sms=3)
        config = task.default()
        for group, own in zip(task.plan.groups, group_configs(task.plan, config), strict=True):
            own = {**own, "online": online} if "online" in own else own
            scheme = scheme_of(group.graph)
            if scheme.reject(group.graph, own):
                continue
            made: GroupKernels = scheme.emit(group.graph, own, 3)
            made = replace(made, sources=tuple(replace(source, fast=False) for source in made.sources))
            check_group(group.graph, made, seed=1, special=online)


def test_a_strict_kernel_is_a_separate_cubin() -> None:
    built = [FusionTask(everything_in(p), "cuda:0", target="sm_90", sms=132) for p in (None, "strict")]
    try:
        one, other = (task.build(task.default()) for task in built)
    except BuildError as error:
        pytest.fail(str(error))
    assert {k.sha256 for k in one.kernels}.isdisjoint(k.sha256 for k in other.kernels)


# ---- CPU


def far(work: Workload, inputs: list[Tensor], want: Tensor) -> float:
    """The largest error of the default kernel, relative to fp64's results, in units in the last place."""
    task, bench = FusionTask(work, "cpu"), FusionBench(work, "cpu")
    run = bench.load(task.default(), task.build(task.default()))
    out = [torch.empty(task.graph.output_numel(0))]
    run.executor.run_into([t.reshape(-1) for t in inputs], out)  # type: ignore[attr-defined]
    got = out[0].double().view(want.shape)
    return float(((got - want).abs() / (want.abs() * 2.0**-23)).max())


def test_division_by_a_row_s_value_is_division() -> None:
    """By default x / y is x times 1 / y, two roundings; strictly it is one, so eager's very digits."""

    def scaled(x: Tensor) -> Tensor:
        return x / x.abs().amax(-1, keepdim=True)

    torch.manual_seed(0)
    x = torch.randn(64, 256)
    want = x.double() / x.double().abs().amax(-1, keepdim=True)
    fast, exact = (far(captured(scaled, x, precision=p), [x], want) for p in (None, "strict"))
    assert exact <= 0.5 + 1e-6 < fast


def test_gelu_s_derivative_near_zero() -> None:
    """erf(x) from exp(-x^2) is right to 4e-7 absolute; strictly it is right relative to its own size."""
    task = {p: FusionTask(_gelu_backward(p), "cpu") for p in (None, "strict")}
    from autotune.compiler.targets.cpu.schedule import shared_exponentials

    assert shared_exponentials(task[None].graph)
    assert not shared_exponentials(task["strict"].graph)


def _gelu_backward(precision: str | None) -> Workload:
    def backward(g: Tensor, x: Tensor) -> Tensor:
        return torch.ops.aten.gelu_backward(g, x)

    return captured(backward, torch.randn(64, 64), torch.randn(64, 64), precision=precision)


def test_strict_results_verify_on_a_cpu() -> None:
    for work in (everything_in("strict"), _gelu_backward("strict")):
        task, bench = FusionTask(work, "cpu"), FusionBench(work, "cpu")
        verdict = bench.verify(bench.load(task.default(), task.build(task.default())), 0)
        assert verdict.ok, verdict.detail


def test_groups_of_a_strict_region_are_strict() -> None:
    work = everything_in("strict")
    for side in ("cpu", "cuda:0"):
        task = FusionTask(work, side, target="sm_90", sms=132)
        assert {g.graph.precision for g in task.plan.groups} == {"strict"}
    assert Graph.from_json(work.spec).precision == "strict"
    with pytest.raises(ValueError, match="unknown precision"):
        Graph.from_json({**work.spec, "precision": "loose"})

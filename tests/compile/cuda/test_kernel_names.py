"""Names of kernels in profilers: they describe the computation, and are equal under every schedule."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.compiler.assemble import LONGEST, graph_ops, kernel_name, launch_names, program_ops
from autotune.compiler.lower.op_names import telling
from autotune.compiler.planner.plan import make_plan
from autotune.compiler.targets.cuda.compile import build, resources
from autotune.compiler.targets.cuda.source import Listing
from autotune.device import DeviceIdentity, Environment
from autotune.domains.fusion.task import FusionTask
from autotune.ir.graph import Graph, Output, Value
from autotune.measure.child import artifact_from_wire, artifact_to_wire
from autotune.runtime.launch import cuda as cuda_launch
from autotune.store import Key, Schedule, Store
from autotune.store.codec import artifact_blobs, artifact_from, artifact_id, artifact_json
from autotune.store.snapshot_writer import export_snapshot
from autotune.task import Artifact, Kernel
from autotune.workload import Workload
from tests.support.snapshots import import_file
from tests.support.zoo import Case, T, momentum, random_configs, workload, workloads_of


def task_of(work: Workload) -> FusionTask:
    return FusionTask(work, "cuda:0", target="sm_90", sms=132)


def names(work: Workload, plan: str = "") -> list[str]:
    task = task_of(work)
    return launch_names(make_plan(task.graph, "cuda", plan) if plan else task.plan, work.source)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("gru_step", ["autotune_addmm_sigmoid_rsub_tanh"]),
        ("lstm_steps", ["autotune_bmm_sigmoid_tanh"]),
        ("gated_vector", ["autotune_mm_silu"]),
        ("vector_residual_rms", ["autotune_mv_sum", "autotune_rsqrt"]),
        ("classify", ["autotune_addmm_log_softmax"]),
        ("bgrl_bf16", ["autotune_gelu_layer_norm"]),
        ("swiglu_rms", ["autotune_silu_pow_mean_rsqrt"]),
        ("embeddings_ln_dropout", ["autotune_embedding_layer_norm_dropout"]),
        ("layer_norm_backward", ["autotune_mean_pow_rsqrt_sum"]),
        ("unrelated", ["autotune_softmax_gelu_sum_tanh"]),
        ("transposed", ["autotune_add"]),
        ("int8", ["autotune_sub_mul"]),
    ],
)
def test_a_kernel_is_named_after_the_program_s_operators(case: str, expected: list[str]) -> None:
    assert names(workload(case)) == expected


@pytest.mark.parametrize(
    ("ops", "names"),
    [
        # As torch 2.13 has it, where a common subexpression is the forward operator's, and as 2.14 does.
        (["native_layer_norm_backward", "mul", "native_layer_norm"], ["layer_norm_backward"]),
        (["native_layer_norm", "native_layer_norm_backward"], ["layer_norm_backward"]),
        (["_softmax", "gelu", "_softmax_backward_data"], ["softmax_backward_data", "gelu"]),
        (["nll_loss_forward", "nll_loss_backward"], ["nll_loss_backward"]),
        (
            ["_native_batch_norm_legit_functional", "relu", "native_batch_norm_backward"],
            ["batch_norm_backward", "relu"],
        ),
        (["_native_batch_norm_legit_no_training", "relu"], ["batch_norm_legit_no_training", "relu"]),
        (["native_layer_norm", "gelu_backward"], ["layer_norm", "gelu_backward"]),
    ],
)
def test_an_operator_is_part_of_its_own_backward_operator(ops: list[str], names: list[str]) -> None:
    assert telling(ops) == names


def test_a_group_without_a_program_is_named_after_its_graph() -> None:
    assert names(replace(workload("gru_step"), source={})) == ["autotune_mm_sigmoid_tanh"]
    assert names(replace(workload("softmax_mask"), source={})) == ["autotune_max_exp_sum"]
    assert names(replace(workload("scalars"), source={})) == ["autotune_mul_cast_add"]
    copy = Graph(
        (4,), (Value("load", axes=(0,), slot=0, strides=(2,)),), ("float32",), (Output(0, (0,), (1,), "int8"),)
    )
    assert kernel_name(graph_ops(copy)) == "autotune_copy"


def test_a_weighted_mean_is_a_product_only_where_the_program_has_some() -> None:
    graph = task_of(workload("dequantized_vector")).graph
    assert graph_ops(graph) == ["sum"]
    assert graph_ops(graph, vectors=True) == ["mv"]
    assert "mv" not in graph_ops(task_of(workload("ln_f32")).graph, vectors=True)


def test_launches_are_distinguished() -> None:
    apart = names(workload("relu_statistics"), "r4,o0 / r8,o1 / r10,o2 / r13,o3")
    assert apart == ["autotune_sum", "autotune_sum_2", "autotune_max", "autotune_exp_sum"]


@pytest.mark.usefixtures("compiled_anew")
def test_equal_kernels_have_one_name_and_are_one_cubin() -> None:
    (work,) = workloads_of(Case("twins", momentum, tuple(T(n) for n in (1001, 1001, 4004) for _ in range(3))))
    task = task_of(work)
    plan = make_plan(task.graph, "cuda", "o0,o1 / o2,o3 / o4,o5")
    artifact = task.build(task.joined(plan, [on.default(g.graph) for on, g in task.sides(plan)]))
    assert [k.entry for k in artifact.kernels] == ["autotune_sqrt"] * 3
    assert len(artifact_blobs(artifact)) == 1


def test_finish_kernel_is_named_after_its_main_kernel() -> None:
    task = task_of(workload("layer_norm_backward"))
    artifact = task.build(task.default())
    assert [k.entry for k in artifact.kernels] == [
        "autotune_mean_pow_rsqrt_sum",
        "autotune_mean_pow_rsqrt_sum_finish",
    ]
    for kernel in artifact.kernels:
        assert resources(kernel.code, kernel.entry)["registers"] == kernel.resources["registers"]
        assert b"autotune_kernel" not in kernel.code


def test_the_schedule_plays_no_part() -> None:
    task = task_of(workload("ln_f32"))
    built = [task.build(c) for c in [task.default(), *random_configs(task, 3, seed=1), task.default()]]
    assert {k.entry for a in built for k in a.kernels} == {"autotune_layer_norm"}
    assert built[0] == built[-1]
    assert len({k.sha256 for a in built for k in a.kernels}) > 1


@pytest.mark.parametrize(
    ("ops", "name"),
    [
        (["relu", "mean", "relu"], "autotune_relu_mean"),
        (["_softmax", "my op::x-y.ü"], "autotune_softmax_my_op_x_y"),
        (["2d"], "autotune_2d"),
        (["for"], "autotune_for"),
        (["", "..."], "autotune_kernel"),
        ([], "autotune_kernel"),
        (["a" * 100], "autotune_" + "a" * 39),
        (["a" * 38 + "_b"], "autotune_" + "a" * 38),
        (["x" * 20, "y" * 17, "z"], f"autotune_{'x' * 20}_{'y' * 17}"),
        (["x" * 20, "y" * 17, "addmm"], f"autotune_{'x' * 20}_addmm"),
        (["x" * 39, "mm", "mv"], "autotune_mm_mv"),
    ],
)
def test_names_are_short_identifiers(ops: list[str], name: str) -> None:
    made = kernel_name(ops)
    assert made == name
    assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", made)
    assert len(f"{made}_99_finish99") <= LONGEST


def test_kernel_names_use_the_known_operators_of_a_foreign_program() -> None:
    calls = [{"op": "getitem"}, {"op": "aten.view.default"}, {"op": "aten.add.Tensor"}, {"op": "prims.erf_inv.default"}]
    assert program_ops({"calls": calls}) == ["erf_inv"]
    assert program_ops({"calls": calls[:3]}) == ["add"]
    assert program_ops({}) == program_ops({"calls": []}) == []


def test_compiling_needs_no_torch_for_a_name() -> None:
    modules = "autotune.compiler.assemble"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=550).returncode == 0


def stored_earlier() -> Artifact:
    """An artifact in the database of a search before kernels had separate names."""
    body = ("if cuda.threadIdx.x == 0:", "    st_f32_1_d(p0, 0, ld_f32_1_d(p0, 0) + float32(1.0))")
    launch = {"dynamic": False, "shared": 0, "block": 32, "args": [["input", 0]]}
    kernel = build(Listing((), body, ("f32",), launch, 32, 0))
    return Artifact("sm_90", (kernel,), generator="cuda-4")


def test_artifacts_of_earlier_versions_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = stored_earlier()
    data = artifact_json(artifact)
    assert data["kernels"][0]["entry"] == "autotune_kernel"
    assert artifact_from(artifact_id(data), data, artifact_blobs(artifact)) == artifact
    assert artifact_from_wire(*artifact_to_wire(artifact)) == artifact

    work = workload("gelu")
    device = DeviceIdentity("cuda", "NVIDIA Test", 132, 143360, "9.0")
    place = Environment("cuda", torch="2.11.0", numba="0.68.1", numba_cuda="0.30.4", cuda="13.0", driver="580.1")
    key = Key(work.fingerprint, device.fingerprint, place.strict, "p")
    with (
        Store.open(f"sqlite:///{tmp_path / 'from.db'}") as there,
        Store.open(f"sqlite:///{tmp_path / 'to.db'}") as here,
    ):
        there.put_workload(work)
        there.put_device(device)
        there.put_environment(place)
        there.put_schedule(Schedule(key, {"a": 1}, 5.0, {}, artifact))
        export_snapshot(there, tmp_path / "s.atdb")
        import_file(here, tmp_path / "s.atdb")
        found = here.get_schedule(work.fingerprint, device.fingerprint)
    assert found is not None
    assert found.artifact == artifact

    asked: list[bytes] = []
    monkeypatch.setattr(cuda_launch, "driver", lambda: driver(asked))
    monkeypatch.setattr(cuda_launch, "_primary_context", lambda device: 1)
    monkeypatch.setattr(cuda_launch, "_functions", {})
    monkeypatch.setattr(cuda_launch, "_libraries", {})
    for kernel in (*found.artifact.kernels, Kernel("autotune_gelu", b"of another")):
        assert cuda_launch.load_function(kernel, 0) == 42
    assert asked == [b"autotune_kernel", b"autotune_gelu"]


def driver(asked: list[bytes]) -> SimpleNamespace:
    """A CUDA driver that finds every function, and keeps their names."""

    def find(function: object, module: object, name: bytes) -> int:
        asked.append(name)
        function._obj.value = 42  # type: ignore[attr-defined]
        return 0

    def fine(*_: object) -> int:
        return 0

    return SimpleNamespace(
        cuCtxGetCurrent=fine, cuCtxSetCurrent=fine, cuModuleLoadData=fine, cuModuleGetFunction=find, cuFuncLoad=fine
    )

"""The example of a third target: kernels of the zoo in Triton's interpreter against the oracle, and as cubins."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.compiler.planner.plan import make_plan
from autotune.errors import Unsupported
from autotune.ir.graph import Graph
from examples.triton_target.kernel import Emitter
from tests.support.zoo import ZOO, workloads

ROOT = Path(__file__).resolve().parents[3]
CASES = [
    "ln_f32", "ln_bf16", "ln_17", "ln_1001_bf16", "rms_bf16", "softmax_mask", "softmax_odd", "swiglu_rms", "gelu",
    "gelu_13", "rope", "transposed_types", "cross_entropy_f32", "embedding_ln", "dropout_residual_ln", "quantize",
    "minmax_prod", "outer_softmax_bf16", "flipped", "momentum",
]  # fmt: skip
LINKED = ["ln_bf16", "softmax_odd", "rope", "embedding_ln", "dropout_residual_ln", "minmax_prod", "transposed_types"]
REFUSED = {"library_functions", "every_function", "vector_residual_rms", "mean_cross_entropy", "relu_statistics"}
REFUSED |= {"layer_norm_backward", "tile_norm_softmax"}

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def child(mode: str, names: list[str]) -> list[list[str]]:
    """The output of ``tests.support.triton_checks``: case, rows, block, error."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    env |= {"TRITON_INTERPRET": "0" if mode == "cubin" else "1"}
    words = [sys.executable, "-m", "tests.support.triton_checks", mode, *names]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env, cwd=ROOT, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_triton
@pytest.mark.timeout(900)  # 40 s of one core
def test_kernels_of_the_zoo_agree_with_the_oracle() -> None:
    found = child("run", CASES)
    assert [f for f in found if f[3]] == []
    assert {f[0] for f in found} == {*CASES}
    assert len(found) == 2 * len(CASES)


@needs_triton
def test_a_kernel_that_is_wrong_is_found() -> None:
    assert all(f[3] for f in child("wrong", ["ln_17", "softmax_odd"]))


@needs_triton
def test_kernels_compile_to_cubins_without_a_gpu() -> None:
    found = child("cubin", LINKED)
    assert [f for f in found if f[3]] == []
    assert {f[0] for f in found} == {*LINKED}


def test_which_groups_it_takes() -> None:
    """Printing takes no Triton: all groups of the zoo but those with columns, library functions or 8-bit floats."""
    refused = set()
    for case in ZOO:
        for workload in workloads(case.name):
            graph = Graph.from_json(workload.spec)
            try:
                made = [Emitter(g.graph, 2, 512).source() for g in make_plan(graph, "cpu").groups]
                assert all(text.count("def kernel(") == 1 and programs > 0 for text, programs in made)
            except Unsupported:
                refused.add(case.name)
    assert {name for name in refused if not name.startswith("float8")} == REFUSED


def test_on_a_cpu_it_asks_for_the_interpreter(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "AUTOTUNE_DOMAINS": "triton=examples.triton_target.domain"}
    env.pop("TRITON_INTERPRET", None)
    words = [sys.executable, "-m", "autotune", "search", "triton", "layer_norm", "--device", "cpu", "--trials", "1"]
    words += ["--db", str(tmp_path / "x.db")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env, timeout=550)
    assert done.returncode == 2, done.stderr
    assert "set TRITON_INTERPRET=1" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr

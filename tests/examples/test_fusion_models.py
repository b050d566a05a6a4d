"""The benchmark of whole models, but for what takes a GPU and minutes."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from autotune import device
from autotune.fusion.kernel_names import kernel_name
from autotune.fusion.op_names import PRODUCTS
from benchmarks import form, fusion_models
from benchmarks.kernel_names import has_product, is_library
from examples.models import make


@pytest.mark.parametrize(
    "name",
    [
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8>(Params)",
        "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize64x64x32_cublas",
        "void splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)",
        "triton_tem_fused_addmm_gelu_3",
        "void cudnn::engines_precompiled::nchwToNhwcKernel<__half, __half, float, false, true>",
        "void implicit_convolve_sgemm<float, float, 128, 5, 5, 3, 3, 3, 1>",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
    ],
)
def test_library_kernels(name: str) -> None:
    assert is_library(name)


@pytest.mark.parametrize(
    "name",
    [
        "triton_poi_fused_convolution_relu_0",
        "triton_per_fused_addmm_native_layer_norm_2",
        "triton_red_fused__scaled_dot_product_efficient_attention_sum_5",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>",
        "void cudnn::bn_fw_inf_1C11_kernel_NCHW<float, float, true, 1>",
        "void cub::DeviceRadixSortSingleTileKernel<Policy600>",
        "kernel_3f1c",
        "autotune_kernel",
        "autotune_addmm_sigmoid_tanh_rsub",
        "autotune_flash_conv_gemm_finish",
    ],
)
def test_kernels_of_memory_intensive_operators(name: str) -> None:
    assert not is_library(name)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("autotune_addmm_sigmoid_tanh_rsub", True),
        ("autotune_silu_mm_2", True),
        ("autotune_mv_finish", True),
        ("autotune_layer_norm", False),
        ("autotune_kernel", False),
        ("autotune_commute_summv", False),
        ("triton_tem_fused_mm_0", False),
        ("nvjet_tst_mm", False),
    ],
)
def test_our_kernels_with_products(name: str, found: bool) -> None:
    assert has_product(name) == found


def test_products_are_called_as_they_are_in_regions() -> None:
    assert all(has_product(kernel_name([op])) for op in PRODUCTS)


def case(name: str, best: float, ours: float, kernels: tuple[int, int] | None = None) -> dict[str, object]:
    counted = None
    if kernels:
        both = zip(("inductor", "autotune"), kernels, strict=True)
        counted = {who: {"memory_intensive": n, "library": 2 * n} for who, n in both}
    times = {"eager_us": 900.0, "inductor_best_us": best, "autotune_us": ours}
    return {"name": name, **times, "kernels": counted, "counters": {"hits": 3}, "regions": 4}


def test_table_tells_means_and_kernels() -> None:
    text = fusion_models.table([case("a", 400.0, 200.0, (10, 4)), case("b", 100.0, 200.0, (6, 3))])
    assert "2.000x" in text
    assert "geometric mean 1.000x; slowest b 0.500x" in text
    assert "10+20 -> 4+8" in text
    assert "7 of Inductor's 16; with those of libraries 21 of 48" in text
    assert "-" in fusion_models.table([case("a", 400.0, 200.0)])


def test_depths_reach_the_search_and_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXAMPLE_LAYERS", "7")  # of the caller's shell, and not meant here
    args = fusion_models.parse(["--device", "cpu", "--steps", "2", "--db", "m.db"])
    assert fusion_models.depth(args) == {"steps": 2}
    found = fusion_models.environment(args)
    assert found["EXAMPLE_STEPS"] == "2"
    assert "EXAMPLE_LAYERS" not in found


def test_a_step_of_training_is_the_loss_and_all_gradients() -> None:
    one = make("llama_train", "cpu", "cpu")
    loss, grads = fusion_models.step_of(one.module, one)()  # type: ignore[misc]
    wanted = sum(p.requires_grad for p in one.module.parameters()) + 1  # and the block's input
    assert len(grads) == wanted
    assert not loss.requires_grad
    assert fusion_models.difference((loss,), (loss,)) == 0.0
    assert fusion_models.difference((loss * 1.5,), (loss,)) == pytest.approx(0.5)
    assert fusion_models.largest((torch.tensor([-3.0, 2.0]),)) == 3.0


def test_regions_and_what_is_outside() -> None:
    found = fusion_models.regions_of(make("llama_infer", "cpu", "cpu"))
    assert found["regions"] >= found["different_regions"] > 0
    assert found["bytes"] > 0
    assert found["outside"]["mm"] == 6


def test_what_takes_too_long_is_stopped() -> None:
    args = fusion_models.parse(["--device", "cpu"])
    args.db = "unused"
    begin = time.monotonic()
    code, _ = fusion_models.run([sys.executable, "-c", "import time; time.sleep(60)"], args, 1.0)
    assert code == 124
    assert time.monotonic() - begin < 30
    assert fusion_models.run([sys.executable, "-c", "print(7)"], args, 30.0) == (0, "7\n")


def test_unknown_models_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        fusion_models.parse(["--models", "bert_train,gpt"])
    assert stop.value.code == 2
    assert "unknown models gpt" in capsys.readouterr().err


def test_models_side_by_side(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    searching: list[str] = []
    together = threading.Barrier(2)  # broken, and so a model left out, if one is measured after the other

    def search(name: str, args: argparse.Namespace, limit: float) -> dict[str, object]:
        assert not searching, "half as many as jobs"
        searching.append(name)
        time.sleep(0.01)
        searching.remove(name)
        return {"search_s": 1.0, "search_code": 0}

    def measured(
        name: str, args: argparse.Namespace, searched: dict[str, object], end: float
    ) -> dict[str, object] | None:
        if name == "dien_train":
            return None
        together.wait(timeout=30)
        return {**case(name, 300.0, 200.0), "name": name}

    monkeypatch.setattr(device, "identify", lambda name: SimpleNamespace(label="a GPU"))
    monkeypatch.setattr(device, "environment", lambda name: SimpleNamespace(cuda="13.0", driver=None))
    monkeypatch.setattr(fusion_models, "search", search)
    monkeypatch.setattr(fusion_models, "measured", measured)
    written: list[list[str]] = []
    monkeypatch.setattr(form, "write", lambda out, label, cases, versions: written.append([c["name"] for c in cases]))
    names = "bert_train,bert_infer,dien_train,llama_train,llama_infer"
    out = str(tmp_path / "m.json")
    assert fusion_models.main(["--models", names, "--jobs", "2", "--db", "m.db", "--out", out]) == 1
    assert sorted(written[-1]) == sorted(set(names.split(",")) - {"dien_train"})
    assert [len(w) for w in written] == [1, 2, 3, 4]
    assert "geometric mean 1.500x" in capsys.readouterr().out


@pytest.mark.parametrize("text", [["--jobs", "0"], ["--jobs", "2", "--device", "cpu"]])
def test_jobs_that_make_no_sense(text: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fusion_models.parse(text)
    assert "--jobs" in capsys.readouterr().err


def test_kernels_are_counted_and_summed_by_name() -> None:
    spans = [(0.0, 2.0, "triton_poi_fused_add_0"), (2.5, 5.0, "nvjet_tst_128x64"), (5.0, 6.5, "autotune_kernel"),
             (7.0, 9.0, "triton_poi_fused_add_0"), (9.0, 13.0, "triton_tem_fused_addmm_1")]  # fmt: skip
    found = fusion_models.summed(spans, is_library)
    assert (found["memory_intensive"], found["library"]) == (3, 2)
    assert (found["memory_intensive_us"], found["library_us"]) == (5.5, 6.5)
    assert found["names"] == {"triton_poi_fused_add_0": 2, "autotune_kernel": 1}
    assert found["names_us"] == {"triton_poi_fused_add_0": 4.0, "autotune_kernel": 1.5}

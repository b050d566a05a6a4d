"""Which kernels of a step are a library's, by their names."""

from __future__ import annotations

import pytest

from autotune.bench.kernels import is_library


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

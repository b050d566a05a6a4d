"""Torch's settings of precision, determinism and threads: read, restored, and their effect on a device's kernels."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

from autotune import numerics
from autotune.device import one_each_core

pytestmark = pytest.mark.usefixtures("default_numerics")

MATMUL = torch.backends.cuda.matmul


def older() -> None:
    torch.set_float32_matmul_precision("high")


def flag() -> None:
    MATMUL.allow_tf32 = True


def newer() -> None:
    MATMUL.fp32_precision = "tf32"


def newer_for_all() -> None:
    torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]


def newer_without() -> None:
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]


def both_ways() -> None:
    torch.set_float32_matmul_precision("high")
    MATMUL.fp32_precision = "ieee"


def back_and_forth() -> None:
    MATMUL.fp32_precision = "tf32"
    torch.set_float32_matmul_precision("highest")


def cudnn_without() -> None:
    torch.backends.cudnn.allow_tf32 = False


def reductions() -> None:
    MATMUL.allow_bf16_reduced_precision_reduction = False
    MATMUL.allow_fp16_reduced_precision_reduction = (False, False)  # type: ignore[assignment]
    MATMUL.allow_fp16_accumulation = True


def deterministic() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.mkldnn.deterministic = True  # type: ignore[assignment]
    torch.utils.deterministic.fill_uninitialized_memory = False


def searching() -> None:
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)


def fewer_threads() -> None:
    torch.set_num_threads(1)


TF32 = {"cuda.matmul.fp32_precision": "tf32"}
NO_CUDNN = {"cudnn.conv.fp32_precision": "ieee", "cudnn.rnn.fp32_precision": "ieee"}
CASES = [
    (older, TF32, {"mkldnn.matmul.fp32_precision": "tf32"}),
    (flag, TF32, {}),
    (newer, TF32, {}),
    (newer_for_all, TF32, {f"mkldnn.{name}.fp32_precision": "tf32" for name in ("matmul", "conv", "rnn")}),
    (newer_without, {"cudnn.conv.fp32_precision": "ieee"}, {}),
    (both_ways, {}, {"mkldnn.matmul.fp32_precision": "tf32"}),
    (back_and_forth, {}, {}),
    (cudnn_without, NO_CUDNN, {}),
    (
        reductions,
        {
            "cuda.matmul.allow_bf16_reduced_precision_reduction": False,
            "cuda.matmul.allow_fp16_reduced_precision_reduction": [False, False],
            "cuda.matmul.allow_fp16_accumulation": True,
        },
        {},
    ),
    (
        deterministic,
        {
            "cudnn.deterministic": True,
            "deterministic_debug_mode": 1,
            "deterministic.fill_uninitialized_memory": False,
        },
        {
            "mkldnn.deterministic": True,
            "deterministic_debug_mode": 1,
            "deterministic.fill_uninitialized_memory": False,
        },
    ),
    (
        searching,
        {"cudnn.benchmark": True, "flash_sdp": False, "allow_fp16_bf16_reduction_math_sdp": True},
        {"flash_sdp": False, "allow_fp16_bf16_reduction_math_sdp": True},
    ),
    (fewer_threads, {}, {"num_threads": 1} if len(one_each_core()) > 1 else {}),
]


@pytest.mark.parametrize(("change", "on_gpu", "on_cpu"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_settings_are_read_by_their_effect_and_restored(
    change: object, on_gpu: dict[str, object], on_cpu: dict[str, object]
) -> None:
    assert numerics.read() == {}
    assert callable(change)
    change()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a deployment reads them, without a warning to its user
        assert (numerics.read(["cuda:1"]), numerics.read(["cpu"])) == (on_gpu, on_cpu)
    found = numerics.read()
    numerics.restore({})
    assert numerics.read() == {}
    numerics.restore(found)
    assert (numerics.read(["cuda:0"]), numerics.read(["cpu"])) == (on_gpu, on_cpu)
    numerics.restore(found)
    assert numerics.read(["cuda:0", "cpu"]) == {**on_gpu, **on_cpu}


def test_a_program_of_the_older_way_may_still_read_it_where_its_settings_are_restored() -> None:
    older()
    found = numerics.read()
    numerics.restore({})
    numerics.restore(found)
    assert torch.get_float32_matmul_precision() == "high"
    assert MATMUL.allow_tf32 is True


@pytest.mark.parametrize("change", [newer, newer_for_all, both_ways])
@pytest.mark.parametrize(("name", "on_gpu"), [("highest", {}), ("high", TF32), ("medium", TF32)])
def test_the_precision_of_products_replaces_any_earlier_one(
    change: object, name: str, on_gpu: dict[str, object]
) -> None:
    assert callable(change)
    change()
    numerics.set_matmul(None)
    assert numerics.read() != {}, "None leaves it"
    numerics.set_matmul(name)
    assert numerics.read(["cuda:0"]) == on_gpu


def test_without_torch_nothing_is_read_or_imported() -> None:
    code = "from autotune import numerics as n; n.restore({}); import sys; print(n.read(), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "{} False\n"

"""Inductor's options that ask for certain results, which stored kernels do not compute.

While such an option is set, regions stay with Inductor, and neither graphs nor attention are rewritten. All other
options of Inductor's are obeyed inside of regions or have no effect on values there. A test has the whole list, and
fails where a new torch has an option that is not on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.ir.precision import STRICT

_MISSING = object()


@dataclass(frozen=True)
class Request:
    """The results that one option asks for.

    Attributes:
        results: the end of the sentence "the option asks for ...".
        default: the value under which it asks for nothing.
        device: the only type of device that it is about; "" for all.
        strict: kernels of strict precision compute these results.
    """

    results: str
    default: Any = False
    device: str = ""
    strict: bool = False


REQUESTS = {
    "emulate_precision_casts": Request("values that are rounded to 16 bits after each operator"),
    "numerics": Request("eager mode's results bit by bit", default="default"),
    "batch_invariant": Request("results of a sample that do not depend on the batch"),
    "fallback_by_default": Request("eager mode's own kernels"),
    "strict_signed_zero": Request("maxima and minima that order zeros by sign", device="cuda"),
    "eager_numerics.division_rounding": Request("correctly rounded quotients", device="cuda", strict=True),
    "eager_numerics.disable_ftz": Request("denormal numbers that are kept", device="cuda", strict=True),
    "eager_numerics.use_pytorch_libdevice": Request("the functions of the CUDA toolkit's library", device="cuda"),
    "triton.codegen_upcast_to_fp32": Request("arithmetic in 16 bits", default=True, device="cuda"),
    "triton.inject_relu_bug_TESTING_ONLY": Request("a wrong relu", default=None, device="cuda"),
    "cpp.inject_relu_bug_TESTING_ONLY": Request("a wrong relu", default=None, device="cpu"),
    "cpp.inject_log1p_bug_TESTING_ONLY": Request("a wrong log1p", default=None, device="cpu"),
}
"""By option, some of which older or newer versions of torch do not have."""


def requests(device: str = "", precision: str = "") -> tuple[str, ...]:
    """The requests that are set now: "emulate_precision_casts asks for values that ...", one for each option.

    Args:
        device: a device whose type they must be about; "" for any.
        precision: of the kernels in question.
    """
    from torch._inductor import config

    kind = device.partition(":")[0]
    return tuple(
        f"{name} asks for {request.results}"
        for name, request in REQUESTS.items()
        if _value(config, name) not in (_MISSING, request.default)
        and (not kind or request.device in ("", kind))
        and not (request.strict and precision == STRICT)
    )


def _value(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part, _MISSING)
    return config


__all__ = ["REQUESTS", "Request", "requests"]

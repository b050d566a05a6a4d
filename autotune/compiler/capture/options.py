"""Inductor options that require certain results, which stored kernels do not compute.

While such an option is set, Inductor compiles the regions, and autotune rewrites neither graphs nor attention. A test
classifies all other Inductor options, and fails if a new torch has an unlisted option.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.ir.nodes import STRICT

_MISSING = object()


@dataclass(frozen=True)
class Requirement:
    """The results that one option requires.

    Attributes:
        results: the end of the sentence "the option requires ...".
        default: the value that requires nothing.
        device: the only type of device that it affects; "" for all.
        strict: True if kernels of strict precision compute these results.
    """

    results: str
    default: Any = False
    device: str = ""
    strict: bool = False


REQUIREMENTS = {
    "emulate_precision_casts": Requirement("values that are rounded to 16 bits after each operator"),
    "numerics": Requirement("eager mode's results bit by bit", default="default"),
    "batch_invariant": Requirement("results of a sample that do not depend on the batch"),
    "fallback_by_default": Requirement("eager mode's own kernels"),
    "strict_signed_zero": Requirement("maxima and minima that order zeros by sign", device="cuda"),
    "eager_numerics.division_rounding": Requirement("correctly rounded quotients", device="cuda", strict=True),
    "eager_numerics.disable_ftz": Requirement("denormal numbers that are kept", device="cuda", strict=True),
    "eager_numerics.use_pytorch_libdevice": Requirement("the functions of the CUDA toolkit's library", device="cuda"),
    "triton.codegen_upcast_to_fp32": Requirement("arithmetic in 16 bits", default=True, device="cuda"),
    "triton.inject_relu_bug_TESTING_ONLY": Requirement("a wrong relu", default=None, device="cuda"),
    "cpp.inject_relu_bug_TESTING_ONLY": Requirement("a wrong relu", default=None, device="cpu"),
    "cpp.inject_log1p_bug_TESTING_ONLY": Requirement("a wrong log1p", default=None, device="cpu"),
}
"""The requirement of each option; older or newer versions of torch lack some of them."""


def requirements(device: str = "", precision: str = "") -> tuple[str, ...]:
    """The current requirements: "emulate_precision_casts requires values that ...", one for each option.

    Args:
        device: a device whose type the requirements must affect; "" for any.
        precision: the precision of the kernels.
    """
    from torch._inductor import config

    kind = device.partition(":")[0]
    return tuple(
        f"{name} requires {requirement.results}"
        for name, requirement in REQUIREMENTS.items()
        if _value(config, name) not in (_MISSING, requirement.default)
        and (not kind or requirement.device in ("", kind))
        and not (requirement.strict and precision == STRICT)
    )


def _value(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part, _MISSING)
    return config

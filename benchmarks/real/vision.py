"""Stand-in for torchvision under a torch that its compiled operators do not fit.

PyPI's torchvision needs CUDA's libraries, which a CPU build of torch does not have. The import of torchvision, and with
it of timm and transformers, then ends with ``operator torchvision::nms does not exist``. No model of the benchmark
calls these operators.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

_OPERATORS = ("nms", "qnms")
"""Operators that the import of torchvision describes to torch.compile, whether they were loaded or not."""


@cache
def declare_operators() -> torch.library.Library | None:
    """Declare torchvision's operators if their library does not load here.

    Returns:
        The declarations, which hold as long as they are kept; None where torchvision has its own or is not installed.
    """
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    try:
        torch.ops.load_library(Path(spec.origin).with_name("_C.so"))
    except OSError:
        declared = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for name in _OPERATORS:
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return declared
    return None

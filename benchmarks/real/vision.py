"""A substitute for torchvision's operators under a torch that they do not fit.

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

_LIBRARIES = ("_C_stable.so", "_C.so")
"""torchvision's operators, from 0.29.2 on and before. A second declaration of one ends the process."""


@cache
def declare_operators() -> torch.library.Library | None:
    """Declare torchvision's operators if their library does not load here.

    Returns:
        The declarations, which hold as long as they are kept; None where torchvision has its own or is not installed.
    """
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    compiled = (Path(spec.origin).with_name(name) for name in _LIBRARIES)
    try:
        torch.ops.load_library(next(path for path in compiled if path.exists()))
    except (OSError, StopIteration):
        declared = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for name in _OPERATORS:
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return declared
    return None

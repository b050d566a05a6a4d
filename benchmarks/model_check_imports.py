"""What each process of :mod:`benchmarks.model_check` begins with: imports that take seconds and are not measured."""

from __future__ import annotations

import contextlib

import torch
import torch._dynamo
import torch._inductor.compile_fx

with contextlib.suppress(ImportError):
    import transformers.models  # noqa: F401
    from transformers.utils import logging

    logging.set_verbosity_error()

with contextlib.suppress(RuntimeError):
    # timm imports torchvision, whose library of operators does not load beside every build of torch.
    _operators = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
with contextlib.suppress(ImportError):
    import timm  # noqa: F401

import benchmarks.real.check  # noqa: F401

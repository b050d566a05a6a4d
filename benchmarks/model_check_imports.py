"""Imports at the start of each process of :mod:`benchmarks.model_check`, which take seconds and are not measured."""

from __future__ import annotations

import contextlib

import torch._dynamo
import torch._inductor.compile_fx  # noqa: F401

from benchmarks.real.vision import declare_operators

declare_operators()
with contextlib.suppress(ImportError):
    import transformers.models  # noqa: F401
    from transformers.utils import logging

    logging.set_verbosity_error()

with contextlib.suppress(ImportError):
    import timm  # noqa: F401

import benchmarks.real.check  # noqa: E402, F401

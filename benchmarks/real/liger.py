"""A model with Liger Kernel, compared with the same model without it.

Liger replaces methods of a model's modules, and functions in the Python module that the model is from. The former are
replaced in a copy that shares the weights; the latter are replaced only while the copy runs, so that the model itself
stays as it was.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autotune.errors import first_line

MISSING = object()
LOSS = "liger_fused_linear_cross_entropy"


class NoLiger(Exception):
    """Liger Kernel is not installed, or lacks the model; the message has the reason."""


def compiled(module: nn.Module) -> Callable[..., Any]:
    """``module``, whose attribute ``model`` is of transformers, with Liger's kernels and compiled; the same weights.

    Raises:
        NoLiger: it is not installed, or does not have the model.
    """
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise NoLiger(f"liger-kernel cannot be imported: {first_line(error)}") from None
    model: Any = getattr(module, "model", None)
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise NoLiger("Liger Kernel does not have this model")
    twin = sharing(module)
    names = vars(sys.modules[type(model).__module__])
    before = dict(names)
    _apply_liger_kernel_to_instance(model=twin.model)
    changed = {name: value for name, value in names.items() if before.get(name, MISSING) is not value}
    swap(names, {name: before.get(name, MISSING) for name in changed})
    keep_the_loss_out()
    run = torch.compile(twin, dynamic=False)

    def call(*args: Any, **kwargs: Any) -> Any:
        there = swap(names, changed)
        try:
            return run(*args, **kwargs)
        finally:
            swap(names, there)

    return call


def keep_the_loss_out() -> None:
    """Have Dynamo call Liger's fused loss instead of tracing it, as trainers that use Liger do.

    Traced by torch 2.11, the loss of Liger 0.8.5 reads memory that nothing wrote ("Models of other libraries" in
    ``docs/explanation/benchmarks.md``).
    """
    with contextlib.suppress(ImportError):
        from liger_kernel.transformers import functional

        if (loss := getattr(functional, LOSS, None)) is not None:
            setattr(functional, LOSS, torch.compiler.disable(loss))


def sharing(module: nn.Module) -> Any:
    """A copy of a module with the very parameters and buffers of it."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(t): t for t in tensors})


def swap(names: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Set the names of ``other`` in ``names``; return their earlier values, :data:`MISSING` for none."""
    before = {name: names.get(name, MISSING) for name in other}
    for name, value in other.items():
        if value is MISSING:
            names.pop(name, None)
        else:
            names[name] = value
    return before

"""XLA through JAX: a case's twin compiled for the device, on the very tensors that PyTorch reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.dlpack import from_dlpack

from autotune.errors import first_line
from benchmarks.fusion.agree import disagreement
from benchmarks.fusion.cases.case import Arguments, Case

if TYPE_CHECKING:
    from benchmarks.fusion.peers import Call


class NoXla(Exception):
    """XLA cannot be measured on a case; the message has the reason."""


def xla(case: Case, args: Arguments) -> Call:
    """The twin of ``case``, compiled ahead of time; calling it returns when its kernels have run.

    Integers become 32 bits wide, as JAX has them.

    Args:
        args: tensors on the device; no copies are made of floats.

    Raises:
        NoXla: JAX is not there, does not see the device, or its twin computes something else.
    """
    try:
        import jax

        from benchmarks.fusion.cases import twins
    except ImportError as error:
        raise NoXla(f"no JAX here: {error}") from None
    try:
        arrays = pytree.tree_map(_array, args)
        run = jax.jit(getattr(twins, case.twin)).lower(*arrays).compile()
        results = jax.block_until_ready(run(*arrays))
    except Exception as error:
        raise NoXla(first_line(error)) from error
    with torch.no_grad():
        wrong = disagreement(_tensors(jax.tree_util.tree_leaves(results)), case.fn(*args))
    if wrong:
        raise NoXla(f"its twin computes something else: {wrong}")
    return lambda: jax.block_until_ready(run(*arrays))


def _array(tensor: torch.Tensor) -> Any:
    import jax.numpy as jnp

    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)  # JAX reads on a separate stream
    return jnp.from_dlpack(tensor.int() if tensor.dtype == torch.int64 else tensor)


def _tensors(arrays: list[Any]) -> list[torch.Tensor]:
    return [from_dlpack(array) for array in arrays]

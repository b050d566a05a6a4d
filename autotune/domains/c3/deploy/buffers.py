"""The buffers of a collective in the shapes and types of the caller's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from autotune.domains.c3.deploy.compute import NAMES
from autotune.errors import UserError


@dataclass(frozen=True)
class Shapes:
    """What a rank puts in and takes out."""

    input: tuple[int, ...]
    output: tuple[int, ...]

    @property
    def numel(self) -> tuple[int, int]:
        return prod(self.input), prod(self.output)


def shapes_of(collective: str, shape: tuple[int, ...], ranks: int) -> Shapes:
    """The shapes of a collective that concatenates, or splits, along dimension 0.

    Raises:
        UserError: dimension 0 does not divide among the ranks; there are no elements.
    """
    whole = shape or (1,)
    if not prod(whole):
        raise UserError(f"a collective on a tensor of shape {list(shape)}: it has no elements")
    if collective in ("all_to_all", "reduce_scatter") and whole[0] % ranks:
        raise UserError(f"{collective} splits dimension 0 among {ranks} ranks: {whole[0]} rows do not divide")
    if collective == "all_gather":
        return Shapes(whole, (whole[0] * ranks, *whole[1:]))
    if collective == "reduce_scatter":
        return Shapes(whole, (whole[0] // ranks, *whole[1:]))
    return Shapes(whole, whole)


def stored_as(dtype: torch.dtype, *, exact: bool) -> str:
    """The type that a collective moves elements of ``dtype`` as: their own, or one that holds the same bytes.

    Args:
        exact: it adds them, so that only their own will do.

    Raises:
        UserError: it cannot add such elements.
    """
    if dtype in NAMES:
        return NAMES[dtype]
    if exact:
        raise UserError(f"reductions are of bfloat16, float16 or float32, not {str(dtype).removeprefix('torch.')}")
    return "bf16" if dtype.itemsize < 4 else "f32"


class Buffers:
    """A collective's tensors as the caller sees them.

    Args:
        raw_input, raw_output: the collective's own, of one dimension.
        dtype, shapes: of the caller's tensors.

    Attributes:
        input: what this rank puts in; written to by the caller. It may share memory with :attr:`output`.
        output: what the last call brought.
    """

    def __init__(self, raw_input: Tensor, raw_output: Tensor, dtype: torch.dtype, shapes: Shapes) -> None:
        self.dtype, self.shapes = dtype, shapes
        self.input = raw_input.view(dtype).view(shapes.input)
        self.output = raw_output.view(dtype).view(shapes.output)

    def check(self, tensor: Tensor | None, out: Tensor | None) -> None:
        """Raise UserError where a tensor of the caller's is not what the collective was opened for."""
        for what, given, shape in (("tensor", tensor, self.shapes.input), ("out", out, self.shapes.output)):
            if given is None:
                continue
            wanted = (self.dtype, shape, self.input.device)
            if (given.dtype, tuple(given.shape) or (1,), given.device) != wanted:
                found = _words(given.dtype, tuple(given.shape), given.device)
                raise UserError(f"{what} is {found}, not {_words(*wanted)}, as opened: make another overlap for it")

    def fill(self, tensor: Tensor | None) -> None:
        """Put the caller's tensor in, unless it is there already, and mark the output as written to: autograd then
        refuses to use what an earlier call returned for a backward pass."""
        with torch.no_grad():
            if tensor is not None and tensor.data_ptr() != self.input.data_ptr():
                self.input.copy_(tensor)
        torch.autograd.graph.increment_version(self.output)

    def take(self, out: Tensor | None) -> Tensor:
        """The result: in the caller's tensor, or a new view of the buffer."""
        with torch.no_grad():
            if out is not None:
                return out.copy_(self.output.view(out.shape))
            return self.output.view(self.shapes.output)


def _words(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"

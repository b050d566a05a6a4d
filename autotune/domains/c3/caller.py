"""The caller's computation and tensors: their identity in a look-up, and their use by a strategy."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from autotune.domains.c3.collectives.host import all_gather, reduce_scatter
from autotune.domains.c3.collectives.nccl import DTYPES
from autotune.domains.c3.scenario import Compute, Gemm, Program
from autotune.errors import UserError

Args = Sequence[Any]
Kwargs = Mapping[str, Any]

NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Names of torch dtypes in scenarios."""
_PRODUCTS = (torch.mm, torch.matmul, operator.matmul, torch.Tensor.mm, torch.Tensor.matmul)


# ---- the computation ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """``a @ b``, possibly with a bias, where ``a`` has any number of leading dimensions."""

    a: Tensor
    b: Tensor
    layout: str

    @property
    def gemm(self) -> Gemm | None:
        """The equivalent GEMM in the dtype under autocast; None if scenarios have no such dtype."""
        kind, dtype = self.a.device.type, self.a.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        elif self.b.dtype != dtype:
            return None
        k, n = self.b.shape
        m = self.a.numel() // k if k else 0
        return Gemm(m, n, k, NAMES[dtype], self.layout) if min(m, n, k) > 0 and dtype in NAMES else None


def product_of(compute: object, args: Args, kwargs: Kwargs) -> Product | None:
    """The matrix product that a call of ``compute`` executes; None if it is none."""
    if kwargs or not all(isinstance(t, torch.Tensor) for t in args if t is not None):
        return None
    if isinstance(compute, Gemm) and len(args) == 2:
        a, b = (t if stored == "n" else t.t() for t, stored in zip(args, compute.layout, strict=True))
        return Product(a, b, compute.layout) if _fits(a, b) else None
    if type(compute) is torch.nn.Linear and len(args) == 1:
        hooked = compute._forward_hooks or compute._forward_pre_hooks
        return None if hooked else _linear(args[0], compute.weight)
    if compute is F.linear and len(args) in (2, 3):
        return _linear(args[0], args[1])
    if compute in _PRODUCTS and len(args) == 2 and _fits(*args):
        a, b = args
        return Product(a, b, _stored(a) + _stored(b))
    return None


def _linear(x: Tensor, weight: Tensor) -> Product | None:
    return Product(x, weight.t(), _stored(x) + "t") if _fits(x, weight.t()) else None


def _fits(a: Tensor, b: Tensor) -> bool:
    plain = all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in (a, b))  # no subclasses such as DTensor
    return plain and a.dim() >= 2 and b.dim() == 2 and a.shape[-1] == b.shape[0]


def _stored(matrix: Tensor) -> str:
    return "t" if matrix.stride(-1) != 1 and matrix.stride(-2) == 1 else "n"


def known_as(compute: object, args: Args, kwargs: Kwargs) -> Compute:
    """The computation to look up for a call of ``compute``: its GEMM, or else its name "module:name".

    The name of a module is that of its class.
    """
    if isinstance(compute, Gemm):
        return compute
    product = product_of(compute, args, kwargs)
    named = compute if hasattr(compute, "__qualname__") else type(compute)
    name = f"{getattr(named, '__module__', '')}:{getattr(named, '__qualname__', '')}"
    return (product.gemm if product else None) or Program(name)


def records(compute: object, args: Args, kwargs: Kwargs) -> bool:
    """True if a call of ``compute`` may become part of an autograd graph.

    autotune cannot inspect the closure of a plain callable, for which only the grad mode counts.
    """
    if not torch.is_grad_enabled():
        return False
    seen: list[Any] = tree_leaves((list(args), dict(kwargs)))
    if isinstance(compute, torch.nn.Module):
        seen += compute.parameters()
    elif product_of(compute, args, kwargs) is None:
        return True
    return any(isinstance(t, torch.Tensor) and t.requires_grad for t in seen)


class CallerComputation:
    """The caller's computation in the interface that strategies run.

    :meth:`take` raises an error of the computation after the collective has completed, since the peers wait for it.

    Args:
        compute: a callable; or a GEMM's shape, which multiplies two matrices stored in its layout.
    """

    def __init__(self, compute: Callable[..., Any] | Gemm) -> None:
        def product(a: Tensor, b: Tensor) -> Tensor:
            assert isinstance(compute, Gemm)
            return (a if compute.layout[0] == "n" else a.t()) @ (b if compute.layout[1] == "n" else b.t())

        self._function = product if isinstance(compute, Gemm) else compute
        self.bind((), {})

    def bind(self, args: Args, kwargs: Kwargs) -> None:
        """Set the arguments of the next run."""
        self._args, self._kwargs = args, kwargs
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Enqueue the computation on the current stream (CUDA), or run it (CPU)."""
        try:
            self._result = self._function(*self._args, **self._kwargs)
        except BaseException as error:
            self._error = error

    def take(self) -> Any:
        """Return and release the result of the last run; raises the computation's exception."""
        result, error = self._result, self._error
        self.bind((), {})
        if error is not None:
            raise error
        return result


# ---- the collective's tensors ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shapes:
    """Shapes of a rank's input and output."""

    input: tuple[int, ...]
    output: tuple[int, ...]

    @property
    def numel(self) -> tuple[int, int]:
        return prod(self.input), prod(self.output)


def shapes_of(collective: str, shape: tuple[int, ...], ranks: int) -> Shapes:
    """The shapes of a collective that concatenates or splits along dimension 0.

    Raises:
        UserError: dimension 0 is not divisible among the ranks, or there are no elements.
    """
    whole = shape or (1,)
    if not prod(whole):
        raise UserError(f"the collective's tensor of shape {list(shape)} has no elements")
    if collective in ("all_to_all", "reduce_scatter") and whole[0] % ranks:
        raise UserError(f"{collective} splits dimension 0 among {ranks} ranks, and {whole[0]} rows are not divisible")
    if collective == "all_gather":
        return Shapes(whole, (whole[0] * ranks, *whole[1:]))
    if collective == "reduce_scatter":
        return Shapes(whole, (whole[0] // ranks, *whole[1:]))
    return Shapes(whole, whole)


def stored_as(dtype: torch.dtype, *, exact: bool) -> str:
    """The dtype that a collective uses for elements of ``dtype``: the same, or one with the same bytes.

    Args:
        exact: the collective sums elements, so only the same dtype is valid.

    Raises:
        UserError: sums of this dtype are not supported.
    """
    if dtype in NAMES:
        return NAMES[dtype]
    if exact:
        raise UserError(f"reductions take bfloat16, float16 or float32, not {str(dtype).removeprefix('torch.')}")
    return "bf16" if dtype.itemsize < 4 else "f32"


class Buffers:
    """A collective's tensors with the caller's shapes.

    Args:
        raw_input, raw_output: the collective's own one-dimensional tensors.
        dtype, shapes: dtype and shapes of the caller's tensors.

    Attributes:
        input: this rank's input, written by the caller. It may share memory with :attr:`output`.
        output: the result of the last call.
    """

    def __init__(self, raw_input: Tensor, raw_output: Tensor, dtype: torch.dtype, shapes: Shapes) -> None:
        self.dtype, self.shapes = dtype, shapes
        self.input = raw_input.view(dtype).view(shapes.input)
        self.output = raw_output.view(dtype).view(shapes.output)

    def check(self, tensor: Tensor | None, out: Tensor | None) -> None:
        """Raise UserError if a tensor of the caller differs from those that the collective was opened for."""
        for what, given, shape in (("tensor", tensor, self.shapes.input), ("out", out, self.shapes.output)):
            if given is None:
                continue
            wanted = (self.dtype, shape, self.input.device)
            if (given.dtype, tuple(given.shape) or (1,), given.device) != wanted:
                found = _words(given.dtype, tuple(given.shape), given.device)
                raise UserError(
                    f"{what} is {found}, not {_words(*wanted)}, as in the first call: make another overlap for it"
                )

    def fill(self, tensor: Tensor | None) -> None:
        """Copy the caller's tensor to the input, unless it is the input, and increment the output's version.

        Autograd then refuses to use results of earlier calls in a backward pass.
        """
        with torch.no_grad():
            if tensor is not None and tensor.data_ptr() != self.input.data_ptr():
                self.input.copy_(tensor)
        torch.autograd.graph.increment_version(self.output)

    def take(self, out: Tensor | None) -> Tensor:
        """The result, copied to the caller's tensor, or as a new view of the buffer."""
        with torch.no_grad():
            if out is not None:
                return out.copy_(self.output.view(out.shape))
            return self.output.view(self.shapes.output)


def _words(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"


def attach(tensor: Tensor, moved: Tensor, collective: str, group: dist.ProcessGroup) -> Tensor:
    """Make ``moved``, the result of ``collective`` on ``tensor``, differentiable with respect to ``tensor``.

    The backward pass runs torch's own collective in ``group``, on every rank, on the stream of the backward pass.
    """
    made: Tensor = _Moved.apply(tensor, moved, collective, group)  # type: ignore[no-untyped-call]
    return made


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, moved: Tensor, collective: str, group: dist.ProcessGroup) -> Tensor:
        ctx.collective, ctx.group, ctx.shape = collective, group, tensor.shape
        return moved.view_as(moved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].contiguous()
        if ctx.collective == "all_reduce":
            back = grad.clone()
            dist.all_reduce(back, group=ctx.group)
        else:
            back = torch.empty(ctx.shape or (1,), dtype=grad.dtype, device=grad.device)
            undoing = {"all_gather": reduce_scatter, "reduce_scatter": all_gather}
            undoing.get(ctx.collective, dist.all_to_all_single)(back, grad, group=ctx.group)
        return back.view(ctx.shape), None, None, None

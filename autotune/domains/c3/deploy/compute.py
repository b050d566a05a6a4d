"""The caller's computation: what a look-up should know it by, and the pieces that a strategy enqueues."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from autotune.domains.c3.scenario import Compute, Gemm, Program

if TYPE_CHECKING:
    from torch import Tensor

Args = Sequence[Any]
Kwargs = Mapping[str, Any]

NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
"""torch's dtypes as scenarios call them."""
_PRODUCTS = (torch.mm, torch.matmul, operator.matmul, torch.Tensor.mm, torch.Tensor.matmul)


@dataclass(frozen=True)
class Product:
    """``a @ b (+ bias)``, with ``a`` of any number of leading dimensions."""

    a: Tensor
    b: Tensor
    bias: Tensor | None
    layout: str

    @property
    def gemm(self) -> Gemm | None:
        """The GEMM it is, in the type that autocast makes of it; None where scenarios have no such type."""
        kind, dtype = self.a.device.type, self.a.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        elif self.b.dtype != dtype:
            return None
        k, n = self.b.shape
        m = self.a.numel() // k if k else 0
        return Gemm(m, n, k, NAMES[dtype], self.layout) if min(m, n, k) > 0 and dtype in NAMES else None

    @property
    def rows(self) -> Tensor | None:
        """``a`` as a matrix whose rows may be multiplied one panel after the other; None where that is not the same."""
        if torch.is_autocast_enabled(self.a.device.type) or self.a.dtype != self.b.dtype:
            return None
        if self.a.dim() == 2:
            return self.a
        return self.a.view(-1, self.a.shape[-1]) if self.a.is_contiguous() else None


def product_of(compute: object, args: Args, kwargs: Kwargs) -> Product | None:
    """The matrix product that calling ``compute`` is, or None where it is something else."""
    if kwargs or not all(isinstance(t, torch.Tensor) for t in args if t is not None):
        return None
    if isinstance(compute, Gemm) and len(args) == 2:
        a, b = (t if stored == "n" else t.t() for t, stored in zip(args, compute.layout, strict=True))
        return Product(a, b, None, compute.layout) if _fits(a, b) else None
    if type(compute) is torch.nn.Linear and len(args) == 1 and not _hooked(compute):
        return _linear(args[0], compute.weight, compute.bias)
    if compute is F.linear and len(args) in (2, 3):
        return _linear(args[0], args[1], args[2] if len(args) == 3 else None)
    if compute in _PRODUCTS and len(args) == 2 and _fits(*args):
        a, b = args
        return Product(a, b, None, _stored(a) + _stored(b))
    return None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Product | None:
    return Product(x, weight.t(), bias, _stored(x) + "t") if _fits(x, weight.t()) else None


def _fits(a: Tensor, b: Tensor) -> bool:
    plain = all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in (a, b))  # no DTensor, say
    return plain and a.dim() >= 2 and b.dim() == 2 and a.shape[-1] == b.shape[0]


def _stored(matrix: Tensor) -> str:
    return "t" if matrix.stride(-1) != 1 and matrix.stride(-2) == 1 else "n"


def _hooked(module: torch.nn.Module) -> bool:
    hooks: Any = module
    return bool(hooks._forward_hooks or hooks._forward_pre_hooks)


def known_as(compute: object, args: Args, kwargs: Kwargs) -> Compute:
    """What a look-up knows a call of ``compute`` by: its GEMM where it is one, else its name."""
    if isinstance(compute, Gemm):
        return compute
    product = product_of(compute, args, kwargs)
    return (product.gemm if product else None) or Program(name_of(compute))


def name_of(compute: object) -> str:
    """A callable's "module:name"; of a module its class's."""
    named = compute if hasattr(compute, "__qualname__") else type(compute)
    return f"{getattr(named, '__module__', '')}:{getattr(named, '__qualname__', '')}"


def multiply(gemm: Gemm) -> Callable[[Tensor, Tensor], Tensor]:
    """The callable that a GEMM given by its shape is, on matrices stored as its layout says."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        return (a if gemm.layout[0] == "n" else a.t()) @ (b if gemm.layout[1] == "n" else b.t())

    return product


def records(compute: object, args: Args, kwargs: Kwargs) -> bool:
    """Whether a call of ``compute`` may become part of an autograd graph.

    What a plain callable closes over cannot be seen: there the grad mode decides.
    """
    if not torch.is_grad_enabled():
        return False
    seen: list[Any] = tree_leaves((list(args), dict(kwargs)))
    if isinstance(compute, torch.nn.Module):
        seen += compute.parameters()
    elif product_of(compute, args, kwargs) is None:
        return True
    return any(isinstance(t, torch.Tensor) and t.requires_grad for t in seen)


class CallerCompute:
    """The caller's computation as ``autotune.domains.c3.run.compute.Computation`` has it, as far as running goes.

    A call that is a plain matrix product, with nothing to record, is multiplied panel by panel; any other is done in
    the first panel. An error waits until the collective is complete, for the peers wait for it: :meth:`take` raises it.

    Args:
        compute: a callable, or a GEMM's shape.
        panels: row panels of the strategy.
    """

    def __init__(self, compute: Callable[..., Any] | Gemm, panels: int) -> None:
        self.compute, self.panels = compute, panels
        self._function = multiply(compute) if isinstance(compute, Gemm) else compute
        self._args: Args = ()
        self._kwargs: Kwargs = {}
        self._product: tuple[Tensor, Product, Tensor] | None = None
        self._result: Any = None
        self._error: BaseException | None = None

    def bind(self, args: Args, kwargs: Kwargs) -> None:
        """What the next call works on."""
        self._args, self._kwargs, self._product, self._result, self._error = args, kwargs, None, None, None
        if self.panels == 1 or records(self.compute, args, kwargs):
            return
        product = product_of(self.compute, args, kwargs)
        rows = product.rows if product else None
        if product is not None and rows is not None and rows.shape[0] >= self.panels:
            out = torch.empty(rows.shape[0], product.b.shape[1], dtype=rows.dtype, device=rows.device)
            self._product = (rows, product, out)

    def run(self, panel: int) -> None:
        """Enqueue panel ``panel`` on the current stream (CUDA), or run it (CPU)."""
        if self._error is not None:
            return
        try:
            if self._product is not None:
                self._multiply(panel, *self._product)
            elif panel == 0:
                self._result = self._function(*self._args, **self._kwargs)
        except BaseException as error:
            self._error = error

    def _multiply(self, panel: int, rows: Tensor, product: Product, out: Tensor) -> None:
        m = rows.shape[0]
        part = slice(m * panel // self.panels, m * (panel + 1) // self.panels)
        with torch.no_grad():
            if product.bias is None:
                torch.mm(rows[part], product.b, out=out[part])
            else:
                torch.addmm(product.bias, rows[part], product.b, out=out[part])
        if panel == self.panels - 1:
            self._result = out.view(*product.a.shape[:-1], out.shape[1])

    def take(self) -> Any:
        """The result of the last call, which is forgotten here; raises what the computation raised."""
        result, error = self._result, self._error
        self._args, self._kwargs, self._product, self._result, self._error = (), {}, None, None, None
        if error is not None:
            raise error
        return result

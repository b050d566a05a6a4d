"""Attention calls of a Dynamo graph: results and sizes of its nodes, arguments of a call, readers of its result.

A size is a number, or a symbol that has another value in each call of the graph. A comparison of symbols by ``==`` or
``<`` adds a guard to Dynamo, so that other sizes cause a recompilation. The functions here compare expressions instead.
:func:`fits` alone adds a guard, and only one that batches rarely fail.

The readers matter because a fused kernel's result may have other strides.
"""

from __future__ import annotations

import logging
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.attention import SDPBackend

log = logging.getLogger("autotune")

_KEEPS = ("transpose", "permute", "movedim", "swapaxes", "to", "float", "type_as", "clone")
"""Methods whose results have the strides of their argument."""
_ANY = ("contiguous", "reshape", "flatten", "matmul", "size", "dim", "numel")
"""Methods that accept any strides."""
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


@dataclass(frozen=True)
class Call:
    """The arguments of one attention call, by name."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    attn_mask: fx.Node | None
    dropout_p: Any
    is_causal: Any
    scale: Any
    enable_gqa: Any

    @classmethod
    def of(cls, node: fx.Node) -> Call | None:
        """The arguments of ``node``; None if one is not a dense tensor."""
        given: dict[str, Any] = {**_DEFAULTS, **dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
        there = [given["query"], given["key"], given["value"], given["attn_mask"]]
        return cls(**given) if all(is_tensor(t) for t in there if t is not None) else None


def fused_takes(call: Call) -> bool:
    """True if torch would select a fused kernel for a call with groups of queries.

    If not, torch repeats the keys and computes in fp32. The loop is that of torch (``sdp_utils.cpp``): it takes the
    first usable kernel in order of priority. Dynamo has traced the original call, so the order is that of the device.
    """
    if fake(call.query).device.type != "cuda":
        return False
    cuda = torch.backends.cuda
    checks = {
        SDPBackend.FLASH_ATTENTION: cuda.can_use_flash_attention,
        SDPBackend.EFFICIENT_ATTENTION: cuda.can_use_efficient_attention,
        SDPBackend.CUDNN_ATTENTION: cuda.can_use_cudnn_attention,
    }
    try:
        query, key, value = (fake(n) for n in (call.query, call.key, call.value))
        mask = None if call.attn_mask is None else fake(call.attn_mask)
        params = cuda.SDPAParams(query, key, value, mask, float(call.dropout_p), bool(call.is_causal), True)
        for number in torch._C._get_sdp_priority_order():
            if number == int(SDPBackend.MATH.value):
                return False
            if any(int(k.value) == number and check(params, False) for k, check in checks.items()):
                return True
    except Exception:
        log.debug("torch's choice of a kernel for attention cannot be asked for", exc_info=True)
    return False


def path(node: fx.Node, source: fx.Node) -> list[fx.Node]:
    """The nodes from ``node`` back to ``source`` (exclusive), along first arguments."""
    passed = []
    while node is not source:
        passed.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return passed


def unexpanded(mask: fx.Node) -> fx.Node:
    """The source of a mask's ``expand`` over batch or heads, if it has four axes, else the mask."""
    while mask.target == "expand" and isinstance(mask.args[0], fx.Node) and is_tensor(mask.args[0]):
        if fake(mask.args[0]).ndim != 4:
            break
        mask = mask.args[0]
    return mask


def unrepeated(node: fx.Node) -> fx.Node | None:
    """``x[B, H, S, D]`` of a node that repeats each head of ``x`` several times in a row; None for other nodes.

    The repeat is that of transformers (``x[:, :, None].expand(...).reshape(...)``) or ``repeat_interleave``.
    """
    if node.target in (torch.repeat_interleave, "repeat_interleave"):
        x = node.args[0]
        options = [*node.args[1:], *node.kwargs.values()]
        fits = len(options) == 2 and type(options[0]) is int and options[1] in (1, -3)
        return x if fits and is_tensor(x) and fake(x).ndim == 4 else None  # type: ignore[return-value,arg-type]
    if node.target not in ("reshape", "view", "contiguous", "flatten"):
        return None
    expanded = node.args[0]
    if not isinstance(expanded, fx.Node) or expanded.target != "expand" or not is_tensor(node):
        return None
    inserted = expanded.args[0]
    if not isinstance(inserted, fx.Node) or not _inserts_after_heads(inserted):
        return None
    x = inserted.args[0]
    if not is_tensor(x) or fake(x).ndim != 4:  # type: ignore[arg-type]
        return None
    batch, heads, length, size = fake(x).shape  # type: ignore[arg-type]
    wide = fake(expanded).shape
    if len(wide) != 5 or type(heads) is not int or type(wide[2]) is not int:
        return None
    repeated = same_shape(wide, (batch, heads, wide[2], length, size))
    return x if repeated and same_shape(fake(node).shape, (batch, heads * wide[2], length, size)) else None  # type: ignore[return-value]


def _inserts_after_heads(node: fx.Node) -> bool:
    if node.target == "unsqueeze":
        return node.args[1:] in ((2,), (-3,)) and not node.kwargs
    if node.target is not operator.getitem or not isinstance(node.args[1], tuple):
        return False
    places = node.args[1]
    whole = [p == slice(None, None, None) for p in places]
    return len(places) >= 3 and places[2] is None and all(whole[:2]) and all(whole[3:])


# Readers of a result


def copies(node: fx.Node) -> list[fx.Node]:
    """The calls that copy a result, or view it if its strides allow that."""
    found = []
    for user in node.users:
        if _is_same(user, node) or (user.op == "call_method" and user.target in (*_KEEPS, "view")):
            found += copies(user)
        elif user.op == "call_method" and user.target in ("contiguous", "reshape", "flatten"):
            found.append(user)
    return found


def _is_same(user: fx.Node, node: fx.Node) -> bool:
    """Return True if ``user`` views ``node`` in the same shape, which is no copy for any strides."""
    if user.op != "call_method" or user.target not in ("view", "reshape", "flatten") or not is_tensor(user):
        return False
    return same_shape(fake(user).shape, fake(node).shape)


def takes_any_strides(node: fx.Node) -> bool:
    """Return True if all readers of a result accept any strides.

    The results of fused kernels have other strides than those of the products, so a ``view`` that Dynamo found valid
    may become invalid.
    """
    for user in node.users:
        if user.op != "call_method":
            return False
        if _is_same(user, node) or user.target in _KEEPS:
            if not takes_any_strides(user):
                return False
        elif user.target not in _ANY:
            return False
    return True


# Nodes


def is_tensor(node: Any) -> bool:
    """Return True if a node's result is one dense tensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def fake(node: fx.Node) -> torch.Tensor:
    """The fake tensor of a node's result."""
    found: torch.Tensor = node.meta["example_value"]
    return found


def torch_name(node: fx.Node) -> str:
    """The name of the method, or of the function of torch or ``operator``, that a node calls; "" for anything else."""
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name if name and node.target in (getattr(torch, name, None), getattr(operator, name, None)) else ""


def is_static(node: fx.Node) -> bool:
    """Return True if sizes and strides are static."""
    return all(type(n) is int for n in (*fake(node).shape, *fake(node).stride()))


# Sizes


def same_length(a: Any, b: Any) -> bool:
    """Return True if two lengths are the same number or the same symbol."""
    symbolic = isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt)
    return bool(a.node.expr == b.node.expr) if symbolic else type(a) is int and type(b) is int and a == b


def same_shape(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Return True for two shapes of the same lengths."""
    return len(left) == len(right) and all(map(same_length, left, right))


def expression(size: Any) -> Any:
    """A size as a key of a dictionary."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def exceeds(size: Any, least: int) -> bool:
    """Return True if a size is above ``least`` in each call of the graph."""
    return bool(statically_known_true(size > least))


def fits(size: Any, most: int) -> bool:
    """Return True if a size is at most ``most`` in each call of the graph; a guard ensures it where that is unknown."""
    if type(size) is int or statically_known_true(size <= most):
        return bool(size <= most)
    return not is_bounded(size) and bool(size <= most)


def is_bounded(size: Any) -> bool:
    """Return True for a symbolic size with an upper bound: PyTorch refuses to narrow a range from the user."""
    if not isinstance(size, torch.SymInt):
        return False
    known = (size.node.shape_env.var_to_range.get(name) for name in size.node.expr.free_symbols)
    upper = [found.upper for found in known if found is not None]
    return any(isinstance(most, sympy.Integer) and int(most) < sys.maxsize - 1 for most in upper)


def hint(size: Any) -> int | None:
    """A size at compile time; None for a symbol without one."""
    value = size.node.hint if isinstance(size, torch.SymInt) else size
    return value if type(value) is int else None


def at_hints(value: Tensor) -> Tensor | None:
    """A fake tensor as it is at compile time, without symbols; None if a size has no hint."""
    if not isinstance(value, FakeTensor) or all(type(n) is int for n in (*value.shape, *value.stride())):
        return value
    shape, strides = ([hint(n) for n in sizes] for sizes in (value.shape, value.stride()))
    if None in (*shape, *strides):
        return None
    with value.fake_mode:
        made = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)  # type: ignore[arg-type]
    return made.requires_grad_(value.requires_grad)

"""Attention, said to torch so that a fused kernel takes it.

``scaled_dot_product_attention`` chooses its kernel when a graph is traced, by what it is handed. Libraries hand it less
than they know while they are traced. transformers 5 leaves a mask out where it hides nothing, but not under a compiler:
BERT then gets a mask of ones whose last stride is 0, which no fused kernel takes, and its attention becomes products in
fp32 with every score in memory (6.6 ms a layer of BERT-large's training on an H200; without the mask 0.6 ms).

These rules run on Dynamo's graph, before AOTAutograd sees it. Results are those of the same formula:

- A mask that is known when the graph is compiled, and hides nothing, is left out. One that hides just what comes later
  becomes ``is_causal``.
- A choice by a condition that is known (``where``) is its branch, so that a bias of the model's own is seen as such.
- A mask of keys that comes with the data becomes attention by lengths (:mod:`.padded`).
- A mask or bias with gaps between neighbours is made contiguous, once for all that read it.
- Keys and values repeated for groups of queries are handed over once, where torch has a fused kernel that is told of
  groups. Elsewhere the queries of a group that has one position, as in decoding, become positions of their key's head.

A rule reads past a node, or shares a copy, only if both run in the same state of torch
(:mod:`autotune.compiler.capture.attention.contexts`): what is made under ``no_grad`` keeps no gradient.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import fx
from torch._C._functorch import is_batchedtensor, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils import _pytree as pytree

from autotune.compiler.capture.attention.calls import Call, fused_takes, path, unexpanded, unrepeated
from autotune.compiler.capture.attention.constants import Constants
from autotune.compiler.capture.attention.contexts import Contexts
from autotune.compiler.capture.attention.formulas import IS_NOT_LATER, Formulas
from autotune.compiler.capture.attention.kernels import kernel_of
from autotune.compiler.capture.attention.padding import Padding, padding_of
from autotune.compiler.capture.attention.results import (
    copies,
    fake,
    is_static,
    is_tensor,
    same_length,
    takes_any_strides,
)
from autotune.compiler.capture.attention.writes import Writes, called

log = logging.getLogger("autotune")

Hides = Literal["nothing", "what comes later"]


def rewrite_attention(gm: fx.GraphModule) -> int:
    """Rewrite the attention of a Dynamo graph in place, and of the graphs that it calls once.

    Args:
        gm: as Dynamo hands it to a backend, with fake tensors in ``meta["example_value"]``.

    Returns:
        How many calls were changed.
    """
    try:
        writes = Writes(gm)
        return _rewritten(gm, writes, Contexts(gm.graph), Constants(gm.graph, writes), Formulas(writes))
    except Exception:
        # A graph that was made otherwise than expected is compiled as it came: every rule changes one call, whole.
        log.warning("autotune: attention is left as it is: a rule failed", exc_info=True)
        return 0


def _rewritten(
    gm: fx.GraphModule,
    writes: Writes,
    contexts: Contexts,
    constants: Constants,
    formulas: Formulas,
    causal: Mapping[fx.Node, bool] | None = None,
) -> int:
    walk = _Walk(gm.graph, writes, contexts, constants, formulas, causal or {})
    changed, met = 0, False
    try:
        for node in list(gm.graph.nodes):
            if node.target is scaled_dot_product_attention:
                met = True
                changed += walk.visit(node)
            elif (alone := _called_alone(gm, node)) is not None:
                inner, operands = alone
                tensors = {p: a for p, a in operands.items() if is_tensor(a)}
                held = {p: value for p, a in tensors.items() if (value := constants.of(a)) is not None}
                read = {p: formula for p, a in tensors.items() if (formula := formulas.of(a)) is not None}
                within = Contexts(inner.graph, contexts.of(node))
                masks = {p: found for p, a in tensors.items() if (found := walk.is_causal(a)) is not None}
                changed += _rewritten(
                    inner, writes, within, Constants(inner.graph, writes, held), formulas.inside(read), masks
                )
    finally:  # also where a later call could not be understood
        if met:
            gm.graph.lint()
            gm.recompile()
    return changed


def _called_alone(gm: fx.GraphModule, node: fx.Node) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]] | None:
    """The graph that a node alone calls, as activation checkpointing does, and the node's operand for each input."""
    graphs = called(gm, node)
    named = node.args[0] if node.args else None
    if len(graphs) != 1 or not isinstance(named, fx.Node) or named.op != "get_attr" or len(named.users) > 1:
        return None
    if sum(n.op == "get_attr" and n.target == named.target for n in gm.graph.nodes) > 1:
        return None
    inner = graphs[0]
    inputs = [n for n in inner.graph.nodes if n.op == "placeholder"]
    operands = node.args[1:]
    if len(operands) != len(inputs) or not all(isinstance(a, fx.Node) for a in operands):
        return inner, {}
    return inner, dict(zip(inputs, operands, strict=True))


class _Walk:
    """Attention from a graph's first node to its last; what one call had made, others use too."""

    def __init__(
        self,
        graph: fx.Graph,
        writes: Writes,
        contexts: Contexts,
        constants: Constants,
        formulas: Formulas,
        causal: Mapping[fx.Node, bool],
    ) -> None:
        self._graph, self._writes, self._contexts = graph, writes, contexts
        self._constants, self._formulas, self._causal = constants, formulas, causal
        self._hides: dict[tuple[fx.Node, bool], Hides | None] = {}
        self._laid: dict[tuple[fx.Node, int], tuple[fx.Node, fx.Node]] = {}
        """By a mask and how many keys it is for: the call before which it was made contiguous, and what that made."""
        self._paddings: dict[tuple[fx.Node, int, int], Padding | None] = {}
        self._last: dict[fx.Node, fx.Node] = {}
        """By an input that is a mask, its last row."""
        self._bounds: dict[tuple[fx.Node, bool, int], tuple[fx.Node, tuple[fx.Node, ...]]] = {}
        """By a mask of keys, its structure and the queries: the first call for which bounds were made, and these."""

    def visit(self, node: fx.Node) -> bool:
        """Rewrite one call; whether anything changed."""
        call = Call.of(node)
        old = node.meta.get("example_value")
        if call is None or not isinstance(old, torch.Tensor) or self._writes.touch(node):
            return False
        shape = (*fake(call.query).shape[:-1], fake(call.value).shape[-1])
        if list(map(str, shape)) != list(map(str, old.shape)) or any(type(n) is int and n == 0 for n in shape):
            return False  # queries for the keys of several sequences, or none
        if is_batchedtensor(fake(call.query)):
            return False
        made = copies(node)
        copied = not takes_any_strides(node) or len(made) > 1 or any(map(self._is_seen, made))
        if copied and not (is_static(node) and old.is_contiguous()):
            return False
        with self._graph.inserting_before(node):
            if (padded := self._padded(node, call)) is not None:
                self._replace(node, padded, copied)
                return True
            new = self._with_groups(node, self._with_mask(node, call))
        if new == call:
            return False
        grouped = new.query is not call.query
        query = fake(new.query)
        shape = (*query.shape[:-1], fake(new.value).shape[-1])
        node.args = (new.query, new.key, new.value)
        node.kwargs = {k: v for k, v in vars(new).items() if k not in ("query", "key", "value") and v is not None}
        # Of the strides nobody knows before the kernel is chosen.
        node.meta["example_value"] = query.new_empty(shape)
        with self._graph.inserting_after(node):
            if grouped:
                self._after(node, "reshape", *old.shape)
            elif copied:
                self._after(node, "contiguous")
        for one in () if copied else made:  # a view of a result that lies in another order
            if one.target != "contiguous":
                with self._graph.inserting_after(one):
                    self._after(one, "contiguous")
        return True

    def _is_seen(self, copy: fx.Node) -> bool:
        """Whether a copy of a result differs from a view of it: it is written over, or lies in no usual order."""
        return self._writes.touch(copy) or (is_static(copy) and not fake(copy).is_contiguous())

    def _after(self, node: fx.Node, method: str, *args: Any) -> None:
        made = self._method(node, method, node, *args)
        node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)

    def _method(self, where: fx.Node, name: str, node: fx.Node, *args: Any) -> fx.Node:
        """A method of ``node``'s result, called in the context of ``where``."""
        made = self._graph.call_method(name, (node, *args))
        made.meta["example_value"] = getattr(fake(node), name)(*args)
        self._contexts.put(made, where)
        return made

    def _written(self, source: fx.Node, copy: fx.Node, node: fx.Node) -> bool:
        """Whether ``source`` is written over while the call, or its backward, needs it in the place of ``copy``; or
        ``copy`` is, before the call."""
        end = None if fake(node).requires_grad else node
        return self._writes.between([source], copy, end) or self._writes.between([copy], copy, node)

    # Masks

    def _with_mask(self, node: fx.Node, call: Call) -> Call:
        mask = call.attn_mask
        if mask is None or call.is_causal is not False:
            return call
        queries, keys = (fake(n).shape[-2] for n in (call.query, call.key))
        square = same_length(queries, keys)
        chosen = self._chosen(mask, node)
        # What a mask repeats over a batch of any size says nothing of the batch.
        for one in dict.fromkeys((mask, unexpanded(mask), chosen, unexpanded(chosen))):
            hides = self._what_hides(one, square)
            if hides is not None:
                return replace(call, attn_mask=None, is_causal=hides == "what comes later")
        return replace(call, attn_mask=self._with_neighbours(chosen, node, keys))

    def _what_hides(self, mask: fx.Node, square: bool) -> Hides | None:
        """What a mask hides, where that is known and has a name."""
        if (mask, square) not in self._hides:
            held = self._constants.of(mask)
            known = self._formula_hides(mask, square) if held is None else what_hides(held, square)
            self._hides[mask, square] = known
        return self._hides[mask, square]

    def _formula_hides(self, mask: fx.Node, square: bool) -> Hides | None:
        """What a mask hides at any length."""
        formula = self._formulas.of(mask)
        if formula is None:
            return None
        found: Hides | None = "what comes later" if square and formula.element == IS_NOT_LATER else None
        if formula.element is True or (fake(mask).is_floating_point() and formula.element == 0):
            found = "nothing"
        if found is not None:
            self._formulas.rely_on(formula)
        return found

    def _chosen(self, mask: fx.Node, node: fx.Node) -> fx.Node:
        """The branch that a ``where`` of the mask's takes everywhere, else the mask."""
        if mask.target not in (torch.where, "where") or len(mask.args) != 3 or mask.kwargs:
            return mask
        condition, yes, no = mask.args if mask.target is torch.where else (mask.args[1], mask.args[0], mask.args[2])
        if not isinstance(condition, fx.Node):
            return mask
        held, formula = self._constants.of(condition), self._formulas.of(condition)
        if held is not None:
            branch = yes if bool(held.all()) else no if not bool(held.any()) else None
        elif formula is not None and isinstance(formula.element, bool):
            branch = yes if formula.element else no
        else:
            return mask
        if not isinstance(branch, fx.Node) or not is_tensor(branch):
            return mask
        other = no if branch is yes else yes
        if isinstance(other, fx.Node) and is_tensor(other) and fake(other).requires_grad:
            return mask  # the other one's gradient is zeros, and would be none
        alike = fake(branch).ndim == 4 and fake(branch).dtype == fake(mask).dtype
        if not alike or not self._contexts.alike(mask, node) or self._written(branch, mask, node):
            return mask
        if held is None and formula is not None:
            self._formulas.rely_on(formula)
        return branch

    def _with_neighbours(self, mask: fx.Node, node: fx.Node, keys: Any) -> fx.Node:
        """The mask with keys beside each other in memory, as fused kernels want it."""
        value = fake(mask)
        if value.ndim != 4 or type(value.stride(-1)) is not int or type(keys) is not int or keys == 1:
            return mask  # where keys are of any number, kernels for masks would be compiled for several
        if value.stride(-1) == 1 and type(value.shape[-1]) is int and value.shape[-1] == keys:
            return mask
        made = self._laid.get((mask, keys))
        if made is None or not self._contexts.alike(made[0], node) or self._writes.between([mask], made[0], node):
            made = self._laid[mask, keys] = node, self._contiguous(mask, node, keys)
        return made[1]

    def _contiguous(self, mask: fx.Node, node: fx.Node, keys: int) -> fx.Node:
        whole = unexpanded(mask)
        if not self._contexts.alike(node, *path(mask, whole)):
            whole = mask
        value = fake(whole)
        if not value.requires_grad:  # a gradient would be put back where it is narrowed
            for d in range(3):
                if type(value.stride(d)) is int and value.stride(d) == 0:
                    whole = self._method(node, "narrow", whole, d, 0, 1)
        if type(value.shape[-1]) is int and value.shape[-1] == 1:
            whole = self._method(node, "expand", whole, -1, -1, -1, keys)
        return self._method(node, "contiguous", whole)

    # Masks that come with the data

    def _padded(self, node: fx.Node, call: Call) -> fx.Node | None:
        """The call by the lengths of a mask of keys; None where the mask is another, or no kernel takes the call."""
        mask, value = call.attn_mask, fake(node)
        if mask is None or call.is_causal is not False or not self._is_plain(node, call):
            return None
        queries, keys = fake(call.query).shape[-2], fake(call.key).shape[-2]
        found = self._padding_of(mask, queries, keys) or self._handed_over(node, mask, queries, keys)
        if found is None or not self._contexts.alike(node, *found.passed):
            return None
        if any(self._written(found.valid, one, node) for one in found.passed):
            return None
        call = self._once_a_group(node, call)
        query, key, value_ = (self._of_type(node, n, value.dtype) for n in (call.query, call.key, call.value))
        scale = fake(query).shape[-1] ** -0.5 if call.scale is None else float(call.scale)
        kernel = kernel_of(fake(query), fake(key), fake(value_), found.causal, found.window, call.dropout_p, scale)
        if kernel is None:
            return None
        valid, *bounds = self._bounds_of(node, found, fake(query).shape[0], queries)
        how = found.causal, found.window, float(call.dropout_p), scale, kernel
        return self._function(
            node, torch.ops.autotune.padded_attention.default, query, key, value_, valid, *bounds, *how
        )

    def _padding_of(self, mask: fx.Node, queries: int, keys: int) -> Padding | None:
        """As :func:`padding_of`, once for all layers."""
        asked = mask, queries, keys
        if asked not in self._paddings:
            self._paddings[asked] = padding_of(mask, queries, keys, self._constants)
        return self._paddings[asked]

    def is_causal(self, mask: fx.Node) -> bool | None:
        """Return True if a mask of keys has a triangle, False if it has no structure, None of any other mask."""
        if fake(mask).ndim != 4 or fake(mask).dtype != torch.bool or not is_static(mask):
            return None
        found = self._padding_of(mask, *fake(mask).shape[-2:])
        if found is None or found.window or any(map(self._writes.touch, found.passed)):
            return None
        return found.causal

    def _handed_over(self, node: fx.Node, mask: fx.Node, queries: int, keys: int) -> Padding | None:
        """The parts of an input whose structure the calling graph has proved. Its last query sees each valid key."""
        if mask not in self._causal or tuple(fake(mask).shape[1:]) != (1, queries, keys):
            return None
        last = self._last.get(mask)
        if last is None or not self._contexts.alike(last, node):
            last = self._last[mask] = self._method(node, "narrow", mask, 2, queries - 1, 1)
        return Padding(last, (mask,), self._causal[mask], 0)

    def _is_plain(self, node: fx.Node, call: Call) -> bool:
        """Return True for a call of four static axes and one batch, without a transformation of ``torch.func``."""
        given = [fake(n) for n in (call.query, call.key, call.value)]
        if not all(map(is_static, (node, call.query, call.key, call.value))) or call.attn_mask is None:
            return False
        if any(t.ndim != 4 or is_functorch_wrapped_tensor(t) for t in (*given, fake(call.attn_mask))):
            return False
        if type(call.dropout_p) not in (int, float) or not isinstance(call.scale, float | int | None):
            return False
        (batch, heads, _, size), few = given[0].shape, given[1].shape[1]
        return given[1].shape == given[2].shape == (batch, few, given[1].shape[2], size) and heads % few == 0

    def _bounds_of(self, node: fx.Node, found: Padding, batch: int, queries: int) -> tuple[fx.Node, ...]:
        """The mask of keys as ``[B, keys]``, and its bounds, once for all calls."""
        known = found.valid, found.causal, queries
        made = self._bounds.get(known)
        if made is None or not self._contexts.alike(made[0], node) or self._writes.between([known[0]], made[0], node):
            seen = self._method(node, "flatten", found.valid, 1)
            if fake(seen).shape[0] != batch:
                seen = self._method(node, "expand", seen, batch, -1)
            bounds = self._function(node, torch.ops.autotune.mask_bounds.default, seen, queries, found.causal)
            parts = [self._function(node, operator.getitem, bounds, place) for place in range(3)]
            made = self._bounds[known] = node, (seen, *parts)
        return made[1]

    def _of_type(self, where: fx.Node, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``node`` in the type that autocast would have given it."""
        return node if fake(node).dtype == dtype else self._method(where, "to", node, dtype)

    def _function(self, where: fx.Node, function: Any, *args: Any) -> fx.Node:
        """A call of a function in the context of ``where``."""
        made = self._graph.call_function(function, args)
        given = fx.node.map_arg(args, lambda n: n.meta["example_value"])
        with next(t.fake_mode for t in pytree.tree_leaves(given) if isinstance(t, FakeTensor)):
            made.meta["example_value"] = function(*given)
        self._contexts.put(made, where)
        return made

    def _replace(self, node: fx.Node, padded: fx.Node, copied: bool) -> None:
        """Put the first result of ``padded`` in the place of a call."""
        with self._graph.inserting_before(node):
            result = self._function(node, operator.getitem, padded, 0)
            if copied:
                result = self._method(node, "contiguous", result)
        made = () if copied else copies(node)
        node.replace_all_uses_with(result)
        self._graph.erase_node(node)
        for one in made:
            if one.target != "contiguous":
                with self._graph.inserting_after(one):
                    self._after(one, "contiguous")

    # Groups of queries

    def _once_a_group(self, node: fx.Node, call: Call) -> Call:
        """The call with keys and values that a group of queries shares handed over once, where they are repeated."""
        query = fake(call.query)
        key, value = unrepeated(call.key), unrepeated(call.value)
        if key is None or value is None or call.enable_gqa is not False or query.ndim != 4:
            return call
        if not all(map(is_static, (call.query, key, value))):
            return call
        (batch, few), heads = fake(key).shape[:2], query.shape[1]
        if fake(value).shape[:2] != (batch, few) or query.shape[0] != batch or heads % few:
            return call
        if self._written(key, call.key, node) or self._written(value, call.value, node):
            return call
        if not self._contexts.alike(node, *path(call.key, key), *path(call.value, value)):
            return call
        return replace(call, key=key, value=value, enable_gqa=True)

    def _with_groups(self, node: fx.Node, call: Call) -> Call:
        grouped = self._once_a_group(node, call)
        if grouped is call or call.is_causal not in (False, True):
            return call
        query, mask = fake(call.query), call.attn_mask
        (batch, few), heads = fake(grouped.key).shape[:2], query.shape[1]
        if fused_takes(grouped):
            return grouped
        if query.shape[-2] > 1 or call.is_causal is not False:
            return call
        if mask is not None and not (fake(mask).ndim == 4 and fake(mask).shape[1:3] == (1, 1)):
            return call
        turned = self._method(node, "reshape", call.query, batch, few, heads // few, query.shape[-1])
        if mask is not None:
            mask = self._method(node, "expand", mask, -1, -1, heads // few, -1)
        return replace(grouped, query=turned, attn_mask=mask, enable_gqa=False)


def what_hides(mask: torch.Tensor, square: bool) -> Hides | None:
    """What a mask of attention hides, if that has a name.

    Args:
        mask: ``[..., queries, keys]``; of bool, True where a key is seen; of numbers, what is added to the scores.
        square: whether there are as many queries as keys, so that a triangle may be asked for.
    """
    if mask.dtype == torch.bool:
        seen = mask
    elif mask.is_floating_point():
        seen = mask == 0
        if not bool((seen | (mask <= torch.finfo(mask.dtype).min)).all()):
            return None
    else:
        return None
    if bool(seen.all()):
        return "nothing"
    if square and mask.ndim >= 2 and mask.shape[-1] == mask.shape[-2]:
        count = mask.shape[-1]
        lower = torch.ones(count, count, dtype=torch.bool, device=mask.device).tril()
        if bool((seen == lower).all()):
            return "what comes later"
    return None

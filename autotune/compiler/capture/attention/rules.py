"""Rewrites of attention calls so that PyTorch selects a fused kernel.

``scaled_dot_product_attention`` selects its kernel from its arguments when a graph is traced. Libraries pass less
information under tracing than in eager mode. transformers 5 drops a mask that hides nothing, but not under a compiler.
BERT then passes a mask of ones whose last stride is 0, which no fused kernel accepts. Its attention becomes products in
fp32 with every score in memory (6.6 ms a layer of BERT-large's training on an H200; without the mask 0.6 ms).

These rules run on Dynamo's graph, before AOTAutograd. The results are those of the same formula:

- A mask that is constant at compile time and hides nothing is removed. A mask that hides exactly the later keys becomes
  ``is_causal``.
- A ``where`` with a constant condition is replaced by its branch, which exposes a bias of the model.
- A key mask that is an input becomes attention by lengths (:mod:`.padded`). A mask of packed documents and a sliding
  window become attention by spans (:mod:`.spanned`).
- A mask or bias whose last stride is not 1 is made contiguous, once for all its readers.
- Keys and values repeated for groups of queries are passed once if PyTorch has a fused kernel for grouped queries. If
  it has none and a group has one position, as in decoding, the group's queries become positions of their key's head.

A rule looks through a node, or shares a copy, only if both run in the same PyTorch context
(:mod:`autotune.compiler.capture.attention.effects`): a tensor made under ``no_grad`` has no gradient.
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

from autotune.compiler.capture.attention.calls import (
    Call,
    copies,
    fake,
    fused_takes,
    is_static,
    is_tensor,
    path,
    same_length,
    takes_any_strides,
    unexpanded,
    unrepeated,
)
from autotune.compiler.capture.attention.constants import Constants
from autotune.compiler.capture.attention.documents import is_of_documents
from autotune.compiler.capture.attention.effects import Contexts, Writes, called
from autotune.compiler.capture.attention.formulas import Formulas, is_not_later
from autotune.compiler.capture.attention.kernels import has_spans, kernel_of
from autotune.compiler.capture.attention.padding import Padding, has_row_spans, padding_of

log = logging.getLogger("autotune")

Hides = Literal["nothing", "what comes later"]


def rewrite_attention(gm: fx.GraphModule) -> int:
    """Rewrite the attention of a Dynamo graph in place, and of the graphs that it calls once.

    Args:
        gm: a graph as Dynamo passes it to a backend, with fake tensors in ``meta["example_value"]``.

    Returns:
        The number of changed calls.
    """
    try:
        writes = Writes(gm)
        return _rewritten(gm, writes, Contexts(gm.graph), Constants(gm.graph, writes), Formulas(writes))
    except Exception:
        # The remaining calls of an unexpected graph are compiled unchanged: a rule changes a whole call or nothing.
        log.warning("autotune: attention is left as it is: a rule failed", exc_info=True)
        return 0


def _rewritten(
    gm: fx.GraphModule,
    writes: Writes,
    contexts: Contexts,
    constants: Constants,
    formulas: Formulas,
    causal: Mapping[fx.Node, bool] | None = None,
    spanned: frozenset[fx.Node] = frozenset(),
) -> int:
    walk = _Walk(gm.graph, writes, contexts, constants, formulas, causal or {}, spanned)
    nodes, changed, ended = list(gm.graph.nodes), 0, False
    try:
        for node in nodes:
            if node.target is scaled_dot_product_attention:
                changed += walk.visit(node)
            elif (alone := _called_alone(gm, node)) is not None:
                inner, operands = alone
                tensors = {p: a for p, a in operands.items() if is_tensor(a)}
                held = {p: value for p, a in tensors.items() if (value := constants.of(a)) is not None}
                read = {p: formula for p, a in tensors.items() if (formula := formulas.of(a)) is not None}
                within = Contexts(inner.graph, contexts.of(node))
                masks = {p: found for p, a in tensors.items() if (found := walk.is_causal(a)) is not None}
                spanned = frozenset(p for p, a in tensors.items() if walk.sees_spans(a))
                known = Constants(inner.graph, writes, held)
                changed += _rewritten(inner, writes, within, known, formulas.inside(read), masks, spanned)
        ended = True
    finally:  # also if a rule fails on a later call
        if changed or not ended or len(gm.graph.nodes) != len(nodes):
            gm.graph.lint()
            gm.recompile()
    return changed


def _called_alone(gm: fx.GraphModule, node: fx.Node) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]] | None:
    """The graph that only this node calls, as in activation checkpointing, and the node's operand for each input."""
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
    """A pass over a graph's attention calls in order; calls share copies and bounds."""

    def __init__(
        self,
        graph: fx.Graph,
        writes: Writes,
        contexts: Contexts,
        constants: Constants,
        formulas: Formulas,
        causal: Mapping[fx.Node, bool],
        spanned: frozenset[fx.Node],
    ) -> None:
        self._graph, self._writes, self._contexts = graph, writes, contexts
        self._constants, self._formulas, self._causal, self._spanned_inputs = constants, formulas, causal, spanned
        self._hides: dict[tuple[fx.Node, bool], Hides | None] = {}
        self._laid: dict[tuple[fx.Node, int], tuple[fx.Node, fx.Node]] = {}
        """By mask and number of keys: the call before which the mask was made contiguous, and the contiguous copy."""
        self._paddings: dict[tuple[fx.Node, int, int], Padding | None] = {}
        self._seeing_spans: dict[fx.Node, bool] = {}
        self._last: dict[fx.Node, fx.Node] = {}
        """The last row of each mask that is a graph input."""
        self._bounds: dict[tuple[fx.Node, bool, int], tuple[fx.Node, tuple[fx.Node, ...]]] = {}
        """By key mask, structure and number of queries: the first call that needed the bounds, and the bounds."""
        self._spans: dict[tuple[fx.Node, int], tuple[fx.Node, tuple[fx.Node, ...]]] = {}
        """By mask and batch: the first call that needed the spans, and the mask [B, queries, keys] with its spans."""

    def visit(self, node: fx.Node) -> bool:
        """Rewrite one call; return True if anything changed."""
        call = Call.of(node)
        old = node.meta.get("example_value")
        if call is None or not isinstance(old, torch.Tensor) or self._writes.touch(node):
            return False
        shape = (*fake(call.query).shape[:-1], fake(call.value).shape[-1])
        if list(map(str, shape)) != list(map(str, old.shape)) or any(type(n) is int and n == 0 for n in shape):
            return False  # the result's shape is not the query's (batch broadcasting), or it is empty
        if is_batchedtensor(fake(call.query)):
            return False
        made = copies(node)
        copied = not takes_any_strides(node) or len(made) > 1 or any(map(self._is_seen, made))
        if copied and not (is_static(node) and old.is_contiguous()):
            return False
        with self._graph.inserting_before(node):
            if (masked := self._padded(node, call) or self._spanned(node, call)) is not None:
                self._replace(node, masked, copied)
                return True
            new = self._with_groups(node, self._with_mask(node, call))
        if new == call:
            return False
        grouped = new.query is not call.query
        query = fake(new.query)
        shape = (*query.shape[:-1], fake(new.value).shape[-1])
        node.args = (new.query, new.key, new.value)
        node.kwargs = {k: v for k, v in vars(new).items() if k not in ("query", "key", "value") and v is not None}
        # The strides are unknown until PyTorch selects the kernel.
        node.meta["example_value"] = query.new_empty(shape)
        with self._graph.inserting_after(node):
            if grouped:
                self._after(node, "reshape", *old.shape)
            elif copied:
                self._after(node, "contiguous")
        for one in () if copied else made:  # a view of a result with other strides
            if one.target != "contiguous":
                with self._graph.inserting_after(one):
                    self._after(one, "contiguous")
        return True

    def _is_seen(self, copy: fx.Node) -> bool:
        """True if a copy of a result differs from a view of it: it is written in place, or is not contiguous."""
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
        """True if ``source`` cannot replace ``copy`` because one of them is written in place.

        For ``source`` this covers writes up to the call, or its backward; for ``copy``, writes before the call.
        """
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
        # A mask expanded over a symbolic batch does not depend on the batch: look at the mask before the expansion too.
        for one in dict.fromkeys((mask, unexpanded(mask), chosen, unexpanded(chosen))):
            hides = self._what_hides(one, square)
            if hides is not None:
                return replace(call, attn_mask=None, is_causal=hides == "what comes later")
        return replace(call, attn_mask=self._with_neighbours(chosen, node, keys))

    def _what_hides(self, mask: fx.Node, square: bool) -> Hides | None:
        """The :data:`Hides` of a mask; None if it is unknown or another pattern."""
        if (mask, square) not in self._hides:
            held = self._constants.of(mask)
            known = self._formula_hides(mask, square) if held is None else what_hides(held, square)
            self._hides[mask, square] = known
        return self._hides[mask, square]

    def _formula_hides(self, mask: fx.Node, square: bool) -> Hides | None:
        """The :data:`Hides` of a mask at any length, from its formula."""
        formula = self._formulas.of(mask)
        if formula is None:
            return None
        found: Hides | None = "what comes later" if square and formula.element == is_not_later() else None
        if formula.element is True or (fake(mask).is_floating_point() and formula.element == 0):
            found = "nothing"
        if found is not None:
            self._formulas.rely_on(formula)
        return found

    def _chosen(self, mask: fx.Node, node: fx.Node) -> fx.Node:
        """The branch that the mask's ``where`` selects for every element, else the mask."""
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
            return mask  # the other branch's gradient is zeros, and would become None
        alike = fake(branch).ndim == 4 and fake(branch).dtype == fake(mask).dtype
        if not alike or not self._contexts.alike(mask, node) or self._written(branch, mask, node):
            return mask
        if held is None and formula is not None:
            self._formulas.rely_on(formula)
        return branch

    def _with_neighbours(self, mask: fx.Node, node: fx.Node, keys: Any) -> fx.Node:
        """The mask with stride 1 along the keys, as fused kernels require it."""
        value = fake(mask)
        if value.ndim != 4 or type(value.stride(-1)) is not int or type(keys) is not int or keys == 1:
            return mask  # with a symbolic number of keys, kernels for masks would be compiled for several numbers
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
        if not value.requires_grad:  # the backward of ``narrow`` would put a gradient at one index alone
            for d in range(3):
                if type(value.stride(d)) is int and value.stride(d) == 0:
                    whole = self._method(node, "narrow", whole, d, 0, 1)
        if type(value.shape[-1]) is int and value.shape[-1] == 1:
            whole = self._method(node, "expand", whole, -1, -1, -1, keys)
        return self._method(node, "contiguous", whole)

    # Masks that are inputs

    def _padded(self, node: fx.Node, call: Call) -> fx.Node | None:
        """The call by the lengths of a key mask; None if the mask is of another kind or no kernel accepts the call."""
        mask = call.attn_mask
        if mask is None or call.is_causal is not False or not self._is_plain(node, call) or fake(mask).ndim != 4:
            return None
        queries, keys = fake(call.query).shape[-2], fake(call.key).shape[-2]
        found = self._padding_of(mask, queries, keys) or self._handed_over(node, mask, queries, keys)
        if found is None or not self._contexts.alike(node, *found.passed):
            return None
        if any(self._written(found.valid, one, node) for one in found.passed):
            return None
        given, scale = self._operands(node, call)
        query, key, value = map(fake, given)
        kernel = kernel_of(query, key, value, found.causal, found.window, call.dropout_p, scale)
        if kernel is None:
            return None
        valid, *bounds = self._bounds_of(node, found, query.shape[0], queries)
        how = found.causal, found.window, float(call.dropout_p), scale, kernel
        return self._function(node, torch.ops.autotune.padded_attention.default, *given, valid, *bounds, *how)

    def _operands(self, node: fx.Node, call: Call) -> tuple[tuple[fx.Node, fx.Node, fx.Node], float]:
        """The query, key and value without repeats, in the type that autocast would have given them, and the scale."""
        call, dtype = self._once_a_group(node, call), fake(node).dtype
        query, key, value = (self._of_type(node, n, dtype) for n in (call.query, call.key, call.value))
        return (query, key, value), fake(query).shape[-1] ** -0.5 if call.scale is None else float(call.scale)

    def _padding_of(self, mask: fx.Node, queries: int, keys: int) -> Padding | None:
        """:func:`padding_of`, cached for all layers."""
        asked = mask, queries, keys
        if asked not in self._paddings:
            self._paddings[asked] = padding_of(mask, queries, keys, self._constants)
        return self._paddings[asked]

    def is_causal(self, mask: fx.Node) -> bool | None:
        """Return True for a key mask with a causal triangle, False for one without, None for any other mask."""
        if fake(mask).ndim != 4 or fake(mask).dtype != torch.bool or not is_static(mask):
            return None
        found = self._padding_of(mask, *fake(mask).shape[-2:])
        if found is None or found.window or any(map(self._writes.touch, found.passed)):
            return None
        return found.causal

    def _handed_over(self, node: fx.Node, mask: fx.Node, queries: int, keys: int) -> Padding | None:
        """The padding of a mask input whose structure the calling graph has proved.

        The mask's last query sees each valid key.
        """
        if mask not in self._causal or tuple(fake(mask).shape[1:]) != (1, queries, keys):
            return None
        last = self._last.get(mask)
        if last is None or not self._contexts.alike(last, node):
            last = self._last[mask] = self._method(node, "narrow", mask, 2, queries - 1, 1)
        return Padding(last, (mask,), self._causal[mask], 0)

    def _spanned(self, node: fx.Node, call: Call) -> fx.Node | None:
        """The call by spans; None if rows of the mask may not see one span of keys, or no kernel accepts the call."""
        mask = call.attn_mask
        if mask is None or call.is_causal is not False or not self._is_plain(node, call):
            return None
        queries, keys = fake(call.query).shape[-2], fake(call.key).shape[-2]
        if self._what_hides(mask, queries == keys) is not None or not self.sees_spans(mask):
            return None
        given, scale = self._operands(node, call)
        query, key, value = map(fake, given)
        if not has_spans(query, key, value, call.dropout_p):
            return None
        from autotune.compiler.capture.attention.spanned import SPANNED  # registers operators, which takes long

        spans = self._spans_of(node, mask, (query.shape[0], queries, keys))
        return None if spans is None else self._function(node, SPANNED, *given, *spans, scale)

    def sees_spans(self, mask: fx.Node) -> bool:
        """Return True if each row of a mask probably sees one span of keys, also if the calling graph computed it."""
        if mask not in self._seeing_spans:
            known = mask in self._spanned_inputs or is_of_documents(mask)
            self._seeing_spans[mask] = known or has_row_spans(mask, self._constants)
        return self._seeing_spans[mask]

    def _spans_of(self, node: fx.Node, mask: fx.Node, shape: tuple[int, int, int]) -> tuple[fx.Node, ...] | None:
        """The mask as [B, queries, keys], and its spans, cached for all calls; None if the mask differs by head."""
        value = fake(mask)
        if not is_static(mask) or value.dtype != torch.bool or value.ndim < 2 or tuple(value.shape[-2:]) != shape[1:]:
            return None
        if (value.ndim == 4 and value.shape[1] != 1 and value.stride(1) != 0) or (value.ndim == 3 and len(value) != 1):
            return None
        made = self._spans.get((mask, shape[0]))
        if made is None or not self._contexts.alike(made[0], node) or self._writes.between([mask], made[0], node):
            seen = mask
            if value.ndim != 3:
                seen = self._method(node, *(("select", mask, 1, 0) if value.ndim == 4 else ("unsqueeze", mask, 0)))
            if fake(seen).shape[0] != shape[0]:
                seen = self._method(node, "expand", seen, *shape)
            from autotune.compiler.capture.attention.spanned import SPANS

            spans = self._function(node, SPANS, seen)
            parts = [self._function(node, operator.getitem, spans, place) for place in range(3)]
            made = self._spans[mask, shape[0]] = node, (seen, *parts)
        return made[1]

    def _is_plain(self, node: fx.Node, call: Call) -> bool:
        """Return True for a call of four static axes and one batch, without a transformation of ``torch.func``."""
        given = [fake(n) for n in (call.query, call.key, call.value)]
        if not all(map(is_static, (node, call.query, call.key, call.value))) or call.attn_mask is None:
            return False
        if any(t.ndim != 4 for t in given) or any(map(is_functorch_wrapped_tensor, (*given, fake(call.attn_mask)))):
            return False
        if type(call.dropout_p) not in (int, float) or not isinstance(call.scale, float | int | None):
            return False
        (batch, heads, _, size), few = given[0].shape, given[1].shape[1]
        return given[1].shape == given[2].shape == (batch, few, given[1].shape[2], size) and heads % few == 0

    def _bounds_of(self, node: fx.Node, found: Padding, batch: int, queries: int) -> tuple[fx.Node, ...]:
        """The key mask as ``[B, keys]``, and its bounds, cached for all calls."""
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

    def _replace(self, node: fx.Node, result: fx.Node, copied: bool) -> None:
        """Replace a call by ``result``, whose strides may differ."""
        if copied:
            with self._graph.inserting_before(node):
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
        """The call with ``enable_gqa`` and without the repeats of keys and values, if it has such repeats."""
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
    """The :data:`Hides` of an attention mask; None for any other pattern.

    Args:
        mask: ``[..., queries, keys]``; a bool mask is True where a key is seen, a float mask is added to the scores.
        square: True if there are as many queries as keys, so that ``is_causal`` is applicable.
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

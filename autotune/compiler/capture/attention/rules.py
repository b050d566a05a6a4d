"""Rewrites of attention calls so that PyTorch selects a fused kernel.

``scaled_dot_product_attention`` selects its kernel from its arguments when a graph is traced. Libraries pass less
information under tracing than in eager mode. transformers 5 drops a mask that hides nothing, but not under a compiler.
BERT then passes a mask of ones whose last stride is 0, which no fused kernel accepts. Its attention becomes products in
fp32 with every score in memory (6.6 ms a layer of BERT-large's training on an H200; without the mask 0.6 ms).

These rules run on Dynamo's graph, before AOTAutograd. The results are those of the same formula:

- A mask that is constant at compile time and hides nothing is removed. A mask that hides exactly the later keys becomes
  ``is_causal``.
- A ``where`` with a constant condition is replaced by its branch, which exposes a bias of the model.
- A key mask that is an input becomes attention by lengths. A mask of packed documents and a sliding window become
  attention by spans (:mod:`.operators` has both).
- A mask or bias whose last stride is not 1 is made contiguous, once for all its readers.
- Keys and values repeated for groups of queries are passed once if PyTorch has a fused kernel for grouped queries. If
  it has none and a group has one position, as in decoding, the group's queries become positions of their key's head.

A rule looks through a node, or shares a copy, only if both run in the same PyTorch context
(:mod:`autotune.compiler.capture.attention.effects`): a tensor made under ``no_grad`` has no gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import fx
from torch._C._functorch import is_batchedtensor
from torch.nn.functional import scaled_dot_product_attention

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
)
from autotune.compiler.capture.attention.constants import Constants
from autotune.compiler.capture.attention.effects import Contexts, Writes, called
from autotune.compiler.capture.attention.formulas import Formulas, is_not_later
from autotune.compiler.capture.attention.masks import Masks

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


class _Walk(Masks):
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
        super().__init__(graph, writes, contexts, constants, formulas, causal, spanned)
        self._hides: dict[tuple[fx.Node, bool], Hides | None] = {}
        self._laid: dict[tuple[fx.Node, int], tuple[fx.Node, fx.Node]] = {}
        """By mask and number of keys: the call before which the mask was made contiguous, and the contiguous copy."""

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
        if isinstance(call.scale, int | float) and not call.scale > 0:
            return False  # fused kernels hide a score by -inf, or find the largest one, before they scale
        made = copies(node)
        copied = not takes_any_strides(node) or len(made) > 1 or any(map(self._is_seen, made))
        if copied and not (is_static(node) and old.is_contiguous()):
            return False
        with self._graph.inserting_before(node):
            if (masked := self._masked(node, call)) is not None:
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

    # Masks

    def _masked(self, node: fx.Node, call: Call) -> fx.Node | None:
        """The call by lengths or by spans; None if its mask is of another kind, or none is needed."""
        mask = call.attn_mask
        if mask is None or call.is_causal is not False or not self._is_plain(node, call):
            return None
        if (padded := self._padded(node, call, mask)) is not None:
            return padded
        square = same_length(fake(call.query).shape[-2], fake(call.key).shape[-2])
        return self._spanned(node, call, mask) if self._what_hides(mask, square) is None else None

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
        """The branch that the mask's ``where`` selects for every element, also behind ``contiguous``; else the mask."""
        choice = mask
        if mask.target == "contiguous" and isinstance(mask.args[0], fx.Node) and is_static(mask):
            choice = mask.args[0]
        if choice.target not in (torch.where, "where") or len(choice.args) != 3 or choice.kwargs:
            return mask
        condition, yes, no = (
            choice.args if choice.target is torch.where else (choice.args[1], choice.args[0], choice.args[2])
        )
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
        if not alike or not self._contexts.alike(choice, mask, node) or self._written(branch, choice, node):
            return mask
        if choice is not mask and self._written(choice, mask, node):
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

    def _with_groups(self, node: fx.Node, call: Call) -> Call:
        if call.is_causal not in (False, True) or not all(map(is_static, (call.query, call.key, call.value))):
            return call
        grouped = self._once_a_group(node, call)
        if grouped is call:
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

"""Rules for masks that come with the data: attention by lengths and by spans (:mod:`.operators`).

That module is imported for a call that is rewritten: registering operators takes tens of milliseconds.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._C._functorch import is_functorch_wrapped_tensor

from autotune.compiler.capture.attention.calls import (
    Call,
    exceeds,
    expression,
    fake,
    path,
    same_length,
    same_shape,
    unrepeated,
)
from autotune.compiler.capture.attention.constants import Constants
from autotune.compiler.capture.attention.effects import Contexts, Edits, Writes
from autotune.compiler.capture.attention.formulas import Formulas
from autotune.compiler.capture.attention.kernels import has_spans, kernel_of
from autotune.compiler.capture.attention.recognition import Padding, has_row_spans, is_of_documents, padding_of


class Masks(Edits):
    """Replacement of calls whose mask is known when they run; all calls share lengths and spans.

    Args:
        graph: a Dynamo graph.
        writes: its in-place writes.
        contexts: the PyTorch contexts of its nodes.
        constants: its constant tensors.
        formulas: the formulas of its tensors.
        causal: for inputs that are key masks by the calling graph, True if they have a triangle.
        spanned: inputs whose rows see spans by the calling graph.
    """

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
        super().__init__(graph, writes, contexts)
        self._constants, self._formulas = constants, formulas
        self._causal, self._spanned_inputs = causal, spanned
        self._paddings: dict[tuple[fx.Node, Any, Any], Padding | None] = {}
        self._seeing_spans: dict[fx.Node, bool] = {}
        self._last: dict[fx.Node, fx.Node] = {}
        """The last row of each mask that is a graph input."""
        self._bounds: dict[tuple[fx.Node, bool, Any], tuple[fx.Node, tuple[fx.Node, ...]]] = {}
        """By key mask, structure and number of queries: the first call that needed the bounds, and the bounds."""
        self._spans: dict[tuple[fx.Node, Any], tuple[fx.Node, tuple[fx.Node, ...]]] = {}
        """By mask and batch: the first call that needed the spans, and the mask [B, queries, keys] with its spans."""

    def _padded(self, node: fx.Node, call: Call, mask: fx.Node) -> fx.Node | None:
        """The call by the lengths of a key mask; None if the mask is of another kind or no kernel accepts the call."""
        if fake(mask).ndim != 4:
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
        if kernel is None or (bounded := self._bounds_of(node, found, given[0])) is None:
            return None
        for formula in found.formulas:
            self._formulas.rely_on(formula)
        from autotune.compiler.capture.attention.operators import PADDED

        valid, *bounds = bounded
        how = found.causal, found.window, float(call.dropout_p), scale, kernel
        return self._function(node, PADDED, *given, valid, *bounds, *how)

    def _operands(self, node: fx.Node, call: Call) -> tuple[tuple[fx.Node, fx.Node, fx.Node], float]:
        """The query, key and value without repeats, in the type that autocast would have given them, and the scale."""
        call, dtype = self._once_a_group(node, call), fake(node).dtype
        query, key, value = (self._of_type(node, n, dtype) for n in (call.query, call.key, call.value))
        return (query, key, value), fake(query).shape[-1] ** -0.5 if call.scale is None else float(call.scale)

    def _padding_of(self, mask: fx.Node, queries: Any, keys: Any) -> Padding | None:
        """:func:`padding_of`, cached for all layers."""
        asked = mask, expression(queries), expression(keys)
        if asked not in self._paddings:
            self._paddings[asked] = padding_of(mask, queries, keys, self._constants, self._formulas)
        return self._paddings[asked]

    def is_causal(self, mask: fx.Node) -> bool | None:
        """Return True for a key mask with a causal triangle, False for one without, None for any other mask."""
        if fake(mask).ndim != 4 or fake(mask).dtype != torch.bool:
            return None
        found = self._padding_of(mask, *fake(mask).shape[-2:])
        if found is None or found.window or any(map(self._writes.touch, found.passed)):
            return None
        for formula in found.formulas:
            self._formulas.rely_on(formula)
        return found.causal

    def _handed_over(self, node: fx.Node, mask: fx.Node, queries: Any, keys: Any) -> Padding | None:
        """The padding of a mask input whose structure the calling graph has proved.

        The mask's last query sees each valid key.
        """
        if mask not in self._causal or not same_shape(fake(mask).shape[1:], (1, queries, keys)):
            return None
        last = self._last.get(mask)
        if last is None or not self._contexts.alike(last, node):
            last = self._last[mask] = self._method(node, "narrow", mask, 2, -1, 1)
        return Padding(last, (mask,), self._causal[mask], 0)

    def _spanned(self, node: fx.Node, call: Call, mask: fx.Node) -> fx.Node | None:
        """The call by spans; None if rows of the mask may not see one span of keys, or no kernel accepts the call."""
        queries, keys = fake(call.query).shape[-2], fake(call.key).shape[-2]
        if not self.sees_spans(mask):
            return None
        given, scale = self._operands(node, call)
        query, key, value = map(fake, given)
        if not has_spans(query, key, value, call.dropout_p):
            return None
        from autotune.compiler.capture.attention.operators import SPANNED

        if not same_shape(fake(mask).shape[-2:], (queries, keys)):
            return None
        spans = self._spans_of(node, mask, given[0])
        return None if spans is None else self._function(node, SPANNED, *given, *spans, scale)

    def sees_spans(self, mask: fx.Node) -> bool:
        """Return True if each row of a mask probably sees one span of keys, also if the calling graph computed it."""
        if mask not in self._seeing_spans:
            known = mask in self._spanned_inputs or is_of_documents(mask)
            self._seeing_spans[mask] = known or has_row_spans(mask, self._constants, self._formulas)
        return self._seeing_spans[mask]

    def _spans_of(self, node: fx.Node, mask: fx.Node, query: fx.Node) -> tuple[fx.Node, ...] | None:
        """The mask as [B, queries, keys], and its spans, cached for all calls; None if the mask differs by head."""
        value, batch = fake(mask), fake(query).shape[0]
        if value.dtype != torch.bool or value.ndim < 2 or (value.ndim == 3 and not same_length(value.shape[0], 1)):
            return None
        if value.ndim == 4 and not same_length(value.shape[1], 1) and not same_length(value.stride(1), 0):
            return None
        if value.ndim == 4 and not any(same_length(value.shape[0], n) for n in (1, batch)):
            return None
        made = self._spans.get((mask, expression(batch)))
        if made is None or not self._contexts.alike(made[0], node) or self._writes.between([mask], made[0], node):
            seen = mask
            if value.ndim != 3:
                seen = self._method(node, *(("select", mask, 1, 0) if value.ndim == 4 else ("unsqueeze", mask, 0)))
            if not same_length(fake(seen).shape[0], batch):
                seen = self._method(node, "expand", seen, self._size(node, query, 0), -1, -1)
            from autotune.compiler.capture.attention.operators import SPANS

            spans = self._function(node, SPANS, seen)
            parts = [self._function(node, operator.getitem, spans, place) for place in range(3)]
            made = self._spans[mask, expression(batch)] = node, (seen, *parts)
        return made[1]

    def _is_plain(self, node: fx.Node, call: Call) -> bool:
        """Return True for a call of four axes and one batch, without a transformation of ``torch.func``."""
        given = [fake(n) for n in (call.query, call.key, call.value)]
        if call.attn_mask is None or any(map(is_functorch_wrapped_tensor, (*given, fake(call.attn_mask)))):
            return False
        if any(t.ndim != 4 for t in given):
            return False
        if type(call.dropout_p) not in (int, float) or not isinstance(call.scale, float | int | None):
            return False
        (batch, heads, queries, size), (few, keys) = given[0].shape, given[1].shape[1:3]
        if not all(type(n) is int for n in (heads, few, size)):
            return False
        # An empty axis has no spans. A kernel that takes a symbol has to take each of its values, and cuDNN takes no 1.
        if not all(exceeds(n, 0 if type(n) is int else 1) for n in (batch, queries, keys)):
            return False
        return all(same_shape(t.shape, (batch, few, keys, size)) for t in given[1:]) and heads % few == 0

    def _bounds_of(self, node: fx.Node, found: Padding, query: fx.Node) -> tuple[fx.Node, ...] | None:
        """The key mask as ``[B, keys]``, and its bounds, cached for all calls; None if its batch may be another one."""
        batch, queries = fake(query).shape[0], fake(query).shape[2]
        if not any(same_length(fake(found.valid).shape[0], n) for n in (1, batch)):
            return None
        known = found.valid, found.causal, expression(queries)
        made = self._bounds.get(known)
        if made is None or not self._contexts.alike(made[0], node) or self._writes.between([known[0]], made[0], node):
            seen = self._method(node, "flatten", found.valid, 1)
            if not same_length(fake(seen).shape[0], batch):
                seen = self._method(node, "expand", seen, self._size(node, query, 0), -1)
            from autotune.compiler.capture.attention.operators import BOUNDS

            rows = self._size(node, query, 2)
            bounds = self._function(node, BOUNDS, seen, rows, found.causal)
            parts = [self._function(node, operator.getitem, bounds, place) for place in range(3)]
            made = self._bounds[known] = node, (seen, *parts)
        return made[1]

    def _once_a_group(self, node: fx.Node, call: Call) -> Call:
        """The call with ``enable_gqa`` and without the repeats of keys and values, if it has such repeats."""
        query = fake(call.query)
        key, value = unrepeated(call.key), unrepeated(call.value)
        if key is None or value is None or call.enable_gqa is not False or query.ndim != 4:
            return call
        (batch, few), heads = fake(key).shape[:2], query.shape[1]
        if not same_shape(fake(value).shape[:2], (batch, few)) or not same_length(query.shape[0], batch):
            return call
        if type(heads) is not int or type(few) is not int or heads % few:
            return call
        if self._written(key, call.key, node) or self._written(value, call.value, node):
            return call
        if not self._contexts.alike(node, *path(call.key, key), *path(call.value, value)):
            return call
        return replace(call, key=key, value=value, enable_gqa=True)

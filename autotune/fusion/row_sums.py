"""Log-softmax in training, with what its backward needs made again from its input and two numbers a row.

As one operator its result has to be kept for the backward, in fp32 mostly, and over a vocabulary that is the largest
tensor of a step: written once and read once for the loss's sake alone. Taken apart, with the loss that chooses among
it, a row's maximum and the logarithm of its sum are kept, and the partitioner finds that the rest comes cheaper from
the logits, which the matrix product has left in memory anyway. (torch.compile's own decompositions end up there too.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import fx

from autotune.fusion.calls import Calls, is_static, laid_out

aten = torch.ops.aten

_CHOICES = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)


def split_log_softmax(joint: fx.GraphModule) -> None:
    """Rewrite a graph of forward and backward in place; a log-softmax that no derivative reads stays."""
    graph = joint.graph
    backward = [n for n in graph.nodes if n.target is aten._log_softmax_backward_data.default]
    whole = {n: _origin(n.args[1]) for n in backward}
    found = {n: o for n, o in whole.items() if o.target is aten._log_softmax.default and is_static(o)}
    for node in dict.fromkeys(found.values()):
        for user in list(node.users):
            if user.target is aten.nll_loss_forward.default and user.args[2] is None and node.meta["val"].ndim == 2:
                _choose(graph, user)
        _replace(graph, node, _forward, anyhow=all(_takes_any_strides(u, found.keys()) for u in node.users))
    for node in found:
        _replace(graph, node, _backward, anyhow=False)
    if found:
        for node in list(graph.nodes):
            if node.target in _CHOICES and is_static(node.args[1]):
                _want_shape_only(graph, node)
        joint.recompile()


def _origin(node: Any) -> Any:
    """What a detached tensor is a name of."""
    while node.target in (aten.detach.default, aten.alias.default):
        node = node.args[0]
    return node


def _replace(graph: fx.Graph, node: fx.Node, parts: Callable[[Calls, fx.Node], fx.Node], *, anyhow: bool) -> None:
    """Put ``parts`` in a node's place, with its strides, unless ``anyhow``."""
    with graph.inserting_before(node):
        call = Calls(graph, node)
        made = parts(call, node)
        node.replace_all_uses_with(made if anyhow else laid_out(call, made, node.meta["val"]))
    graph.erase_node(node)


def _takes_any_strides(user: fx.Node, backward: Container[fx.Node]) -> bool:
    """Whether log-probabilities may come in other strides than the graph says."""
    if user.target in (aten.detach.default, aten.alias.default):
        return all(_takes_any_strides(u, backward) for u in user.users)
    return user in backward or user.target in (aten.nll_loss2d_forward.default, *_CHOICES)


def _forward(call: Calls, node: fx.Node) -> fx.Node:
    """``x - max(x) - log(sum(exp(x - max(x))))``, in fp32 where ``x`` is shorter."""
    given, dim = node.args[0], node.args[1]
    assert isinstance(given, fx.Node)
    short = given.meta["val"].dtype in (torch.float16, torch.bfloat16)
    x = call.to(given, torch.float32) if short else given
    shifted = call(aten.sub.Tensor, x, call(aten.amax.default, x, [dim], True))
    total = call(aten.sum.dim_IntList, call(aten.exp.default, shifted), [dim], True)
    return call.to(call(aten.sub.Tensor, shifted, call(aten.log.default, total)), node.meta["val"].dtype)


def _backward(call: Calls, node: fx.Node) -> fx.Node:
    """``grad - exp(output) * sum(grad)``, of an output that may be detached: a graph records no history."""
    grad, output, dim, dtype = node.args
    assert isinstance(grad, fx.Node)
    assert isinstance(dtype, torch.dtype)
    wide = torch.promote_types(grad.meta["val"].dtype, torch.float32)
    g = call.to(grad, wide)
    total = call(aten.sum.dim_IntList, g, [dim], True)
    likely = call(aten.exp.default, call.to(_origin(output), wide))
    return call.to(call(aten.sub.Tensor, g, call(aten.mul.Tensor, likely, total)), dtype)


def _choose(graph: fx.Graph, node: fx.Node) -> None:
    """``nll_loss_forward`` as arithmetic: to the partitioner the whole operator is one that reads from memory."""
    chances, target, _, reduction, ignored = node.args
    assert isinstance(chances, fx.Node)
    with graph.inserting_before(node):
        call = Calls(graph, node)
        keep = call(aten.ne.Scalar, target, ignored)
        column = call(aten.unsqueeze.default, call(aten.where.ScalarOther, keep, target, 0), 1)
        chosen = call(aten.squeeze.dim, call(aten.gather.default, chances, 1, column), 1)
        loss = call(aten.where.ScalarOther, keep, call(aten.neg.default, chosen), 0.0)
        count, dtype = call.zero(chances.meta["val"]), chances.meta["val"].dtype
        if reduction:
            wide = torch.promote_types(dtype, torch.float32)  # in fp16 the sum of some thousand losses is infinite
            number = call(aten.sum.default, call.to(keep, wide))
            loss = call(aten.sum.default, call.to(loss, wide))
            if reduction == 1:
                loss = call(aten.div.Tensor, loss, number)
            loss, count = call.to(loss, dtype), call.to(number, dtype)
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with((loss, count)[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)


def _want_shape_only(graph: fx.Graph, node: fx.Node) -> None:
    """Of the log-probabilities the derivative of a choice among them takes the shape; it need not keep them."""
    like = node.args[1]
    assert isinstance(like, fx.Node)
    value = like.meta["val"]
    with graph.inserting_before(node):
        call = Calls(graph, node)
        shape = call(aten.expand.default, call.zero(value), list(value.shape))
    node.update_arg(1, shape)

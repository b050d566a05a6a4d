"""The pass that joins products with functional collectives in Inductor's post-grad graphs.

DTensor writes sequence parallelism as an all-gather before matrix products, and as a reduce-scatter behind one. With
several batches the rows are in dimension 1, and it cuts and concatenates the gathered tensor. :func:`join_products`
replaces such nodes by the operators of :mod:`autotune.domains.c3.tensor_parallel.operators`, in forward and backward
graphs. A reduce-scatter begins before the products that do not need it. Two that are added become one.

It changes a graph only where a strategy is stored for the products' sizes, or while a search runs.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autotune.domains.c3.caller import NAMES
from autotune.domains.c3.tensor_parallel import operators  # noqa: F401  (registers the operators)
from autotune.domains.c3.tensor_parallel.sites import Site, sites
from autotune.errors import first_line
from autotune.runtime.deployment import deployment

log = logging.getLogger("autotune")
_aten: Any = torch.ops.aten
_functional: Any = torch.ops._c10d_functional
_joined: Any = torch.ops.autotune
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_SPLITS = (_aten.split.Tensor, _aten.split_with_sizes.default)


def join_products(graph: fx.Graph) -> int:
    """Replace collectives and products by joined operators. Never raises: errors are logged once.

    Returns:
        the number of collectives that were replaced.
    """
    changed = 0
    try:
        for node in list(graph.nodes):
            if node.target is _functional.all_gather_into_tensor.default:
                changed += _join_gather(graph, node)
        scatters = [found for node in graph.nodes if (found := _scatter(node)) is not None]
        for group in _added(scatters):
            changed += _join_scatters(graph, group)
        if changed:
            from torch._inductor.pattern_matcher import stable_topological_sort

            stable_topological_sort(graph)
            _erase(graph)
            graph.lint()
    except Exception as error:  # the graph's nodes compute the same, whether or not they were replaced
        text = f"autotune: products and collectives of a graph stay apart: {first_line(error)}"
        deployment().warn_once(f"join {type(error).__name__}", text)
        log.debug("the graph whose products stay apart: %s", graph, exc_info=True)
    return changed


def _erase(graph: fx.Graph) -> None:
    """Erase dead nodes, and collectives that nothing reads, which torch keeps for their side effects."""
    graph.eliminate_dead_code()
    for wait in [node for node in graph.nodes if node.target is _functional.wait_tensor.default and not node.users]:
        collective = wait.args[0]
        graph.erase_node(wait)
        if isinstance(collective, fx.Node) and not collective.users:
            graph.erase_node(collective)
    graph.eliminate_dead_code()


def _value(node: fx.Node) -> torch.Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    """The extents; None if some are symbols."""
    value = _value(node)
    if value is None or not all(isinstance(extent, int) for extent in value.shape):
        return None
    return tuple(int(extent) for extent in value.shape)


def _argument(node: fx.Node, number: int) -> Any:
    """An argument by its position, also if the graph passes it by name or leaves its default."""
    schema = node.target._schema.arguments[number]  # type: ignore[union-attr]
    if number < len(node.args):
        return node.args[number]
    return node.kwargs.get(schema.name, schema.default_value if schema.has_default_value() else None)


def _is_wanted(site: Site, node: fx.Node) -> bool:
    value = _value(node)
    return value is not None and sites.wants(site, value.device)


# ---- all-gather, then products --------------------------------------------------------------------------------------


def _join_gather(graph: fx.Graph, gather: fx.Node) -> int:
    shard, ranks, group = (_argument(gather, k) for k in range(3))
    shape, waits = _shape(shard), list(gather.users)  # torch 2.15 has one gather for equal ones, and each one's wait
    if shape is None or len(shape) not in (2, 3) or any(w.target is not _functional.wait_tensor.default for w in waits):
        return 0
    value = _value(shard)
    if value is None or value.dtype not in NAMES or ranks < 2:
        return 0
    found = [_whole(wait, shape, ranks) for wait in waits]
    batched = found[0][1]
    wholes = [whole for whole, by_batch in found if by_batch == batched]
    products = [
        mm
        for whole in wholes
        for matrix in _flattened(whole, shape[-1])
        for mm in matrix.users
        if (factor := _factor(mm, matrix)) is not None and not _depends(factor, gather)
    ]
    if not products:
        return 0
    factors = [mm.args[-1] for mm in products]
    width = sum(_extent(factor, 1) for factor in factors)
    rows = ranks * shape[-2] * (shape[0] if len(shape) == 3 else 1)
    if not _is_wanted(Site("all_gather", rows, width, shape[-1], NAMES[value.dtype], ranks, group), shard):
        return 0
    with graph.inserting_before(min(products)):
        given = shard if batched or len(shape) == 2 else _reshaped(graph, shard, (-1, shape[-1]))
        node = _call(graph, _joined.all_gather_matmul.default, given, factors, ranks, group)
        gathered = _item(graph, node, 0)
        results = _item(graph, node, 1)
        for k, mm in enumerate(products):
            made = _reshaped(graph, _item(graph, results, k), _shape(mm))
            if mm.target is _aten.addmm.default:
                made = _call(graph, _aten.add.Tensor, made, mm.args[0])
            mm.replace_all_uses_with(made)
        for whole in wholes:
            whole.replace_all_uses_with(_reshaped(graph, gathered, _shape(whole)))
    return 1


def _factor(product: fx.Node, matrix: fx.Node) -> Any:
    """The second factor of a product whose first one is ``matrix``, with a bias or without; else None."""
    if product.kwargs:
        return None
    if product.target is _aten.mm.default and product.args[0] is matrix:
        return product.args[1]
    if product.target is _aten.addmm.default and product.args[1] is matrix:
        return product.args[2]
    return None


def _whole(wait: fx.Node, shape: tuple[int, ...], ranks: int) -> tuple[fx.Node, bool]:
    """The node of all rows in the order of the products, and True if batches are in dimension 0 of it."""
    for user in wait.users:
        pieces = [user] if user.target is _aten.slice.Tensor else []
        if user.target in _SPLITS and _argument(user, 2) in (0, None):
            pieces = [item for item in user.users if item.target is operator.getitem]
        for piece in pieces:
            for cat in piece.users:
                if cat.target is _aten.cat.default and len(shape) == 3 and _argument(cat, 1) in (1, -2):
                    every = _argument(cat, 0)
                    if len(every) == ranks and all(_is_piece(p, wait, k, shape[0]) for k, p in enumerate(every)):
                        return cat, True
    return wait, False


def _is_piece(piece: fx.Node, wait: fx.Node, number: int, rows: int) -> bool:
    """True for rows ``number * rows`` to ``(number + 1) * rows`` of a tensor's dimension 0."""
    if piece.target is operator.getitem:
        split, found = piece.args
        assert isinstance(split, fx.Node)
        whole = _shape(wait) or ()
        return bool(split.args[0] is wait and found == number and _shape(piece) == (rows, *whole[1:]))
    if piece.target is not _aten.slice.Tensor:
        return False
    source, dim, begin, _, step = (_argument(piece, k) for k in range(5))
    right = source is wait and dim == 0 and (begin or 0) == number * rows and step == 1
    return right and _shape(piece) == (rows, *(_shape(wait) or ())[1:])


def _flattened(node: fx.Node, width: int) -> Iterator[fx.Node]:
    """The node and its views, those of which are matrices with ``width`` columns."""
    waiting = [node]
    while waiting:
        found = waiting.pop()
        shape = _shape(found)
        if shape is None or shape[-1] != width:
            continue
        if len(shape) == 2:
            yield found
        waiting += [user for user in found.users if user.target in _VIEWS]


def _depends(node: Any, on: fx.Node) -> bool:
    """True if a node is computed from another."""
    seen: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        found = waiting.pop()
        if found is on:
            return True
        if isinstance(found, fx.Node) and found not in seen and not found < on:
            seen.add(found)
            waiting += found.all_input_nodes
    return False


# ---- a product, then reduce-scatter ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scatter:
    """A product, the sum of it over the ranks, and the layout of its rows.

    Attributes:
        batches: batches of rows, if each is divided among the ranks; 0 if the rows are divided as a whole.
    """

    wait: fx.Node
    product: fx.Node
    batches: int
    ranks: int
    group: str


def _scatter(node: fx.Node) -> _Scatter | None:
    """The product that a reduce-scatter adds; None if it is not replaced."""
    if node.target is not _functional.reduce_scatter_tensor.default or _argument(node, 1) != "sum":
        return None
    source, _, ranks, group = (_argument(node, k) for k in range(4))
    wait, *more = node.users
    if more or wait.target is not _functional.wait_tensor.default or ranks < 2:
        return None
    batches = 0
    if source.target is _aten.cat.default and len(source.users) == 1:
        split = _cut_apart(source, ranks)
        if split is None:
            return None
        source = split.args[0]
        assert isinstance(source, fx.Node)
        shape = _shape(source)
        if shape is None or len(shape) != 3 or len(split.users) != ranks:
            return None
        batches = shape[0] if shape[0] > 1 else 0
    while source.target in _VIEWS and len(source.users) == 1 and _same_rows(source):
        source = source.args[0]
    if source.target is not _aten.mm.default or len(source.users) != 1:
        return None
    rows, value = _extent(source, 0), _value(source)
    if value is None or value.dtype not in NAMES or rows == 0 or rows % (ranks * max(batches, 1)):
        return None
    return _Scatter(wait, source, batches, ranks, group)


def _cut_apart(cat: fx.Node, ranks: int) -> fx.Node | None:
    """The split along dimension 1 whose parts are concatenated along dimension 0, in their order."""
    parts = _argument(cat, 0)
    if _argument(cat, 1) not in (0, None) or len(parts) != ranks:
        return None
    split = parts[0].args[0] if parts[0].target is operator.getitem else None
    if split is None or split.target not in _SPLITS or _argument(split, 2) not in (1, -2):
        return None
    shapes = {_shape(part) for part in parts}
    right = all(p.target is operator.getitem and p.args == (split, k) for k, p in enumerate(parts))
    return split if right and len(shapes) == 1 else None


def _same_rows(view: fx.Node) -> bool:
    """True if a view keeps the last dimension."""
    before, after = _shape(view.args[0]), _shape(view)  # type: ignore[arg-type]
    return before is not None and after is not None and before[-1] == after[-1]


def _added(scatters: list[_Scatter]) -> list[list[_Scatter]]:
    """Groups of scatters: two whose results are only added, and others alone."""
    by_wait = {found.wait: found for found in scatters}
    groups, taken = [], set[fx.Node]()
    for found in scatters:
        if found.wait in taken:
            continue
        group = [found]
        reader = next(iter(found.wait.users), None)
        if len(found.wait.users) == 1 and reader is not None and reader.target is _aten.add.Tensor:
            other = by_wait.get(next((n for n in reader.all_input_nodes if n is not found.wait), reader))
            if other is not None and len(other.wait.users) == 1 and not reader.kwargs and _alike(found, other):
                group.append(other)
        taken.update(member.wait for member in group)
        groups.append(group)
    return groups


def _alike(one: _Scatter, other: _Scatter) -> bool:
    same = (one.batches, one.ranks, one.group) == (other.batches, other.ranks, other.group)
    apart = not _depends(other.product, one.wait) and not _depends(one.product, other.wait)
    return same and apart and _shape(one.product) == _shape(other.product) and _shape(one.wait) == _shape(other.wait)


def _join_scatters(graph: fx.Graph, group: list[_Scatter]) -> int:
    first = group[0]
    left = [found.product.args[0] for found in group]
    factors = [found.product.args[1] for found in group]
    rows, width = _extent(first.product, 0), _extent(first.product, 1)
    inner = sum(_extent(factor, 0) for factor in factors)
    value = _value(first.product)
    assert value is not None
    site = Site("reduce_scatter", rows, width, inner, NAMES[value.dtype], first.ranks, first.group)
    if not _is_wanted(site, first.product):
        return 0
    target = first.wait if len(group) == 1 else next(iter(first.wait.users))
    given = [n for n in (*left, *factors) if isinstance(n, fx.Node)]
    place = max(given).next
    while place.op == "placeholder":
        place = place.next
    with graph.inserting_before(place):
        if first.batches:
            left = [_reshaped(graph, n, (first.batches, rows // first.batches, _extent(n, 1))) for n in left]
        parts = _call(graph, _joined.begin_matmul_scatter.default, left, factors, first.ranks, first.group)
    with graph.inserting_before(min(target.users, default=target)):
        end = _call(graph, _joined.end_matmul_scatter.default, parts, first.group)
        result = _reshaped(graph, end, _shape(target))
    target.replace_all_uses_with(result)
    return len(group)


# ---- nodes ----------------------------------------------------------------------------------------------------------


def _extent(node: Any, dim: int) -> int:
    shape = _shape(node)
    return shape[dim] if shape is not None else 0


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """A call with the fake tensors of its results."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.node.map_arg(args, lambda n: n.meta["val"]))
    return node


def _item(graph: fx.Graph, node: fx.Node, number: int) -> fx.Node:
    made = graph.call_function(operator.getitem, (node, number))
    made.meta["val"] = node.meta["val"][number]
    return made


def _reshaped(graph: fx.Graph, node: Any, shape: tuple[int, ...] | None) -> fx.Node:
    """The node with another shape; the same one if it has it."""
    assert shape is not None
    return node if _shape(node) == shape else _call(graph, _aten.reshape.default, node, list(shape))

"""Matrix products for which autotune selects a cuBLASLt algorithm, with the region after them as the epilogue.

torch uses the first algorithm from the library's heuristics. For wide products in half precision and many products in
TF32 another one is up to 20% faster (one H100, see ``benchmarks/notes/epilogues.md``). Epilogues are GELU and ReLU
after a bias, GELU's derivative, and the addition of a residual connection.

A region fits an epilogue if it reads one product, element by element, and has the formula of the epilogue
(:mod:`autotune.compiler.regions.formulas`).

A product, alone or with its region, is a workload of the domain ``product``. The region keeps its own workload; a
deployment chooses one of both. An epilogue may also compute the first part of a region: the sum that a norm follows, or
the gradient whose columns are summed. The rest is then a separate region.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autotune import numerics
from autotune.compiler.capture.options import requirements
from autotune.compiler.lower.facts import LIBRARY_CALL, GraphFacts
from autotune.compiler.regions import aten
from autotune.compiler.regions.find import Region, workload_of
from autotune.compiler.regions.formulas import Fit, fit_of
from autotune.compiler.regions.programs import placeholders
from autotune.errors import Unsupported
from autotune.ir.graph import SHORT
from autotune.workload import PRODUCT, Workload

aten_ops = torch.ops.aten
DEVICES = {"cuda"}
"""Types of devices whose library has epilogues."""
TYPES = (torch.bfloat16, torch.float16)
"""Types of products with a region. Products alone may be fp32 too, where TF32 is allowed."""
_ALIGNED = 16
"""The library reads rows at full speed if their length is a multiple of so many bytes."""
_LEAST_ROWS = 1024
"""Half-precision products without a region are candidates from this many rows on, with as many columns as terms or
more; others gained nothing. In TF32 the shape does not matter."""
_LEAST_WORK = 1e9
"""Floating-point operations from which a product in TF32 is a candidate, about 15 microseconds."""

ROLES = ("a", "b", "bias", "other")
RESULTS = ("y", "kept")


@dataclass(frozen=True, eq=False)
class Product:
    """A product, perhaps with a region that its epilogue computes, or with the first part of one.

    Attributes:
        product: the node of the product.
        nodes: all nodes that a call replaces.
        inputs: the nodes that the call reads, each once.
        outputs: the nodes whose values the call computes.
        workload: the workload of kind ``product``. Its source has ``roles``: for each of :data:`ROLES` an index in
            ``inputs``, or -1. It also has ``results``: for each of :data:`RESULTS` an index in ``outputs``, or -1.
        region: the region, whose workload has a separate schedule; None for a product alone.
        rest: the workload of the rest of the region; None if there is no rest or it has no workload.
    """

    product: fx.Node
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    workload: Workload
    region: Region | None = None
    rest: Workload | None = None

    @property
    def device(self) -> str:
        """ "cuda:N", where it is computed."""
        device = self.product.meta["val"].device
        return "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"

    @property
    def family(self) -> Workload:
        """The workload by which a step's verdict leaves it to Inductor: the region's, or its own."""
        region = self.region.workload if self.region else None
        return region or self.workload


def products_of(facts: GraphFacts, regions: Sequence[Region], library: str) -> list[Product]:
    """The products whose epilogues compute one of ``regions``, and the wide products, in this order.

    There is none while an option of Inductor's requires results that stored kernels do not compute.

    Args:
        library: names the library and its version, whose algorithms are counted; "" finds no product.
    """
    if not library or requirements():
        return []
    tf32 = numerics.read(["cuda"]).get("cuda.matmul.fp32_precision") == "tf32"
    types = (*TYPES, torch.float32) if tf32 else TYPES
    found = [_with_region(facts, region, library) for region in regions]
    found += [_alone(facts, node, library) for node in facts.nodes if _multiplies(facts, node, types)]
    return [product for product in found if product is not None]


def _with_region(facts: GraphFacts, region: Region, library: str) -> Product | None:
    if region.workload is None or region.workload.spec.get("precision"):
        return None
    for place, node in enumerate(region.inputs):
        if _multiplies(facts, node):
            kept = not facts.readers(node) <= set(region.nodes)
            fit = fit_of(region, place, facts[node].value.shape[1], kept)
            if fit is not None and not (kept and _is_needed(facts, region, node)):
                return _made(facts, region, node, kept, fit, library)
            added = None if kept else _addition(facts, region, node)
            if added is not None:
                return _cut(facts, region, node, *added, library)
    return None


def _addition(facts: GraphFacts, region: Region, product: fx.Node) -> tuple[str, fx.Node, list[fx.Node | None]] | None:
    """The sum of a product, an optional bias, and a tensor computed before the region: a residual connection.

    Returns:
        The epilogue, the node of the sum, and the nodes of the bias (None for the product's own) and the tensor.
    """
    like, inside, node, bias = facts[product].value, set(region.nodes), product, None
    while True:
        readers = facts.readers(node) if node is product or node in inside else set()
        (reader,) = readers if len(readers) == 1 else (None,)
        if reader is None or reader not in inside or reader.target is not aten_ops.add.Tensor or reader.kwargs:
            return None
        others = [n for n in reader.args if isinstance(n, fx.Node) and node not in facts.makers(n)]
        if len(others) != 1 or len(reader.args) != 2 or not _is_like(facts[reader].value, like):
            return None
        (other,) = others
        value = facts[other].value
        if not isinstance(value, torch.Tensor) or value.dtype != like.dtype or inside & set(facts.makers(other)):
            return None
        if value.shape == like.shape[1:] and bias is None and product.target is aten_ops.mm.default:
            bias, node = other, reader
            continue
        if value.shape != facts[reader].value.shape or not value.is_contiguous():
            return None
        biased = bias is not None or product.target is not aten_ops.mm.default
        return "bias_add" if biased else "add", reader, [bias, other]


def _is_like(value: Any, like: torch.Tensor) -> bool:
    """True for a tensor with the same elements in the same order as ``like``, such as a view of it."""
    same = isinstance(value, torch.Tensor) and value.dtype == like.dtype and value.shape[-1:] == like.shape[-1:]
    return same and value.numel() == like.numel() and value.is_contiguous()


def _alone(facts: GraphFacts, node: fx.Node, library: str) -> Product | None:
    *bias, a, b = node.args
    (rows, terms), columns = facts[a].value.shape, facts[b].value.shape[1]  # type: ignore[index]
    half = facts[node].value.dtype in TYPES
    if (rows < _LEAST_ROWS or columns < terms) if half else 2 * rows * terms * columns < _LEAST_WORK:
        return None
    inputs: list[Any] = list(dict.fromkeys(node.args))
    graph = fx.Graph()
    graph.output((graph.node_copy(node, placeholders(graph, facts, inputs).__getitem__),))
    roles = (inputs.index(a), inputs.index(b), inputs.index(bias[0]) if bias else -1, -1)
    workload = _workload(facts, node, "bias" if bias else "", graph, roles, (0, -1), library)
    return None if workload is None else Product(node, (node,), tuple(inputs), (node,), workload)


def _is_needed(facts: GraphFacts, region: Region, product: fx.Node) -> bool:
    """True if another input of a region is computed from the product: both cannot be one call then."""
    stack, seen = [n for n in region.inputs if n is not product], set[fx.Node]()
    while stack:
        node = stack.pop()
        if node is product:
            return True
        if node not in seen and facts.place[node] > facts.place[product]:
            seen.add(node)
            stack += node.all_input_nodes
    return False


def _multiplies(facts: GraphFacts, node: fx.Node, types: Sequence[torch.dtype] = TYPES) -> bool:
    """True for a plain product of two matrices, perhaps with a bias, that the library takes at full speed."""
    if facts[node].operator not in ("mm", "addmm") or facts[node].reason != LIBRARY_CALL:
        return False
    values = [facts[n].value for n in node.args if isinstance(n, fx.Node)]
    if node.kwargs or len(values) != len(node.args) or getattr(node.target, "_overloadname", "") != "default":
        return False
    like = facts[node].value
    if like.device.type not in DEVICES or like.dtype not in types or any(v.dtype != like.dtype for v in values):
        return False
    bias, (a, b) = values[:-2], values[-2:]
    if not all(type(n) is int and n for n in (*a.shape, *b.shape)):
        return False
    if any(n * like.element_size() % _ALIGNED for n in b.shape):
        return False
    if any(tuple(v.shape) != (b.shape[1],) or v.stride() != (1,) for v in bias):
        return False
    return like.is_contiguous() and all(_rows(t) is not None for t in (a, b))


def _rows(matrix: torch.Tensor) -> list[Any] | None:
    """The leading dimension of a matrix, and True if it is column-major; None if the library cannot read it."""
    (rows, columns), (down, along) = matrix.shape, matrix.stride()
    size = matrix.element_size()
    if along == 1 and down >= columns and down * size % _ALIGNED == 0:
        return [int(down), False]
    return [int(along), True] if down == 1 and along >= rows and along * size % _ALIGNED == 0 else None


def _made(facts: GraphFacts, region: Region, product: fx.Node, kept: bool, fit: Fit, library: str) -> Product | None:
    """The product joined with its region; None if their program cannot be stored."""
    factors = [n for n in product.args if isinstance(n, fx.Node)]
    slots = region.binding
    if fit.partial:
        result, other = region.outputs[slots.outputs[fit.y]], region.inputs[slots.inputs[fit.other]]
        return _cut(facts, region, product, fit.epilogue, result, [None, other], library)
    inputs = list(dict.fromkeys([*factors, *(n for n in region.inputs if n is not product)]))
    (results,) = (n.args[0] for n in region.submodule.graph.find_nodes(op="output"))
    program = _program(facts, region, product, inputs, results)
    if program is None:
        return None
    graph, env, _ = program
    alone = kept and fit.kept < 0  # it is read elsewhere, and the region does not make it
    graph.output((*(env[n] for n in results), *([env[product]] if alone else [])))

    def index_of(slot: int) -> int:
        return -1 if slot < 0 else inputs.index(region.inputs[slots.inputs[slot]])

    bias = inputs.index(factors[0]) if len(factors) == 3 else index_of(fit.bias)
    forward = fit.epilogue != "dgelu"
    if (bias >= 0) is not forward or (len(factors) == 3 and fit.bias >= 0):
        return None  # the library's GELU has one bias; its derivative has none
    roles = (inputs.index(factors[-2]), inputs.index(factors[-1]), bias, index_of(fit.other))
    y, before = (-1 if k < 0 else slots.outputs[k] for k in (fit.y, fit.kept))
    places = (y, len(region.outputs) if alone else before)
    workload = _workload(facts, product, fit.epilogue, graph, roles, places, library)
    outputs = (*region.outputs, product) if alone else region.outputs
    nodes = (product, *region.nodes)
    return None if workload is None else Product(product, nodes, tuple(inputs), tuple(outputs), workload, region)


def _cut(
    facts: GraphFacts,
    region: Region,
    product: fx.Node,
    epilogue: str,
    result: fx.Node,
    others: Sequence[fx.Node | None],
    library: str,
) -> Product | None:
    """The product and the part of its region that makes ``result``, which the rest of the region reads.

    Args:
        others: the bias, where it is none of the product's own, and the other matrix.
    """
    bias, other = others
    copies = {n.meta["origin"]: n for n in region.submodule.graph.nodes if "origin" in n.meta}
    if result not in copies or not all(facts[n].value.is_floating_point() for n in region.inputs):
        return None
    factors = [n for n in product.args if isinstance(n, fx.Node)]
    inputs = list(dict.fromkeys([*factors, *(n for n in (bias, other) if n is not None)]))
    part = _program(facts, region, product, inputs, [copies[result]])
    rest, shares = _rest(facts, region, copies[result], inputs)
    if part is None or rest is None:
        return None
    first, env, needed = part
    first.output((env[copies[result]],))
    roles = [inputs.index(n) for n in factors[-2:]]
    own = factors[0] if len(factors) == 3 else bias
    roles += [-1 if n is None else inputs.index(n) for n in (own, other)]
    workload = _workload(facts, product, epilogue, first, tuple(roles), (0, -1), library)
    if workload is None or region.workload is None:
        return None
    try:
        behind = {"program": aten.to_json(rest), "shares": shares, "is_read": result in region.outputs}
        left: Workload | None = workload_of(rest)[0]
    except Unsupported:
        return None
    spec = {**workload.spec, "behind": region.workload.fingerprint}
    workload = replace(workload, spec=spec, source={**workload.source, "rest": behind})
    nodes = (product, *(n for n in region.nodes if copies.get(n) in needed))
    return Product(product, nodes, tuple(inputs), (result,), workload, region, left)


def _program(
    facts: GraphFacts, region: Region, product: fx.Node, inputs: Sequence[fx.Node], results: Sequence[fx.Node]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node], set[fx.Node]] | None:
    """A product and the calls of its region's submodule that make ``results``; None if they read more than ``inputs``.

    Returns:
        The program without its output, the copies of the product and of the submodule's nodes, and the nodes needed.
    """
    graph, inner = fx.Graph(), region.submodule.graph
    made = placeholders(graph, facts, inputs)
    made[product] = graph.node_copy(product, made.__getitem__)
    made[product].meta = {"val": facts[product].value}
    given = zip(inner.find_nodes(op="placeholder"), region.inputs, strict=True)
    env = {product: made[product], **{theirs: made[n] for theirs, n in given if n in made}}
    env |= {n: made[n.meta["origin"]] for n in inner.nodes if n.meta.get("origin") in made}  # a view that it makes, too
    needed = _ancestors(results, env.keys())
    for n in inner.nodes:
        if n in needed and n not in env:
            if n.op != "call_function":
                return None
            env[n] = graph.node_copy(n, env.__getitem__)
    return graph, env, needed


def _rest(
    facts: GraphFacts, region: Region, result: fx.Node, inputs: Sequence[fx.Node]
) -> tuple[fx.GraphModule | None, list[int]]:
    """The region's program from ``result`` on, which is its last input; and the index in ``inputs``, or -1, of each
    other input."""
    graph, inner = fx.Graph(), region.submodule.graph
    made = placeholders(graph, facts, region.inputs)
    env = dict(zip(inner.find_nodes(op="placeholder"), made.values(), strict=True))
    env[result] = graph.placeholder("y")
    env[result].meta = {"val": facts[result.meta["origin"]].value}
    outputs: list[fx.Node] = []
    for n in inner.nodes:
        if n.op == "call_function" and n is not result:
            env[n] = graph.node_copy(n, env.__getitem__)
        elif n.op == "output":
            outputs = [env[one] for one in n.args[0] if one is not result]
    if not outputs:
        return None, []
    graph.output(tuple(outputs))
    graph.eliminate_dead_code()
    used = [n for n, copy in made.items() if copy.users]
    for copy in [copy for copy in made.values() if not copy.users]:
        graph.erase_node(copy)
    shares = [inputs.index(n) if n in inputs else -1 for n in used]
    return fx.GraphModule(torch.nn.Module(), graph), shares


def _ancestors(nodes: Sequence[fx.Node], ends: Container[fx.Node]) -> set[fx.Node]:
    found, stack = set(nodes), [*nodes]
    while stack:
        for n in stack.pop().all_input_nodes:
            if n not in found:
                found.add(n)
                stack += [] if n in ends else [n]
    return found


def _workload(
    facts: GraphFacts,
    product: fx.Node,
    epilogue: str,
    graph: fx.Graph,
    roles: tuple[int, ...],
    results: tuple[int, ...],
    library: str,
) -> Workload | None:
    """The workload of a product whose program is ``graph``; None if that cannot be stored."""
    try:
        program = aten.to_json(fx.GraphModule(torch.nn.Module(), graph))
    except Unsupported:
        return None
    a, b = (facts[n].value for n in facts[product].factors)
    m, k, n = int(a.shape[0]), int(a.shape[1]), int(b.shape[1])
    dtype = str(a.dtype).removeprefix("torch.")
    spec = {"m": m, "n": n, "k": k, "a": _rows(a), "b": _rows(b), "dtype": dtype, "epilogue": epilogue}
    source = {**program, "roles": list(roles), "results": list(results)}
    label = f"{facts[product].operator}{'+' * bool(epilogue)}{epilogue} {SHORT[dtype]} {m}x{k}x{n}"
    return Workload(PRODUCT, {**spec, "library": library}, label=label, source=source)

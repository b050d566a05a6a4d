"""Programs of regions: modules of their operators, and Inductor's code of such a module.

A program has copies of the free nodes between its region's operators. A search compares stored kernels with Inductor's
code of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from autotune.compiler.lower.facts import GraphFacts


def program_of(
    facts: GraphFacts,
    members: AbstractSet[fx.Node],
    outputs: Sequence[fx.Node],
    copied: AbstractSet[fx.Node],
    parts: Mapping[fx.Node, int] | None = None,
) -> tuple[list[fx.Node], fx.GraphModule]:
    """The inputs of a region, and a module that computes its results from them.

    Args:
        members: the nodes that the region may compute.
        outputs: those of them that it stores.
        copied: the nodes that every region which reads them computes.
        parts: the number of each member's part, for joined regions. Each part has its own copies of generated tensors,
            which would connect independent parts.
    """
    inside, needed = set(outputs), set[fx.Node]()
    stack = list(outputs)
    while stack:
        for n in stack.pop().all_input_nodes:
            chosen = inside if n in members else needed if facts[n].is_free or n in copied else None
            if chosen is not None and n not in chosen:
                chosen.add(n)
                stack.append(n)
    needed = _without_windows(facts, inside, needed, copied)
    body = sorted(inside | needed, key=facts.place.__getitem__)
    inputs = list(dict.fromkeys(i for n in body for i in n.all_input_nodes if i not in inside and i not in needed))
    graph = fx.Graph()
    env = placeholders(graph, facts, inputs)
    generated = _generated(facts, needed) if parts else set[fx.Node]()
    own: dict[tuple[fx.Node, int | None], fx.Node] = {}

    def copy(n: fx.Node, part: int | None) -> fx.Node:
        made = graph.node_copy(n, lambda a: argument(a, part))
        made.meta = {"val": facts[n].value, "origin": n, "original_aten": n.meta.get("original_aten")}
        return made

    def argument(n: fx.Node, part: int | None) -> fx.Node:
        if n not in generated:
            return env[n]
        if (n, part) not in own:
            own[n, part] = copy(n, part)
        return own[n, part]

    for n in body:
        if n not in generated:
            env[n] = copy(n, (parts or {}).get(n))
    graph.output(tuple(env[n] for n in outputs))
    with _use_lazy_graph_module(True):  # few submodules are called, and Python code takes a third of the search
        return inputs, _make_graph_module(torch.nn.Module(), graph)


def placeholders(graph: fx.Graph, facts: GraphFacts, nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The inputs of a new program, one for each of ``nodes``."""
    made = {n: graph.placeholder(f"x{k}") for k, n in enumerate(nodes)}
    for n, copy in made.items():
        copy.meta = {"val": facts[n].value}
    return made


def _generated(facts: GraphFacts, nodes: AbstractSet[fx.Node]) -> set[fx.Node]:
    """Those of some nodes that are free and depend on no tensor of the graph, such as numbers of elements."""
    found: set[fx.Node] = set()
    for n in sorted(nodes, key=facts.place.__getitem__):
        if facts[n].is_free and found.issuperset(n.all_input_nodes):
            found.add(n)
    return found


def _without_windows(
    facts: GraphFacts, inside: AbstractSet[fx.Node], needed: AbstractSet[fx.Node], copied: AbstractSet[fx.Node]
) -> set[fx.Node]:
    """``needed`` without views that slice a tensor, if the region reads only that slice of it.

    The slice is then the region's input, and its offset is not in the workload. So the steps of an unrolled
    recurrence, each with its slice of one projection, are one workload.
    """
    out = set(needed)
    body = inside | needed
    sources = dict.fromkeys(i for n in body for i in n.all_input_nodes if i not in body)
    for source in sources:
        chain, window, node = list[fx.Node](), 0, source
        # Follow single readers, up to the nodes that the region copies, which no other node computes.
        while len(users := [u for u in node.users if u in body]) == 1 and users[0] in needed - copied:
            if users[0].all_input_nodes != [node]:
                break
            node = users[0]
            chain.append(node)
            window = len(chain) if facts[node].is_window else window
        if window and facts[chain[window - 1]].is_aligned_in(facts[source]):
            out -= set(chain[:window])
    return out


def compile_bare(gm: fx.GraphModule, examples: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Compile an aten module by Inductor, as a function of its inputs without Dynamo's and AOTAutograd's wrappers.

    A stored kernel runs inside such wrappers as well, so a comparison omits them. If the inner code takes or returns
    other tensors than the module, AOTAutograd's whole code is returned.

    Raises:
        Exception: any error of Inductor's.
    """
    from torch._functorch import config as aot_config
    from torch._inductor import compile_fx

    bare: list[Any] = []

    def inner(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        made = compile_fx.compile_fx_inner(module, inputs, **kwargs)
        bare.append((made, len(inputs)))
        return made

    # AOTAutograd's cache would return earlier code without calling ``inner``.
    with torch.no_grad(), aot_config.patch(enable_autograd_cache=False):
        whole: Any = compile_fx.compile_fx(gm, list(examples), inner_compile=inner)
        want = _tensors(whole(*examples))
        if len(bare) == 1 and bare[0][1] == len(examples):
            code = bare[0][0]
            try:
                same = _alike(_tensors(code(list(examples))), want)
            except Exception:
                same = False
            if same:
                return lambda *inputs: code(list(inputs))
    return whole  # type: ignore[no-any-return]


def compile_cached(gm: fx.GraphModule, examples: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Compile an aten module by Inductor directly, with a cache on disk that fake and real inputs share.

    Args:
        examples: real tensors, or fake tensors of :func:`fake_mode`; Inductor's cache requires that mode.

    Raises:
        Exception: any error of Inductor's.
    """
    from torch._inductor.compile_fx import compile_fx

    mode = fake_mode()
    fakes = [t if isinstance(t, FakeTensor) else mode.from_tensor(t, static_shapes=True) for t in examples]
    with torch.no_grad():
        made: Any = compile_fx(gm, fakes)
    return made  # type: ignore[no-any-return]


def fake_mode() -> FakeTensorMode:
    """The mode of tensors without data that :func:`compile_cached` takes."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def _tensors(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _alike(got: Sequence[Any], want: Sequence[Any]) -> bool:
    return len(got) == len(want) and all(
        isinstance(a, torch.Tensor)
        and a.shape == b.shape
        and a.dtype == b.dtype
        and torch.allclose(a, b, equal_nan=True)
        for a, b in zip(got, want, strict=True)
    )

"""From an aten graph and the regions that run stored kernels to one callable.

The result is a Python function that fx writes: library calls stand in it as they are, stored kernels and pieces
compiled by Inductor are calls of functions, and every value is let go after its last use.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autotune.runtime import contest
from autotune.runtime.inductor import compile_piece, piece_options
from autotune.runtime.partition import Cut, Piece, extract, is_mutation, pieces

try:
    from torch.fx.graph import _BoxedCodeGen
except ImportError:  # older torch: inputs then live until the call returns
    _BoxedCodeGen = None  # type: ignore[assignment, misc]

Boxed = Callable[[list[Any]], Sequence[Any]]
"""Takes its arguments in a list, which it empties."""

aten = torch.ops.aten
LIBRARY = frozenset(
    {
        aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.linear, aten._scaled_mm, aten._int_mm, aten.convolution,
        aten.convolution_backward, aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_backward, aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_efficient_attention_backward, aten._scaled_dot_product_cudnn_attention,
        aten._scaled_dot_product_cudnn_attention_backward, aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
        aten._scaled_dot_product_fused_attention_overrideable,
        aten._scaled_dot_product_fused_attention_overrideable_backward, aten._cudnn_rnn, aten.miopen_rnn,
        aten.max_pool2d_with_indices, aten._fft_r2c, aten._fft_c2r, aten._fft_c2c, aten.sort, aten.topk,
    }
)  # fmt: skip
"""Operators that Inductor would hand to the same library, or to the same kernel of torch."""


def assemble(gm: fx.GraphModule, cuts: Sequence[Cut], options: Mapping[str, Any]) -> Boxed:
    """One callable for an aten graph in which ``cuts`` run by their own functions.

    Args:
        gm: functional but for copies into its inputs, with ``meta["val"]`` on every node; as AOTAutograd makes it.
        cuts: disjoint regions.
        options: the backend's keyword arguments from the user, for Inductor.

    Raises:
        ValueError: the cuts cannot be run one after another.
    """
    patches = piece_options(options)
    order = pieces(gm.graph, cuts)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}

    def value(node: fx.Node) -> fx.Node:
        if node not in env and node.op == "get_attr":
            env[node] = graph.node_copy(node)
        return env[node]

    def call(function: Callable[..., Any], takes: Sequence[fx.Node], gives: Sequence[fx.Node]) -> None:
        result = graph.call_function(_printable(function), tuple(value(n) for n in takes))
        for k, node in enumerate(gives):
            env[node] = graph.call_function(operator.getitem, (result, k))

    for node in gm.graph.nodes:
        if node.op == "placeholder":
            env[node] = graph.placeholder(node.name)
    for item in order:
        if isinstance(item, Cut):
            call(item.run, item.inputs, item.outputs)
            continue
        compiled = _inductor(gm, item, patches)
        if compiled is not None:
            call(compiled, item.inputs, item.outputs)
        else:
            for node in item.nodes:
                env[node] = graph.node_copy(node, value)
    (output,) = gm.graph.find_nodes(op="output")
    graph.output(fx.map_arg(output.args[0], value))
    return _boxed(fx.GraphModule(gm, graph))


def straight(gm: fx.GraphModule, cuts: Sequence[Cut]) -> Callable[..., Sequence[Any]] | None:
    """A graph that is one region as a function of its inputs, one by one; None for any other.

    One call of a function where :func:`assemble` makes three: what an optimiser's step has of inputs and results is
    handed on as it is.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    (output,) = gm.graph.find_nodes(op="output")
    if len(cuts) != 1:
        return None
    (cut,) = cuts
    places = {n: k for k, n in enumerate(inputs)}
    if not (places.keys() >= {*cut.inputs} and {*cut.outputs} >= {*output.args[0]}):
        return None
    takes = ", ".join(f"x{places[n]}" for n in cut.inputs)
    made = f"run({takes})"
    lines = [f"return {made}"]
    if list(output.args[0]) != list(cut.outputs):
        lines = [f"y = {made}", f"return ({''.join(f'y[{cut.outputs.index(n)}], ' for n in output.args[0])})"]
    elif list(cut.inputs) == inputs:
        return cut.run
    # The text is made of numbers counted here alone.
    source = f"def call({', '.join(f'x{k}' for k in range(len(inputs)))}):\n" + "".join(f"    {s}\n" for s in lines)
    names: dict[str, Any] = {"run": cut.run}
    exec(compile(source, "<autotune graph>", "exec"), names)
    call: Callable[..., Sequence[Any]] = names["call"]
    return call


def leaves_nothing(gm: fx.GraphModule, nodes: Collection[fx.Node]) -> bool:
    """Whether all that an aten graph computes outside ``nodes`` runs as well without Inductor."""
    rest = (n for n in gm.graph.nodes if n.op not in ("placeholder", "output") and n not in nodes)
    return all(_is_trivial(node) for node in rest)


def _inductor(gm: fx.GraphModule, piece: Piece, patches: Mapping[str, Any]) -> Callable[..., Any] | None:
    """The piece compiled, or None where it runs as well without."""
    plain = all(_is_trivial(node) for node in piece.nodes)
    wants_library = bool(patches) and any(_is_library(node) for node in piece.nodes)  # max_autotune tunes mm too
    if plain and not wants_library:
        return None
    takes, gives = piece.inputs, piece.outputs
    if not gives and not any(is_mutation(n) for n in piece.nodes):
        return None
    if not all(isinstance(n.meta.get("val"), torch.Tensor) for n in (*takes, *gives)):
        return None
    module = extract(gm, piece.nodes, takes, gives)
    compiled = compile_piece(module, patches)
    if plain and compiled is not None and contest.wanted(patches) and contest.torch_is_faster(module, compiled):
        return None
    return compiled


def _is_library(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket in LIBRARY


def _is_trivial(node: fx.Node) -> bool:
    """A node for which Inductor would emit no kernel of its own: library calls, views, allocations, plain copies."""
    target = node.target
    if target is operator.getitem or node.op == "get_attr":
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target.overloadpacket in LIBRARY or target.overloadpacket in (aten.copy_, aten.clone, aten._unsafe_view):
        return True
    if target.overloadpacket in (aten.empty, aten.empty_strided, aten.sym_size):
        return True
    returns = target._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _printable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function in a form that fx holds as an object: of torch's own it would print the path."""
    if isinstance(function, types.FunctionType) and function.__module__.startswith("autotune."):
        return function

    def call(*args: Any) -> Any:
        return function(*args)

    return call


def _boxed(gm: fx.GraphModule) -> Boxed:
    if _BoxedCodeGen is not None:
        gm.graph.set_codegen(_BoxedCodeGen())
        gm.recompile()
        forward: Boxed = gm.forward
    else:
        plain = gm.forward

        def forward(args: list[Any]) -> Sequence[Any]:
            taken = tuple(args)
            args.clear()
            result: Sequence[Any] = plain(*taken)
            return result

    run: Any = functools.partial(forward)  # a method takes no attributes, and a function around it costs a frame a call
    run._boxed_call = True
    return run  # type: ignore[no-any-return]

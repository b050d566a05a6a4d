"""Autotune's passes in Inductor's compilation: the hooks that run them, and the rewrites of joint graphs.

A :class:`Hook` runs after the user's passes in the same place. Inductor calls :func:`prepare_joint` and
:func:`rewrite_joint` as its ``joint_custom_pre_pass`` and ``joint_custom_post_pass``, before the split into forward and
backward: on the joint graph in training and on the graph itself in inference. Search and deployment run the same
passes, so both see the same graphs. A graph with several streams is not changed: one stream could read a tensor shared
by a pass while another one computes it.

These passes make the decisions that no later hook can make. They generate random numbers, split complex arithmetic into
parts, and move constants to the device of their readers. They select the library call for a convolution or a product,
set the memory format between convolutions, and save the elements that a gradient compares.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor import config, custom_graph_pass
from torch._inductor.fx_passes.post_grad import remove_noop_ops
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.utils.checkpoint import CheckpointPolicy

from autotune.compiler.capture.complexes import split_parts
from autotune.compiler.capture.convolutions import multiply_patches, put_channels_last
from autotune.compiler.capture.depthwise import add_taps, convolve_gradients
from autotune.compiler.capture.extremes import save_compared, scale_before_maxima
from autotune.compiler.capture.options import requirements
from autotune.compiler.capture.products import align_products, share_pads
from autotune.compiler.capture.rewriting import Calls
from autotune.compiler.lower.nodes import stream_of, takes_gradients
from autotune.files import code_digest

aten, prims = torch.ops.aten, torch.ops.prims

_MULTIPLIERS = (-1640531535, -2048144789, -1028477387)  # 2**32 / the golden ratio, and murmur3's two, as int32
_SHIFTS = (16, 13, 16)
_MANTISSA = 24
"""Bits of a uniform random number, as many as float32 represents exactly."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DROPS_ROUNDING = torch.__version__ < "2.13"
"""Inductor's joint passes drop a conversion to a narrower float type whose result is converted back."""
DEVICES = {"cuda"}
"""Types of devices on which Inductor separates the bias of a convolution."""
_CONSTANTS = (aten.full.default, aten.scalar_tensor.default)
_COMPARISONS = (aten.gt.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.le.Scalar)
# A user's pass may take an is_inference argument; older torch has no such passes.
_Base: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", custom_graph_pass.CustomGraphPass)


class Hook(_Base):  # type: ignore[misc]
    """A pass of autotune that runs after the user's passes in the same hook.

    Args:
        run: changes a graph in place.
        identity: identifies everything that ``run`` depends on; a part of Inductor's cache keys. None disables caching.
        before: the user's setting: a pass, a list of passes, or None.
    """

    def __init__(self, run: Callable[[fx.Graph], None], identity: bytes | None, before: Any) -> None:
        self._run, self._identity = run, identity
        self._before = list(before) if isinstance(before, (list, tuple)) else [] if before is None else [before]

    def __call__(self, graph: fx.Graph, is_inference: bool = False) -> None:
        for theirs in self._before:
            if _Base is not custom_graph_pass.CustomGraphPass and isinstance(theirs, _Base):
                theirs(graph, is_inference)
            else:
                theirs(graph)
        self._run(graph)

    def uuid(self) -> Any:
        """The identities of all passes; None, which disables Inductor's caching, if one has no identity."""
        theirs = [p.uuid() if isinstance(p, custom_graph_pass.CustomGraphPass) else None for p in self._before]
        known = (self._identity, *theirs)
        return None if any(one is None for one in known) else known


def hooked(post_grad: Hook) -> dict[str, Any]:
    """Inductor's settings for ``post_grad`` and the rewrites of joint graphs that it depends on."""
    # No cache may return a graph that an older pass rewrote.
    identity = f"autotune joint {code_digest(Path(__file__).parent)}".encode()
    return {
        "joint_custom_pre_pass": Hook(prepare_joint, identity, config.joint_custom_pre_pass),
        "joint_custom_post_pass": Hook(rewrite_joint, identity, config.joint_custom_post_pass),
        "post_grad_custom_post_pass": post_grad,
        "layout_optimization": config.layout_optimization,  # a pass may change it, for its graph alone
    }


def prepare_joint(graph: fx.Graph) -> None:
    """Rewrite products of a graph before Inductor's joint passes, which would pad operands by copies, in place.

    Nothing is rewritten while an option requires results that this changes.

    Args:
        graph: functional aten and prims calls, with fake tensors in ``meta["val"]``.
    """
    gm = _rewritable(graph)
    if gm is None:
        return
    remove_noop_ops(graph)  # as Inductor does next: a product's operand may be a no-op view
    align_products(gm)
    if _DROPS_ROUNDING:
        hide_rounding(graph)


def rewrite_joint(graph: fx.Graph) -> None:
    """Rewrite a graph after Inductor's joint passes, in place, unless an option requires results that this changes.

    Args:
        graph: functional aten and prims calls, with fake tensors in ``meta["val"]``.
    """
    gm = _rewritable(graph)
    if gm is None:
        return
    stable_topological_sort(graph)  # Inductor sorts only at the end, after this pass
    if _DROPS_ROUNDING:
        show_rounding(graph)
    place_scalars(graph)
    scale_before_maxima(graph)
    split_parts(gm)
    if not getattr(config, "align_random_eager", False):  # torch 2.11 has no such option
        hash_random_numbers(graph)
    convolve_gradients(graph)
    add_taps(gm)
    multiply_patches(gm)
    share_pads(gm)
    joint = takes_gradients(graph)
    put_channels_last(gm, inference=not joint)
    if joint:
        takes_bias_apart(graph)  # autograd keeps the convolution's own result; its gradient adds the bias again
        save_compared(graph)


def _rewritable(graph: fx.Graph) -> fx.GraphModule | None:
    """The module of a graph; None if an option requires results that a rewrite changes, or the graph has streams."""
    assert graph.owning_module is not None
    if requirements() or any(stream_of(node) is not None for node in graph.nodes):
        return None
    return graph.owning_module


def hide_rounding(graph: fx.Graph) -> None:
    """Keep conversions to a narrower float type that are converted back, as Inductor does from torch 2.13 on.

    A region stores the narrow tensor for readers after a product. Without it each of them reads twice the bytes, which
    also stay allocated longer. Inductor's pattern does not match ``aten._to_copy``.
    """
    for node in list(graph.find_nodes(op="call_function", target=prims.convert_element_type.default)):
        narrow: Any = node.args[0]
        wide: Any = node.args[1]
        if narrow.target is prims.convert_element_type.default:
            dtype = narrow.args[1]
            if dtype in _FLOATS and wide in _FLOATS and dtype.itemsize < wide.itemsize:
                node.replace_all_uses_with(Calls(node)(aten._to_copy.default, narrow, dtype=wide))
                graph.erase_node(node)


def show_rounding(graph: fx.Graph) -> None:
    """Undo :func:`hide_rounding` after Inductor's joint passes."""
    for node in list(graph.find_nodes(op="call_function", target=aten._to_copy.default)):
        if [*node.kwargs] == ["dtype"]:
            node.replace_all_uses_with(
                Calls(node)(prims.convert_element_type.default, node.args[0], node.kwargs["dtype"])
            )
            graph.erase_node(node)


def place_scalars(graph: fx.Graph) -> None:
    """Compute constants without axes on the GPU of the operators that read them, and not on the CPU, in place.

    ``x / torch.tensor(8.0)`` has such a constant. torch allows it, and a region has tensors of one device only.
    """
    placed: dict[tuple[fx.Node, torch.device], fx.Node] = {}

    def on(device: torch.device, node: fx.Node) -> fx.Node:
        if (node, device) not in placed:
            args = fx.node.map_arg(node.args, lambda n: on(device, n))
            named = {**node.kwargs, "device": device} if node.target in _CONSTANTS else node.kwargs
            placed[node, device] = Calls(node)(node.target, *args, **named)  # type: ignore[arg-type]
        return placed[node, device]

    constants: set[fx.Node] = set()
    for node in list(graph.nodes):
        made, read = node.meta.get("val"), node.all_input_nodes
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) and bool(read)
        if not isinstance(made, torch.Tensor) or not (pointwise or node.target in _CONSTANTS):
            continue
        if made.device.type != "cpu":
            for constant in read:
                if constant in constants:
                    node.replace_input_with(constant, on(made.device, constant))
        elif made.ndim == 0 and constants.issuperset(read):
            constants.add(node)


def hash_random_numbers(graph: fx.Graph) -> None:
    """Replace uniform random numbers by a hash of an element's index and its operator's seed.

    Inductor draws one seed per operator and calls Philox for every element. The hash is plain integer arithmetic. Any
    kernel, of autotune or Inductor, can compute it, also again in the backward, with the same numbers. It is murmur3's
    finaliser (Appleby, 2011) on the index, with half of the seed mixed in before it and half in the middle.
    """
    for node in list(graph.nodes):
        if node.target is prims.inductor_random.default and _is_uniform(node):
            _compared_as_drawn(node, made := _uniform(Calls(node), node))
            node.replace_all_uses_with(made)
            graph.erase_node(node)


def _is_uniform(node: fx.Node) -> bool:
    size, _, mode = node.args
    count = node.meta["val"].numel()
    plain = type(count) is int and all(type(extent) is int for extent in size)  # type: ignore[union-attr]
    return mode == "rand" and not any(node.kwargs.values()) and plain and 0 < count < 2**31


def _uniform(call: Calls, node: fx.Node) -> fx.Node:
    size, seed = node.args[0], node.args[1]
    like = node.meta["val"]
    options = {"start": 0, "step": 1, "dtype": torch.int32, "device": like.device, "requires_grad": False}
    flat = call(prims.iota.default, like.numel(), **options)
    place = call(aten.reshape.default, flat, list(size))  # type: ignore[arg-type]
    for made in (flat, place):
        # All checkpoints share it, and torch would save what another checkpoint reads. Its computation costs nothing.
        made.meta.pop("recompute", None)

    def half(shift: int) -> fx.Node:
        shifted = call(aten.bitwise_right_shift.Tensor_Scalar, seed, shift) if shift else seed
        return call.to(call(aten.bitwise_and.Scalar, shifted, 2**31 - 1), torch.int32)

    def fold(h: fx.Node, shift: int) -> fx.Node:
        """``h ^ (h >> shift)`` with zeros shifted in; torch's shift of a signed number repeats the sign."""
        low = call(
            aten.bitwise_and.Scalar, call(aten.bitwise_right_shift.Tensor_Scalar, h, shift), 2 ** (32 - shift) - 1
        )
        return call(aten.bitwise_xor.Tensor, h, low)

    # The seed is mixed in first: a part without it would be computed once for all masks, and stored.
    h = call(aten.bitwise_xor.Tensor, place, half(0))
    h = call(aten.mul.Tensor, fold(call(aten.mul.Tensor, h, _MULTIPLIERS[0]), _SHIFTS[0]), _MULTIPLIERS[1])
    h = call(aten.add.Tensor, h, half(32))
    h = fold(call(aten.mul.Tensor, fold(h, _SHIFTS[1]), _MULTIPLIERS[2]), _SHIFTS[2])
    bits = call(aten.bitwise_and.Scalar, h, 2**_MANTISSA - 1)
    return call(aten.mul.Tensor, call.to(bits, torch.float32), 2.0**-_MANTISSA)


def _compared_as_drawn(node: fx.Node, made: fx.Node) -> None:
    """Compare the unrounded numbers if a program rounds them first, such as dropout in half precision.

    With rounding, the outcome for some elements would depend on the kernel that computes the comparison.
    """
    for user in list(node.users):
        rounds = user.target in (prims.convert_element_type.default, aten._to_copy.default)
        if rounds and user.users and all(u.target in _COMPARISONS for u in user.users):
            user.replace_all_uses_with(made)


def takes_bias_apart(graph: fx.Graph) -> None:
    """Write the bias of convolutions on CUDA as an addition, which can fuse with the following operators.

    Inductor's lowering does the same, but after the search for regions. (CPU convolutions add the bias themselves.)
    Capture and deployment both call this, for joint graphs before the split into forward and backward. If the user's
    checkpointing saves the convolution, then that is without its bias.
    """
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        bias, made = node.args[2], node.meta["val"]
        if bias is None or made.device.type not in DEVICES:
            continue
        call = Calls(node)
        alone = call(aten.convolution.default, *node.args[:2], None, *node.args[3:])
        added = call(aten.add.Tensor, alone, call(aten.reshape.default, bias, [-1] + [1] * (made.ndim - 2)))
        if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE:
            del added.meta["recompute"]
        node.replace_all_uses_with(added)
        graph.erase_node(node)

"""Dynamic shapes: one static version of the graph for each set of shapes met, beside Inductor's dynamic one.

Stored kernels are found by concrete shapes. When Dynamo hands over a graph with symbolic sizes (its default from the
second shape on), Inductor compiles that graph first, with all the guards it needs; then every new set of sizes gets a
static version, compiled with stored kernels where there are some; sizes without any run Inductor's version. Looking
costs a trace, so it is given up after a few sizes in a row without a hit.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autotune.runtime.counters import count
from autotune.runtime.inductor import compile_whole

LIMIT = 64
"""Static versions kept of one graph; further sizes run Inductor's dynamic version."""

PLAIN = (torch.Tensor, torch.nn.Parameter, torch._subclasses.FakeTensor)
"""Types of tensors whose operators are torch's own."""

PATIENCE = 3
"""Sizes in a row without a hit after which no more are looked up."""


def is_dynamic(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether a Dynamo graph has symbolic sizes."""
    return any(isinstance(x, torch.SymInt) for x in inputs) or any(_symbolic(n) for n in gm.graph.nodes)


def compile_dynamic(gm: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Compile a Dynamo graph with symbolic sizes; the result takes plain integers in their places."""
    static = copy.deepcopy(gm) if _can_be_static(gm) else None
    dynamic = compile_whole(gm, inputs, options)
    if static is None:
        return dynamic
    return _Specialised(static, dynamic, options).__call__


def _symbolic(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    if isinstance(value, torch.SymInt):
        return True
    return isinstance(value, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride()))


def _can_be_static(gm: fx.GraphModule) -> bool:
    """Whether the inputs decide every size (no ``nonzero``, no ``item()``), and no control flow hides more graphs."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    for node in gm.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return False
        value = node.meta.get("example_value")
        if isinstance(value, (torch.Tensor, torch.SymInt)) and free_unbacked_symbols(value):
            return False
    return all(n.type is not torch.SymFloat for n in gm.graph.find_nodes(op="placeholder"))


class _Specialised:
    """Dispatch by concrete sizes. Safe to call from several threads."""

    def __init__(self, gm: fx.GraphModule, dynamic: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._gm, self._dynamic, self._options = gm, dynamic, options
        places = list(gm.graph.find_nodes(op="placeholder"))
        values = [n.meta.get("example_value") for n in places]
        self._ints = tuple(k for k, v in enumerate(values) if isinstance(v, (torch.SymInt, int)))
        # Tensors of fixed shape are guarded by Dynamo; only the others need looking at.
        self._tensors = tuple(k for k, n in enumerate(places) if isinstance(values[k], torch.Tensor) and _symbolic(n))
        self._versions: dict[Any, Callable[..., Any]] = {}
        self._in_vain = 0
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        grad = torch.is_grad_enabled()
        key = (
            grad,
            tuple([args[k] for k in self._ints]),
            tuple([(args[k].shape, args[k].stride()) for k in self._tensors]),
        )
        run = self._versions.get(key)
        if run is None:
            run = self._specialise(key, args)
        return run(*args)

    def _specialise(self, key: Any, args: Sequence[Any]) -> Callable[..., Any]:
        from autotune.runtime.backend import compile_static

        with self._lock:
            found = self._versions.get(key)
            if found is not None:
                return found
            if len(self._versions) >= LIMIT or self._in_vain >= PATIENCE or _under_function_modes():
                return self._dynamic
            made = compile_static(_with_numbers(self._gm, self._ints, args), args, self._options)
            count("specialised")
            self._in_vain = self._in_vain + 1 if made is None else 0
            run = made if made is not None else self._dynamic
            self._versions[key] = run
            return run


def _under_function_modes() -> bool:
    """Whether torch-function modes are on, of which a trace made now would do once more what Dynamo traced.

    That of ``torch.set_default_device`` does not count: twice is as good as once.
    """
    from torch._dynamo.utils import get_torch_function_mode_stack
    from torch.utils._device import DeviceContext

    return any(type(mode) is not DeviceContext for mode in get_torch_function_mode_stack())


def _with_numbers(gm: fx.GraphModule, ints: Sequence[int], args: Sequence[Any]) -> fx.GraphModule:
    """A copy of a Dynamo graph with numbers for its symbolic integers, which stay inputs that nothing reads."""
    fixed = copy.deepcopy(gm)
    places = list(fixed.graph.find_nodes(op="placeholder"))
    for k in ints:
        number = int(args[k])

        def value(node: fx.Node, place: fx.Node = places[k], number: int = number) -> Any:
            return number if node is place else node

        for user in list(places[k].users):
            user.args = fx.map_arg(user.args, value)
            user.kwargs = fx.map_arg(user.kwargs, value)
    for node in fixed.graph.nodes:
        node.meta.pop("example_value", None)  # symbolic; traced anew
    fixed.recompile()
    return fixed

"""AOTAutograd's graphs of a first compilation, for a second one of the same Dynamo graph.

Both compilations trace and partition the same operators, which takes a quarter of their time. In the second one,
the functions that AOTAutograd calls for that return copies of the first one's graphs. All else runs as in any
compilation, and the caches get the same keys and entries. A graph that does not match is traced again.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import compilation_time_metrics
from torch._functorch._aot_autograd import graph_compile
from torch._inductor import compile_fx
from torch.fx._lazy_graph_module import _LazyGraphModule, _make_graph_module, _use_lazy_graph_module

_JOINT, _ALONE, _PARTITION = "aot_dispatch_autograd_graph", "aot_dispatch_base_graph", "partition_fn"
"""Functions in ``graph_compile``, which trace a graph with and without a backward pass, and in ``compile_fx``."""
_LOADING = "PyCodeCache.load_by_key_path"
"""Name of torch's measurement of loading generated code, which waits for the compilers of its kernels."""


@dataclass
class _Graph:
    """One traced graph.

    Attributes:
        inputs: the flat arguments it was traced with; ``descriptions``: of these arguments.
        found: the tracing function's results, of which the first one is the graph.
        changed: fields of AOTAutograd's metadata that tracing changed.
        parts: of a joint graph, copies of its forward and backward graph; of another graph, its copy.
    """

    inputs: Sequence[Any]
    found: tuple[Any, ...]
    changed: dict[str, Any]
    parts: tuple[fx.GraphModule, ...] = ()

    def takes(self, inputs: Sequence[Any]) -> bool:
        return bool(self.parts) and len(inputs) == len(self.inputs) and all(map(_same, self.inputs, inputs))


class Traced:
    """The graphs traced by a first compilation, which runs within :meth:`recording`. The second one runs within
    :meth:`replaying`, on the same inputs.

    Attributes:
        seconds: the first compilation's time for the steps that the second one omits.
        loading_s: its time for loading code, compilers included; 0 if torch does not measure it.
    """

    def __init__(self) -> None:
        self._graphs: list[_Graph] = []
        self.seconds = self.loading_s = 0.0

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager that keeps copies of the graphs that are traced in it."""

        def keep(trace: Callable[..., Any], *, joint: bool) -> Callable[..., Any]:
            def tracing(fn: Any, inputs: Sequence[Any], *args: Any, fw_metadata: Any, **kwargs: Any) -> Any:
                given, before, begin = list(inputs), dict(vars(fw_metadata)), time.monotonic()
                found = trace(fn, inputs, *args, fw_metadata=fw_metadata, **kwargs)
                self.seconds += time.monotonic() - begin
                changed = {k: v for k, v in vars(fw_metadata).items() if before.get(k) is not v}
                parts = () if joint else (copied(found[0]),)
                self._graphs.append(_Graph(given, found, changed, parts))
                return found

            return tracing

        def keep_parts(partition: Callable[..., Any]) -> Callable[..., Any]:
            def partitioning(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
                begin = time.monotonic()
                parts = partition(gm, *args, **kwargs)
                self.seconds += time.monotonic() - begin
                for graph in self._graphs:
                    if graph.found[0] is gm:
                        graph.parts = tuple(map(copied, parts))
                return parts

            return partitioning

        loaded_s = sum(compilation_time_metrics.get(_LOADING, ()))
        with (
            _replaced(graph_compile, _JOINT, lambda real: keep(real, joint=True)),
            _replaced(graph_compile, _ALONE, lambda real: keep(real, joint=False)),
            _replaced(compile_fx, _PARTITION, keep_parts),
        ):
            yield
        self.loading_s = max(0.0, sum(compilation_time_metrics.get(_LOADING, ())) - loaded_s)

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Context manager in which graphs are not traced if they were kept; each is given once."""

        def give(trace: Callable[..., Any]) -> Callable[..., Any]:
            def tracing(fn: Any, inputs: Sequence[Any], *args: Any, fw_metadata: Any, **kwargs: Any) -> Any:
                graph = next((one for one in self._graphs if one.takes(inputs)), None)
                if graph is None:
                    return trace(fn, inputs, *args, fw_metadata=fw_metadata, **kwargs)
                vars(fw_metadata).update(graph.changed)
                if len(graph.parts) == 1:
                    self._graphs.remove(graph)
                    return (*graph.parts, *graph.found[1:])
                return graph.found

            return tracing

        def give_parts(partition: Callable[..., Any]) -> Callable[..., Any]:
            def partitioning(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
                graph = next((one for one in self._graphs if one.found[0] is gm), None)
                if graph is None:
                    return partition(gm, *args, **kwargs)
                self._graphs.remove(graph)
                return graph.parts

            return partitioning

        with (
            _replaced(graph_compile, _JOINT, give),
            _replaced(graph_compile, _ALONE, give),
            _replaced(compile_fx, _PARTITION, give_parts),
        ):
            yield
        self._graphs.clear()


@contextlib.contextmanager
def _replaced(module: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a function of torch's, if this version of torch has it."""
    real = getattr(module, name, None)
    if real is None:
        yield
        return
    setattr(module, name, make(real))
    try:
        yield
    finally:
        setattr(module, name, real)


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy for a compilation, which changes it; parameters, buffers and fake tensors are shared.

    It has Dynamo's notes, by which AOTAutograd recognizes parameters: without them it saves other tensors. It is as
    lazy as ``gm``, since torch's caches distinguish generated from ungenerated Python code.
    """
    with _use_lazy_graph_module(isinstance(gm, _LazyGraphModule)):
        made = _make_graph_module(gm, copy.deepcopy(gm.graph))
    for name, value in vars(gm).items():
        vars(made).setdefault(name, value)
    made.meta.update(gm.meta)
    for node, original in zip(made.graph.nodes, gm.graph.nodes, strict=True):
        if hasattr(original, "_dynamo_source"):
            node._dynamo_source = original._dynamo_source
    return made


def _same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, torch.Tensor) and type(one) is type(other) and bool(one == other))

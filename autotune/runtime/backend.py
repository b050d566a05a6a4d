"""The torch.compile backend: stored kernels where there are some, and what the user would have had elsewhere.

A Dynamo graph goes through AOTAutograd, as when its regions were captured for the search, and each of its aten graphs
(forward, backward or inference) is looked up. Where nothing is stored, the Dynamo graph goes to Inductor untouched.
Otherwise each aten graph is cut around its hits; the pieces between go to Inductor, or stay library calls. Where
eager code was fastest throughout, the Dynamo graph runs as it is, with no wrapper of AOTAutograd's around it.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import TorchDynamoException
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autotune.fusion.capture import aot_backend
from autotune.runtime.assemble import Boxed, assemble, straight
from autotune.runtime.counters import count
from autotune.runtime.database import warn_once
from autotune.runtime.inductor import compile_whole, piece_options
from autotune.runtime.partition import cuts_are_all
from autotune.runtime.replace import Found, cuts, find
from autotune.runtime.shapes import PLAIN, compile_dynamic, is_dynamic

log = logging.getLogger("autotune")

Compiled = Callable[..., Any]


def compile(model: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    """``torch.compile(model, backend="autotune", **kwargs)``: run ``model`` with the kernels stored for it.

    Args:
        model: function or ``nn.Module``.
        kwargs: those of ``torch.compile``. ``mode`` and ``options`` are for Inductor, which compiles the rest.

    Returns:
        The compiled model. Training works; ``autotune.counters()`` tells how many regions were found.
    """
    compiled: Callable[..., Any] = torch.compile(model, backend=dynamo_backend, **kwargs)
    return compiled


def dynamo_backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Compiled:
    """The backend "autotune" of ``torch.compile``.

    Args:
        gm: a graph of Dynamo's.
        example_inputs: its inputs; symbolic integers among them mean dynamic shapes.
        options: ``mode`` and ``options`` as the user gave them to ``torch.compile``.
    """
    if _foreign(example_inputs):
        return compile_whole(gm, example_inputs, options)
    if is_dynamic(gm, example_inputs):
        return compile_dynamic(gm, example_inputs, options)
    compiled = compile_static(gm, example_inputs, options)
    return compiled if compiled is not None else compile_whole(gm, example_inputs, options)


def compile_static(gm: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> Compiled | None:
    """Compile a Dynamo graph of fixed shapes with stored kernels; None where none of its regions has one.

    ``gm`` is not changed.
    """
    session = _Session(options)
    try:
        compiled = session.backend()(gm, inputs)
    except TorchDynamoException:
        raise
    except Exception as e:
        warn_once(f"aot {type(e).__name__}", f"autotune: a graph could not be looked up: {type(e).__name__}: {e}")
        log.debug("the graph that could not be looked up", exc_info=True)
        return None
    if not session.kernels:
        return None
    if session.eager and not piece_options(options) and _means_itself(gm, inputs):
        eager: Compiled = gm.forward
        return eager
    session.finish()
    return session.bare(gm, inputs) or compiled


def _foreign(inputs: Sequence[Any]) -> bool:
    """Whether there are tensors of a class that AOTAutograd does not take apart, as it does DTensors.

    It leaves them to the operators, which do not take them within its wrapper; Inductor's code reads their memory.
    """
    own = (t for t in inputs if isinstance(t, torch.Tensor) and type(t) not in PLAIN)
    return not all(is_traceable_wrapper_subclass(t) for t in own)


def _means_itself(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether running a Dynamo graph does what the program does.

    Dynamo has traced what subclasses and torch-function modes make of each call, which running the calls would do once
    more; and some of its operators mean something for who compiles them only (a checkpoint keeps everything, run as it
    is by torch 2.11).
    """
    plain = all(type(t) in PLAIN for t in inputs if isinstance(t, torch.Tensor))
    higher = any(isinstance(n.target, torch._ops.HigherOrderOperator) for n in gm.graph.nodes)
    return plain and not higher and not _under_function_modes()


def _under_function_modes() -> bool:
    """Whether the program runs under torch-function modes; Dynamo has taken them off while it traces."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return bool(InstructionTranslator.current_tx().symbolic_torch_function_state.mode_stack)
    except AttributeError:  # nothing is being traced
        return bool(torch._C._len_torch_function_stack())


class _Session:
    """The aten graphs of one Dynamo graph.

    AOTAutograd compiles the backward when it first runs, long after it must be known whether anything is stored at all;
    so the backward is looked up as soon as it is split from the forward.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.kernels = 0
        self.eager = True
        self.late: list[_Late] = []
        self.seen_backward = False
        self.inference: _Late | None = None

    def backend(self) -> Callable[[fx.GraphModule, Sequence[Any]], Compiled]:
        backend: Any = aot_backend(self.compile)
        split = backend.kwargs["partition_fn"]

        @functools.wraps(split)
        def partition(*args: Any, **kwargs: Any) -> Any:
            forward, backward = split(*args, **kwargs)
            self._note(find(backward), backward)
            self.seen_backward = True
            return forward, backward

        # As Inductor has it: what the graph writes to its inputs is written within the graph.
        backend.kwargs |= {"partition_fn": partition, "keep_inference_input_mutations": True}
        return backend  # type: ignore[no-any-return]

    def compile(self, gm: fx.GraphModule, inputs: Sequence[Any], kind: str) -> Boxed:
        found = find(gm, tell=kind != "backward" or not self.seen_backward)
        if kind != "backward":
            self._note(found, gm)
        late = _Late(gm, found, self.options)
        if kind == "inference":
            self.inference = late
        if kind == "backward":
            return late.build()
        self.late.append(late)
        ready: Boxed | None = None

        def run(args: list[Any]) -> Sequence[Any]:
            nonlocal ready
            if ready is None:
                ready = late.build()
            return ready(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _note(self, found: Found, gm: fx.GraphModule) -> None:
        self.kernels += found.kernels
        self.eager = self.eager and found.runs_eagerly(gm)

    def finish(self) -> None:
        """Build the graphs that waited for the decision to build at all."""
        for late in self.late:
            late.build()
        self.late.clear()

    def bare(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled | None:
        """What AOTAutograd's wrapper would call in the end, where it has nothing to do; None where it may have.

        It has nothing to do where no gradient is asked for, inputs and results are plain tensors, and kernels alone
        make the results, each in memory of its own. Where data drive its code out of the caches it takes 20 to 30 us.
        """
        if self.inference is None or not all(type(t) in PLAIN for t in inputs):
            return None
        run = self.inference.build()
        (output,) = gm.graph.find_nodes(op="output")
        arity = len(inputs), len(output.args[0]) if isinstance(output.args[0], (tuple, list)) else -1
        if self.inference.only_kernels != arity:
            return None
        if self.inference.straight is not None:
            return self.inference.straight

        def call(*args: Any) -> Sequence[Any]:
            return run(list(args))

        return call


class _Late:
    """An aten graph that is assembled once it is wanted.

    Attributes:
        only_kernels: of an assembled graph in which nothing but stored kernels runs: how many tensors it takes and
            gives.
        straight: the same as a function of those, where they are of one region.
    """

    def __init__(self, gm: fx.GraphModule, found: Found, options: Mapping[str, Any]) -> None:
        self._source: tuple[fx.GraphModule, Found, Mapping[str, Any]] | None = (gm, found, options)
        self._run: Boxed | None = None
        self._lock = threading.Lock()
        self.only_kernels: tuple[int, int] | None = None
        self.straight: Compiled | None = None

    def build(self) -> Boxed:
        if self._run is not None:
            return self._run
        with self._lock:
            if self._run is None:
                assert self._source is not None
                gm, found, options = self._source
                try:
                    chosen = cuts(found)
                    self._run = assemble(gm, chosen, options)
                    if not found.eager and cuts_are_all(gm.graph, chosen):
                        (output,) = gm.graph.find_nodes(op="output")
                        self.only_kernels = len(gm.graph.find_nodes(op="placeholder")), len(output.args[0])
                        self.straight = straight(gm, chosen)
                except Exception as e:
                    warn_once(f"cut {e}", f"autotune: a graph runs without stored kernels: {type(e).__name__}: {e}")
                    log.debug("the graph that could not be cut: %s", gm.graph, exc_info=True)
                    count("fallbacks", found.kernels)
                    self._run = assemble(gm, (), options)
                self._source = None
            return self._run


__all__ = ["compile", "compile_static", "dynamo_backend"]

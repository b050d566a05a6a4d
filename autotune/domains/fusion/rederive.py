"""Whether a stored program is the one that its workload was made of.

``Workload.source`` is no part of a workload's identity, and whoever can write to a shared database can change it. So it
is translated again before anything is done with it: a program that comes to the same graph computes what the workload
says, on the same inputs, and nothing else is run as "what the user had".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.errors import Unsupported
from autotune.workload import Workload

if TYPE_CHECKING:
    import torch
    from torch import fx

_SIDES = ("cpu", "cuda")


def check_graph(workload: Workload) -> str:
    """Why a stored workload has no graph that kernels could be made of; "" where it has."""
    from autotune.ir.graph import Graph

    try:
        Graph.from_json(workload.spec)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        return f"its graph is damaged ({error})"
    return ""


def check_source(workload: Workload) -> str:
    """Why a workload's program is not to be run; "" where it is what the workload was made of, or there is none.

    The same operators make results of other types on other devices (a layer norm's statistics, say): the program is
    translated as on the device that it was captured on, and failing that as on the others.
    """
    if not workload.source:
        return ""
    why = ""
    for side in _sides(workload.source):
        try:
            fingerprint, slots, _ = rederived(workload, side)
        except Unsupported as error:
            why = why or f"it is no region ({error})"
            continue
        except Exception as error:  # whatever torch says of a program that makes no sense
            why = why or f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            continue
        if fingerprint == workload.fingerprint and slots == list(workload.source.get("slots", ())):
            return ""
        why = why or "it computes something else"
    return f"the stored program is not what the workload was made of: {why}"


def _sides(source: Mapping[str, Any]) -> list[str]:
    """The sides to translate for, the program's own first."""
    inputs = source.get("inputs")
    first = inputs[0] if isinstance(inputs, Sequence) and inputs else None
    own = first.get("device") if isinstance(first, Mapping) else None
    return sorted(_SIDES, key=lambda side: side != own)


def results_of(workload: Workload) -> tuple[int, ...]:
    """Which of its program's results each output of a workload's graph is, for one whose source was checked."""
    for side in _sides(workload.source):
        fingerprint, _, order = rederived(workload, side)
        if fingerprint == workload.fingerprint:
            return order
    raise Unsupported("the stored program is not what the workload was made of")


def rederived(workload: Workload, side: str) -> tuple[str, list[int], tuple[int, ...]]:
    """Fingerprint of the graph of a workload's program, which of the program's inputs each slot of that reads, and
    which of its results each output is. Computes nothing."""
    source = workload.source
    from torch._subclasses.fake_tensor import FakeTensorMode

    from autotune.compiler.lower.translate import translate
    from autotune.compiler.regions import aten
    from autotune.ir.forms.canonical import canonicalize, to_workload

    gm = aten.from_json(source, side)
    with FakeTensorMode():
        _propagate(gm, [_fake_input(spec, side) for spec in source["inputs"]])
    translation = translate(gm, str(workload.spec.get("precision", "")))
    graph, slots, order = canonicalize(translation.graph)
    return to_workload(graph).fingerprint, [translation.slots[s] for s in slots], order


def _fake_input(spec: Mapping[str, Any], side: str) -> torch.Tensor:
    import torch

    dtype = getattr(torch, str(spec["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"an input of type {spec['dtype']!r}")
    return torch.empty_strided(list(spec["shape"]), list(spec["strides"]), dtype=dtype, device=side)


def _propagate(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
    """Put what each node computes, as fake tensors, into its ``meta["val"]``."""
    from torch import fx

    class Propagate(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            n.meta["val"] = super().run_node(n)
            return n.meta["val"]

    Propagate(gm, garbage_collect_values=False).run(*inputs)

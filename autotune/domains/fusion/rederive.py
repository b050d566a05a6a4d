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
    from autotune.compiler.regions.find import Binding

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
            fingerprint, binding = rederived(workload, side)
        except Unsupported as error:
            why = why or f"it is no region ({error})"
            continue
        except Exception as error:  # whatever torch says of a program that makes no sense
            why = why or f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            continue
        if fingerprint == workload.fingerprint and list(binding.inputs) == list(workload.source.get("slots", ())):
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
        fingerprint, binding = rederived(workload, side)
        if fingerprint == workload.fingerprint:
            return binding.outputs
    raise Unsupported("the stored program is not what the workload was made of")


def rederived(workload: Workload, side: str) -> tuple[str, Binding]:
    """Fingerprint of the graph of a workload's program, and how the program's tensors meet that. Computes nothing."""
    from autotune.compiler.regions.find import workload_of
    from autotune.compiler.regions.symbols import traced

    module = traced(workload.source, side)
    made, binding = workload_of(module, str(workload.spec.get("precision", "")), dict(workload.source))
    return made.fingerprint, binding

"""Verdicts at deploy time: the regions of a graph that its whole step is faster without are left to Inductor.

A verdict is found by :mod:`autotune.bench.decide`, which compiles the step with several sets of regions left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autotune.device import environment, identify
from autotune.numerics import Numerics
from autotune.runtime.deployment import deployment
from autotune.store.records import Schedule
from autotune.workload import Workload, digest

if TYPE_CHECKING:
    from autotune.compiler.regions.find import Region

_GRAPHLESS = {"max-autotune": "max-autotune-no-cudagraphs", "reduce-overhead": "default"}


def base_mode(mode: str | None) -> str:
    """The mode of ``torch.compile`` that compiles the same code and makes no CUDA graphs of its own."""
    return _GRAPHLESS.get(mode or "default", mode or "default")


def graph_fingerprint(graph: fx.Graph, regions: Sequence[Region], numerics: Numerics) -> str:
    """SHA-256 of a graph's parts: its regions' workloads, and the names of its other operators.

    Both count with their multiplicity; their order does not matter.

    Args:
        numerics: under which its library kernels run, where that is not torch's default.
    """
    known = [region for region in regions if region.workload is not None]
    inside = {node for region in known for node in region.nodes}
    others = [_name(n.target) for n in graph.nodes if n.op == "call_function" and n not in inside]
    workloads = [region.workload.fingerprint for region in known if region.workload is not None]
    own = {"numerics": dict(numerics)} if numerics else {}
    return digest({"workloads": sorted(workloads), "others": sorted(others), **own})


def _name(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else str(getattr(target, "__name__", type(target)))


@dataclass(frozen=True)
class Family:
    """Equal regions of a step that a stored kernel runs.

    Attributes:
        workload: fingerprint.
        latency_us: of the kernel, alone, in the final comparison that chose it; ``inductor_us``: Inductor's in the same
            one, None where that failed.
        entries: names of the kernels, as a profiler shows them.
    """

    workload: str
    label: str
    latency_us: float
    inductor_us: float | None
    entries: tuple[str, ...]


@dataclass
class Trial:
    """A compilation by which a step is decided: what it leaves to Inductor, and what its graphs turned out to be.

    Attributes:
        left: fingerprints of workloads.
        graphs: from a graph's fingerprint and device to how often each of its workloads occurs.
        families: by workload, those of all regions that are not left.
        attention: calls of attention that were rewritten.
    """

    left: frozenset[str] = frozenset()
    graphs: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    families: dict[str, Family] = field(default_factory=dict)
    attention: int = 0

    def met(self, graph: str, device: str, workload: Workload, schedule: Schedule) -> None:
        """Note a region that a stored kernel runs."""
        name = workload.fingerprint
        self.graphs.setdefault((graph, device), Counter())[name] += 1
        entries = tuple(kernel.entry for kernel in schedule.artifact.kernels) if schedule.artifact else ()
        inductor = schedule.baselines.get("inductor")
        self.families[name] = Family(name, workload.label or name[:12], schedule.latency_us, inductor, entries)


def stored_left(graph: str, devices: Iterable[str], mode: str) -> tuple[frozenset[str], bool]:
    """Workloads that the stored verdicts on a graph leave to Inductor, and whether there is any verdict, as far as is
    known. Never fails: what goes wrong is told once.

    Args:
        graph: fingerprint.
        devices: "cpu" or "cuda:N", those of its regions.
        mode: of :func:`base_mode`.
    """
    left: set[str] = set()
    decided = False
    try:
        store = deployment().store()
        for device in sorted(set(devices)) if store is not None else ():
            assert store is not None
            found = store.get_verdict(
                graph, identify(device).fingerprint, environment(device), mode, match=deployment().settings.environment
            )
            if found is not None:
                left.update(found.left)
                decided = True
    except Exception as e:
        deployment().warn_once("verdict", f"autotune: verdicts on whole steps are not looked up: {e}")
        decided = True
    return frozenset(left), decided


__all__ = ["Family", "Trial", "base_mode", "graph_fingerprint", "stored_left"]

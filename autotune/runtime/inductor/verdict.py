"""Permission of a graph as a whole: the verdict on its step, and the agreement of ranks.

**Verdict.** The regions that a whole step is faster without are left to Inductor. :mod:`autotune.bench.decide` finds a
verdict by compiling the step with several sets of regions left out.

**Agreement.** Ranks of one program deploy alike, or not at all, where their graphs hold collectives. Ranks whose
databases differ would compile different graphs: collectives could come in another order, which hangs, and what ranks
compute twice would be rounded differently. So before the first graph with a collective is compiled, each rank writes
what it would deploy from to the key-value store that ``torch.distributed`` has anyway. No collective is used for that:
ranks may compile at different times, and find some graphs in caches.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from autotune import numerics as torch_settings
from autotune.device import environment, identify
from autotune.numerics import Numerics
from autotune.runtime.deployment import deployment
from autotune.store.records import Schedule, Verdict
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
    """A compilation by which a step is decided: the regions that it leaves to Inductor, and its graphs.

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


def stored_verdict(graph: str, device: str, mode: str) -> Verdict | None:
    """The stored verdict on a graph that this process obeys; arguments as of :func:`stored_left`.

    Raises:
        Exception: whatever keeps the database from being read.
    """
    store = deployment().store()
    if store is None:
        return None
    match = deployment().settings.environment
    return store.get_verdict(graph, identify(device).fingerprint, environment(device), mode, match=match)


UNSEARCHED = "unsearched"
"""The command in the record of a verdict on predicted schedules, which nobody searched."""


class Left(NamedTuple):
    """The stored verdicts on a graph, as far as they are known.

    Attributes:
        workloads: what they leave to Inductor.
        decided: there is a verdict.
        predicted: those of the workloads of which a predicted schedule made the step slower; a search may find better.
    """

    workloads: frozenset[str]
    decided: bool
    predicted: frozenset[str] = frozenset()


def stored_left(graph: str, devices: Iterable[str], mode: str) -> Left:
    """Read the stored verdicts on a graph. Never fails: an error gives one warning.

    Args:
        graph: fingerprint.
        devices: "cpu" or "cuda:N", those of its regions.
        mode: of :func:`base_mode`.
    """
    left: set[str] = set()
    predicted: set[str] = set()
    decided = False
    try:
        for device in sorted(set(devices)):
            found = stored_verdict(graph, device, mode)
            if found is not None:
                (predicted if found.record.get("command") == UNSEARCHED else left).update(found.left)
                decided = True
    except Exception as e:
        deployment().warn_once("verdict", f"autotune: verdicts on whole steps are not looked up: {e}")
        decided = True
    return Left(frozenset(left | predicted), decided, frozenset(predicted - left))


WAIT_S = 60.0
"""Seconds to wait for the other ranks; one that does not come in time decides that none deploys."""

_AGREE, _DIFFER = b"agree", b"differ"
_DIFFERENT = (
    "autotune: the ranks' databases, settings or software differ, or some rank did not answer: no stored kernel is used"
    " beside collectives; deploy from one snapshot (autotune export)"
)
_CHANGED = (
    "autotune: the database changed while the ranks run: what is compiled from now on may differ among them; deploy"
    " from a snapshot (autotune export)"
)
_lock = threading.Lock()
_settled: dict[int, tuple[bytes, bool]] = {}
"""By the key-value store: what this rank told, and whether all told the same."""


def has_collectives(graph: fx.Graph, inputs: Sequence[Any] = ()) -> bool:
    """True where ranks wait for each other in a graph, or will once its distributed tensors are traced."""
    if any(type(value).__name__ == "DTensor" for value in inputs):
        return True
    return any(
        node.op == "call_function" and _namespace(node.target) in ("_c10d_functional", "c10d") for node in graph.nodes
    )


def _namespace(target: Any) -> str:
    """Of an operator; Dynamo's graphs have it without its overload."""
    name: str = getattr(target, "namespace", None) or getattr(target, "_qualified_op_name", "").partition("::")[0]
    return name


def ranks_agree(graph: fx.Graph, inputs: Sequence[Any] = ()) -> bool:
    """True where a graph may use stored kernels: all ranks look up in the same, or none waits in it for another.

    Every rank gets the same answer, whichever graphs it compiles and when. Never fails.

    Args:
        inputs: example inputs of a graph of Dynamo's.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    if not has_collectives(graph, inputs):
        return True
    try:
        return _agree(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())
    except Exception as e:
        text = f"autotune: ranks could not agree on what to deploy ({e}): nothing is, beside collectives"
        deployment().warn_once("agreement", text)
        return False


def _agree(store: Any, rank: int, ranks: int) -> bool:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    state = deployment().state() + f"{identify(device).fingerprint}{environment(device).strict}".encode()
    with _lock:
        told = _settled.get(id(store))
        if told is None:
            whole = state + torch_settings.text(torch_settings.read([device])).encode()
            told = _settled[id(store)] = (state, _settle(store, rank, ranks, whole))
            if not told[1]:
                deployment().warn_once("ranks differ", _DIFFERENT)
    if told[1] and told[0] != state:
        deployment().warn_once("ranks changed", _CHANGED)
    return told[1]


def _settle(store: Any, rank: int, ranks: int, state: bytes) -> bool:
    """Publish the state of this rank, and compare that of all: the first rank that has them answers for all."""
    store.set(f"autotune/state/{rank}", state.hex())
    keys = [f"autotune/state/{k}" for k in range(ranks)]
    end = time.monotonic() + WAIT_S
    found = _DIFFER
    while time.monotonic() < end:
        if store.check(["autotune/answer"]):
            break
        if store.check(keys):
            found = _AGREE if len({bytes(store.get(key)) for key in keys}) == 1 else _DIFFER
            break
        time.sleep(0.01)
    answer = bytes(store.compare_set("autotune/answer", "", found.decode()))
    return answer == _AGREE

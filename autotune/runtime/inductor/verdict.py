"""Whole graphs: surveys of their regions, the verdict on a graph's step, and the agreement of ranks.

**Survey.** A search learns from :func:`surveying` which graphs are compiled, and from :func:`lacking` which of their
regions have no schedule.

**Verdict.** Regions whose kernels slow a whole step down are left to Inductor. :mod:`autotune.bench.decide` finds a
verdict by compiling the step with several sets of regions left out.

**Agreement.** If their graphs have collectives, the ranks of a program must deploy the same schedules, or none. Ranks
with different databases would compile different graphs. Collectives could run in another order, which hangs, and
computations replicated across ranks would be rounded differently. So before the first graph with a collective is
compiled, each rank writes the state of its database to the key-value store of ``torch.distributed``. Collectives cannot
be used for that: ranks may compile at different times, and find some graphs in caches.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    """The mode of ``torch.compile`` that generates the same code without CUDA graphs."""
    return _GRAPHLESS.get(mode or "default", mode or "default")


def graph_fingerprint(graph: fx.Graph, regions: Sequence[Region], numerics: Numerics) -> str:
    """SHA-256 of a graph's parts: its regions' workloads, and the names of its other operators.

    Repeated parts count; their order does not matter.

    Args:
        numerics: torch's settings for its library kernels that differ from the defaults.
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
class Surveyed:
    """A graph on which a verdict may be stored: a post-grad graph, or a Dynamo graph with a device and no workload.

    Attributes:
        fingerprint: of :func:`autotune.runtime.inductor.verdict.graph_fingerprint`, for a post-grad graph.
        mode: the mode of the verdict.
        regions: device ("cpu" or "cuda:N") and workload of every region that stored kernels may run.
        left: workloads of further regions, which a stored verdict leaves to Inductor.
    """

    fingerprint: str
    mode: str
    regions: tuple[tuple[str, Workload | None], ...]
    left: frozenset[str]


Lacking = Mapping[str, Sequence[tuple[Workload, int]]]
"""Workloads with their numbers of occurrences, by device."""

_open_lock = threading.Lock()
_open: list[Callable[[Surveyed], object]] = []


@contextlib.contextmanager
def surveying(take: Callable[[Surveyed], object]) -> Iterator[None]:
    """Pass the graphs compiled in this context to ``take``, from any thread, since autograd compiles some in its own.

    ``take`` gets a graph before Inductor lowers it.
    """
    with _open_lock:
        _open.append(take)
    try:
        yield
    finally:
        with _open_lock:
            _open.remove(take)


def note(graph: Surveyed) -> None:
    """Pass a graph to every open survey."""
    with _open_lock:
        for take in _open:
            take(graph)


def occurrences(graphs: Sequence[Surveyed]) -> Lacking:
    """All regions that stored kernels may run."""
    counts: dict[str, Counter[str]] = {}
    workloads: dict[str, Workload] = {}
    for graph in graphs:
        for device, workload in graph.regions:
            if workload is not None:
                counts.setdefault(device, Counter())[workload.fingerprint] += 1
                workloads[workload.fingerprint] = workload
    return {device: [(workloads[name], n) for name, n in counted.items()] for device, counted in counts.items()}


def lacking(graphs: Sequence[Surveyed]) -> Lacking:
    """The regions without a schedule of their device."""
    from autotune.runtime.match import look_up  # a warm start imports this module, and looks nothing up

    missed = {}
    for device, found in occurrences(graphs).items():
        own = {w.fingerprint for w, _ in found if look_up(w, device, packaged=False).level.own}
        missed[device] = [(w, count) for w, count in found if w.fingerprint not in own]
    return {device: found for device, found in missed.items() if found}


@dataclass(frozen=True)
class Family:
    """Equal regions of a step that run a stored kernel.

    Attributes:
        workload: fingerprint.
        latency_us: of the kernel alone, in the final comparison that chose it; ``inductor_us``: Inductor's in the same
            comparison, None if it failed.
        entries: names of the kernels, as in a profiler.
    """

    workload: str
    label: str
    latency_us: float
    inductor_us: float | None
    entries: tuple[str, ...]


@dataclass
class Trial:
    """A compilation for timing a step: the regions that it leaves to Inductor, and its graphs.

    Attributes:
        left: fingerprints of the workloads left to Inductor.
        graphs: maps a graph's fingerprint and device to the number of occurrences of each workload.
        families: the families of all other regions, by workload.
        attention: number of rewritten attention calls.
    """

    left: frozenset[str] = frozenset()
    graphs: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    families: dict[str, Family] = field(default_factory=dict)
    attention: int = 0

    def met(self, graph: str, device: str, workload: Workload, schedule: Schedule) -> None:
        """Record a region that runs a stored kernel."""
        name = workload.fingerprint
        self.graphs.setdefault((graph, device), Counter())[name] += 1
        entries = tuple(kernel.entry for kernel in schedule.artifact.kernels) if schedule.artifact else ()
        inductor = schedule.baselines.get("inductor")
        self.families[name] = Family(name, workload.label or name[:12], schedule.latency_us, inductor, entries)


def stored_verdict(graph: str, device: str, mode: str) -> Verdict | None:
    """The stored verdict on a graph for this process; arguments as of :func:`stored_left`.

    Raises:
        Exception: any error in reading the database.
    """
    store = deployment().store()
    if store is None:
        return None
    match = deployment().settings.environment
    return store.get_verdict(graph, identify(device).fingerprint, environment(device), mode, match=match)


UNSEARCHED = "unsearched"
"""The command in the record of a verdict on predicted schedules, which come from no search."""


class Left(NamedTuple):
    """The stored verdicts on a graph.

    Attributes:
        workloads: workloads left to Inductor.
        decided: True if there is a verdict.
        predicted: workloads whose predicted schedule made the step slower; a search may find a better one.
    """

    workloads: frozenset[str]
    decided: bool
    predicted: frozenset[str] = frozenset()


def stored_left(graph: str, devices: Iterable[str], mode: str) -> Left:
    """Read the stored verdicts on a graph. Never raises: an error logs one warning.

    Args:
        graph: fingerprint.
        devices: of its regions, "cpu" or "cuda:N".
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
        deployment().warn_once("verdict", f"autotune: verdicts on steps are not looked up: {e}")
        decided = True
    return Left(frozenset(left | predicted), decided, frozenset(predicted - left))


WAIT_S = 60.0
"""Seconds to wait for the other ranks; if one is late, no rank deploys."""

_AGREE, _DIFFER = b"agree", b"differ"
_DIFFERENT = (
    "autotune: the ranks' databases, settings or software differ, or a rank did not answer: graphs with"
    " collectives run without stored kernels; deploy from one snapshot (autotune export)"
)
_CHANGED = (
    "autotune: the database changed while the ranks run: later compilations may differ between ranks; deploy"
    " from a snapshot (autotune export)"
)
_lock = threading.Lock()
_settled: dict[int, tuple[bytes, bool]] = {}
"""For each key-value store: this rank's state, and True if the states of all ranks are equal."""


def has_collectives(graph: fx.Graph, inputs: Sequence[Any] = ()) -> bool:
    """True if a graph has collectives, or will have when its distributed tensors are traced."""
    if any(type(value).__name__ == "DTensor" for value in inputs):
        return True
    return any(
        node.op == "call_function" and _namespace(node.target) in ("_c10d_functional", "c10d") for node in graph.nodes
    )


def _namespace(target: Any) -> str:
    """An operator's namespace; Dynamo's graphs have operators without their overloads."""
    name: str = getattr(target, "namespace", None) or getattr(target, "_qualified_op_name", "").partition("::")[0]
    return name


def ranks_agree(graph: fx.Graph, inputs: Sequence[Any] = ()) -> bool:
    """True if a graph may use stored kernels: all ranks have equal schedules, or the graph has no collectives.

    Every rank gets the same answer, whichever graphs it compiles and when. Never raises.

    Args:
        inputs: example inputs of a Dynamo graph.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    if not has_collectives(graph, inputs):
        return True
    try:
        return _agree(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())
    except Exception as e:
        text = f"autotune: ranks could not agree on schedules ({e}): graphs with collectives run without stored kernels"
        deployment().warn_once("agreement", text)
        return False


def _agree(store: Any, rank: int, ranks: int) -> bool:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    state = deployment().state() + f"{identify(device).fingerprint}{environment(device).strict}".encode()
    with _lock:
        settled = _settled.get(id(store))
        if settled is None:
            whole = state + torch_settings.text(torch_settings.read([device])).encode()
            settled = _settled[id(store)] = (state, _settle(store, rank, ranks, whole))
            if not settled[1]:
                deployment().warn_once("ranks differ", _DIFFERENT)
    if settled[1] and settled[0] != state:
        deployment().warn_once("ranks changed", _CHANGED)
    return settled[1]


def _settle(store: Any, rank: int, ranks: int, state: bytes) -> bool:
    """Publish this rank's state, and compare all states: the first rank that has them publishes the answer for all."""
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

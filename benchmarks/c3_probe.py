"""The part of :mod:`benchmarks.c3_device` in the ranks: several runs on the same tensors, timed in turn."""

from __future__ import annotations

import base64
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from autotune.task import Config

if TYPE_CHECKING:
    from autotune.domains.c3.collectives.nccl import Collective
    from autotune.domains.c3.computation import Computation
    from autotune.domains.c3.group import Group
    from autotune.task import Artifact

_BUDGET_S = 20.0
_LOCK_S = 20.0
_LARGE = 1 << 28  # elements


@dataclass(frozen=True)
class Run:
    """One thing to time.

    Attributes:
        parts: "compute", "comm" or "both".
        config: the strategy.
        artifact: kernels that the strategy needs, as :func:`measure` reads them.
    """

    name: str
    parts: str
    config: Config
    artifact: dict[str, Any] | None = None


@dataclass(frozen=True)
class Probe:
    """Runs that are timed in turn.

    Attributes:
        gemm: fields of :class:`autotune.domains.c3.scenario.Gemm`, or None.
        collective: fields of :class:`autotune.domains.c3.collectives.nccl.Spec`, or None.
    """

    name: str
    gemm: dict[str, Any] | None
    collective: dict[str, Any] | None
    runs: list[Run]


def measure(group: Group, probe: Mapping[str, Any], policy: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Time the runs of a probe (as JSON). A collective call.

    Returns:
        ``us``: the median of each run's samples; ``skipped``: why a run is not among them.
    """
    from autotune.domains.c3.measuring.timing import time_ranks
    from autotune.measure.policy import Policy

    skipped: dict[str, str] = {}
    with ExitStack() as stack:
        opened = Opened(group, probe, stack)
        runs = {}
        for run in probe["runs"]:
            overlap, why = together(group, partial(opened.overlap, run))
            if overlap is None:
                skipped[run["name"]] = why
            else:
                runs[run["name"]] = overlap
        with alone(group):
            samples = time_ranks(runs, group, Policy.from_json(policy), rounds=rounds, budget_s=_BUDGET_S)
    if probe["collective"] and group.device.type == "cuda" and probe["collective"]["numel"] >= _LARGE:
        from autotune.domains.c3.collectives.symmetric import drop_free

        drop_free(group)  # of the next probe's size there is none
    return {"us": {name: statistics.median(found) for name, found in samples.items()}, "skipped": skipped}


@contextmanager
def alone(group: Group) -> Iterator[None]:
    """While no other search is timing on the ranks' devices; each locks its own, one after the other."""
    from autotune.measure.quiet import device_lock

    with ExitStack() as stack:
        for rank in range(1 if group.device.type == "cpu" else group.ranks):
            if rank == group.rank:
                stack.enter_context(device_lock(str(group.device), _LOCK_S))
            group.barrier()
        yield


def together(group: Group, make: Callable[[], Any]) -> tuple[Any, str]:
    """The result of ``make``, or None and the reason of the first rank that failed; all ranks get one verdict."""
    import torch

    from autotune.errors import Unsupported, first_line

    made, why = None, ""
    try:
        made = make()
    except (Unsupported, NotImplementedError, torch.OutOfMemoryError) as error:
        why = str(error).partition("\n")[0] if isinstance(error, Unsupported) else first_line(error)
    reasons = [r for r in group.gather(why) if r]
    return (None, reasons[0]) if reasons else (made, "")


class _Nothing:
    """A collective that moves nothing."""

    met = None

    def enqueue(self, stream: Any = None) -> None:
        pass


class Opened:
    """Computations and collectives of one probe, each made once and closed by ``stack``."""

    def __init__(self, group: Group, probe: Mapping[str, Any], stack: ExitStack) -> None:
        self._group, self._probe, self._stack = group, probe, stack
        self._compute: Computation | None = None
        self._collectives: dict[tuple[Any, ...], Collective] = {}

    def overlap(self, run: Mapping[str, Any]) -> Any:
        from autotune.domains.c3.overlap import open_overlap

        config = run["config"]
        compute = self.compute() if run["parts"] != "comm" else None
        collective: Any = None
        if run["parts"] != "compute":
            collective = self.collective(run)
        elif config.get("reserve"):
            collective = _Nothing()  # a computation leaves SMs free for concurrent work
        made = open_overlap(compute, collective, config, self._group.device)
        self._stack.callback(made.close)
        made.prepare()
        return made

    def compute(self) -> Computation:
        from autotune.domains.c3.computation import open_compute
        from autotune.domains.c3.scenario import Gemm

        if self._compute is None:
            self._compute = open_compute(Gemm(**self._probe["gemm"]), self._group.device, seed=self._group.rank)
        return self._compute

    def collective(self, run: Mapping[str, Any]) -> Collective:
        """The collective of a strategy, shared by strategies that differ in other options only."""
        from autotune.domains.c3.collectives.nccl import Spec, open_collective

        config = run["config"]
        own = ("engine", "ctas", "chunks", "copies")
        # With the computation first, what an all-to-all keeps on the device is copied last.
        key = (config["order"] == "gemm_first", *(config[name] for name in own if name in config))
        if key not in self._collectives:
            spec = Spec(**self._probe["collective"])
            made = open_collective(spec, self._group, config, _artifact(run["artifact"]))
            self._stack.callback(made.close)
            if made.input.is_floating_point():
                made.input.normal_()  # zeros would cost less power than data does
            self._collectives[key] = made
        return self._collectives[key]


def _artifact(wire: Mapping[str, Any] | None) -> Artifact | None:
    from autotune.measure.child import artifact_from_wire

    return artifact_from_wire(wire["head"], base64.b64decode(wire["code"])) if wire is not None else None

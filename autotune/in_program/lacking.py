"""Regions of compiled graphs without a schedule for the device at hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from autotune.runtime.inductor.region_call import look_up
from autotune.runtime.inductor.survey import Surveyed

if TYPE_CHECKING:
    from autotune.workload import Workload

Lacking = Mapping[str, Sequence[tuple["Workload", int]]]
"""Workloads and how often each occurs, by device."""


def lacking(graphs: Sequence[Surveyed]) -> Lacking:
    """Find the regions that have no schedule of the device's own."""
    counts: dict[str, Counter[str]] = {}
    workloads: dict[str, Workload] = {}
    for graph in graphs:
        for device, workload in graph.regions:
            if workload is not None:
                counts.setdefault(device, Counter())[workload.fingerprint] += 1
                workloads[workload.fingerprint] = workload
    missed = {}
    for device, counted in counts.items():
        found = [(workloads[name], count) for name, count in counted.items()]
        own = {w.fingerprint for w, _ in found if look_up(w, device, packaged=False).level.own}
        missed[device] = [(w, count) for w, count in found if w.fingerprint not in own]
    return {device: found for device, found in missed.items() if found}


__all__ = ["Lacking", "lacking"]

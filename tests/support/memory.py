"""Memory of a step, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(step: Callable[[], Any]) -> int:
    """The most bytes of tensors on the CPU that were alive at once of those that a step makes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events: Any = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    now = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most

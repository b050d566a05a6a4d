"""Why GPUs are as fast as they are: a GEMM, copies, and both, back to back until clocks and power have settled.

A search times single samples; what a GPU does at work that does not end shows only after a while. Run
on every rank through :meth:`autotune.domains.c3.measuring.ranks.Ranks.call`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from autotune.errors import Unsupported
from benchmarks.c3_probe import Opened, alone, together
from benchmarks.nvml import Reading, Sensor, summary

if TYPE_CHECKING:
    from autotune.domains.c3.group import Group
    from autotune.task import Runnable

_LEAST = 5  # turns of a loop
_REST_S = 0.5  # before each, so that all begin alike
_FIRST_US = 50_000.0
_AHEAD = 50  # turns that the host is ahead of the device, at most twice


def back_to_back(
    group: Group, probe: Mapping[str, Any], policy: Mapping[str, Any], zeros: bool, seconds: float
) -> dict[str, Any]:
    """Run each of a probe's runs again and again for ``seconds``, one run after the other. A collective call; CUDA.

    Args:
        probe: an :class:`benchmarks.c3_probe.Probe` as JSON.
        zeros: whether the GEMM's operands are all zero, which costs less power, in place of random.

    Returns:
        This rank's results. ``runs`` has the fields of :func:`settled` for each run, with NVML's ``mhz``, ``watt`` and
        ``held`` of the same time. ``limit_w`` and ``most_mhz`` are of the GPU. ``note`` is the reason for missing NVML
        data, ``skipped`` the reason for missing runs, the same on all ranks.
    """
    from autotune.measure.policy import Policy

    own = Policy.from_json(policy)
    with ExitStack() as stack:
        opened = Opened(group, probe, stack)
        runs: dict[str, Runnable] = {}
        for run in probe["runs"]:
            made, why = together(group, partial(opened.overlap, run))
            if made is None:
                return {"skipped": why}
            runs[run["name"]] = made
        if zeros:
            computation: Any = opened.compute()
            for operand in (computation.a, computation.b):
                operand.zero_()
        sensor, note = _sensor(group)
        with alone(group):
            found = {name: _loop(run, group, _turns(run, group, own, seconds), sensor) for name, run in runs.items()}
    limits = {"limit_w": sensor.limit_w, "most_mhz": sensor.most_mhz} if sensor else {}
    return {"runs": found, "note": note, "skipped": "", **limits}


def sms_left(group: Group, reserves: Sequence[int]) -> list[int]:
    """SMs that a computation has where so many are kept from it, which come in groups; 0 where that cannot be."""
    import torch

    from autotune.domains.c3.overlap import partition_stream

    every = torch.cuda.get_device_properties(group.device).multi_processor_count
    found = []
    for reserve in reserves:
        try:
            left = partition_stream(group.device.index or 0, every - reserve)[1] if reserve else every
        except Unsupported:
            left = 0
        found.append(left)
    return found


def settled(us: Sequence[float]) -> dict[str, float]:
    """Median of the second half of a loop's turns, and of those that began in its first 50 ms; microseconds."""
    begins = accumulate(us, initial=0.0)
    first = [t for t, begin in zip(us, begins, strict=False) if begin < _FIRST_US]
    return {"us": statistics.median(us[len(us) // 2 :]), "first": statistics.median(first)}


def _turns(run: Runnable, group: Group, policy: Any, seconds: float) -> int:
    """The number of calls in so many seconds, the same on all ranks."""
    from autotune.domains.c3.measuring.timing import sample_cuda

    once = statistics.median(group.largest(sample_cuda(run, group, policy, _LEAST)))
    return max(_LEAST, int(seconds * 1e6 / max(once, 1.0)))


def _loop(run: Runnable, group: Group, turns: int, sensor: Sensor | None) -> dict[str, Any]:
    """The time of so many calls on this rank, and the sensor's values during the second half."""
    import torch

    from autotune.domains.c3.collectives.symmetric import new_event
    from autotune.domains.c3.measuring.timing import own_stream

    stream = own_stream(group)
    marks = [new_event(timing=True) for _ in range(turns + 1)]
    time.sleep(_REST_S)
    group.barrier()
    watch: AbstractContextManager[list[Reading]] = sensor.watch() if sensor else nullcontext([])
    with watch as readings, torch.cuda.stream(stream):
        begin = time.perf_counter()
        marks[0].record(stream)
        for turn in range(turns):
            run()
            marks[turn + 1].record(stream)
            if turn % _AHEAD == 0:
                marks[max(0, turn - _AHEAD)].synchronize()
        stream.synchronize()
        end = time.perf_counter()
    us = [1e3 * a.elapsed_time(b) for a, b in pairwise(marks)]
    late = [r for r in readings if (begin + end) / 2 <= r.at <= end]
    return {**settled(us), "turns": turns, **summary(late)}


def _sensor(group: Group) -> tuple[Sensor | None, str]:
    """The sensor of this rank's GPU, or why there is none."""
    import torch

    try:
        properties: Any = torch.cuda.get_device_properties(group.device)
        return Sensor("GPU-" + str(properties.uuid).removeprefix("GPU-")), ""
    except Unsupported as error:
        return None, str(error)

"""Timing over ranks on CUDA devices: every sample begins on all of them at the same moment.

The ranks meet on their streams, not on their hosts: a flag to and from every peer by stream memory operations, a
microsecond or two apart. Before that the L2 is swept and the device waits for half a millisecond, while the host
enqueues what is timed, so that the time between the two events is the devices' own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune.domains.c3.collectives.streams import new_event, new_stream
from autotune.domains.c3.collectives.symmetric import DeviceBarrier
from autotune.domains.c3.group import Group
from autotune.measure.policy import Policy
from autotune.measure.timing.timer import ColdCache

_AHEAD_CYCLES = 800_000
"""What the device waits before a sample: a strategy enqueued call by call takes the host up to a few 100 us."""


def own_stream(group: Group) -> Any:
    """The stream that work is timed on. Not the default one, which takes no batched copies."""
    return group.keep("stream", lambda: new_stream(group.device))


def sample_cuda(run: Callable[[], object], group: Group, policy: Policy, n: int) -> list[float]:
    """``n`` samples of ``run`` on this rank in microseconds. A collective call: the caller takes the largest."""
    import torch

    barrier = group.keep("device barrier", lambda: DeviceBarrier(group))
    cold = group.keep("cold cache", lambda: ColdCache(policy.cold_bytes, "cuda"))
    cuda: Any = torch.cuda
    stream = own_stream(group)
    pairs: list[tuple[Any, Any]] = []
    with torch.cuda.stream(stream):
        for _ in range(n):
            begin, end = new_event(timing=True), new_event(timing=True)
            cold.flush()
            cuda._sleep(_AHEAD_CYCLES)
            barrier(stream.cuda_stream)
            begin.record(stream)
            run()
            end.record(stream)
            pairs.append((begin, end))
    torch.cuda.synchronize()
    return [1e3 * begin.elapsed_time(end) for begin, end in pairs]

"""Who runs what lies between two regions, with ``max-autotune``: Inductor's kernels or torch's own library calls.

``max-autotune`` has Inductor time its templates beside a library's product when it compiles, one by one. Which of the
two ways runs a piece of library calls faster as a whole is timed here: templates are not always ahead where other
layouts come with them than torch would choose, or where they run in other company than they were timed in.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from autotune.fusion.regions import is_random
from autotune.runtime.partition import is_mutation

log = logging.getLogger("autotune")

ROUNDS = 9
_REPLAYS = 5
_SHARE = 0.25  # of the device's free memory that random inputs may take
_MARGIN = 0.98  # of Inductor's time, which stays where the two tie

Call = Callable[[], object]


def wanted(patches: Mapping[str, Any]) -> bool:
    """Whether the user's settings for Inductor ask to time alternatives while compiling."""
    return any(key.startswith("max_autotune") and value for key, value in patches.items())


def torch_is_faster(piece: fx.GraphModule, compiled: Callable[..., Any]) -> bool:
    """Whether the calls of an aten graph take less as they are than ``compiled``, Inductor's code for it.

    Both are timed with random inputs, warm, on a GPU as CUDA graphs. What writes, draws random numbers, does not fit
    into the memory or fails stays with Inductor.
    """
    nodes = [n for n in piece.graph.nodes if n.op == "call_function"]
    if any(is_mutation(n) or is_random(n) for n in nodes):
        return False
    try:
        with torch.no_grad(), torch._C._DisableAutocast(), torch.utils._python_dispatch._disable_current_modes():
            given = [n.meta["val"] for n in piece.graph.nodes if n.op == "placeholder"]
            inputs = _random(given)
            if inputs is None:
                return False
            device = next((t.device for t in inputs), torch.device("cpu"))
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return False  # the user's graph, which waiting for the device would end
            ours, theirs = _timed((lambda: piece.forward(*inputs), lambda: compiled(*inputs)), device)
    except Exception:
        log.debug("a piece was not timed: %s", piece.graph, exc_info=True)
        return False
    log.debug("%d library calls: %.1f us by torch, %.1f by Inductor", len(nodes), ours, theirs)
    return ours < _MARGIN * theirs


def _random(like: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Tensors of these shapes, strides and types; None where they would take too much memory.

    Floats are random, as zeros would spare a GPU power and so be too fast. Integers are 0, which is a valid index.
    """
    spans = [1 + sum((n - 1) * abs(s) for n, s in zip(t.shape, t.stride(), strict=True)) for t in like]
    sizes = [span * t.element_size() for span, t in zip(spans, like, strict=True)]
    cuda = {t.device for t in like if t.is_cuda}
    if len({t.device for t in like}) > 1 or any(sum(sizes) > _SHARE * torch.cuda.mem_get_info(d)[0] for d in cuda):
        return None
    made = []
    for t, span in zip(like, spans, strict=True):
        flat = torch.zeros(span, dtype=t.dtype, device=t.device)
        if t.is_floating_point() and t.element_size() > 1:
            flat.uniform_(-1, 1, generator=_generator(t.device))
        made.append(flat.as_strided(t.shape, t.stride()))
    return made


def _generator(device: torch.device) -> torch.Generator:
    """One of our own: the user's random numbers go on as if nothing had been drawn."""
    return torch.Generator(device).manual_seed(0)


def _timed(calls: Sequence[Call], device: torch.device) -> list[float]:
    """Least microseconds of each, in turn; the work of a GPU alone, without its launches, where it can be captured."""
    cuda = device.type == "cuda"
    taken: list[list[float]] = [[] for _ in calls]
    with torch.cuda.device(device) if cuda else nullcontext():  # events are of the current one
        if cuda:
            for call in calls:
                for _ in range(2):
                    call()
        run = [_on_gpu(call) if cuda else _on_cpu(call) for call in calls]
        for _ in range(ROUNDS):
            for k, one in enumerate(run):
                taken[k].append(one())
    return [min(t) for t in taken]


def _on_cpu(call: Call) -> Callable[[], float]:
    call()

    def once() -> float:
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6

    return once


def _on_gpu(call: Call) -> Callable[[], float]:
    from autotune.measure.timer import capture

    run = capture(call)

    def once() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        run()  # keeps the device busy until the events are in the queue
        begin.record()
        for _ in range(_REPLAYS):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / _REPLAYS

    return once

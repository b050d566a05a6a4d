"""Ranks of one program deploy alike, or not at all, where their graphs hold collectives.

Ranks whose databases differ would compile different graphs: collectives could come in another order, which hangs, and
what ranks compute twice would be rounded differently. So before the first graph with a collective is compiled, each
rank says what it would deploy from, through the key-value store that ``torch.distributed`` has anyway. Nothing is sent
by a collective: ranks may compile at different times, and find some graphs in caches.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autotune import numerics
from autotune.device import environment, identify
from autotune.runtime.deployment import deployment

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
    """Whether ranks wait for each other in a graph, or will once its distributed tensors are traced."""
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
    """Whether stored kernels may stand in a graph: all ranks look up in the same, or nobody waits in it for another.

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
            whole = state + numerics.text(numerics.read([device])).encode()
            told = _settled[id(store)] = (state, _settle(store, rank, ranks, whole))
            if not told[1]:
                deployment().warn_once("ranks differ", _DIFFERENT)
    if told[1] and told[0] != state:
        deployment().warn_once("ranks changed", _CHANGED)
    return told[1]


def _settle(store: Any, rank: int, ranks: int, state: bytes) -> bool:
    """Tell what this rank deploys from, and find out whether all told the same: the first to know says it for all."""
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


__all__ = ["has_collectives", "ranks_agree"]

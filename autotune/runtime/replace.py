"""From the regions of an aten graph to those that will run stored kernels, and what became of each.

This is where a look-up turns into something that runs: a stored winner that cannot be loaded, or fails when it is
launched, costs nothing but a warning, and the region runs as the user had it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autotune.device import environment, identify
from autotune.errors import UserError
from autotune.fusion.graph import Graph
from autotune.fusion.regions import Region, find_regions
from autotune.runtime.assemble import leaves_nothing
from autotune.runtime.counters import count
from autotune.runtime.database import deploy_store, record_misses, warn_once
from autotune.runtime.executor import Executor, TensorSpec, load_executor
from autotune.runtime.match import Level, Match, match
from autotune.runtime.partition import Cut

log = logging.getLogger("autotune")

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Found:
    """The regions of one aten graph, each with what is stored for it."""

    regions: tuple[Region, ...]
    matches: tuple[Match, ...]

    @property
    def hits(self) -> int:
        return sum(m.level is not Level.NONE for m in self.matches)

    @property
    def kernels(self) -> int:
        """Hits that would run stored kernels or eager code: what is worth cutting the graph for."""
        return sum(_takes_over(m) for m in self.matches)

    @property
    def eager(self) -> int:
        """Hits that would run eager code."""
        return sum(m.schedule is not None and m.schedule.winner == "eager" for m in self.matches)

    def runs_eagerly(self, gm: fx.GraphModule) -> bool:
        """Whether only eager code is to run: it was the fastest in every region, and the rest is of libraries."""
        won = all(m.schedule is not None and m.schedule.winner == "eager" for m in self.matches)
        return won and leaves_nothing(gm, {node for region in self.regions for node in region.nodes})


def find(gm: fx.GraphModule, *, tell: bool = True) -> Found:
    """Look up every region of an aten graph. Never fails: whatever goes wrong is told once and finds nothing.

    Args:
        gm: as AOTAutograd makes it.
        tell: count hits and misses and record the misses; False where the same graph was looked up before.
    """
    try:
        regions = tuple(find_regions(gm))
    except Exception as e:
        warn_once(f"regions {type(e).__name__}", f"autotune: a graph was not looked up: {type(e).__name__}: {e}")
        log.debug("the graph that was not looked up: %s", gm.graph, exc_info=True)
        regions = ()
    found = Found(regions, tuple(_match(region) for region in regions))
    if tell:
        count("graphs")
        _tell(found)
    return found


def _match(region: Region) -> Match:
    device = device_of(region)
    if region.workload is None or device is None:
        return Match(Level.NONE, reason=region.reason or "not on a device autotune knows")
    try:
        return match(region.workload, deploy_store(), identify(device), environment(device))
    except UserError as e:
        warn_once("match", f"autotune: {e}; nothing is looked up")
    except Exception as e:
        warn_once(f"match {region.workload.fingerprint}", f"autotune: looking up {region.workload.label} failed: {e!r}")
    return Match(Level.NONE, reason="the look-up failed")


def _tell(found: Found) -> None:
    missed: dict[str, list[Any]] = {}
    for region, m in zip(found.regions, found.matches, strict=True):
        device = device_of(region)
        if m.level is not Level.NONE:
            assert m.schedule is not None
            count("hits")
            count("hits_other_rows", int(m.level is Level.OTHER_ROWS))
            count("baseline_wins", int(m.schedule.config is None))
        elif region.workload is None or device is None:
            count("unsupported")
        else:
            count("misses")
            missed.setdefault(device, []).append((region.workload, m.reason))
        log.debug("%s: %s %s", region.workload.label if region.workload else "region", m.level, m.reason)
    for device, entries in missed.items():
        record_misses(entries, device)


def device_of(region: Region) -> str | None:
    """ "cpu" or "cuda:N" where the region lies, or None where autotune has nothing for such a device."""
    value = next((v for v in (n.meta.get("val") for n in region.outputs) if isinstance(v, torch.Tensor)), None)
    if value is None or value.device.type not in DEVICES:
        return None
    return "cpu" if value.device.type == "cpu" else f"cuda:{value.device.index or 0}"


def _takes_over(m: Match) -> bool:
    """Whether a hit changes what runs. Where Inductor won, the region stays in the graph for Inductor to fuse."""
    return m.schedule is not None and (m.schedule.config is not None or m.schedule.winner == "eager")


def cuts(found: Found) -> list[Cut]:
    """What to cut out of the graph: hits, ready to run."""
    out = []
    for region, m in zip(found.regions, found.matches, strict=True):
        if not _takes_over(m):
            continue
        assert m.schedule is not None
        run: Any
        if m.schedule.config is None:
            run = region.submodule.forward
        else:
            run = _load(region, m)
        if run is not None:
            out.append(Cut(region.nodes, region.inputs, region.outputs, run))
    return out


def _load(region: Region, m: Match) -> Callable[..., Sequence[torch.Tensor]] | None:
    assert region.workload is not None
    assert m.schedule is not None
    label = region.workload.label or region.workload.fingerprint[:12]
    device = device_of(region)
    assert device is not None
    try:
        executor = load_executor(
            Graph.from_json(region.workload.spec),
            m.schedule,
            region.binding.inputs,
            region.binding.outputs,
            [TensorSpec.of(n.meta["val"]) for n in region.inputs],
            [TensorSpec.of(n.meta["val"]) for n in region.outputs],
            torch.device(device),
        )
    except Exception as e:
        count("fallbacks")
        warn_once(f"load {region.workload.fingerprint}", f"autotune: the stored kernel of {label} is not used: {e}")
        return None
    return _guarded(executor, region.submodule, label)


def _guarded(executor: Executor, eager: fx.GraphModule, label: str) -> Callable[..., Sequence[torch.Tensor]]:
    """The executor's call, and the region's eager form from the first launch that fails on."""
    run: Callable[..., Sequence[torch.Tensor]] = executor.call

    def plain(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        # The kernel knows neither, and AOTAutograd's wrapper, which turns both off, may have been skipped.
        with torch.no_grad(), torch._C._DisableAutocast():
            result: Sequence[torch.Tensor] = eager.forward(*tensors)
            return result

    def call(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        nonlocal run
        try:
            return run(*tensors)
        except torch.OutOfMemoryError:
            raise  # eager code would need at least as much
        except Exception as e:
            if run is plain:
                raise
            run = plain
            count("fallbacks")
            warn_once(f"run {id(executor)}", f"autotune: the stored kernel of {label} failed and is given up: {e}")
            return run(*tensors)

    return call

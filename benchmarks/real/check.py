"""The separate processes of :mod:`benchmarks.model_check`: prepare a model, or run its steps compiled.

A folder holds what the processes of a model share: the database, the reference results, and each compiler's caches.
"""

from __future__ import annotations

import os
import resource
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.real.families import AUTOTUNE, COMPILE
from benchmarks.real.models import Made, make

Found = dict[str, Any]
INFINITE = 1e30
"""The error of a result of another form, or one that is not finite where the reference is. JSON has no infinity."""


def prepare(name: str, device: str, folder: str) -> Found:
    """Store a schedule for each region of a model's step, and its results by eager mode, in fp64 where it can.

    The schedule is the default one, the first candidate of a search: what is checked is that it is found and right.
    """
    from autotune.domains.fusion.program_spec import workloads_of

    made = _made(name, device)
    _set_caches(folder, AUTOTUNE)
    began = _cpu_seconds()
    counted = workloads_of(made.module, (), made.inputs, name, train=made.train)
    captured = _cpu_seconds() - began
    refused = _store_defaults([w for w, _ in counted], device, os.path.join(folder, "schedules.db"))
    torch._dynamo.reset()
    precise, results = _reference(name, device)
    torch.save(results, Path(folder, "reference.pt"))
    return {
        "model": made.family.about,
        "library": made.family.library,
        "kind": made.kind,
        "parameters": made.parameters,
        "regions": sum(n for _, n in counted),
        "different_regions": len(counted),
        "refused": refused,
        "reference": precise,
        "capture_s": round(captured, 2),
    }


def take_steps(name: str, device: str, folder: str, who: str, options: Mapping[str, Any] | None = None) -> Found:
    """Two steps of a model compiled by ``who``: what the first one cost, and how far off the results of both are.

    Args:
        who: "compile" (torch.compile as it is) or "autotune". Its caches are those in ``folder``: empty at first, those
            that an earlier process left later.
        options: for torch.compile, such as ``{"dynamic": True}``.
    """
    from torch._dynamo.utils import counters

    import autotune

    made = _made(name, device)
    _set_caches(folder, who)
    os.environ["AUTOTUNE_DB"] = os.path.join(folder, "schedules.db")
    backend = "inductor" if who == COMPILE else "autotune"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began, clock = _cpu_seconds(), time.monotonic()
        run = torch.compile(made.module, backend=backend, **(options or {}))
        first = _step(run, made)
        cost, wall = _cpu_seconds() - began, time.monotonic() - clock
        graphs = counters["stats"]["unique_graphs"]
        second = _step(run, made)
    reference = torch.load(Path(folder, "reference.pt"))
    return {
        "seconds": round(cost, 3),
        "wall_s": round(wall, 3),
        "error": max(_apart(first, reference), _apart(second, reference)),
        "graphs": graphs,
        "recompiled": counters["stats"]["unique_graphs"] - graphs,
        "breaks": sum(counters["graph_break"].values()),
        "cached": counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
        "counters": {k: v for k, v in autotune.counters().items() if v},
    }


def by_operators(name: str, device: str, folder: str) -> Found:
    """As :func:`prepare`, then a step with our kernels and one without, by :mod:`benchmarks.real.operators`."""
    import functools

    import autotune
    from autotune.runtime.deployment import deployment
    from benchmarks.real.operators import backend

    found = prepare(name, device, folder)
    os.environ["AUTOTUNE_DB"] = os.path.join(folder, "schedules.db")
    reference = torch.load(Path(folder, "reference.pt"))
    found |= {"error": {}, "graphs": {}, "breaks": {}}
    for who in (COMPILE, AUTOTUNE):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        deployment().reset_counters()
        made = _made(name, device)
        run = torch.compile(made.module, backend=functools.partial(backend, ours=who == AUTOTUNE))
        found["error"][who] = _apart(_step(run, made), reference)
        found["graphs"][who] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found["breaks"][who] = sum(torch._dynamo.utils.counters["graph_break"].values())
    return found | {"counters": {k: v for k, v in autotune.counters().items() if v}}


def _made(name: str, device: str) -> Made:
    made = make(name, device, tiny=True)
    without_chance(made.module)
    return made


def without_chance(module: nn.Module) -> None:
    """Set every probability of dropping something to zero, so that two steps may be compared."""
    for part in module.modules():
        for owner in (part, getattr(part, "config", None)):
            for key, value in list(vars(owner).items()) if owner is not None else ():
                if ("drop" in key or (key == "p" and isinstance(part, nn.modules.dropout._DropoutNd))) and isinstance(
                    value, float
                ):
                    setattr(owner, key, 0.0)


def _step(run: Callable[..., Any], made: Made) -> list[Tensor]:
    """The result, and for training all gradients. Those that are not made are zero: what a graph hands on without a use
    has a gradient of zeros under torch.compile, and none without."""
    if not made.train:
        with torch.no_grad():
            return [run(**made.inputs).detach().clone()]
    made.module.zero_grad()
    loss = run(**made.inputs)
    loss.backward()
    made_ones = ((p, p.grad) for p in made.module.parameters())
    return [loss.detach().clone(), *(torch.zeros_like(p) if g is None else g.clone() for p, g in made_ones)]


def _reference(name: str, device: str) -> tuple[str, list[Tensor]]:
    """The step's results by eager mode, and their type: fp64, or fp32 for a model without fp64 support."""
    if not name.endswith("_decode"):  # the cache has its own type
        try:
            made = _made(name, device)
            made.module.double()
            inputs = {k: v.double() if v.is_floating_point() else v for k, v in made.inputs.items()}
            return "fp64", _step(made.module, replace(made, inputs=inputs))
        except RuntimeError:
            pass
    made = _made(name, device)
    return "fp32", _step(made.module, made)


def _apart(got: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """The largest difference of an element, as a part of its tensor's largest one; at most :data:`INFINITE`.

    Gradients that cancel to nothing (a key's bias before a softmax) are held against a thousandth of the largest one.
    """
    sizes = [float(r.double().abs().max()) if r.numel() else 0.0 for r in reference]
    least = max(sizes[1:], default=0.0) * 1e-3
    worst = 0.0
    for a, b, size in zip(got, reference, sizes, strict=True):
        if a.shape != b.shape or a.isfinite().ne(b.isfinite()).any():
            return INFINITE
        if b.numel():
            difference = (a.double() - b.double()).abs().nan_to_num().max()
            worst = max(worst, float(difference) / (max(size, least) or 1.0))
    return min(worst, INFINITE)


def _store_defaults(workloads: Sequence[Any], device: str, db: str) -> dict[str, str]:
    """Store the default configuration of each workload as if a search had found it; gives those that have none."""
    from autotune.store import Store
    from tests.support.deployment import store_default

    refused = {}
    with Store.open(db) as store:
        for workload in workloads:
            try:
                store_default(store, workload, device)
            except Exception as error:
                refused[workload.label] = f"{type(error).__name__}: {error}"
    return refused


def _set_caches(folder: str, who: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, who)
    os.environ["AUTOTUNE_CACHE_DIR"] = os.path.join(folder, "kernels")


def _cpu_seconds() -> float:
    """Of this process and of the compilers that it started and awaited."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime

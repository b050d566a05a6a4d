"""Host time of one call of a stored kernel, compared with eager mode and Inductor: the launch's cost for the program.

    python -m benchmarks.deploy_host --out benchmarks/results/h200/deploy_host.json

Shapes are so small that the GPU keeps up. ``executor_us`` is the call of a stored kernel as Inductor's code makes it
(with allocated buffers, launched kernel); ``autotune_us`` the whole call of ``torch.compile(backend="autotune")``
with Dynamo's guards; ``eager_us`` and ``inductor_us`` whole calls too. Medians over batches taken in turn, all in host
microseconds; ``floor_us`` is, as everywhere, the bytes over the copy bandwidth: the device is not what is timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch.nn import functional as F

from autotune.device import environment, identify
from autotune.runtime.backend import deploy_backend
from autotune.runtime.inductor import region_call
from autotune.store import Store
from benchmarks import form
from benchmarks.fusion.floor import copy_bandwidth
from tests.support.capture_helpers import regions_of
from tests.support.deployment import store_default

ROWS, COLS = 64, 1024
DEVICE = "cuda:0"


def layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (COLS,), w, b)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x * 0.125, -1)


def gelu_norm(x: torch.Tensor, r: torch.Tensor, b: torch.Tensor, w: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.gelu(x + b) + r, (COLS,), w, c)


def inputs(fn: Callable[..., Any], device: str = DEVICE, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    def t(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    if fn is softmax:
        return (t(ROWS, COLS),)
    if fn is layer_norm:
        return (t(ROWS, COLS), t(COLS), t(COLS))
    return (t(ROWS, COLS), t(ROWS, COLS), t(COLS), t(COLS), t(COLS))


def store(fn: Callable[..., Any], args: Sequence[Any], device: str = DEVICE) -> int:
    """Build and store the default schedule of every region, as if a search had found it."""
    regions = regions_of(fn, *args)
    with Store.open() as database:
        for region in regions:
            assert region.workload is not None, region.reason
            store_default(database, region.workload, device)
    torch._dynamo.reset()
    return len(regions)


def host_us(calls: dict[str, Callable[[], Any]], rounds: int = 30, n: int = 200) -> dict[str, dict[str, float]]:
    """Host time of each call in microseconds: median and best of batches taken in turn.

    The GPU is waited for only between batches, which are shorter than the driver's launch queue.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(500):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(n):
                call()
            times[name].append((time.perf_counter() - start) / n * 1e6)
    torch.cuda.synchronize()
    return {name: {"median": statistics.median(t), "best": min(t)} for name, t in times.items()}


def launcher_of(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """The function that Inductor's code calls for a one-region function, and its arguments: the region's tensors,
    results too, and the stream."""
    found: list[Any] = []
    load = region_call.load_call

    def loading(text: str) -> Callable[..., None]:
        call = load(text)

        def kept(*given: Any) -> None:
            found[:] = [call, list(given)]
            call(*given)

        return kept

    region_call.load_call = loading
    try:
        with torch._inductor.config.patch(force_disable_caches=True):
            torch.compile(fn, backend=deploy_backend)(*args)
    finally:
        region_call.load_call = load
    torch._dynamo.reset()
    return found[0], found[1]


def measure() -> list[dict[str, Any]]:
    rows = []
    for fn in (layer_norm, softmax, gelu_norm):
        args = inputs(fn)
        run, given = launcher_of(fn, args)
        ours = torch.compile(fn, backend=deploy_backend)
        theirs = torch.compile(fn)
        torch.testing.assert_close(ours(*args), fn(*args), atol=1e-4, rtol=1e-4)
        theirs(*args)
        times = host_us(
            {
                "executor": lambda run=run, given=given: run(*given),
                "autotune": lambda ours=ours, args=args: ours(*args),
                "eager": lambda fn=fn, args=args: fn(*args),
                "inductor": lambda theirs=theirs, args=args: theirs(*args),
            }
        )
        rows.append({"name": fn.__name__, "inputs": len(args), "host_us": times})
        print(fn.__name__, {k: f"{v['median']:.1f} (best {v['best']:.1f})" for k, v in times.items()}, flush=True)
        torch._dynamo.reset()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    from autotune.measure.policy import default_policy

    os.environ["AUTOTUNE_DB"] = os.path.join(tempfile.mkdtemp(prefix="autotune-"), "host.db")
    for fn in (layer_norm, softmax, gelu_norm):
        store(fn, inputs(fn))
    bandwidth = copy_bandwidth(default_policy(DEVICE), DEVICE)
    cases = []
    for row in measure():
        moved = 4 * ROWS * COLS * {"layer_norm": 2, "softmax": 2, "gelu_norm": 3}[row["name"]]
        us = {name: round(times["median"], 2) for name, times in row["host_us"].items()}
        case = {
            "name": f"host time of {row['name']} f32 {ROWS}x{COLS}, {row['inputs']} inputs",
            "bytes": moved,
            "floor_us": round(moved / bandwidth, 3),
            "eager_us": us["eager"],
            "inductor_us": us["inductor"],
            "inductor_best_us": None,
            "xla_us": None,
            "autotune_us": us["autotune"],
            "executor_us": us["executor"],
            "executor_fastest_batch_us": round(row["host_us"]["executor"]["best"], 2),
        }
        cases.append(case)
    env = environment(DEVICE)
    form.write(args.out, identify(DEVICE).label, cases, {"cuda": str(env.cuda), "driver": str(env.driver)})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

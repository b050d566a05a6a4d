"""The built-in fusion workloads on one GPU: eager, Inductor (default and best flags), tuned, and the copy floor.

    python -m benchmarks.fusion_slice --device cuda:0 --out benchmarks/results/h200/fusion_slice.json

Each workload is first searched with ``autotune search`` (its time is kept as ``search_s``), then everything is
measured in this process: CUDA graph replays with a cold L2, interleaved, medians. The tuned one runs as it would be
deployed, through ``torch.compile(..., backend="autotune")``. ``bert_layer`` is counted twice: the sum over its
memory-intensive regions (the case's own times), and the whole layer with its matrix products (``layer_*_us``).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import form
from benchmarks.fusion.floor import copy_bandwidth

BEST = (
    {"max_autotune": True, "coordinate_descent_tuning": True, "combo_kernels": True},
    {"max_autotune_pointwise": True, "coordinate_descent_tuning": True, "triton.cooperative_reductions": True},
)
"""Option sets of ``torch.compile`` besides the default; ``inductor_best_us`` is the fastest of all of them."""

TARGETS = (
    "layer_norm",
    "rms_norm",
    "softmax_mask",
    "bias_gelu_residual_layer_norm",
    "bias_gelu_residual_layer_norm_f32",
    "swiglu_rms_norm",
    "cross_entropy",
    "bert_layer",
)


def search(target: str, args: argparse.Namespace, db: str) -> float:
    """Run the search as a user would; returns its wall seconds."""
    command = [sys.executable, "-m", "autotune", "search", "fusion", target, "--device", args.device, "--json"]
    command += ["--db", db]
    command += ["--trials", str(args.trials), "--timeout", str(args.timeout), "--seed", str(args.seed)]
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.monotonic() - begin
    if done.returncode:
        raise SystemExit(f"search of {target} failed:\n{done.stderr}")
    return seconds


def compiled(fn: Callable[..., Any], args: Any, **kw: Any) -> Callable[[], object]:
    """``torch.compile`` of ``fn``, warmed up, as something to be timed."""
    import torch

    torch._dynamo.reset()
    run = torch.compile(fn, dynamic=False, **kw)

    def call() -> object:
        with torch.no_grad():
            return run(*args)

    call()
    return call


def contenders(fn: Callable[..., Any], args: Any) -> dict[str, Callable[[], object]]:
    """Everything that is compared for one callable."""
    import torch

    from autotune.runtime.backend import deploy_backend

    def eager() -> object:
        with torch.no_grad():
            return fn(*args)

    found = {"eager": eager, "inductor": compiled(fn, args), "autotune": compiled(fn, args, backend=deploy_backend)}
    for k, options in enumerate(BEST):
        try:
            found[f"best{k}"] = compiled(fn, args, options=options)
        except Exception as error:  # an option this torch does not have
            print(f"  options {options} not run: {type(error).__name__}", file=sys.stderr)
    return found


def times(fn: Callable[..., Any], args: Any, policy: Any, device: str) -> tuple[dict[str, float], Mapping[str, int]]:
    """Medians in microseconds by contender, and the counters of the deployment."""
    import autotune
    from autotune.measure.timer import interleave
    from autotune.runtime.deployment import deployment

    deployment().reset_counters()
    runs = contenders(fn, args)
    counted = dict(autotune.counters())
    got = {name: statistics.median(s) for name, s in interleave(runs, policy, device).items()}
    got["inductor_best"] = min(v for k, v in got.items() if k == "inductor" or k.startswith("best"))
    return {k: v for k, v in got.items() if not k.startswith("best")}, counted


def region_times(target: str, policy: Any, device: str) -> tuple[dict[str, float], int, list[dict[str, Any]]]:
    """Sum of each contender's time over a target's regions, the bytes of the regions, and the regions themselves."""
    import torch

    from autotune.compiler.regions import aten
    from autotune.domains.fusion.bench import source_inputs
    from autotune.domains.fusion.program_spec import captured
    from autotune.ir.graph import Graph
    from autotune.ir.inputs import make_inputs

    total: dict[str, float] = {}
    moved, regions = 0, []
    for workload, count in captured(target, None, device).workloads:
        graph = Graph.from_json(workload.spec)
        flat = make_inputs(graph, 0, device)
        module = aten.from_json(workload.source, torch.device(device).type)
        got, counted = times(module, source_inputs(workload.source, flat, torch.device(device)), policy, device)
        for name, us in got.items():
            total[name] = total.get(name, 0.0) + count * us
        moved += count * graph.bytes_moved
        regions.append({"label": workload.label, "count": count, "hits": counted.get("hits", 0)} | _us(got))
    return total, moved, regions


def _us(got: Mapping[str, float]) -> dict[str, float]:
    return {f"{k}_us": round(v, 3) for k, v in got.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--trials", type=int, default=120)
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds a search may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="*", default=list(TARGETS))
    parser.add_argument("--db", help="database to tune into; a new one in a temporary folder if not given")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    import dataclasses

    import torch

    from autotune.device import environment, identify
    from autotune.domains.fusion.program_spec import resolve
    from autotune.measure.policy import default_policy

    db = args.db or os.path.join(tempfile.mkdtemp(prefix="autotune-"), "slice.db")
    os.environ["AUTOTUNE_DB"] = db
    seconds = {}
    for target in args.targets:
        seconds[target] = search(target, args, db)
        print(f"searched {target} in {seconds[target]:.0f} s", flush=True)
    torch.cuda.set_device(args.device)
    policy = dataclasses.replace(default_policy(args.device), final_rounds=100, final_s=30.0)
    bandwidth = copy_bandwidth(policy, args.device)
    print(f"copy: {bandwidth / 1e6:.2f} TB/s")
    cases = []
    for target in args.targets:
        fn, (inputs, _), label = resolve(target, None, args.device)
        whole, counted = times(fn, inputs, policy, args.device)
        got, moved, regions = region_times(target, policy, args.device)
        single = len(regions) == 1 and regions[0]["count"] == 1
        case: dict[str, Any] = {
            "name": regions[0]["label"] if single else f"{label}, its {sum(r['count'] for r in regions)} regions",
            "bytes": moved,
            "floor_us": round(moved / bandwidth, 3),
            **_us({k: (whole if single else got)[k] for k in ("eager", "inductor", "inductor_best")}),
            "xla_us": None,
            "autotune_us": round((whole if single else got)["autotune"], 3),
            "search_s": round(seconds[target], 1),
            "hits": counted.get("hits", 0),
            "regions": regions,
        }
        if not single:
            case |= {f"layer_{k}_us": round(v, 3) for k, v in whole.items()}
        cases.append(case)
        print(json.dumps({k: v for k, v in case.items() if k != "regions"}), flush=True)
        torch.cuda.empty_cache()
    ratios = [c["inductor_best_us"] / c["autotune_us"] for c in cases]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    identity, env = identify(args.device), environment(args.device)
    versions = {"cuda": str(env.cuda or ""), "driver": str(env.driver or "")}
    form.write(args.out, identity.label, cases, {k: v for k, v in versions.items() if v})
    print(f"{'case':44s} {'floor':>8s} {'eager':>8s} {'inductor':>8s} {'best':>8s} {'autotune':>8s} {'ratio':>6s}")
    for c, r in zip(cases, ratios, strict=True):
        row = [c["floor_us"], c["eager_us"], c["inductor_us"], c["inductor_best_us"], c["autotune_us"]]
        print(f"{c['name']:44s} " + " ".join(f"{v:8.1f}" for v in row) + f" {r:6.2f}")
    print(f"geometric mean over the best of Inductor: {mean:.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

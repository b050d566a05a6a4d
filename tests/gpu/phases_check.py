"""What a grid barrier in place of a launch wins: the same groups as launches and as phases of one, verified and timed.

    python tests/gpu/phases_check.py [--only NAME ...] [--device cuda:0] [--dry]

Of every function all plans that the search would look at, each under some schedules: the groups' defaults, and those
with other block sizes and persistent grids. Prints the best time of each plan with a cold L2, eager and Inductor too,
and a last line "checked N bad M"; exit code 1 if M is not 0. Writes ``$OUT/phases_check.json`` if OUT is set. ``--dry``
only compiles, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "codegen")]

import command  # noqa: E402
import torch  # noqa: E402
from timed import timed  # noqa: E402
from torch import Tensor  # noqa: E402
from zoo import BF16, Case, T, relu_statistics, workloads_of  # noqa: E402

from autotune.compiler.planner.beam import shapes  # noqa: E402
from autotune.compiler.planner.plan import make_plan, write_text  # noqa: E402
from autotune.domains.fusion.task import FusionBench, FusionTask  # noqa: E402
from autotune.errors import BuildError, Unsupported  # noqa: E402
from autotune.measure.policy import default_policy  # noqa: E402
from autotune.measure.timer import interleave  # noqa: E402
from autotune.task import Artifact, Config  # noqa: E402

PLANS = 8


def columns_then_rows(x: Tensor) -> Tensor:
    y = x - x.amax(0)
    z = y - y.sum(1, keepdim=True)
    return z - z.amax(0)


def softmax_of_everything(x: Tensor) -> Tensor:
    return torch.softmax(x.flatten(), 0).view(x.shape)


def centred(x: Tensor) -> Tensor:
    """Normalised over columns, then over rows."""
    y = (x - x.mean(0)) * torch.rsqrt(x.var(0, unbiased=False) + 1e-5)
    return torch.softmax(y, 1)


CASES = {
    c.name: c
    for c in (
        Case("columns_then_rows", columns_then_rows, (T(2048, 1024),)),
        Case("softmax_of_everything", softmax_of_everything, (T(1024, 1024),)),
        Case("softmax_of_much", softmax_of_everything, (T(4096, 4096),)),
        Case("relu_statistics", relu_statistics, (T(4096, 1024),)),
        Case("centred", centred, (T(4096, 1024, d=BF16),)),
    )
}


def schedules(task: FusionTask, text: str) -> Iterator[Config]:
    """The groups' defaults under a plan, agreed, and variants of all of them alike."""
    plan = make_plan(task.graph, "cuda", text)
    parts = [on.default(g.graph) for on, g in task.sides(plan)]
    for change in ({}, {"blocks_per_sm": 1}, {"blocks_per_sm": 4}, {"rows_per_block": 1}, {"rows_per_block": 8}):
        config = task.joined(plan, [c | {k: v for k, v in change.items() if k in c} for c in parts])
        if task.reject(config) is None:
            yield config | {"plan": text}


def compiled(name: str, config: Config, device: str) -> Artifact | str:
    """The artifact, or why there is none; runs in the pool."""
    (work,) = workloads_of(CASES[name])
    try:
        return FusionTask(work, device).build(config)
    except BuildError as error:
        return str(error)


def proposals(task: FusionTask) -> list[tuple[str, Config]]:
    """(plan, configuration) of every candidate, each once."""
    found: dict[str, tuple[str, Config]] = {}
    for shape in shapes(task.graph, "cuda", task.method, task.estimates, PLANS):
        text = write_text(shape)
        try:
            found |= {json.dumps(c, sort_keys=True): (text, c) for c in schedules(task, text)}
        except Unsupported as error:
            print(f"  {text}: {error}")
    return list(found.values())


def compare(name: str, options: argparse.Namespace, pool: ProcessPoolExecutor) -> tuple[int, int, dict[str, Any]]:
    """(candidates, wrong ones, the best microseconds of each plan and of the baselines) of one function."""
    (work,) = workloads_of(CASES[name])
    task = FusionTask(work, options.device)
    print(f"{name} {CASES[name].inputs[0]().shape}", flush=True)
    made = proposals(task)
    bench = None if options.dry else FusionBench(work, options.device)
    best: dict[str, tuple[float, Any]] = {}
    need: dict[str, str] = {}
    bad = 0
    built = pool.map(compiled, [name] * len(made), [c for _, c in made], [options.device] * len(made))
    for seed, ((text, config), artifact) in enumerate(zip(made, built, strict=True)):
        if isinstance(artifact, str):
            print(f"  refused: {artifact} {text}", flush=True)
            continue
        took, run = 0.0, None
        if bench is not None:
            found = timed(bench, config, artifact, seed, options.device, 30)
            if found is None:
                bad += 1
                continue
            run, took = found
        if text not in best or took < best[text][0]:
            best[text] = (took, run)
            need[text] = "; ".join(
                f"{k.launch.get('grid', '')} x {k.launch['block']}, {k.resources['registers']} registers"
                for k in artifact.kernels
            )
    us = {text: took for text, (took, _) in best.items()}
    if bench is not None:
        runs = {text: run for text, (_, run) in best.items()}
        runs |= {which: make() for which, make in bench.baselines().items()}
        policy = replace(default_policy(options.device), final_rounds=50, final_s=3.0)
        us = {k: statistics.median(v) for k, v in interleave(runs, policy, options.device).items()}
    for text, took in sorted(us.items(), key=lambda item: item[1]):
        print(f"  {took:8.2f} us  {text}  {need.get(text, '')}", flush=True)
    return len(made), bad, us


def main(argv: Sequence[str] | None = None) -> int:
    options = command.parsed(command.parser(__doc__, list(CASES)), argv)
    checked, wrong, out = 0, 0, {}
    with command.pool(options) as pool:
        for name in options.only:
            n, bad, out[name] = compare(name, options, pool)
            checked, wrong = checked + n, wrong + bad
    command.keep("phases_check", out)
    print(f"checked {checked} bad {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

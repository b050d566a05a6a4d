"""Kernels that may overwrite an input: their results there, and the cost of `ld.global`.

    python tests/gpu/in_place_check.py [--db package:h200] [--search 0] [--keep] [--device cuda:0] [--dry]

Each stored schedule of one such kernel, pointwise or row-wise, is rebuilt and verified. Its results over the
inputs and apart from them have to be bitwise equal. The stored kernel, the rebuilt one, and the latter over its
inputs are timed, interleaved, with a cold L2. ``--search S`` searches each workload for S seconds too, and times the
winner. ``--keep`` replaces the stored kernel by the rebuilt one, so that a step deploys it. It does so
where the kernel is right and over its inputs at most 2% slower. ``autotune import package:h200 --db FILE`` makes a
database that may be changed. Prints a line each and "checked N bad M"; exit code 1 if M is not 0. Writes
``$OUT/in_place_check.json`` if OUT is set. ``--dry`` only compiles, without a GPU.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import autotune
from autotune.compiler.assemble import draft
from autotune.compiler.planner.groups import group_configs
from autotune.compiler.targets.cuda import OVERWRITES
from autotune.device import environment, identify
from autotune.domains.fusion.bench import FusionBench, Runs
from autotune.domains.fusion.task import FusionTask
from autotune.errors import BuildError, Unsupported
from autotune.measure.policy import default_policy
from autotune.measure.quiet import device_lock
from autotune.measure.timer import interleave
from autotune.store import Store
from autotune.store.opening import attach
from autotune.store.records import Schedule
from autotune.task import Artifact
from autotune.workload import Workload
from tests.gpu import command

_SLOWER = 1.02
"""A kernel that is kept for the memory that it saves takes at most so many times the stored one's time."""


def overwrites(artifact: Artifact) -> list[tuple[int, int]]:
    """The (input, output) pairs that may be one tensor: those of the last kernel."""
    return [(i, o) for i, o in artifact.kernels[-1].launch.get(OVERWRITES, ())]


def over_inputs(inputs: list[torch.Tensor], outputs: list[torch.Tensor], pairs: list[tuple[int, int]]) -> list[Any]:
    """The outputs, each in the first of its inputs that is still free."""
    placed: list[Any] = list(outputs)
    used = set[int]()
    for i, o in pairs:
        if i not in used and placed[o] is outputs[o] and inputs[i].numel() == outputs[o].numel():
            used.add(i)
            placed[o] = inputs[i]
    return placed


def searched(workload: Workload, device: str, seconds: float) -> Schedule | None:
    """The winner of a search from an empty database, or None where a baseline won."""
    with tempfile.TemporaryDirectory() as folder:
        (result,) = autotune.search(workload, device=device, db=f"{folder}/new.db", timeout=seconds)
        with Store.open(f"{folder}/new.db") as store:
            found = store.get_schedule(workload.fingerprint, identify(device).fingerprint, environment(device))
        return found if result.winner == "autotune" else None


def check(schedule: Schedule, workload: Workload, anew: Artifact, device: str, seconds: float) -> dict[str, Any]:
    """Verdicts and medians, in microseconds, of one workload's kernels."""
    assert schedule.config is not None
    assert schedule.artifact is not None
    bench = FusionBench(workload, device)
    runs: dict[str, Any] = {
        "stored": bench.load(schedule.config, schedule.artifact),
        "anew": bench.load(schedule.config, anew),
    }
    winner = searched(workload, device, seconds) if seconds else None
    if winner is not None and winner.config is not None and winner.artifact is not None:
        runs["searched"] = bench.load(winner.config, winner.artifact)
    verdict = bench.verify(runs["anew"], 3)
    beside = [
        torch.empty(bench.graph.output_numel(k), dtype=getattr(torch, o.dtype), device=device)
        for k, o in enumerate(bench.graph.outputs)
    ]
    given = [t.clone() for t in bench.inputs]
    over = over_inputs(given, beside, overwrites(anew))
    runs["anew"].executor.run_into([t.clone() for t in given], beside)
    runs["anew"].executor.run_into(given, over)
    torch.cuda.synchronize(device)
    same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(over, beside, strict=True))

    def into(run: Runs, inputs: list[torch.Tensor], outputs: list[Any]) -> Callable[[], None]:
        return lambda: run.run_into(inputs, outputs)

    timed = {name: into(run.executor, bench.inputs, beside) for name, run in runs.items()}
    timed["over"] = into(runs["anew"].executor, given, over)
    policy = dataclasses.replace(default_policy(device), final_rounds=30, final_s=1.0)
    with device_lock(device, policy.lock_s):
        samples = interleave(timed, policy, device)
    us = {f"{name}_us": round(statistics.median(taken), 2) for name, taken in samples.items()}
    return {"name": workload.label, "right": verdict.ok, "detail": verdict.detail, "same": same, **us}


def _as_fast(row: dict[str, Any]) -> bool:
    return bool(row["over_us"] <= _SLOWER * row["stored_us"])


def main() -> int:
    made = command.parser(__doc__)
    made.add_argument("--db", default="package:h200", help="whose schedules (default: %(default)s)")
    made.add_argument("--search", type=float, default=0.0, metavar="S", help="seconds for each workload (default: 0)")
    made.add_argument("--keep", action="store_true", help="store what was built anew and is right")
    options = command.parsed(made)
    rows: list[dict[str, Any]] = []
    store = attach(options.db)
    assert store is not None, f"{options.db} holds nothing"
    for schedule in store.schedules(artifacts=True):
        workload = store.get_workload(schedule.key.workload)
        if workload is None or workload.kind != "fusion" or schedule.config is None or schedule.artifact is None:
            continue
        task = FusionTask(workload, options.device)
        try:
            plan = task.plan_of(schedule.config)
            drafts, _ = draft(task.graph, plan, group_configs(plan, schedule.config), task.target()[1])
            if not drafts or OVERWRITES not in drafts[-1].source.launch:
                continue
            anew = task.build(schedule.config)
        except (BuildError, Unsupported) as error:  # a stored kernel runs on, and has no present one to compare with
            print(f"{workload.label}: {error}", flush=True)
            continue
        row: dict[str, Any] = {"name": workload.label, "right": True, "same": True}
        if not options.dry:
            row = check(schedule, workload, anew, options.device, options.search)
            torch.cuda.empty_cache()
        if options.keep and not options.dry and row["right"] and row["same"] and _as_fast(row):
            assert isinstance(store, Store), f"{options.db} is only read"
            store.put_schedule(dataclasses.replace(schedule, artifact=anew), replace=True)
        if alike := sum(other["name"].partition(" (")[0] == row["name"] for other in rows):
            row["name"] += f" ({alike + 1})"
        rows.append(row)
        print(row, flush=True)
    bad = sum(not (row["right"] and row["same"]) for row in rows)
    command.keep("in_place_check", {"command": " ".join(sys.argv), "rows": rows})
    print(f"checked {len(rows)} bad {bad}")
    return int(bool(bad or not rows))


if __name__ == "__main__":
    raise SystemExit(main())

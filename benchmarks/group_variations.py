"""Variations of one group's configuration at a time, in stored plans: which parameters of a scheme matter.

    python -m benchmarks.group_variations --db searched.db --workloads 3d572879,a18f781f --device cuda:0 --out FILE

A plan's other groups keep their stored configuration. A group takes its scheme's default and seeds, and the default
with each choice of each parameter. Each candidate is verified; then its region is timed with a cold cache. Without a
stored kernel, the default is the start. Prints the candidates of each region, fastest first.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from autotune.cli.options import positive_int, seconds
from autotune.compiler.planner.groups import group_configs
from autotune.device import identify
from autotune.domains.fusion.bench import FusionBench
from autotune.domains.fusion.task import FusionTask
from autotune.errors import BuildError, UserError
from autotune.measure.policy import default_policy
from autotune.measure.timer import time_cpu, time_cuda
from autotune.space import load_space
from autotune.store.opening import attach
from autotune.store.reading import Reader
from autotune.task import Artifact, Config
from autotune.workload import Workload
from benchmarks import form
from benchmarks.suite_options import names

Candidate = tuple[str, Config]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m benchmarks.group_variations", description=about
    )
    parser.add_argument("--db", required=True, help="of a search")
    parser.add_argument("--workloads", type=names, required=True, metavar="A,B", help="beginnings of fingerprints")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=seconds, default=240.0, help="for all regions (default: 240)")
    parser.add_argument("--repeats", type=positive_int, default=15, help="of a timing (default: 15)")
    parser.add_argument("--processes", type=positive_int, default=8, help="that compile (default: 8)")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def start(store: Reader, prefix: str, device: str) -> tuple[Workload, Config]:
    """A workload and its stored configuration, or else its default.

    Raises:
        UserError: not exactly one region's fingerprint begins with ``prefix``.
    """
    found = store.fingerprints(prefix, 2)
    work = store.get_workload(found[0]) if len(found) == 1 else None
    if work is None or work.kind != "fusion":
        raise UserError(f"{prefix}: not the beginning of one region's fingerprint; `autotune show` lists them")
    stored = [s.config for s in store.schedules(workload=work.fingerprint) if s.config is not None]
    return work, stored[0] if stored else FusionTask(work, device).default()


def variations(task: FusionTask, config: Config) -> Iterator[Candidate]:
    """The start, then one group's changes at a time; each configuration once."""
    plan, seen = task.plan_of(config), [config]
    parts = list(group_configs(plan, config))
    yield "start", config
    for number, (choices, group) in enumerate(task.sides(plan)):
        default = choices.default(group.graph)
        tries = [("default", default)]
        tries += [(f"seed {n}", seed) for n, seed in enumerate(choices.seeds(group.graph))]
        for parameter in choices.space_of(group.graph, load_space("fusion", task.side)):
            name = parameter.name
            tries += [(f"{name}={choice}", default | {name: choice}) for choice in parameter.choices if name in default]
        for what, changed in tries:
            part = choices.normalize(group.graph, changed)
            made = task.joined(plan, [*parts[:number], part, *parts[number + 1 :]])
            if made not in seen and task.reject(made) is None:
                seen.append(made)
                yield f"group {number}: {what}", made


def built(work: Workload, config: Config, device: str) -> Artifact | str:
    """The artifact of a candidate, or the reason why there is none; runs in the pool."""
    try:
        return FusionTask(work, device).build(config)
    except BuildError as error:
        return str(error)


def measured(
    work: Workload, candidates: Sequence[Candidate], args: argparse.Namespace, pool: ProcessPoolExecutor, end: float
) -> Iterator[dict[str, Any]]:
    """A case for each candidate that was compiled before ``end``."""
    bench, policy = FusionBench(work, args.device), default_policy(args.device)
    clock = time_cuda if args.device.startswith("cuda") else time_cpu
    configs = [config for _, config in candidates]
    made = pool.map(built, [work] * len(configs), configs, [args.device] * len(configs))
    for (name, config), artifact in zip(candidates, made, strict=True):
        if time.monotonic() > end:
            print("the time is up", file=sys.stderr)
            return
        case: dict[str, Any] = {"name": f"{work.fingerprint[:8]} {name}", "us": None, "config": config}
        if isinstance(artifact, str):
            yield case | {"why": artifact}
            continue
        run = bench.load(config, artifact)
        verdict = bench.verify(run, 0)
        case["us"] = round(statistics.median(clock(run, policy, repeats=args.repeats)), 1)
        yield case if verdict.ok else case | {"why": f"wrong: {verdict.detail}"}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 if a candidate is wrong; 2 for a mistake in the arguments."""
    args, cases = parse(argv), list[dict[str, Any]]()
    end = time.monotonic() + args.seconds
    try:
        store = attach(args.db)
        if store is None:
            raise UserError(f"--db {args.db}: nothing is stored there")
        regions = [start(store, prefix, args.device) for prefix in args.workloads]
        with ProcessPoolExecutor(args.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            for work, config in regions:
                print(f"== {work.fingerprint[:8]} {work.label}", flush=True)
                found = list(measured(work, list(variations(FusionTask(work, args.device), config)), args, pool, end))
                for case in sorted(found, key=lambda c: c["us"] or float("inf")):
                    what, why = case["name"].partition(" ")[2], case.get("why", "")
                    print(f"{case['us'] or '–':>9} us  {what}  {why}".rstrip())
                cases += found
    except UserError as error:
        print(f"group_variations: {error}", file=sys.stderr)
        return 2
    if args.out and cases:
        form.write(args.out, identify(args.device).label, cases, extra={"suite": "group_variations"})
    return int(any(case.get("why", "").startswith("wrong") for case in cases))


if __name__ == "__main__":
    sys.exit(main())

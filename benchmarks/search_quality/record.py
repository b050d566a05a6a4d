"""Records :mod:`benchmarks.search_quality.spaces` on one core, as ``autotune record`` does it, but for what a busy
machine does to numbers: a candidate's latency is the least of its samples, not their median.

    taskset -c 0 python -m benchmarks.search_quality.record benchmarks/recordings [NAME...] --db recordings.db
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from autotune.domains.fusion.program_spec import fusion_workloads
from autotune.domains.kernel.target import resolve
from autotune.domains.kernel.workloads import workloads_of
from autotune.errors import UserError
from autotune.store import Store
from autotune.task import config_key, policy_for
from autotune.tuner.context import Context
from autotune.tuner.replay.record import record
from autotune.tuner.replay.recording import SUFFIX, Recording
from autotune.tuner.session import Lease
from autotune.workload import Workload
from benchmarks.search_quality.spaces import GROUPS, KERNELS


def workload_of(name: str) -> Workload:
    """The workload of a group, or a kernel's first."""
    if name not in GROUPS:
        return workloads_of(resolve(name), name, None, "cpu")[0]
    module = "benchmarks.search_quality.spaces"
    ((workload, _),) = fusion_workloads(f"{module}:{name}", f'{module}:inputs("{name}")', "cpu")
    return workload


def recorded(store: Store, workload: Workload, space: str | None) -> Recording:
    """The recording of a workload, with the least samples."""
    policy = replace(policy_for(workload, "cpu"), screen_repeats=25, quiet_s=0.0)
    context = Context(store, "cpu", policy, space_file=space)
    try:
        with context.interrupt, Lease(store, context.owner):
            made = record(context, workload)
        if isinstance(made, str):
            raise UserError(f"{workload.label}: {made}")
        key = context.key(workload)
        measured = store.measurements(key.workload, key.device, key.environment, key.policy)
    finally:
        context.close()
    least = {config_key(m.config): min(m.samples) for m in measured if m.samples and m.stage == "screen"}
    return replace(
        made, rows=tuple(replace(r, latency_us=r.latency_us and least[config_key(r.config)]) for r in made.rows)
    )


def main() -> None:
    """One file a name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", default=[*GROUPS, *KERNELS])
    parser.add_argument("--db", required=True)
    parser.add_argument("--space")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with Store.open(args.db) as store:
        for name in args.names:
            store.put_workload(workload := workload_of(name))
            made = recorded(store, workload, args.space)
            path = args.out / f"{name.rpartition(':')[2]}{SUFFIX}"
            made.save(path)
            print(f"{path}: {len(made.rows)} candidates, {made.optimum_us:.1f} us the best of them", flush=True)


if __name__ == "__main__":
    main()

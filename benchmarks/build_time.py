"""Processor time of a kernel's build, with and without the replaced parts of Numba's frontend; needs no GPU.

    python -m benchmarks.build_time --every 30 --out benchmarks/results/cpu/build_time.json

Every N-th packaged schedule is built both ways in one process, in alternating order. The first one is not counted:
Numba is imported for it. Cubins that differ are an error (:mod:`autotune.compiler.targets.cuda.frontend`).
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from autotune.compiler.targets.cuda import compile as compiling
from autotune.domains.fusion.task import FusionTask
from autotune.errors import BuildError
from autotune.store.opening import path_of
from autotune.store.snapshot import Snapshot
from benchmarks import form


def built(task: FusionTask, config: dict[str, Any], *, plain: bool) -> tuple[float, list[bytes]]:
    """Processor seconds of a build, and its cubins.

    Args:
        plain: Numba as it is.
    """
    with contextlib.ExitStack() as stack:
        if plain:
            stack.enter_context(mock.patch.object(compiling, "without_repeated_work", contextlib.nullcontext))
        begin = time.process_time()
        made = task.build(config)
        return time.process_time() - begin, [kernel.code for kernel in made.kernels]


def measure(every: int) -> list[dict[str, Any]]:
    """A case of every N-th packaged kernel: seconds both ways.

    Raises:
        RuntimeError: the cubins differ.
    """
    snapshot = Snapshot(path_of("package:h200"))
    chosen = [s for s in snapshot.schedules() if s.config is not None][::every]
    cases: list[dict[str, Any]] = []
    for number, schedule in enumerate(chosen):
        work = snapshot.get_workload(schedule.key.workload)
        if work is None or work.kind != "fusion" or schedule.config is None:
            continue
        took: dict[bool, float] = {}
        codes: dict[bool, list[bytes]] = {}
        try:
            for plain in (number % 2 == 0, number % 2 == 1):
                task = FusionTask(work, "cuda:0", target="sm_90", sms=132)
                took[plain], codes[plain] = built(task, dict(schedule.config), plain=plain)
        except BuildError as superseded:
            print(f"left out: {work.label}: {superseded}")
            continue
        if codes[True] != codes[False]:
            raise RuntimeError(f"{work.label}: the cubins differ")
        name = f"{work.label} {work.fingerprint[:8]}"
        cases.append({"name": name, "numba_s": round(took[True], 3), "autotune_s": round(took[False], 3)})
        print(f"{took[True]:7.2f} {took[False]:7.2f}  {work.label}", flush=True)
    return cases[1:]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=30, metavar="N", help="packaged kernel (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    cases = measure(args.every)
    sums = [sum(case[key] for case in cases) / len(cases) for key in ("numba_s", "autotune_s")]
    ratio = statistics.median(case["autotune_s"] / case["numba_s"] for case in cases)
    print(
        f"{len(cases)} builds: {sums[0]:.2f} s each by Numba, {sums[1]:.2f} s by autotune, ratio {ratio:.2f} (median)"
    )
    if args.out:
        from autotune.device import identify

        form.write(args.out, identify("cpu").label, cases, extra={"suite": "build_time"})
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Check of the clock at which steps are timed: torch.compile and autotune, after leads of several lengths.

    python -m benchmarks.sustained --device cuda:0 --models vit_base_train --db real.db --out sustained.json

A GPU at its power cap runs at a clock that the load sets. A step that spends less of its time on memory-intensive
kernels takes more power, and so may hold a lower clock than the step before it. Steps are timed in turn as
:func:`autotune.bench.step.timed` does it, with each ``--leads`` for which a contender runs before its sample. Then
each runs alone for some seconds, while NVML reads the clock, the power, and reasons of a lower clock. Kernels of both
steps are listed by name: the same ones in the same number take longer at a lower clock.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from autotune.bench.contenders import ProcessLock, room_for
from autotune.bench.kernels import kernels_of
from autotune.bench.step import seeded, step_of, trainable
from autotune.measure.policy import default_policy
from autotune.measure.timer import capture, interleave, keep_running
from benchmarks.nvml import Sensor, summary

Call = Callable[[], object]


def steps(name: str, device: str) -> dict[str, Call]:
    """A model's step as it is, and under either compiler in mode default, called once."""
    import autotune
    from benchmarks.real.models import make

    made = make(name, device, tiny=False, layers=None, batch=None)
    wanted = trainable(made.module, (), made.inputs) if made.train else []
    makers: dict[str, Callable[[], Any]] = {
        "eager": lambda: made.module,
        "compile": lambda: torch.compile(made.module, dynamic=False),
        "autotune": lambda: autotune.compile(made.module, dynamic=False),
    }
    found: dict[str, Call] = {}
    with room_for(len(makers)):
        for who, compiled in makers.items():
            found[who] = step_of(compiled(), (), made.inputs, wanted)
            seeded(found[who], 0, device)
    return found


def alone(step: Call, seconds: float, sensor: Sensor) -> dict[str, Any]:
    """A step repeated for ``seconds``: the mean time of the second half's steps, and NVML's values during it."""
    run = capture(step)
    keep_running(run, seconds / 2)
    with sensor.watch() as readings:
        half = time.perf_counter()
        times = keep_running(run, seconds / 2)
        took = time.perf_counter() - half
    return {"us": round(took / times * 1e6, 1), **summary(readings)}


def measure(name: str, device: str, leads: list[float], seconds: float) -> dict[str, Any]:
    """The case of a model: medians by lead, and each step alone."""
    ready = steps(name, device)
    policy = dataclasses.replace(default_policy(device), final_s=seconds)
    sensor = Sensor("GPU-" + str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-"))
    case: dict[str, Any] = {"name": name, "limit_w": sensor.limit_w, "leads": {}, "alone": {}}
    with ProcessLock(device, policy.lock_s).exclusive():
        for lead in leads:
            samples = interleave(ready, policy, device, one_memory=True, lead_s=lead)
            case["leads"][str(lead)] = _row({who: statistics.median(taken) for who, taken in samples.items()})
            del samples
            gc.collect()
            torch.cuda.empty_cache()
        for who in ("compile", "autotune"):
            case["alone"][who] = alone(ready[who], seconds, sensor)
        case["kernels"] = kernels_of({who: ready[who] for who in ("compile", "autotune")})
    found: Mapping[str, Any] = case["alone"]
    case["autotune_us"], case["compile_us"] = found["autotune"]["us"], found["compile"]["us"]
    return case


def _row(us: Mapping[str, float]) -> dict[str, float]:
    return {f"{who}_us": round(taken, 1) for who, taken in us.items()} | {
        "speedup": round(us["compile"] / us["autotune"], 4)
    }


def line(case: Mapping[str, Any]) -> str:
    """The line of a case."""
    told = [f"{lead} s {row['speedup']:.3f}x" for lead, row in case["leads"].items()]
    both = case["alone"]
    told += [f"alone {both['compile']['us'] / both['autotune']['us']:.3f}x"]
    seen = [f"{who} {both[who].get('mhz')} MHz {both[who].get('watt')} W" for who in ("compile", "autotune")]
    return f"{case['name']}: {', '.join(told)}; {', '.join(seen)}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m benchmarks.sustained",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda:0", help="cuda:N (default: %(default)s)")
    parser.add_argument("--models", required=True, metavar="A,B", help="as real_models --list names them")
    parser.add_argument("--db", required=True, help="whose schedules are deployed")
    parser.add_argument("--leads", default="0,0.1,0.3,1,3", help="seconds, by comma (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each comparison (default: %(default)s)")
    parser.add_argument("--out", required=True, help="result file")
    args = parser.parse_args(argv)
    if not args.device.startswith("cuda"):
        parser.error(f"--device {args.device}: only a GPU's clock is asked about; name cuda:N")
    from autotune.device import identify
    from autotune.runtime.deployment import deployment
    from benchmarks.form import write

    cases = []
    for name in args.models.split(","):
        with deployment().deploying_from(args.db):
            cases.append(measure(name, args.device, [float(x) for x in args.leads.split(",")], args.seconds))
        print(line(cases[-1]), flush=True)
        write(Path(args.out), identify(args.device).label, cases, extra={"suite": "sustained"})
        gc.collect()
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())

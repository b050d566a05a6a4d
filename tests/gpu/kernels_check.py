"""Is every fused kernel right on a real GPU? The zoo times (default, seeds, random configurations), each verified.

    python tests/gpu/kernels_check.py [--configs 10] [--seed 0] [--only NAME ...] [--device cuda:0] [--dry]

Candidates compile in a process pool during the checks. A check compares with the fp64 oracle on random inputs and on
ones with NaN and infinities, and looks for writes outside the outputs. Prints failures and a last line "checked N bad
M"; exit code 1 if M is not 0. Writes ``$OUT/kernels_check.json`` if OUT is set. ``--dry`` only compiles, without a GPU.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from autotune.device import environment
from autotune.domains.fusion.bench import FusionBench
from autotune.domains.fusion.task import FusionTask
from autotune.errors import BuildError
from autotune.ir.inputs import make_inputs
from autotune.task import Artifact, Config
from autotune.workload import Workload
from tests.gpu import command
from tests.support.zoo import BY_NAME, candidates, workloads

MARGIN = 4096  # bytes round each output that must stay as they were; keeps the alignment


@dataclass(frozen=True)
class Job:
    name: str
    region: int
    config: Config
    default: bool


def compile_one(job: Job, device: str) -> tuple[Artifact | None, str, bool, float]:
    """(artifact, why there is none, was it refused in the way a search expects, seconds); runs in the pool."""
    begin = time.perf_counter()
    try:
        artifact = FusionTask(workloads(job.name)[job.region], device).build(job.config)
        return artifact, "", False, time.perf_counter() - begin
    except BuildError as error:
        return None, str(error), not job.default, time.perf_counter() - begin
    except Exception as error:
        line = traceback.format_exc().strip().splitlines()[-3].strip()
        return None, f"{type(error).__name__}: {error} ({line})", False, time.perf_counter() - begin


class Bench(FusionBench):
    """Verification, and outputs between margins."""

    def writes_outside(self, run: Any, seed: int) -> str:
        """Which output's margins the kernel wrote to, or nothing."""
        inputs = make_inputs(self.graph, seed=seed, device=self.device)
        whole, views = [], []
        for k, o in enumerate(self.graph.outputs):
            dtype = getattr(torch, o.dtype)
            margin, n = MARGIN // dtype.itemsize, self.graph.output_numel(k)
            memory = torch.full(((n + 2 * margin) * dtype.itemsize,), 0x5A, dtype=torch.uint8, device=self.device)
            whole.append(memory)
            views.append(memory.view(dtype)[margin : margin + n])
        run.executor.run_into(inputs, views)
        for k, memory in enumerate(whole):
            if not bool((memory[:MARGIN] == 0x5A).all() and (memory[-MARGIN:] == 0x5A).all()):
                return f"wrote outside output {k}"
        return ""


def check(bench: Bench, job: Job, artifact: Artifact, seed: int) -> str:
    """A candidate's error, or nothing. Raises the device's errors."""
    run = bench.load(job.config, artifact)
    verdict = bench.verify(run, seed)
    return bench.writes_outside(run, seed) if verdict.ok else verdict.detail


def jobs_of(names: list[str], device: str, configs: int, seed: int) -> list[Job]:
    out = []
    for name in names:
        for region, work in enumerate(workloads(name)):
            task = FusionTask(work, device)
            default = task.default()
            out += [Job(name, region, c, c == default) for c in candidates(task, configs, seed)]
    return out


def main() -> int:
    parser = command.parser(__doc__, list(BY_NAME))
    parser.add_argument("--configs", type=int, default=10, help="random configurations of every region")
    parser.add_argument("--seed", type=int, default=0)
    options = command.parsed(parser)
    begin = time.perf_counter()
    jobs = jobs_of(options.only, options.device, options.configs, options.seed)
    print(f"{len(jobs)} candidates of {len(options.only)} functions, {options.processes} processes", flush=True)
    checked, refused, seconds = Counter[str](), Counter[str](), 0.0
    failures: list[dict[str, Any]] = []

    def fail(job: Job, what: str) -> None:
        failures.append({**asdict(job), "what": what})
        print(f"BAD {job.name}[{job.region}] {what} {job.config}", flush=True)

    bench: Bench | None = None
    at: tuple[str, int] | None = None
    pool = command.pool(options)
    try:
        built = pool.map(compile_one, jobs, [options.device] * len(jobs), chunksize=2)
        for number, (job, (artifact, why, expected, took)) in enumerate(zip(jobs, built, strict=True)):
            seconds += took
            if artifact is None:
                if expected:
                    refused[why.split(" ")[0]] += 1
                else:
                    fail(job, why)
                continue
            if not options.dry:
                if at != (job.name, job.region):
                    bench, at = None, (job.name, job.region)  # the last one's tensors go first
                    bench = Bench(workload_of(job), options.device)
                assert bench is not None
                try:
                    what = check(bench, job, artifact, seed=options.seed + number)
                except Exception as error:
                    what = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
                    fail(job, what)
                    torch.cuda.synchronize()  # raises where the context is lost: nothing after it could be checked
                    continue
                if what:
                    fail(job, what)
                    continue
            checked[job.name] += 1
    except Exception as error:
        traceback.print_exc()
        failures.append({"name": "", "what": f"stopped: {type(error).__name__}: {error}"})
    finally:
        pool.shutdown(cancel_futures=True)
    total = sum(checked.values()) + len(failures)
    result = {
        "device": "none" if options.dry else torch.cuda.get_device_name(options.device),
        "versions": {} if options.dry else environment(options.device).to_json(),
        "command": " ".join(sys.argv),
        "checked": total,
        "bad": len(failures),
        "right": dict(checked),
        "refused": dict(refused),
        "failures": failures,
        "compile_s": round(seconds, 1),
        "wall_s": round(time.perf_counter() - begin, 1),
    }
    command.keep("kernels_check", result)
    print(f"refused by the compiler's resources: {sum(refused.values())}; {result['wall_s']} s")
    print(f"checked {total} bad {len(failures)}")
    return int(bool(failures))


def workload_of(job: Job) -> Workload:
    return workloads(job.name)[job.region]


if __name__ == "__main__":
    raise SystemExit(main())

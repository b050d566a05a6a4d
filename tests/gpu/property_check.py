"""Are random programs right on a real GPU? Default and random configurations of every region, each verified.

    python tests/gpu/property_check.py [--seconds 300] [--first 0] [--configs 4] [--out DIR] [--device cuda:0] [--dry]
        [--wide]
    python tests/gpu/property_check.py --only 1234    # one program again: prints it, and every candidate's verdict

The programs are those of tests/support/random_programs (``families.program(seed, size_of(seed))``). Candidates are
compiled in a pool of processes while one process owns the GPU: it compares each with the fp64 oracle on random
inputs and on ones with NaN and infinities, and looks for writes outside the outputs. What is about to run is written to
DIR/current.txt first; a candidate that kills that process, or hangs, is named and counted, and a new process goes on
with the next.

Prints what is wrong and a last line "checked N bad M"; exit code 1 if M is not 0. Writes DIR/property_check.json.
``--dry`` only compiles, without a GPU; ``--device cpu`` checks the CPU target. ``--wide``: every CUDA kernel counts in
64 bits, as those of more than 2**31 rows do.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from autotune.compiler.targets.cuda import device
from autotune.errors import BuildError, Unsupported
from autotune.task import Artifact, Config
from autotune.workload import Workload
from tests.support.random_programs.families import program

PATIENCE = 60.0  # seconds for one candidate, its oracle included


def size_of(seed: int) -> int:
    """The largest tensor of a program: mostly small, some beyond what one wave of blocks covers."""
    return (20_000, 20_000, 300_000, 20_000, 4_000_000)[seed % 5]


@dataclass(frozen=True)
class Candidate:
    seed: int
    region: int
    workload: Workload
    config: Config
    artifact: Artifact | None
    why: str = ""


@dataclass
class Prepared:
    """The pool's results for one program."""

    seed: int
    candidates: list[Candidate] = field(default_factory=list)
    unsupported: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def _calm(wide: bool) -> None:
    torch.set_num_threads(1)
    if wide:
        device.LIMIT = 0


def prepare(seed: int, configs: int, device: str, target: str | None, sms: int | None) -> Prepared:
    """Capture and compile; runs in the pool, without a GPU."""
    from autotune.domains.fusion.task import FusionTask
    from tests.support.random_programs.checks import parts_of
    from tests.support.zoo import random_configs

    begin, out = time.perf_counter(), Prepared(seed)
    try:
        regions = [r for _, found in parts_of(program(seed, size_of(seed))) for r in found]
        torch._dynamo.reset()
        for k, r in enumerate(regions):
            if r.workload is None:
                out.unsupported[r.reason] += 1
                continue
            try:
                task = FusionTask(r.workload, device, target=target, sms=sms)
            except Unsupported as error:
                out.unsupported[str(error)] += 1
                continue
            default = task.default()
            refused = task.reject(default)
            if refused:
                out.unsupported[refused] += 1
                continue
            for config in [default, *random_configs(task, configs, seed)]:
                try:
                    out.candidates.append(Candidate(seed, k, r.workload, config, task.build(config)))
                except BuildError as error:
                    if config == default:
                        out.problems.append(f"region {k}: the default does not build: {error}")
                    out.refused[str(error).split(" ")[0]] += 1
    except Exception as error:
        lines = traceback.format_exc().strip().splitlines()
        out.problems.append(f"{type(error).__name__}: {error} ({' '.join(lines[-3].split())})")
    out.seconds = time.perf_counter() - begin
    return out


# The process that owns the GPU ----------------------------------------------------------------------------------------


def check_all(pipe: Connection, device: str) -> None:
    """Receives candidates, sends (status, detail); ends when it is sent None, or after a lost context."""
    from tests.gpu.kernels_check import Bench
    from tests.support.random_programs.judge import verify

    bench: Bench | None = None
    of = ""
    pipe.send("ready")
    while (candidate := pipe.recv()) is not None:
        status, detail = "wrong", ""
        try:
            if of != candidate.workload.fingerprint or bench is None:
                bench, of = None, candidate.workload.fingerprint
                bench = Bench(candidate.workload, device)
            run = bench.load(candidate.config, candidate.artifact)
            status, detail = verify(bench, run, candidate.seed)
            if status == "right":
                outside = bench.writes_outside(run, candidate.seed)
                status, detail = ("wrong", outside) if outside else (status, detail)
        except Exception as error:
            status, detail = "wrong", f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        alive = True
        if device.startswith("cuda"):
            try:
                torch.cuda.synchronize(device)
            except Exception as error:
                alive, status = False, "wrong"
                detail = detail or f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        pipe.send((status, detail))
        if not alive:
            return


class Child:
    """A process that answers one message at a time, and is started again after its death.

    Args:
        serve: runs in the process; takes a pipe, then ``args``. It sends anything once it is ready.
        patience: seconds to wait for an answer.
        start: how multiprocessing starts it.
    """

    def __init__(
        self, serve: Callable[..., None], args: tuple[Any, ...], patience: float = PATIENCE, start: str = "spawn"
    ) -> None:
        self.serve, self.args, self.patience, self.start = serve, args, patience, start
        self.deaths = 0
        self._process: Any = None
        self._pipe: Any = None

    def _start(self) -> None:
        context = multiprocessing.get_context(self.start)
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=self.serve, args=(other, *self.args), daemon=True)
        self._process.start()
        other.close()
        if not self._pipe.poll(300):
            raise RuntimeError("the checking process does not start")
        self._pipe.recv()

    def ask(self, message: Any) -> tuple[str, str]:
        """The answer, or ("crashed", ...) or ("timeout", ...)."""
        if self._process is None or not self._process.is_alive():
            self.stop()
            self._start()
        try:
            self._pipe.send(message)
            if self._pipe.poll(self.patience):
                answer: tuple[str, str] = self._pipe.recv()
                return answer
            what = ("timeout", f"no answer in {self.patience:.0f} s")
        except (EOFError, OSError):
            self._process.join(10)
            if self._process.exitcode == 0:  # it had reported a lost device, and the message arrived as it ended
                self.stop()
                return self.ask(message)
            what = ("crashed", f"the process ended with {self._process.exitcode}")
        self.deaths += 1
        self.stop()
        return what

    def stop(self) -> None:
        if self._process is None:
            return
        if self._process.is_alive():
            try:
                self._pipe.send(None)
                self._process.join(5)
            except OSError:
                pass
            if self._process.is_alive():
                self._process.kill()
        self._process.join(10)
        self._pipe.close()
        self._process = None


# The run --------------------------------------------------------------------------------------------------------------


class Report:
    """Counts and errors; written after every program, so that an interrupted run keeps its results."""

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        self.path, self.header = path, header
        self.begin = time.perf_counter()
        self.counts: Counter[str] = Counter()
        self.unsupported: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.bad: list[dict[str, Any]] = []
        self.blurred: list[dict[str, Any]] = []
        self.compile_s = 0.0

    def fail(self, seed: int, region: int, config: Config, detail: str) -> None:
        self.bad.append({"seed": seed, "region": region, "config": config, "detail": detail})
        print(f"BAD program({seed}, {size_of(seed)}) region {region}: {detail}\n    {config}", flush=True)
        if sum(b["seed"] == seed for b in self.bad) == 1:
            print(program(seed, size_of(seed)), flush=True)

    def take(self, made: Prepared) -> None:
        self.counts["cases"] += 1
        self.compile_s += made.seconds
        self.unsupported.update(made.unsupported)
        self.refused.update(made.refused)
        for problem in made.problems:
            self.fail(made.seed, -1, {}, problem)

    def write(self) -> None:
        if self.path is None:
            return
        text = json.dumps(
            {
                **self.header,
                **{k: self.counts[k] for k in ("cases", "candidates", "right")},
                "bad": self.bad,
                "blurred": self.blurred,
                "refused": dict(self.refused),
                "unsupported": dict(self.unsupported),
                "compile_s": round(self.compile_s, 1),
                "wall_s": round(time.perf_counter() - self.begin, 1),
            },
            indent=1,
        )
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(text + "\n")
        temporary.replace(self.path)


def _judge(report: Report, child: Child, candidate: Candidate, out: Path | None, loud: bool) -> None:
    if out is not None:
        what = {"seed": candidate.seed, "region": candidate.region, "config": candidate.config}
        (out / "current.txt").write_text(f"{json.dumps(what)}\n{program(candidate.seed, size_of(candidate.seed))}\n")
    report.counts["candidates"] += 1
    status, detail = child.ask(candidate)
    if loud:
        print(f"region {candidate.region} {status} {detail} {candidate.config}", flush=True)
    if status == "right":
        report.counts["right"] += 1
    elif status == "blurred":
        report.blurred.append({"seed": candidate.seed, "region": candidate.region, "detail": detail})
    else:
        report.fail(candidate.seed, candidate.region, candidate.config, f"{status}: {detail}")


def run(options: argparse.Namespace, report: Report) -> None:
    """Programs from ``--first`` on, until the time is up."""
    target = sms = None
    if options.device.startswith("cuda"):
        from autotune.device import describe_cuda

        target, sms = describe_cuda(options.device)
    seeds = iter([options.only]) if options.only is not None else iter(range(options.first, 1 << 40))
    start = "spawn" if options.device.startswith("cuda") else "fork"  # CUDA survives no fork; imports take seconds
    child = Child(check_all, (options.device,), start=start)
    pool = ProcessPoolExecutor(
        options.processes, multiprocessing.get_context(start), initializer=_calm, initargs=(options.wide,)
    )
    pending: deque[Future[Prepared]] = deque()

    def fill() -> None:
        while len(pending) < 3 * options.processes and (seed := next(seeds, None)) is not None:
            pending.append(pool.submit(prepare, seed, options.configs, options.device, target, sms))

    end = report.begin + options.seconds
    try:
        fill()
        while pending and time.perf_counter() < end:
            done = next((f for f in pending if f.done()), None)  # a slow program does not hold up the others
            if done is None:
                time.sleep(0.02)
                continue
            pending.remove(done)
            fill()
            made = done.result()
            report.take(made)
            if not options.dry:
                for candidate in made.candidates:
                    _judge(report, child, candidate, options.out, options.only is not None)
            else:
                report.counts["candidates"] += len(made.candidates)
            report.write()
    finally:
        child.stop()
        for f in pending:
            f.cancel()
        pool.shutdown(wait=False, cancel_futures=True)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--only", type=int, help="one seed")
    parser.add_argument("--configs", type=int, default=4, help="random configurations of every region")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    parser.add_argument("--wide", action="store_true", help="kernels count in 64 bits")
    parser.add_argument("--dry", action="store_true", help="compile only, without a GPU")
    options = parser.parse_args()
    if options.dry:
        os.environ.setdefault("AUTOTUNE_CUDA_TARGET", "sm_90:132")
    if options.only is not None:
        print(program(options.only, size_of(options.only)))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    on_gpu = options.device.startswith("cuda") and not options.dry
    header: dict[str, Any] = {"command": " ".join(sys.argv), "first": options.first, "configs": options.configs}
    if on_gpu:
        from autotune.device import environment

        header["device"] = torch.cuda.get_device_name(options.device)
        header["versions"] = environment(options.device).to_json()
    report = Report(options.out / "property_check.json" if options.out is not None else None, header)
    try:
        run(options, report)
    except Exception as error:
        traceback.print_exc()
        report.bad.append({"seed": -1, "detail": f"stopped: {type(error).__name__}: {error}"})
    report.write()
    c = report.counts
    print(
        f"{c['cases']} programs, {c['candidates']} candidates, {c['right']} right, {len(report.blurred)} blurred by"
        f" rounding, {sum(report.refused.values())} refused by the compiler, unsupported {dict(report.unsupported)}"
    )
    print(f"checked {c['candidates']} bad {len(report.bad)}", flush=True)
    return int(bool(report.bad))


if __name__ == "__main__":
    raise SystemExit(main())

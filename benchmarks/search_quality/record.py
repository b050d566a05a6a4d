"""Records :mod:`benchmarks.search_quality.spaces`, as ``python -m benchmarks.replay record`` does it.

    taskset -c 0 python -m benchmarks.search_quality.record benchmarks/recordings --db recordings.db
    python -m benchmarks.search_quality.record benchmarks/recordings/h200 --device cuda:0 --db h200.db --all-s 300

On a CPU a candidate's latency is the minimum of its samples, since other work delays them. On a GPU it is
their median, as in a search. A space that cannot be measured completely is reported, and leaves no file. Its
measurements stay in the database: the same command continues with them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.domain import policy_for
from autotune.domains.fusion.program_spec import captured
from autotune.domains.kernel.bench import Candidate, make
from autotune.domains.kernel.declare import resolve
from autotune.domains.kernel.task import workloads_of
from autotune.measure.policy import Policy
from autotune.measure.pool import CompilePool, default_processes
from autotune.measure.worker import Worker
from autotune.store import Store
from autotune.task import Config, Status, config_key
from autotune.tuner.context import Context
from autotune.tuner.options import SearchOptions
from autotune.tuner.threads import Lease
from autotune.workload import Workload
from benchmarks.replay.record import Candidates, record, task_of
from benchmarks.replay.recording import SUFFIX, Recording
from benchmarks.replay.regret import NEAR
from benchmarks.search_quality.spaces import GPU_KERNELS, GPU_SPACES, GROUPS, KERNELS

WARM: Mapping[str, Mapping[str, Any]] = {"benchmarks.search_quality.gpu_kernels:convolve": {"n": 512}}
"""Kernels that only the measuring process could compile, one by one, to small inputs of the same types. Processes side
by side run every candidate on these first, so that it is in the compiler's cache."""


def workload_of(name: str, device: str) -> Workload:
    """The workload of a group, or a kernel's first."""
    if name not in GPU_SPACES:
        return workloads_of(resolve(name), name, None, device)[0]
    module = "benchmarks.search_quality.spaces"
    ((workload, _),) = captured(f"{module}:{name}", f'{module}:inputs("{name}")', device).workloads
    return workload


@dataclass
class Recorder:
    """Records workloads one after another, with one worker and one pool.

    Attributes:
        limit_s: seconds for one space; None for no limit.
        all_s: seconds for all of them, from the start of this object on.
    """

    store: Store
    device: str
    space: str | None = None
    limit_s: float | None = None
    all_s: float | None = None
    began: float = field(default_factory=time.monotonic)
    warmed: dict[str, float] = field(default_factory=dict)
    """Key of a candidate to the seconds that its first run took where it was warmed."""
    _lent: tuple[Worker, CompilePool] | None = None

    def policy(self, workload: Workload) -> Policy:
        policy = policy_for(workload, self.device)
        return replace(policy, screen_repeats=25, quiet_s=0.0) if self.device == "cpu" else policy

    def context(self, name: str, workload: Workload) -> Context:
        policy = self.policy(workload)
        if self._lent is None:
            self._lent = Worker(workload, self.device, policy), CompilePool(timeout_s=policy.build_s)
        worker, pool = self._lent
        space = self.space
        if space is None and self.device != "cpu" and name in GPU_SPACES:
            space = str(Path(__file__).parent / GPU_SPACES[name])
        options = SearchOptions(space_file=space)
        return Context(self.store, self.device, policy, options, self._lent, _worker=worker, _pool=pool)

    def close(self) -> None:
        for process in self._lent or ():
            process.close()

    def left(self) -> float | None:
        """Seconds for the next space."""
        if self.all_s is None:
            return self.limit_s
        rest = max(1.0, self.all_s - (time.monotonic() - self.began))
        return rest if self.limit_s is None else min(self.limit_s, rest)

    def recorded(self, context: Context, workload: Workload, found: Candidates) -> Recording | str:
        """The recording of a workload, or why there is none."""
        with context.interrupt, Lease(self.store, context.owner):
            made = record(context, workload, self.left(), found)
        if isinstance(made, str):
            return made
        rows = made.rows
        if self.device == "cpu":
            key = context.key(workload)
            measured = self.store.measurements(key.workload, key.device, key.environment, key.policy)
            least = {config_key(m.config): min(m.samples) for m in measured if m.samples and m.stage == "screen"}
            rows = tuple(replace(r, latency_us=r.latency_us and least[config_key(r.config)]) for r in rows)
        # Where a search measures it, the measuring process compiles it.
        rows = tuple(replace(r, measure_s=r.measure_s + self.warmed.get(config_key(r.config), 0.0)) for r in rows)
        return replace(made, rows=rows)


def prepare(names: Sequence[str], device: str) -> tuple[dict[str, Workload], dict[str, str], dict[str, float]]:
    """Workloads by name, the reasons of missing ones, and the time of warm-ups.

    Probes of kernels, which are processes of their own, and warming go on while groups are traced here.
    """
    workloads: dict[str, Workload] = {}
    failed: dict[str, str] = {}
    warmed: dict[str, float] = {}
    with ThreadPoolExecutor(8) as threads:
        begun: dict[str, Future[Workload]] = {
            name: threads.submit(workload_of, name, device) for name in names if name not in GPU_SPACES
        }
        heated = [threads.submit(warm, n, WARM[n], device) for n in names if n in WARM and device != "cpu"]
        for name in names:
            try:
                workloads[name] = begun[name].result() if name in begun else workload_of(name, device)
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"
        for one in heated:
            try:
                warmed |= one.result()
            except Exception as error:  # its candidates are compiled where they are measured
                print(f"nothing was compiled ahead: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return workloads, failed, warmed


def warm(target: str, arguments: Mapping[str, Any], device: str, processes: int | None = None) -> dict[str, float]:
    """Run every candidate once on small inputs, in processes side by side; what each took."""
    kernel = resolve(target)
    space = kernel.space
    key = make(kernel, arguments, "cpu", 0)
    read = kernel.reader.read(key.args, key.kwargs)
    points = [space.space.at(k) for k in range(space.space.size)]
    points = [dict(p) for p in points if space.reject(p, read) is None]
    spawned = multiprocessing.get_context("spawn")
    given = (target, dict(arguments), device)
    with ProcessPoolExecutor(processes or default_processes(), spawned, _begin, given) as pool:
        return {k: took for k, took in pool.map(_first_run, points, chunksize=4) if took is not None}


_begun: dict[str, Any] = {}


def _begin(target: str, arguments: Mapping[str, Any], device: str) -> None:
    """A warming process's own kernel and inputs."""
    kernel = resolve(target)
    _begun.update(kernel=kernel, arguments=make(kernel, arguments, device, 0), device=device)


def _first_run(config: Config) -> tuple[str, float | None]:
    import torch

    began = time.monotonic()
    try:
        Candidate(_begun["kernel"], config, _begun["arguments"])()
        if _begun["device"] != "cpu":
            torch.cuda.synchronize()
    except Exception:  # the measuring process reports the fault
        return config_key(config), None
    return config_key(config), time.monotonic() - began


def build_ahead(recorder: Recorder, begun: Mapping[str, tuple[Context, Workload, Future[Candidates]]]) -> None:
    """List the candidates of all spaces in order, and have those of later ones built when the pool has nothing else."""
    for nth, (context, workload, listed) in enumerate(begun.values()):
        try:
            found = Candidates.of(task_of(context, workload), context.options.space_file)
            if nth and recorder.device != "cpu":
                for config in found.configs.values():
                    context.pool.prefetch(workload, recorder.device, config)
            listed.set_result(found)
        except BaseException as error:  # reported where the space is recorded
            listed.set_exception(error)


def record_all(recorder: Recorder, names: Sequence[str], out: Path) -> dict[str, Recording | str]:
    """A file for each name; answers recordings, and why others have none."""
    workloads, failed, recorder.warmed = prepare(names, recorder.device)
    done: dict[str, Recording | str] = {}
    begun: dict[str, tuple[Context, Workload, Future[Candidates]]] = {}
    for name, workload in workloads.items():
        recorder.store.put_workload(workload)
        begun[name] = recorder.context(name, workload), workload, Future()
    print(f"{time.monotonic() - recorder.began:.0f} s until all workloads were there", flush=True)
    threading.Thread(target=build_ahead, args=(recorder, begun), daemon=True).start()
    for name in names:
        if name in failed:
            done[name] = failed[name]
        else:
            context, workload, listed = begun[name]
            start = time.monotonic()
            try:
                made = recorder.recorded(context, workload, listed.result())
                if isinstance(made, Recording):
                    made.save(out / f"{name.rpartition(':')[2]}{SUFFIX}")
                done[name] = made
            except Exception as error:  # the others are recorded
                done[name] = f"{type(error).__name__}: {error}"
        print(f"{told(name, done[name])}, {time.monotonic() - start if name in begun else 0:.0f} s", flush=True)
        if name in begun and begun[name][0].interrupt.requested:
            break
    recorder.close()
    return done


def told(name: str, made: Recording | str) -> str:
    """One line."""
    if isinstance(made, str):
        return f"NOT RECORDED: {name}: {made}"
    good = [r.latency_us for r in made.rows if r.status is Status.OK and r.latency_us is not None]
    near = sum(us <= made.optimum_us * (1 + NEAR) for us in good)
    default = made.row(made.default)
    ours = f"{default.latency_us:.1f}" if default and default.latency_us else "-"
    spent = sum(r.measure_s for r in made.rows), sum(r.compile_s for r in made.rows)
    return (
        f"{name.rpartition(':')[2]}: {len(made.rows)} candidates, {len(made.rows) - len(good)} failed,"
        f" {made.optimum_us:.1f} us the best, {ours} the default, {near} within {NEAR:.0%},"
        f" measuring {spent[0]:.0f} s, compiling {spent[1]:.0f} s on one processor"
    )


def main() -> int:
    """One file a name."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", help="groups, and kernels as module:name; all of them without any")
    parser.add_argument("--db", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--space", help="of every group; without it, on a GPU, the files beside this one")
    parser.add_argument("--limit-s", type=float, help="seconds for one space")
    parser.add_argument("--all-s", type=float, help="seconds for all")
    args = parser.parse_args()
    names = args.names or [*(KERNELS if args.device == "cpu" else GPU_KERNELS), *GROUPS]
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as kept, Store.open(args.db) as store:
        if args.device != "cpu":
            os.environ.setdefault("NUMBA_CACHE_DIR", kept)
        recorder = Recorder(store, args.device, args.space, args.limit_s, args.all_s)
        done = record_all(recorder, names, args.out)
    left = [name for name in names if not isinstance(done.get(name), Recording)]
    print(f"recorded {len(names) - len(left)} of {len(names)}{': without ' + ', '.join(left) if left else ''}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())

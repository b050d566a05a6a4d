"""Overhead of a search on a cluster: the database, the scheduler, the driver.

    python -m benchmarks.ray_scale --out benchmarks/results/cpu/ray_scale.json

Actors on a Ray cluster of this machine do what a lane does with the database for each candidate (a claim and the
measurement), and nothing else; none imports torch. They begin together and write for a while, which gives candidates
a second by the number of actors. Further figures are the start time of actors, tasks a second as
compiling takes them, and frames a second through one driver. ``docs/explanation/ray-scale.md`` works out 1000 GPUs by
these figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from autotune.device import DeviceIdentity, Environment
from autotune.store.records import Key, Measurement
from autotune.store.store import Store
from autotune.store.tables.measurements import owner_name
from autotune.task import Status
from autotune.workload import Workload

GPU = DeviceIdentity("cuda", "Scale", 132, 143360, "9.0")
ENVIRONMENT = Environment("cuda", torch="2.11.0", numba="0.68.1", numba_cuda="0.30.4", cuda="13.0", driver="580.1")


def workload(n: int) -> Workload:
    return Workload("fusion", {"scale": n}, family="f" * 64, extent=n, label=f"scale {n}")


class Writer:
    """A lane's part of the database's load."""

    def __init__(self, number: int, url: str) -> None:
        self._number = number
        self._store = Store.open(url, migrate=False)
        self._owner = owner_name()
        fingerprint = self._store.put_workload(workload(number))
        self._key = Key(fingerprint, GPU.fingerprint, ENVIRONMENT.strict, "p" * 64)
        self._at = 0

    def ready(self) -> int:
        return os.getpid()

    def write(self, begin: float, seconds: float) -> tuple[int, list[float], list[float], float]:
        """From ``begin`` (of ``time.time``) on, for so long.

        Returns:
            How many candidates, milliseconds of each claim and of each row, seconds of processor time.
        """
        time.sleep(max(0.0, begin - time.time()))
        took: tuple[list[float], list[float]] = ([], [])
        count, spent = 0, time.process_time()
        while time.time() < begin + seconds:
            self._at += 1
            config: dict[str, Any] = {"writer": self._number, "i": self._at}
            us = 10.0 + (self._at * 7919 + self._number) % 1000
            t0 = time.perf_counter()
            self._store.claim(self._key, config, "screen", self._owner, 30.0)
            t1 = time.perf_counter()
            samples = tuple(us + k for k in range(9))
            m = Measurement(
                self._key, config, Status.OK, latency_us=us, samples=samples, noise=0.01, run=str(self._number)
            )
            self._store.add_measurement(m)
            t2 = time.perf_counter()
            for into, ms in zip(took, (t1 - t0, t2 - t1), strict=True):
                into.append(1e3 * ms)
            count += 1
        return count, *took, time.process_time() - spent


class Speaker:
    """A lane's frames: what the driver has to read while nothing is computed."""

    def __init__(self) -> None:
        from autotune.tuner.cluster.actor import Outbox

        self._out = Outbox()

    def receive(self, frames: int) -> list[dict[str, Any]]:
        for i in range(frames):
            self._out.send({"note": {"workload": "w" * 40, "phase": "search", "measured": i, "best_us": 12.5}})
        return self._out.take(1.0)


def nothing(data: bytes) -> bytes:
    """A task that compiles nothing: it takes a candidate and answers a cubin of 20 KB."""
    return b"\0" * 20_000


@contextlib.contextmanager
def machine() -> Iterator[tuple[Any, str, int]]:
    """Ray on this machine, with as many processors as actors need, and a PostgreSQL server: its URL and
    process."""
    import ray

    from tests.support.postgres import PostgresServer

    with (
        contextlib.closing(PostgresServer(connections=300)) as server,
        tempfile.TemporaryDirectory(prefix="ray-") as folder,
    ):
        server.start()
        os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
        ray.init(
            num_cpus=80, object_store_memory=256 << 20, include_dashboard=False, log_to_driver=False, _temp_dir=folder
        )
        try:
            yield ray, server.database(), server.pid
        finally:
            ray.shutdown()


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """The median and the 95th percentile, in milliseconds."""
    ordered = sorted(values)
    return {"median_ms": statistics.median(ordered), "p95_ms": ordered[int(0.95 * (len(ordered) - 1))]}


def _spent(server: int) -> float:
    """Processor seconds of a server and its connections so far."""
    import psutil

    mother = psutil.Process(server)
    times = [process.cpu_times() for process in (mother, *mother.children(recursive=True))]
    return float(sum(t.user + t.system for t in times))


def _writing(ray: Any, url: str, server: int, actors: Sequence[Any], seconds: float) -> dict[str, Any]:
    """Candidates a second of so many actors together."""
    import psutil

    begin = time.time() + 1.0
    psutil.cpu_percent()
    done = [a.write.remote(begin, seconds) for a in actors]
    time.sleep(1.0)
    psutil.cpu_percent()
    before = _spent(server)
    found = ray.get(done)
    served, busy = _spent(server) - before, psutil.cpu_percent()
    with Store.open(url, readonly=True) as store, store.reading() as c:
        open_now = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        connections = int(c.scalar(sa.text(open_now))) - 1
    claims, rows = ([ms for one in found for ms in one[k]] for k in (1, 2))
    count = sum(one[0] for one in found)
    return {
        "name": f"{len(actors)} actors, claims and measurements",
        "actors": len(actors),
        "seconds": seconds,
        "candidates_per_s": round(count / seconds, 1),
        "server_cpu_per_candidate_ms": round(1e3 * served / count, 3),
        "actor_cpu_per_candidate_ms": round(1e3 * sum(one[3] for one in found) / count, 3),
        "connections": connections,
        "processors_busy": round(busy / 100 * (os.cpu_count() or 1), 2),
        **{f"claim_{k}": round(v, 3) for k, v in quantiles(claims).items()},
        **{f"row_{k}": round(v, 3) for k, v in quantiles(rows).items()},
    }


def measure(seconds: float, counts: Sequence[int], tasks: int) -> list[dict[str, Any]]:
    """All of it; one case each."""
    cases = []
    with machine() as (ray, url, server):
        with Store.open(url) as store:
            store.put_device(GPU)
            store.put_environment(ENVIRONMENT)
            url = store.url
        begin = time.perf_counter()
        writers = [ray.remote(num_cpus=1)(Writer).remote(n, url) for n in range(max(counts))]
        asked = time.perf_counter() - begin
        ray.get([w.ready.remote() for w in writers])
        up = time.perf_counter() - begin
        cases.append({"name": f"{len(writers)} actors are ready", "actors": len(writers), "asked_s": round(asked, 3),
                      "ready_s": round(up, 2), "each_s": round(up / len(writers), 3)})  # fmt: skip
        print(json.dumps(cases[-1]), flush=True)
        for count in counts:
            cases.append(_writing(ray, url, server, writers[:count], seconds))
            print(json.dumps(cases[-1]), flush=True)
        for writer in writers:
            ray.kill(writer)
        cases += [_groups(ray), _tasks(ray, tasks), _frames(ray)]
        for case in cases[-3:]:
            print(json.dumps(case), flush=True)
    return cases


def _groups(ray: Any) -> dict[str, Any]:
    """Placement groups of one bundle, as each lane has one: until 100 are made."""
    from ray.util.placement_group import placement_group, remove_placement_group

    time.sleep(2.0)  # actors that were killed give back what they had
    begin, made = time.perf_counter(), []
    for _ in range(100):
        made.append(placement_group([{"CPU": 0.1}], strategy="STRICT_PACK"))
    for group in made:
        assert group.wait(30)
    took = time.perf_counter() - begin
    for group in made:
        remove_placement_group(group)
    return {"name": "100 placement groups of one bundle", "groups_per_s": round(100 / took, 1)}


def _tasks(ray: Any, count: int) -> dict[str, Any]:
    """Tasks that compile nothing, eight at once: what the scheduler adds to a build."""
    task = ray.remote(num_cpus=1)(nothing)
    ray.get([task.remote(b"") for _ in range(8)])
    latencies, begin = [], time.perf_counter()
    pending: dict[Any, float] = {}
    left = count
    while left or pending:
        while left and len(pending) < 8:
            pending[task.remote(b"\0" * 1000)] = time.perf_counter()
            left -= 1
        for ref in ray.wait(list(pending))[0]:
            ray.get(ref)
            latencies.append(1e3 * (time.perf_counter() - pending.pop(ref)))
    took = time.perf_counter() - begin
    return {"name": f"{count} tasks, 8 at once", "tasks_per_s": round(count / took, 1),
            **{f"task_{k}": round(v, 3) for k, v in quantiles(latencies).items()}}  # fmt: skip


def _frames(ray: Any, actors: int = 8, rounds: int = 50, frames: int = 20) -> dict[str, Any]:
    """Frames that one driver reads, by calls that each wait for some."""
    speakers = [ray.remote(num_cpus=0)(Speaker).remote() for _ in range(actors)]
    ray.get([s.receive.remote(1) for s in speakers])
    pending = {s.receive.remote(frames): (s, 1) for s in speakers}
    begin, read, calls = time.perf_counter(), 0, 0
    while pending:
        for ref in ray.wait(list(pending))[0]:
            speaker, at = pending.pop(ref)
            read, calls = read + len(ray.get(ref)), calls + 1
            if at < rounds:
                pending[speaker.receive.remote(frames)] = (speaker, at + 1)
    took = time.perf_counter() - begin
    return {"name": f"frames of {actors} actors through one driver", "calls_per_s": round(calls / took, 1),
            "frames_per_s": round(read / took, 1)}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="of writing, each time (default: %(default)s)")
    parser.add_argument("--actors", default="1,8,32", help="how many, by comma (default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=400, help="that compile nothing (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    load = os.getloadavg()[0]
    cases = measure(args.seconds, [int(n) for n in args.actors.split(",")], args.tasks)
    if args.out:
        from autotune.device import identify
        from benchmarks import form

        extra = {"suite": "ray_scale", "load_before": round(load, 1), "processors": os.cpu_count()}
        form.write(args.out, identify("cpu").label, cases, {}, extra=extra)
    return 0


if __name__ == "__main__":
    sys.exit(main())

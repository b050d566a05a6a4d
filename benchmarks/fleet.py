"""Many processes write to one database and many read it, while writers are killed and the server restarts.

    python -m benchmarks.fleet --out benchmarks/results/cpu/fleet.json

Writers add measurements and contest the schedules of a few workloads. Each notes what the database has acknowledged, is
killed at random, and goes on from its notes. Readers look schedules up and check every value of every row, since each
is a function of the configuration. At the end the database is compared with the notes. Nothing here imports torch:
processes are forked from one that has imported the store and opened nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from autotune.device import DeviceIdentity, Environment
from autotune.store import Key, LostConnection, Measurement, Schedule
from autotune.store.store import Store
from autotune.task import Artifact, Kernel, Status
from autotune.workload import Workload

GPU = DeviceIdentity("cuda", "Fleet", 132, 143360, "9.0")
ENVIRONMENT = Environment("cuda", torch="2.11.0", numba="0.68.1", numba_cuda="0.30.4", cuda="13.0", driver="580.1")
SHARED = 4
"""Workloads, whose schedules all writers contest."""
CONTEST = 20
"""Measurements between two schedules that a writer offers."""
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Size:
    """Amounts of writes, reads and kills.

    Attributes:
        each: measurements of a writer.
        kill_s: seconds between two kills, on average.
        kills: at most.
        outages: a server's restarts, each after another equal part of the work; ``away_s`` seconds each.
        pause_s: seconds between two rounds of a reader.
    """

    writers: int = 32
    readers: int = 32
    each: int = 1000
    kill_s: float = 1.0
    kills: int = 200
    outages: int = 1
    away_s: float = 3.0
    pause_s: float = 2.0


@dataclass
class Found:
    """The results; ``faults`` is empty if all checks passed."""

    rows: int = 0
    acknowledged: int = 0
    kills: int = 0
    outages: int = 0
    rounds: int = 0
    reader_outages: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


def workload(n: int) -> Workload:
    return Workload("fusion", {"fleet": n}, family="f" * 64, extent=64 << n, label=f"fleet {n}")


def key_of(n: int) -> Key:
    return Key(workload(n).fingerprint, GPU.fingerprint, ENVIRONMENT.strict, "p" * 64)


def config_of(writer: int, i: int) -> dict[str, int]:
    return {"writer": writer, "i": i}


def latency_of(config: dict[str, Any]) -> float:
    """In microseconds, from 10 to 1010: a function of the configuration, equal for no two of them."""
    name = f"{config['writer']}.{config['i']}".encode()
    return 10 + int.from_bytes(hashlib.sha256(name).digest()[:6]) / 2**48 * 1000


def measurement(writer: int, i: int) -> Measurement:
    config = config_of(writer, i)
    us = latency_of(config)
    return Measurement(
        key_of(writer % SHARED), config, Status.OK, latency_us=us, samples=(us, 2 * us, 3 * us), noise=us / 1e4,
        reason=f"{us!r} {json.dumps(config)}", run=str(writer), compile_s=us / 7, measure_s=us / 9,
    )  # fmt: skip


def schedule(writer: int, i: int) -> Schedule:
    config = config_of(writer, i)
    us = latency_of(config)
    code = json.dumps(config).encode() * 500
    artifact = Artifact("sm_90", (Kernel("k", code, {"grid": [writer, i]}),), generator=repr(us))
    n = writer % SHARED
    return Schedule(
        key_of(n), config, us, {"eager": 2 * us, "inductor": 3 * us}, artifact, family="f" * 64, extent=64 << n,
        when=100.0,
    )  # fmt: skip


def write(url: str, writer: int, size: Size, notes: Path) -> None:
    """Write what is not noted yet, and note each once the database has it. Ends the process."""
    file = notes / f"writer-{writer}"
    done = file.stat().st_size // 8 if file.exists() else 0
    out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with Store.open(url, migrate=False, awaited=True, timeout_s=120.0) as store:
        for i in range(done, size.each):
            store.add_measurement(measurement(writer, i))
            if i % CONTEST == 0:
                store.put_schedule(schedule(writer, i))
            os.write(out, b"%07d\n" % i)


def wrong(m: Measurement) -> bool:
    """Return True for a measurement that no writer wrote in this form."""
    try:
        expected = measurement(m.config["writer"], m.config["i"])  # type: ignore[arg-type]
    except KeyError:
        return True
    return {**asdict(m), "when": 0} != {**asdict(expected), "when": 0}


def read(url: str, reader: int, size: Size, notes: Path) -> None:
    """Read until there is a file ``stop``; note rounds, outages and faults."""
    rounds, outages, faults = 0, 0, []
    least: dict[int, float] = {}
    most = 0
    chance = random.Random(reader)
    store: Store | None = None
    while not (notes / "stop").exists():
        n = chance.randrange(SHARED)
        key = key_of(n)
        try:
            if store is None:
                store = Store.attach(url, timeout_s=60.0)
                assert store is not None
            s = store.get_schedule(key.workload, key.device, ENVIRONMENT)
            if s is not None and s.config is not None:
                if s != schedule(s.config["writer"], s.config["i"]):  # type: ignore[arg-type]
                    faults.append(f"reader {reader}: a torn schedule: {s.config}")
                if s.latency_us > least.get(n, 1e9):
                    faults.append(f"reader {reader}: a schedule became slower")
                least[n] = s.latency_us
            faults += [f"reader {reader}: a torn row: {m}" for m in store.measurements(limit=20) if wrong(m)]
            if rounds % 10 == 0:
                best = store.best(key, n=2)
                faults += [f"reader {reader}: a torn best: {m}" for m in best if wrong(m)]
                count = sum(store.status_counts(key).values()) if n == 0 else most
                if count < most:
                    faults.append(f"reader {reader}: {most} rows became {count}")
                most = count
            faults += [f"reader {reader}: {p}" for p in store.problems]
            rounds += 1
        except LostConnection:
            outages += 1
            if store is not None:
                store.close()
            store = None
        time.sleep(size.pause_s)
    (notes / f"reader-{reader}").write_text(json.dumps([rounds, outages, faults[:20]]))


def _child(action: Callable[..., None], url: str, number: int, size: Size, notes: Path) -> None:
    sys.stderr = open(notes / f"log-{action.__name__}-{number}", "a")  # noqa: SIM115
    try:
        action(url, number, size, notes)
    except BaseException as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def fleet(url: str, size: Size, restart: Callable[[], None] | None = None, *, seed: int = 0) -> Found:
    """Run it all on an empty database.

    Args:
        restart: takes the server away and brings it back; None leaves that out.
    """
    begin, chance, found = time.monotonic(), random.Random(seed), Found()
    with Store.open(url) as store:
        for n in range(SHARED):
            store.put_workload(workload(n))
        store.put_device(GPU)
        store.put_environment(ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="autotune-fleet-") as folder:
        notes = Path(folder)

        def start(action: Callable[..., None], number: int) -> BaseProcess:
            process = _FORK.Process(target=_child, args=(action, url, number, size, notes), daemon=True)
            process.start()
            return process

        readers = [start(read, n) for n in range(size.readers)]
        writers = {n: start(write, n) for n in range(size.writers)}
        pending, next_kill = set(writers), time.monotonic() + size.kill_s
        while pending:
            time.sleep(0.02)
            for n in sorted(pending):
                process = writers[n]
                if process.is_alive():
                    continue
                process.join()
                if process.exitcode == 0:
                    pending.discard(n)
                elif process.exitcode == -signal.SIGKILL:
                    writers[n] = start(write, n)
                else:
                    log = (notes / f"log-write-{n}").read_text().strip().splitlines()
                    found.faults.append(f"writer {n} ended with {process.exitcode}: {log[-1:]}")
                    pending.discard(n)
            if pending and found.kills < size.kills and time.monotonic() > next_kill:
                victim = writers[chance.choice(sorted(pending))].pid
                with contextlib.suppress(ProcessLookupError, TypeError):
                    os.kill(victim, signal.SIGKILL)  # type: ignore[arg-type]
                    found.kills += 1
                next_kill = time.monotonic() + chance.uniform(0, 2 * size.kill_s)
            done = sum(len(_noted(notes, n)) for n in writers) if restart else 0
            if (
                restart
                and found.outages < size.outages
                and done * (size.outages + 1) > (found.outages + 1) * size.writers * size.each
            ):
                restart()
                found.outages += 1
        (notes / "stop").touch()
        found.seconds = time.monotonic() - begin
        for n, process in enumerate(readers):
            process.join(120)
            report = notes / f"reader-{n}"
            if not report.exists():
                log = (notes / f"log-read-{n}").read_text().strip().splitlines()
                found.faults.append(f"reader {n} ended with {process.exitcode}: {log[-1:]}")
                continue
            rounds, outages, faults = json.loads(report.read_text())
            found.rounds += rounds
            found.reader_outages += outages
            found.faults += faults
        _compare(url, size, {n: _noted(notes, n) for n in writers}, found)
    return found


def _noted(notes: Path, writer: int) -> range:
    file = notes / f"writer-{writer}"
    return range(file.stat().st_size // 8 if file.exists() else 0)


def _compare(url: str, size: Size, noted: dict[int, range], found: Found) -> None:
    """See that the database holds what was acknowledged, each once, and that the best is the best."""
    from autotune.store.upkeep import damage

    with Store.open(url, migrate=False, readonly=True) as store:
        rows = store.measurements()
        found.rows, found.acknowledged = len(rows), sum(map(len, noted.values()))
        stored = [(m.config["writer"], m.config["i"]) for m in rows]
        lost = {(w, i) for w, own in noted.items() for i in own} - set(stored)
        found.faults += [f"lost: {len(lost)} acknowledged measurements, such as {min(lost)}"] if lost else []
        found.faults += ["a measurement is there twice"] if len(stored) != len(set(stored)) else []
        found.faults += [f"a wrong row: {m}" for m in rows if wrong(m)][:20]
        for n in range(min(SHARED, size.writers)):
            everything = [config_of(w, i) for w in noted if w % SHARED == n for i in noted[w]]
            (best,) = store.best(key_of(n)) or [None]
            if best is None or best.config != min(everything, key=latency_of):
                found.faults.append(f"the best of workload {n} is not the best")
            offered = [c for c in everything if c["i"] % CONTEST == 0]
            s = store.get_schedule(key_of(n).workload, GPU.fingerprint, ENVIRONMENT)
            if s is None or s.config != min(offered, key=latency_of):
                found.faults.append(f"the schedule of workload {n} is not the fastest that was offered")
        found.faults += list(damage(store))[:20]


@contextlib.contextmanager
def database(kind: str, away_s: float) -> Iterator[tuple[str, Callable[[], None] | None]]:
    """An empty database of a separate server, or in a file; and a function that restarts the server."""
    if kind == "sqlite":
        with tempfile.TemporaryDirectory(prefix="autotune-fleet-db-") as folder:
            yield str(Path(folder) / "fleet.db"), None
        return
    from tests.support.postgres import PostgresServer

    server = PostgresServer(connections=300)
    with contextlib.closing(server):
        server.start()

        def restart() -> None:
            server.stop()
            time.sleep(away_s)
            server.start()

        yield server.database(), restart


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--on", default="postgresql,sqlite", help="kinds of databases, by comma (default: %(default)s)")
    parser.add_argument("--each", type=int, default=1000, help="measurements of a writer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the kills (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    entries = []
    for kind in args.on.split(","):
        many = 8 if kind == "sqlite" else 32
        size = Size(writers=many, readers=many, each=args.each)
        with database(kind, size.away_s) as (url, restart):
            found = fleet(url, size, restart, seed=args.seed)
        entries.append({"name": f"{kind}, {many} writers and {many} readers", **asdict(size), **asdict(found)})
        print(json.dumps(entries[-1]), flush=True)
    if args.out:
        from autotune.device import identify
        from benchmarks import form

        form.write(args.out, identify("cpu").label, entries, {}, extra={"suite": "fleet"})
    return 1 if any(e["faults"] for e in entries) else 0


if __name__ == "__main__":
    raise SystemExit(main())

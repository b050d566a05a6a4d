"""Time of a look-up: in a warm process, in a new one, from a snapshot of 100 000 schedules; and time of imports.

    python -m benchmarks.lookup_speed --out benchmarks/results/cpu/lookup.json

The snapshot holds softmax kernels for an H200, compiled here (no GPU is needed), for as many numbers of rows, and one
schedule for this CPU. Times are wall-clock, in microseconds; files are in the page cache. Repeated measurements
have their median and, as ``..._min``, their minimum, which other work on the machine changes least.

``open``, ``open_signed``   ``autotune.load`` of a file opened before; with a pinned key the file is compared again
``cold``                    the first look-up of a workload in a process: keys, schedule and kernel, checksums compared
``cold_match``              the same through the ladder, from a signed snapshot, whose kernels are not printed again
``cold_match_unsigned``     the same from an unsigned one, whose kernels this user's cache lists as audited
``cold_match_unknown``      the same from an unsigned one, whose kernels were not audited here: they are printed again
``hot``                     a look-up of the same workload as before, as the compiler's hook makes it
``torch_cache``             torch.compile's own: key and load of one graph in its FX-graph cache, in a warm process
``import_torch``, ``import_autotune``, ``import_deploy``
                            ``import torch``; what ``import autotune`` adds; what the deploy path loads when first used
                            after ``torch._inductor``, which torch.compile needs in any case
``command``                 ``autotune lookup fusion layer_norm`` in a new process; ``command_torch`` is the part of
                                                        torch's imports that tracing needs, in a separate process
``command_stored``          ``autotune lookup fusion ID`` of a workload of the snapshot, in a new process
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import form

ROOT = Path(__file__).resolve().parent.parent
SAMPLED = 200
_IMPORTS = """
import time
a = time.perf_counter(); import torch
b = time.perf_counter(); import autotune; autotune.load
c = time.perf_counter(); import torch._inductor.compile_fx, torch._dynamo
d = time.perf_counter(); import autotune.runtime.inductor.region_pass, autotune.store.snapshot
e = time.perf_counter(); print(b - a, c - b, e - d)
"""
_TRACING = "import torch, torch._inductor.compile_fx, torch._dynamo"


def made(folder: Path, count: int) -> tuple[Path, Path, Path, list[Any]]:
    """An unsigned and a signed snapshot of ``count`` schedules, the public key, and workloads to look up."""
    import torch

    from autotune.compiler.assemble import bind
    from autotune.device import DeviceIdentity, Environment, environment, identify
    from autotune.domain import open_task
    from autotune.domains.fusion.task import FusionTask
    from autotune.ir.graph import Graph
    from autotune.store.records import Key, Schedule
    from autotune.store.snapshot_writer import Contents, write_snapshot
    from tests.support.hostile import softmax, workload_of
    from tests.support.snapshots import keys

    gpu = DeviceIdentity("cuda", "NVIDIA H200", 132, 143360, "9.0")
    env = Environment("cuda", torch="2.11.0", numba="0.68.1", numba_cuda="0.30.4", cuda="13.0", driver="580.1")
    first = workload_of(softmax, torch.ones(64, 1024))
    task = FusionTask(first, "cuda:0", "sm_90", 132)
    config = task.default()
    artifact = task.build(config)
    sampled, schedules, workloads = [], [], {}
    step = max(1, count // SAMPLED)
    for n in range(count):
        rows = 64 + n
        label = f"softmax f32 {rows}x1024"
        w = replace(first, spec={**first.spec, "extents": [rows, 1024]}, extent=rows, label=label, source={})
        own = artifact
        if n % step == 0:
            sampled.append(w)
            own = bind(artifact, Graph.from_json(w.spec), config)
        key = Key(w.fingerprint, gpu.fingerprint, env.strict, "p" * 64)
        workloads[w.fingerprint] = w
        schedules.append(Schedule(key, config, 10.0, {"eager": 20.0, "inductor": 15.0}, own, "autotune", w.family, rows,
                                  1000.0))  # fmt: skip
    here, soft = identify("cpu"), environment("cpu")
    own_task = open_task(first, "cpu")
    key = Key(first.fingerprint, here.fingerprint, soft.strict, "p" * 64)
    built = own_task.build(own_task.default())
    mine = Schedule(key, own_task.default(), 10.0, {"eager": 20.0}, built, "autotune", first.family, 64, 1000.0)
    contents = Contents(
        [*schedules, mine],
        workloads,
        {gpu.fingerprint: gpu, here.fingerprint: here},
        {env.strict: env, soft.strict: soft},
    )
    private, public = keys(folder)
    plain, signed = folder / "plain.atdb", folder / "signed.atdb"
    write_snapshot(plain, contents)
    write_snapshot(signed, contents, key=private)
    return plain, signed, public, [gpu, env, first, *sampled]


def timed(action: Callable[[], object]) -> float:
    """Microseconds."""
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1e6


def lookups(plain: Path, signed: Path, public: Path, known: list[Any]) -> dict[str, float]:
    """Median times of look-ups in this process, in microseconds."""
    import autotune
    from autotune.runtime.ladder import Level
    from autotune.runtime.match import look_up, match
    from autotune.store import Snapshot

    gpu, env, first, *sampled = known
    found: dict[str, float] = {}
    for name, file, key in (("open", plain, None), ("open_signed", signed, str(public))):
        times = [timed(lambda file=file, key=key: Snapshot(file, key=key)) for _ in range(25)]  # type: ignore[misc]
        found[name], found[f"{name}_min"] = statistics.median(times), min(times)
    snapshot = Snapshot(plain)
    cold = [timed(lambda w=w: snapshot.get_schedule(w.fingerprint, gpu.fingerprint, env)) for w in sampled]  # type: ignore[misc]
    found["cold"], found["cold_p95"] = statistics.median(cold), sorted(cold)[int(0.95 * len(cold))]
    cases = (
        ("cold_match", signed, str(public)),
        ("cold_match_unknown", plain, None),
        ("cold_match_unsigned", plain, None),
    )
    for name, file, key in cases:
        opened = Snapshot(file, key=key)
        match(sampled[0], opened, gpu, env)  # what it imports
        times = []
        for w in sampled[1:40]:
            began = time.perf_counter()
            got = match(w, opened, gpu, env)
            times.append((time.perf_counter() - began) * 1e6)
            if got.level is not Level.EXACT:
                raise SystemExit(f"{w.label}: {got.reason}")
        found[name], found[f"{name}_min"] = statistics.median(times), min(times)
    autotune.load(plain)
    look_up(first, "cpu")
    number = 20_000

    def many() -> None:
        for _ in range(number):
            look_up(first, "cpu")

    found["hot"] = min(timed(many) for _ in range(7)) / number
    found["file_bytes"] = float(plain.stat().st_size)
    return found


def torch_cache() -> float:
    """Microseconds of a hit in torch.compile's FX-graph cache: making the key, and loading."""
    import torch
    import torch._inductor.config
    from torch._functorch import config as aot_config
    from torch._inductor.codecache import FxGraphCache

    times: list[float] = []

    def clocked(name: str) -> None:
        real = getattr(FxGraphCache, name)

        @functools.wraps(real)
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return real(*args, **kwargs)
            finally:
                times[-1] += (time.perf_counter() - began) * 1e6

        setattr(FxGraphCache, name, staticmethod(run))

    for name in ("prepare_key", "load_with_key"):
        clocked(name)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    x = torch.ones(64, 1024)
    with torch._inductor.config.patch(fx_graph_cache=True), aot_config.patch(enable_autograd_cache=False):
        for _ in range(8):
            times.append(0.0)
            torch._dynamo.reset()
            torch.compile(fn)(x)
    return statistics.median(times[2:])


def processes(repeats: int, file: Path, stored: str) -> dict[str, float]:
    """Times of new processes, in microseconds."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*words: str) -> str:
        done = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
        return done.stdout

    parts = [[float(t) * 1e6 for t in run("-c", _IMPORTS).split()] for _ in range(repeats)]
    found = dict(
        zip(("import_torch", "import_autotune", "import_deploy"), map(min, zip(*parts, strict=True)), strict=True)
    )
    command = ("-m", "autotune", "lookup", "fusion", "layer_norm", "--device", "cpu", "--json")
    found["command"] = min(timed(lambda: run(*command)) for _ in range(repeats))
    command = ("-m", "autotune", "lookup", "fusion", stored, "--device", "cpu", "--db", str(file), "--json")
    found["command_stored"] = min(timed(lambda: run(*command)) for _ in range(repeats))
    found["command_torch"] = min(timed(lambda: run("-c", _TRACING)) for _ in range(repeats))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3, help="new processes of each kind")
    args = parser.parse_args()
    from autotune.device import identify

    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOTUNE_CACHE_DIR"] = str(Path(folder) / "cache")  # nothing is known to be audited
        plain, signed, public, known = made(Path(folder), args.schedules)
        found = lookups(plain, signed, public, known)
        print(*(f"{name} {value:.1f}" for name, value in found.items()), sep="\n", flush=True)
        found |= processes(args.repeats, plain, known[2].fingerprint)
    found["torch_cache"] = torch_cache()
    size = found.pop("file_bytes")
    cases: list[dict[str, Any]] = [{"name": name, "time_us": round(us, 3)} for name, us in found.items()]
    for case in cases:
        print(f"{case['name']:20s} {case['time_us']:12.1f} us")
    if args.out:
        extra = {"suite": "lookup", "schedules": args.schedules, "file_bytes": int(size), "load": os.getloadavg()[0]}
        form.write(args.out, identify("cpu").label, cases, {}, extra=extra)
    return 0


if __name__ == "__main__":
    sys.exit(main())

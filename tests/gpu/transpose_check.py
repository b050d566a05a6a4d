"""Gain of tiles for transposed tensors: candidates of the transpose scheme against flat, Inductor and eager.

    python tests/gpu/transpose_check.py [--only NAME ...] [--configs 6] [--device cuda:0] [--dry]

Every candidate (the default, the seeds, random ones) is verified before it is timed. Prints a table for each function:
microseconds, bytes a second, configuration; a last line "checked N bad M"; exit code 1 if M is not 0. Writes
``$OUT/transpose_check.json`` if OUT is set. ``--dry`` only compiles, without a GPU.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from autotune.domains.fusion.bench import FusionBench
from autotune.domains.fusion.task import FusionTask
from autotune.errors import BuildError
from autotune.task import Artifact, Config
from tests.gpu import command
from tests.support.zoo import BF16, F16, Case, T, candidates, nhwc, workloads_of

ROUNDS = 40
CASES = {
    c.name: c
    for c in (
        Case("plus_transposed", lambda x: x + x.t(), (T(8192, 8192),)),
        Case("nhwc", nhwc, (T(16, 320, 64, 64, d=F16), T(320, d=F16))),
        Case(
            "keys", lambda q, k: q * 0.125 + k.transpose(2, 3), (T(32, 16, 512, 64, d=BF16), T(32, 16, 64, 512, d=BF16))
        ),
        Case("copy", lambda x: x.t().contiguous(), (T(8192, 8192, d=BF16),)),
        Case("odd", lambda x, y: x * 2 + y.t(), (T(4099, 8191), T(8191, 4099))),
        Case("merge_heads", lambda x: (x * 2).transpose(1, 2).reshape(32, 512, 1024), (T(32, 16, 512, 64, d=BF16),)),
    )
}
"""Functions of one region. The last has all its neighbours on one axis: it shows what needs no tiles."""


def built(name: str, config: Config, device: str) -> tuple[Artifact | None, str]:
    """The artifact of a candidate, or why there is none; runs in the pool."""
    try:
        (work,) = workloads_of(CASES[name])
        return FusionTask(work, device).build(config), ""
    except BuildError as error:
        return None, str(error)


def microseconds(run: Callable[[], object]) -> float:
    """The median of single runs, after a few that do not count."""
    for _ in range(5):
        run()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(ROUNDS)]
    for begin, end in marks:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(float(begin.elapsed_time(end)) for begin, end in marks) * 1e3


def words(config: Config) -> str:
    names = ("tile", "threads_per_row", "vector_bytes", "unroll", "blocks_per_sm", "load_hint", "store_hint")
    return " ".join(f"{name}={config[name]}" for name in names if name in config)


def compare(case: Case, made: Sequence[tuple[Config, Artifact]], device: str) -> tuple[list[dict[str, Any]], int]:
    """Rows of the table, fastest first, and how many candidates are wrong."""
    (work,) = workloads_of(case)
    bench, bad = FusionBench(work, device), 0
    rows: list[dict[str, Any]] = []
    for config, artifact in made:
        run = bench.load(config, artifact)
        verdict = bench.verify(run, 0)
        if not verdict.ok:
            bad += 1
            print(f"BAD {case.name} {verdict.detail} {config}", flush=True)
            continue
        rows.append({"us": microseconds(run), "who": words(config)})
    args = [make().to(device) for make in case.inputs]
    inductor = torch.compile(case.fn)
    rows.append({"us": microseconds(lambda: inductor(*args)), "who": "Inductor"})
    rows.append({"us": microseconds(lambda: case.fn(*args)), "who": "eager"})
    for row in rows:
        row["gbs"] = bench.bytes_moved() / row["us"] / 1e3
    return sorted(rows, key=lambda r: float(r["us"])), bad


def main() -> int:
    parser = command.parser(__doc__, list(CASES))
    parser.add_argument("--configs", type=int, default=6, help="random configurations of every function")
    options = command.parsed(parser)
    tables: dict[str, list[dict[str, Any]]] = {}
    checked = bad = 0
    with command.pool(options) as pool:
        for name in options.only:
            (work,) = workloads_of(CASES[name])
            configs = candidates(FusionTask(work, options.device), options.configs, 0)
            found = pool.map(built, [name] * len(configs), configs, [options.device] * len(configs))
            made = []
            for config, (artifact, why) in zip(configs, found, strict=True):
                checked += 1
                if artifact is not None:
                    made.append((config, artifact))
                elif config == configs[0]:
                    bad += 1
                    print(f"BAD {name} {why} {config}", flush=True)
            print(f"{name}: {len(made)} candidates", flush=True)
            if options.dry:
                continue
            tables[name], wrong = compare(CASES[name], made, options.device)
            bad += wrong
            for row in tables[name]:
                print(f"  {row['us']:9.1f} us {row['gbs']:7.0f} GB/s  {row['who']}", flush=True)
    command.keep("transpose_check", tables)
    print(f"checked {checked} bad {bad}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())

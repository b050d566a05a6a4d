"""Steps of the user benchmark's programs with searched products, over the same steps without.

    python -m benchmarks.products --programs gpt_train,mesh_train --search 60 --out products.json

Each program runs twice in one process, from an empty database: compiled before the search, and after it. The search has
products alone. So both steps have the same attention and no kernel of ours but the products, and their ratio is the
gain of products. Steps are launched from Python with the programs' own optimizers, in blocks that take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli.options import positive_int, seconds
from benchmarks import form
from benchmarks.suite_options import names

if TYPE_CHECKING:
    from autotune.tuner.result import Result

_BLOCK = 12
_NAMES = 24
"""Steps of a block, and names of kernels of a kind that are kept."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.products", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--programs", type=names, required=True, metavar="A,B", help="of benchmarks.user_programs")
    parser.add_argument("--search", type=seconds, default=60.0, metavar="S", help="of each program (default: 60)")
    parser.add_argument("--rounds", type=positive_int, default=5, help="blocks of each (default: 5)")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="small versions, to try the benchmark itself")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 if a program failed or is slower with products."""
    args = parse(argv)
    os.environ |= {"AUTOTUNE_PRODUCTS": "search", "AUTOTUNE_PACKAGED": "refuse"}
    from autotune.device import identify
    from autotune.errors import first_line
    from autotune.runtime.launch import cublaslt

    cases, failed = list[dict[str, Any]](), dict[str, str]()
    for name in args.programs:
        with tempfile.TemporaryDirectory() as place:
            os.environ["AUTOTUNE_DB"] = f"{place}/products.db"
            try:
                case = measured(name, args)
            except Exception as error:
                failed[name] = first_line(error)
                print(f"{name} FAILED {first_line(error)}", flush=True)
                continue
        cases.append(case)
        if args.out:
            library = {"cublasLt": cublaslt.version().split()[-1]}
            extra = {"suite": "products", "failed": failed}
            form.write(args.out, identify(args.device).label, cases, library, extra=extra)
        ms = f"{case['without_ms']:.2f} ms, with {case['products']} products {case['products_ms']:.2f} ms"
        print(f"{name}: {ms}, {case['ratio']:.3f}x {case['ratios']}", flush=True)
        print(f"  host {case['host']} ms, losses {case['losses']}, {case['seconds']} s", flush=True)
    return int(bool(failed) or any(case["ratio"] < 0.99 for case in cases))


def measured(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A program's case: its products, and the time of its step with and without them."""
    import torch

    from autotune import numerics
    from autotune.api import tune_workloads
    from autotune.errors import UserError
    from autotune.in_program.turns import shares
    from autotune.measure.quiet import device_lock
    from autotune.runtime.deployment import deployment
    from autotune.runtime.inductor.verdict import Surveyed, surveying
    from autotune.store import Store
    from autotune.workload import Workload

    begin, graphs = time.monotonic(), list[Surveyed]()
    with surveying(graphs.append):
        without = Running(name, args)
    found = Counter[Workload](w for graph in graphs for _, w in graph.regions if w is not None and w.kind == "product")
    compiled = time.monotonic()
    torch.cuda.empty_cache()
    if not found:
        raise UserError("it has no products to search")
    weights = shares(list(found.items()))
    with Store.open(None) as store:
        results = tune_workloads(
            list(found), args.device, store, timeout=args.search, weights=weights, numerics=numerics.read()
        )
    searched = time.monotonic()
    rows = [row_of(found[w], result) for w in found for result in results if result.workload == w.fingerprint]
    print(f"{name}: {len(rows)} products, {searched - compiled:.1f} s", *map(line_of, rows), sep="\n", flush=True)
    deployment().reset_counters()
    running = {"without": without, "products": Running(name, args)}
    used = deployment().counters().products
    times: dict[str, list[float]] = {key: [] for key in running}
    host: dict[str, list[float]] = {key: [] for key in running}
    with device_lock(args.device, 60.0):
        for k in range(args.rounds):
            for key in sorted(running, reverse=bool(k % 2)):
                times[key].append(statistics.median(running[key].times(_BLOCK)))
                host[key].append(running[key].host_ms())
        kernels = {key: one.kernels() for key, one in running.items()} if torch.cuda.is_available() else {}
    return {
        "name": name,
        "products": used,
        **{f"{key}_ms": round(statistics.median(value), 4) for key, value in times.items()},
        "ratio": round(statistics.median(a / b for a, b in zip(times["without"], times["products"], strict=True)), 4),
        "ratios": [round(a / b, 4) for a, b in zip(times["without"], times["products"], strict=True)],
        "host": {key: round(min(value), 3) for key, value in host.items()},
        "losses": {key: one.loss() for key, one in running.items()},
        "seconds": {"compile": round(compiled - begin, 1), "search": round(searched - compiled, 1)},
        "workloads": rows,
        "kernels": kernels,
    }


def row_of(count: int, result: Result) -> dict[str, Any]:
    """A product's row: its occurrences in a step, and the result of its search."""
    row = {"workload": result.label, "count": count, "winner": result.winner, "us": result.best_us}
    row |= {"config": result.best, "baselines_us": dict(result.baselines), "seconds": round(result.seconds, 2)}
    return {**row, "begun": result.begun, "failed": dict(result.failed), "error": result.error}


def line_of(row: dict[str, Any]) -> str:
    """A product's row as a line of text."""
    best, other = row["us"], row["baselines_us"].get("inductor")
    gain = f"{other / best:.3f}x of {other:.1f} us" if best and other else row["error"] or "not reached"
    algorithm = (row["config"] or {}).get("algorithm")
    return f"  {row['count']:4} {row['workload']:44} #{algorithm} {gain} ({row['seconds']} s) {row['failed'] or ''}"


class Running:
    """A program that has taken its first step, compiled with the schedules of the database."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        import torch

        from autotune.runtime.backend import trial_backend
        from autotune.runtime.inductor.verdict import Trial
        from benchmarks.user_programs.contender import Clock
        from benchmarks.user_programs.known import PROGRAMS
        from benchmarks.user_programs.program import Compiler, Setup

        class Compiled(Compiler):
            def arguments(self, mode: str | None = None, **own: Any) -> dict[str, Any]:
                return {**own, "backend": trial_backend(Trial())}

        torch.manual_seed(0)
        self._clock = Clock(args.device)
        self._wait = torch.cuda.synchronize if args.device.startswith("cuda") else torch.cpu.synchronize
        self.step = PROGRAMS[name].make(Setup(args.device, args.tiny, Compiled("attention"))).step
        self.last = self.step()
        for _ in range(4):
            self.step()
        self._wait()

    def times(self, count: int) -> list[float]:
        """Milliseconds of so many steps by the device's clock."""
        return self._clock.of(self.step, count)

    def host_ms(self) -> float:
        """Milliseconds that the host takes for a step while the device is idle."""
        took = []
        for _ in range(4):
            self._wait()
            begin = time.perf_counter()
            self.step()
            took.append(1e3 * (time.perf_counter() - begin))
        self._wait()
        return min(took)

    def kernels(self) -> dict[str, Any]:
        """Microseconds of a step's kernels by name."""
        from autotune.bench.kernels import record, summed
        from benchmarks.user_programs.contender import largest

        def work() -> None:
            self.step()
            self._wait()

        for _ in range(3):  # a process's first trace may be empty
            if spans := [span for span in record(work) if span[2]]:
                return largest(summed([(begin, end, kernel) for begin, end, _, kernel in spans]), _NAMES)
        return {}

    def loss(self) -> float:
        """The mean of the first step's result."""
        return float(self.last.detach().float().mean())


if __name__ == "__main__":
    sys.exit(main())

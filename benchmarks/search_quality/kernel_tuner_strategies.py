"""Kernel Tuner's strategies in its simulation mode, in the spaces of :mod:`benchmarks.search_quality.hub`.

    pip install kernel-tuner scikit-learn     # into a separate environment
    python benchmarks/search_quality/kernel_tuner_strategies.py FILE... --seeds 10 --out kernel_tuner.json

Imports nothing of autotune. Writes for each space and strategy the best latency so far in microseconds, after each
candidate that was measured, for each seed.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

STRATEGIES = (
    "random_sample",
    "genetic_algorithm",
    "simulated_annealing",
    "diff_evo",
    "greedy_ils",
    "greedy_mls",
    "pso",
    "firefly_algorithm",
    "dual_annealing",
    "basinhopping",
    "bayes_opt",
)


def run(path: Path, data: Any, strategy: str, seed: int, candidates: int) -> list[float]:
    """One simulated tuning; the best latency after each candidate, in microseconds."""
    import kernel_tuner
    import numpy as np

    names = list(data["tune_params"])
    known = {tuple(str(entry[name]) for name in names) for entry in data["cache"].values()}

    def possible(*values: object, **named: object) -> bool:
        """Called either way."""
        return tuple(str(v) for v in (values or [named[name] for name in names])) in known

    random.seed(seed)
    np.random.seed(seed)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        results, _ = kernel_tuner.tune_kernel(
            data["kernel_name"],
            "",
            data.get("problem_size", (1, 1)),
            [],
            data["tune_params"],
            restrictions=[possible],
            strategy=strategy,
            strategy_options={"max_fevals": candidates},
            simulation_mode=True,
            cache=str(path),
            lang="CUDA",
            quiet=True,
        )
    best, trace, seen = float("inf"), [], set()
    for result in results:
        key = tuple(str(result[name]) for name in names)
        if key in seen:
            continue
        seen.add(key)
        if isinstance(result.get("time"), (int, float)):
            best = min(best, 1e3 * result["time"])
        trace.append(best)
    return trace[:candidates]


def main() -> None:
    """Every space, strategy and seed."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--candidates", type=int, default=160)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    answer: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for file in args.files:
            packed = file.read_bytes()
            data = json.loads(gzip.decompress(packed) if file.suffix == ".gz" else packed)
            plain = Path(folder) / (file.name.partition(".")[0] + ".json")
            plain.write_text(json.dumps(data))
            for strategy in args.strategies.split(","):
                began = time.perf_counter()
                traces, failed = [], ""
                for seed in range(args.seeds):
                    try:
                        traces.append(run(plain, data, strategy, seed, args.candidates))
                    except Exception as error:
                        failed = f"{type(error).__name__}: {error}"
                answer.setdefault(plain.stem, {})[strategy] = {"traces": traces, "failed": failed}
                took = time.perf_counter() - began
                print(f"{plain.stem} {strategy}: {len(traces)} of {args.seeds} in {took:.1f} s {failed}", flush=True)
                args.out.write_text(json.dumps(answer))


if __name__ == "__main__":
    main()

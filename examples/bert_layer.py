"""Run a BERT-base layer with the stored kernels of a search, and compare it with eager mode and Inductor.

autotune search fusion bert_layer --db bert.db
python examples/bert_layer.py --db bert.db
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

ROUNDS = 20


def interleaved(calls: dict[str, Callable[[], Any]], synchronize: Callable[[], None]) -> dict[str, float]:
    """Median milliseconds of each call; all run once a round, so that what disturbs one disturbs all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(ROUNDS + 3):
        for name, call in calls.items():
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            if round_ >= 3:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(samples) for name, samples in times.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Run a BERT layer with what a search has stored.")
    parser.add_argument("--db", help="database URL or SQLite file (default: $AUTOTUNE_DB, else the user's own)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    args = parser.parse_args(argv)
    if args.db:
        os.environ["AUTOTUNE_DB"] = args.db  # where the backend looks

    import torch

    import autotune
    from autotune.device import resolve_device
    from autotune.domains.fusion.program_spec import resolve

    device = resolve_device(args.device)
    model, (inputs, _), _ = resolve("bert_layer", None, device)
    tuned = torch.compile(model, backend="autotune")
    inductor = torch.compile(model)

    with torch.no_grad():
        expected, got = model(*inputs), tuned(*inputs)
        low = expected.dtype in (torch.bfloat16, torch.float16)
        torch.testing.assert_close(got, expected, rtol=5e-2 if low else 1e-4, atol=5e-2 if low else 1e-4)
        calls = {
            name: (lambda f=f: f(*inputs))
            for name, f in (("eager", model), ("inductor", inductor), ("autotune", tuned))
        }
        times = interleaved(calls, torch.cuda.synchronize if device != "cpu" else lambda: None)

    print(f"same result as eager; largest difference {(got - expected).abs().max().item():.2g}")
    print(f"counters: {autotune.counters()}")
    print("whole layer, median: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in times.items()))
    counted = autotune.counters()
    if counted.misses and not counted.hits:
        print("nothing was found in the database: run `autotune search fusion bert_layer` first", file=sys.stderr)
        return 1
    if not counted.hits:
        print("Inductor runs all of it, as the search found that to be faster: `autotune compare` tells more")
    return 0


if __name__ == "__main__":
    sys.exit(main())

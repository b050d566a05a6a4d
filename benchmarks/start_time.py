"""From the start of a process to its first result: a snapshot and warm caches, against torch.compile with warm caches.

    python -m benchmarks.start_time --snapshot schedules.atdb --out benchmarks/results/h200/start_time.json

The model is a BERT-base encoder (12 layers, batch 8, 512 tokens, half precision on a GPU). Tune it first, on the same
kind of device: `autotune search fusion benchmarks.start_time:model --inputs benchmarks.start_time:inputs`, then
`autotune export`. Each process is started so often, in turns; the median is told, imports of torch included. The
process with the snapshot can import no compiler of ours (tests/support/runtime/bare_job.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("inductor", "autotune")


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def model(layers: int = 12) -> Any:
    """An encoder of BERT-base's sizes, without its embeddings."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True, dropout=0.0)
    made = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval().requires_grad_(False)
    return made.to(_device(), torch.float16 if _device() == "cuda" else torch.float32)


def inputs() -> tuple[Any]:
    """Hidden states of 8 texts of 512 tokens (a CPU: one of 128)."""
    import torch

    gpu = _device() == "cuda"
    size, dtype = ((8, 512, 768), torch.float16) if gpu else ((1, 128, 768), torch.float32)
    return (torch.randn(size, device=_device(), dtype=dtype),)


def child(way: str, snapshot: str) -> None:
    """One process: load, run once, tell when that was done."""
    began = time.perf_counter()
    if way == "autotune" and os.environ.get("AUTOTUNE_BENCH_BARE") == "1":
        from tests.support.runtime.bare_job import Missing

        sys.meta_path.insert(0, Missing(but=("triton",)))  # Inductor's own, whose code its caches hold
    import torch

    run, x = model(), inputs()
    if way == "autotune":
        import autotune

        autotune.load(snapshot)
        run = autotune.compile(run)
    else:
        run = torch.compile(run)
    with torch.no_grad():
        y = run(*x)
    if y.is_cuda:
        torch.cuda.synchronize()
    done = {"seconds": time.perf_counter() - began, "ended": time.time(), "device": str(y.device)}
    if way == "autotune":
        import autotune

        done["counters"] = {name: n for name, n in autotune.counters().items() if n}
    print(json.dumps(done))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--snapshot", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.snapshot)
        return 0
    from autotune.device import identify, resolve_device
    from benchmarks import form

    gpu = resolve_device("auto") != "cpu"
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    last: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as caches:
        for turn in range(args.repeats + 1):  # the first fills the caches
            for way in WAYS:
                env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{caches}/{way}"}
                env["AUTOTUNE_BENCH_BARE"] = "1" if gpu else "0"  # a CPU's kernels need Numba
                words = [sys.executable, "-m", "benchmarks.start_time", "--snapshot", args.snapshot, "--child", way]
                began = time.time()
                done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(f"{way} failed:\n{done.stderr[-2000:]}")
                last[way] = json.loads(done.stdout.splitlines()[-1])
                if turn:
                    times[way].append(last[way]["ended"] - began)
    cases = [{"name": way, "time_us": statistics.median(t) * 1e6, "seconds": sorted(t)} for way, t in times.items()]
    counters = last["autotune"].get("counters", {})
    print(json.dumps({way: statistics.median(t) for way, t in times.items()} | {"counters": counters}))
    if args.out:
        extra = {"suite": "start", "counters": counters}
        form.write(args.out, identify(resolve_device("auto")).label, cases, {}, extra=extra)
    return 0


if __name__ == "__main__":
    sys.exit(main())

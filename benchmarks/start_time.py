"""From the start of a process to its first result: a snapshot and warm caches, against torch.compile with warm caches.

    python -m benchmarks.start_time --snapshot schedules.atdb --out benchmarks/results/h200/start_time.json

The model is a BERT-base encoder (12 layers, batch 8, 512 tokens, half precision on a GPU). Tune it first, on the same
kind of device: `autotune search fusion "benchmarks.start_time:model()" --inputs benchmarks.start_time:inputs`, then
`autotune export`. Each process is started so often, in turns; the median is printed, imports of torch included. The
processes with the snapshot can import no compiler of ours (tests/support/runtime/bare_job.py). Those called "saved"
load a model that torch compiled ahead of time, which spares Dynamo's tracing to either. Those called "package" run what
AOTInductor made, by torch's loader and by ours. All have Python's bytecode cached, as an installed package has.
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

import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("inductor", "autotune", "inductor saved", "autotune saved", "inductor package", "autotune package")


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class Layer(nn.Module):
    """One of BERT-base. (torch.nn.TransformerEncoderLayer has a fast path, which is one operator.)"""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attended, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Any, heads: int = 12) -> Any:
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = self.attended(x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return self.norm(x + self.down(F.gelu(self.up(x))))


def model(layers: int = 12) -> Any:
    """An encoder of BERT-base's sizes, without its embeddings, of the same weights each time."""
    torch.manual_seed(0)
    made = nn.Sequential(*(Layer() for _ in range(layers))).eval().requires_grad_(False)
    return made.to(_device(), torch.float16 if _device() == "cuda" else torch.float32)


def inputs() -> tuple[Any]:
    """Hidden states of 8 texts of 512 tokens (a CPU: one of 128)."""
    gpu = _device() == "cuda"
    size, dtype = ((8, 512, 768), torch.float16) if gpu else ((1, 128, 768), torch.float32)
    return (torch.randn(size, device=_device(), dtype=dtype),)


def child(way: str, snapshot: str, saved: str) -> None:
    """One process: load, run once, print the time of completion.

    Args:
        saved: the file of a model compiled ahead of time: made where it is not there, else loaded.
    """
    began = time.perf_counter()
    stages: dict[str, float] = {}

    def reached(stage: str) -> None:
        stages[stage] = round(time.perf_counter() - began, 3)

    ours = way.startswith("autotune")
    if ours and os.environ.get("AUTOTUNE_BENCH_BARE") == "1":
        from tests.support.runtime.bare_job import Missing

        sys.meta_path.insert(0, Missing(but=("triton",)))  # Inductor's own, whose code its caches hold

    x = inputs()
    reached("inputs made")
    with torch.no_grad():
        if way.endswith(" package") and Path(saved).exists():
            compiled = _packages(ours).aoti_load_package(saved)
            reached("package loaded")
        else:
            run = model()
            reached("model made")
            if ours:
                import autotune

                autotune.load(snapshot)
                reached("snapshot open")
            if way.endswith(" package"):
                _packages(ours).aoti_compile_and_package(torch.export.export(run, x), package_path=saved)
                compiled = _packages(ours).aoti_load_package(saved)
            else:
                compiled = autotune.compile(run, fullgraph=True) if ours else torch.compile(run, fullgraph=True)
            if way.endswith(" saved"):
                _ahead_of_time(compiled, x, Path(saved))
                reached("saved model loaded")
        y = compiled(*x)
    if y.is_cuda:
        torch.cuda.synchronize()
    reached("first result")
    done = {"stages": stages, "ended": time.time(), "device": str(y.device)}
    if ours:
        import autotune

        done["counters"] = {name: n for name, n in autotune.counters().items() if n}
    with torch.no_grad():
        done["error"] = float((y - model()(*x)).abs().max())
    print(json.dumps(done))


def _packages(ours: bool) -> Any:
    """The functions that make and load packages, with the same signature for both."""
    if not ours:
        return torch._inductor
    import autotune

    return autotune


def _ahead_of_time(compiled: Any, x: tuple[Any, ...], file: Path) -> None:
    """torch's experimental form of a compiled model that needs no tracing."""
    torch._dynamo.config.enable_aot_compile = True  # torch 2.11
    if file.exists():
        compiled._load_aot_compiled_module(file.read_bytes())
        return
    from torch._dynamo.aot_compile import ModelInput

    compiled._aot_compile([ModelInput(x, {}, [])])
    compiled._save_aot_compiled_module(str(file))


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--snapshot", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS), help=", ".join(WAYS))
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--saved", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.snapshot, args.saved)
        return 0
    from autotune.device import identify, resolve_device
    from benchmarks import form

    gpu = resolve_device("auto") != "cpu"
    times: dict[str, list[float]] = {way: [] for way in args.ways}
    last: dict[str, Any] = {}

    def started(way: str) -> tuple[subprocess.Popen[str], float]:
        place = f"{caches}/{way.replace(' ', '_')}"
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": place, "PYTHONPYCACHEPREFIX": f"{caches}/bytecode"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        env["AUTOTUNE_BENCH_BARE"] = "1" if gpu else "0"  # a CPU's kernels need Numba
        words = [sys.executable, "-m", "benchmarks.start_time", "--snapshot", args.snapshot, "--child", way]
        words += ["--saved", f"{place}.pt2"]
        began = time.time()
        return subprocess.Popen(
            words, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ), began

    def ended(way: str, process: subprocess.Popen[str], began: float) -> float:
        said, problem = process.communicate()
        if process.returncode:
            raise SystemExit(f"{way} failed:\n{problem[-2000:]}")
        last[way] = json.loads(said.splitlines()[-1])
        return float(last[way]["ended"]) - began

    with tempfile.TemporaryDirectory() as caches:
        for way, process in {way: started(way) for way in args.ways}.items():  # side by side: these fill the caches
            print(f"{way}: {ended(way, *process):.1f} s cold, beside the others", flush=True)
        for _ in range(args.repeats):
            for way in args.ways:
                times[way].append(ended(way, *started(way)))
                print(f"{way}: {times[way][-1]:.2f} s {json.dumps(last[way]['stages'])}", flush=True)
    cases: list[dict[str, Any]] = []
    for way, seconds in times.items():
        told = {name: last[way][name] for name in ("stages", "counters", "error") if name in last[way]}
        median = statistics.median(seconds)
        cases.append({"name": way, "time_us": median * 1e6, "seconds": sorted(seconds), **told})
        print(f"{way:16} {median:6.2f} s  {json.dumps(told)}", flush=True)
    if args.out:
        form.write(args.out, identify(resolve_device("auto")).label, cases, {}, extra={"suite": "start"})
    return 0


if __name__ == "__main__":
    sys.exit(main())

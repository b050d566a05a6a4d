"""Search products of programs, and time the programs' steps with the stored algorithms and without.

    AUTOTUNE_DB=/tmp/x.db OUT=. python tests/gpu/epilogues_check.py --only siglip vit

Each program is compiled twice: by autotune without any stored schedule, and with the products that the search has
stored. Both have the same attention and no kernel of ours, so their ratio is the gain of products alone. Steps are CUDA
graphs that are replayed in turn, while no search times anything. The outputs are compared with eager mode's.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from autotune.api import tune_workloads
from autotune.device import identify
from autotune.domain import policy_for
from autotune.domains.fusion.program_spec import workloads_of
from autotune.errors import first_line
from autotune.measure.pool import BaselinePool, CompilePool
from autotune.measure.quiet import device_lock
from autotune.measure.worker import Worker
from autotune.runtime.backend import trial_backend
from autotune.runtime.deployment import deployment
from autotune.runtime.inductor.verdict import Trial
from autotune.runtime.launch import cublaslt
from autotune.store import Store
from autotune.workload import Workload
from benchmarks.form import write
from tests.gpu import command

Step = Callable[[], Sequence[Tensor]]


class Layers(nn.Module):
    """Feed-forward layers with residual connections, as transformers have them."""

    def __init__(self, width: int, count: int, approximate: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(count))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(count))
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(F.gelu(up(norm(x)), approximate=self.approximate))
        return x


def layers(rows: int, width: int, approximate: str) -> tuple[nn.Module, Tensor]:
    return Layers(width, 2, approximate), torch.randn(16, rows // 16, width)


class Gated(nn.Module):
    """Feed-forward layers without biases, as those of a Llama: a gate, SwiGLU and RMS norms."""

    def __init__(self, width: int, hidden: int, count: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(count))
        self.gate = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(count))
        self.up = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for norm, gate, up, down in zip(self.norms, self.gate, self.up, self.down, strict=True):
            y = norm(x)
            x = x + down(F.silu(gate(y)) * up(y))
        return x


def gated() -> tuple[nn.Module, Tensor]:
    return Gated(4096, 14336, 2), torch.randn(4, 2048, 4096)


class Images(nn.Module):
    """The image tower of SigLIP in its base size at 384 pixels, of transformers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import SiglipVisionConfig, SiglipVisionModel  # type: ignore[import-not-found]

        self.model = SiglipVisionModel(SiglipVisionConfig(image_size=384))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x).last_hidden_state
        return out


def siglip() -> tuple[nn.Module, Tensor]:
    return Images().eval(), torch.randn(16, 3, 384, 384)


def of_timm(name: str, **options: Any) -> tuple[nn.Module, Tensor]:
    import timm  # type: ignore[import-not-found]

    model = timm.create_model(name, num_classes=0, **options)
    size = model.pretrained_cfg["input_size"][-1]
    return model.eval(), torch.randn(16, 3, size, size)


class OfTokens(nn.Module):
    """A decoder of transformers, whose tokens are its own: GPT-2 of 124M parameters."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2Model  # type: ignore[import-not-found]

        config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
        self.model = GPT2Model(config)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(inputs_embeds=x).last_hidden_state
        return out


def gpt2() -> tuple[nn.Module, Tensor]:
    return OfTokens(), torch.randn(16, 1024, 768)


PROGRAMS: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], bool]] = {
    "layers_tanh": (lambda: layers(16384, 768, "tanh"), False),
    "layers_tanh_train": (lambda: layers(16384, 768, "tanh"), True),
    "layers_erf": (lambda: layers(21952, 768, "none"), False),
    "vit": (lambda: of_timm("vit_base_patch14_dinov2"), False),
    "gated": (gated, False),
    "gated_train": (gated, True),
    "siglip": (siglip, False),
    "gpt2": (gpt2, False),
    "gpt2_train": (gpt2, True),
}
"""Program to a model with its input, both on the CPU in fp32, and whether its step is one of training."""


def step_of(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, train: bool) -> Step:
    if not train:

        def infer() -> Sequence[Tensor]:
            with torch.no_grad():
                return (run(x),)

        return infer
    wanted = [p for p in model.parameters() if p.requires_grad]
    gradient: list[Tensor] = []

    def both() -> Sequence[Tensor]:
        y = run(x)
        if not gradient:
            same = torch.Generator(y.device).manual_seed(1)  # in each of the compared steps
            made = torch.randn(y.shape, generator=same, device=y.device) / y.numel() ** 0.5
            gradient.append(made.bfloat16().to(y.dtype))
        return (y, *torch.autograd.grad(y, wanted, gradient[0], allow_unused=True))

    return both


def captured(step: Step) -> torch.cuda.CUDAGraph:
    """A step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def replayed(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each step, one replay a round."""
    graphs = {name: captured(step) for name, step in steps.items()}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for k in range(rounds + 3):
        for name, graph in graphs.items():
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if k >= 3:
                times[name].append(begin.elapsed_time(end))
    return times


def far(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The largest distance of a step's tensors from those in fp32, relative to their norm."""
    pairs = [(a.float(), b.float()) for a, b in zip(got, want, strict=True) if a is not None]
    return max(float((a - b).norm() / b.norm().clamp_min(1e-20)) for a, b in pairs)


def measured(
    name: str, device: str, seconds: float, rounds: int, means: Callable[[Workload], dict[str, Any]]
) -> dict[str, Any]:
    """Search a program's products, and time its step.

    Args:
        means: gives the worker and the other processes, which are started for the first workload.
    """
    make, train = PROGRAMS[name]
    torch.manual_seed(0)
    model, x = make()
    model, x = model.to(device), x.to(device).bfloat16()
    exact = step_of(model, model, x.float(), train)
    half = model.bfloat16() if train else model.bfloat16().requires_grad_(False)
    found = workloads_of(half, (x,), train=train)
    products = [workload for workload, _ in found if workload.kind == "product"]
    begin = time.monotonic()
    with Store.open(None) as store:
        results = tune_workloads(products, device, store, timeout=seconds, **means(products[0])) if products else []
    searched_s = time.monotonic() - begin
    table = []
    for workload, result in zip(products, results, strict=False):
        row: dict[str, Any] = {
            "workload": workload.label,
            "winner": result.winner,
            "us": result.best_us,
            "config": result.best,
        }
        row |= {"first_us": result.default_us, "others_us": dict(result.baselines), "count": dict(found)[workload]}
        row |= {"failed": dict(result.failed), "error": result.error, "seconds": round(result.seconds, 1)}
        table.append(row)
        print(f"  {row}", flush=True)
    deployment().reset_counters()
    torch._dynamo.reset()
    none, trial = Trial(frozenset(w.fingerprint for w in products)), Trial()
    runs = {
        "without": torch.compile(half, dynamic=False, backend=trial_backend(none)),
        "products": torch.compile(half, dynamic=False, backend=trial_backend(trial)),
    }
    steps = {key: step_of(run, half, x, train) for key, run in runs.items()}
    outputs = {key: [t.clone() for t in step() if t is not None] for key, step in steps.items()}
    count = deployment().counters().products
    eager = [t.clone() for t in step_of(half, half, x, train)() if t is not None]
    compiled_s = time.monotonic() - begin - searched_s
    with device_lock(device, 60.0):
        times = replayed(steps, rounds)
    half.float()
    want = [t for t in exact() if t is not None]
    errors = {key: far(value, want) for key, value in {**outputs, "eager": eager}.items()}
    ratio = statistics.median(a / b for a, b in zip(times["without"], times["products"], strict=True))
    return {
        "name": name,
        "products": count,
        **{f"{key}_ms": round(statistics.median(value), 4) for key, value in times.items()},
        "ratio": round(ratio, 4),
        "errors": errors,
        "search_s": round(searched_s, 1),
        "compile_s": round(compiled_s, 1),
        "workloads": table,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a step fails, has no products, is slower than without, or has errors a tenth above eager mode's."""
    made = command.parser(__doc__, list(PROGRAMS))
    made.add_argument("--seconds", type=float, default=40.0, help="of each program's search")
    made.add_argument("--rounds", type=int, default=30)
    options = command.parsed(made, argv)
    if options.dry:
        return 0
    os.environ["AUTOTUNE_PRODUCTS"] = "search"  # the default is to leave products to the library
    rows, failed = list[dict[str, Any]](), list[str]()
    library = {"cublasLt": cublaslt.version().split()[-1]}
    torch.cuda.set_stream(
        torch.cuda.Stream(options.device)
    )  # gradients are accumulated on the stream of the first step
    pool, ahead, worker = CompilePool(timeout_s=60.0), BaselinePool(), list[Worker]()

    def given(workload: Workload) -> dict[str, Any]:
        if not worker:
            worker.append(Worker(workload, options.device, policy_for(workload, options.device)))
        return {"measurer": worker[0], "pool": pool, "baselines": ahead}

    for name in options.only:
        try:
            rows.append(row := measured(name, options.device, options.seconds, options.rounds, given))
        except Exception as error:
            failed.append(name)
            traceback.print_exc(limit=6)
            print(f"{name} FAILED {first_line(error)}", flush=True)
            continue
        if out := os.environ.get("OUT"):
            where, label = Path(out, "epilogues.json"), identify(options.device).label
            write(where, label, rows, library, extra={"suite": "product", "failed": failed})
        print({key: value for key, value in row.items() if key != "workloads"}, flush=True)
    for one in worker:
        one.close()
    pool.close()
    ahead.close()
    worse = [r["name"] for r in rows if r["errors"]["products"] > 1.1 * max(r["errors"]["eager"], 1e-6)]
    slower = [r["name"] for r in rows if r["ratio"] < 0.99]
    without = [r["name"] for r in rows if not r["workloads"]]
    print(f"{len(rows)} programs, larger errors: {worse}, slower: {slower}, no products: {without}, failed: {failed}")
    return int(bool(worse or slower or without or failed))


if __name__ == "__main__":
    sys.exit(main())

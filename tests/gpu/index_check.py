"""Indices out of range end in a device-side assertion that names the kernel; and the cost of the checks in a step.

python tests/gpu/index_check.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import autotune
from autotune.runtime.backend import deploy_backend
from autotune.store import Store
from tests.gpu import command
from tests.support.capture_helpers import regions_of
from tests.support.deployment import store_default

PROGRAMS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "cross_entropy": lambda x, i: F.cross_entropy(x * 2, i),
    "embedding": lambda x, i: F.embedding(i, x[:1024]) * 2 + 1,
    "gather": lambda x, i: x.exp().gather(1, i[:, None]) + 1,
    "index": lambda x, i: x[:1024][i] * 2 + 1,
    "index_add": lambda x, i: torch.zeros_like(x[:1024]).index_add(0, i, x * 2) + 1,
    "scatter_add": lambda x, i: torch.zeros_like(x[:64]).scatter_add(1, i.view(64, 64), x[:64, :64] * 2) + 1,
    "scatter": lambda x, i: (x * 2).scatter(1, i[:, None], 1.0) + 1,
}


def stored(db: str, fn: Callable[..., Any], args: tuple[Any, ...], device: str) -> int:
    """Store the default configuration of every region of ``fn``; gives their number."""
    count = 0
    with Store.open(db) as store:
        for region in regions_of(fn, *args):
            if region.workload is not None:
                store_default(store, region.workload, device)
                count += 1
    torch._dynamo.reset()
    return count


def one(name: str, device: str) -> None:
    """Run a program with indices in range, then with one that is not."""
    torch.manual_seed(0)
    fn, x = PROGRAMS[name], torch.randn(4096, 1024, device=device)
    index = torch.arange(4096, device=device) % 1024
    assert stored(os.environ["AUTOTUNE_DB"], fn, (x, index), device), "no region"
    f = torch.compile(fn, backend=deploy_backend)
    torch.testing.assert_close(f(x, index), fn(x, index), atol=1e-3, rtol=1e-3)
    torch.cuda.synchronize()
    assert autotune.counters().hits, "no stored kernel"
    assert autotune.counters().fallbacks == 0
    print("in range: right", flush=True)
    index[4095] = 1024
    try:
        f(x, index)
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"out of range: {error}", flush=True)
        os._exit("device-side assert" not in str(error))  # the context is gone
    print("out of range: nothing happened", flush=True)
    os._exit(1)


def asserted(name: str, folder: Path, device: str) -> dict[str, Any]:
    """The output of a process that reads behind a table's end."""
    env = {**os.environ, "AUTOTUNE_DB": str(folder / f"{name}.db")}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.gpu.index_check", "--one", name, "--device", device],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    told = next((line for line in ran.stderr.splitlines() if "autotune: kernel" in line), "")
    right = ran.returncode == 0 and bool(told)
    return {"name": name, "right": right, "assertion": told[-200:], "error": "" if right else ran.stderr[-1500:]}


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, tokens, 3, -1, 64).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))


class Gpt(nn.Module):
    """A small GPT with tied embeddings; gives the loss where targets are given, else the last logits."""

    def __init__(self, layers: int = 6, width: int = 768, vocabulary: int = 50304) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.layers, self.norm = nn.ModuleList([Layer(width) for _ in range(layers)]), nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        if targets is None:
            return x[:, -1] @ self.tokens.weight.T
        logits = x @ self.tokens.weight.T
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.view(-1))


def _timed(steps: dict[str, Callable[[], Any]], rounds: int, count: int) -> dict[str, float]:
    """Milliseconds of each step, in turns, medians over rounds of ``count`` steps."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            step()
            begin.record()
            for _ in range(count):
                step()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / count)
    return {name: statistics.median(t) for name, t in times.items()}


def _device_us(step: Callable[[], Any]) -> float:
    """Microseconds of all kernels of a step, the median of five."""
    from torch.profiler import ProfilerActivity, profile

    totals = []
    for _ in range(5):
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            step()
            torch.cuda.synchronize()
        totals.append(sum(e.device_time_total for e in profiled.key_averages()))
    return statistics.median(totals)


def cost(name: str, folder: Path, device: str) -> dict[str, Any]:
    """A step with checks and without, launched from Python, and the device time of its kernels."""
    torch.manual_seed(0)
    train = name == "train"
    model = Gpt().to(device).train(train)
    shape = (16, 1024) if train else (8, 16)
    tokens = torch.randint(0, 50304, shape, device=device)
    os.environ["AUTOTUNE_DB"] = str(folder / f"cost-{name}.db")

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model(tokens, tokens if train else None)

    grad = torch.enable_grad() if train else torch.no_grad()
    with grad:
        regions = stored(os.environ["AUTOTUNE_DB"], forward, (tokens,), device)
        made: dict[str, Callable[[], Any]] = {}
        for label, backend, on in (
            ("checked", deploy_backend, True), ("unchecked", deploy_backend, False), ("inductor", "inductor", True)
        ):  # fmt: skip
            torch._dynamo.reset()
            f = torch.compile(forward, backend=backend, options={"assert_indirect_indexing": on})

            def step(f: Callable[..., Any] = f) -> None:
                out = f(tokens)
                if train:
                    model.zero_grad(set_to_none=True)
                    out.backward()

            step()
            made[label] = step
        times = _timed(made, 15, 5 if train else 30)
        kernels = {label: _device_us(step) for label, step in made.items()}
        return {"name": name, "regions": regions, "ms": times, "kernels_us": kernels}


def main() -> int:
    made = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--one", choices=list(PROGRAMS), help="run one program in this process")
    made.add_argument("--device", default="cuda:0")
    options = made.parse_args()
    if options.one:
        one(options.one, options.device)
    with tempfile.TemporaryDirectory() as made_folder:
        folder = Path(made_folder)
        with ThreadPoolExecutor() as pool:
            rows = list(pool.map(lambda name: asserted(name, folder, options.device), PROGRAMS))
        for row in rows:
            print(json.dumps(row), flush=True)
        costs = [cost(name, folder, options.device) for name in ("train", "infer")]
    for row in costs:
        print(json.dumps(row), flush=True)
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "asserted": rows, "cost": costs}
    command.keep("index_check", {"command": "python tests/gpu/index_check.py", **result})
    bad = sum(not row["right"] for row in rows)
    print(f"checked {len(rows)} bad {bad}")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())

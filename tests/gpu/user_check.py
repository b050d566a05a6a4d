"""A user's commands and calls on a real device: run it on a GPU host.

    python tests/gpu/user_check.py [--device cuda:0] [--only NAME ...] [--seconds 20]

Each check runs in a separate process, for seven minutes at most, with a separate folder and database. It
prints a line, and the exit code is 1 if one fails. Writes ``$OUT/user_check.json`` if OUT is set. ``--device cpu`` runs
them on a machine without a GPU, where they check less.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 420
MODEL = "tests.gpu.user_check:model()"
"""A model of which a search of seconds finds something: norms, activations and a loss round two matrix products."""


def model() -> Any:
    import torch
    from torch import nn

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512))
            self.norm = nn.LayerNorm(512)

        def forward(self, x: Any, wanted: Any) -> Any:
            return nn.functional.cross_entropy(self.norm(x + self.body(x)), wanted)

    return Loss()


def inputs(device: str, rows: int = 4096) -> Any:
    import torch

    made = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 512, generator=made)
    return x.to(device), torch.randint(0, 512, (rows,), generator=made).to(device)


def command(*words: str, code: int = 0) -> str:
    """The output of a command of autotune.

    Raises:
        AssertionError: it ends with another code.
    """
    done = subprocess.run(
        [sys.executable, "-m", "autotune", *words], capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.returncode == code, f"autotune {' '.join(words[:3])} ended with {done.returncode}: {done.stderr[-800:]}"
    return done.stdout


def searched(device: str, seconds: float, *more: str) -> dict[str, Any]:
    """A search of the model's training step, and of the step itself."""
    words = ["search", "fusion", MODEL, "--inputs", "tests.gpu.user_check:inputs", "--train", "--device", device]
    found: dict[str, Any] = json.loads(command(*words, "--timeout", str(seconds), "--json", *more))
    return found


def same_step(device: str, rows: int = 4096, **options: Any) -> dict[str, int]:
    """A training step compiled with autotune gives eager's loss and gradients; the process's counters."""
    import torch

    import autotune

    ours, plain = model().to(device), model().to(device)
    given = inputs(device, rows)
    losses = torch.compile(ours, backend="autotune", **options)(*given), plain(*given)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=2e-4, atol=2e-4)
    for (name, a), (_, b) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=2e-3, atol=2e-5, msg=lambda why, name=name: f"{name}: {why}")
    return dict(autotune.counters().items())


def check_search_and_verdict(device: str, seconds: float) -> dict[str, Any]:
    """A search ends with the step's verdict; compare and lookup show it; the step is right."""
    found = searched(device, seconds)
    compared = json.loads(command(
        "compare", "fusion", MODEL, "--inputs", "tests.gpu.user_check:inputs", "--train", "--device", device, "--json"
    ))  # fmt: skip
    told = command("lookup", "fusion", MODEL, "--inputs", "tests.gpu.user_check:inputs", "--train", "--device", device,
                   "--explain")  # fmt: skip
    assert "exact" in told
    counters = same_step(device)
    assert counters["fallbacks"] == 0
    return {"counters": counters, "workloads": len(found["workloads"]), "compared": sorted(compared)}


def check_snapshot(device: str, seconds: float) -> dict[str, Any]:
    """A signed snapshot deploys what the database does, checked at its first use; autotune verifies every call."""
    import autotune

    searched(device, seconds, "--no-step")
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", "key.pem"], check=True, capture_output=True)
    subprocess.run(["openssl", "pkey", "-in", "key.pem", "-pubout", "-out", "key.pub"], check=True, capture_output=True)
    command("export", "schedules.atdb", "--sign", "key.pem")
    os.environ["AUTOTUNE_DB"] = str(Path("nothing.db").resolve())
    autotune.load("schedules.atdb", key="key.pub")
    autotune.configure(verify="always")
    counters = same_step(device)
    assert counters["hits"] > 0
    assert counters["fallbacks"] == 0
    return {"counters": counters}


def check_modes(device: str, seconds: float) -> dict[str, Any]:
    """torch.compile's modes, CUDA-graph trees among them, and dynamic shapes in one compilation."""
    import torch

    searched(device, seconds, "--no-step")
    found = {}
    for mode in ("default", "reduce-overhead", "max-autotune-no-cudagraphs"):
        torch._dynamo.reset()
        found[mode] = same_step(device, mode=mode)["hits"]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for rows in (4096, 1024, 3000, 4096):
        found[f"dynamic {rows}"] = same_step(device, rows, dynamic=True)["hits"]
    assert found["default"] > 0
    return found


def check_strict(device: str, seconds: float) -> dict[str, Any]:
    """Strict precision is searched and deployed by itself."""
    os.environ["AUTOTUNE_PRECISION"] = "strict"
    searched(device, seconds, "--no-step", "--precision", "strict")
    counters = same_step(device)
    assert counters["hits"] > 0
    os.environ["AUTOTUNE_PRECISION"] = "default"
    return {"counters": counters}


def check_warm_start(device: str, seconds: float) -> dict[str, Any]:
    """The second process takes Inductor's code and ours from the caches."""
    searched(device, seconds, "--no-step")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path("inductor").resolve())
    code = (
        "import json, time; begin = time.perf_counter()\n"
        "from tests.gpu.user_check import same_step\n"
        "from torch._dynamo.utils import counters\n"
        f"hits = same_step({device!r})['hits']\n"
        "print('TOLD', json.dumps([time.perf_counter() - begin, hits, dict(counters['aot_autograd'])]))"
    )
    told = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT_S)
        told.append(json.loads(done.stdout.partition("TOLD")[2]))
    (cold, hits, _), (warm, again, cache) = told
    assert hits == again > 0
    assert cache.get("autograd_cache_hit", 0) >= 1, cache
    return {"cold_s": round(cold, 1), "warm_s": round(warm, 1)}


def check_float8(device: str, seconds: float) -> dict[str, Any]:
    """Rows to float8 with their scales, as torchao has it: eager's elements, or their neighbours by rounding."""
    import torch

    import autotune

    shape = (4096, 2048)
    autotune.search(by_row, (torch.randn(shape, device=device, dtype=torch.bfloat16),), device=device, timeout=seconds)
    x = 3 * torch.randn(shape, device=device, dtype=torch.bfloat16)
    (a, s), (b, t) = torch.compile(by_row, backend="autotune")(x), by_row(x)
    torch.testing.assert_close(s, t, rtol=1e-6, atol=0)
    apart = (a.view(torch.uint8).int() - b.view(torch.uint8).int()).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 1e-3
    return {"hits": autotune.counters().hits}


def by_row(x: Any) -> Any:
    import torch

    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = largest / x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-largest, largest).to(torch.float8_e4m3fn), scale


def check_own_kernels(device: str, seconds: float) -> dict[str, Any]:
    """A Numba and a Triton kernel: searched, and found by a call in another process."""
    import importlib.util

    numba = "examples.own_kernels.stencil:heat" if device == "cpu" else "tests.gpu.numba_kernels:scaled_sum"
    found = {}
    for target, needs in ((numba, "numba"), ("examples.own_kernels.matmul:product", "triton")):
        if importlib.util.find_spec(needs) is None or (device == "cpu" and needs == "triton"):
            found[target] = f"not checked: no {needs} for this device"
            continue
        command("search", "kernel", target, "--device", device, "--timeout", str(seconds))
        told = command("lookup", "kernel", target, "--device", device)
        assert "exact" in told, told
        found[target] = "exact"
    return found


def check_triton_target(device: str, seconds: float) -> dict[str, Any]:
    """The example of a third target: kernels of the zoo through Triton, verified."""
    import importlib.util

    if device == "cpu" or importlib.util.find_spec("triton") is None:
        return {"not checked": "it needs a GPU and Triton"}
    from dataclasses import replace

    from examples.triton_target.domain import TritonBench, TritonTask
    from tests.support.triton_checks import CONFIGS
    from tests.support.zoo import workloads

    right = 0
    for name in ("ln_bf16", "softmax_odd", "dropout_residual_ln"):
        for workload in workloads(name):
            task = TritonTask(replace(workload, kind="triton"), device)
            bench = TritonBench(task.workload, device)
            for config in CONFIGS:
                verdict = bench.verify(bench.load(config, task.build(config)), 5)
                assert verdict.ok, f"{name}: {verdict.detail}"
                right += 1
    return {"right": right}


CHECKS: dict[str, Callable[[str, float], dict[str, Any]]] = {
    name.removeprefix("check_"): check for name, check in sorted(globals().items()) if name.startswith("check_")
}


def alone(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A check in a separate process: its results, or the reason of its failure."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        own = {"AUTOTUNE_DB": f"{folder}/check.db", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        words = ["--device", options.device, "--seconds", str(options.seconds), "--inside", name]
        try:
            done = subprocess.run(
                [sys.executable, __file__, *words],
                capture_output=True,
                text=True,
                check=False,
                cwd=folder,
                env={**os.environ, **own},
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return {"ok": False, "why": f"not done in {LIMIT_S} s", "s": LIMIT_S}
    seconds = round(time.monotonic() - begin, 1)
    if done.returncode:
        return {"ok": False, "why": done.stderr.strip()[-1500:], "s": seconds}
    return {"ok": True, "found": json.loads(done.stdout.rpartition("FOUND ")[2]), "s": seconds}


def main(argv: list[str] | None = None) -> int:
    from tests.gpu import command as shared

    made = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--device", default="cuda:0")
    made.add_argument("--only", nargs="+", default=list(CHECKS), choices=list(CHECKS), metavar="NAME")
    made.add_argument("--seconds", type=float, default=20.0, help="of each search (default: %(default)s)")
    made.add_argument("--inside", choices=list(CHECKS), help=argparse.SUPPRESS)
    options = made.parse_args(argv)
    if options.inside:
        print("FOUND", json.dumps(CHECKS[options.inside](options.device, options.seconds)))
        return 0
    results = {}
    for name in options.only:
        results[name] = found = alone(name, options)
        print(
            f"{name}: {'ok' if found['ok'] else 'FAILED'} in {found['s']} s: {found.get('found', found.get('why'))}",
            flush=True,
        )
    shared.keep("user_check", {"device": options.device, "command": " ".join(sys.argv), "checks": results})
    return int(not all(found["ok"] for found in results.values()))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())

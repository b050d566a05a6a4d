"""Stored kernels in Inductor's C++: are they launched there, and are the results those of eager?

    python tests/gpu/cpp_wrapper_check.py [--snapshot FILE.atdb] [--seconds 20] [--device cuda:0]

The model is two layers of `benchmarks.start_time`, in inference under ``cpp_wrapper``, in training under it, and as a
package of AOTInductor's: plain, on another stream, from a misaligned input, captured in a CUDA graph, from more threads
than runners, and in a process that has no autotune. Without a snapshot a search of ``--seconds`` makes one.
Prints a line each and "checked N bad M"; exit code 1 if M is not 0. Writes ``$OUT/cpp_wrapper_check.json`` if OUT is
set.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import autotune
from benchmarks import start_time
from tests.gpu import command

TOLERANCE = 0.06
"""Of half-precision results of two layers, whose largest is about 4."""


def model() -> Any:
    return start_time.model(layers=2)


def ran_kernels(run: Callable[[], Any]) -> set[str]:
    """Names of our kernels that a call launches."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as told:
        run()
        torch.cuda.synchronize()
    return {event.key for event in told.key_averages() if event.key.startswith("autotune_")}


def host_us(run: Callable[[], Any]) -> float:
    """Microseconds until a call returns, the device idle before: the median of 50."""
    taken = []
    for _ in range(50):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        taken.append((time.perf_counter() - began) * 1e6)
    return round(statistics.median(taken[10:]), 1)


class Checks:
    """The checks and their results."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def close(self, name: str, got: torch.Tensor, want: torch.Tensor, **more: Any) -> None:
        error = float((got.float() - want.float()).abs().max())
        self.tell(name, ok=error <= TOLERANCE, error=error, **more)

    def tell(self, name: str, *, ok: bool, **more: Any) -> None:
        self.rows.append({"name": name, "ok": ok, **more})
        print(self.rows[-1], flush=True)


def wrapper_in_process(checks: Checks) -> None:
    run, (x,) = model(), start_time.inputs()
    with torch.no_grad():
        want = run(x)
        for name, made in (
            ("cpp_wrapper", autotune.compile(run, options={"cpp_wrapper": True})),
            ("python wrapper", autotune.compile(run)),
        ):
            torch._dynamo.reset()
            before = autotune.counters().hits
            call = functools.partial(made, x)
            kernels = ran_kernels(call)
            checks.close(name, call(), want, kernels=sorted(kernels), hits=autotune.counters().hits - before)
            checks.tell(f"{name}: launches our kernels", ok=len(kernels) >= 2, host_us=host_us(call))
        memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
        odd = memory[1:].view(x.shape).copy_(x)
        torch._dynamo.reset()
        checks.close("cpp_wrapper, misaligned", autotune.compile(run, options={"cpp_wrapper": True})(odd), want)
    run.requires_grad_(True)
    torch._dynamo.reset()
    weights = torch.randn_like(x) * 0.05  # of a size whose gradients half precision holds
    (run(x) * weights).sum().backward()
    want = run[0].norm.weight.grad.clone()
    run.zero_grad()
    with torch._inductor.config.patch(
        cpp_wrapper=True
    ):  # torch 2.11 forgets an option when it compiles a backward pass
        (autotune.compile(run)(x) * weights).sum().backward()
    scale = float(want.abs().max())
    checks.close("cpp_wrapper, training", run[0].norm.weight.grad / scale, want / scale)


def packaged(checks: Checks, folder: str) -> None:
    run, (x,) = model(), start_time.inputs()
    path = f"{folder}/model.pt2"
    with torch.no_grad():
        want = run(x)
        before = autotune.counters().hits
        autotune.aoti_compile_and_package(torch.export.export(run, (x,)), package_path=path)
        checks.tell("package", ok=autotune.counters().hits > before, hits=autotune.counters().hits - before)
        made = autotune.aoti_load_package(path)
        kernels = ran_kernels(lambda: made(x))
        checks.close("package, run", made(x), want, kernels=sorted(kernels), host_us=host_us(lambda: made(x)))
        checks.tell("package: launches our kernels", ok=len(kernels) >= 2)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            got = made(x)
        stream.synchronize()
        checks.close("package, another stream", got, want)
        memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
        checks.close("package, misaligned", made(memory[1:].view(x.shape).copy_(x)), want)
        single = autotune.aoti_load_package(path, run_single_threaded=True)
        single(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = single(x)
        got.zero_()
        graph.replay()
        torch.cuda.synchronize()
        checks.close("package, in a CUDA graph", got, want)
        several = autotune.aoti_load_package(path, num_runners=2)
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda _: several(x), range(16)))
        torch.cuda.synchronize()
        checks.close("package, from threads", torch.stack(results), want.expand(16, *want.shape))
        torch.save((x.cpu(), want.cpu()), f"{folder}/pair.pt")
    alone = f"""
import sys, torch
x, want = torch.load({folder + "/pair.pt"!r})
got = torch._inductor.aoti_load_package({path!r})(x.cuda())
assert not any(name.startswith("autotune") for name in sys.modules)
assert (got.cpu().float() - want.float()).abs().max() <= {TOLERANCE}
"""
    done = subprocess.run([sys.executable, "-c", alone], cwd=folder, capture_output=True, text=True, check=False)
    checks.tell("package, without autotune", ok=done.returncode == 0, said=done.stderr[-500:])


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--snapshot")
    parser.add_argument("--seconds", type=float, default=20.0, help="of search, where there is no snapshot")
    options = parser.parse_args()
    checks = Checks()
    torch.cuda.set_device(options.device)  # the benchmark's model is on the current one
    with tempfile.TemporaryDirectory() as folder:
        if options.snapshot is None:
            db = f"{folder}/new.db"
            autotune.search(
                "benchmarks.start_time:model()", inputs="benchmarks.start_time:inputs", device=options.device, db=db,
                timeout=options.seconds,
            )  # fmt: skip
        autotune.load(options.snapshot or db)
        wrapper_in_process(checks)
        packaged(checks, folder)
    bad = sum(not row["ok"] for row in checks.rows)
    command.keep("cpp_wrapper_check", {"command": " ".join(sys.argv), "rows": checks.rows})
    print(f"checked {len(checks.rows)} bad {bad}")
    return int(bool(bad or not checks.rows))


if __name__ == "__main__":
    raise SystemExit(main())

"""What a stored kernel costs the host, and whether it may be launched wherever torch's own may: run it on a GPU host.

    python tests/gpu/deploy_check.py [OUT.json]

Times are microseconds of host time per call, on shapes so small that the GPU keeps up: the stored kernel through its
executor, the whole ``torch.compile(backend="autotune")`` call, eager and Inductor. Then every check prints a line; the
exit code is 1 if one fails. Needs the package, numba-cuda (to build the kernels that it stores) and one GPU; no pytest.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FOLDER = tempfile.mkdtemp()
os.environ["AUTOTUNE_DB"] = str(Path(FOLDER) / "check.db")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import autotune  # noqa: E402
from autotune.device import environment, identify  # noqa: E402
from autotune.fusion.capture import capture  # noqa: E402
from autotune.fusion.regions import find_regions  # noqa: E402
from autotune.runtime.backend import dynamo_backend  # noqa: E402
from autotune.runtime.counters import reset_counters  # noqa: E402
from autotune.runtime.replace import cuts, find  # noqa: E402
from autotune.store import Store  # noqa: E402
from autotune.store.records import Key, Schedule  # noqa: E402
from autotune.task import open_task  # noqa: E402

ROWS, COLS = 64, 1024
DEVICE = "cuda:0"


def layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (COLS,), w, b)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x * 0.125, -1)


def gelu_norm(x: torch.Tensor, r: torch.Tensor, b: torch.Tensor, w: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.gelu(x + b) + r, (COLS,), w, c)


def inputs(fn: Callable[..., Any], device: str = DEVICE, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    def t(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    if fn is softmax:
        return (t(ROWS, COLS),)
    if fn is layer_norm:
        return (t(ROWS, COLS), t(COLS), t(COLS))
    return (t(ROWS, COLS), t(ROWS, COLS), t(COLS), t(COLS), t(COLS))


def store(fn: Callable[..., Any], args: Sequence[Any], device: str = DEVICE) -> int:
    """Build and store the default schedule of every region, as if a search had found it."""
    n = 0
    with Store.open() as database:
        identity, env = database.put_device(identify(device)), database.put_environment(environment(device))
        for graph in capture(fn, args).graphs:
            for region in find_regions(graph.module):
                workload = region.workload
                assert workload is not None, region.reason
                task = open_task(workload, device)
                config = task.default()
                key = Key(database.put_workload(workload), identity, env, "by hand")
                schedule = Schedule(
                    key, config, 1.0, {"eager": 2.0}, task.build(config), "autotune", workload.family, workload.extent
                )
                database.put_schedule(schedule)
                n += 1
    torch._dynamo.reset()
    return n


def host_us(calls: dict[str, Callable[[], Any]], rounds: int = 30, n: int = 200) -> dict[str, dict[str, float]]:
    """Host time of each call in microseconds: median and best of batches taken in turn.

    The GPU is waited for only between batches, which are shorter than the driver's launch queue.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(500):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(n):
                call()
            times[name].append((time.perf_counter() - start) / n * 1e6)
    torch.cuda.synchronize()
    return {name: {"median": statistics.median(t), "best": min(t)} for name, t in times.items()}


def executor_of(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """The stored kernel of a one-region function behind the deploy path's executor, and its inputs in order."""
    found: list[Any] = []

    def backend(gm: Any, examples: Sequence[Any]) -> Any:
        from autotune.fusion.capture import aot_backend

        def look(graph: Any, flat: Sequence[Any], kind: str) -> Any:
            (cut,) = cuts(find(graph, tell=False))
            places = list(graph.graph.find_nodes(op="placeholder"))

            def run(*tensors: torch.Tensor) -> Any:
                found[:] = [cut.run, [tensors[places.index(n)] for n in cut.inputs]]
                return graph.forward(*tensors)

            return run

        return aot_backend(look)(gm, examples)

    torch.compile(fn, backend=backend)(*args)
    torch._dynamo.reset()
    return found[0], found[1]


def measure() -> list[dict[str, Any]]:
    rows = []
    for fn in (layer_norm, softmax, gelu_norm):
        args = inputs(fn)
        run, ordered = executor_of(fn, args)
        ours = torch.compile(fn, backend=dynamo_backend)
        theirs = torch.compile(fn)
        torch.testing.assert_close(ours(*args), fn(*args), atol=1e-4, rtol=1e-4)
        theirs(*args)
        times = host_us(
            {
                "executor": lambda run=run, o=ordered: run(*o),
                "autotune": lambda ours=ours, args=args: ours(*args),
                "eager": lambda fn=fn, args=args: fn(*args),
                "inductor": lambda theirs=theirs, args=args: theirs(*args),
            }
        )
        rows.append({"name": fn.__name__, "inputs": len(args), "host_us": times})
        print(fn.__name__, {k: f"{v['median']:.1f} (best {v['best']:.1f})" for k, v in times.items()}, flush=True)
        torch._dynamo.reset()
    return rows


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def check_cuda_graph() -> None:
    args = inputs(gelu_norm)
    f = torch.compile(gelu_norm, backend=dynamo_backend)
    f(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = f(*args)
    for seed in range(3):
        torch.manual_seed(seed)
        args[0].normal_()
        graph.replay()
        close(out, gelu_norm(*args))
    assert autotune.counters().fallbacks == 0


def check_first_launch_under_capture() -> None:
    """A kernel may be launched for the first time while a graph is captured: it was loaded before."""
    args = inputs(softmax)
    run, ordered = executor_of(softmax, args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (out,) = run(*ordered)
    graph.replay()
    close(out, softmax(*args))
    assert autotune.counters().fallbacks == 0


def check_streams() -> None:
    args = inputs(gelu_norm)
    f = torch.compile(gelu_norm, backend=dynamo_backend)
    f(*args)
    want = gelu_norm(*args)
    torch.cuda.synchronize()
    for _ in range(20):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            # The kernel must wait for this long write, which only its own stream's order makes it do.
            big = torch.randn(4096, 4096, device=DEVICE)
            for _ in range(10):
                big = big @ big * 1e-2
            x = args[0] + 0 * big[:ROWS, :COLS].nan_to_num(0, 0, 0)
            got = f(x, *args[1:])
        side.synchronize()
        close(got, want)


def check_threads() -> None:
    f = torch.compile(layer_norm, backend=dynamo_backend)
    sets = [inputs(layer_norm) for _ in range(8)]
    want = [layer_norm(*s) for s in sets]
    f(*sets[0])
    torch.cuda.synchronize()
    wrong: list[BaseException] = []

    def work(k: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(300):
                    got = f(*sets[k])
                torch.cuda.current_stream().synchronize()
                close(got, want[k])
        except BaseException as e:
            wrong.append(e)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if wrong:
        raise wrong[0]


def check_thread_without_context() -> None:
    """A new thread has no CUDA context until a launch gives it one."""
    args = inputs(softmax)
    run, ordered = executor_of(softmax, args)
    torch.cuda.synchronize()
    out: list[Any] = []
    thread = threading.Thread(target=lambda: out.append(run(*ordered)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    close(out[0][0], softmax(*args))
    assert autotune.counters().fallbacks == 0


def check_misaligned() -> None:
    flat = torch.randn(ROWS * COLS + 1, device=DEVICE)
    x = flat[1:].view(ROWS, COLS)
    f = torch.compile(softmax, backend=dynamo_backend)
    close(f(x), softmax(x))
    assert autotune.counters().misaligned >= 1, "this one's address is off by four bytes"
    assert autotune.counters().fallbacks == 0


def check_training() -> None:
    args = inputs(layer_norm)
    mine = [a.clone().requires_grad_() for a in args]
    theirs = [a.clone().requires_grad_() for a in args]
    store(layer_norm, [a.clone().requires_grad_() for a in args])
    reset_counters()
    torch.compile(layer_norm, backend=dynamo_backend)(*mine).square().sum().backward()
    layer_norm(*theirs).square().sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-3, rtol=1e-3)
    assert autotune.counters().hits >= 2
    assert autotune.counters().fallbacks == 0


def check_other_rows() -> None:
    f = torch.compile(gelu_norm, backend=dynamo_backend)
    for rows in (ROWS, 17, 1000):
        args = inputs(gelu_norm)
        x, r = (torch.randn(rows, COLS, device=DEVICE) for _ in range(2))
        close(f(x, r, *args[2:]), gelu_norm(x, r, *args[2:]))
    assert autotune.counters().hits_other_rows >= 2
    assert autotune.counters().misses == 0
    assert autotune.counters().fallbacks == 0


def check_no_numba() -> None:
    """Deployment alone, in a process of its own, imports neither Numba nor Optuna nor Alembic."""
    import subprocess

    program = (
        "import sys, torch, autotune; sys.path.insert(0, 'tests/gpu'); import torch.nn.functional as F\n"
        f"x = torch.randn({ROWS}, {COLS}, device='cuda')\n"
        "f = autotune.compile(lambda x: F.softmax(x * 0.125, -1))\n"
        "torch.testing.assert_close(f(x), F.softmax(x * 0.125, -1))\n"
        "assert autotune.counters().hits == 1, autotune.counters()\n"
        "bad = {'numba', 'optuna', 'alembic'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run([sys.executable, "-c", _in_file(program)], env=env, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr[-1500:]


def _in_file(program: str) -> str:
    """A program that Dynamo can trace needs a source file."""
    path = Path(FOLDER) / "deploy_only.py"
    path.write_text(program)
    return f"import runpy; runpy.run_path({str(path)!r})"


def check_second_device() -> None:
    if torch.cuda.device_count() < 2:
        print("  (one device here)")
        return
    args = inputs(gelu_norm, "cuda:1")
    run, ordered = executor_of(gelu_norm, args)
    assert torch.cuda.current_device() == 0
    (got,) = run(*ordered)
    close(got, gelu_norm(*args))
    assert got.device.index == 1
    assert torch.cuda.current_device() == 0


CHECKS = [
    check_cuda_graph,
    check_first_launch_under_capture,
    check_streams,
    check_threads,
    check_thread_without_context,
    check_misaligned,
    check_training,
    check_other_rows,
    check_second_device,
    check_no_numba,
]


def main() -> int:
    for fn in (layer_norm, softmax, gelu_norm):
        assert store(fn, inputs(fn)) == 1
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "versions": environment(DEVICE).to_json(),
        "host": measure(),
        "checks": {},
    }
    for check in CHECKS:
        reset_counters()
        torch._dynamo.reset()
        try:
            check()
            result["checks"][check.__name__] = "ok"
        except Exception as e:
            traceback.print_exc()
            result["checks"][check.__name__] = f"{type(e).__name__}: {e}"
        print(check.__name__, result["checks"][check.__name__], flush=True)
    path = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("OUT", ".")) / "deploy_check.json"
    if path.parent.suffix == ".json":
        path = path.parent
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")
    return int(any(v != "ok" for v in result["checks"].values()))


if __name__ == "__main__":
    raise SystemExit(main())

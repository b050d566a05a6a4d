"""A stored kernel's host time, and its launch in every state in which torch's own kernels launch: run it on a GPU host.

    python tests/gpu/deploy_check.py [OUT.json]

Times are microseconds of host time per call, on shapes so small that the GPU keeps up: the stored kernel as Inductor's
code calls it, the whole ``torch.compile(backend="autotune")`` call, eager and Inductor. Then every check prints a line;
the exit code is 1 if one fails. Needs the package, numba-cuda (to build the kernels that it stores) and one GPU; no
pytest.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

FOLDER = tempfile.mkdtemp()
os.environ["AUTOTUNE_DB"] = str(Path(FOLDER) / "check.db")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

import autotune  # noqa: E402
from autotune.device import environment  # noqa: E402
from autotune.runtime.backend import deploy_backend  # noqa: E402
from autotune.runtime.deployment import deployment  # noqa: E402
from benchmarks.deploy_host import (  # noqa: E402
    COLS,
    DEVICE,
    ROWS,
    gelu_norm,
    inputs,
    launcher_of,
    layer_norm,
    measure,
    softmax,
    store,
)  # fmt: skip


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def launched(run: Any, given: list[Any]) -> torch.Tensor:
    """The last result of a launch on the current stream, written over what it was."""
    given[-2].fill_(float("nan"))
    run(*given[:-1], torch.cuda.current_stream().cuda_stream)
    return given[-2]  # type: ignore[no-any-return]


def check_cuda_graph() -> None:
    args = inputs(gelu_norm)
    f = torch.compile(gelu_norm, backend=deploy_backend)
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
    run, given = launcher_of(softmax, args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launched(run, given)
    graph.replay()
    close(out, softmax(*args))
    assert autotune.counters().fallbacks == 0


def check_streams() -> None:
    args = inputs(gelu_norm)
    f = torch.compile(gelu_norm, backend=deploy_backend)
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
    f = torch.compile(layer_norm, backend=deploy_backend)
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
    run, given = launcher_of(softmax, args)
    given[-2].fill_(float("nan"))
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: run(*given))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    close(given[-2], softmax(*args))
    assert autotune.counters().fallbacks == 0


def check_misaligned() -> None:
    flat = torch.randn(ROWS * COLS + 1, device=DEVICE)
    x = flat[1:].view(ROWS, COLS)
    run, given = launcher_of(softmax, inputs(softmax))
    given[0] = x
    close(launched(run, given), softmax(x))
    assert autotune.counters().misaligned >= 1, "this one's address is off by four bytes"
    f = torch.compile(softmax, backend=deploy_backend)
    close(f(x), softmax(x))  # Inductor may copy it first
    assert autotune.counters().hits >= 1
    assert autotune.counters().fallbacks == 0


def check_training() -> None:
    args = inputs(layer_norm)
    mine = [a.clone().requires_grad_() for a in args]
    theirs = [a.clone().requires_grad_() for a in args]
    store(layer_norm, [a.clone().requires_grad_() for a in args])
    deployment().reset_counters()
    torch.compile(layer_norm, backend=deploy_backend)(*mine).square().sum().backward()
    layer_norm(*theirs).square().sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-3, rtol=1e-3)
    assert autotune.counters().hits >= 2
    assert autotune.counters().fallbacks == 0


def check_other_rows() -> None:
    f = torch.compile(gelu_norm, backend=deploy_backend)
    for rows in (ROWS, 17, 1000):
        args = inputs(gelu_norm)
        x, r = (torch.randn(rows, COLS, device=DEVICE) for _ in range(2))
        close(f(x, r, *args[2:]), gelu_norm(x, r, *args[2:]))
    assert autotune.counters().hits_other_rows >= 2
    assert autotune.counters().misses == 0
    assert autotune.counters().fallbacks == 0


def check_no_numba() -> None:
    """Deployment alone, in a separate process, imports neither Numba nor Optuna nor Alembic."""
    import subprocess

    program = (
        "import sys, torch, autotune; import torch.nn.functional as F\n"
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
    store(gelu_norm, args, "cuda:1")
    got = torch.compile(gelu_norm, backend=deploy_backend)(*args)
    close(got, gelu_norm(*args))
    assert autotune.counters().hits == 1
    assert autotune.counters().fallbacks == 0
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
        deployment().reset_counters()
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

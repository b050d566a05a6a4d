"""A test-only domain on CUDA: y = 2 x, and kernels that fail in every way a kernel can. The faults are real.

``how`` picks the kernel and :data:`EXPECTED` has a search's expected outcome. Kernels are hand-written sources for
the project's own compiler and launcher, so that a candidate takes the way a fused kernel takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autotune.compiler.targets.cuda.compile import build
from autotune.compiler.targets.cuda.source import Listing
from autotune.domain import Domain
from autotune.space import Parameter, Space
from autotune.task import Artifact, Bench, Config, Runnable, Task, Verdict
from autotune.workload import Workload

KIND = "faulty"
EXPECTED: Mapping[str, str] = {
    "good": "ok",
    "slow": "ok",
    "hang": "timeout",
    "out_of_bounds": "crashed",
    "misaligned": "crashed",
    "wrong": "wrong_result",
    "unwritten": "wrong_result",
    "shared": "compile_error",  # refused from the cubin's needs
    "shared_launch": "launch_error",  # as "shared", in an artifact with a wrong size: the driver refuses
    "threads": "launch_error",
}
BLOCKS = (64, 128, 256)
SHARED = 300_000  # bytes: more than any device has

_HEAD = "i = int64(blk) * %d + cuda.threadIdx.x\nif i < n0:\n"
_GOOD = "p1[i] = p0[i] * float32(2)"
_BODY: Mapping[str, str] = {
    "good": _GOOD,
    # Right, but every thread waits for its memory 64 times.
    "slow": "p1[i] = p0[i]\nfor k in range(64):\n    cuda.threadfence()\n    p1[i] = p1[i]\np1[i] = p1[i] * float32(2)",
    "hang": "x = p0[i]\nwhile x > float32(-1e30):\n    p1[i] = x\n    cuda.threadfence()\n    x = p0[i]",
    # Behind all that a process can have mapped, so that no other memory is hit.
    "out_of_bounds": "p1[i + (int64(1) << 44)] = p0[i] * float32(2)",
    "misaligned": "x = p0[i]\nst_f32_4_d(p1, 4 * (i // 8) + 1, (x, x, x, x))",
    "wrong": "p1[i] = p0[i] * float32(2.01)",
    "unwritten": "if i != 12345:\n    p1[i] = p0[i] * float32(2)",
}


def workload(n: int = 1 << 22) -> Workload:
    return Workload(KIND, {"n": n}, family=KIND, extent=n, label=f"faulty {n}")


def source(how: str, block: int) -> Listing:
    """The kernel over ``p0`` (in) and ``p1`` (out), ``n0`` floats each."""
    body = _BODY.get(how, _GOOD)
    lines = [*(_HEAD % block).splitlines(), *("    " + line for line in body.splitlines())]
    launch = {
        "dynamic": True,
        "inner": 1,
        "per_block": block,
        "block": block,
        "shared": SHARED if how == "shared" else 0,
        "args": [["input", 0], ["output", 0]],
        "align": [4, 4],
    }
    return Listing((), tuple(lines), ("f32", "f32"), launch, block, 0)


class FaultyTask(Task):
    def __init__(self, workload: Workload, device: str) -> None:
        self.workload, self.device = workload, device

    def space(self, file: str | None = None) -> Space:
        return Space((Parameter("how", tuple(EXPECTED)), Parameter("block", BLOCKS)), "faulty.toml")

    def default(self) -> Config:
        return {"how": "slow", "block": 128}

    def seeds(self) -> Sequence[Config]:
        """Every kernel once, the good one last: after all that may have hurt the worker."""
        return [{"how": how, "block": 128} for how in (*(h for h in EXPECTED if h not in ("slow", "good")), "good")]

    def reject(self, config: Config) -> str | None:
        return None

    def normalize(self, config: Config) -> Config:
        return config

    def adapt(self, config: Config) -> Config | None:
        return config

    def build(self, config: Config) -> Artifact:
        from autotune.device import describe_cuda

        target, _ = describe_cuda(self.device)
        how = str(config["how"])
        kernel = build(source(how, int(config["block"])), target)
        if how == "shared_launch":
            kernel = replace(kernel, launch={**kernel.launch, "shared": SHARED})
        if how == "threads":
            kernel = replace(kernel, launch={**kernel.launch, "block": 2048})
        return Artifact(target, (kernel,), generator=KIND)


class FaultyBench(Bench):
    def __init__(self, workload: Workload, device: str) -> None:
        import torch

        self.torch, self.device = torch, torch.device(device)
        self.x = torch.randn(int(workload.spec["n"]), device=self.device)
        self.out = torch.empty_like(self.x)

    def load(self, config: Config, artifact: Artifact) -> Runnable:
        from autotune.runtime.launch.cuda import make_launch
        from autotune.runtime.launch.prepared import grid_of

        (kernel,) = artifact.kernels
        n = self.x.numel()
        launch = make_launch(kernel, self.device.index or 0, grid_of(kernel.launch, n), n)

        def run() -> None:
            stream = self.torch.cuda.current_stream(self.device).cuda_stream
            launch(stream, (self.x.data_ptr(), self.out.data_ptr()))

        return run

    def verify(self, run: Runnable, seed: int) -> Verdict:
        from autotune.measure.verify import compare

        rng = self.torch.Generator(device=self.device).manual_seed(seed)
        self.x.copy_(self.torch.randn(self.x.shape, generator=rng, device=self.device))
        self.out.fill_(float("nan"))
        run()
        self.torch.cuda.synchronize(self.device)
        return compare(self.out, self.x.double() * 2, "float32")

    def baselines(self) -> Mapping[str, Callable[[], Runnable]]:
        return {"eager": lambda: lambda: self.torch.mul(self.x, 2, out=self.out)}

    def bytes_moved(self) -> int:
        return 8 * self.x.numel()


class Faulty(Domain):
    """See ``autotune.domain.Domain``."""

    def open_task(self, workload: Workload, device: str) -> FaultyTask:
        return FaultyTask(workload, device)

    def open_bench(self, workload: Workload, device: str) -> FaultyBench:
        return FaultyBench(workload, device)


DOMAIN = Faulty()

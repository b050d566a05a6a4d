"""Errors against fp64: eager mode, Inductor, and autotune's default and strict kernels, over the suite's cases.

    python -m benchmarks.precision --device cpu --out benchmarks/results/cpu/precision.json

Nothing is searched: each region runs its default schedule. All take the case's own inputs. The reference is the same
program with every float in fp64 (:class:`Wide`), so that what a program rounds between its operators counts as error,
for eager too. ``rms`` is the root mean square of the difference over the reference's; ``max`` the largest difference of
an element over its own size, or over the reference's root mean square where that is larger, as after a
cancellation. Of a case's results the worst counts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.compiler.regions.find import Region, find_regions
from autotune.device import environment, identify, resolve_device
from autotune.domain import open_task
from autotune.ir.graph import Graph
from autotune.ir.nodes import DEFAULT, STRICT, asking
from autotune.runtime.launch.executor import load_executor
from autotune.runtime.launch.prepared import RegionTensors, TensorSpec
from autotune.store.records import Key, Schedule
from autotune.task import Artifact, Config
from autotune.workload import Workload
from benchmarks import form
from benchmarks.fusion.cases.case import Case
from benchmarks.fusion.suite import choose
from benchmarks.table import render

Errors = dict[str, float]
OURS = {"autotune": DEFAULT, "autotune_strict": STRICT}


class Wide(TorchDispatchMode):
    """Runs a program with every floating type as fp64, explicitly named types too."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map(_widened, (args, dict(kwargs or {})))
        return pytree.tree_map(_widened, func(*args, **kwargs))


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def errors(got: Any, want: Any) -> Errors:
    """``max`` and ``rms`` of the floating results ``got`` against fp64's; infinite where one is finite and the other
    is not."""
    found = {"max": 0.0, "rms": 0.0}
    for a, e in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        if not e.is_floating_point():
            continue
        a, same = a.double(), a.isfinite() == e.isfinite()
        finite = e.isfinite()
        if not bool(same.all()):
            return {"max": float("inf"), "rms": float("inf")}
        a, e = a[finite], e[finite]
        if not e.numel():
            continue
        off, typical = (a - e).abs(), float(e.square().mean().sqrt())
        found["max"] = max(found["max"], float((off / e.abs().clamp_min(typical or 1.0)).max()))
        found["rms"] = max(found["rms"], float(off.square().mean().sqrt()) / (typical or 1.0))
    return found


def traced(case: Case, size: str, device: str, precision: str) -> tuple[fx.GraphModule, list[Region]]:
    """A case's program as aten calls, its inputs' leaves in order, and its regions."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    args = case.arguments(size, device)
    with FakeTensorMode() as mode, torch.no_grad(), asking(precision):
        fake = pytree.tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, args)
        gm = make_fx(lambda *xs: case.fn(*xs), decomposition_table=select_decomp_table())(*fake)
        return gm, find_regions(gm, device.partition(":")[0])


def compiled(workload: Workload, device: str, target: tuple[str, int] | None) -> tuple[Config, Artifact]:
    """The default schedule of a workload. Runs in a separate process, without the device."""
    task: Any = open_task(workload, device)
    if target is not None:
        task._target, task._sms = target
    return task.default(), task.build(task.default())


def put_in(gm: fx.GraphModule, region: Region, made: tuple[Config, Artifact], device: str) -> None:
    """A region's kernels in its place."""
    import operator

    from torch._inductor.pattern_matcher import stable_topological_sort

    assert region.workload is not None
    config, artifact = made
    specs = [[TensorSpec.of(n.meta["val"]) for n in nodes] for nodes in (region.inputs, region.outputs)]
    run = load_executor(
        Graph.from_json(region.workload.spec), Schedule(Key("", "", "", ""), config, 0.0, {}, artifact),
        RegionTensors(region.binding.inputs, region.binding.outputs, *specs), torch.device(device),
    )  # fmt: skip
    with gm.graph.inserting_after(region.nodes[-1]):
        node = gm.graph.call_function(run.call, region.inputs)
    with gm.graph.inserting_after(node):
        for k, old in enumerate(region.outputs):
            old.replace_all_uses_with(gm.graph.call_function(operator.getitem, (node, k)))
    stable_topological_sort(gm.graph)
    gm.graph.eliminate_dead_code()


@dataclass
class Prepared:
    """A case's program under one precision, and its kernels on their way."""

    gm: fx.GraphModule
    regions: list[Region]
    built: list[Future[tuple[Config, Artifact]]]

    def run(self, args: Sequence[Any], device: str) -> Any:
        """The program with its kernels, on its flattened inputs."""
        for region, future in zip(self.regions, self.built, strict=True):
            put_in(self.gm, region, future.result(), device)
        return fx.Interpreter(self.gm).run(*args)


@contextmanager
def pool() -> Iterator[ProcessPoolExecutor]:
    """Processes that compile."""
    count = max(1, (os.cpu_count() or 2) - 1)
    with ProcessPoolExecutor(min(count, 16), mp_context=multiprocessing.get_context("spawn")) as made:
        yield made


def prepared(case: Case, size: str, device: str, precision: str, compiling: ProcessPoolExecutor) -> Prepared:
    """Trace a case and begin to compile its regions."""
    gm, regions = traced(case, size, device, precision)
    regions = [r for r in regions if r.workload is not None]
    target = None
    if device != "cpu":
        from autotune.device import describe_cuda

        target = describe_cuda(device)
    built = [compiling.submit(compiled, _bare(r.workload), device, target) for r in regions]
    return Prepared(gm, regions, built)


def _bare(workload: Workload | None) -> Workload:
    assert workload is not None
    return workload


def measured(case: Case, size: str, device: str, ours: Mapping[str, Prepared]) -> dict[str, Any]:
    """The case's entry: its name, and the errors of each contender."""
    args = case.arguments(size, device)
    with torch.no_grad():
        with Wide():
            want = case.fn(*args)
        torch._dynamo.reset()
        runs: dict[str, Callable[[], Any]] = {
            "eager": lambda: case.fn(*args),
            "inductor": lambda: torch.compile(case.fn, dynamic=False)(*args),
        }
        leaves = pytree.tree_leaves(args)
        runs |= {name: lambda p=p: p.run(leaves, device) for name, p in ours.items()}  # type: ignore[misc]
        found = {name: errors(run(), want) for name, run in runs.items()}
    return {"name": case.label(size), **found}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Measure errors against fp64 over the suite.")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    parser.add_argument("--cases", default="", help="names or kinds, by comma (default: all)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    device = resolve_device(args.device)
    size = "cpu" if device == "cpu" else "gpu"
    begin = time.monotonic()
    cases = choose([name for name in args.cases.split(",") if name])
    entries = []
    with pool() as compiling:
        ahead = [{n: prepared(c, size, device, p, compiling) for n, p in OURS.items()} for c in cases]
        for case, ours in zip(cases, ahead, strict=True):
            entries.append(measured(case, size, device, ours))
            print(entries[-1], flush=True)
    if args.out:
        env = environment(device)
        versions = {k: str(v) for k, v in (("cuda", env.cuda), ("driver", env.driver)) if v}
        form.write(args.out, identify(device).label, entries, versions, extra={"suite": "precision", "size": size})
        print(render(form.read(args.out)))
    print(f"{time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""A program's way from PyTorch to cubins, each stage printed. It needs no GPU.

python examples/stages.py                     # a layer norm and its backward pass, as in ARCHITECTURE.md
python examples/stages.py my_package.model:block my_package.model:example_inputs
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from autotune.compiler.assemble import draft
from autotune.compiler.planner.groups import group_configs
from autotune.domains.fusion.program_spec import resolve, workloads_of
from autotune.domains.fusion.task import FusionTask
from autotune.ir.graph import Graph

TARGET, MULTIPROCESSORS = "sm_90", 132  # an H200


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (1024,), weight, bias)


def inputs() -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(shape, requires_grad=True) for shape in ((8192, 1024), (1024,), (1024,)))


def calls(source: Mapping[str, Any]) -> Iterator[str]:
    """The aten calls of a region; the first numbers are its inputs."""
    first = len(source["inputs"])
    for k, call in enumerate(source["calls"], first):
        args = [f"%{a['node']}" if isinstance(a, dict) and "node" in a else str(a) for a in call["args"]]
        yield f"%{k} = {call['op']}({', '.join(args)})"


def values(graph: Graph) -> Iterator[str]:
    """The values of a region graph: axes in brackets, strides of loads after @."""
    for k, v in enumerate(graph.values):
        what = {"load": f"x{v.slot} @ {v.strides}", "const": str(v.number)}.get(
            v.op, ", ".join(f"v{a}" for a in v.args)
        )
        over = f" over {list(v.over)}" if v.over else ""
        yield f"v{k}{list(v.axes)} = {v.op} {what}{over}"
    for k, o in enumerate(graph.outputs):
        yield f"y{k}{list(o.axes)} = v{o.value} as {o.dtype} @ {o.strides}"


def show(title: str, lines: Iterator[str]) -> None:
    print(f"\n-- {title}", *(f"  {line}" for line in lines), sep="\n")


def main() -> None:
    torch.manual_seed(0)
    target, made_by = (*sys.argv[1:], "examples.stages:layer_norm", "examples.stages:inputs")[:2]
    fn, (args, kwargs), _ = resolve(target, made_by, "cpu")
    for workload, count in workloads_of(fn, args, kwargs):
        task = FusionTask(workload, "cuda:0", target=TARGET, sms=MULTIPROCESSORS)
        config = task.default()
        print(f"\n==== {workload.label}, {count} in the program; fingerprint {workload.fingerprint[:12]}")
        show("aten calls", calls(workload.source))
        show(f"region graph, axes of {list(task.graph.extents)}", values(task.graph))
        show("plan and configuration", iter([task.plan.text, *(f"{name} = {value}" for name, value in config.items())]))
        drafts, _ = draft(task.graph, task.plan, group_configs(task.plan, config), MULTIPROCESSORS, workload.source)
        for d in drafts:
            show(f"kernel {d.source.name}", iter(d.source.text.splitlines()))
        for kernel in task.build(config).kernels:
            show(f"cubin {kernel.entry}, {len(kernel.code)} bytes", (f"{k} = {v}" for k, v in kernel.resources.items()))


if __name__ == "__main__":
    main()

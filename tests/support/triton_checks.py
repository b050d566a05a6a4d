"""Triton kernels of the test programs in a separate process: ``TRITON_INTERPRET`` holds from the import of Triton on.

Prints a JSON line for each kernel: its case, block and rows, and its error, or nothing.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace

from autotune.task import Config
from examples.triton_target import run
from examples.triton_target.domain import TritonBench, TritonTask
from tests.support.zoo import workloads

CONFIGS: tuple[Config, ...] = (
    {"rows": 1, "block": 4096, "num_warps": 4},
    {"rows": 4, "block": 256, "num_warps": 2},
)
"""Rows at one go where they fit; and rows walked along, several a program."""


def main(mode: str, names: list[str]) -> None:
    warnings.simplefilter("ignore")  # NumPy's, of infinities
    checks = {"run": interpreted, "wrong": interpreted, "cubin": linked}
    if mode == "wrong":
        own = run.compiled
        whole = "tl.where(row_there & column_there"  # what a reduction takes
        run.compiled = lambda text: own(text.replace(whole, "tl.where(row_there | column_there"))
    for name in names:
        for workload in workloads(name):
            task = TritonTask(replace(workload, kind="triton"), "cpu" if mode != "cubin" else "cuda")
            for config in CONFIGS:
                for why in checks[mode](task, config):
                    print(json.dumps([name, config["rows"], config["block"], why]), flush=True)


def interpreted(task: TritonTask, config: Config) -> Iterator[str]:
    """Verification's results for a candidate: random inputs, and ones with NaN and infinities."""
    bench = TritonBench(task.workload, "cpu")
    verdict = bench.verify(bench.load(config, task.build(config)), 5)
    yield "" if verdict.ok else verdict.detail


def linked(task: TritonTask, config: Config) -> Iterator[str]:
    """Compile each kernel for an H100, which takes no GPU."""
    import triton  # type: ignore[import-not-found]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]
    from triton.compiler import ASTSource  # type: ignore[import-not-found]

    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "bool": "i1", "uint8": "u8"}
    for (text, _), group in zip(run.sources(task.plan, config), task.plan.groups, strict=True):
        stored = [*group.graph.inputs, *(o.dtype for o in group.graph.outputs)]
        signature = {f"p{k}": f"*{short.get(d, d.replace('int', 'i'))}" for k, d in enumerate(stored)}
        aligned = {(k,): [["tt.divisibility", 16]] for k in range(len(stored))}
        source = ASTSource(run.compiled(text), signature, constexprs={}, attrs=aligned)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": config["num_warps"]})
        yield "" if len(made.asm["cubin"]) > 1000 else "no cubin"


if __name__ == "__main__":
    assert (os.environ.get("TRITON_INTERPRET") == "1") == (sys.argv[1] != "cubin")
    main(sys.argv[1], sys.argv[2:])

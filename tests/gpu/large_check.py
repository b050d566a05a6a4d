"""Check of kernels on tensors of 2**31 elements and more, in every scheme that may get them. Takes a large GPU.

    python tests/gpu/large_check.py [--device cuda:0] [--log2 31] [--configs 2] [--only NAME ...]

Every case runs its default and some random configurations on inputs whose results are known without an oracle of the
same size: eager on pieces, or numbers planted at the far end. Up to 70 GiB are in use. Prints what is wrong and a last
line "checked N bad M"; exit code 1 if M is not 0. ``--log2 11 --device cpu`` tries the script itself.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from autotune.domains.fusion.task import FusionTask
from autotune.runtime.launch.executor import load_executor
from autotune.runtime.launch.prepared import RegionTensors, TensorSpec
from autotune.store.records import Key, Schedule
from autotune.task import Config
from autotune.workload import Workload
from tests.support.zoo import random_configs

PIECE = 1 << 26
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """``make(device)`` is the input; ``wrong(x, outputs)`` returns the outputs' error, or nothing."""

    fn: Callable[[Tensor], Any]
    make: Callable[[str], Tensor]
    wrong: Callable[[Tensor, list[Tensor]], str]


def pieces(n: int, size: int) -> Iterator[slice]:
    return (slice(a, min(a + size, n)) for a in range(0, n, size))


def filled(n: int, device: str) -> Tensor:
    """Small whole numbers, different from place to place."""
    x = torch.empty(n, dtype=BF16, device=device)
    for s in pieces(n, PIECE):
        x[s] = torch.arange(s.start, s.stop, device=device) % 251 - 125
    return x


def by_pieces(fn: Callable[[Tensor], Tensor], dim: int = 0) -> Callable[[Tensor, list[Tensor]], str]:
    """Compares with eager on pieces along ``dim``, which the function treats one by one."""

    def wrong(x: Tensor, outputs: list[Tensor]) -> str:
        got = outputs[0].view(x.shape)
        for s in pieces(x.shape[dim], max(1, PIECE * x.shape[dim] // x.numel())):
            at = (slice(None),) * dim + (s,)
            want = fn(x[at].float())
            if not torch.allclose(got[at].float(), want, rtol=0.01, atol=1e-6):
                return f"differs from eager between {s.start} and {s.stop} of {x.shape[dim]}"
        return ""

    return wrong


def far_maxima(x: Tensor, outputs: list[Tensor]) -> str:
    found = outputs[0].tolist()
    return "" if found == [1000.0, 2000.0] else f"{found} instead of 1000 and 2000"


def with_maxima(n: int, device: str) -> Tensor:
    x = filled(2 * n, device).view(2, n)
    x[0, -1], x[1, -5] = 1000, 2000
    return x


def last_row_apart(x: Tensor, outputs: list[Tensor]) -> str:
    """Softmax over rows of zeros, the last of which is 50: e**50 is more than all others together, so that a sum in
    fp32, which no longer grows from 2**24 ones on, is right in every order."""
    y = outputs[0].view(x.shape)
    for s, want in ((slice(0, -1), math.exp(-50)), (slice(-1, None), 1.0)):
        part = y[s]
        for p in pieces(len(part), PIECE // 8):
            if not bool(((part[p].float() - want).abs() <= 0.01 * want).all()):
                return f"not {want:g} in the {'last row' if s.stop is None else 'other rows'}"
    return ""


def counted(x: Tensor, outputs: list[Tensor]) -> str:
    sums, doubled = sorted(outputs, key=Tensor.numel)
    if sums.tolist() != [1000.0] * 8:
        return f"sums of {sums.tolist()} instead of 1000"
    return by_pieces(lambda v: v * 2)(x, [doubled])


def with_ones(n: int, device: str) -> Tensor:
    x = torch.zeros(n, 8, dtype=BF16, device=device)
    x[torch.linspace(0, n - 1, 1000, dtype=torch.float64).long()] = 1
    return x


def cases(n: int) -> dict[str, Case]:
    def softmax(dim: int) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.softmax(x, dim)

    def twice(x: Tensor) -> Tensor:
        return x * 2

    def zeros_and_last(device: str) -> Tensor:
        x = torch.zeros(n, 8, dtype=BF16, device=device)
        x[-1] = 50
        return x

    rows = n >> 10
    return {
        "flat": Case(twice, lambda d: filled(rows * 4100, d).view(rows, 4100)[:, :4099], by_pieces(twice)),
        "strided": Case(twice, lambda d: filled(2 * n, d).as_strided((64, 64), (n >> 5, 1)), by_pieces(twice)),
        "rows": Case(softmax(-1), lambda d: filled(3 * n, d).view(n, 3), by_pieces(softmax(-1))),
        "rows_long": Case(lambda x: x.amax(-1), lambda d: with_maxima(n + 8, d), far_maxima),
        "outer": Case(softmax(0), zeros_and_last, last_row_apart),
        "outer_wide": Case(softmax(0), lambda d: filled(3 * n, d).view(3, n), by_pieces(softmax(0), 1)),
        "columns": Case(lambda x: (x * 2, x.float().sum(0)), lambda d: with_ones(n, d), counted),
    }


def workload_of(case: Case) -> Workload:
    """Of the case's function, traced on a fake tensor; it must be one region."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    from autotune.compiler.regions.find import find_regions

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        (region,) = find_regions(make_fx(case.fn, select_decomp_table())(case.make("cpu")))
    if region.workload is None:
        raise RuntimeError(region.reason)
    return region.workload


def configs(task: FusionTask, n: int) -> list[Config]:
    """The default, the same of single elements, which are the most to count, and ``n`` random configurations."""
    default = task.default()
    single = task.normalize({**default, "vector_bytes": 2}) if "vector_bytes" in default else default
    more = [single] if single != default and task.reject(single) is None else []
    return [default, *more, *random_configs(task, n, 1)]


def run(task: FusionTask, config: Config, x: Tensor, device: str) -> tuple[list[Tensor], list[bool]]:
    """A configuration's outputs, flat, and which of its kernels count in 64 bits."""
    graph, artifact = task.graph, task.build(config)
    flat = x.as_strided((graph.input_numel(0),), (1,))
    types = [getattr(torch, o.dtype) for o in graph.outputs]
    specs = [TensorSpec((graph.output_numel(k),), (1,), t) for k, t in enumerate(types)]
    schedule = Schedule(Key("", "", "", ""), config, 0.0, {}, artifact)
    own = [TensorSpec((flat.numel(),), (1,), flat.dtype)]
    executor = load_executor(graph, schedule, RegionTensors([0], range(len(specs)), own, specs), torch.device(device))
    outputs = [torch.full((graph.output_numel(k),), math.nan, dtype=t, device=device) for k, t in enumerate(types)]
    executor.run_into([flat], outputs)
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return outputs, [bool(k.launch.get("wide")) for k in artifact.kernels]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--log2", type=int, default=31, help="rows or elements, as a power of two")
    parser.add_argument("--configs", type=int, default=2, help="random configurations of every case")
    parser.add_argument("--only", nargs="+", choices=list(cases(1 << 31)), metavar="NAME")
    options = parser.parse_args(argv)
    checked = bad = 0
    for name, case in cases(1 << options.log2).items():
        if options.only and name not in options.only:
            continue
        task = FusionTask(workload_of(case), options.device)
        x = case.make(options.device)
        for config in configs(task, options.configs):
            begin, wide = time.perf_counter(), [False]
            try:
                outputs, wide = run(task, config, x, options.device)
                what = case.wrong(x, outputs)
                del outputs
            except Exception as error:
                what = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            checked += 1
            bad += bool(what)
            took = time.perf_counter() - begin
            print(f"{'BAD' if what else 'right'} {name} {took:.1f} s, wide {wide} {what} {config}", flush=True)
        del x
    print(f"checked {checked} bad {bad}", flush=True)
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())

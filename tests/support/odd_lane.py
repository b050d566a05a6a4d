"""A lane whose suite has small cases that go wrong as well: ``python -m tests.support.odd_lane``."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autotune.measure.child import serve
from benchmarks.fusion.cases.case import Case, Draw, Shape
from benchmarks.fusion.lane import Lane
from benchmarks.fusion.suite import CASES


def right(x: Tensor) -> Tensor:
    return x * 2


def wrong(x: Tensor) -> Tensor:
    """Never the same twice."""
    return torch.rand_like(x)


def dies(x: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return x


def gives_up(x: Tensor) -> Tensor:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def hangs(x: Tensor) -> Tensor:
    """Notes the processes that have to be gone, then sleeps."""
    child = subprocess.Popen(["sleep", "600"])
    note = Path(os.environ["ODD_PIDS"])
    note.with_suffix(".part").write_text(f"{os.getpid()} {child.pid}")
    note.with_suffix(".part").rename(note)
    time.sleep(600)
    return x


def waits(x: Tensor) -> Tensor:
    """Until the other has begun to hang."""
    while not Path(os.environ["ODD_PIDS"]).exists():
        time.sleep(0.05)
    return x + 1


def _inputs(draw: Draw, shape: Shape) -> tuple[Any, ...]:
    print("what a compiler may print", flush=True)
    return (draw.normal(*shape),)


def _case(fn: Any) -> Case:
    """Run as it is, whatever compiles it: compilers take seconds."""
    as_it_is = torch._dynamo.disable(fn)
    return Case(fn.__name__, "forward", fn.__name__, torch.float32, (64, 32), (64, 32), as_it_is, _inputs, fn.__name__)


ODD = {fn.__name__: _case(fn) for fn in (right, wrong, dies, gives_up, hangs, waits)}

if __name__ == "__main__":
    CASES |= ODD  # type: ignore[operator, misc]
    serve(Lane().handle)

"""A process that trains a step of a model with the backend and prints its results: run by :mod:`test_warm_start`.

Inductor's caches are on. The word "no-autograd-cache" leaves AOTAutograd's out, and "stale" makes caches that do not
notice what became of the database. "ahead" and a file compile the forward pass ahead of time into the file, or load it
from there.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch import nn
from torch._dynamo.aot_compile import ModelInput
from torch._dynamo.utils import counters as dynamo_counters

import autotune
from autotune.runtime.backend import deploy_backend
from autotune.runtime.deployment import Deployment
from tests.support.lean import compile_lean
from tests.support.runtime.models import assert_same_step, twin


def example() -> tuple[nn.Module, torch.Tensor]:
    """Of two regions, one forward and one backward."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 40, bias=False), nn.Softmax(-1)), torch.randn(32, 48)


def ahead_of_time(model: nn.Module, x: torch.Tensor, file: Path) -> None:
    compiled: Any = autotune.compile(model, fullgraph=True)
    torch._dynamo.config.enable_aot_compile = True  # the default from torch 2.12 on
    with torch.no_grad():
        if file.exists():
            compiled._load_aot_compiled_module(file.read_bytes())
        else:
            compiled._aot_compile([ModelInput((x,), {}, [])])
            compiled._save_aot_compiled_module(str(file))
        for rows in (x, x + 1):
            torch.testing.assert_close(compiled(rows), model(rows))


def main(words: Sequence[str]) -> int:
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("autotune").addHandler(Keep(logging.WARNING))
    compile_lean()  # also in a new interpreter
    torch._inductor.config.fx_graph_cache = True
    torch._functorch.config.enable_autograd_cache = "no-autograd-cache" not in words
    if "stale" in words:
        Deployment.state = lambda self, url=None, *, code="": b"always the same"  # type: ignore[method-assign]
    model, x = example()
    if "ahead" in words:
        ahead_of_time(model, x, Path(words[-1]))
    else:
        assert_same_step(torch.compile(model, backend=deploy_backend), model, twin(model), x)
    found = {
        "warnings": said,
        "looks_for_regions": "autotune.compiler.regions.find" in sys.modules,
        "counters": {k: v for k, v in autotune.counters().items() if v},
        "aot": dynamo_counters["aot_autograd"],
        "inductor": {k: v for k, v in dynamo_counters["inductor"].items() if k.startswith("fxgraph_cache")},
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

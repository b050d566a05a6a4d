"""A process that trains a step of a model with the backend and tells what it found: run by :mod:`test_warm_start`."""

from __future__ import annotations

import json
import logging
import os
import sys

import torch
from torch import nn
from torch._dynamo.utils import counters as dynamo_counters

import autotune
from autotune.runtime import database
from autotune.runtime.backend import dynamo_backend
from tests.support.runtime.models import assert_same_step, twin


def example() -> tuple[nn.Module, torch.Tensor]:
    """Of two regions, one forward and one backward."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 40, bias=False), nn.Softmax(-1)), torch.randn(32, 48)


def main() -> int:
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("autotune").addHandler(Keep(logging.WARNING))
    if os.environ.get("STALE"):  # a cache that does not notice what became of the database
        database.state_of_store = lambda url=None: b"always the same"  # type: ignore[assignment]
    model, x = example()
    assert_same_step(torch.compile(model, backend=dynamo_backend), model, twin(model), x)
    found = {
        "warnings": said,
        "counters": {k: v for k, v in autotune.counters().items() if v},
        "aot": dynamo_counters["aot_autograd"],
        "inductor": {k: v for k, v in dynamo_counters["inductor"].items() if k.startswith("fxgraph_cache")},
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

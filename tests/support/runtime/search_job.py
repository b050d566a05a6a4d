"""A process that trains with the option "search", with caches on: run by :mod:`test_second_process`.

The first word is the largest number of regions for which the tuner stores default kernels. The second word is the
outcome of the contest, "kept" or "left". "optimizer" compiles the optimizer's step too, "brief" gives a budget that is
spent, "more" a larger one, "plain" none. "silu" trains another program, and "renamed" another one with equal regions.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.utils import counters as dynamo_counters

import autotune
from autotune.in_program import contest, options, search
from autotune.in_program.backend import dynamo_backend
from tests.support.lean import compile_lean
from tests.support.runtime.searches import Searches

STEPS = 2 * contest.WARM + 2 * contest.ROUNDS * contest.BLOCK + 2


class Model(nn.Module):
    """A region in the forward graph, one in the backward graph."""

    def __init__(self, activation: Any, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(48, 48))
        self.norm, self.activation, self.name = nn.LayerNorm(48), activation, name

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.get_submodule(self.name)(x)) + x).square().mean()


def main(words: Sequence[str]) -> int:
    searches = Searches(int(words[0]))
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("autotune").addHandler(Keep(logging.WARNING))
    compile_lean()
    torch._inductor.config.fx_graph_cache = True
    torch._functorch.config.enable_autograd_cache = True
    real = contest.judge
    with (
        mock.patch.object(search, "Searcher", searches),
        mock.patch.object(contest, "judge", lambda a, b: replace(real(a, b), kept="kept" in words)),
        mock.patch.object(contest, "MOST_STEPS", 1),
        mock.patch.object(options, "_spent_s", 299.0 if "brief" in words else 0.0),
    ):
        losses = train(words)
    found = {
        "warnings": said,
        "searched": searches.fingerprints,
        "looks_for_regions": "autotune.compiler.regions.find" in sys.modules,
        "counters": {k: v for k, v in autotune.counters().items() if v},
        "aot": {k: v for k, v in dynamo_counters["aot_autograd"].items() if k.startswith("autograd_cache")},
        "inductor": {k: v for k, v in dynamo_counters["inductor"].items() if k.startswith("fxgraph_cache")},
        "losses": [losses[0], losses[-1]],
    }
    print(json.dumps(found))
    return 0


def train(words: Sequence[str]) -> list[float]:
    torch.manual_seed(0)
    activation = nn.functional.silu if "silu" in words else nn.functional.gelu
    model, x = Model(activation, "other" if "renamed" in words else "linear"), torch.randn(64, 48)
    how: Any = {
        "backend": dynamo_backend,
        "options": None if "plain" in words else {"search": 600 if "more" in words else 300},
    }
    run = torch.compile(model, **how)
    optimizer, losses = torch.optim.Adam(model.parameters(), 0.01), []
    step = torch.compile(optimizer.step, fullgraph=False, **how) if "optimizer" in words else optimizer.step
    for _ in range(STEPS):
        loss = run(x)
        loss.backward()
        step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

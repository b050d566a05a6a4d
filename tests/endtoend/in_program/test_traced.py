"""A second compilation from the first one's traced graphs computes the same as a separate compilation."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd import graph_compile
from torch._inductor import compile_fx

from autotune.in_program.traced import Traced, copied
from autotune.runtime.backend import compile_graph
from autotune.runtime.inductor.code import new_name

TRACING = (
    (graph_compile, "aot_dispatch_autograd_graph"),
    (graph_compile, "aot_dispatch_base_graph"),
    (compile_fx, "partition_fn"),
)


class Model(nn.Module):
    """Statistics that a step updates, random numbers, a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(16, 8), nn.BatchNorm1d(8)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.drop(self.norm(nn.functional.gelu(self.embedding(ids))))
        logits = self.head(x)
        return logits, nn.functional.cross_entropy(logits, ids)


class Compilations:
    """A backend that compiles each graph as often as a search does.

    Attributes:
        traced: number of traces and partitions in the second compilations.
    """

    def __init__(self, *, again: bool) -> None:
        self._again, self.traced = again, 0

    def __call__(self, gm: Any, inputs: Any, **options: Any) -> Any:
        if not self._again:
            return compile_graph(gm, inputs, options, code=new_name())
        traced = Traced()
        begin = time.monotonic()
        with traced.recording():
            compile_graph(copied(gm), inputs, options, bare=True, code=new_name())
        assert traced.seconds > 0.0
        assert 0.0 < traced.loading_s < time.monotonic() - begin
        with counting() as calls, traced.replaying():
            code = compile_graph(gm, inputs, options, code=new_name())
        self.traced += sum(call.call_count for call in calls)
        return code


@contextlib.contextmanager
def counting() -> Iterator[list[mock.Mock]]:
    """Context manager that counts the calls of torch's functions."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(mock.patch.object(of, name, wraps=getattr(of, name))) for of, name in TRACING]


@pytest.fixture(autouse=True)
def _no_graphs_of_others(db: str) -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def steps(again: bool, *, train: bool, dynamic: bool = False) -> tuple[list[Tensor], Compilations]:
    """Results and gradients of some steps, by one or by two compilations."""
    torch.manual_seed(0)
    model, backend = Model().train(train), Compilations(again=again)
    run, found = torch.compile(model, backend=backend, dynamic=dynamic), []
    for k in range(3):
        ids = torch.randint(0, 16, (24 + (8 * k if dynamic else 0),))
        if not train:
            with torch.no_grad():
                found += [*run(ids)]
            continue
        logits, loss = run(ids)
        loss.backward()
        found += [logits.detach(), loss.detach(), model.embedding.weight.grad.clone(), model.norm.running_var.clone()]
    return found, backend


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("train", [True, False])
def test_the_second_compilation_traces_nothing(train: bool, dynamic: bool) -> None:
    found, backend = steps(True, train=train, dynamic=dynamic)
    assert backend.traced == 0
    torch._dynamo.reset()
    wanted, _ = steps(False, train=train, dynamic=dynamic)
    torch.testing.assert_close(found, wanted)

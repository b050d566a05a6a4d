"""Tensor-parallel layers on gloo ranks, compared with the same layers on one rank: functions that every rank runs."""

from __future__ import annotations

import contextlib
import io
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autotune
from autotune.domains.c3.tensor_parallel import api
from autotune.domains.c3.tensor_parallel import sites as sites_module
from autotune.domains.c3.tensor_parallel.sites import sites
from autotune.errors import Unsupported, UserError
from autotune.runtime.deployment import Deployment, deployment, use

ROWS, WIDTH, INNER = 8, 6, 10


class Layer(nn.Module):
    """A gated layer whose rows and columns are divided among the ranks."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = [torch.randn(ranks, INNER, WIDTH), torch.randn(ranks, INNER, WIDTH), torch.randn(ranks, WIDTH, INNER)]
        self.gate, self.up, self.down = (nn.Parameter(weight[rank] / 4) for weight in whole)
        self.whole = [(weight / 4).requires_grad_() for weight in whole]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = autotune.all_gather_matmul(x, [self.gate, self.up])
        return autotune.matmul_reduce_scatter(torch.tanh(gate) * up, self.down)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """The layer on all rows, on one rank."""
        gates, ups, downs = self.whole
        parts = [(torch.tanh(x @ g.t()) * (x @ u.t())) @ d.t() for g, u, d in zip(gates, ups, downs, strict=True)]
        return torch.stack(parts).sum(0)


def _reset(db: str | None = None) -> None:
    sites.forget()
    sites.db = db


def equal(rank: int, batches: int, chunks: int, compiled: bool = False) -> list[bool]:
    """Compare results and gradients with those of one rank, with ``chunks`` products; 0 for the stock sequence."""
    ranks = dist.get_world_size()
    _reset()
    layer: Any = Layer(rank, ranks)
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    lead = (batches,) if batches else ()
    torch.manual_seed(1)
    whole = torch.randn(*lead, ROWS * ranks, WIDTH)
    rows = slice(rank * ROWS, (rank + 1) * ROWS)
    x = whole[..., rows, :].clone().requires_grad_()
    run(x).pow(2).sum().backward()
    if chunks:
        sites.chosen = {site: {"engine": "copy", "chunks": chunks} for site in sites.seen}
    x.grad = None
    layer.zero_grad()
    out = run(x)
    out.pow(2).sum().backward()
    everything = whole.clone().requires_grad_()
    reference = layer.reference(everything)
    reference.pow(2).sum().backward()
    assert everything.grad is not None
    pairs = [(out, reference[..., rows, :]), (x.grad, everything.grad[..., rows, :])]
    pairs += [
        (mine.grad, w.grad[rank]) for mine, w in zip((layer.gate, layer.up, layer.down), layer.whole, strict=True)
    ]
    return [bool(torch.allclose(a, b, rtol=1e-4, atol=1e-4)) for a, b in pairs]


def frozen(rank: int) -> list[bool]:
    """An input and a weight without gradients: nothing is exchanged for them, and the others are right."""
    _reset()
    layer = Layer(rank, dist.get_world_size())
    layer.up.requires_grad_(False)
    layer(torch.ones(ROWS, WIDTH)).sum().backward()
    scattered = [site for site in sites.seen if site.op == "reduce_scatter"]
    return [layer.up.grad is None, layer.gate.grad is not None, len(scattered) == 1]


class Fails(TorchDispatchMode):
    """The first product after the begin of a scatter raises."""

    begun = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.begun and func is torch.ops.aten.mm.default:
            raise MemoryError("no memory for a weight's gradient")
        self.begun |= func is torch.ops.autotune.begin_matmul_scatter.default
        return func(*args, **(kwargs or {}))


def abandoned(rank: int) -> list[bool]:
    """A backward pass that raises between the two calls of a scatter, and the next step."""
    _reset()
    layer = Layer(rank, dist.get_world_size())
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    loss = layer(x).sum()
    raised = False
    try:
        with Fails():
            loss.backward()
    except MemoryError:
        raised = True
    lines = [line for _, line in sites._lines.values()]
    left = any(line._begun for line in lines)
    again = layer(torch.ones(ROWS, WIDTH))
    reference = layer.reference(torch.ones(2 * ROWS, WIDTH))[rank * ROWS : (rank + 1) * ROWS]
    return [raised, bool(lines) and not left, bool(torch.allclose(again, reference, rtol=1e-4, atol=1e-4))]


class Clock:
    """A clock by which steps with more sites run by engines take less time, or more."""

    def __init__(self, gain: float) -> None:
        self.gain, self.now = gain, 0.0

    def perf_counter(self) -> float:
        engines = sum(config is not None for config in sites.chosen.values())
        self.now += 1.0 - self.gain * engines
        return self.now


def train(rank: int, layer: Any, steps: int) -> list[float]:
    """Losses of steps on data that depend on the rank."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        loss = layer(torch.randn(ROWS, WIDTH, generator=generator)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _plain() -> list[Any]:
    return sorted([site.op, site.width, None if c is None else c["engine"]] for site, c in sites.chosen.items())


def searched(rank: int, db: str, gain: float) -> dict[str, Any]:
    """A search by a clock: its choice, losses compared with those without it, and a second handle's look-up."""
    patched: Any = api
    real, before = patched.time, deployment()
    patched.time = Clock(gain)
    try:
        use(Deployment())
        _reset()
        layer = Layer(rank, dist.get_world_size())
        handle = autotune.tensor_parallel(layer, steps=40, db=db)
        ours = train(rank, layer, 43)
        chosen = _plain()
        found = handle.found
        handle.close()
        closed = repr(handle)
        stock = train(rank, Layer(rank, dist.get_world_size()), 43)
        _reset()
        second = Layer(rank, dist.get_world_size())
        again = autotune.tensor_parallel(second, steps=40, db=db)
        looked_up = train(rank, second, 4)
        repeated, text, searches = _plain(), repr(again), again.found is not None
        again.close()
        return {
            "ours": ours, "stock": stock, "looked_up": looked_up, "chosen": chosen, "repeated": repeated, "text": text,
            "found": None if found is None else (found.stock_ms, found.step_ms), "closed": closed, "searches": searches,
        }  # fmt: skip
    finally:
        patched.time = real
        use(before)
        _reset()


def captured(rank: int, db: str) -> dict[str, Any]:
    """A search with a step that the program gives; on a CPU it is called."""
    patched: Any = api
    real, before = patched.time, deployment()
    patched.time = Clock(0.1)
    try:
        use(Deployment())
        _reset()
        layer = Layer(rank, dist.get_world_size())
        x = torch.ones(ROWS, WIDTH, requires_grad=True)
        handle = autotune.tensor_parallel(layer, db=db)
        found = handle.search(lambda: torch.autograd.grad(layer(x).sum(), x), 8)
        chosen = _plain()
        handle.close()
        return {"chosen": chosen, "faster": found.step_ms < found.stock_ms, "tried": len(found.tried)}
    finally:
        patched.time = real
        use(before)
        _reset()


def interrupted(rank: int, db: str) -> list[Any]:
    """A search whose step raises during its second plan: the answer, and the engines afterwards."""
    _reset()
    layer = Layer(rank, dist.get_world_size())
    handle = autotune.tensor_parallel(layer, db=db)

    def step() -> None:
        if any(sites.chosen.values()):
            raise ValueError("the program's own")
        layer(torch.ones(ROWS, WIDTH)).sum().backward()

    try:
        handle.search(step, 8)
    except ValueError as error:
        return [str(error), *{engine for _, _, engine in _plain()}]
    return []


class Gated(nn.Module):
    """The program's layer, before it is divided."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.gate, self.up = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def _divided() -> Any:
    """Two layers with sequence parallelism by DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = nn.Sequential(Gated(), Gated())
    plan: dict[str, Any] = {}
    for name in ("0", "1"):
        plan[f"{name}.norm"] = SequenceParallel()
        plan[f"{name}.gate"] = plan[f"{name}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"{name}.down"] = RowwiseParallel(output_layouts=Shard(1))
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def _steps(rank: int, model: Any, batches: int, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(batches, 4, 16, generator=generator)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def dtensor(rank: int, db: str, batches: int) -> dict[str, Any]:
    """A DTensor program by ``backend="autotune"``: a search by a clock, a look-up, and its losses without either."""
    patched: Any = api
    real, before = patched.time, deployment()
    patched.time = Clock(0.1)
    try:
        use(Deployment())
        _reset()
        stock = _steps(rank, _divided(), batches, 6)
        untouched = torch.compile(_divided(), backend="autotune")
        alone = _steps(rank, untouched, batches, 2)
        before_search = len(sites.seen)
        torch._dynamo.reset()
        model: Any = torch.compile(_divided(), backend="autotune")
        handle = autotune.tensor_parallel(model, steps=40, db=db)
        ours = _steps(rank, model, batches, 43)
        chosen, calls = _plain(), sorted([site.op, n] for site, n in sites.seen.items())
        found = handle.found is not None
        handle.close()
        torch._dynamo.reset()
        _reset(db)
        again = torch.compile(_divided(), backend="autotune")
        looked_up = _steps(rank, again, batches, 3)
        return {
            "stock": stock, "alone": alone, "before": before_search, "ours": ours[:6], "chosen": chosen, "calls": calls,
            "found": found, "looked_up": looked_up, "repeated": _plain(),
        }  # fmt: skip
    finally:
        patched.time = real
        torch._dynamo.reset()
        use(before)
        _reset()


def dtensor_captured(rank: int, db: str) -> dict[str, Any]:
    """A compiled DTensor program that searches with its step before it trains, and a search without products."""
    patched: Any = api
    real, before = patched.time, deployment()
    patched.time = Clock(0.1)
    try:
        use(Deployment())
        _reset()
        stock = _steps(rank, _divided(), 1, 3)
        model: Any = torch.compile(_divided(), backend="autotune")
        handle = autotune.tensor_parallel(model, db=db)
        said = ""
        try:
            handle.search(lambda: None, 8)
        except UserError as error:
            said = str(error)
        x = torch.ones(1, 4, 16)

        def step() -> None:
            model(x).sum().backward()
            model.zero_grad()

        handle.search(step, 8)
        chosen = _plain()
        ours = _steps(rank, model, 1, 3)
        handle.close()
        return {"stock": stock, "ours": ours, "chosen": chosen, "said": said}
    finally:
        patched.time = real
        torch._dynamo.reset()
        use(before)
        _reset()


def uneven(rank: int, db: str) -> dict[str, Any]:
    """Rank 1 runs a product that rank 0 does not: no search, one warning, and training goes on."""
    before, said = deployment(), io.StringIO()
    try:
        use(Deployment())
        _reset()
        with contextlib.redirect_stderr(said):
            layer = Layer(rank, dist.get_world_size())
            handle = autotune.tensor_parallel(layer, steps=40, db=db)
            train(rank, layer, 1)
            if rank == 1:
                sites.seen[next(iter(sites.seen)).__class__("all_gather", 8, 8, 8, "f32", 2)] += 1
            losses = train(rank, layer, 3)
        return {"said": said.getvalue(), "found": handle.found is not None, "steps": len(losses)}
    finally:
        use(before)
        _reset()


def no_access(rank: int) -> dict[str, Any]:
    """GPUs without access to each other's memory: the sequence, and one warning."""
    patched: Any = sites_module
    real, before, said = patched.Exchange, deployment(), io.StringIO()

    def refuse(group: Any) -> Any:
        raise Unsupported("no peer access here")

    patched.Exchange = refuse
    handler = logging.StreamHandler(said)
    logging.getLogger("autotune").addHandler(handler)
    try:
        use(Deployment())
        group: Any = dist.group.WORLD
        lines = [patched._open(group, torch.device("cuda", 0)) for _ in range(2)]
        gathered, (product,) = lines[0].gather_products(
            torch.full((1, 2, 3), 1.0 + rank), [torch.ones(3, 1)], 4, "copy"
        )
        return {"exchanges": [line.exchange is None for line in lines], "said": said.getvalue(),
                "product": product.flatten().tolist(), "rows": gathered.shape[1]}  # fmt: skip
    finally:
        logging.getLogger("autotune").removeHandler(handler)
        patched.Exchange = real
        use(before)


def refused(rank: int) -> list[str]:
    """Answers to a user's mistakes."""
    x, weight = torch.ones(ROWS, WIDTH), torch.ones(INNER, WIDTH)
    calls: list[Any] = [
        lambda: autotune.all_gather_matmul(x, [weight.t()]),
        lambda: autotune.all_gather_matmul(x.double(), [weight.double()]),
        lambda: autotune.matmul_reduce_scatter(torch.ones(7, WIDTH), weight),
        lambda: autotune.matmul_reduce_scatter(torch.ones(WIDTH), weight),
        lambda: autotune.tensor_parallel(nn.Linear(2, 2), steps=5),
        lambda: autotune.tensor_parallel(nn.Identity()),
        lambda: autotune.tensor_parallel(nn.Linear(2, 2)).search(lambda: None, 3),
    ]
    said = []
    for call in calls:
        try:
            call()
        except UserError as error:
            said.append(str(error))
    return said


def autocast(rank: int) -> list[bool]:
    """fp32 weights under autocast: results and gradients have the dtypes of ``F.linear``'s."""
    _reset()
    layer = Layer(rank, dist.get_world_size())
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
        near = torch.allclose(out.float(), layer.reference(torch.ones(2 * ROWS, WIDTH))[:ROWS].float(), rtol=0.05)
    out.float().sum().backward()
    assert x.grad is not None
    assert layer.up.grad is not None
    sites_dtypes = {site.dtype for site in sites.seen}
    return [
        out.dtype is torch.bfloat16,
        near,
        x.grad.dtype is layer.up.grad.dtype is torch.float32,
        sites_dtypes == {"bf16"},
    ]


def outlived(rank: int, db: str) -> str:
    """A handle that is closed after its process group. This rank has no process group afterwards."""
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    where = autotune.tensor_parallel(empty, db=db)
    where.close()
    layer = Layer(rank, dist.get_world_size())
    handle = autotune.tensor_parallel(layer, db=db)
    train(rank, layer, 2)
    dist.destroy_process_group()
    handle.close()
    handle.close()
    return f"{where._device} {handle!r}"

"""Functions of ``test_overlap.py`` for the ranks: each takes this rank's number first."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import autotune
from autotune.domains.c3 import ready as c3_ready
from autotune.domains.c3.deploy import Overlapped
from autotune.domains.c3.scenario import Gemm
from autotune.errors import UserError
from autotune.runtime.deployment import Deployment, deployment, use

RANKS = 2
ROWS = 6


def put(rank: int, step: int = 0, rows: int = ROWS) -> Tensor:
    """A rank's input: small integers, which sum exactly."""
    made = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-9, 9, (rows, 5), generator=made).float()


def expected(collective: str, rank: int, step: int = 0, rows: int = ROWS) -> Tensor:
    """This rank's expected result of the collective, computed alone."""
    all_ = [put(r, step, rows) for r in range(RANKS)]
    if collective == "all_gather":
        return torch.cat(all_)
    part = slice(rank * rows // RANKS, (rank + 1) * rows // RANKS)
    if collective == "all_to_all":
        return torch.cat([t[part] for t in all_])
    total = torch.stack(all_).sum(0)
    return total[part] if collective == "reduce_scatter" else total


def opened(compute: Any, collective: str, db: str, **options: Any) -> Overlapped:
    use(Deployment())
    return autotune.overlap(compute, collective, db=db, **options)


def levels(rank: int, db: str) -> Any:
    """A look-up's result, and whether both results are right."""
    x, w = torch.randn(64, 32), torch.randn(32, 48)
    op = opened(torch.mm, "all_gather", db, inputs=(x, w), like=put(rank))
    out, gathered = op((x, w), put(rank))
    torch.testing.assert_close(out, x @ w)
    assert torch.equal(gathered, expected("all_gather", rank))
    match, scenario = op.match, op.scenario
    assert match is not None
    assert scenario is not None
    op.close()
    assert op.match is None
    if rank == 0:  # which looks up for all; the others are forks
        assert not {"optuna", "numba"} & sys.modules.keys(), "deployment needs no search and no compiler"
    return str(match.level), match.label, match.reason, scenario.to_json(), repr(autotune.counters())


def steps(rank: int, db: str, collective: str) -> Any:
    """A loop: other tensors in every step, ranks that come late, the result in place, copied, or written directly."""
    layer = torch.nn.Linear(16, 8)
    op = opened(layer, collective, db)
    mine = torch.zeros(expected(collective, rank).shape)
    with torch.no_grad():
        for step in range(12):
            x, tensor = torch.randn(10, 16), put(rank, step)
            if step % 3 == 2 and rank == step % 2:
                threading.Event().wait(0.02)
            if step and step % 4 == 1:
                op.buffers.input.copy_(tensor)
                out, moved = op(x)
            elif step % 4 == 2:
                out, moved = op((x,), tensor, out=mine)
                assert moved is mine
            else:
                out, moved = op(x, tensor)
            torch.testing.assert_close(out, F.linear(x, layer.weight, layer.bias))
            assert torch.equal(moved, expected(collective, rank, step)), f"step {step}"
    match = op.match
    assert match is not None
    op.close()
    return match.label


def products(rank: int, db: str) -> Any:
    """Products of the caller, given by a callable or by their shape."""
    x, w, b = torch.randn(4, 32, 32), torch.randn(48, 32), torch.randn(48)
    want = F.linear(x, w, b)
    for compute, inputs in ((F.linear, (x, w, b)), (F.linear, (x, w)), (torch.matmul, (x, w.t()))):
        op = opened(compute, "all_gather", db, gemm=Gemm(128, 48, 32, "f32"))
        with torch.no_grad():
            out, moved = op(inputs, put(rank))
        torch.testing.assert_close(out, want if len(inputs) == 3 else want - b)
        assert torch.equal(moved, expected("all_gather", rank))
        assert op.match is not None
        assert (str(op.match.level), op.match.label) == ("exact", "copy gemm_first copies=2")
        op.close()
    op = opened((128, 48, 32), "all_gather", db, inputs=(x, w), like=put(rank))
    assert op.scenario is not None
    assert op.scenario.compute == Gemm(128, 48, 32, "f32")
    flat = x.view(128, 32)
    torch.testing.assert_close(op((flat, w.t()), put(rank))[0], flat @ w.t())
    grown = flat.clone().requires_grad_()
    op((grown, w.t()), put(rank, 1))[0].sum().backward()
    torch.testing.assert_close(grown.grad, w.sum(0).expand(128, 32))
    op.close()
    return None


def autograd(rank: int, db: str) -> Any:
    """The computation's graph is the user's; the collective's result has none, unless asked for."""
    layer = torch.nn.Linear(16, 8)
    x, tensor = torch.randn(10, 16), put(rank).requires_grad_()
    op = opened(layer, "all_gather", db)
    out, moved = op(x, tensor)
    assert not moved.requires_grad
    out.square().sum().backward()
    mine = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    layer(x).square().sum().backward()
    for a, p in zip(mine, layer.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad)
    scale = torch.ones((), requires_grad=True)
    loss = (scale * op(x, tensor)[1]).sum()
    op(x, tensor)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()  # the buffer was written to since
    op.close()
    return None


def gradients(rank: int, db: str) -> Any:
    """Gradients through collectives: those of the same function written without one."""
    weights = {c: [torch.randn(expected(c, r).shape, generator=torch.Generator().manual_seed(r)) for r in range(RANKS)]
               for c in ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")}  # fmt: skip
    for collective, weight in weights.items():
        op = opened(torch.mm, collective, db, differentiable=True)
        tensor = put(rank).requires_grad_()
        _, moved = op((torch.randn(8, 8), torch.randn(8, 8)), tensor)
        assert torch.equal(moved.detach(), expected(collective, rank))
        (moved * weight[rank]).sum().backward()
        leaves = [put(r).requires_grad_() for r in range(RANKS)]
        whole = torch.zeros(())
        for r in range(RANKS):
            part = slice(r * ROWS // RANKS, (r + 1) * ROWS // RANKS)
            here = {
                "all_gather": lambda leaves=leaves: torch.cat(leaves),
                "all_to_all": lambda leaves=leaves, part=part: torch.cat([t[part] for t in leaves]),  # type: ignore[misc]
                "reduce_scatter": lambda leaves=leaves, part=part: torch.stack(leaves).sum(0)[part],  # type: ignore[misc]
                "all_reduce": lambda leaves=leaves: torch.stack(leaves).sum(0),
            }[collective]()
            whole = whole + (here * weight[r]).sum()
        whole.backward()
        torch.testing.assert_close(tensor.grad, leaves[rank].grad)
        op.close()
    return None


def in_flight(rank: int, db: str) -> Any:
    """Two overlaps at once: in two threads, and one within the other's computation, on the user's group and another."""
    x, w = torch.randn(64, 64), torch.randn(64, 64)
    outer, inner = (
        autotune.overlap(fn, c, db=db) for fn, c in ((lambda: nested(), "all_gather"), (torch.mm, "all_reduce"))
    )

    def nested() -> Tensor:
        total = torch.ones(3)
        dist.all_reduce(total)  # of the model's own, in the default group
        assert total[0] == RANKS
        return inner((x, w), put(rank, 7))[1].clone()

    inner.open((x, w), put(rank))
    for step in range(5):
        found, gathered = outer((), put(rank, step))
        assert torch.equal(gathered, expected("all_gather", rank, step))
        assert torch.equal(found, expected("all_reduce", rank, 7))
    wrong: list[int] = []

    def work(op: Overlapped, collective: str) -> None:
        for step in range(20):
            with torch.no_grad():
                moved = op((x, w), put(rank, step))[1]
            if not torch.equal(moved, expected(collective, rank, step)):
                wrong.append(step)

    other = opened(torch.mm, "all_to_all", db, inputs=(x, w), like=put(rank))
    threads = [threading.Thread(target=work, args=a) for a in ((inner, "all_reduce"), (other, "all_to_all"))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(250)
    assert not wrong
    recursive = autotune.overlap(lambda: recursive((), put(rank)), "all_gather", db=db, like=put(rank), gemm="8x8x8")  # type: ignore[has-type]
    with pytest.raises(UserError, match="an overlap runs one call at a time"):
        recursive((), put(rank))
    recursive.close()
    outer.close()
    for op in (inner, other):
        op.close()
    return None


def mistakes(rank: int, db: str) -> Any:
    """One line each, before anything is sent: the group goes on working."""
    mm = torch.mm
    with pytest.raises(UserError, match="unknown collective 'broadcast'"):
        autotune.overlap(mm, "broadcast")
    with pytest.raises(UserError, match=r"not a computation: give a callable, or \(m, n, k\)"):
        autotune.overlap((1, 2), "all_gather")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="write MxNxK"):
        autotune.overlap("8 by 8", "all_gather")
    x = torch.ones(8, 8)
    with pytest.raises(UserError, match="needs this rank's input tensor"):
        autotune.overlap(mm, "all_gather", db=db)((x, x))
    with pytest.raises(UserError, match="buffers are allocated for"):
        _ = autotune.overlap(mm, "all_gather", db=db).buffers
    for tensor, collective, match in (
        (torch.ones(3, 2), "reduce_scatter", "3 rows are not divisible"),
        (torch.ones(3, 2), "all_to_all", "among 2 ranks"),
        (torch.ones(4, dtype=torch.int32), "all_reduce", "not int32"),
        (torch.ones(0), "all_gather", "no elements"),
        (torch.ones(1, dtype=torch.uint8), "all_gather", "not divisible among"),
    ):
        with pytest.raises(UserError, match=match):
            autotune.overlap(mm, collective, db=db)((x, x), tensor)
    op = opened(mm, "all_gather", db, inputs=(x, x), like=put(rank))
    with pytest.raises(UserError, match=r"tensor is float32 \[4, 5\] on cpu, not float32 \[6, 5\] on cpu"):
        op((x, x), put(rank, rows=4))
    with pytest.raises(UserError, match=r"out is float64 \[12, 5\]"):
        op((x, x), put(rank), out=torch.zeros(12, 5, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        op((x, torch.ones(3, 3)), put(rank))
    assert torch.equal(op((x, x), put(rank, 1))[1], expected("all_gather", rank, 1))
    op.close()
    alone = dist.new_group([0], use_local_synchronization=True) if rank == 0 else dist.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(UserError, match="2 ranks or more" if rank == 0 else "not in the given process group"):
        autotune.overlap(mm, "all_gather", db=db, group=alone)((x, x), put(rank))  # type: ignore[arg-type]
    return None


def other_types(rank: int, db: str) -> Any:
    """Moved data may be of any type, and of no dimension."""
    x = torch.ones(8, 8)
    for dtype in (torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool):
        op = opened(torch.mm, "all_gather", db)
        _, moved = op((x, x), put(rank).to(dtype))
        assert moved.dtype == dtype
        assert torch.equal(moved, torch.cat([put(r).to(dtype) for r in range(RANKS)]))
        op.close()
    op = opened(torch.mm, "all_reduce", db)
    assert torch.equal(op((x, x), torch.tensor(rank + 1.0))[1], torch.tensor([3.0]))
    op.close()
    op = opened(torch.mm, "all_gather", db)
    with torch.inference_mode():
        op((x, x), put(rank))
    weight = torch.ones((), requires_grad=True)
    (op((x, x), put(rank, 1))[1] * weight).sum().backward()
    assert weight.grad == expected("all_gather", rank, 1).sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = op((x, x), put(rank))
    assert out.dtype == torch.bfloat16
    op.close()
    return None


def fallback(rank: int, db: str) -> Any:
    """One rank that cannot run the strategy: all run the default, and say so once."""
    deployment().reset_counters()
    real, told = c3_ready.open_collective, []  # type: ignore[attr-defined]
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autotune").addHandler(handler)

    def refuse(spec: Any, group: Any, config: Any, artifact: Any = None) -> Any:
        made = real(spec, group, config, artifact)
        if config["engine"] == "copy" and rank == 1:
            raise OSError("no such memory")
        return made

    c3_ready.open_collective = refuse  # type: ignore[attr-defined]
    try:
        x = torch.ones(64, 64)
        op = opened(torch.mm, "all_gather", db, inputs=(x, x), like=put(rank))
        again = autotune.overlap(torch.mm, "all_gather", db=db, inputs=(x, x), like=put(rank))
    finally:
        c3_ready.open_collective = real  # type: ignore[attr-defined]
        logging.getLogger("autotune").removeHandler(handler)
    for one in (op, again):
        assert torch.equal(one((x, x), put(rank))[1], expected("all_gather", rank))
        assert one.match is not None
    counts, match = autotune.counters(), op.match
    assert match is not None
    op.close()
    again.close()
    return str(match.level), match.config["engine"], match.reason, counts.overlap_faults, told


def captured(rank: int, db: str) -> Any:
    """Fixed tensors, written to between repetitions."""
    x, w, tensor = torch.randn(8, 8), torch.randn(8, 8), put(rank)
    op = opened(torch.mm, "all_reduce", db)
    step = op.capture((x, w), tensor)
    for k in range(3):
        x.fill_(k)
        tensor.copy_(put(rank, k))
        out, total = step()
        torch.testing.assert_close(out, x @ w)
        assert torch.equal(total, expected("all_reduce", rank, k))
    op.close()
    return None


def compiled(rank: int, db: str) -> Any:
    """A compiled caller's graph is cut around the call; a compiled computation stays compiled within it."""
    graphs: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    x = torch.randn(8, 8)
    op = opened(torch.compile(lambda x: torch.relu(x @ x), backend=backend), "all_gather", db)  # type: ignore[misc]

    def step(x: Tensor, tensor: Tensor) -> Tensor:
        out, moved = op(x * 2, tensor)
        return out.sum() + moved.sum()

    found = torch.compile(step, backend=backend)(x, put(rank))
    torch.testing.assert_close(found, torch.relu(4 * x @ x).sum() + expected("all_gather", rank).sum())
    op.close()
    return len(graphs)

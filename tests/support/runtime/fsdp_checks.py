"""Sharded models on gloo ranks, with and without ``autotune.fsdp``: functions that every rank runs."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import autotune
from autotune.domains.c3.fsdp import api, traffic
from autotune.domains.c3.group import deploy_group
from autotune.errors import Unsupported, UserError
from autotune.runtime.deployment import Deployment, deployment, use


class Model(nn.Module):
    def __init__(self, checkpointed: bool = False, blocks: int = 3) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24)) for _ in range(blocks)
        )
        self.head = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return self.head(x)


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """A separate deployment, without earlier warnings."""
    before = deployment()
    use(Deployment())
    try:
        yield
    finally:
        use(before)


class Compiled(Model):
    """Each block is compiled, as training recipes do."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")


def made(way: str = "") -> Any:
    """A model of the same weights each time, sharded in one of several ways."""
    torch.manual_seed(0)
    model = Compiled() if way == "compiled" else Model(way == "checkpointed", 6 if way == "deep" else 3)
    options: dict[str, Any] = {}
    if way == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if way == "kept":
        options["reshard_after_forward"] = False
    if way == "halved":
        options["reshard_after_forward"] = dist.get_world_size() // 2
    if way == "hybrid":
        options["mesh"] = init_device_mesh(
            "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards")
        )
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


class Clock:
    """A clock by which steps with more kinds run by engines take less time, or more."""

    def __init__(self, gain: float) -> None:
        self.handle: Any = None
        self.gain, self.now = gain, 0.0

    def perf_counter(self) -> float:
        engines = sum(config is not None and config["engine"] == "copy" for config in self.handle.chosen.values())
        self.now += 1.0 - self.gain * engines
        return self.now


def train(rank: int, model: Any, handle: Any, steps: int, way: str = "") -> list[float]:
    """Losses of steps on data that depend on the rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator, device = torch.Generator().manual_seed(rank), next(model.parameters()).device
    losses = []
    if way == "eval mode":
        model.eval()
    for step in range(steps):
        for part in range(2 if way == "accumulated" else 1):
            if way == "accumulated":
                model.set_requires_gradient_sync(part == 1)
            loss = model(torch.randn(4, 24, generator=generator).to(device)).float().pow(2).mean()
            loss.backward()
        if way == "evaluated" and step % 3 == 0:
            with torch.no_grad():
                model.eval()(torch.ones(4, 24, device=device))
            model.train()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def plain(chosen: Any) -> list[Any]:
    return [[kind.op, None if config is None else config["engine"]] for kind, config in chosen.items()]


def searched(rank: int, db: str, gain: float, way: str = "", steps: int = 30) -> dict[str, Any]:
    """A search by a clock, its choice, losses compared with stock's, and a second handle's look-up."""
    clock = Clock(gain)
    patched: Any = api
    real, patched.time = patched.time, clock
    try:
        with fresh():
            model = made(way)
            handle = clock.handle = autotune.fsdp(model, steps=steps, db=db)
            ours = train(rank, model, handle, steps + 3, way)
            stock = train(rank, made(way), None, steps + 3, way)
            second = made(way)
            again = autotune.fsdp(second, db=db)
            looked_up = train(rank, second, again, 4, way)
            chosen, repeated = plain(handle.chosen), plain(again.chosen)
            text = repr(again)
            pools: list[list[Any]] = [deploy_group(seen.group, torch.device("cpu")).keep("symmetric buffers", list)
                     for seen in handle._traffic.seen.values()]  # fmt: skip
            for pool in pools:
                pool.append("a buffer that no engine uses")
            idle = type(model.blocks[0]._get_fsdp_state()._fsdp_param_group._all_gather_comm).__name__
            with mock.patch("torch.cuda.synchronize"):
                handle.close()
            again.close()
            train(rank, second, None, 2, way)
            return {
                "ours": ours, "stock": stock, "looked_up": looked_up, "chosen": chosen, "repeated": repeated,
                "found": None if handle.found is None else (handle.found.stock_ms, handle.found.step_ms), "text": text,
                "closed": repr(handle), "gathers": idle,
                "unused": sum(len(pool) for pool in pools),
            }  # fmt: skip
    finally:
        patched.time = real


def bereft(rank: int, db: str, when: str) -> dict[str, Any]:
    """Rank 1 dies in the search or after it; what the other one gets, and after how many seconds."""
    clock = Clock(0.1)
    patched: Any = api
    steps = 24
    last = {"search": 7, "training": steps + 3}[when]
    real, patched.time = patched.time, clock
    try:
        with fresh():
            model = made()
            handle = clock.handle = autotune.fsdp(model, steps=steps, db=db)
            train(rank, model, handle, last)
            engines = {engine for _, engine in plain(handle.chosen)}
    finally:
        patched.time = real
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        train(rank, model, handle, 5)
    except (RuntimeError, ConnectionError) as error:
        return {"error": str(error), "seconds": time.monotonic() - begin, "engines": sorted(map(str, engines))}
    return {"error": "", "seconds": time.monotonic() - begin, "engines": sorted(map(str, engines))}


def soak(rank: int, db: str, steps: int) -> dict[str, Any]:
    """Losses of many steps on copies compared with stock's, on data that recur."""
    clock = Clock(0.1)
    patched: Any = api
    real, patched.time = patched.time, clock
    try:
        with fresh():
            model, plainly = made(), made()
            handle = clock.handle = autotune.fsdp(model, steps=24, db=db)
            ours = train(rank, model, handle, steps)
            engines = {engine for _, engine in plain(handle.chosen)}
            stock = train(rank, plainly, None, steps)
            handle.close()
    finally:
        patched.time = real
    worst = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(ours, stock, strict=True))
    return {"worst": worst, "engines": sorted(map(str, engines)), "last": ours[-1]}


def reloaded(rank: int, db: str) -> dict[str, Any]:
    """A checkpoint of a model on copies, loaded into a stock model and into one with a handle."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    clock = Clock(0.1)
    patched: Any = api
    real, patched.time = patched.time, clock
    try:
        with fresh():
            model = made()
            handle = clock.handle = autotune.fsdp(model, steps=24, db=db)
            train(rank, model, handle, 27)
            values: dict[str, Any] = get_model_state_dict(model)
            saved = {name: value.clone() for name, value in values.items()}
            losses = [train(rank, model, handle, 3)]
            for again in (None, handle):
                target = made() if again is None else model
                set_model_state_dict(target, saved)
                losses.append(train(rank, target, again, 3))
            engines = {engine for _, engine in plain(handle.chosen)}
            handle.close()
            return {"losses": losses, "engines": sorted(map(str, engines))}
    finally:
        patched.time = real


def stopped(rank: int, db: str, where: str) -> dict[str, Any]:
    """A choice for copies is stored, but copies cannot run: on all ranks, or for want of memory on one."""

    def refuse(*given: Any) -> Any:
        raise Unsupported("no peer access here")

    patched: Any = traffic
    real = patched.open_collective, patched.too_little
    if where == "everywhere":
        patched.open_collective = refuse
    elif rank == 1:
        patched.too_little = lambda *given: "12 MiB of buffers do not fit 3 MiB of free memory"
    try:
        said = io.StringIO()
        with fresh(), contextlib.redirect_stderr(said):
            model = made()
            handle = autotune.fsdp(model, db=db)
            losses = train(rank, model, handle, 4)
            return {"losses": losses, "chosen": plain(handle.chosen), "said": said.getvalue()}
    finally:
        patched.open_collective, patched.too_little = real


def refused(rank: int, db: str) -> list[str]:
    """Answers to a user's mistakes."""
    said = []
    for model, options in ((Model(), {}), (made(), {"steps": 5})):
        try:
            autotune.fsdp(model, db=db, **options)
        except UserError as error:
            said.append(str(error))
    return said


def left_alone(rank: int, db: str) -> list[bool]:
    """A block whose collectives the program has set keeps them."""
    model = made()
    own = traffic.Scatter(traffic.Traffic())
    model.blocks[0].set_custom_reduce_scatter(own)
    with fresh():
        handle = autotune.fsdp(model, db=db)
        train(rank, model, handle, 3)
    group = model.blocks[0]._get_fsdp_state()._fsdp_param_group
    return [group._reduce_scatter_comm is own, type(group._all_gather_comm).__name__ == "DefaultAllGather"]


def shared(rank: int) -> bool:
    """A result of a reduce-scatter is never a buffer that the next one writes to."""
    lines = traffic.Traffic()
    scatter = traffic.Scatter(lines)
    group: Any = dist.group.WORLD
    cpu = torch.device("cpu")
    first = scatter.allocate((8,), dtype=torch.float32, device=cpu)
    sums = scatter.allocate((4,), dtype=torch.float32, device=cpu)
    first.fill_(rank + 1.0)
    scatter(sums, first, group, dist.ReduceOp.SUM)
    (kind,) = lines.seen
    from autotune.domains.c3.group import deploy_group

    everyone = deploy_group(None, cpu)
    config = SimpleNamespace(order="gemm_first", engine="copy", threads=0, copies=1).__dict__
    lines.seen[kind].mean = True
    assert not lines.use(kind, config, None, everyone, everyone)
    results = []
    for turn in range(3):
        larger = scatter.allocate((8,), dtype=torch.float32, device=cpu)
        out = scatter.allocate((4,), dtype=torch.float32, device=cpu)
        larger.fill_(rank + 1.0 + turn)
        scatter(out, larger, group, dist.ReduceOp.AVG)
        results.append(out)
        del larger
    lines.release(kind)
    return bool(sums.eq(3.0).all()) and [float(r[0]) for r in results] == [1.5, 2.5, 3.5]


def repeated(rank: int, db: str) -> list[str]:
    """A second handle on a model: its answer while the first one is active, and the model after the first one."""
    with fresh():
        model = made()
        first = autotune.fsdp(model, db=db)
        said = ""
        try:
            autotune.fsdp(model, db=db)
        except UserError as error:
            said = str(error)
        train(rank, model, first, 3)  # nothing is stored, so that it gives the modules their collectives back
        second = autotune.fsdp(model, db=db)
        for _ in range(2):
            first.close()
        kept = type(model.blocks[0]._get_fsdp_state()._fsdp_param_group._all_gather_comm).__name__
        train(rank, model, second, 1)
        second.close()
        return [said, kept, repr(first), repr(second)]


def prefetched(rank: int, db: str) -> list[list[int]]:
    """Modules that are gathered ahead: while the handle prefetches, and after it is closed; one was the program's."""
    with fresh():
        model = made()
        handle = autotune.fsdp(model, db=db)
        train(rank, model, handle, 2)
        handle._prefetch(True)
        every = [model, *model.blocks]
        ahead = [len(api._prefetched(module)) for module in every]
        model.blocks[1].set_modules_to_forward_prefetch([model.blocks[2], model.blocks[0]])
        handle._prefetch(True)
        handle.close()
        return [ahead, [len(api._prefetched(module)) for module in every]]


def hindered(rank: int, db: str) -> dict[str, Any]:
    """A search in which rank 1 compiles no kernel, and runs out of memory at the end of its first engine."""
    from autotune.domains.c3 import task
    from autotune.domains.c3.fsdp import steps
    from autotune.task import Artifact

    def build(*given: Any, **options: Any) -> Artifact:
        if rank == 1:
            raise OSError("no compiler")
        return Artifact("cpu", ())

    def adds(config: Any, op: str) -> bool:
        return op == "reduce_scatter"

    failures = ["no memory"]
    patched: Any = traffic
    real = patched.open_collective

    def opened(*given: Any) -> Any:
        made = real(*given)
        if rank == 1 and failures:
            raise MemoryError(failures.pop())
        return made

    with (
        mock.patch.object(task, "build", build),
        mock.patch.object(steps, "_built", {}),
        mock.patch.object(steps, "kernel_of", adds),
        mock.patch.object(traffic, "kernel_of", adds),
        mock.patch.object(traffic, "open_collective", opened),
    ):
        return searched(rank, db, 0.1, "", 60)


def unallocated(rank: int, db: str) -> list[Any]:
    """A model without memory when the handle is made, as large ones are before their weights are loaded."""
    with torch.device("meta"):
        model = Model()
    fully_shard(model)
    with fresh():
        handle = autotune.fsdp(model, db=db)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.02)
        losses = train(rank, model, handle, 3)
        return [handle._device.type, losses[-1] == losses[-1]]


def outlived(rank: int, db: str, rendezvous: str) -> list[Any]:
    """A handle that is closed after its process group, before another group is made or after it; and a new handle."""
    clock = Clock(0.1)
    with fresh(), mock.patch.object(api, "time", clock):
        models = [made(), made()]
        handle = clock.handle = autotune.fsdp(models[0], steps=24, db=db)
        train(rank, models[0], handle, 26)
        second = autotune.fsdp(models[1], db=db)
        train(rank, models[1], second, 3)
        engines = [sorted({str(engine) for _, engine in plain(h.chosen)}) for h in (handle, second)]
        dist.destroy_process_group()
        handle.close()
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
        second.close()
        model, stock = made(), made()
        again = autotune.fsdp(model, db=db)
        near = train(rank, model, again, 3) == train(rank, stock, None, 3)
        engines.append(sorted({str(engine) for _, engine in plain(again.chosen)}))
        again.close()
        return [engines, repr(handle), repr(second), near]


def changed(rank: int, db: str, folder: str, steps: int, first: int) -> list[Any]:
    """Losses while a program changes its settings, by change: ours, and those of stock FSDP2.

    Args:
        steps: steps of the search.
        first: steps before the first change: within the search, or after it.
    """
    clock = Clock(0.1)
    with fresh(), mock.patch.object(api, "time", clock):
        model, plainly = made("deep"), made("deep")
        handle = clock.handle = autotune.fsdp(model, steps=steps, db=db)
        train(rank, model, handle, first)
        train(rank, plainly, None, first)
        losses = []
        for ours, stock in zip(_changes(rank, model, folder), _changes(rank, plainly, folder), strict=True):
            losses.append([*ours, stock[1]])
        engines = {engine for _, engine in plain(handle.chosen)}
        handle.close()
        return [losses, sorted(map(str, engines))]


def _changes(rank: int, model: Any, folder: str) -> Iterator[tuple[str, list[float]]]:
    """Each change of settings that a program may make between steps, and the losses after it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    generator, device = torch.Generator().manual_seed(rank), next(model.parameters()).device
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(rows: int = 4, parts: int = 1, clip: float = 0.0) -> float:
        for part in range(parts):
            model.set_is_last_backward(part == parts - 1)
            loss = model(torch.randn(rows, 24, generator=generator).to(device)).float().pow(2).mean()
            loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    def steps(**options: Any) -> list[float]:
        return [step(**options) for _ in range(3)]

    yield "as it was", steps()
    for ahead in (4, 6):
        for k, module in enumerate(model.blocks):
            module.set_modules_to_forward_prefetch(list(model.blocks)[k + 1 : k + 1 + ahead])
        model.set_modules_to_forward_prefetch(list(model.blocks)[:ahead])
        yield f"{ahead} gathers ahead", steps()
    for k, module in enumerate(model.blocks):
        module.set_modules_to_backward_prefetch(list(model.blocks)[max(0, k - 5) : k][::-1])
    yield "5 gathers ahead, backwards", steps()
    for module in model.blocks:
        module.unshard(async_op=True)
    yield "unsharded before the forward pass", steps()
    model.set_reshard_after_forward(False)
    yield "kept after the forward pass", steps()
    model.set_reshard_after_forward(True)
    yield "resharded again", steps()
    if hasattr(model, "set_reduce_scatter_max_input_buffers"):
        model.set_reduce_scatter_max_input_buffers(5)
        yield "5 gradients at the same time", steps()
    model.blocks[0].requires_grad_(False)
    yield "a frozen block", steps()
    model.blocks[1][0].bias.requires_grad_(False)
    yield "a frozen bias", steps()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    yield "nothing frozen", steps()
    yield "larger batches", steps(rows=9)
    yield "clipped gradients", steps(clip=0.1)
    yield "two backward passes a step", steps(parts=2)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    yield "gradients that are not reduced", [step()]
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    yield "gradients that are reduced again", steps()
    model.set_force_sum_reduction_for_comms(True)
    yield "sums in place of means", steps()
    model.set_force_sum_reduction_for_comms(False)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        losses = steps()
    yield "autocast", losses
    with torch.inference_mode():
        model(torch.ones(2, 24, device=device))
    yield "after inference", steps()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    yield "another optimizer", steps()
    for number, options in enumerate((StateDictOptions(), StateDictOptions(full_state_dict=True))):
        own = _agreed(f"{folder}/{number}-{id(model)}")
        weights, moments = get_state_dict(model, optimizer, options=options)
        save({"model": weights, "optimizer": moments}, checkpoint_id=own)
        steps()
        state = {"model": weights, "optimizer": moments}
        load(state, checkpoint_id=own)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=options)
        yield "a loaded checkpoint", steps()

    def fail(*given: Any) -> None:
        raise MemoryError("a program that goes on after it")

    if hasattr(model, "reset_iter_state"):
        for place in ("forward", "full_backward"):
            hook = getattr(model.blocks[2], f"register_{place}_hook")(fail)
            with contextlib.suppress(MemoryError):
                step()
            hook.remove()
            model.reset_iter_state()
            optimizer.zero_grad()
            yield f"after an exception in a {place} hook", steps()


def _agreed(word: str) -> str:
    """Rank 0's word."""
    words: list[Any] = [word]
    dist.broadcast_object_list(words)
    return str(words[0])

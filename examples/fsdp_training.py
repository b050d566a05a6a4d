"""What each rank of ``fsdp_overlap.py`` does: sharded models, one for each way to gather, trained in turns."""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from autotune.device import environment
from autotune.domain import place
from autotune.domains.c3.collectives.base import Spec, open_collective
from autotune.domains.c3.deploy.match import match_scenario
from autotune.domains.c3.group import Group, deploy_group
from autotune.domains.c3.scenario import ITEMSIZE, Gemm, Scenario
from autotune.domains.c3.strategy import KINDS, by_rule, normalize
from autotune.domains.c3.task import build
from autotune.errors import Unsupported, UserError
from autotune.runtime.deployment import deployment
from autotune.space import load_space
from autotune.task import Artifact, Config
from examples.fsdp_gather import TunedAllGather
from examples.models.llama import Block, RMSNorm
from examples.models.llama import Config as Sizes

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True)
class Tuned:
    """The strategy, its kernels if it needs any, and what to tell about it."""

    config: Config
    artifact: Artifact | None
    told: dict[str, Any]


class Stack(nn.Module):
    """Llama layers, each sharded by itself as soon as it is made, so that they never lie on one device together."""

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: Sizes, device: torch.device, mesh: DeviceMesh) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for layer in range(sizes.layers):
            torch.manual_seed(layer)  # every rank makes the whole layer, and keeps its shard
            with device:
                block = Block(sizes).to(sizes.dtype)
            fully_shard(block, mesh=mesh)
            self.blocks.append(block)
        self.norm = RMSNorm(sizes.hidden).to(device, sizes.dtype)
        size = sizes.hidden // sizes.heads
        rates = 500000.0 ** (-torch.arange(0, size, 2, device=device) / size)
        angles = (torch.arange(sizes.length, device=device)[:, None] * rates).repeat(1, 2)[:, None, :]
        self.register_buffer("cos", angles.cos().to(sizes.dtype))
        self.register_buffer("sin", angles.sin().to(sizes.dtype))

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.mse_loss(self.norm(x).float(), wanted.float())


@dataclass
class Trained:
    """One mode: a sharded model, its optimizer, and what its steps gave."""

    name: str
    model: Stack
    optimizer: Any
    gather: TunedAllGather | None
    ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    launched: dict[str, int] = field(default_factory=dict)

    def step(self, x: Tensor, wanted: Tensor) -> Tensor:
        loss: Tensor = self.model(x, wanted)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def report(self, stock: Trained) -> dict[str, Any]:
        """For the result: times in milliseconds, beside those of ``stock``."""
        median, other = statistics.median(self.ms), statistics.median(stock.ms)
        return {"ms": median, "min_ms": min(self.ms), "max_ms": max(self.ms), "fsdp2_ms": other,
                "speedup": other / median, "losses": self.losses, "launched": self.launched}  # fmt: skip


def sizes_of(args: argparse.Namespace) -> Sizes:
    return Sizes(
        batch=args.batch, length=args.length, layers=args.layers, hidden=args.hidden, heads=args.heads,
        kv_heads=args.kv_heads, inner=args.inner, dtype=DTYPES[args.dtype],
    )  # fmt: skip


def scenario_of(args: argparse.Namespace, ranks: int) -> Scenario:
    """A layer's matrix products, as one of equally many operations, beside the gather of a layer's parameters."""
    with torch.device("meta"):
        block = Block(sizes_of(args))
    matrices = sum(p.numel() for p in block.parameters() if p.dim() == 2)
    padded = sum(-(-p.shape[0] // ranks) * ranks * p[0].numel() for p in block.parameters())
    gemm = Gemm(args.batch * args.length, matrices // args.hidden, args.hidden, args.dtype)
    return Scenario(gemm, "all_gather", padded * ITEMSIZE[args.dtype], ranks, args.dtype)


def changes(args: argparse.Namespace, side: str) -> Config:
    """What ``--set`` changes of the strategy.

    Raises:
        UserError: there is no such parameter, or no such choice of it.
    """
    plain, out = KINDS[side]().config(), Config()
    for text in args.set:
        name, _, value = text.partition("=")
        if name not in plain:
            raise UserError(f"--set {text}: a strategy has {', '.join(plain)}")
        known = {str(c).lower(): c for c in load_space("c3", side)[name].choices}
        if value.lower() not in known:
            raise UserError(f"--set {text}: {name} is one of {', '.join(known)}")
        out[name] = known[value.lower()]
    return out


def find_strategy(args: argparse.Namespace, group: Group) -> Tuned:
    """What is stored for the scenario, or else the best guess, with the changes of ``--set``; equal on all ranks."""
    scenario, side = scenario_of(args, group.ranks), group.device.type
    device = "cpu" if side == "cpu" else "cuda:0"
    where = place(scenario.workload(), device)
    found = match_scenario(scenario, deployment().store(args.db), where, environment(device), side=side)
    config, artifact, level = dict(found.config), found.artifact, str(found.level)
    if any(other != config for other in group.gather(config)):  # each rank looked it up by itself
        config, artifact, level = by_rule(scenario, side)[0], None, "default"
    if given := changes(args, side):
        config = normalize(config | given, scenario, side)
        artifact, level = build(scenario, config, device), "given"
    told = {"scenario": scenario.label, "level": level, "reason": found.reason, "config": config}
    return Tuned(config, artifact, told)


def cannot(tuned: Tuned, args: argparse.Namespace, group: Group) -> str:
    """Why these devices cannot gather by the strategy; empty where they can. Equal on all ranks."""
    try:
        spec = Spec("all_gather", 1024 * group.ranks, args.dtype)
        open_collective(spec, group, tuned.config, tuned.artifact).close()
    except Unsupported as error:
        return str(error)
    return ""


def open_mode(name: str, args: argparse.Namespace, group: Group, tuned: Tuned) -> Trained:
    kind = group.device.type
    mesh = zero_cta_mesh(group) if name == "fsdp2_copy" else init_device_mesh(kind, (group.ranks,))
    stack = Stack(sizes_of(args), group.device, mesh)
    blocks: list[Any] = list(stack.blocks)
    gather = TunedAllGather(group, tuned.config, tuned.artifact) if name == "autotune" else None
    for block in blocks:
        if gather is not None:
            block.set_custom_all_gather(gather)
        elif name == "fsdp2_copy":
            block.set_symm_mem_for_comm()
    if name == "fsdp2_prefetch" or (gather is not None and tuned.config["order"] == "comm_first"):
        for block, after in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([after])
    fully_shard(stack, mesh=mesh)
    make: Any = torch.optim.AdamW if args.optimizer == "adamw" else torch.optim.SGD
    return Trained(name, stack, make(stack.parameters(), lr=1e-4), gather)


def zero_cta_mesh(group: Group) -> DeviceMesh:
    """All ranks, in a group of NCCL's whose collectives run on copy engines where it can."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
    made: Any = dist.new_group(backend="nccl", pg_options=options, device_id=group.device)
    return DeviceMesh.from_group(made, group.device.type)


def unavailable(name: str, cuda: bool) -> str:
    """Why a mode cannot run here; empty where it can."""
    if name != "fsdp2_copy":
        return ""
    if not cuda:
        return "there are no copy engines without GPUs"
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if not hasattr(FSDPModule, "set_symm_mem_for_comm") or not hasattr(nccl, "NCCL_CTA_POLICY_ZERO"):
        return f"torch {torch.__version__} has no such option"
    return ""


def run_steps(modes: Sequence[Trained], args: argparse.Namespace, group: Group) -> None:
    """Train all modes on the same data, in turns that rotate; a step takes as long as on its slowest rank."""

    def wait() -> None:
        if group.device.type == "cuda":
            torch.cuda.synchronize()

    generator = torch.Generator(group.device).manual_seed(group.rank)
    shape = (2, args.batch, args.length, args.hidden)
    for step in range(args.warmup + args.steps):
        x, wanted = torch.randn(shape, generator=generator, device=group.device, dtype=DTYPES[args.dtype])
        turn = step % len(modes)
        for mode in [*modes[turn:], *modes[:turn]]:
            wait()
            group.barrier()
            start = time.perf_counter()
            loss = mode.step(x, wanted)
            wait()
            took = (time.perf_counter() - start) * 1e3
            mode.losses.append(statistics.mean(group.gather(loss.item())))
            if step >= args.warmup:
                mode.ms.append(group.largest([took])[0])
    if args.profile and group.device.type == "cuda":
        for mode in modes:
            mode.launched = moved_by(lambda mode=mode: mode.step(x, wanted))  # type: ignore[misc]


def moved_by(step: Callable[[], object]) -> dict[str, int]:
    """How often each kernel of NCCL and each kind of copy ran in a step: proof of who moved the data."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    names = [e.name for e in profiled.events() or () if "CUDA" in str(e.device_type)]
    return dict(Counter(n for n in names if n.startswith(("nccl", "Memcpy", "autotune"))))


def agree(modes: Sequence[Trained], dtype: str) -> bool:
    """Whether all were trained alike, but for the order in which gradients were added."""
    bound = 5e-3 if dtype == "bf16" else 1e-4
    steps = zip(*(m.losses for m in modes), strict=True)
    return all(abs(loss - first) <= bound * abs(first) for first, *others in steps for loss in others)


def exact(mode: Trained) -> bool:
    """Whether the mode's gather brings every parameter as it is now, bit by bit."""
    same = True
    for block in mode.model.blocks:
        assert isinstance(block, FSDPModule)
        expected = [p.full_tensor() for p in block.parameters() if isinstance(p, DTensor)]
        block.unshard()
        same &= all(torch.equal(p, e) for p, e in zip(block.parameters(), expected, strict=True))
        block.reshard()
    return same


def run_rank(args: argparse.Namespace) -> dict[str, Any] | None:
    """Train ``args.modes``, of which stock FSDP2 is the first. A result on rank 0, None on the others."""
    local, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = args.device == "cuda"
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
        dist.init_process_group("gloo")
    group = deploy_group(None, device)
    tuned = find_strategy(args, group)
    skipped = {}
    if "autotune" in args.modes and (why := cannot(tuned, args, group)):
        skipped["autotune"] = why
    modes = [open_mode(name, args, group, tuned) for name in args.modes if name not in skipped]
    run_steps(modes, args, group)
    wrong = [m.name for m in modes if not all(group.gather(exact(m)))]
    for mode in modes:
        if mode.gather is not None:
            mode.gather.close()
    result = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "ranks": ranks,
        "torch": torch.__version__,
        "model": {"layers": args.layers, "hidden": args.hidden, "inner": args.inner, "heads": args.heads,
                  "kv_heads": args.kv_heads, "batch": args.batch, "length": args.length, "dtype": args.dtype,
                  "optimizer": args.optimizer},
        "strategy": tuned.told,
        "agree": agree(modes, args.dtype) and not wrong,
        "wrong": wrong,
        "modes": {m.name: m.report(modes[0]) for m in modes},
        "skipped": skipped,
    }  # fmt: skip
    group.barrier()
    dist.destroy_process_group()
    return result if group.rank == 0 else None

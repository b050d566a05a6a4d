"""``autotune.fsdp``: a strategy for each collective of a sharded model, searched once and then looked up."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Generator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autotune.domains.c3.collectives.symmetric import drop_free
from autotune.domains.c3.fsdp.steps import FAILED, LEAST, TIMED, WARM, Found, Plan, candidates, keep, kernels_of, search
from autotune.domains.c3.fsdp.traffic import Gather, Kind, Scatter, Traffic
from autotune.domains.c3.group import deploy_group, exists
from autotune.domains.c3.match import C3Level
from autotune.domains.c3.ready import decide
from autotune.domains.c3.scenario import Program, Scenario
from autotune.errors import UserError
from autotune.runtime.deployment import deployment
from autotune.task import Artifact, Config
from autotune.workload import digest

log = logging.getLogger("autotune")


def fsdp(model: nn.Module, *, steps: int = 0, db: str | None = None, group: dist.ProcessGroup | None = None) -> Sharded:
    """Run the collectives of a model sharded by ``fully_shard`` with the fastest strategies in its own step.

    ::

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        autotune.fsdp(model, steps=60)

    All-gathers and reduce-scatters of each size run in torch's own group, in NCCL with fewer thread blocks, on copy
    engines, or in a kernel that reduces directly from peer memory. Prefetching is also a choice. The first training
    step is stock FSDP2. After it rank 0 looks up the strategies. With ``steps``, missing ones are searched in the next
    steps and stored. Without ``steps``, and for a strategy that cannot run, FSDP2 stays as it is. Parameters,
    checkpoints, mixed precision, ``reshard_after_forward`` and gradient accumulation are unchanged. Every rank makes
    the same call.

    Args:
        model: the model; its forward pass starts a step. Modules with custom collectives of the program are skipped.
        steps: maximum number of training steps for a search, 24 or more; 0 only looks up.
        db: database; None for $AUTOTUNE_DB or the default file.
        group: the ranks that train this model; None for all. Each pipeline stage has its own.

    Returns:
        a handle whose ``repr`` shows the strategies.

    Raises:
        UserError: no module of the model is sharded; ``steps`` is too small; torch.distributed is not initialised.
    """
    if steps and steps < LEAST:
        raise UserError(f"autotune.fsdp: a search needs at least {LEAST} steps, not {steps}")
    modules = [module for module in model.modules() if _stock(module)]
    if not modules and any(_group(module) is not None for module in model.modules()):
        raise UserError(
            "autotune.fsdp: the program or another autotune.fsdp has set the collectives of this model's modules: call "
            "close() of the other handle first"
        )
    if not modules:
        raise UserError("autotune.fsdp: the model has no sharded module: call fully_shard first")
    return Sharded(model, modules, steps, db, group)


class Sharded:
    """A model whose collectives autotune runs; made by :func:`fsdp`.

    Attributes:
        chosen: strategy by kind of collective; None for torch's own group. Empty until the first step has ended.
        found: the search's result, on every rank; None without a search, or before it ends.
    """

    def __init__(
        self, model: nn.Module, modules: list[Any], steps: int, db: str | None, group: dist.ProcessGroup | None
    ) -> None:
        device = _group(modules[0]).device  # parameters may be on the host, or on no device yet
        self._everyone = deploy_group(group, device)
        self._device, self._modules, self._steps, self._db = device, modules, steps, db
        self._traffic = Traffic()
        self.chosen: dict[Kind, Config | None] = {}
        self.found: Found | None = None
        self._name = ""
        self._states = self._run()
        self._started = False
        self._inputs: list[Any] = []
        for module in modules:
            module.set_custom_all_gather(Gather(self._traffic, module, _group(module)))
            module.set_custom_reduce_scatter(Scatter(self._traffic))
        untraced: Any = torch.compiler.disable
        self._hook: Any = model.register_forward_pre_hook(untraced(self._forward), prepend=True, with_kwargs=True)

    def __repr__(self) -> str:
        words = [f"{kind.op} of {kind.nbytes / 2**20:.1f} MiB: {_label(c)}" for kind, c in self.chosen.items()]
        state = ", ".join(words) or ("the first step has not ended" if self._hook is not None else "closed")
        return f"Sharded({state})"

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before the model's forward pass: a training step starts after one with a backward pass has ended."""
        if not torch.is_grad_enabled():
            return
        if not self._inputs:
            leaves = [*args, *kwargs.values()]
            self._inputs = [_bucket(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not self._traffic.scattered:
            return
        self._traffic.new_step()
        if next(self._states, True):
            self._traffic.counting = False
            if not self._traffic.changed:
                self._withdraw()
        if self._traffic.engines:
            self._everyone.beat()

    def _withdraw(self) -> None:
        """Give modules that still have this handle's collectives torch's own back, which cost the host less time."""
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as torchs

        for module in self._modules:
            group = _group(module)
            if getattr(group._all_gather_comm, "traffic", None) is self._traffic:
                module.set_custom_all_gather(torchs.DefaultAllGather())
            if getattr(group._reduce_scatter_comm, "traffic", None) is self._traffic:
                module.set_custom_reduce_scatter(torchs.DefaultReduceScatter())
        self._hook.remove()

    def _run(self) -> Generator[None, None, None]:
        """The handle's work as a generator, resumed at the start of each step except the first."""
        try:
            kinds = self._kinds()
            if not kinds:
                return
            words = [[*_words(kind), self._traffic.seen[kind].mean] for kind in kinds]
            self._name = f"fsdp:{digest({'kinds': words, 'inputs': self._inputs})[:16]}"
            self._name = self._everyone.gather(self._name)[0]
            missing = self._look_up(kinds)
            if not missing or not self._steps:
                return
            yield from self._search(kinds)
        except UserError as error:
            self._stay(str(error))

    def _kinds(self) -> dict[Kind, int]:
        """Kinds of collectives and their calls per step; empty if ranks differ."""
        kinds = {kind: seen.calls for kind, seen in self._traffic.seen.items() if seen.calls}
        every = self._everyone.gather([_words(kind) for kind in kinds])
        if any(other != every[0] for other in every):
            self._stay("ranks run other collectives than rank 0")
            return {}
        return kinds

    def _stay(self, why: str) -> None:
        """Warn once per program; all ranks have the same reason."""
        if self._everyone.rank == 0:
            deployment().warn_once("fsdp", f"autotune: FSDP2 is not changed: {why}")

    # ---- the stored choice -----------------------------------------------------------------------------------------

    def _scenario(self, kind: Kind) -> Scenario:
        return Scenario(Program(self._name), kind.op, kind.nbytes, kind.ranks, kind.dtype)

    def _look_up(self, kinds: Mapping[Kind, int]) -> list[Kind]:
        """Apply the stored strategies; returns the kinds without one."""
        missing = []
        plan: dict[Kind, Config | None] = {}
        artifacts: dict[Kind, Artifact | None] = {}
        for kind in kinds:
            match = decide(self._scenario(kind), self._everyone, db=self._db)
            if match.level is C3Level.DEFAULT or match.schedule is None:
                missing.append(kind)
                plan[kind] = None
            else:
                plan[kind] = match.config if match.schedule.config is not None else None
                artifacts[kind] = match.artifact
        self._apply(plan, artifacts)
        return missing

    def _apply(self, plan: Plan, artifacts: Mapping[Kind, Artifact | None], *, trial: bool = False) -> bool:
        """Run every kind with its strategy; False if a kind cannot run it, and stays with torch's own group."""
        right = True
        for kind, config in plan.items():
            if kind in self.chosen and self.chosen[kind] == config:
                continue
            group = deploy_group(self._traffic.seen[kind].group, self._device)
            why = self._traffic.use(kind, config, artifacts.get(kind), self._everyone, group)
            self.chosen[kind] = None if why else config
            if why:
                right = False
                text = f"{_label(config)} cannot run {kind.op}: {why}"
                log.debug("autotune.fsdp: %s", text) if trial else self._stay(text)
        self._prefetch(any(c is not None and c["order"] == "comm_first" for c in self.chosen.values()))
        return right

    def _free(self) -> None:
        """Free the buffers of engines that no kind uses. A collective call, between two steps."""
        for seen in self._traffic.seen.values():
            drop_free(deploy_group(seen.group, self._device))

    def _prefetch(self, wanted: bool) -> None:
        """Set whether each module's all-gather is issued before the computation of the preceding module.

        Modules for which the program has configured prefetching itself stay as they are; all do if one was configured
        first.
        """
        order = self._traffic.order
        if any(_prefetched(module) for module in order) and not self._started:
            return
        self._started = self._started or wanted
        if self._started:
            for module, after in itertools.pairwise(order):
                if _prefetched(module) == ([] if wanted else [after._get_fsdp_state()]):
                    module.set_modules_to_forward_prefetch([after] if wanted else [])

    # ---- the search ------------------------------------------------------------------------------------------------

    def _search(self, kinds: Mapping[Kind, int]) -> Generator[None, None, None]:
        side = self._device.type
        artifacts: dict[Kind, Artifact] = {}
        for kind in kinds:
            mean = self._traffic.seen[kind].mean
            built = kernels_of(self._scenario(kind), candidates(kind, side), str(self._device), mean)
            if built is not None:
                artifacts[kind] = built
        trials = search(kinds, side, self._steps)
        ms: float | None = None
        while True:
            try:
                plan = next(trials) if ms is None else trials.send(ms)
            except StopIteration as end:
                self.found = end.value
                break
            if self._apply(plan, artifacts, trial=True):
                ms = yield from self._everyone.timed_block(WARM, TIMED, time.perf_counter)
            else:
                ms = FAILED
        self._apply(self.found.plan, artifacts)
        self._free()
        if self._everyone.rank == 0:
            scenarios = {kind: self._scenario(kind) for kind in self.found.plan}
            keep(self.found, scenarios, artifacts, str(self._device), self._db, "FSDP2's choice")

    def close(self) -> None:
        """Restore FSDP2's own collectives and free the buffers. A collective call, between two steps."""
        if self._hook is None:
            return
        if exists(self._everyone.data):
            for kind in list(self.chosen):
                self._traffic.release(kind)
            self._free()
        self._prefetch(False)
        self._withdraw()
        self._hook = None
        self.chosen.clear()


def _group(module: nn.Module) -> Any:
    """The parameter group of a sharded module.

    Returns:
        None for other modules, for those without own parameters, and for those with several groups, for which torch
        supports no custom collectives.
    """
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(module, FSDPModule):
        return None
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return groups[0] if len(groups) == 1 else None


def _stock(module: nn.Module) -> bool:
    """True for a sharded module without custom collectives."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as torchs

    group = _group(module)
    if group is None:
        return False
    own = (type(group._all_gather_comm), type(group._reduce_scatter_comm))
    return own == (torchs.DefaultAllGather, torchs.DefaultReduceScatter)


def _prefetched(module: Any) -> list[Any]:
    """The FSDP states of the modules whose all-gathers are issued with a module's forward pass."""
    return list(getattr(module._get_fsdp_state(), "_states_to_forward_prefetch", ()))


def _bucket(tensor: torch.Tensor) -> list[Any]:
    """A tensor's dtype and extents, rounded up to powers of two, since a loader's batches differ in length."""
    return [str(tensor.dtype), *(1 << max(0, int(extent) - 1).bit_length() for extent in tensor.shape)]


def _words(kind: Kind) -> list[Any]:
    return [kind.op, kind.numel, kind.dtype, kind.ranks]


def _label(config: Config | None) -> str:
    if config is None:
        return "torch's own"
    rest = [f"{k}={v}" for k, v in config.items() if k in ("ctas", "chunks", "copies") and v not in (0, 1)]
    return " ".join([str(config["engine"]), *rest, *(["prefetched"] if config["order"] == "comm_first" else [])])

"""``autotune.tensor_parallel``: the search of a model's tensor-parallel products in its own training steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autotune.domains.c3.fsdp.steps import BLOCK, LEAST, TIMED, WARM, Found, keep, kernels_of, search
from autotune.domains.c3.group import deploy_group
from autotune.domains.c3.tensor_parallel.sites import Site, candidates, plans, sites
from autotune.errors import UserError
from autotune.runtime.deployment import deployment
from autotune.task import Artifact, Config

_CAPTURE = 1
"""A further untimed step of a block: products become graphs when they are called with the same addresses again."""
_LEAST = LEAST // BLOCK * (BLOCK + _CAPTURE)
_ENOUGH_MS, _MOST_CALLS = 5.0, 16
"""Replays of a graph are timed together for about so long, and at most so many."""


def tensor_parallel(
    model: nn.Module, *, steps: int = 0, db: str | None = None, group: dist.ProcessGroup | None = None
) -> Joined:
    """Run the tensor-parallel products of a model with the fastest strategies in its own step.

    ::

        model = torch.compile(parallelize_module(model, mesh, plan), backend="autotune")
        autotune.tensor_parallel(model, steps=60)

    The products are those of :func:`~autotune.domains.c3.tensor_parallel.operators.all_gather_matmul` and
    :func:`~autotune.domains.c3.tensor_parallel.operators.matmul_reduce_scatter`, written by the program or put into its
    graphs. Products of each size run after the group's own collective, or in panels whose rows copy engines move. With
    ``steps``, the strategies are searched in the training steps after the first one and stored, if one is missing.
    Without ``steps``, stored ones are looked up. Every rank makes the same call.

    Args:
        model: the model; its forward pass starts a step.
        steps: maximum number of training steps for a search, 32 or more; 0 only looks up.
        db: database; None for $AUTOTUNE_DB or the default file.
        group: the ranks that train this model; None for all. Each pipeline stage has its own.

    Returns:
        a handle whose ``repr`` shows the strategies.

    Raises:
        UserError: ``steps`` is too small; torch.distributed is not initialised; the model has no parameters.
    """
    if steps and steps < _LEAST:
        raise UserError(f"autotune.tensor_parallel: a search takes {_LEAST} steps at least, not {steps}")
    device = next((parameter.device for parameter in model.parameters()), None)
    if device is None:
        raise UserError("autotune.tensor_parallel: the model has no parameters")
    if device.type == "meta":  # the program allocates its parameters later
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return Joined(model, device, steps, db, group)


class Joined:
    """A model whose tensor-parallel products autotune runs; made by :func:`tensor_parallel`.

    Attributes:
        found: the search's result, on every rank; None without a search, or before it ends.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, steps: int, db: str | None, group: dist.ProcessGroup | None
    ) -> None:
        self._everyone = deploy_group(group, device)
        self._device, self._steps, self._db = device, steps, db
        self.found: Found | None = None
        self._states = self._run()
        sites.db, sites.searching = db, steps > 0
        sites.seen.clear()
        untraced: Any = torch.compiler.disable
        self._hook: Any = model.register_forward_pre_hook(untraced(self._forward), prepend=True, with_kwargs=True)

    @property
    def chosen(self) -> dict[Site, Config | None]:
        """Strategy by site; None for the group's own collective and one product. Empty before the first step."""
        return dict(sites.chosen)

    def __repr__(self) -> str:
        words = [f"{site.op} {site.rows}x{site.width}x{site.inner}: {_label(c)}" for site, c in sites.chosen.items()]
        state = ", ".join(words) or ("the first step has not ended" if self._hook is not None else "closed")
        return f"Joined({state})"

    def _forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before the model's forward pass: a step starts if products ran since the last one."""
        if not (module.training and torch.is_grad_enabled() and sites.seen):
            return
        next(self._states, None)
        sites.seen.clear()
        if any(sites.chosen.values()):
            self._everyone.beat()

    def _run(self) -> Generator[None, None, None]:
        """The search as a generator, resumed at the start of each step except the first."""
        found = dict(sites.seen)
        sites.searching = False  # the graphs are compiled
        every = self._everyone.gather([_words(site) for site in sorted(found)])
        if any(other != every[0] for other in every):
            text = "autotune: tensor-parallel products are not searched: ranks run other products than rank 0"
            if self._everyone.rank == 0:
                deployment().warn_once("tensor parallel ranks", text)
            return
        missing = any(self._everyone.gather(any(site not in sites.stored for site in found)))
        if not missing or not self._steps:
            return
        trials = self._search(found, self._steps // (BLOCK + _CAPTURE) * BLOCK)
        try:
            next(trials)
            while True:
                trials.send((yield from self._everyone.timed_block(WARM + _CAPTURE, TIMED, time.perf_counter)))
        except StopIteration:
            pass

    def search(self, step: Callable[[], Any], tries: int = 40) -> Found:
        """Search with CUDA graphs of ``step``, for a program that captures its steps. A collective call.

        The host's time of a launch does not count then. Strategies have to be chosen before the program's own capture.
        A compiled program calls it before its first step, whose graphs the search changes. On CPUs ``step`` is called.

        Args:
            step: enqueues one step, forward and backward, and may be captured.
            tries: number of timed plans, 8 or more.

        Raises:
            UserError: ``tries`` is too small; the step has no product that can be joined with a collective.
        """
        if tries * BLOCK < LEAST:
            raise UserError(f"autotune.tensor_parallel: a search takes {LEAST // BLOCK} plans at least, not {tries}")
        sites.seen.clear()
        sites.searching = True
        try:
            step()
        finally:
            sites.searching = False
        if not sites.seen:
            why = "the step runs no product that is joined with a collective"
            raise UserError(f"autotune.tensor_parallel: {why}; a compiled program searches before its first step")
        before, trials = dict(sites.chosen), self._search(dict(sites.seen), tries * BLOCK)
        try:
            next(trials)
            while True:
                trials.send(self._captured(step))
        except StopIteration:
            pass
        except BaseException:
            sites.chosen.update(before)  # the program may go on without the search
            raise
        assert self.found is not None
        return self.found

    def _captured(self, step: Callable[[], Any]) -> float:
        """Milliseconds per step on the slowest rank, by replays of a graph."""
        step()
        run = step
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step()
            run = graph.replay
            run()
        once = self._timed(run, 1)
        calls = min(_MOST_CALLS, max(TIMED, int(_ENOUGH_MS / once)))
        return min(self._timed(run, calls) for _ in range(3))

    def _timed(self, run: Callable[[], Any], calls: int) -> float:
        """Milliseconds of a call on the slowest rank."""
        self._everyone.settle()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._everyone.largest([(time.perf_counter() - begin) * 1e3 / calls])[0]

    def _search(self, found: Mapping[Site, int], steps: int) -> Generator[None, float, None]:
        """Apply the plans of a search one after the other; the caller sends the milliseconds of each."""
        artifacts = self._build(found)
        trials = search(found, self._device.type, steps, plans)
        try:
            sites.chosen.update(next(trials))
            while True:
                ms = yield
                sites.chosen.update(trials.send(ms))
        except StopIteration as end:
            self.found = end.value
        assert self.found is not None
        sites.chosen.update(self.found.plan)
        if self._everyone.rank == 0:
            scenarios = {site: site.scenario for site in found}
            keep(
                self.found, scenarios, artifacts, str(self._device), self._db, "the choice of tensor-parallel products"
            )

    def _build(self, found: Mapping[Site, int]) -> dict[Site, Artifact]:
        """Compile the kernels that add, and use them; torch adds without one."""
        made = {}
        for site in found:
            built = kernels_of(site.scenario, candidates(site, self._device.type), str(self._device))
            if built is not None:
                made[site] = built
                sites.line(site.group, self._device).take(built, site.dtype)
        return made

    def close(self) -> None:
        """Return to the groups' own collectives, and free the buffers. A collective call, between two steps."""
        if self._hook is None:
            return
        self._hook.remove()
        self._hook = None
        sites.forget()


def _words(site: Site) -> list[Any]:
    return [site.op, site.rows, site.width, site.inner, site.dtype, site.ranks]


def _label(config: Config | None) -> str:
    if config is None:
        return "the group's own"
    return " ".join([str(config["engine"]), *([f"chunks={config['chunks']}"] if "chunks" in config else [])])

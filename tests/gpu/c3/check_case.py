"""Shared parts of the checks of ``autotune.overlap``: a layer, tensors, stored strategies, and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

import autotune
from autotune.domains.c3.group import Group, deploy_group
from autotune.domains.c3.scenario import Gemm, Scenario
from autotune.domains.c3.strategy import HostStrategy, Strategy, normalize, reject
from tests.gpu.c3.check import kernels

if TYPE_CHECKING:
    from autotune.domains.c3.deploy import Overlapped

_M, _N, _K = 512, 384, 256
_ROWS, _COLUMNS = 96, 130  # a rank's share of the moved data; the chunks of a share do not divide it

STORED: Mapping[str, tuple[Strategy | HostStrategy, ...]] = {
    "cuda": (
        Strategy(order="gemm_first"),
        Strategy(order="comm_first", engine="copy", reserve=8, chunks=3, priority="comm"),
        Strategy(order="gemm_first", engine="copy", ctas=32),
        Strategy(order="comm_first", engine="sm", ctas=8, reserve=8),
    ),
    "cpu": (
        HostStrategy(order="comm_first"),
        HostStrategy(order="gemm_first", engine="copy", copies=2, threads=1),
    ),
}
"""What is deployed, one after the other."""


class Case:
    """A check on this rank.

    Attributes:
        wrong: lines, one for each thing that is.
    """

    def __init__(self, group: Group, db: str) -> None:
        self.world, self.wrong = group, list[str]()
        self._told: set[str] = set()
        self._db, self._opened = db, 0
        self.device = group.device
        self.cuda = group.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.strategies = STORED[group.device.type]
        self.layer = torch.nn.Linear(_K, _N, device=self.device, dtype=self.dtype)

    @property
    def db(self) -> str:
        """The database of the overlap that was opened last."""
        return f"{self._db}.{self._opened}"

    def fitting(self, collective: str) -> list[Strategy | HostStrategy]:
        """The strategies of :data:`STORED` that a look-up deploys for a collective."""
        scenario, side = self.scenario(collective, 2), self.device.type
        return [s for s in self.strategies if reject(s.config(), scenario, side) is None]

    def scenario(self, collective: str, ranks: int, layout: str = "nt") -> Scenario:
        """The scenario of :meth:`overlap`."""
        dtype = "bf16" if self.cuda else "f32"
        numel = _ROWS * _COLUMNS * ranks
        return Scenario(Gemm(_M, _N, _K, dtype, layout), collective, numel * self.dtype.itemsize, ranks, dtype)

    @contextmanager
    def overlap(
        self,
        collective: str,
        strategy: Strategy | HostStrategy,
        compute: Callable[..., Any] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> Iterator[Overlapped]:
        """An overlap whose scenario has ``strategy`` in a separate database, closed at the end.

        Args:
            compute: the layer unless given; then a product as of ``(m, n, k)``.
        """
        mine = deploy_group(group, self.device)
        scenario = self.scenario(collective, mine.ranks, "nt" if compute is None else "nn")
        self._opened += 1
        if mine.rank == 0:
            self.store(scenario, strategy)
        mine.barrier()
        known = {} if compute is None else {"gemm": (_M, _N, _K)}
        run = self.layer if compute is None else compute
        op = autotune.overlap(run, collective, group=group, db=self.db, **known, **options)
        op.open(self.inputs(0), self.put(collective, 0, mine))
        match = op.match
        assert match is not None
        wanted = normalize(strategy.config(), scenario, self.device.type)
        if (str(match.level), match.config) != ("exact", wanted):
            self.tell(f"{collective}: {match.level} {match.label} instead of {strategy.label}: {match.reason}")
        self._check_sms(op, strategy)
        yield op
        op.close()

    def _check_sms(self, op: Overlapped, strategy: Strategy | HostStrategy) -> None:
        """Check that the computation leaves SMs free, where it may."""
        reserve, ready = getattr(strategy, "reserve", 0), op._ready
        sms: int = getattr(ready.whole, "sms", 0) if ready else 0
        every = torch.cuda.get_device_properties(self.device).multi_processor_count if reserve else 0
        if not (0 < sms <= every - reserve if reserve else sms == 0):
            self.tell(f"{strategy.label}: the computation had {sms} of {every} SMs")

    def store(self, scenario: Scenario, strategy: Strategy | HostStrategy) -> None:
        """Put a strategy down as if a search had found it."""
        from autotune.device import environment
        from autotune.domains.c3.task import identity_of
        from autotune.store import Store
        from autotune.store.records import Key, Schedule

        device, workload = str(self.device), scenario.workload()
        config = normalize(strategy.config(), scenario, self.device.type)
        with Store.open(self.db) as store:
            where = store.put_device(identity_of(workload, device))
            key = Key(store.put_workload(workload), where, store.put_environment(environment(device)), "by hand")
            artifact = kernels(self.world, scenario, config)
            schedule = Schedule(key, config, 1.0, {}, artifact, "autotune", workload.family, workload.extent)
            store.put_schedule(schedule)

    def inputs(self, step: int) -> Tensor:
        made = torch.Generator(self.device).manual_seed(1000 + step)
        return torch.randn(_M, _K, device=self.device, dtype=self.dtype, generator=made)

    def put(self, collective: str, step: int, mine: Group) -> Tensor:
        """This rank's input at a step."""
        return self.integers(collective, 100 * step + mine.rank, mine.ranks)

    def integers(self, collective: str, seed: int, ranks: int) -> Tensor:
        rows = _ROWS if collective == "all_gather" else _ROWS * ranks
        made = torch.Generator(self.device).manual_seed(seed)
        found = torch.randint(-8, 9, (rows, _COLUMNS), device=self.device, generator=made)
        return found.to(self.dtype)

    def same(self, what: str, got: Tensor | None, want: Tensor) -> None:
        """Compare what was moved: exactly."""
        if got is None or got.shape != want.shape:
            self.tell(f"{what}: {'nothing' if got is None else f'shape {list(got.shape)}'}")
        elif not torch.equal(got, want):
            self.tell(f"{what}: {int((got != want).sum())} of {want.numel()} elements are wrong")

    def near(self, what: str, got: Tensor | None, want: Tensor) -> None:
        """Compare what was computed."""
        tolerance = 2e-2 if self.cuda else 1e-4
        if got is None or not torch.allclose(got, want, rtol=tolerance, atol=tolerance):
            self.tell(f"{what}: {'nothing' if got is None else f'off by {float((got - want).abs().max()):g}'}")

    def tell(self, line: str) -> None:
        """Note what is wrong; of the steps of a loop only the first."""
        loop = line.partition(", step")[0]
        if loop not in self._told:
            self._told.add(loop)
            self.wrong.append(line)


def by_torch(collective: str, tensor: Tensor, mine: Group) -> Tensor:
    """This rank's result of ``collective``, by torch.distributed's all-gather and sums."""
    parts = [torch.empty_like(tensor) for _ in range(mine.ranks)]
    dist.all_gather(parts, tensor, group=mine.data)
    if collective == "all_gather":
        return torch.cat(parts)
    if collective == "all_to_all":
        return torch.cat([part.chunk(mine.ranks)[mine.rank] for part in parts])
    total = torch.stack(parts).sum(0)
    return total.chunk(mine.ranks)[mine.rank] if collective == "reduce_scatter" else total

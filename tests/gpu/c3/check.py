"""Check of every strategy: engines with all their options, verified in small and by the hundred.

:func:`batches` lists the checks; :func:`strategies` runs a batch on every rank, through
:meth:`autotune.domains.c3.measuring.ranks.Ranks.call`. What deployment makes of strategies is in
:mod:`tests.gpu.c3.check_deploy`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.domains.c3.scenario import COLLECTIVES, ITEMSIZE, REDUCING, Gemm, Scenario
from autotune.domains.c3.strategy import ENGINES, KINDS, normalize, reject
from autotune.errors import Unsupported
from autotune.task import Choice, Config, config_key

if TYPE_CHECKING:
    from autotune.domains.c3.group import Group
    from autotune.domains.c3.measuring.bench import RankBench, Run
    from autotune.task import Artifact

_SHARES = {"tiny": (1, "f32"), "odd": (5003, "bf16"), "large": (1_500_007, "bf16")}
"""Elements of a rank's share, and their type: fewer than a cache line, a prime that no chunk divides, megabytes."""
_GEMMS = {"tiny": (64, 64, 64, "nn"), "odd": (391, 264, 136, "nt"), "large": (4096, 4096, 1024, "nn")}
_SIZES = {"cuda": ("tiny", "odd", "large"), "cpu": ("tiny", "odd")}


@dataclass(frozen=True)
class Batch:
    """Strategies of one engine on one scenario."""

    engine: str
    size: str
    scenario: Scenario
    configs: tuple[Config, ...]

    @property
    def label(self) -> str:
        return f"{self.scenario.collective} {self.size} {self.engine}"

    def told(self, number: int) -> str:
        """The name of strategy ``number`` in a line."""
        config = self.configs[number]
        return f"{self.scenario.label} by {KINDS['cpu' if 'copies' in config else 'cuda'].of(config).label}"


def batches(ranks: int, side: str, *, seed: int = 0, variants: int = 2) -> list[Batch]:
    """The checks for ``ranks`` ranks.

    All ways to move the data are tried, each during the computation with some of the ways to share the device.

    Args:
        side: "cuda" or "cpu".
        seed: of the pairs of ways to share and ways to move.
        variants: ways to share for each way to move.
    """
    rng, out = random.Random(seed), []
    for size, op in product(_SIZES[side], COLLECTIVES):
        scenario = _scenario(op, size, ranks)
        for engine in ENGINES[side]:
            sharing = list(_sharing(side))
            rng.shuffle(sharing)
            turns = cycle(sharing)
            found: dict[str, Config] = {}
            for moving in _moving(side, engine, op in REDUCING):
                for _ in range(variants):
                    config = normalize(KINDS[side].of({**moving, **next(turns)}).config(), scenario, side)
                    if reject(config, scenario, side) is None:
                        found[config_key(config)] = config
            if found:
                out.append(Batch(engine, size, scenario, tuple(found.values())))
    return out


def _scenario(op: str, size: str, ranks: int) -> Scenario:
    share, dtype = _SHARES[size]
    numel = share * ranks
    if op == "all_reduce" and share > 1:
        numel -= 1  # does not divide among the ranks
    m, n, k, layout = _GEMMS[size]
    return Scenario(Gemm(m, n, k, dtype, layout), op, numel * ITEMSIZE[dtype], ranks, dtype)


def _moving(side: str, engine: str, reducing: bool) -> Iterator[Mapping[str, Choice]]:
    """An engine's options for moving data."""
    if side == "cpu":
        for copies in (1, 2, 3):
            yield {"engine": engine, "copies": copies}
    elif engine == "nccl":
        for ctas in (0, 8):
            yield {"engine": engine, "ctas": ctas}
    else:
        for chunks, ctas in product((1, 3) if reducing else (1,), (4, 16)):
            yield {"engine": engine, "chunks": chunks, "ctas": ctas}


def _sharing(side: str) -> Iterator[Mapping[str, Choice]]:
    """The ways to share the device with the computation."""
    yield {"order": "sequential"}
    for order in ("comm_first", "gemm_first"):
        if side == "cpu":
            for threads in (0, 1):
                yield {"order": order, "threads": threads}
            continue
        for reserve, priority in product((0, 8), ("equal", "comm")):
            yield {"order": order, "reserve": reserve, "priority": priority}


def strategies(
    group: Group, *, scenario: dict[str, Any], configs: Sequence[Config], seed: int, progress: str
) -> list[str]:
    """Verify strategies one after the other, on every rank through
    :meth:`autotune.domains.c3.measuring.ranks.Ranks.call`.

    What breaks the ranks (an illegal access, a rank that waits for ever) ends the call.

    Args:
        scenario: its JSON.
        progress: a file that gets a line of JSON for every strategy that has been verified: its part of the answer.

    Returns:
        What is wrong with each, or "", the same on all ranks.
    """
    from autotune.domains.c3.measuring.bench import open_bench

    bench, found = open_bench(Scenario.from_json(scenario), group), []
    for number, config in enumerate(configs):
        here = group.gather(_verified(bench, config, seed + number))
        bench.close()
        told = [f"rank {rank}: {what}" for rank, what in enumerate(here) if what]
        found.append(told[0] if told else "")
        if group.rank == 0:
            with Path(progress).open("a") as file:
                file.write(json.dumps(found[-1]) + "\n")
    return found


def _verified(bench: RankBench, config: Config, seed: int) -> str:
    """A strategy's error as far as this rank detects it, or nothing."""
    try:
        run = bench.load(config, kernels(bench.group, bench.scenario, config))
    except Unsupported as error:  # which every rank raises alike
        return f"unsupported: {error}"
    verdict = bench.verify(run, seed)
    return _otherwise(run, config) if verdict.ok else verdict.detail or "wrong result"


def _otherwise(run: Run, config: Config) -> str:
    """The difference between the strategy and its run, or nothing."""
    if run.collective is None or run.collective.engine != config["engine"]:
        return "another engine ran"
    reserve = int(config.get("reserve", 0))
    if reserve:
        import torch

        every = torch.cuda.get_device_properties(run.collective.input.device).multi_processor_count
        left: int = getattr(run.overlap, "sms", 0)
        if not 0 < left <= every - reserve:
            return f"the computation had {left} of {every} SMs"
    return ""


def kernels(group: Group, scenario: Scenario, config: Config) -> Artifact:
    """A strategy's compiled kernels, shared by all strategies with the same ones."""
    from autotune.domains.c3.task import build

    name = ("kernels to check", config["engine"], scenario.collective, scenario.dtype, scenario.ranks)
    return group.keep(name, lambda: build(scenario, config, str(group.device)))

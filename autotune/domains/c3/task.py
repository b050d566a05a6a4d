"""The search task of C3: a computation that overlaps a collective.

Several processes measure it, see :class:`autotune.domains.c3.measuring.ranks.Ranks`; each has a
:class:`autotune.domains.c3.measuring.bench.RankBench`.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

from autotune.device import DeviceIdentity, describe_cuda
from autotune.domains.c3.scenario import Scenario
from autotune.domains.c3.strategy import BASELINES, Strategy, by_rule, form_of, improper, kernel_of, normalize, reject
from autotune.errors import BuildError, Unsupported, UserError
from autotune.measure.policy import MIB, Policy
from autotune.space import Space, load_space
from autotune.task import Artifact, Choice, Config, Task, config_key
from autotune.workload import Workload

_GENERATOR = "c3-1"
_JOINED = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS")


class C3Task(Task):
    """Search task of a scenario on consecutive devices, starting with ``device``; see ``autotune.task.Task``.

    Raises:
        UserError: the workload's scenario is inconsistent.
    """

    def __init__(self, workload: Workload, device: str) -> None:
        self.workload, self.device = workload, device
        self.scenario = Scenario.from_json(workload.spec)
        self.side = side_of(device)

    @cached_property
    def sms(self) -> int:
        """Streaming multiprocessors of the device; 0 on a CPU."""
        return describe_cuda(self.device)[1] if self.side == "cuda" else 0

    def space(self, file: str | None = None) -> Space:
        space = load_space("c3", self.side, file)
        if self.side == "cpu":
            return space.restrict("threads", [c for c in space["threads"].choices if self._fits(c)] or [0])
        for name, least in (("engine", "nccl"), ("chunks", 1), ("reserve", 0)):
            possible = [c for c in space[name].choices if self._possible(name, c)]
            space = space.restrict(name, possible or [least])
        return space

    def _possible(self, name: str, choice: Choice) -> bool:
        """True if a choice of one parameter has an effect on this scenario, given the other parameters' defaults."""
        config = {**Strategy("comm_first", "copy").config(), name: choice}
        return self.normalize(config)[name] == choice and self.reject(config) is None

    def _fits(self, threads: Choice) -> bool:
        """True if a rank's share of the processors exceeds ``threads``; the choice 0 uses the full share."""
        from autotune.device import usable_processors

        return int(threads) < max(1, usable_processors() // self.scenario.ranks)

    def default(self) -> Config:
        return by_rule(self.scenario, self.side)[0]

    def seeds(self) -> Sequence[Config]:
        """Strategies by rule, and the baselines'."""
        plain = map(self.normalize, BASELINES[self.side].values())
        suggested = (self.adapt(c) for c in by_rule(self.scenario, self.side))
        found = [*(c for c in suggested if c is not None), *plain]
        return list({config_key(c): c for c in found}.values())

    def reject(self, config: Config) -> str | None:
        return reject(config, self.scenario, self.side, sms=self.sms)

    def normalize(self, config: Config) -> Config:
        return normalize(config, self.scenario, self.side)

    def adapt(self, config: Config) -> Config | None:
        fitted = self.space().project(config)
        if fitted is None:
            return None
        fitted = self.normalize(fitted)
        return fitted if self.reject(fitted) is None else None

    def build(self, config: Config) -> Artifact:
        return build(self.scenario, config, self.device)


def side_of(device: str) -> str:
    """ "cuda" or "cpu"."""
    return device.partition(":")[0]


def build(scenario: Scenario, config: Config, device: str, *, mean: bool = False) -> Artifact:
    """Build the kernel that a strategy needs, if any.

    Args:
        mean: of a reduce_scatter that makes means.

    Raises:
        BuildError: it does not compile, or the strategy, which may come from a database, is invalid.
    """
    if why := improper(config, side_of(device)):
        raise BuildError(why)
    if side_of(device) == "cpu":
        return Artifact("cpu", (), generator=_GENERATOR)
    target = describe_cuda(device)[0]
    if not kernel_of(config, scenario.collective):
        return Artifact(target, (), generator=_GENERATOR)
    from autotune.domains.c3.collectives.sm import build_sum

    try:
        kernel = build_sum(scenario.ranks, scenario.dtype, target, form_of(config), mean=mean)
    except Unsupported as error:
        raise BuildError(str(error)) from error
    return Artifact(target, (kernel,), generator=_GENERATOR)


def check_devices(ranks: int, device: str) -> None:
    """Check that the machine has enough GPUs for the ranks.

    Raises:
        UserError: there are fewer GPUs than ranks, counted from ``device`` on.
    """
    if side_of(device) == "cpu" or int(os.environ.get("WORLD_SIZE", "1")) >= ranks:  # torchrun's ranks have their own
        return
    import torch

    first = int(device.partition(":")[2] or 0)
    there = max(0, torch.cuda.device_count() - first)
    if there < ranks:
        after = f" from cuda:{first} on" if first else ""
        raise UserError(
            f"{ranks} ranks need {ranks} GPUs, but there are {there}{after}; use fewer ranks, or --device cpu"
        )


def identity_of(workload: Workload, device: str) -> DeviceIdentity:
    """Identity of one device, with the number of devices and the links between them."""
    from autotune.device import identify

    ranks = int(workload.spec["ranks"])
    one = identify(device)
    return replace(one, count=ranks, links=links(device, ranks) if one.kind == "cuda" else "")


@lru_cache(maxsize=16)
def links(device: str, ranks: int) -> str:
    """The kinds of links between ``ranks`` GPUs, starting with ``device``. Never fails.

    Names are those of nvidia-smi ("NV18"; "NV4+SYS" if they differ), or "P2P" or "none" if its output lacks them.
    """
    first = int(device.partition(":")[2] or 0)
    try:
        text = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True, timeout=30
        ).stdout
        found = parse_topology(text, visible(os.environ.get("CUDA_VISIBLE_DEVICES"), first, ranks))
    except (OSError, subprocess.SubprocessError):
        found = ""
    return found or _peers(first, ranks)


def visible(setting: str | None, first: int, ranks: int) -> list[int] | None:
    """The machine's indices of ``ranks`` GPUs, starting with this process's index ``first``.

    None if they are unknown (GPUs are named by UUID, or each rank sees only its own).
    """
    if setting is None:
        return list(range(first, first + ranks))
    names = [name.strip() for name in setting.split(",")]
    if not all(name.isdecimal() for name in names) or len(names) < first + ranks:
        return None
    return [int(name) for name in names[first : first + ranks]]


def parse_topology(text: str, chosen: list[int] | None) -> str:
    """The kinds of links between the ``chosen`` GPUs in the matrix of ``nvidia-smi topo -m``.

    Uses all GPUs if the matrix lacks a chosen one; returns "" if it has no links.
    """
    rows: dict[int, list[str]] = {}
    columns = 0
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        words = line.split()
        if words and re.fullmatch(r"GPU\d+", words[0]):
            if words[1:] and re.fullmatch(r"GPU\d+", words[1]):  # the table's header
                columns = sum(bool(re.fullmatch(r"GPU\d+", w)) for w in words)
            else:
                rows[int(words[0][3:])] = words[1 : 1 + columns]
    among = chosen if chosen and all(gpu in rows for gpu in chosen) else sorted(rows)
    kinds = {
        rows[a][b]
        for a in among
        for b in among
        if a != b and b < len(rows.get(a, [])) and _JOINED.fullmatch(rows[a][b])
    }
    return "+".join(sorted(kinds))


def _peers(first: int, ranks: int) -> str:
    try:
        import torch

        last = min(first + ranks, torch.cuda.device_count())
        pairs = [(a, b) for a in range(first, last) for b in range(first, last) if a != b]
        return "P2P" if pairs and all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs) else "none"
    except Exception:  # the links are unknown
        return "none"


CUDA = Policy(
    method="ranks-graph",
    screen_repeats=9,
    screen_s=0.4,
    repeat_repeats=20,
    repeat_top=4,
    final_rounds=20,
    final_top=3,
    timeout_s=20.0,
    load_s=60.0,
    wake_s=0.05,
)
CPU = replace(CUDA, method="ranks-cpu", warmup=2, cold_bytes=16 * MIB)


def policy(device: str) -> Policy:
    """The policy for scenarios: every sample starts on all ranks at once, and the slowest rank's time counts.

    Samples are long, hence few, and have little noise, since a rank has exclusive use of its device.
    """
    return CUDA if side_of(device) == "cuda" else CPU

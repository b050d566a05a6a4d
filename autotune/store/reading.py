"""Look-ups: choosing a schedule from a database (``Store``) or a frozen file (``Snapshot``).

:class:`Reader` has the choice for both; each reads rows in its own way.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from autotune.device import DeviceIdentity, Environment
from autotune.store.connection.forks import FORKS
from autotune.store.records import Schedule, Verdict
from autotune.workload import Workload

Match = Literal["strict", "loose", "ignore"]
"""Required match between the software that a schedule was tuned with and the current one. "strict" requires equal
versions of everything, "loose" equal minor versions of torch and CUDA, "ignore" accepts any. Equal software is
preferred in each case, then equal minor versions."""

Where = dict[str, Any]
"""Columns of schedules or verdicts with their required values. Two further names are allowed: "loose" (the loose
fingerprint of the environment) and "extents" (the smallest and the largest extent)."""


class Near(NamedTuple):
    """A tuned workload of a family, its rows, and the time of its newest schedule; in a snapshot, ``when`` is a number
    that differs between snapshots."""

    workload: str
    extent: int
    when: float


class Scope(NamedTuple):
    """Parts of a database: the schedules of families or workloads, and the verdicts on graphs, by fingerprint."""

    names: tuple[str, ...]
    graphs: tuple[str, ...]


def state_of_file(path: Path, scope: Scope) -> str:
    """A digest of the schedules and verdicts of an SQLite database in ``scope``; another than :meth:`Reader.state`'s.

    Raises:
        sqlite3.Error: the file cannot be read.
    """
    names, graphs = (",".join("?" * len(part)) for part in scope)
    uri = f"{path.as_uri()}?mode=ro"
    with FORKS.transaction(), contextlib.closing(sqlite3.connect(uri, uri=True, timeout=1.0)) as connection:
        query = f"SELECT * FROM autotune_schedules WHERE family IN ({names}) OR workload IN ({names})"
        found = sorted(map(repr, connection.execute(query, (*scope.names, *scope.names))))
        query = f"SELECT * FROM autotune_verdicts WHERE graph IN ({graphs})"
        found += sorted(map(repr, connection.execute(query, scope.graphs)))
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


class Listed(NamedTuple):
    """A schedule without its artifact, and its reader's handle for loading the artifact."""

    schedule: Schedule
    artifact: Any


class Reader(ABC):
    """The interface of look-ups. Fingerprints are those of workloads, devices and (strict) environments."""

    readonly: bool
    lost: str
    """The reason why the reader was given up, or "". It is not read after that."""
    trusted: bool
    """True if a trusted key signed it: its contents were checked when it was written."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name for messages."""

    @abstractmethod
    def tuned_under(self, workload: str) -> list[tuple[str, str]]:
        """Device and (strict) environment of every schedule of a workload, unordered."""

    @abstractmethod
    def get_workloads(self, fingerprints: Iterable[str]) -> dict[str, Workload]:
        """The undamaged stored workloads among these, by fingerprint."""

    @abstractmethod
    def fingerprints(self, prefix: str, limit: int) -> list[str]:
        """At most ``limit`` fingerprints of workloads with this beginning."""

    @abstractmethod
    def get_devices(self, fingerprints: Iterable[str]) -> dict[str, DeviceIdentity]:
        """The undamaged stored devices among these, by fingerprint."""

    @abstractmethod
    def get_environments(self, fingerprints: Iterable[str]) -> dict[str, Environment]:
        """The undamaged stored environments among these, by strict fingerprint."""

    @abstractmethod
    def state(self, scope: Scope | None = None) -> str:
        """A digest of the schedules and verdicts: of all, or at least of those in ``scope``."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _listed(self, where: Where, environment: Environment | None = None, *, artifacts: bool = True) -> list[Listed]:
        """The undamaged schedules, without those that failed in a deployment with ``environment``."""

    @abstractmethod
    def _loaded(self, listed: Listed) -> Schedule | None:
        """A schedule with its artifact, with every SHA-256 checked; None if the artifact is damaged."""

    @abstractmethod
    def _around(self, where: Where, extent: int, limit: int) -> list[tuple[int, str]]:
        """Extent and workload of the ``limit`` nearest on each side of an extent."""

    @abstractmethod
    def _decided(self, workloads: Sequence[str]) -> Mapping[str, float]:
        """Each workload's :attr:`Near.when`."""

    @abstractmethod
    def _verdicts(self, where: Where) -> list[Verdict]:
        """The undamaged verdicts."""

    def get_workload(self, fingerprint: str) -> Workload | None:
        """The workload with this (whole) fingerprint; None if it is not stored or damaged."""
        return self.get_workloads([fingerprint]).get(fingerprint)

    def get_device(self, fingerprint: str) -> DeviceIdentity | None:
        """The device with this fingerprint; None if it is not stored or damaged."""
        return self.get_devices([fingerprint]).get(fingerprint)

    def get_environment(self, fingerprint: str) -> Environment | None:
        """The environment with this strict fingerprint; None if it is not stored or damaged."""
        return self.get_environments([fingerprint]).get(fingerprint)

    def get_schedule(
        self, workload: str, device: str, environment: Environment | str | None = None, *, match: Match = "strict"
    ) -> Schedule | None:
        """The schedule to deploy for a workload on a device, with its artifact, and with every SHA-256 checked.

        Args:
            workload, device: fingerprints.
            environment: the current software, or its strict fingerprint if stored; None accepts any.

        Returns:
            The fastest fitting schedule of the measuring policy with the newest decision, since numbers of different
            policies cannot be compared; predicted schedules last. A database skips a damaged one, with a warning and an
            entry in ``problems``; a damaged snapshot is given up.
        """
        found = map(self._loaded, self._preferred({"workload": workload, "device": device}, environment, match))
        return next((s for s in found if s is not None), None)

    def family_schedules(
        self,
        family: str,
        device: str,
        environment: Environment | str | None = None,
        *,
        match: Match = "strict",
        artifacts: bool = True,
        extents: tuple[float, float] | None = None,
    ) -> list[Schedule]:
        """The schedule of each workload of a family on a device, by row extent; arguments as in :meth:`get_schedule`.

        Args:
            artifacts: load them. If False, ``artifact`` is None, and only :meth:`get_schedule` finds damaged ones.
            extents: the smallest and the largest number of rows.
        """
        if not family:
            return []
        where: Where = {"family": family, "device": device}
        if extents is not None:
            where["extents"] = (math.ceil(extents[0]), math.floor(extents[1]))
        best: dict[str, Schedule] = {}
        for listed in self._preferred(where, environment, match, artifacts=artifacts):
            name = listed.schedule.key.workload
            if name not in best and (s := self._loaded(listed) if artifacts else listed.schedule) is not None:
                best[name] = s
        return sorted(best.values(), key=lambda s: s.extent)

    def nearest(
        self, family: str, device: str, environment: Environment, extent: int, *, match: Match = "strict", limit: int
    ) -> list[Near]:
        """At most ``limit`` tuned workloads of a family with the nearest numbers of rows by ratio, nearest first.

        It reads two ranges of an index, for any number of schedules. Damage is only detected when a schedule is read.
        """
        where = self._fitting(environment, match)
        if not family or where is None:
            return []
        found = self._around({"family": family, "device": device, **where}, extent, limit)
        found.sort(key=lambda f: abs(math.log(max(f[0], 1) / max(extent, 1))))
        when = self._decided([workload for _, workload in found[:limit]])
        return [Near(workload, rows, when.get(workload, 0.0)) for rows, workload in found[:limit]]

    def schedules(
        self, device: str | None = None, *, workload: str | None = None, artifacts: bool = False
    ) -> list[Schedule]:
        """Every stored schedule of a device and a workload (fingerprints; None for all), fastest first.

        Args:
            artifacts: load the artifacts too.
        """
        given = {"device": device, "workload": workload}
        where = {name: value for name, value in given.items() if value is not None}
        found = sorted(self._listed(where, artifacts=artifacts), key=lambda f: (f[0].latency_us, -f[0].when))
        made = (self._loaded(listed) if artifacts else listed.schedule for listed in found)
        return [s for s in made if s is not None]

    def get_verdict(
        self, graph: str, device: str, environment: Environment, mode: str, *, match: Match = "loose"
    ) -> Verdict | None:
        """The verdict to apply to a graph's step, or None: the newest one of those with the nearest software.

        Args:
            graph, device: fingerprints.
            match: required match of the software, as in ``get_schedule``.
        """
        where = self._fitting(environment, match)
        if where is None:
            return None
        found = self._verdicts({"graph": graph, "device": device, "mode": mode, **where})
        away = self._distances({v.environment for v in found}, environment, match)
        return min(found, key=lambda v: (away[v.environment], -v.when), default=None)

    def verdicts(self) -> list[Verdict]:
        """All stored verdicts, newest first; those of one step are adjacent."""
        return sorted(self._verdicts({}), key=lambda v: (-v.when, v.mode, v.graph))

    def _preferred(
        self, where: Where, environment: Environment | str | None, match: Match, *, artifacts: bool = True
    ) -> list[Listed]:
        """The fitting schedules; the first one is deployed."""
        fitting = self._fitting(environment, match)
        if fitting is None:
            return []
        here = environment if isinstance(environment, Environment) else None
        found = self._listed({**where, **fitting}, here, artifacts=artifacts)
        away = self._distances({listed.schedule.key.environment for listed in found}, environment, match)
        latest: dict[tuple[str, str], float] = {}
        for s, _ in found:
            policy = (s.key.workload, s.key.policy)
            latest[policy] = max(s.when, latest.get(policy, s.when))

        def order(listed: Listed) -> tuple[float, ...]:
            s = listed.schedule
            return s.predicted, away[s.key.environment], -latest[s.key.workload, s.key.policy], s.latency_us, -s.when

        return sorted(found, key=order)

    def _fitting(self, environment: Environment | str | None, match: Match) -> Where | None:
        """The condition on rows with matching software; None if no row can match."""
        if environment is None or match == "ignore":
            return {}
        if match == "strict":
            return {"environment": environment if isinstance(environment, str) else environment.strict}
        wanted = self.get_environment(environment) if isinstance(environment, str) else environment
        return None if wanted is None else {"loose": wanted.loose}

    def _distances(self, found: set[str], environment: Environment | str | None, match: Match) -> dict[str, int]:
        """Ranks of matching software by strict fingerprint: 0 for equal, 1 for equal minor versions, 2 for others."""
        if environment is None:
            return dict.fromkeys(found, 0)
        wanted = environment if isinstance(environment, str) else environment.strict
        if match != "ignore":
            return {name: int(name != wanted) for name in found}
        known = self.get_environments({*found, wanted})
        if isinstance(environment, Environment):
            known[wanted] = environment
        minor = {name for name, e in known.items() if wanted in known and e.loose == known[wanted].loose}
        return {name: 0 if name == wanted else 1 if name in minor else 2 for name in found}

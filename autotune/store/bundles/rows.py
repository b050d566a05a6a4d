"""A bundle's rows: what may be in them, checked before any of it comes near a database."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.device import DeviceIdentity, Environment
from autotune.store.codec import artifact_from, artifact_id, config_from
from autotune.store.health.damage import Damaged, cost, latencies, mapping, moment, number, whole
from autotune.store.health.step_record import left_of, step_record
from autotune.store.records import Schedule, Verdict
from autotune.task import config_key
from autotune.workload import Workload, canonical_json

TABLES = ("workloads", "devices", "environments", "artifacts", "schedules")
"""Each refers to those before it only."""

OPTIONAL = ("verdicts",)
"""Tables that bundles of earlier versions lack, and that these pass over; they refer to those above."""


@dataclass
class Tables:
    """What a bundle holds, as the columns of its rows, ready to be inserted; ``code`` by SHA-256."""

    workloads: list[dict[str, Any]] = field(default_factory=list)
    devices: list[dict[str, Any]] = field(default_factory=list)
    environments: list[dict[str, Any]] = field(default_factory=list)
    artifacts: list[dict[str, Any]] = field(default_factory=list)
    schedules: list[dict[str, Any]] = field(default_factory=list)
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    code: set[str] = field(default_factory=set)
    _configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    _known: dict[str, set[str]] = field(default_factory=dict)
    now: float = field(default_factory=time.time)

    @property
    def configs(self) -> Iterable[dict[str, Any]]:
        return ({"fingerprint": key, "params": params} for key, params in self._configs.items())

    def add(self, table: str, row: Any, blobs: Mapping[str, bytes]) -> None:
        """Take in a row of ``table``. Raises Damaged, or one of ``damage.BROKEN``."""
        adders: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "workloads": self._workload,
            "devices": self._device,
            "environments": self._environment,
            "artifacts": lambda row: self._artifact(row, blobs),
            "schedules": self._schedule,
            "verdicts": self._verdict,
        }
        columns = adders[table](mapping(row, "row"))
        known = self._known.setdefault(table, set())
        names = VERDICT_KEY if table == "verdicts" else SCHEDULE_KEY
        key = columns.get("fingerprint") or canonical_json([columns[n] for n in names])
        if key in known:
            raise Damaged(f"{table}: {str(key)[:12]} is there twice")
        known.add(key)
        getattr(self, table).append(columns)

    def _workload(self, row: dict[str, Any]) -> dict[str, Any]:
        whole(row.get("extent", 0), "number of rows")
        mapping(row["spec"], "spec")
        workload = Workload.from_json(row)
        canonical_json(mapping(dict(workload.source), "source"))
        texts((workload.kind, 32), (workload.family, 64), (workload.label, None))
        return {**workload.to_json(), "fingerprint": workload.fingerprint, "created": self.now}

    def _device(self, row: dict[str, Any]) -> dict[str, Any]:
        for name in ("units", "memory_mib", "threads", "count"):
            whole(row.get(name, 1), name)
        device = DeviceIdentity.from_json(row)
        texts((device.kind, 32), (device.name, None))
        identity = device.to_json()
        return {"fingerprint": device.fingerprint, "kind": device.kind, "name": device.name, "identity": identity,
                "created": self.now}  # fmt: skip

    def _environment(self, row: dict[str, Any]) -> dict[str, Any]:
        environment = Environment.from_json(row)
        return {"fingerprint": environment.strict, "loose": environment.loose, "versions": environment.to_json(),
                "created": self.now}  # fmt: skip

    def _artifact(self, row: dict[str, Any], blobs: Mapping[str, bytes]) -> dict[str, Any]:
        fingerprint = artifact_id(row)
        artifact = artifact_from(fingerprint, row, blobs)
        texts((artifact.target, 32), (artifact.generator, None))
        self.code.update(k.sha256 for k in artifact.kernels if k.code)
        columns = {name: row[name] for name in ("target", "generator", "kernels", "scratch")}
        return {"fingerprint": fingerprint, **columns, "created": self.now}

    def _schedule(self, row: dict[str, Any]) -> dict[str, Any]:
        columns, config = schedule_from(row)
        for table, name in (("workloads", "workload"), ("devices", "device"), ("environments", "environment")):
            if columns[name] not in self._known.get(table, ()):
                raise Damaged(f"the schedule of {columns['workload'][:12]} refers to what the bundle does not hold")
        if columns["artifact"] is not None and columns["artifact"] not in self._known.get("artifacts", ()):
            raise Damaged(f"the schedule of {columns['workload'][:12]} refers to what the bundle does not hold")
        if config is not None:
            self._configs[columns["config"]] = config
        return columns

    def _verdict(self, row: dict[str, Any]) -> dict[str, Any]:
        columns = verdict_from(row)
        for table, name in (("devices", "device"), ("environments", "environment")):
            if columns[name] not in self._known.get(table, ()):
                raise Damaged(f"the verdict on {columns['graph'][:12]} refers to what the bundle does not hold")
        return columns


SCHEDULE_KEY = ("workload", "device", "environment", "policy")
VERDICT_KEY = ("graph", "device", "environment", "mode")


def schedule_row(s: Schedule, artifact: str | None) -> dict[str, Any]:
    """A schedule as a bundle has it; ``artifact`` is its artifact's id."""
    return {
        "workload": s.key.workload,
        "device": s.key.device,
        "environment": s.key.environment,
        "policy": s.key.policy,
        "config": s.config,
        "latency_us": s.latency_us,
        "baselines": dict(s.baselines),
        "artifact": artifact,
        "winner": s.winner,
        "family": s.family,
        "extent": s.extent,
        "when": s.when,
        "others": s.others,
        "space": s.space,
    }


def schedule_from(row: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The columns of a schedule, and its configuration. Raises Damaged, or one of ``damage.BROKEN``."""
    config = None if row["config"] is None else config_from(row["config"], config_key(row["config"]))
    artifact, others = row["artifact"], row.get("others")
    columns = {
        **{name: row[name] for name in SCHEDULE_KEY},
        "config": None if config is None else config_key(config),
        "artifact": artifact,
        "latency_us": cost(row["latency_us"]),
        "baselines": latencies(row["baselines"]),
        "winner": row["winner"],
        "family": row["family"],
        "extent": whole(row["extent"], "number of rows"),
        "others": None if others is None else number(others, "number of busy processors"),
        "space": row.get("space", ""),
        "created": moment(row["when"]),
    }
    names = [columns[name] for name in (*SCHEDULE_KEY, "family", "space")] + ([] if artifact is None else [artifact])
    texts((columns["winner"], 32), *((name, 64) for name in names))
    return columns, config


def verdict_row(v: Verdict) -> dict[str, Any]:
    """A verdict as a bundle has it."""
    return {**{n: getattr(v, n) for n in VERDICT_KEY}, "left": list(v.left), "record": dict(v.record), "when": v.when}


def verdict_from(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a verdict. Raises Damaged, or one of ``damage.BROKEN``."""
    left, record = left_of(row["left"]), step_record(row["record"])
    canonical_json(record)
    columns = {name: row[name] for name in VERDICT_KEY}
    texts(*((text, 64) for text in (*columns.values(), *left)))
    return {**columns, "left": list(left), "record": record, "created": moment(row["when"])}


def texts(*given: tuple[Any, int | None]) -> None:
    """See that texts, each with its greatest length (None: it has none), fit into their columns.

    Raises:
        Damaged: one is no text, is too long, or holds what PostgreSQL or UTF-8 has no place for.
    """
    for value, longest in given:
        if not isinstance(value, str):
            raise Damaged(f"{value!r:.40} is no text")
        if longest is not None and len(value) > longest:
            raise Damaged(f"{value[:20]!r} is longer than {longest} characters")
        if "\0" in value or any("\ud800" <= ch <= "\udfff" for ch in value):
            raise Damaged(f"{value[:20]!r} holds a character that no database takes")

"""Conversion between records and rows.

A row has its columns as attributes. Databases and snapshots are read by the same functions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

from autotune.device import DeviceIdentity, Environment
from autotune.errors import printable
from autotune.store.damage import (
    LEAST_COST,
    MOST_COST,
    Damaged,
    cost,
    figures,
    integer,
    latencies,
    left_of,
    mapping,
    moment,
    number,
    step_record,
    text,
)
from autotune.store.records import Calibration, Key, Measurement, Schedule, Verdict
from autotune.task import Artifact, Config, Kernel, Status, config_key
from autotune.workload import Workload, digest


def artifact_json(artifact: Artifact) -> dict[str, Any]:
    """An artifact with the SHA-256 of its code in place of the code (None for a kernel without code)."""

    def described(k: Kernel) -> dict[str, Any]:
        sha256 = k.sha256 if k.code else None
        return {"entry": k.entry, "sha256": sha256, "launch": dict(k.launch), "resources": dict(k.resources)}

    return {
        "target": artifact.target,
        "generator": artifact.generator,
        "kernels": [described(k) for k in artifact.kernels],
        "scratch": [[storage, elements] for storage, elements in artifact.scratch],
    }


def artifact_blobs(artifact: Artifact) -> dict[str, bytes]:
    """The artifact's code by SHA-256, each once."""
    return {k.sha256: k.code for k in artifact.kernels if k.code}


def artifact_id(data: Mapping[str, Any]) -> str:
    """SHA-256 over :func:`artifact_json`: equal for equal artifacts, and a checksum of the launch data."""
    return digest({"artifact": data})


def artifact_from(fingerprint: str, data: Mapping[str, Any], blobs: Mapping[str, bytes]) -> Artifact:
    """Rebuild an artifact, checking every checksum.

    Raises:
        Damaged: the launch data or a kernel's code are missing or changed, or have a form of another version.
    """
    if artifact_id(data) != fingerprint:
        raise Damaged(f"artifact {fingerprint[:12]}: its launch data does not match its SHA-256")
    try:
        return _artifact(fingerprint, data, blobs)
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"artifact {fingerprint[:12]}: stored by another version of autotune ({error})") from error


def _artifact(fingerprint: str, data: Mapping[str, Any], blobs: Mapping[str, bytes]) -> Artifact:
    def made(k: Mapping[str, Any]) -> Kernel:
        sha256, entry = k["sha256"], text(k["entry"], "entry")
        if sha256 is not None and sha256 not in blobs:
            raise Damaged(f"artifact {fingerprint[:12]}: the code of kernel {entry!r} is missing")
        code = b"" if sha256 is None else blobs[sha256]
        if sha256 is not None and hashlib.sha256(code).hexdigest() != sha256:
            raise Damaged(f"artifact {fingerprint[:12]}: the code of kernel {entry!r} fails its SHA-256")
        return Kernel(entry, code, mapping(k["launch"], "launch data"), mapping(k["resources"], "resources"))

    def scratch(storage: Any, elements: Any, *counter: Any) -> tuple[str, int]:
        # Earlier versions wrote a third element, true if the memory was the counter of a grid barrier.
        if counter not in ((), (False,)):
            raise ValueError("its kernels have grid barriers")
        return str(storage), int(elements)

    return Artifact(
        target=text(data["target"], "target"),
        kernels=tuple(made(k) for k in data["kernels"]),
        scratch=tuple(scratch(*described) for described in data["scratch"]),
        generator=text(data["generator"], "generator"),
    )


def key_values(key: Key) -> dict[str, str]:
    """The four columns of a key."""
    return dict(vars(key))


def key_from(row: Any) -> Key:
    return Key(row.workload, row.device, row.environment, row.policy)


def measurement_values(m: Measurement, config: str, now: float) -> dict[str, Any]:
    """The columns of a measurement.

    Raises:
        ValueError: an ok measurement without a valid latency, which would count as the best.
    """
    ok = m.status == Status.OK
    if ok and not (m.latency_us is not None and LEAST_COST <= m.latency_us <= MOST_COST):
        raise ValueError(f"a measurement with status ok needs a latency above 0, not {m.latency_us!r}")
    error = m.error
    if error is not None and math.isnan(error):
        error = math.inf  # SQLite would store NaN as NULL, which means not verified
    return {
        **key_values(m.key),
        "config": config,
        "stage": m.stage,
        "status": str(m.status),
        "latency_us": m.latency_us if ok else None,
        "samples": [s for s in m.samples if math.isfinite(s)],
        "noise": m.noise if ok and m.noise is not None and math.isfinite(m.noise) else None,
        "error": error,
        # PostgreSQL's text cannot contain NUL, and many megabytes of a compiler's output are useless.
        "reason": m.reason.replace("\0", "\\0")[:20_000],
        "run": m.run,
        "compile_s": m.compile_s,
        "measure_s": m.measure_s,
        "created": m.when or now,
        "metrics": {name: figure for name, figure in m.metrics.items() if math.isfinite(figure)},
    }


def measurement_from(row: Any) -> Measurement:
    """A measurement from a row of measurements joined with its configuration (``params``).

    Raises:
        Damaged: the configuration does not match its fingerprint, or a value is invalid for its column.
    """
    ok = row.status == Status.OK
    latency = cost(row.latency_us) if ok else None
    if not isinstance(row.samples, list):
        raise Damaged("its samples are unreadable")
    return Measurement(
        key=key_from(row),
        config=config_from(row.params, row.config),
        status=Status(row.status),
        stage=str(row.stage),
        latency_us=latency,
        samples=tuple(number(s, "sample") for s in row.samples),
        noise=row.noise if row.noise is None else number(row.noise, "noise"),
        error=row.error if row.error is None else float(row.error),
        reason=str(row.reason),
        run=str(row.run),
        compile_s=number(row.compile_s, "compile time"),
        measure_s=number(row.measure_s, "measuring time"),
        when=moment(row.created),
        metrics=figures(row.metrics),
    )


def config_from(params: Mapping[str, Any], fingerprint: str) -> Config:
    """A configuration from JSON.

    Args:
        fingerprint: the key that it is stored under.

    Raises:
        Damaged: not a flat object of numbers, strings and bools, or not the one with this fingerprint.
    """
    if not isinstance(params, Mapping) or not all(isinstance(v, (int, str, bool, float)) for v in params.values()):
        raise Damaged(f"configuration {fingerprint[:12]} is not a flat JSON object")
    try:
        same = config_key(params) == fingerprint
    except ValueError:  # NaN, which no search stores
        same = False
    if not same:
        raise Damaged(f"configuration {fingerprint[:12]} does not match its SHA-256")
    return dict(params)


def workload_values(workload: Workload, now: float) -> dict[str, Any]:
    """The columns of a workload."""
    return {"fingerprint": workload.fingerprint, **workload.to_json(), "created": now}


def workload_from(row: Any) -> Workload:
    """A workload from a row with the columns ``w_kind``, ``w_spec`` and so on.

    Raises:
        Damaged: the workload does not match the fingerprint that it is stored under.
    """
    found = Workload(
        kind=str(row.w_kind),
        spec=mapping(row.w_spec, "spec"),
        family=str(row.w_family),
        extent=integer(row.w_extent, "number of rows"),
        label=printable(str(row.w_label)),
        source=mapping(row.w_source, "source"),
    )
    try:
        same = found.fingerprint == row.w_fingerprint
    except ValueError:  # NaN, which no workload has
        same = False
    if not same:
        raise Damaged("the workload does not match its SHA-256")
    return found


def device_values(device: DeviceIdentity, now: float) -> dict[str, Any]:
    """The columns of a device."""
    identity = device.to_json()
    return {"fingerprint": device.fingerprint, "kind": device.kind, "name": device.name, "identity": identity,
            "created": now}  # fmt: skip


def device_from(fingerprint: str, data: Any) -> DeviceIdentity:
    """A device from its JSON; raises Damaged if it does not match its fingerprint."""
    device = DeviceIdentity.from_json(mapping(data, "identity"))
    if device.fingerprint != fingerprint:
        raise Damaged("it does not match its SHA-256")
    return device


def environment_values(environment: Environment, now: float) -> dict[str, Any]:
    """The columns of an environment."""
    versions = environment.to_json()
    return {"fingerprint": environment.strict, "loose": environment.loose, "versions": versions, "created": now}


def environment_from(fingerprint: str, data: Any) -> Environment:
    """An environment from its JSON; raises Damaged if it does not match its fingerprint."""
    environment = Environment.from_json(mapping(data, "versions"))
    if environment.strict != fingerprint:
        raise Damaged("it does not match its SHA-256")
    return environment


def schedule_values(s: Schedule, artifact: str | None, now: float) -> dict[str, Any]:
    """The columns of a schedule; ``artifact`` is its artifact's id."""
    return {
        **key_values(s.key),
        "config": None if s.config is None else config_key(s.config),
        "artifact": artifact,
        "latency_us": s.latency_us,
        "baselines": dict(s.baselines),
        "winner": s.winner,
        "family": s.family,
        "extent": s.extent,
        "others": s.others,
        "space": s.space,
        "created": s.when or now,
    }


def schedule_from(row: Any, artifact: Artifact | None = None) -> Schedule:
    """A schedule from its row, joined with its configuration (``params``). Raises Damaged."""
    return Schedule(
        key=key_from(row),
        config=None if row.config is None else config_from(row.params, row.config),
        latency_us=cost(row.latency_us),
        baselines=latencies(row.baselines),
        artifact=artifact,
        winner=printable(str(row.winner)),
        family=str(row.family),
        extent=integer(row.extent, "number of rows"),
        when=moment(row.created),
        others=None if row.others is None else number(row.others, "number of busy processors"),
        space=str(row.space),
    )


def verdict_values(v: Verdict, now: float) -> dict[str, Any]:
    """The columns of a verdict."""
    return {"graph": v.graph, "device": v.device, "environment": v.environment, "mode": v.mode, "left": list(v.left),
            "record": dict(v.record), "created": v.when or now}  # fmt: skip


def verdict_from(row: Any) -> Verdict:
    """A verdict from its row; raises Damaged."""
    return Verdict(
        str(row.graph), str(row.device), str(row.environment), str(row.mode), left_of(row.left),
        step_record(row.record), moment(row.created),
    )  # fmt: skip


def calibration_values(c: Calibration, now: float) -> dict[str, Any]:
    """The columns of a calibration."""
    return {"device": c.device, "kind": c.kind, "figures": dict(c.figures), "created": c.when or now}


def calibration_from(row: Any) -> Calibration:
    """A calibration from its row; raises Damaged."""
    found = {str(name): number(value, str(name)) for name, value in mapping(row.figures, "figures").items()}
    return Calibration(str(row.device), str(row.kind), found, moment(row.created))


def finite_json(value: Any) -> Any:
    """``value`` as JSON that can be read back: infinities and NaN become None, lone surrogates are escaped."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {finite_json(str(k)): finite_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_json(v) for v in value]
    return value

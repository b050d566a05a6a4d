"""Between records and rows: artifacts by content, measurements and schedules from joined rows."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.errors import printable
from autotune.store.health.damage import LEAST_COST, MOST_COST, cost, figures, mapping, moment, number, whole
from autotune.store.health.damage import Damaged as Damaged
from autotune.store.records import Key, Measurement
from autotune.task import Artifact, Config, Kernel, Status, config_key
from autotune.workload import Workload, digest


def artifact_json(artifact: Artifact) -> dict[str, Any]:
    """An artifact without its code, which is named by SHA-256 (None for a kernel that has none)."""
    return {
        "target": artifact.target,
        "generator": artifact.generator,
        "kernels": [
            {
                "entry": k.entry,
                "sha256": k.sha256 if k.code else None,
                "launch": dict(k.launch),
                "resources": dict(k.resources),
            }
            for k in artifact.kernels
        ],
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
        Damaged: the launch data or a kernel's code is not what was stored, or is gone, or is of a form that this
            version does not know.
    """
    if artifact_id(data) != fingerprint:
        raise Damaged(f"artifact {fingerprint[:12]}: its launch data does not match its SHA-256")
    try:
        return _artifact(fingerprint, data, blobs)
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"artifact {fingerprint[:12]}: stored by another version of autotune ({error})") from error


def _artifact(fingerprint: str, data: Mapping[str, Any], blobs: Mapping[str, bytes]) -> Artifact:
    kernels = []
    for k in data["kernels"]:
        sha256, code = k["sha256"], b""
        if sha256 is not None:
            if sha256 not in blobs:
                raise Damaged(f"artifact {fingerprint[:12]}: the code of kernel {k['entry']!r} is missing")
            code = blobs[sha256]
            if hashlib.sha256(code).hexdigest() != sha256:
                raise Damaged(f"artifact {fingerprint[:12]}: the code of kernel {k['entry']!r} fails its SHA-256")
        launch, resources = mapping(k["launch"], "launch data"), mapping(k["resources"], "resources")
        kernels.append(Kernel(entry=_text(k["entry"]), code=code, launch=launch, resources=resources))
    return Artifact(
        target=_text(data["target"]),
        kernels=tuple(kernels),
        scratch=tuple(_scratch(described) for described in data["scratch"]),
        generator=_text(data["generator"]),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value


def _scratch(described: Sequence[Any]) -> tuple[str, int]:
    """Earlier versions wrote a third element, true where the memory was the counter of a grid barrier."""
    storage, elements, *counter = described
    if counter not in ([], [False]):
        raise ValueError("its kernels have grid barriers")
    return str(storage), int(elements)


def key_values(key: Key) -> dict[str, str]:
    """The four columns that hold a key."""
    return {
        "workload": key.workload,
        "device": key.device,
        "environment": key.environment,
        "policy": key.policy,
    }


def key_from(row: Any) -> Key:
    return Key(row.workload, row.device, row.environment, row.policy)


def measurement_values(m: Measurement, config: str, now: float) -> dict[str, Any]:
    """The columns of a measurement.

    Raises:
        ValueError: an ok measurement without a usable latency; it would be taken for the best.
    """
    ok = m.status == Status.OK
    if ok and not (m.latency_us is not None and LEAST_COST <= m.latency_us <= MOST_COST):
        raise ValueError(f"a measurement with status ok needs a latency above 0, not {m.latency_us!r}")
    error = m.error
    if error is not None and math.isnan(error):
        error = math.inf  # SQLite would keep NaN as NULL, which means that verification was not reached
    return {
        **key_values(m.key),
        "config": config,
        "stage": m.stage,
        "status": str(m.status),
        "latency_us": m.latency_us if ok else None,
        "samples": [s for s in m.samples if math.isfinite(s)],
        "noise": m.noise if ok and m.noise is not None and math.isfinite(m.noise) else None,
        "error": error,
        # PostgreSQL's text cannot hold NUL, and a compiler's output of many megabytes helps nobody.
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
        Damaged: the configuration is not what was stored, or a value is none of its column's.
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
        fingerprint: what it is stored under.

    Raises:
        Damaged: it is not a flat object of numbers, texts and truth values, or not the one with this fingerprint.
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


def workload_from(row: Any) -> Workload:
    """A workload from a row that holds its columns as ``w_kind``, ``w_spec`` and so on.

    Raises:
        Damaged: it is not the workload with the fingerprint that it is stored under.
    """
    found = Workload(
        kind=str(row.w_kind),
        spec=mapping(row.w_spec, "spec"),
        family=str(row.w_family),
        extent=whole(row.w_extent, "number of rows"),
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


def finite_json(value: Any) -> Any:
    """``value`` as JSON that can be read back: infinities and NaN become None, halves of characters are written out."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {finite_json(str(k)): finite_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_json(v) for v in value]
    return value

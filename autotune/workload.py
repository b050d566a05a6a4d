"""The unit of tuning: a canonical description of work, independent of any device.

A workload is a *kind* ("fusion", "c3", ...), a canonical JSON ``spec`` and its SHA-256. Two programs that do the same
work produce the same spec, in any process on any machine; see ``autotune.ir.canonical`` for how fusion does it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Json = Mapping[str, Any]

PRODUCT = "product"
"""Kind of the matrix products that cuBLASLt computes."""


def canonical_json(value: object) -> str:
    """JSON with sorted keys and no spaces: the same text for the same value in every process."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(value: object) -> str:
    """SHA-256 (64 hex digits) of ``canonical_json(value)``."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def extent_ratio(a: int, b: int) -> float:
    """The ratio of two numbers of rows, the larger over the smaller."""
    low, high = sorted((max(a, 1), max(b, 1)))
    return high / low


@dataclass(frozen=True)
class Workload:
    """One unit of tuning.

    Attributes:
        kind: the domain, as registered in ``autotune.task``.
        spec: canonical JSON; equal specs mean equal work. The fingerprint is the SHA-256 of kind and spec.
        family: SHA-256 of the spec with its row extent left open. A schedule can replace another of its family
            (match level ``other_rows``). Empty in domains without families.
        extent: the row extent that ``family`` leaves open; a look-up takes the nearest stored one.
        label: a short human name, such as ``layer_norm f32 16384x1024``. Not part of the identity.
        source: the user's program as JSON (for fusion: the aten calls), from which baselines are rebuilt. Not part of
            the identity.
    """

    kind: str
    spec: Json
    family: str = ""
    extent: int = 0
    label: str = field(default="", compare=False)
    source: Json = field(default_factory=dict, compare=False)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of kind and spec, 64 hex digits."""
        return digest({"kind": self.kind, "spec": self.spec})

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which :meth:`from_json` makes an equal workload."""
        return {
            "kind": self.kind,
            "spec": dict(self.spec),
            "family": self.family,
            "extent": self.extent,
            "label": self.label,
            "source": dict(self.source),
        }

    @classmethod
    def from_json(cls, data: Json) -> Workload:
        return cls(
            kind=str(data["kind"]),
            spec=data["spec"],
            family=str(data.get("family", "")),
            extent=int(data.get("extent", 0)),
            label=str(data.get("label", "")),
            source=data.get("source") or {},
        )

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Workload) and self.fingerprint == other.fingerprint

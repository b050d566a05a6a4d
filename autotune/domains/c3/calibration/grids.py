"""What a calibration measures: shapes, sizes and strategies, for GPUs and for CPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.domains.c3.scenario import COLLECTIVES, REDUCING, Gemm

KIB, MIB = 1 << 10, 1 << 20

Settings = tuple[Mapping[str, Any], ...]
"""Strategies by those parameters that differ from the default."""


@dataclass(frozen=True)
class Grid:
    """What is measured.

    Attributes:
        gemms: timed alone; the first ``together`` of them beside collectives too.
        limits: what is taken from GEMMs, such as SMs; timed with the first ``limited`` of them.
        sizes: bytes of collectives alone.
        most: bytes of a collective beside a GEMM, at most.
        moving, adding: strategies for collectives that only move data, and for those that add.
        ways: more ways to move data, timed alone.
        seconds: no probe begins later than this.
    """

    gemms: tuple[Gemm, ...]
    together: int
    limits: Settings
    limited: int
    sizes: tuple[int, ...]
    most: int
    moving: Settings
    adding: Settings
    ways: Settings
    seconds: float
    dtype: str = "bf16"
    collectives: tuple[str, ...] = COLLECTIVES
    rounds: int = 9

    def strategies(self, collective: str) -> Settings:
        return self.adding if collective in REDUCING else self.moving


def _nccl(order: str = "comm_first", **more: Any) -> dict[str, Any]:
    return {"engine": "nccl", "order": order, "priority": "comm", **more}


def _copy(order: str = "comm_first", **more: Any) -> dict[str, Any]:
    return {"engine": "copy", "order": order, "priority": "comm", **more}


def _sm(order: str = "comm_first", **more: Any) -> dict[str, Any]:
    return {"engine": "sm", "order": order, "priority": "comm", **more}


CUDA = Grid(
    gemms=(Gemm(3072, 6144, 6144), Gemm(6144, 12288, 6144), Gemm(192, 6144, 12288), Gemm(12288, 24576, 6144),
           Gemm(1536, 6144, 6144), Gemm(6144, 6144, 24576), Gemm(12288, 3072, 6144), Gemm(5120, 36864, 12288),
           Gemm(192, 12288, 20480), Gemm(1536, 6144, 6144, "f32")),
    together=4,
    limits=(*({"reserve": n} for n in (8, 16, 24, 32, 48)), {"panels": 2}, {"panels": 4}),
    limited=6,
    sizes=tuple(n * MIB for n in (1, 3, 12, 48, 192, 768)),
    most=2048 * MIB,
    moving=(_copy(), _copy("gemm_first"), _nccl(), _copy(direction="pull"), _copy("gemm_first", direction="pull"),
            _copy(reserve=8), _copy(chunks=4, panels=4), _copy(batch=True), _nccl(ctas=16),
            _nccl("gemm_first", reserve=24), _sm(ctas=32)),
    adding=(_nccl(), _copy("gemm_first", ctas=128), _copy(ctas=128, chunks=2),
            _copy(ctas=32, chunks=4, reserve=4), _copy("gemm_first", ctas=32, chunks=4, reserve=8),
            _nccl("gemm_first", reserve=16), _nccl(reserve=16), _nccl(ctas=32), _sm(ctas=8, reserve=8)),
    ways=(_nccl(ctas=8), _nccl(ctas=16), _nccl(ctas=24), _nccl(ctas=32), _nccl(ctas=64), _sm(ctas=16),
          _sm(ctas=64), _copy()),
    seconds=70.0,
)  # fmt: skip

CPU = Grid(
    gemms=(Gemm(768, 768, 768, "f32"), Gemm(192, 192, 192, "f32"), Gemm(48, 1536, 768, "f32")),
    together=2,
    limits=({"threads": 1}, {"panels": 2}),
    limited=2,
    sizes=tuple(n * KIB for n in (48, 768, 12288)),
    most=16 * MIB,
    moving=tuple({"engine": e, "order": o} for e in ("copy", "gloo") for o in ("comm_first", "gemm_first")),
    adding=tuple({"engine": e, "order": o} for e in ("copy", "gloo") for o in ("comm_first", "gemm_first")),
    ways=({"engine": "copy", "copies": 2},),
    seconds=15.0,
    dtype="f32",
    rounds=7,
)

"""A recording whose latencies are a formula: what a search is replayed in where no recording of a device is needed."""

from __future__ import annotations

from autotune.space import Config, Parameter, Space
from autotune.task import Status
from autotune.workload import Workload
from benchmarks.replay.recording import Recording, Row

SPACE = Space(
    (
        Parameter("threads", (32, 64, 128, 256, 512, 1024)),
        Parameter("vector", (1, 2, 4, 8)),
        Parameter("keep", ("registers", "shared", "reload")),
        Parameter("unroll", (1, 2, 4, 8)),
        Parameter("hint", ("default", "streaming", "evict")),
    )
)
BEST: Config = {"threads": 256, "vector": 4, "keep": "registers", "unroll": 2, "hint": "streaming"}
_KEEP = {"registers": 0.0, "shared": 0.15, "reload": 0.4}
_HINT = {"default": 0.02, "streaming": 0.0, "evict": 0.06}


def latency(config: Config) -> float | None:
    """Microseconds, least for :data:`BEST`; None where registers run out, next to the best."""
    threads, vector, unroll = (SPACE[name].index(config[name]) for name in ("threads", "vector", "unroll"))
    assert threads is not None
    assert vector is not None
    assert unroll is not None
    if config["keep"] == "registers" and vector + unroll > 4:
        return None
    away = 0.12 * abs(threads - 3) + 0.2 * abs(vector - 2) + 0.05 * abs(unroll - 1) + 0.06 * abs(threads - vector - 1)
    return 100.0 * (1 + away + _KEEP[str(config["keep"])] + _HINT[str(config["hint"])])


def recording(*, model: float | None = None) -> Recording:
    """The formula's recording; 8 unrolled streams cannot work, and a row of 32 threads has one vector width.

    Args:
        model: how far off the cost model is, as a factor; None for no model.
    """
    rows: dict[tuple[object, ...], int] = {}
    made: list[Row] = []
    points: list[int] = []
    for index in range(SPACE.size):
        config = SPACE.at(index)
        if config["hint"] == "evict" and config["unroll"] == 8:
            points.append(-1)
            continue
        if config["threads"] == 32:
            config = {**config, "vector": 1}
        key = tuple(config.values())
        if key not in rows:
            rows[key] = len(made)
            us = latency(config)
            status = Status.LAUNCH_ERROR if us is None else Status.OK
            made.append(Row(config, status, us, None if model is None else model * (us or 500.0), 0.2, 0.05))
        points.append(rows[key])
    default: Config = {"threads": 64, "vector": 1, "keep": "reload", "unroll": 1, "hint": "default"}
    return Recording(
        workload=Workload("formula", {"n": 1}, label="formula"),
        device="cuda:0",
        processes=1,
        space=SPACE,
        default=default,
        seeds=({**BEST, "threads": 128},),
        rows=tuple(made),
        points=tuple(points),
    )

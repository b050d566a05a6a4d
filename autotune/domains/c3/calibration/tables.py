"""The names of a calibration's tables, and how far apart two strategies are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from autotune.domains.c3.scenario import REDUCING, Gemm
from autotune.domains.c3.strategy import HostStrategy, Strategy
from autotune.task import Config

BLOCKS = 24
"""Thread blocks of NCCL's kernels, more or less, where nobody limits them."""


def gemm_name(gemm: Gemm) -> str:
    """``8192x8192x8192.bf16``."""
    return f"{gemm.m}x{gemm.n}x{gemm.k}.{gemm.dtype}"


def strategy_name(config: Mapping[str, Any]) -> str:
    """``copy,comm_first,reserve=8``: what the strategy's label says, without spaces."""
    return _strategy(config).label.replace(" ", ",")


def parse_strategy(name: str, side: str) -> Config:
    """The inverse of :func:`strategy_name`."""
    engine, order, *rest = name.split(",")
    config: Config = (HostStrategy if side == "cpu" else Strategy)(order=order, engine=engine).config()
    for text in rest:
        key, _, value = text.partition("=")
        plain = config[key]
        if isinstance(plain, bool):
            config[key] = value == "True"
        else:
            config[key] = int(value) if isinstance(plain, int) else value
    return config


def variant(config: Mapping[str, Any], collective: str) -> str:
    """How a strategy moves the data: what ``comm_us`` is tabulated by. ``copy,push``, ``nccl,ctas=16``."""
    c = _strategy(config).config()
    words = [str(c["engine"])]
    if "direction" in c:
        if c["engine"] != "nccl":
            words.append(str(c["direction"]))
        if c["ctas"]:
            words.append(f"ctas={c['ctas']}")
        # Where something is added, a chunk is added while the next one travels; else chunks only cost a little.
        if collective in REDUCING and c["engine"] != "nccl" and c["chunks"] != 1:
            words.append(f"chunks={c['chunks']}")
    elif c["engine"] == "copy":
        words.append(f"copies={c['copies']}")
    return ",".join(words)


def _strategy(config: Mapping[str, Any]) -> Strategy | HostStrategy:
    return HostStrategy.of(config) if side_of(config) == "cpu" else Strategy.of(config)


def side_of(config: Mapping[str, Any]) -> str:
    """Of "cuda" or "cpu", the one that a strategy is for."""
    return "cpu" if "threads" in config else "cuda"


def parameters(way: str) -> dict[str, Any]:
    """A variant's name as parameters."""
    engine, *rest = way.split(",")
    pairs = [word.partition("=") for word in rest]
    return {"engine": engine, "order": "", **{key if value else "direction": value or key for key, _, value in pairs}}


def kind(config: Mapping[str, Any], op: str) -> tuple[Any, ...]:
    """What strategies must agree in to tell of each other: the engine, the order, and where a kernel runs beside the
    computation, whether SMs are kept for it. Without them it waits for the computation's blocks, or they for it."""
    kernels = config["engine"] != "copy" or op in REDUCING
    return config["engine"], config["order"], kernels, kernels and bool(config.get("reserve"))


def blocks(config: Mapping[str, Any]) -> int:
    """Thread blocks of a strategy or variant."""
    return int(config.get("ctas", 0)) or BLOCKS


def distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """In how many parameters two strategies or variants differ (of thread blocks: how often their number doubles);
    infinite with another engine or issue order."""
    if a["engine"] != b["engine"] or a["order"] != b["order"]:
        return math.inf
    others = sum(a.get(name) != b.get(name) for name in a.keys() | b.keys() if name != "ctas")
    return float(others + abs(math.log2(blocks(a) / blocks(b))))

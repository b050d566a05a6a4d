"""One case measured: its contenders made, checked against eager, and timed in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from autotune.bench.contenders import ProcessLock, Watched
from autotune.errors import first_line
from autotune.measure.policy import Policy
from autotune.measure.quiet import Meter, wait_for_quiet
from autotune.measure.rotate import input_sets, rotate
from autotune.measure.timer import interleave
from autotune.runtime.deployment import deployment
from benchmarks.fusion import ablation, peers
from benchmarks.fusion.agree import disagreement
from benchmarks.fusion.cases.case import Case, bytes_moved

AUTOTUNE = "autotune"


class NotMeasured(Exception):
    """A case has no figures; the message has the reason."""


@dataclass
class Figures:
    """Figures of a case.

    Attributes:
        us: contender to median microseconds: "eager", "inductor", "autotune", names of option sets, and
            "autotune:NAME" for ablations.
        compile_s: contender to seconds of making it ready, without those of waiting for a turn on the device.
        failed: contender to the reason why it has no time.
        uncaptured: contenders that could not be captured in a CUDA graph: their launches from Python show.
        counted: what the deployment of autotune's contender counted.
        bytes: in and out.
        input_sets: copies of the inputs that the contenders took in turn (CPU); 0 on a GPU.
        others: processors that other processes kept busy meanwhile (CPU); 0 on a quiet machine.
    """

    us: dict[str, float] = field(default_factory=dict)
    compile_s: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    uncaptured: list[str] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    input_sets: int = 0
    others: float = 0.0


def measure(
    case: Case,
    size: str,
    device: str,
    policy: Policy,
    groups: Collection[str],
    sets: Mapping[str, peers.Options],
    databases: Mapping[str, str | None],
    lock: ProcessLock,
) -> Figures:
    """Time a case's contenders, interleaved in this process: on a GPU by graph replay with a cold L2, on a CPU with
    cold data and warm code (:mod:`autotune.measure.rotate`).

    Args:
        groups, sets: peers, as of :func:`benchmarks.fusion.peers.wanted`.
        databases: by ablation, where what it found is looked up; None for the default database.
        lock: of the device; timing takes one.

    Raises:
        NotMeasured: autotune's contender does not run, or computes something else than eager.
    """
    figures = Figures()
    args = case.arguments(size, device)
    with torch.no_grad():
        want = case.fn(*args)
    figures.bytes = bytes_moved(args, want)
    calls: dict[str, peers.Call] = {}
    if "eager" in groups:
        calls["eager"] = peers.eager(case.fn, args)
    for name, db in databases.items():
        contender = AUTOTUNE if name == ablation.FULL else f"{AUTOTUNE}:{name}"
        try:
            counting = _counting(figures, contender == AUTOTUNE)
            with deployment().deploying_from(db), counting, _readying(figures, contender, lock):
                calls[contender] = peers.deployed(case.fn, args)
        except Exception as error:
            raise NotMeasured(f"{contender} does not run: {first_line(error)}") from error
        if wrong := disagreement(calls[contender](), want):
            raise NotMeasured(f"{contender} and eager disagree: {wrong}")
    del want
    inductors: dict[str, peers.Options] = {"inductor": {}} if "inductor" in groups else {}
    for name, options in (inductors | dict(sets)).items():
        try:
            with _readying(figures, name, lock):
                calls[name] = peers.inductor(case.fn, args, options)
        except Exception as error:
            figures.failed[name] = first_line(error)
    if device.startswith("cuda"):
        watched = {name: Watched(call) for name, call in calls.items()}
        with lock.exclusive():
            samples = interleave(watched, policy, device)
        figures.uncaptured = [name for name, w in watched.items() if w.refused]
        del watched
    else:
        copies = input_sets(args, figures.bytes, policy)
        figures.input_sets = len(copies)
        with lock.exclusive():
            wait_for_quiet(policy.quiet_s)
            meter = Meter()
            samples = rotate(calls, copies, policy)
            figures.others = meter.others()
        del copies
    figures.us = {name: statistics.median(s) for name, s in samples.items()}
    del calls, args
    forget()
    return figures


def forget() -> None:
    """Drop what was compiled and the memory that nothing holds any more."""
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _counting(figures: Figures, keep: bool) -> Iterator[None]:
    from autotune.runtime.control import counters
    from autotune.runtime.deployment import deployment

    deployment().reset_counters()
    yield
    if keep:
        figures.counted = {k: v for k, v in dict(counters()).items() if v}


@contextmanager
def _readying(figures: Figures, contender: str, lock: ProcessLock) -> Iterator[None]:
    begin, waited = time.monotonic(), lock.waited_s
    try:
        yield
    finally:
        figures.compile_s[contender] = time.monotonic() - begin - (lock.waited_s - waited)


def to_case(case: Case, size: str, figures: Figures, bandwidth: float) -> dict[str, Any]:
    """The case's object in the result file, XLA's and the instrument's fields null.

    Args:
        bandwidth: bytes a microsecond of a copy.
    """
    us = {name: round(value, 3) for name, value in figures.us.items()}
    options = {n: v for n, v in us.items() if n not in ("eager", "inductor") and not n.startswith(AUTOTUNE)}
    inductors = options | ({"inductor": us["inductor"]} if "inductor" in us else {})
    best = min(inductors, key=lambda n: inductors[n], default=None)
    return {
        "name": case.label(size),
        "case": case.name,
        "kind": case.kind,
        "bytes": figures.bytes,
        "floor_us": max(round(figures.bytes / bandwidth, 3), 0.001),
        "eager_us": us.get("eager"),
        "inductor_us": us.get("inductor"),
        "inductor_best_us": inductors[best] if best else None,
        "xla_us": None,
        "autotune_us": us[AUTOTUNE],
        "inductor_best": best,
        "inductor_options": options,
        "ablations": {n.partition(":")[2]: v for n, v in us.items() if n.startswith(f"{AUTOTUNE}:")},
        "failed": figures.failed,
        "uncaptured": figures.uncaptured,
        "counted": figures.counted,
        "compile_s": {name: round(s, 1) for name, s in figures.compile_s.items()},
        "copy_tb_s": round(bandwidth / 1e6, 3),
        **({"input_sets": figures.input_sets} if figures.input_sets else {}),
        **({"others_busy": round(figures.others, 2)} if figures.others else {}),
    }

"""One model measured whole: a search, then its step under every compiler in turn, in one process.

Times are microseconds of a step, medians of interleaved samples: on a GPU of the replay of one CUDA graph, where the
step can be captured, else of launches from Python. Kernels are counted and timed by the profiler in a replay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from autotune.bench import step
from autotune.bench.step import AUTOTUNE, COMPILE, EAGER, Comparison, Peer, Step
from benchmarks.real.models import Made, make

MODES = ("default", "reduce-overhead", "max-autotune")
"""Of ``torch.compile``. A captured step is one CUDA graph in any mode, so that "reduce-overhead" is a peer of its own:
launched from Python, with the graphs it makes itself."""
COMPARED = ("default", "max-autotune")
LIGER, OVERHEAD = "liger", f"{COMPILE} reduce-overhead"
ATTENTION = f"{COMPILE} attention"
"""``torch.compile`` of the graphs in which autotune has rewritten attention: what is left is its kernels'."""
_GRAPHLESS = "-no-cudagraphs"
_FARTHER = 5.0
"""A peer whose results are so many times farther from eager's than torch.compile's has no figure."""
_OF_A_RUN = ("commit", "when", "lead_s", "eager_us", "captured", "differences", "noise", "missing", "others_busy",
             "counters", "not_captured", "searched", "seconds")  # fmt: skip
_PEERS_US = ("attention_us", "liger_us")
Say = Callable[[str, float], None]


@dataclass(frozen=True)
class Options:
    """Options of a model's measurement.

    Attributes:
        device: "cpu" or "cuda:N"; ``db``: database to search into and deploy from.
        tiny, layers, batch: as of :func:`benchmarks.real.models.make`.
        search: seconds to search; 0 deploys the stored schedules.
        step: seconds for the verdict on the step in each mode, as at the end of ``autotune search``; 0 for none.
        one_search: file whose lock a search holds, where models are measured side by side; "" for none.
        modes: of :data:`MODES`.
        rounds, seconds: of interleaved timing, at most.
    """

    device: str
    db: str
    tiny: bool = False
    layers: int | None = None
    batch: int | None = None
    search: float = 60.0
    modes: Sequence[str] = COMPARED
    rounds: int = 40
    seconds: float = 10.0
    step: float = 0.0
    one_search: str = ""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Options:
        return cls(**json.loads(text))


def measure(name: str, options: Options, say: Say = lambda stage, seconds: None) -> dict[str, Any]:
    """The case of a model for the result file.

    Raises:
        Exception: whatever makes the model fail as it is, or keeps one of the compilers from a single figure.
    """
    begin = time.monotonic()

    def stage(what: str, since: float) -> float:
        took = round(time.monotonic() - since, 1)
        say(what, took)
        return took

    with _turn(options):  # weights are drawn on the device
        made = make(name, options.device, tiny=options.tiny, layers=options.layers, batch=options.batch)
    seconds = {"make": stage("make", begin)}
    counted = _captured(made, seconds, stage)
    found = _counted(counted)
    searched = _search(counted, options, seconds, stage)
    verdicts = _decide(made, options, seconds, stage)
    floor_us = _floor(found["bytes"], options)  # before any peer, which may leave the device in error
    compared = _compare(made, options, say)
    found["not_captured"] = _not_captured(counted, compared)
    case = {**described(made), **found, **times(compared, options.modes, floor_us)}
    seconds |= {f"first_call {who}": s.prepare_s for who, s in compared.steps.items()} | dict(compared.seconds)
    seconds["all"] = round(time.monotonic() - begin, 1)
    return {**case, "searched": searched, "verdicts": verdicts, "seconds": seconds}


def missing_modes(case: Mapping[str, Any], modes: Sequence[str]) -> list[str]:
    """Those of :data:`COMPARED` that were asked for and are not in a case yet."""
    return [mode for mode in modes if mode in COMPARED and case.get(mode) is None]


def merged(case: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """A case with the modes that a later run measured of it, and its peers; what else it has to say is in ``runs``."""
    found = {mode: later[mode] for mode in COMPARED if later.get(mode) is not None}
    about = {k: later[k] for k in _OF_A_RUN if k in later}
    peers = {k: later[k] for k in _PEERS_US if "default" in found}  # which are compiled in that mode alone
    return {**case, **found, **peers, "runs": {**case.get("runs", {}), **dict.fromkeys(found, about)}}


def described(made: Made) -> dict[str, Any]:
    """Fields that describe the measured model."""
    family = made.family
    cut = made.layers < family.layers
    return {
        "name": made.name,
        "model": family.about,
        "train": made.train,
        "kind": made.kind,
        "library": family.library,
        "layers": made.layers,
        "published_layers": family.layers,
        "cut": (family.why if made.layers == family.cut else "asked for") if cut else None,
        "batch": made.shape.batch,
        "shape": str(made.shape),
        "dtype": str(made.dtype).removeprefix("torch."),
        "parameters": made.parameters,
    }


Counted = Sequence[tuple[Any, int]]
"""Workloads of a step, each with how often it occurs."""


def _captured(made: Made, seconds: dict[str, float], stage: Callable[[str, float], float]) -> Counted:
    from autotune.domains.fusion.program_spec import workloads_of

    begin = time.monotonic()
    counted = workloads_of(made.module, (), made.inputs, made.name, train=made.train)
    seconds["capture"] = stage("capture", begin)
    return counted


def _counted(counted: Counted) -> dict[str, Any]:
    """Regions of a step, and the bytes that they must move."""
    from autotune.ir.graph import Graph

    return {
        "regions": sum(count for _, count in counted),
        "different_regions": len(counted),
        "bytes": sum(count * Graph.from_json(w.spec).bytes_moved for w, count in counted),
    }


def _not_captured(counted: Counted, compared: Comparison) -> list[str]:
    """Regions that a step missed and that no search of the model would find: there should be none."""
    captured = {workload.fingerprint for workload, _ in counted}
    return sorted(w.label for fingerprint, (_, w) in compared.missed.items() if fingerprint not in captured)


def _search(
    counted: Counted, options: Options, seconds: dict[str, float], stage: Callable[[str, float], float]
) -> dict[str, int | bool]:
    """The search's results, and whether other work disturbed it."""
    import autotune
    from autotune.api import time_weights
    from autotune.tuner.result import BusyMachine

    results: Sequence[Any] = []
    busy = False
    if options.search > 0 and counted:
        _drop_cached(options.device)  # the search measures in a separate process on the same device
        with contextlib.ExitStack() as alone, warnings.catch_warnings(record=True) as told:
            if options.one_search:
                fcntl.flock(alone.enter_context(open(options.one_search, "w")), fcntl.LOCK_EX)
            begin = time.monotonic()
            warnings.simplefilter("always", BusyMachine)
            results = autotune.search(
                [w for w, _ in counted],
                device=options.device,
                db=options.db,
                timeout=options.search,
                weights=time_weights(counted),
            )
        seconds["search"] = stage("search", begin)
        busy = any(issubclass(w.category, BusyMachine) for w in told)
    decided = [r for r in results if r.winner]
    won = sum(r.winner == "autotune" for r in decided)
    return {"decided": len(decided), "autotune": won, "busy": busy}


def _decide(
    made: Made, options: Options, seconds: dict[str, float], stage: Callable[[str, float], float]
) -> list[dict[str, Any]]:
    """The verdicts on the step, one a mode; deployment follows them."""
    if options.step <= 0:
        return []
    from autotune.bench.decide import decide_and_store
    from autotune.store import Store

    begin = time.monotonic()
    with Store.open(options.db) as store:
        found = decide_and_store(
            store,
            made.module,
            (),
            made.inputs,
            train=made.train,
            device=options.device,
            modes=[m for m in options.modes if m in COMPARED],
            limit_s=options.step,
            note={"target": made.name, "inputs": "", "command": "benchmarks.real_models"},
            say=functools.partial(print, flush=True),
        )
    seconds["step"] = stage("step", begin)
    return [decision.record() for decision in found]


def _turn(options: Options) -> AbstractContextManager[object]:
    """While open, no other process measures on the device."""
    from autotune.bench.contenders import ProcessLock

    return ProcessLock(options.device, _policy(options).lock_s).exclusive()


def _drop_cached(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def _policy(options: Options) -> Any:
    from autotune.measure.policy import default_policy

    return dataclasses.replace(default_policy(options.device), final_rounds=options.rounds, final_s=options.seconds)


def _compare(made: Made, options: Options, say: Say) -> Comparison:
    import torch

    from autotune.runtime.deployment import deployment
    from benchmarks.real.liger import compiled

    peers, cuda = {}, options.device.startswith("cuda")
    if "default" in options.modes:  # in which these are compiled
        peers[ATTENTION] = Peer(functools.partial(_with_attention, torch, made.module))
        if cuda:
            peers[LIGER] = Peer(functools.partial(compiled, made.module))
    if cuda and "reduce-overhead" in options.modes:
        peers[OVERHEAD] = Peer(lambda: _own_graphs(torch, made.module), captured=False)
    with deployment().deploying_from(options.db):
        compared = step.compare(
            made.module,
            (),
            made.inputs,
            train=made.train,
            device=options.device,
            mode=[m for m in options.modes if m in COMPARED],
            policy=_policy(options),
            say=say,
            peers=peers,
        )
    for kind in (COMPILE, AUTOTUNE):
        best = compared.fastest(kind)
        if best is None:
            raise RuntimeError("; ".join(f"{who}: {why}" for who, why in compared.failed.items()))
        if compared.steps[best].disagrees:
            raise RuntimeError(f"{best}: results of other shapes than eager's, or finite in other places")
    return compared


def _own_graphs(torch: Any, module: Any) -> Callable[..., Any]:
    run = torch.compile(module, mode="reduce-overhead", dynamic=False)

    def call(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return run(*args, **kwargs)

    return call


def _with_attention(torch: Any, module: Any) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    from autotune.compiler.capture.attention import rewrite_attention

    def backend(gm: Any, inputs: Sequence[Any], **options: Any) -> Any:
        rewrite_attention(gm)
        return compile_fx(gm, list(inputs))

    run: Callable[..., Any] = torch.compile(module, backend=backend, dynamic=False)
    return run


def _floor(moved: int, options: Options) -> float:
    """Time to move so many bytes at the current copy bandwidth."""
    from benchmarks.fusion.floor import copy_bandwidth

    policy = dataclasses.replace(_policy(options), final_rounds=10, final_s=5.0)
    with _turn(options):
        return round(moved / copy_bandwidth(policy, options.device), 3)


def times(compared: Comparison, modes: Sequence[str], floor_us: float) -> dict[str, Any]:
    """A comparison's results in the form of the result file; null for a contender that did not run."""
    run = {m.removesuffix(_GRAPHLESS): k for k, m in enumerate(compared.modes)}
    wrong = _wrong(compared)
    found: dict[str, Any] = {
        **_of(compared, EAGER, "eager"),
        "liger_us": None if LIGER in wrong else _us(compared, LIGER),
        "reduce_overhead_us": None if OVERHEAD in wrong else _us(compared, OVERHEAD),
        "attention_us": None if ATTENTION in wrong else _us(compared, ATTENTION),
    }
    for mode in COMPARED:
        if mode not in run or mode not in modes:
            found[mode] = None
            continue
        theirs, ours = (compared.of(kind)[run[mode]] for kind in (COMPILE, AUTOTUNE))
        found[mode] = {**_of(compared, theirs, "compile"), **_of(compared, ours, "autotune"), "floor_us": floor_us}
    checks = {who: _finite(s.difference) for who, s in compared.steps.items()}
    return {
        **found,
        "captured": {who: s.captured for who, s in compared.steps.items()},
        "differences": checks,
        "noise": {who: s.noise for who, s in compared.steps.items()},
        "random": compared.random,
        "missing": {**compared.failed, **wrong},
        "lead_s": step.lead_s(compared.device),
        "others_busy": round(compared.others, 2),
        "counters": dict(compared.counters),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and value < float("inf") else None


def _us(compared: Comparison, who: str) -> float | None:
    return compared.steps[who].us if who in compared.steps else None


def _wrong(compared: Comparison) -> dict[str, str]:
    """Peers whose results are much farther from eager's than any ``torch.compile``'s: their times say nothing."""
    known = [compared.steps[who].difference for who in (EAGER, *compared.of(COMPILE)) if who in compared.steps]
    worst = max((apart for apart in known if apart is not None), default=None)
    found = {}
    for who in (LIGER, OVERHEAD, ATTENTION):
        apart = compared.steps[who].difference if who in compared.steps else None
        if apart is not None and worst is not None and apart > _FARTHER * worst + 1e-3:
            found[who] = f"results {apart:.3g} from eager's, where torch.compile's are {worst:.3g}"
    return found


def _of(compared: Comparison, who: str, name: str) -> dict[str, Any]:
    found: Step | None = compared.steps.get(who)
    kernels: Mapping[str, Any] = (found.kernels if found else None) or {}
    return {
        f"{name}_us": found.us if found else None,
        # A step without kernels of a kind takes no time for them: null, not 0.
        f"{name}_library_us": kernels.get("library_us") or None,
        f"{name}_memory_us": kernels.get("memory_intensive_us") or None,
        f"{name}_library_kernels": kernels.get("library"),
        f"{name}_memory_kernels": kernels.get("memory_intensive"),
        f"{name}_peak_bytes": found.peak_bytes if found else None,
    }

"""The process of one contender of one program: ``python -m benchmarks.user_programs.contender SPEC``.

SPEC is a JSON object with the fields of :class:`Spec`. The process writes one JSON object a line to its standard
output: one after the first step, one after the warm-up. Then each line of standard input is answered by one: a number
of steps by their times in ms, "rest" once its unused memory is free, "facts" by :meth:`Running.facts`, "kernels" by the
kernels of one step, "graph" and a number by :meth:`Running.graph`, behind which no step runs. The input's end ends it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from autotune.compiler.targets.cuda import PREFIX
from autotune.errors import first_line
from autotune.measure.child import prepare
from autotune.measure.policy import default_policy
from autotune.measure.quiet import device_lock

WARM_STEPS = 10
CONTEST_STEPS = 80
"""Warm-up of a contender that searches: its contest between two codes takes 70 steps, or more of steps below 10 ms."""
MOST_STEPS = 600
_COMPILING_STEPS = 5
"""Steps that may compile something: a search among them needs the lock of the device."""
_WAKE_STEPS = 3
"""Steps before a block that follows a rest: memory is allocated again."""
_TRACES = 3
_COMPILED = ("triton_", PREFIX)
"""What the names of kernels begin with that compiled graphs launch for memory-intensive operators."""
_QUICK = replace(default_policy("cuda"), final_s=0.5)
_PHASE_S = 2.0
_ROWS = 40
"""Of the coverage that a result file keeps."""
_PLAIN = ("eager", "compile", "compile again")
"""Contenders without autotune."""


@dataclass(frozen=True)
class Spec:
    """The task of a process.

    Attributes:
        program, contender: names.
        mode: of ``torch.compile``.
        search_s: of the option "search".
        warm_s: warm-up ends after so many seconds, if its steps have not ended before.
        beside: other programs run at the same time. A contest of two codes holds the device's lock.
        names: of kernels of a kind that are kept.
        capturable: optimizers are made so that a CUDA graph can capture them.
    """

    program: str
    contender: str
    device: str
    mode: str = "default"
    search_s: float = 0.0
    tiny: bool = False
    warm_s: float = 60.0
    beside: bool = False
    names: int = 12
    capturable: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Clock:
    """Times of steps in ms: by events of a GPU at the ends of steps, by the host's clock on a CPU."""

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")

    def of(self, step: Any, count: int) -> list[float]:
        """Run a step that is not timed, then ``count`` steps; nothing waits for the device in between."""
        import torch

        step()
        if not self._cuda:
            marks = [time.perf_counter()]
            for _ in range(count):
                step()
                marks.append(time.perf_counter())
            return [1e3 * (b - a) for a, b in itertools.pairwise(marks)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


class Running:
    """A program that has taken its first step.

    Attributes:
        first_s: seconds of the first step, from its call to the device's end, and of ``torch.compile``'s call before
            it. That call imports Inductor for torch's own backend, and the first step for another one.
    """

    def __init__(self, spec: Spec) -> None:
        import torch

        from benchmarks.user_programs.known import ALL
        from benchmarks.user_programs.program import Compiler, Setup

        self._torch, self._cuda = torch, spec.device.startswith("cuda")
        if self._cuda:
            torch.cuda.set_device(spec.device)
        torch.manual_seed(0)
        compiler = Compiler(spec.contender, spec.mode, spec.search_s)
        self._program = ALL[spec.program].make(Setup(spec.device, spec.tiny, compiler, spec.capturable))
        self._spec, self._clock, self.steps = spec, Clock(spec.device), 0
        self._last: Any = None
        self._rested = False
        self._wait()
        print("the first step begins", file=sys.stderr, flush=True)
        begin = time.perf_counter()
        self.step()
        self._wait()
        print("the first step ends", file=sys.stderr, flush=True)
        self.first_s = sum(compiler.took) + time.perf_counter() - begin
        self.first_loss = self._loss()
        self._first_peak = self._peak()

    @property
    def train(self) -> bool:
        return self._program.train

    def step(self) -> None:
        # A loss of a step by CUDA graphs would be overwritten by the next one.
        self._torch.compiler.cudagraph_mark_step_begin()
        self._last = self._program.step()
        self.steps += 1

    def warm_up(self) -> None:
        """Take steps until nothing is compiled or decided any more; then memory's peak begins again."""
        least = CONTEST_STEPS if self._spec.contender in ("search", "unsearched") else WARM_STEPS
        end = time.perf_counter() + self._spec.warm_s
        with contextlib.ExitStack() as held:
            while self.steps < least or (_deciding() and self.steps < MOST_STEPS):
                if self._spec.beside and self.steps == _COMPILING_STEPS and _deciding():
                    held.enter_context(device_lock(self._spec.device, self._spec.warm_s))
                self.step()
                if self.steps % 8 == 0:
                    self._wait()
                    if time.perf_counter() > end:
                        break
        self._wait()
        if self._cuda:
            self._torch.cuda.reset_peak_memory_stats()

    def times(self, count: int) -> list[float]:
        """Times of so many steps in ms, behind one that is not counted."""
        if self._rested:
            for _ in range(_WAKE_STEPS):
                self.step()
            self._rested = False
        return [round(ms, 4) for ms in self._clock.of(self.step, count)]

    def rest(self) -> None:
        """Release the memory that the allocator keeps for the next step: others search meanwhile."""
        if self._cuda:
            self._torch.cuda.empty_cache()
        self._rested = True

    def facts(self) -> dict[str, Any]:
        """Memory in bytes, losses, seconds of compilation, uses of torch's caches, autotune's counters, versions."""
        torch = self._torch
        plain = self._spec.contender in _PLAIN
        return {
            "first_s": round(self.first_s, 3),
            "steps": self.steps,
            "first_loss": self.first_loss,
            "loss": self._loss(),
            "peak_bytes": self._peak(),
            "first_peak_bytes": self._first_peak,
            "compile_s": _compile_s(),
            "caches": _caches(),
            "reserved_bytes": torch.cuda.max_memory_reserved() if self._cuda else None,
            "counters": {} if plain else _counters(),
            **({} if plain else _coverage()),
            "versions": {"python": platform.python_version(), **_versions()},
        }

    def kernels(self) -> dict[str, Any] | None:
        """Kernels of one step as of :func:`largest`, None where the profiler shows none."""
        if not self._cuda:
            return None
        from autotune.bench.kernels import record, summed
        from benchmarks.fusion.floor import copy_bandwidth

        def work() -> None:
            self.step()
            self._wait()

        for _ in range(_TRACES):  # a process's first trace may be empty
            try:
                if spans := [s for s in record(work) if s[2]]:
                    found = summed([(begin, end, kernel) for begin, end, _, kernel in spans])
                    compiled = sum(e - b for b, e, _, kernel in spans if kernel.startswith(_COMPILED))
                    return {
                        **largest(found, self._spec.names),
                        "compiled_us": round(compiled, 1),
                        "copy_bytes_us": round(copy_bandwidth(_QUICK, self._spec.device)),
                    }
            except RuntimeError:
                return None
        return None

    def graph(self, count: int) -> dict[str, Any]:
        """The median of so many replays of a step's CUDA graph in ms as "graph_ms"; else "graph" has the reason."""
        if not self._cuda:
            return {"graph": "not on a GPU"}
        self._last = None  # a loss keeps the last step's backward nodes, which run on that step's stream
        self._wait()
        graph = self._torch.cuda.CUDAGraph()
        try:
            with self._torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.step()
            graph.replay()
            self._wait()
        except Exception as error:
            return {"graph": first_line(error)[:200]}
        return {"graph_ms": round(statistics.median(self._clock.of(graph.replay, count)), 4)}

    def _loss(self) -> float | None:
        value = float(self._last.detach().float().mean())
        return value if math.isfinite(value) else None

    def _peak(self) -> int | None:
        return self._torch.cuda.max_memory_allocated() if self._cuda else None

    def _wait(self) -> None:
        if self._cuda:
            self._torch.cuda.synchronize()


def largest(kernels: Mapping[str, Any], count: int = 12) -> dict[str, Any]:
    """Counts and microseconds of a step's kernels, and the names that take most, with their microseconds.

    Args:
        kernels: of :func:`autotune.bench.kernels.summed`.
        count: of names of a kind.
    """
    found = {key: value for key, value in kernels.items() if not isinstance(value, Mapping)}
    for key in ("names_us", "library_names_us"):
        most = sorted(kernels[key].items(), key=lambda item: item[1], reverse=True)[:count]
        found[key] = {name[:120]: us for name, us in most}
    return found


def _deciding() -> bool:
    """True while autotune's contest between the codes before and after a search runs."""
    search = sys.modules.get("autotune.in_program.search")
    contest = getattr(search, "_contest", None)
    return bool(contest is not None and contest.running)


def _counters() -> dict[str, int]:
    import autotune

    return {name: int(count) for name, count in dict(autotune.counters()).items() if count}


def _coverage() -> dict[str, Any]:
    """The rows that Inductor compiles, and the bytes of all memory-intensive operators, each graph counted once."""
    import autotune

    rows = autotune.coverage().to_json()
    return {
        "moved_bytes": sum(row["bytes"] or 0 for row in rows),
        "coverage": [row for row in rows if not row["stored"]][:_ROWS],
    }


def _compile_s() -> dict[str, float]:
    """Seconds of torch's phases of compilation by name, those of two seconds and more; one may include others."""
    from torch._dynamo.utils import compilation_time_metrics

    sums = {name: round(sum(times), 1) for name, times in compilation_time_metrics.items()}
    return dict(sorted(((name, s) for name, s in sums.items() if s >= _PHASE_S), key=lambda item: -item[1]))


def _caches() -> dict[str, int]:
    """Hits, misses and bypasses of the caches of AOTAutograd and of Inductor's graphs."""
    from torch._dynamo.utils import counters

    parts = (("aot_autograd", "autograd_cache"), ("inductor", "fxgraph_cache"))
    return {name: n for part, prefix in parts for name, n in sorted(counters[part].items()) if name.startswith(prefix)}


def _versions() -> dict[str, str]:
    from importlib import metadata

    found = {}
    for name in ("torch", "triton", "transformers", "timm", "diffusers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def main() -> int:
    """Returns 0; 1 where the program failed, with the reason in the last line."""
    prepare()
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is none of this conversation

    def tell(answer: dict[str, Any]) -> None:
        lines.write(json.dumps(answer) + "\n")
        lines.flush()

    try:
        running = Running(Spec(**json.loads(sys.argv[1])))
        tell({"first_s": round(running.first_s, 3), "train": running.train})
        running.warm_up()
        tell({"warm": running.steps})
        for line in sys.stdin:
            word = line.strip()
            if word == "facts":
                tell(running.facts())
            elif word == "rest":
                running.rest()
                tell({})
            elif word == "kernels":
                tell({"kernels": running.kernels()})
            elif word.startswith("graph"):
                tell(running.graph(int(word.split()[1])))
            else:
                tell({"ms": running.times(int(word))})
    except Exception as error:
        import traceback

        traceback.print_exc()
        tell({"failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

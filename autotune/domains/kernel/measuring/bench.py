"""The worker's side of a kernel: its inputs, what is right, what is timed; see :class:`autotune.task.Bench`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autotune.domains.kernel.deploy.match import DEFAULT
from autotune.domains.kernel.kernel import Call, Kernel
from autotune.domains.kernel.measuring.inputs import Arguments, extent_of, is_array, leaves, make, poison, same
from autotune.domains.kernel.target import kernel_of
from autotune.errors import BuildError, UserError, first_line
from autotune.task import REFERENCE, Artifact, Bench, Config, Runnable, Verdict
from autotune.workload import Workload

_REFERENCE_S = 0.5
"""A reference that takes longer is not timed beside the candidates: five rounds and more of it would be."""
_SEEDS = 2
"""Inputs that are kept: those of the search, and those of its final comparison."""


class Candidate:
    """A kernel with a configuration, on the bench's arguments or on copies of them; call it again and again."""

    def __init__(self, kernel: Kernel, config: Mapping[str, Any], arguments: Arguments) -> None:
        self.kernel, self.config, self.arguments = kernel, dict(config), arguments
        self._saved: Mapping[str, Any] = {}
        if kernel.restore:
            first = arguments.copied().named(kernel)
            self._saved = {name: first[name] for name in kernel.restore if first.get(name) is not None}

    def __call__(self, given: Arguments | None = None) -> Any:
        a = given or self.arguments
        if self.kernel.reset or self._saved:
            self._prepare(a.named(self.kernel))
        return self.kernel.launch(a.args, a.kwargs, self.config)

    def _prepare(self, named: Mapping[str, Any]) -> None:
        """``reset_to_zero`` and ``restore_value``, before each run, as Triton times them."""
        for name in self.kernel.reset:
            if is_array(named.get(name)):
                named[name][...] = 0
        for name, value in self._saved.items():
            named[name][...] = value


class KernelBench(Bench):
    """A kernel for one key, on one device."""

    def __init__(self, kernel: Kernel, workload: Workload, device: str) -> None:
        self.kernel, self.device = kernel, device
        self._given: Mapping[str, Any] = workload.source["arguments"]
        self._key = workload.spec["key"]
        self.arguments = make(kernel, self._given, device, 0)
        key = kernel.reader.read(self.arguments.args, self.arguments.kwargs)
        if key != self._key:
            raise UserError(f"{kernel.name}: its inputs have the key {key} now, and had {self._key}: make them alike")
        self._oracles: dict[int, _Oracle] = {}
        self._reference_s = math.inf

    def load(self, config: Config, artifact: Artifact) -> Candidate:
        if why := self.kernel.space.reject(config, self._key):
            raise BuildError(why)
        return Candidate(self.kernel, config, self.arguments)

    def verify(self, run: Runnable, seed: int) -> Verdict:
        assert isinstance(run, Candidate)
        oracle = self._oracle(seed)
        return oracle.judge(run)

    def _oracle(self, seed: int) -> _Oracle:
        if seed not in self._oracles:
            if len(self._oracles) >= _SEEDS:
                self._oracles.pop(next(iter(self._oracles)))
            made = self._oracles[seed] = _Oracle(self.kernel, make(self.kernel, self._given, self.device, seed))
            self._reference_s = min(self._reference_s, made.seconds)
        return self._oracles[seed]

    def baselines(self) -> Mapping[str, Callable[[], Runnable]]:
        found: dict[str, Callable[[], Runnable]] = {
            DEFAULT: lambda: Candidate(self.kernel, self.kernel.space.default, self.arguments)
        }
        if self.kernel.reference is not None and self._reference_s < _REFERENCE_S:
            found[f"{REFERENCE}reference"] = lambda: _Reference(self.kernel, self.arguments)
        return found

    def bytes_moved(self) -> int:
        return max(self.arguments.nbytes, 1)

    def input_sets(self, count: int) -> Sequence[Arguments]:
        return [self.arguments, *(self.arguments.copied() for _ in range(count - 1))]

    def metrics(self, run: Runnable, cost: float) -> Mapping[str, float]:
        """See ``autotune.task.Bench``."""
        if not isinstance(run, Candidate):
            return {}
        named = run.arguments.named(self.kernel)
        us = None if self.kernel.objective else cost
        call = Call(named, run.config, us, run)
        return {name: _figure(metric, call, f"the metric {name!r}") for name, metric in self.kernel.metrics.items()}


class FigureBench(KernelBench):
    """A kernel whose user measures something else than time."""

    def figure(self) -> Callable[[Runnable], float]:
        return self._cost

    def _cost(self, run: Runnable) -> float:
        objective = self.kernel.objective
        assert objective is not None
        config = run.config if isinstance(run, Candidate) else {}
        call = Call(self.arguments.named(self.kernel), config, None, run)
        found = _figure(objective.measure, call, f"the objective {objective.name!r}")
        if not found > 0:
            raise UserError(f"the objective {objective.name!r} of {self.kernel.name} is {found}: give a number above 0")
        return objective.cost(found)

    def baselines(self) -> Mapping[str, Callable[[], Runnable]]:
        return {name: made for name, made in super().baselines().items() if not name.startswith(REFERENCE)}


def _figure(function: Callable[[Call], float], call: Call, what: str) -> float:
    try:
        found = float(function(call))
    except Exception as error:
        raise UserError(f"{what} failed: {first_line(error)}") from error
    if not math.isfinite(found):
        raise UserError(f"{what} is {found}: give a finite number")
    return found


class _Reference:
    """The user's reference as something to be timed."""

    def __init__(self, kernel: Kernel, arguments: Arguments) -> None:
        assert kernel.reference is not None
        self.reference, self.arguments = kernel.reference, arguments

    def __call__(self, given: Arguments | None = None) -> Any:
        a = given or self.arguments
        return self.reference(*a.args, **a.kwargs)


class _Oracle:
    """What is right on one set of inputs: the reference's result, or the default configuration's.

    Attributes:
        seconds: that it took.
    """

    def __init__(self, kernel: Kernel, inputs: Arguments) -> None:
        self.kernel, self._inputs = kernel, inputs
        self._after = self._copy()
        if kernel.reference is None:
            self._poison(self._after)
        begin = time.monotonic()
        try:
            if kernel.reference is not None:
                result = kernel.reference(*self._after.args, **self._after.kwargs)
            else:
                result = Candidate(kernel, kernel.space.default, self._after)()
        except Exception as error:
            who = "the reference" if kernel.reference is not None else "the default configuration, its reference,"
            raise UserError(f"{kernel.name}: {who} failed: {first_line(error)}") from error
        self.result = result
        self.seconds = time.monotonic() - begin
        self._extent = extent_of((inputs.args, inputs.kwargs))

    def _copy(self) -> Arguments:
        try:
            return self._inputs.copied()
        except Exception as error:
            raise UserError(f"{self.kernel.name}: its arguments cannot be copied: {first_line(error)}") from error

    def _poison(self, arguments: Arguments) -> None:
        named = arguments.named(self.kernel)
        for name in self.kernel.outputs:
            poison(named[name])

    def judge(self, run: Candidate) -> Verdict:
        """Run a candidate on a copy of the inputs, and compare what it returned or wrote."""
        kernel, mine = self.kernel, self._copy()
        self._poison(mine)
        got = run(mine)
        if got is not None and self.result is None:
            raise UserError(f"{kernel.name}: the reference returns nothing, and the kernel a {type(got).__name__}")
        if got is not None:
            return self._same(got, self.result, "result")
        ours, theirs = mine.named(kernel), self._after.named(kernel)
        if self.result is None:
            names = kernel.outputs or [n for n, v in theirs.items() if any(map(is_array, leaves(v)))]
            verdicts = [self._same(ours[n], theirs[n], n) for n in names]
            return min(verdicts, key=lambda v: (v.ok, -v.error), default=Verdict(True, 0.0))
        if not kernel.outputs:
            raise UserError(
                f"{kernel.name}: the kernel returns nothing, and the reference a result: name what the kernel writes,"
                " outputs=[...]"
            )
        written = [ours[n] for n in kernel.outputs]
        return self._same(written, self.result, "/".join(kernel.outputs))

    def _same(self, got: Any, want: Any, what: str) -> Verdict:
        return same(got, want, self._extent, self.kernel.tolerance, what)


def open_bench(workload: Workload, device: str) -> KernelBench:
    """See ``autotune.domain.Domain``."""
    kernel = kernel_of(workload)
    return (FigureBench if kernel.objective else KernelBench)(kernel, workload, device)

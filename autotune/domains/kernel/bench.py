"""The worker's side of a kernel: arguments, expected results and timed callables; see :class:`autotune.task.Bench`."""

from __future__ import annotations

import copy
import inspect
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autotune.domains.kernel.declare import kernel_of
from autotune.domains.kernel.kernel import DEFAULT, Call, Kernel, parameters_of
from autotune.errors import BuildError, UserError, first_line
from autotune.measure.verify import compare
from autotune.task import REFERENCE, Artifact, Bench, Config, Runnable, Verdict
from autotune.workload import Workload

_REFERENCE_S = 0.5
"""Seconds; a slower reference is not timed with the candidates, since it would run five rounds or more."""
_SEEDS = 2
"""Input sets that are kept: those of the search and those of its final comparison."""


class Candidate:
    """A kernel with a configuration, on the bench's arguments or on copies; it may be called repeatedly."""

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
        """Apply ``reset_to_zero`` and ``restore_value`` before each run; Triton includes them in its timing, too."""
        for name in self.kernel.reset:
            if is_array(named.get(name)):
                named[name][...] = 0
        for name, value in self._saved.items():
            named[name][...] = value


class KernelBench(Bench):
    """Bench of a kernel for one key on one device."""

    def __init__(self, kernel: Kernel, workload: Workload, device: str) -> None:
        self.kernel, self.device = kernel, device
        self._given: Mapping[str, Any] = workload.source["arguments"]
        self._key = workload.spec["key"]
        self.arguments = make(kernel, self._given, device, 0)
        key = kernel.reader.read(self.arguments.args, self.arguments.kwargs)
        if key != self._key:
            raise UserError(
                f"{kernel.name}: its inputs have the key {key} now and had {self._key} before: return inputs of one key"
            )
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
            found[f"{REFERENCE}reference"] = lambda: self._refer
        return found

    def _refer(self, given: Arguments | None = None) -> Any:
        assert self.kernel.reference is not None
        a = given or self.arguments
        return self.kernel.reference(*a.args, **a.kwargs)

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
    """Bench of a kernel whose objective is another figure than time."""

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


class _Oracle:
    """The expected result on one set of inputs, from the reference or the default configuration.

    Attributes:
        seconds: duration of that run.
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
        """Run a candidate on a copy of the inputs and compare its returned or written results."""
        kernel, copied = self.kernel, self._copy()
        self._poison(copied)
        got = run(copied)
        if got is not None and self.result is None:
            raise UserError(
                f"{kernel.name}: the reference returns nothing, but the kernel returns a {type(got).__name__}"
            )
        if got is not None:
            return self._same(got, self.result, "result")
        ours, theirs = copied.named(kernel), self._after.named(kernel)
        if self.result is None:
            names = kernel.outputs or [n for n, v in theirs.items() if any(map(is_array, leaves(v)))]
            verdicts = [self._same(ours[n], theirs[n], n) for n in names]
            return min(verdicts, key=lambda v: (v.ok, -v.error), default=Verdict(True, 0.0))
        if not kernel.outputs:
            raise UserError(
                f"{kernel.name}: the kernel returns nothing, but the reference returns a result: name what the"
                " kernel writes, outputs=[...]"
            )
        written = [ours[n] for n in kernel.outputs]
        return self._same(written, self.result, "/".join(kernel.outputs))

    def _same(self, got: Any, want: Any, what: str) -> Verdict:
        return same(got, want, self._extent, self.kernel.tolerance, what)


def open_bench(workload: Workload, device: str) -> KernelBench:
    """See ``autotune.domain.Domain``."""
    kernel = kernel_of(workload)
    return (FigureBench if kernel.objective else KernelBench)(kernel, workload, device)


# ---- arguments: made by the user's factory, bound to their names, copied, and compared ------------------------------


@dataclass
class Arguments:
    """A kernel's arguments without its tuned parameters."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def named(self, kernel: Kernel) -> dict[str, Any]:
        """The arguments by the kernel's parameter names, as far as the kernel has a signature."""
        parameters = parameters_of(kernel.fn)
        if parameters is None:
            return dict(self.kwargs)
        tuned = set(kernel.space.names)
        places = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY and p.name not in tuned]
        return {**dict(zip(places, self.args, strict=False)), **self.kwargs}

    def copied(self) -> Arguments:
        """A deep copy."""
        args, kwargs = copy.deepcopy((self.args, self.kwargs))
        return Arguments(args, kwargs)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; each array counts once."""
        arrays = {id(a): a for a in leaves((self.args, self.kwargs)) if is_array(a)}
        return sum(a.numel() * a.element_size() if isinstance(a, torch.Tensor) else a.nbytes for a in arrays.values())


def make(kernel: Kernel, arguments: Mapping[str, Any], device: str, seed: int) -> Arguments:
    """A kernel's arguments, the same for the same ``seed`` in every process.

    Args:
        arguments: arguments of the inputs factory; ``{"": n}`` selects entry n of a list of inputs.

    Raises:
        UserError: the arguments cannot be made, or do not fit the kernel's signature.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if not callable(kernel.inputs):
        assert kernel.inputs is not None
        made = copy.deepcopy(kernel.inputs[int(arguments[""])])
        what = f"input {arguments[''] + 1}"
    else:
        given = {**_wanted(kernel.inputs, {"device": device, "seed": seed}), **arguments}
        what = f"inputs({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"
        try:
            made = kernel.inputs(**given)
        except Exception as error:
            raise UserError(f"{kernel.name}: {what} failed: {first_line(error)}") from error
    found = _as_arguments(made, f"{kernel.name}: {what}")
    moved = Arguments(_moved(found.args, device), _moved(found.kwargs, device))
    _check(kernel, moved, what)
    return moved


def _wanted(fn: Callable[..., Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of ``known`` for which the factory has parameters."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return {}
    return {name: value for name, value in known.items() if name in parameters}


def _as_arguments(made: Any, where: str) -> Arguments:
    if isinstance(made, Mapping):
        return Arguments((), dict(made))
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], (tuple, list)) and isinstance(made[1], dict):
        return Arguments(tuple(made[0]), dict(made[1]))
    if isinstance(made, (tuple, list)):
        return Arguments(tuple(made), {})
    if made is None:
        raise UserError(f"{where} returned None: return the kernel's arguments")
    return Arguments((made,), {})


def _moved(value: Any, device: str) -> Any:
    """Move tensors to the device; on a CPU, return ``value`` unchanged."""
    if device == "cpu":
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {k: _moved(v, device) for k, v in value.items()}
    return type(value)(_moved(v, device) for v in value) if type(value) in (tuple, list) else value


def _check(kernel: Kernel, found: Arguments, what: str) -> None:
    tuned = set(kernel.space.names)
    if twice := tuned & found.kwargs.keys():
        raise UserError(f"{kernel.name}: {what} has the tuned parameter {sorted(twice)[0]}: leave it out")
    parameters = parameters_of(kernel.fn)
    if parameters is None:
        return
    untuned = [p for p in parameters if p.name not in tuned]
    if kernel.positional is not None and len(found.args) > len([p for p in untuned if p.kind is not p.KEYWORD_ONLY]):
        raise UserError(f"{kernel.name}: {what} has {len(found.args)} arguments, more than the kernel takes")
    try:
        inspect.Signature(sorted(untuned, key=lambda p: p.kind), __validate_parameters__=False).bind(
            *found.args, **found.kwargs
        )
    except TypeError as error:
        raise UserError(f"{kernel.name}: {what} does not fit the kernel: {error}") from None


def is_array(value: Any) -> bool:
    """True for a tensor or a NumPy array."""
    return isinstance(value, (torch.Tensor, np.ndarray))


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of nested tuples, lists and dicts, in order."""
    if isinstance(value, Mapping):
        for name in value:
            yield from leaves(value[name])
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def poison(value: Any) -> None:
    """Fill an array that the kernel should overwrite: NaN for floats, the largest value for integers."""
    tensor = _tensor(value)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.logical_not_()
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _tensor(value: Any) -> torch.Tensor:
    """A tensor that shares memory with an array; a number becomes a new tensor."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, (bool, int)):
        return torch.tensor(value)
    return torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def same(got: Any, want: Any, extent: int, tolerance: float | None, what: str) -> Verdict:
    """Compare results leaf by leaf; returns the worst verdict.

    Args:
        extent: length of the longest sum that a result may depend on.
        tolerance: relative tolerance; None selects one by dtype.
        what: name of the values, for messages.
    """
    ours, theirs = list(leaves(got)), list(leaves(want))
    if len(ours) != len(theirs):
        return Verdict(False, float("inf"), f"{what}: {len(ours)} values where {len(theirs)} are expected")
    worst = Verdict(True, 0.0)
    for nth, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
        where = what if len(ours) == 1 else f"{what} {nth}"
        verdict = _same(a, b, extent, tolerance)
        if not verdict.ok:
            return Verdict(False, verdict.error, f"{where}: {verdict.detail}")
        worst = max(worst, verdict, key=lambda v: v.error)
    return worst


def _same(a: Any, b: Any, extent: int, tolerance: float | None) -> Verdict:
    if b is None or isinstance(b, str):
        equal = type(a) is type(b) and a == b
        return Verdict(equal, 0.0 if equal else float("inf"), "" if equal else f"{a!r} instead of {b!r}")
    try:
        got, want = _tensor(a), _tensor(b)
    except (TypeError, ValueError, RuntimeError):
        try:
            equal = bool(np.array_equal(np.asarray(a), np.asarray(b)))
        except (TypeError, ValueError, RuntimeError):  # one is a CUDA tensor, the other not an array
            equal = False
        return Verdict(equal, 0.0 if equal else float("inf"), "" if equal else f"a {type(a).__name__} that differs")
    if tuple(got.shape) != tuple(want.shape):
        return Verdict(False, float("inf"), f"shape {list(got.shape)} instead of {list(want.shape)}")
    if got.dtype.is_complex or want.dtype.is_complex:
        got, want = (torch.view_as_real(t.to(torch.complex128)) for t in (got, want))
    wide = want.to(torch.float64) if want.dtype.is_floating_point else want
    slack = None
    if tolerance is not None and want.dtype.is_floating_point:
        finite = torch.where(torch.isfinite(wide), wide.abs(), 0.0)
        typical = finite.square().mean().sqrt() if finite.numel() else finite.sum()
        slack = tolerance * (finite + typical)
    return compare(got, wide, got.dtype, extent, slack=slack)


def extent_of(values: Sequence[Any]) -> int:
    """The largest extent of any array among values; at least 1."""
    return max((int(n) for v in leaves(values) if is_array(v) for n in v.shape), default=1)

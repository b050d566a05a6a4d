"""Time and kernels of a whole model step, forward or forward and backward, under each compiler.

A region that is faster alone need not make the model faster. This module runs the model as deployed, including library
calls: eager, with ``torch.compile`` and with ``torch.compile(backend="autotune")``, in turn. On a GPU, each step is
captured in one CUDA graph if possible.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autotune.bench.contenders import (
    ProcessLock,
    Watched,
    difference,
    inductor_takes_lock,
    largest,
    room_for,
    templates_in_threads,
    without_graph_caches,
)
from autotune.bench.kernels import Call, kernels_of
from autotune.errors import UserError, first_line
from autotune.measure.outcome import spread
from autotune.measure.policy import Policy, default_policy
from autotune.runtime.coverage import Coverage
from autotune.runtime.deployment import deployment
from autotune.workload import Workload

EAGER, COMPILE, AUTOTUNE = "eager", "torch.compile", "autotune"
CONTENDERS = (EAGER, COMPILE, AUTOTUNE)
CHANGING = 0.05
"""Largest difference between two runs with one seed that rounding explains; a step above it modifies its inputs."""
_LEAD_S = 0.3
"""Seconds after which the device's clock has settled to a sustained load."""


def lead_s(device: str) -> float:
    """Return the seconds for which a step runs before each of its samples."""
    return _LEAD_S if device.startswith("cuda") else 0.0


class NotCompared(Exception):
    """The eager step fails, so no comparison is possible; the message contains its error."""


@dataclass(frozen=True)
class Step:
    """One contender.

    Attributes:
        us: the median; ``noise``: interquartile range over the median.
        captured: True if it ran as one CUDA graph; if not, on a GPU, its time includes launches from Python.
        prepare_s: seconds of its first call, with compilation and without waiting for the device.
        difference: difference of its results from eager's (:func:`autotune.bench.contenders.difference`); None if the
            step draws random numbers. For eager, the difference of two runs with one seed.
        largest: magnitude of the largest element of its first result: the loss, in training.
        kernels: of one step, :func:`autotune.bench.kernels.summed`; None on a CPU, and if the profiler reports none.
        peak_bytes: peak device memory of a step run alone from Python. It includes the memory allocated before the
            comparison, such as parameters and inputs. None on a CPU.
        samples: in microseconds, one per round; equal indices of all contenders are of the same round.
    """

    us: float
    noise: float
    captured: bool
    prepare_s: float
    difference: float | None
    largest: float | None
    kernels: Mapping[str, Any] | None
    peak_bytes: int | None = None
    samples: tuple[float, ...] = ()

    @property
    def disagrees(self) -> bool:
        """True if its results differ from eager's in shape or in the positions of non-finite elements."""
        return self.difference == math.inf

    def to_json(self) -> dict[str, Any]:
        """Return the JSON for ``--json``, without samples; infinities are null, marked by ``disagrees``."""
        found = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in vars(self).items()}
        del found["samples"]
        return {**found, "disagrees": self.disagrees}


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`.

    Attributes:
        steps: by contender, those measured; ``failed``: the other contenders' errors.
        device: "cpu" or "cuda:N"; ``modes``: of ``torch.compile``, without its own CUDA graphs.
        counters: nonzero counts of ``autotune.counters()``.
        random: True if the step draws random numbers; ``changing``: True if its results vary for another reason, such
            as in-place changes of its inputs. Differences from eager are then meaningless.
        seconds: of "timing" and, on a GPU, of "kernels".
        others: processors that other processes kept busy during the timing (CPU).
        missed: regions of the step without a stored kernel: by fingerprint, the device and the workload.
        coverage: regions and operators run by stored kernels or by Inductor, with reasons.
    """

    steps: Mapping[str, Step]
    failed: Mapping[str, str]
    device: str
    modes: Sequence[str]
    counters: Mapping[str, int]
    random: bool
    seconds: Mapping[str, float]
    others: float
    missed: Mapping[str, tuple[str, Workload]] = field(default_factory=dict)
    coverage: Coverage = field(default_factory=Coverage)

    @property
    def changing(self) -> bool:
        eager = self.steps.get(EAGER)
        return eager is not None and (eager.difference or 0.0) > CHANGING

    def of(self, kind: str) -> list[str]:
        """Return the intended contenders of a ``kind`` of :data:`CONTENDERS`, one for each mode."""
        return contenders(kind, self.modes)

    def fastest(self, kind: str) -> str | None:
        """Return the fastest contender of a kind; None if none was measured."""
        there = [name for name in self.of(kind) if name in self.steps]
        return min(there, key=lambda name: self.steps[name].us, default=None)

    def over_compile(self, name: str | None) -> float | None:
        """Return a contender's speedup over the fastest of ``torch.compile``; None if either is missing."""
        peer = self.fastest(COMPILE)
        if peer is None or name is None or name not in self.steps:
            return None
        return self.steps[peer].us / self.steps[name].us


@dataclass(frozen=True)
class Peer:
    """An additional contender of :func:`compare`; its kernels are not counted.

    Attributes:
        make: returns a replacement of the compared function, called with the step's inputs. For a training step, it
            must use the function's parameters.
        captured: True to capture the step in one CUDA graph; False if it creates CUDA graphs.
    """

    make: Callable[[], Callable[..., Any]]
    captured: bool = True


def contenders(kind: str, modes: Sequence[str]) -> list[str]:
    """Return the names of a kind's contenders: the kind, with the mode if there are several."""
    return [kind] if kind == EAGER or len(modes) == 1 else [f"{kind} {mode}" for mode in modes]


def step_of(
    run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], wanted: Iterable[torch.Tensor] = ()
) -> Call:
    """Return a step: the forward pass without ``wanted``, else the results and the gradients of ``wanted``.

    The backward pass starts from gradients of ones for all results that require grad. For a single loss, that is its
    usual gradient. For other results, the ones replace the gradients from later layers of a larger model.
    """
    leaves = list(wanted)

    def infer() -> object:
        with torch.no_grad():
            return run(*args, **kwargs)

    def train() -> object:
        results = run(*args, **kwargs)
        outs = [t for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor) and t.requires_grad]
        if not outs:
            raise UserError("no result of the step has a gradient, so nothing can be trained")
        gradients = torch.autograd.grad(outs, leaves, [torch.ones_like(t) for t in outs], allow_unused=True)
        return pytree.tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, results), gradients

    return train if leaves else infer


def trainable(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the parameters and inputs that require grad, whose gradients a training step computes.

    Raises:
        UserError: none requires grad.
    """
    owner = getattr(fn, "__self__", fn)
    leaves: list[torch.Tensor] = list(owner.parameters()) if isinstance(owner, nn.Module) else []
    leaves += [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    found = [t for t in leaves if t.requires_grad]
    if not found:
        raise UserError("neither parameters nor inputs require a gradient, so nothing can be trained")
    return found


def compare(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    train: bool,
    device: str,
    mode: str | Sequence[str] = "default",
    policy: Policy | None = None,
    say: Callable[[str, float], None] = lambda stage, seconds: None,
    peers: Mapping[str, Peer] | None = None,
) -> Comparison:
    """Time a step of ``fn`` in eager mode, with ``torch.compile`` and with autotune; nothing is searched or recorded.

    Args:
        fn: a module or function.
        args, kwargs: its inputs, on ``device``.
        train: True for forward and backward; a parameter or input must require grad.
        mode: one or several modes of ``torch.compile``, for both compilers. The step is captured as a whole, so a mode
            with CUDA graphs is replaced by its counterpart without them.
        policy: of the final comparison (its rounds and seconds).
        say: called with each stage (a prepared contender, "timing", "kernels", "timing with peers") and its seconds.
        peers: additional contenders, by name. They are prepared last and timed in turn with all the others. If a peer
            breaks the timing, or leaves another contender without memory, the others keep their times without peers.

    Raises:
        NotCompared: the eager step fails.
        UserError: nothing requires grad.
    """
    import autotune
    from autotune.runtime.inductor.verdict import base_mode

    modes = list(dict.fromkeys(base_mode(m) for m in ([mode] if isinstance(mode, str) else mode)))
    policy, given = policy or default_policy(device), kwargs or {}
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(device)
    makers: dict[str, Callable[[], Callable[..., Any]]] = {}
    for kind, compiler in ((COMPILE, torch.compile), (AUTOTUNE, autotune.compile)):
        for name, m in zip(contenders(kind, modes), modes, strict=True):
            options: dict[str, Any] = {} if m == "default" else {"mode": m}
            makers[name] = functools.partial(compiler, fn, dynamic=False, **options)
    more = dict(peers or {})
    wanted = trainable(fn, args, given) if train else []
    lock = ProcessLock(device, policy.lock_s)
    ready, counted, kernels = _Ready(lock, device, say), dict[str, int](), dict[str, dict[str, Any]]()
    covered = Coverage()

    def stepping(make: Callable[[], Callable[..., Any]]) -> Call:
        return step_of(make(), args, given, wanted)

    torch._dynamo.reset()
    with (
        room_for(len(makers) + len(more)),
        without_graph_caches(),
        inductor_takes_lock(lock),
        templates_in_threads(cuda and any("max-autotune" in m for m in modes)),
        deployment().unrecorded() as missed,
    ):
        eager = step_of(fn, args, given, wanted)
        try:
            want = ready.first_call(EAGER, eager)
            with lock.exclusive():
                repeat, random = _repeated(eager, want, device)
            ready.weigh(EAGER)
        except UserError:
            raise
        except Exception as error:
            raise NotCompared(first_line(error)) from error
        ready.note(EAGER, want, None if random else repeat)
        for name, make in makers.items():
            deployment().reset_counters()
            ready.prepare(name, functools.partial(stepping, make), want, random)
            if name not in ready.failed:
                counted = {k: v for k, v in dict(autotune.counters()).items() if v}
                covered = autotune.coverage()
        del want  # free the reference, which has every gradient of a training step, before the timing
        with lock.exclusive():
            with ready.stage("timing"):
                times = timed(ready.left, policy, device)
            if cuda:
                with ready.stage("kernels"):
                    kernels = kernels_of({name: ready.steps[name] for name in times.samples})
        # Peers come last: one may leave the device in an error state, and the earlier measurements remain valid.
        plain = frozenset(name for name, peer in more.items() if not peer.captured)
        if more:
            want = seeded(eager, 0, device)
            for name, peer in more.items():
                ready.prepare(name, functools.partial(stepping, peer.make), want, random)
            del want
        if late := [name for name in more if name not in ready.failed]:
            begin = time.monotonic()
            try:
                with lock.exclusive():
                    again = timed(ready.left, policy, device, plain)
                if lost := [again.failed[name] for name in times.samples if name in again.failed]:
                    raise NotCompared(lost[0])
                times = again
            except Exception as error:
                ready.failed |= dict.fromkeys(late, f"the timing with it failed: {first_line(error)}")
            say("timing with peers", round(time.monotonic() - begin, 1))
    steps = {
        name: Step(
            us=round(statistics.median(taken), 3),
            noise=round(spread(taken), 4),
            captured=cuda and name not in times.refused | plain,
            kernels=kernels.get(name),
            samples=tuple(taken),
            **ready.found[name],
        )
        for name, taken in times.samples.items()
    }
    failed = {**ready.failed, **times.failed}
    return Comparison(steps, failed, device, modes, counted, random, ready.seconds, times.others, missed, covered)


class _Ready:
    """Contenders that have been called once, and thus compiled.

    Attributes:
        steps: by contender; ``found``: fields of its :class:`Step`; ``failed``: its error.
        seconds: by finished stage (:meth:`stage`).
    """

    def __init__(self, lock: ProcessLock, device: str, say: Callable[[str, float], None]) -> None:
        self._lock, self._device, self._say = lock, device, say
        self._there = torch.cuda.memory_allocated() if device.startswith("cuda") else 0
        self.steps: dict[str, Call] = {}
        self.found: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    @property
    def left(self) -> dict[str, Call]:
        """The steps of the contenders that have not failed."""
        return {name: step for name, step in self.steps.items() if name not in self.failed}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - begin, 1)
        self._say(name, self.seconds[name])

    def first_call(self, name: str, step: Call) -> object:
        begin, waited = time.monotonic(), self._lock.waited_s
        got = seeded(step, 0, self._device)
        if self._device.startswith("cuda"):
            torch.cuda.synchronize()
        took = round(time.monotonic() - begin - (self._lock.waited_s - waited), 1)
        self.steps[name], self.found[name] = step, {"prepare_s": took}
        self._say(name, took)
        return got

    def note(self, name: str, got: object, apart: float | None) -> None:
        self.found[name] |= {"difference": apart, "largest": largest(got)}

    def weigh(self, name: str) -> None:
        """Record a step's peak memory in another call, since the first includes the compilers' memory."""
        self.found[name] |= {"peak_bytes": self._peak(self.steps[name])}

    def prepare(self, name: str, make: Callable[[], Call], want: object, random: bool) -> None:
        """Create and call a contender's step; record its difference from eager and its memory, or its error."""
        try:
            got = self.first_call(name, make())
            self.note(name, got, None if random else difference(got, want))
            del got
            self.weigh(name)
        except Exception as error:
            self.failed[name] = first_line(error)

    def _peak(self, step: Call) -> int | None:
        if not self._device.startswith("cuda"):
            return None
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        seeded(step, 0, self._device)
        torch.cuda.synchronize()
        return self._there + torch.cuda.max_memory_allocated() - before


def seeded(step: Call, seed: int, device: str) -> object:
    """Return a step's results with random numbers from ``seed``; the caller's generators keep their state."""
    cuda = [torch.device(device)] if device.startswith("cuda") else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(seed)
        return step()


def _repeated(step: Call, first: object, device: str) -> tuple[float, bool]:
    """Return the difference of two runs of a step with one seed, and True if it draws random numbers.

    Unordered additions (atomics) make runs with one seed differ by rounding. A step draws random numbers if runs with
    two seeds differ by much more. The test is not applicable to a step that modifies its inputs.

    Args:
        first: its results with seed 0.
    """
    same = difference(seeded(step, 0, device), first)
    other = difference(seeded(step, 1, device), first)
    return same, same <= CHANGING and other > 10 * same + 1e-6


@dataclass(frozen=True)
class _Timed:
    """Samples and errors by contender, refused captures, and processors that other processes kept busy."""

    samples: Mapping[str, Sequence[float]]
    refused: frozenset[str]
    failed: Mapping[str, str]
    others: float


class _Failed(Exception):
    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(first_line(error))
        self.name = name


def timed(steps: Mapping[str, Call], policy: Policy, device: str, plain: frozenset[str] = frozenset()) -> _Timed:
    """Time contenders in turn, and leave out those that fail.

    They share one memory pool, since two CUDA graphs of a large model do not fit.

    Raises:
        NotCompared: eager fails.
    """
    from autotune.measure.quiet import Meter, wait_for_quiet
    from autotune.measure.timer import interleave

    left, failed = dict(steps), dict[str, str]()
    while True:
        watched = {name: Watched(_named(name, step)) for name, step in left.items()}
        if not device.startswith("cuda"):
            wait_for_quiet(policy.quiet_s)
        meter = Meter()
        try:
            samples = interleave(watched, policy, device, one_memory=True, plain=plain, lead_s=lead_s(device))
        except _Failed as error:
            if error.name == EAGER:
                raise NotCompared(str(error)) from error
            failed[error.name] = str(error)
            del left[error.name]
            continue
        others = 0.0 if device.startswith("cuda") else meter.others()
        return _Timed(samples, frozenset(n for n, w in watched.items() if w.refused), failed, others)


def _named(name: str, step: Call) -> Call:
    def call() -> object:
        try:
            return step()
        except Exception as error:
            raise _Failed(name, error) from error

    return call

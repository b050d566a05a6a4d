"""The two sides of a workload, which a domain implements: a :class:`Task` to search, a :class:`Bench` to measure.

Processes exchange JSON and bytes only: a task is rebuilt from the workload and the device, a candidate is a
:data:`Config`, its compiled form an :class:`Artifact`. :mod:`autotune.domain` has the base class of domains.
"""

from __future__ import annotations

import functools
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from autotune.errors import UserError
from autotune.space import Choice as Choice
from autotune.space import Config as Config
from autotune.space import Space
from autotune.workload import Workload, digest


def config_key(config: Mapping[str, Choice]) -> str:
    """SHA-256 of the configuration, the key of its measurements."""
    return digest(dict(config))


class Status(StrEnum):
    """Outcome of a candidate. All are stored."""

    OK = "ok"
    INVALID = "invalid"  # rejected before compiling (not feasible)
    COMPILE_ERROR = "compile_error"
    LAUNCH_ERROR = "launch_error"
    WRONG_RESULT = "wrong_result"
    TIMEOUT = "timeout"
    CRASHED = "crashed"


FAILURES = (Status.COMPILE_ERROR, Status.LAUNCH_ERROR, Status.WRONG_RESULT, Status.TIMEOUT, Status.CRASHED)
"""Failures that can be forgotten. INVALID is not among them: such a candidate is invalid on every machine."""


@dataclass(frozen=True)
class Kernel:
    """One launch of an artifact.

    Attributes:
        code: a cubin; empty for a CPU kernel, which is emitted again from the workload and configuration when loaded.
        entry: the kernel's name in ``code``.
        launch: JSON for launching it without the compiler: grid rule, block, bytes of shared memory, arguments.
        resources: registers, spill bytes, bytes of shared memory, ... as read from the cubin.
    """

    entry: str
    code: bytes = b""
    launch: Mapping[str, Any] = field(default_factory=dict)
    resources: Mapping[str, int] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.code).hexdigest()


@dataclass(frozen=True)
class Artifact:
    """The compiled form of a configuration: kernels in launch order and the scratch tensors between them.

    ``target`` is "cpu" or an architecture such as "sm_90". ``scratch`` holds (storage type, elements) of each global
    intermediate: first those of the plan, which scale with the open extent, then those of single groups.
    """

    target: str
    kernels: tuple[Kernel, ...]
    scratch: tuple[tuple[str, int], ...] = ()
    generator: str = ""


@dataclass(frozen=True)
class Verdict:
    """Outcome of comparing a candidate with the oracle. ``error`` is the largest error over its tolerance (<= 1
    passes)."""

    ok: bool
    error: float
    detail: str = ""


Ranked = tuple[Config, float]
"""A configuration and its latency in microseconds."""


@dataclass(frozen=True)
class Composition:
    """One way to compose a workload of parts, which are workloads themselves and are tuned separately.

    Attributes:
        name: distinguishes compositions of a workload; for fusion the plan's text.
        parts: the workloads that it consists of, each once.
        weights: each part's cost by the domain's cost model, in microseconds.
        expected_us: the cost of the whole by that model.
        combine: takes each part's candidates, fastest first, and returns configurations of the whole with their
            expected latencies, best first. Empty if the candidates cannot be combined.
    """

    name: str
    parts: tuple[Workload, ...]
    weights: tuple[float, ...]
    expected_us: float
    combine: Callable[[Sequence[Sequence[Ranked]]], Sequence[Ranked]]


class Task(ABC):
    """The search's side of a workload. Construction is cheap and touches no device.

    A subclass implements the first three methods; the others have defaults.

    Attributes:
        workload: the workload.
        device: "cpu" or "cuda:N".
    """

    workload: Workload
    device: str

    @abstractmethod
    def space(self, file: str | None = None) -> Space:
        """The parameters and choices for this workload, from the domain's TOML file or the user's copy."""

    @abstractmethod
    def default(self) -> Config:
        """A good configuration found without search, which is always measured first."""

    @abstractmethod
    def build(self, config: Config) -> Artifact:
        """Compile. Runs in a pool process without a device. Raises BuildError."""

    def seeds(self) -> Sequence[Config]:
        """Further configurations from heuristics, measured right after the default."""
        return ()

    def reject(self, config: Config) -> str | None:
        """The reason why a configuration cannot work, found without compiling; None if it may work."""
        return None

    def normalize(self, config: Config) -> Config:
        """The configuration in effect: of many combinations with the same kernel, only one is measured."""
        return config

    def adapt(self, config: Config) -> Config | None:
        """Fit a configuration of a similar workload (same family or kind) to this workload's space, or None."""
        return None

    def take(self, config: Config, of: Workload) -> Config | None:
        """The configuration of a workload that is alike (``autotune.domain.Domain.alike``) for this one, or None."""
        return self.adapt(config)

    def least_us(self) -> float | None:
        """A lower bound on the latency in microseconds, at which a search ends; None if unknown."""
        return None

    def expected_gain(self, expected_us: float) -> float | None:
        """Expected speedup of a candidate over the user's own code; None if unknown.

        Args:
            expected_us: the candidate's time by :meth:`predict`.
        """
        return None

    def predict(self, config: Config) -> float | None:
        """Microseconds by the cost model, computed in a millisecond or two without compiling; None without a model."""
        return None

    def under(self, method: str, figures: Mapping[str, float]) -> Task:
        """This task restricted to a method of the domain ("" for no restriction), with ``figures`` in its cost models.

        Args:
            figures: results of a calibration on the device; empty without one.

        Raises:
            UserError: unknown method.
        """
        if method:
            raise UserError(f"searches of {self.workload.kind} workloads have no method {method!r}")
        return self

    def compositions(self, limit: int) -> Sequence[Composition]:
        """At most ``limit`` ways to compose the workload of parts, the most promising first; empty if none."""
        return ()

    def space_for(self, config: Config, file: str | None = None) -> Space:
        """The space of the composition that a configuration belongs to."""
        return self.space(file)


class Runnable(Protocol):
    """A callable to be timed: a call enqueues (cuda) or runs (cpu) the work once."""

    def __call__(self) -> object: ...


SHARED_BUILDS = "AUTOTUNE_SHARED_BUILDS"
"""Environment variable of one search's compile processes: their shared folder, removed when the search ends."""
REFERENCE = "="
"""Prefix of the names of references. A final comparison times a reference like a baseline, but a reference does not do
the whole work (it may be a part of it), so it neither wins nor counts as beaten."""


class Bench(ABC):
    """The worker's side of a workload: owns the device and the input tensors.

    A subclass implements the first three methods; the others have defaults.
    """

    @abstractmethod
    def load(self, config: Config, artifact: Artifact) -> Runnable:
        """Make a candidate ready to run on the bench's inputs. Raises on launch or load errors."""

    @abstractmethod
    def verify(self, run: Runnable, seed: int) -> Verdict:
        """Run on new random inputs (from ``seed``) with poisoned outputs, and compare with the oracle, NaN and inf
        included."""

    @abstractmethod
    def baselines(self) -> Mapping[str, Callable[[], Runnable]]:
        """Named factories of the user's alternatives ("eager", "inductor", ...), which may compile and may raise."""

    def bytes_moved(self) -> int:
        """Bytes that a perfect implementation moves, for the lower bound; 0 if unknown."""
        return 0

    def input_sets(self, count: int) -> Sequence[Any] | None:
        """``count`` copies of the inputs, including the bench's own; None if calls take no argument.

        A candidate or a baseline takes a copy as its argument, in place of the bench's own inputs. So each timed call
        has cold data and warm code; see ``measure.timing.rotate``.
        """
        return None

    def metrics(self, run: Runnable, cost: float) -> Mapping[str, float]:
        """The user's own metrics of a candidate, by name, stored with its latency; empty for a baseline.

        Args:
            cost: median of the samples, in microseconds or as :meth:`figure` measures.
        """
        return {}

    def figure(self) -> Callable[[Runnable], float] | None:
        """A function that measures one sample, above 0, to be minimized instead of time; None for time."""
        return None


GROUP = "autotune.domains"
"""The group of entry points that name domains, each a module with a :class:`autotune.domain.Domain`."""

DOMAINS: dict[str, str] = {}
"""Domain name to module, of domains registered in this process; :func:`domains` has all."""


@functools.cache
def _built_in() -> dict[str, str]:
    """The domains of this package: its folders, which exist without an installed distribution too."""
    folders = Path(__file__).parent.joinpath("domains").iterdir()
    return {f.name: f"autotune.domains.{f.name}.domain" for f in sorted(folders) if (f / "domain.py").is_file()}


@functools.cache
def _installed() -> dict[str, str]:
    from importlib.metadata import entry_points

    return {entry.name: entry.value for entry in entry_points(group=GROUP)}


def _from_environment() -> dict[str, str]:
    """The domains of ``$AUTOTUNE_DOMAINS``: ``name=module``, separated by commas."""
    entries = [e.strip() for e in os.environ.get("AUTOTUNE_DOMAINS", "").split(",") if e.strip()]
    if wrong := [e for e in entries if not all(e.partition("="))]:
        raise UserError(f"AUTOTUNE_DOMAINS: {wrong[0]!r} is not of the form name=module")
    return {name.strip(): module.strip() for name, _, module in (e.partition("=") for e in entries)}


def domains() -> dict[str, str]:
    """All domains, name to module: those of the package, of entry points, of $AUTOTUNE_DOMAINS and of :data:`DOMAINS`.

    Raises:
        UserError: $AUTOTUNE_DOMAINS cannot be read.
    """
    return _installed() | _from_environment() | _built_in() | DOMAINS


def module_of(kind: str) -> str:
    """The name of a domain's module.

    Raises:
        UserError: unknown domain; the message lists the known ones.
    """
    found = DOMAINS.get(kind) or _built_in().get(kind) or domains().get(kind)
    if found is None:
        raise UserError(f"unknown domain {kind!r}; the domains are {', '.join(sorted(domains()))}")
    return found

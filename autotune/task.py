"""The two sides of a workload, which a domain implements: a :class:`Task` to search, a :class:`Bench` to measure.

Everything that crosses a process is JSON or bytes: a task is rebuilt from the workload and the device, a candidate is a
:data:`Config`, what it compiles to is an :class:`Artifact`. :mod:`autotune.domain` has what a domain is as a whole.
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
    """SHA-256 of the configuration; what measurements are found again by."""
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
"""Failures that can be forgotten. An ok measurement is none, and an invalid candidate is one on every machine."""


@dataclass(frozen=True)
class Kernel:
    """One launch of an artifact.

    Attributes:
        code: a cubin; empty for a CPU kernel, which is emitted again from the workload and configuration when loaded.
        entry: the kernel's name in ``code``.
        launch: JSON the runtime needs to launch it without the compiler: grid rule, block, shared bytes, arguments.
        resources: registers, spill bytes, shared bytes, ... as read from the cubin.
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
    """What one configuration compiles to: kernels in launch order and the scratch tensors between them.

    ``target`` is "sm_90" and the like, or "cpu". ``scratch`` holds (storage type, elements) of each global
    intermediate: first those of the plan, which scale with the open extent, then those that belong to single groups.
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
    """One way to put a workload together from parts that are workloads of their own, and are tuned as such.

    Attributes:
        name: distinguishes compositions of a workload; for fusion the plan's text.
        parts: the workloads it is made of, each once.
        weights: what each part costs of the whole, by the domain's cost model, in microseconds.
        expected_us: what the whole costs by that model.
        combine: from each part's candidates, fastest first, to configurations of the whole with the latency to expect
            of them, best first. Empty where they do not go together.
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
        """The parameters and choices worth trying on this workload, from the domain's TOML or the user's copy."""

    @abstractmethod
    def default(self) -> Config:
        """A good configuration found without search; always measured, first."""

    @abstractmethod
    def build(self, config: Config) -> Artifact:
        """Compile. Runs in a pool process without a device. Raises BuildError."""

    def seeds(self) -> Sequence[Config]:
        """More configurations that heuristics suggest; tried right after the default."""
        return ()

    def reject(self, config: Config) -> str | None:
        """The reason why a configuration cannot work, found without compiling; None if it may work."""
        return None

    def normalize(self, config: Config) -> Config:
        """The configuration that would in effect run: many combinations mean the same kernel, and one is measured."""
        return config

    def adapt(self, config: Config) -> Config | None:
        """A configuration of a neighbour (same family or kind) fitted to this workload's space, or None."""
        return None

    def least_us(self) -> float | None:
        """A lower bound in microseconds, at which a search ends; None if unknown."""
        return None

    def expected_gain(self, expected_us: float) -> float | None:
        """How many times as fast as the user's own code a candidate should be; None if unknown.

        Args:
            expected_us: of the candidate, by :meth:`predict`.
        """
        return None

    def predict(self, config: Config) -> float | None:
        """Microseconds by the cost model, in a millisecond or two and without compiling; None where it has none."""
        return None

    def under(self, method: str, figures: Mapping[str, float]) -> Task:
        """This task confined to a method of the domain ("" is the whole), its cost models fed with ``figures``.

        Args:
            figures: what a calibration measured on the device; empty where there was none.

        Raises:
            UserError: there is no such method.
        """
        if method:
            raise UserError(f"a search of {self.workload.kind} workloads has no method {method!r}")
        return self

    def compositions(self, limit: int) -> Sequence[Composition]:
        """At most ``limit`` ways to compose the workload of parts, the most promising first; empty if it has none."""
        return ()

    def space_for(self, config: Config, file: str | None = None) -> Space:
        """The space of the composition that a configuration belongs to."""
        return self.space(file)


class Runnable(Protocol):
    """Something that can be timed: calling it enqueues (cuda) or runs (cpu) the work once."""

    def __call__(self) -> object: ...


SHARED_BUILDS = "AUTOTUNE_SHARED_BUILDS"
"""Environment variable of the processes that compile for one search: a folder that they share, gone when it ends."""
REFERENCE = "="
"""What the name of a reference begins with: it is timed in a final comparison as a baseline is, but is no way to do the
work (a part of it alone, say), and so neither wins nor is beaten."""


class Bench(ABC):
    """The worker's side of a workload: owns the device and the input tensors.

    A subclass implements the first three methods; the others have defaults.
    """

    @abstractmethod
    def load(self, config: Config, artifact: Artifact) -> Runnable:
        """Make a candidate ready to run on the bench's inputs. Raises on launch or load errors."""

    @abstractmethod
    def verify(self, run: Runnable, seed: int) -> Verdict:
        """Run on fresh random inputs (from ``seed``) with poisoned outputs; compare with the oracle, NaN and inf
        included."""

    @abstractmethod
    def baselines(self) -> Mapping[str, Callable[[], Runnable]]:
        """Named factories of what the user had ("eager", "inductor", ...); a factory may compile and may raise."""

    def bytes_moved(self) -> int:
        """Bytes a perfect implementation moves, for the floor; 0 where that is not known."""
        return 0

    def input_sets(self, count: int) -> Sequence[Any] | None:
        """``count`` copies of the inputs, the bench's own among them; None if calls take no argument.

        A candidate or a baseline takes a copy as its argument, in place of the bench's own inputs. So each call of a
        timing has cold data and warm code; see ``measure.timing.rotate``.
        """
        return None

    def metrics(self, run: Runnable, cost: float) -> Mapping[str, float]:
        """The user's own figures of a candidate, by name, stored with its latency; empty for a baseline.

        Args:
            cost: median of the samples, in microseconds or as :meth:`figure` measures.
        """
        return {}

    def figure(self) -> Callable[[Runnable], float] | None:
        """A function that takes one sample, above 0, to be minimized instead of time; None for time."""
        return None


GROUP = "autotune.domains"
"""The group of entry points that name domains, each a module with a :class:`autotune.domain.Domain`."""

DOMAINS: dict[str, str] = {}
"""Domain name to module, of those that a process was told of; :func:`domains` has the others too."""


@functools.cache
def _built_in() -> dict[str, str]:
    """The domains of this package: its folders, which are there without an installed distribution too."""
    folders = Path(__file__).parent.joinpath("domains").iterdir()
    return {f.name: f"autotune.domains.{f.name}.domain" for f in sorted(folders) if (f / "domain.py").is_file()}


@functools.cache
def _installed() -> dict[str, str]:
    """Those of entry points."""
    from importlib.metadata import entry_points

    return {entry.name: entry.value for entry in entry_points(group=GROUP)}


def _told() -> dict[str, str]:
    """Those of ``$AUTOTUNE_DOMAINS``: ``name=module``, several by comma."""
    entries = [e.strip() for e in os.environ.get("AUTOTUNE_DOMAINS", "").split(",") if e.strip()]
    if wrong := [e for e in entries if not all(e.partition("="))]:
        raise UserError(f"AUTOTUNE_DOMAINS: {wrong[0]!r} is not of the form name=module")
    return {name.strip(): module.strip() for name, _, module in (e.partition("=") for e in entries)}


def domains() -> dict[str, str]:
    """Every domain there is, name to module: the package's, those of entry points, of $AUTOTUNE_DOMAINS, and
    :data:`DOMAINS`.

    Raises:
        UserError: $AUTOTUNE_DOMAINS cannot be read.
    """
    return _installed() | _told() | _built_in() | DOMAINS


def module_of(kind: str) -> str:
    """The name of a domain's module.

    Raises:
        UserError: there is no such domain; one line that names those there are.
    """
    found = DOMAINS.get(kind) or _built_in().get(kind) or domains().get(kind)
    if found is None:
        raise UserError(f"there is no domain {kind!r}; there are {', '.join(sorted(domains()))}")
    return found

"""What a domain implements to be searched: a task (in the search's process) and a bench (in the measuring worker).

Everything that crosses a process is JSON or bytes: a task is rebuilt from ``(kind, workload, device)`` by
:func:`open_task`, a candidate is a :data:`Config`, what it compiles to is an :class:`Artifact`. A domain is a module of
which an entry point tells (:class:`Domain`), and a TOML file with its search space; ``examples/blocked_gelu`` is one.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from autotune.errors import UserError
from autotune.space import Choice as Choice
from autotune.space import Config as Config
from autotune.space import Space
from autotune.workload import Workload, digest

if TYPE_CHECKING:
    from autotune.device import DeviceIdentity
    from autotune.measure.policy import Policy


def config_key(config: Mapping[str, Choice]) -> str:
    """SHA-256 of the configuration; what measurements are found again by."""
    return digest(dict(config))


class Status(StrEnum):
    """What became of a candidate. All are stored."""

    OK = "ok"
    INVALID = "invalid"  # rejected before compiling (not feasible)
    COMPILE_ERROR = "compile_error"
    LAUNCH_ERROR = "launch_error"
    WRONG_RESULT = "wrong_result"
    TIMEOUT = "timeout"
    CRASHED = "crashed"


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


class Task(Protocol):
    """The search's side of a domain. Construction is cheap and touches no device."""

    workload: Workload
    device: str  # "cpu" or "cuda:N"

    def space(self, file: str | None = None) -> Space:
        """The parameters and choices worth trying on this workload, from the domain's TOML or the user's copy."""
        ...

    def default(self) -> Config:
        """A good configuration found without search; always measured, first."""
        ...

    def seeds(self) -> Sequence[Config]:
        """More configurations that heuristics suggest; tried right after the default."""
        ...

    def reject(self, config: Config) -> str | None:
        """Why a configuration cannot work (told before compiling), or None."""
        ...

    def normalize(self, config: Config) -> Config:
        """The configuration that would in effect run: many combinations mean the same kernel, and one is measured."""
        ...

    def build(self, config: Config) -> Artifact:
        """Compile. Runs in a pool process without a device. Raises BuildError."""
        ...

    def adapt(self, config: Config) -> Config | None:
        """A configuration of a neighbour (same family or kind) fitted to this workload's space, or None."""
        ...


Ranked = tuple[Config, float]
"""A configuration and its latency in microseconds."""


@dataclass(frozen=True)
class Composition:
    """One way to put a workload together from parts that are workloads of their own, and are tuned as such.

    Attributes:
        name: how it is told apart from others; for fusion the plan's text.
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


@runtime_checkable
class ComposedTask(Protocol):
    """What a task may offer beside :class:`Task`: parts that are shared with other workloads, and cost models."""

    def under(self, method: str, figures: Mapping[str, float]) -> Task:
        """This task confined to a method of the domain ("" is the whole), its cost models fed with ``figures``.

        Args:
            figures: what a calibration measured on the device; empty where there was none.

        Raises:
            UserError: there is no such method.
        """
        ...

    def compositions(self, limit: int) -> Sequence[Composition]:
        """Ways to compose the workload, the most promising first, at most ``limit``; empty where it is one part, and
        there is no other way."""
        ...

    def space_for(self, config: Config, file: str | None = None) -> Space:
        """The space that a configuration of some composition lies in; :meth:`Task.space` for the default one's."""
        ...

    def predict(self, config: Config) -> float | None:
        """Microseconds by the cost model, in a millisecond or two and without compiling; None where it cannot tell."""
        ...


class Runnable(Protocol):
    """Something that can be timed: calling it enqueues (cuda) or runs (cpu) the work once."""

    def __call__(self) -> object: ...


SHARED_BUILDS = "AUTOTUNE_SHARED_BUILDS"
"""Environment variable of the processes that compile for one search: a folder that they share, gone when it ends."""
REFERENCE = "="
"""What the name of a reference begins with: it is timed in a final comparison as a baseline is, but is no way to do the
work (a part of it alone, say), and so neither wins nor is beaten."""


class Bench(Protocol):
    """The worker's side of a domain: owns the device and the input tensors."""

    def load(self, config: Config, artifact: Artifact) -> Runnable:
        """Make a candidate ready to run on the bench's inputs. Raises on launch or load errors."""
        ...

    def verify(self, run: Runnable, seed: int) -> Verdict:
        """Run on fresh random inputs (from ``seed``) with poisoned outputs; compare with the oracle, NaN and inf
        included."""
        ...

    def baselines(self) -> Mapping[str, Callable[[], Runnable]]:
        """Named factories of what the user had ("eager", "inductor", ...); a factory may compile and may raise."""
        ...

    def bytes_moved(self) -> int:
        """Bytes a perfect implementation moves, for the floor."""
        ...


@runtime_checkable
class CopiedBench(Protocol):
    """What a bench may offer beside :class:`Bench`: several copies of its inputs.

    Its candidates and baselines, called with one of them, take that in the place of the bench's own, so that each call
    of a timing can have data that no cache holds, while its code is in the caches; see ``measure.timing.rotate``.
    """

    def input_sets(self, count: int) -> Sequence[Any]:
        """``count`` copies of the inputs, the bench's own among them."""
        ...


@runtime_checkable
class MetricBench(Protocol):
    """What a bench may offer beside :class:`Bench`: figures of the user's own, kept beside a candidate's latency."""

    def metrics(self, run: Runnable, cost: float) -> Mapping[str, float]:
        """Name to figure of a candidate; ``cost`` is its median latency in microseconds, or its :class:`FigureBench`'s
        figure. Empty for what is no candidate."""
        ...


@runtime_checkable
class FigureBench(Protocol):
    """What a bench may offer beside :class:`Bench`: something else than time to be made small."""

    def figure(self, run: Runnable) -> float:
        """One sample, above 0; it stands wherever a latency would."""
        ...


@runtime_checkable
class BoundedTask(Protocol):
    """What a task may offer beside :class:`Task`: a bound that lets a search end where nothing is left to win."""

    def least_us(self) -> float | None:
        """Microseconds that no candidate can beat; None where that is not known of this device."""
        ...


GROUP = "autotune.domains"
"""The group of entry points that name domains, each a module; :class:`Domain` says what it offers."""

DOMAINS: dict[str, str] = {}
"""Domain name to module, of those that a process was told of; :func:`domains` has the others too."""


class Domain(Protocol):
    """The module of a domain. Importing it is cheap, as every command does: what is heavy it imports when called.

    It may offer more, each by itself. Where its domain differs from one process on one device:

    - ``open_measurer(workload, device, policy)``: what measures in the place of ``autotune.measure.worker.Worker``;
    - ``place(workload, device)``: the ``DeviceIdentity`` that its measurements hold for;
    - ``policy(device)``: how it measures by default;
    - ``devices(workload)``: how many devices of one host a workload takes, for who has none of them at hand.

    For the search:

    - ``bytes_moved(workload)``: of a workload without a bench, by which a search's time is shared;
    - ``bytes_held(workload)``: bytes of a device's memory that its tensors take at least;
    - ``confined(workload)``: JSON of what confines a search of it beside the shipped spaces, such as choices that a
      user's code declares: a search that came to its end says nothing of another such;
    - ``damage(workload)``: why a workload that comes from a database may not be searched, or None.

    For the command line:

    - ``figure(workload, cost)``: what its search calls a latency, as a number and its unit, where it is no time;
    - ``targets()``: the names that TARGET may be, and what each computes;
    - ``workloads_of(target, inputs)``: the workloads of a TARGET and its ``--inputs`` (None where there is none), each
      with how often it occurs; raises UserError where it knows no such target;
    - ``COMMANDS``: name of a command (``search``, ``lookup``, ``bench``, ``calibrate``) to a module whose ``run(args)``
      is that command for this domain, and returns the exit code. ``search`` and ``lookup`` go by ``workloads_of``
      otherwise. A module for ``search`` with ``missed(store, device)`` and ``search_missed(args, device, store, missed,
      timeout)`` searches what deployments missed by itself; ``serves()`` is whether this process was but a helper;
    - ``add_arguments(command, parser)``: options of its own; ``refuse(command, args)`` raises UserError where they are
      given and another domain is meant;
    - ``case_problems(case)``: what is wrong with a case of a benchmark's file whose ``suite`` is the domain.

    For a report, as :class:`autotune.exhibit.Exhibit`:

    - ``exhibits(workload, config, schedule, device)``: of a workload on a ``DeviceIdentity``, with the configuration
      that won or was fastest, and its schedule; either may be None;
    - ``case_exhibits(case)``: of a case in such a file.
    """

    def open_task(self, workload: Workload, device: str) -> Task:
        """The search's side of a workload."""
        ...

    def open_bench(self, workload: Workload, device: str) -> Bench:
        """The worker's side of a workload."""
        ...


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


def domain_hook(kind: str, name: str) -> Any:
    """What the domain offers under that name, or None; see :class:`Domain`."""
    return getattr(importlib.import_module(module_of(kind)), name, None)


Figure = Callable[[float], tuple[float, str]]
"""What a latency stands for, as a number and its unit."""


def figure_of(workload: Workload) -> Figure | None:
    """What stands in a latency's place for ``workload``, whose domain may be unknown here; None where it is a time."""
    hook = domain_hook(workload.kind, "figure") if workload.kind in domains() else None
    try:
        return functools.partial(hook, workload) if hook and hook(workload, 1.0) else None
    except (KeyError, TypeError, ValueError):  # what a database says of it may be anything
        return None


def place(workload: Workload, device: str) -> DeviceIdentity:
    """The device, or the devices together, that measurements of ``workload`` on ``device`` hold for."""
    from autotune.device import identify

    own = domain_hook(workload.kind, "place")
    found: DeviceIdentity = own(workload, device) if own else identify(device)
    return found


def policy_for(workload: Workload, device: str) -> Policy:
    """How workloads of this kind are measured on ``device`` unless told otherwise."""
    from autotune.measure.policy import default_policy

    own = domain_hook(workload.kind, "policy")
    found: Policy = own(device) if own else default_policy(device)
    return found


def open_task(workload: Workload, device: str) -> Task:
    """The task of ``workload`` on ``device``."""
    task: Task = importlib.import_module(module_of(workload.kind)).open_task(workload, device)
    return task


def open_bench(workload: Workload, device: str) -> Bench:
    """The bench of ``workload`` on ``device``; call it in the measuring worker only."""
    bench: Bench = importlib.import_module(module_of(workload.kind)).open_bench(workload, device)
    return bench

"""A kernel as its user has declared it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autotune.domains.kernel.declare.space import KernelSpace
from autotune.domains.kernel.deploy.keys import KeyReader, extent_of, words
from autotune.domains.kernel.identity import kernel_name, plain_function, source_fingerprint
from autotune.errors import UserError
from autotune.workload import Workload, digest

KIND = "kernel"


@dataclass(frozen=True)
class Call:
    """What an objective and a metric are told of a candidate.

    Attributes:
        arguments: the kernel's arguments by name, without what is tuned.
        config: the candidate.
        us: its median time in microseconds; None for an objective, which measures by itself.
        run: runs the candidate once more and returns its result.
    """

    arguments: Mapping[str, Any]
    config: Mapping[str, Any]
    us: float | None
    run: Callable[[], Any]


@dataclass(frozen=True)
class Objective:
    """What is to be smallest, or largest, in the place of time.

    Attributes:
        measure: from a :class:`Call` to a figure above 0.
        unit: of the figure, such as "J".
        direction: "min" or "max".
        name: in the database; figures of another name are never compared with these.
    """

    measure: Callable[[Call], float]
    unit: str
    direction: str = "min"
    name: str = "objective"

    def cost(self, figure: float) -> float:
        """What the search makes small: the figure, or its inverse."""
        return figure if self.direction == "min" else 1 / figure

    figure = cost
    """The inverse of :meth:`cost`, which is the same function."""


@dataclass
class Kernel:
    """A callable, and all that was said of it; see :func:`autotune.domains.kernel.declare.decorator.tunable`."""

    fn: Any
    space: KernelSpace
    key: Sequence[str] | Callable[..., Any] | None = None
    name: str = ""
    reference: Callable[..., Any] | None = None
    inputs: Callable[..., Any] | Sequence[Any] | None = None
    shapes: Sequence[Mapping[str, Any]] = ()
    outputs: Sequence[str] = ()
    metrics: Mapping[str, Callable[[Call], float]] = field(default_factory=dict)
    objective: Objective | None = None
    distance: Callable[[Mapping[str, Any], Mapping[str, Any]], float] | None = None
    within: float = 2.0
    tolerance: float | None = None
    grid: Any = None
    reset: Sequence[str] = ()
    restore: Sequence[str] = ()
    prune: Callable[[Mapping[str, Any], list[dict[str, Any]]], list[dict[str, Any]]] | None = None
    file: str = ""

    def __post_init__(self) -> None:
        self.name = self.name or kernel_name(self.fn)

    @cached_property
    def signature(self) -> dict[str, Any] | None:
        """Its parameters but for what is tuned, with their defaults (None where there is none); None if unknown."""
        parameters = parameters_of(self.fn)
        if parameters is None:
            return None
        tuned = set(self.space.names)
        usual = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        return {p.name: None if p.default is p.empty else p.default for p in usual if p.name not in tuned}

    @cached_property
    def positional(self) -> list[str] | None:
        """Names of what may be given by position, tuned or not; None where that has no end or is not known."""
        parameters = parameters_of(self.fn)
        if parameters is None or any(p.kind is p.VAR_POSITIONAL for p in parameters):
            return None
        return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    @cached_property
    def reader(self) -> KeyReader:
        """What reads the key of a call."""
        return KeyReader(self.signature, self.key, self.name, self.space.names)

    @cached_property
    def source(self) -> str:
        """Fingerprint of what it computes."""
        return source_fingerprint(self.fn, self.space.names)

    def workload(self, key: Mapping[str, Any], **source: Any) -> Workload:
        """What is tuned for a key.

        Args:
            source: what the measuring process needs to make the inputs: ``target``, ``file``, ``arguments``.
        """
        spec: dict[str, Any] = {"kernel": self.name, "source": self.source, "key": dict(key)}
        if self.objective is not None:
            o = self.objective
            spec["objective"] = {"name": o.name, "unit": o.unit, "direction": o.direction}
        unit = f" [{self.objective.unit}]" if self.objective else ""
        return Workload(
            KIND,
            spec,
            family=self.family(key),
            extent=extent_of(key),
            label=f"{self.name} {words(key)}".strip() + unit,
            source=source,
        )

    def family(self, key: Mapping[str, Any]) -> str:
        """What keys of one kernel share, whatever version of it: schedules are sought there for near keys, and for
        those of an earlier version."""
        objective = [self.objective.name, self.objective.unit, self.objective.direction] if self.objective else []
        return digest({"kind": KIND, "kernel": self.name, "key": sorted(key), "objective": objective})

    def launch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
        """Run it once with a configuration; a Triton kernel over its declared grid."""
        if self.grid is None:
            return self.fn(*args, **{**kwargs, **config})
        self.fn[self.grid](*args, **{**kwargs, **config})
        return None  # Triton gives the compiled kernel back, which is no result


def parameters_of(fn: Any) -> list[inspect.Parameter] | None:
    """The parameters of the Python function behind a kernel; None where it tells none."""
    try:
        return list(inspect.signature(plain_function(fn)).parameters.values())
    except (TypeError, ValueError):
        return None


def check_parameters(fn: Any, names: Sequence[str], where: str, meta: Sequence[str] = ()) -> dict[str, Any]:
    """See that a callable has the parameters that are to be tuned; returns the defaults that it gives them.

    Args:
        meta: parameters that the launch takes in the function's place.

    Raises:
        UserError: it has none of such a name.
    """
    parameters = parameters_of(fn)
    if parameters is None:
        return {}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        known = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY} | set(meta)
        if wrong := [name for name in names if name not in known]:
            raise UserError(
                f"{where}: the function has no parameter {wrong[0]!r} to tune; it has"
                f" {', '.join(p.name for p in parameters)}"
            )
    return {p.name: p.default for p in parameters if p.name in names and p.default is not p.empty}

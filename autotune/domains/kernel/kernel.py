"""A kernel's declaration, and the keys under which configurations are looked up.

A key has two forms. In a process it is a tuple, made from the arguments of every call in one or two microseconds. In
the database it is a JSON object, made once per tuple and equal in all processes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autotune.domains.kernel.identity import kernel_name, plain_function, source_fingerprint
from autotune.domains.kernel.space import KernelSpace
from autotune.errors import UserError, first_line
from autotune.space import is_number
from autotune.workload import Workload, digest

KIND = "kernel"
DEFAULT = "default"
"""The baseline that a search compares with: the kernel's default configuration."""


@dataclass(frozen=True)
class Call:
    """The information about a candidate that an objective or a metric receives.

    Attributes:
        arguments: the kernel's arguments by name, without tuned parameters.
        config: the candidate's configuration.
        us: median time in microseconds; None for an objective, which measures by itself.
        run: runs the candidate once and returns its result.
    """

    arguments: Mapping[str, Any]
    config: Mapping[str, Any]
    us: float | None
    run: Callable[[], Any]


@dataclass(frozen=True)
class Objective:
    """A figure to minimise or maximise instead of time.

    Attributes:
        measure: returns a figure above 0 for a :class:`Call`.
        unit: unit of the figure, such as "J".
        direction: "min" or "max".
        name: name in the database; figures of different names are never compared.
    """

    measure: Callable[[Call], float]
    unit: str
    direction: str = "min"
    name: str = "objective"

    def cost(self, figure: float) -> float:
        """The cost that a search minimises: the figure, or its reciprocal."""
        return figure if self.direction == "min" else 1 / figure

    figure = cost
    """Inverse of :meth:`cost`; both are the same function."""


@dataclass
class Kernel:
    """A callable and its declaration; see :func:`autotune.domains.kernel.tunable.tunable`."""

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
        """Untuned parameters and their defaults (None without a default); None if the signature is unknown."""
        parameters = parameters_of(self.fn)
        if parameters is None:
            return None
        tuned = set(self.space.names)
        usual = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        return {p.name: None if p.default is p.empty else p.default for p in usual if p.name not in tuned}

    @cached_property
    def positional(self) -> list[str] | None:
        """Names of positional parameters, tuned or not; None with ``*args`` or an unknown signature."""
        parameters = parameters_of(self.fn)
        if parameters is None or any(p.kind is p.VAR_POSITIONAL for p in parameters):
            return None
        return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    @cached_property
    def reader(self) -> KeyReader:
        """The reader of a call's key."""
        return KeyReader(self.signature, self.key, self.name, self.space.names)

    @cached_property
    def source(self) -> str:
        """Fingerprint of the kernel's source."""
        return source_fingerprint(self.fn, self.space.names)

    def workload(self, key: Mapping[str, Any], **source: Any) -> Workload:
        """The workload of a key.

        Args:
            source: data for the measuring process to make the inputs: ``target``, ``file``, ``arguments``.
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
        """Hash shared by a kernel's keys and versions; look-ups search it for near keys and earlier versions."""
        objective = [self.objective.name, self.objective.unit, self.objective.direction] if self.objective else []
        return digest({"kind": KIND, "kernel": self.name, "key": sorted(key), "objective": objective})

    def launch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
        """Run the kernel once with a configuration; a Triton kernel over its declared grid."""
        if self.grid is None:
            return self.fn(*args, **{**kwargs, **config})
        self.fn[self.grid](*args, **{**kwargs, **config})
        return None  # Triton returns the compiled kernel, which is not a result


def parameters_of(fn: Any) -> list[inspect.Parameter] | None:
    """The parameters of the Python function behind a kernel; None if it has no signature."""
    try:
        return list(inspect.signature(plain_function(fn)).parameters.values())
    except (TypeError, ValueError):
        return None


def check_parameters(fn: Any, names: Sequence[str], where: str, meta: Sequence[str] = ()) -> dict[str, Any]:
    """Check that a callable has the parameters to tune; returns their defaults in its signature.

    Args:
        meta: parameters of the launch, which the function does not declare.

    Raises:
        UserError: the function lacks one of the parameters.
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


# ---- keys -----------------------------------------------------------------------------------------------------------


Key = Mapping[str, Any]
Raw = tuple[Any, ...]

_SCALARS = frozenset((int, str, type(None)))
_TYPED = frozenset((float, bool))  # may equal an int of another meaning, so the type is part of the key


class KeyReader:
    """Reader of a call's key.

    Args:
        signature: names and defaults of the kernel's untuned parameters in order, keyword-only ones last; None if the
            kernel has no signature.
        key: names of parameters; a callable of the kernel's own arguments; None for all untuned parameters.
        where: prefix of messages.

    Raises:
        UserError: a name is not one of the kernel's untuned parameters.
    """

    def __init__(
        self,
        signature: Mapping[str, Any] | None,
        key: Sequence[str] | Callable[..., Any] | None,
        where: str,
        tuned: Sequence[str] = (),
    ) -> None:
        self._where, self._made = where, key if callable(key) else None
        names = list(signature or ())
        wanted = names if key is None else [] if callable(key) else list(key)
        if signature is None and not callable(key):
            raise UserError(f"{where}: the kernel has no signature: give key= as a callable of its arguments")
        for name in wanted:
            if name in tuned:
                raise UserError(f"{where}: {name} is tuned and cannot be in the key")
            if name not in names:
                raise UserError(
                    f"{where}: the key names {name!r}, which is not a parameter of the kernel ({', '.join(names)})"
                )
        if len(set(wanted)) < len(wanted):
            raise UserError(f"{where}: the key names {next(n for n in wanted if wanted.count(n) > 1)!r} twice")
        self.names = None if callable(key) else tuple(wanted)
        self._places = tuple(
            (i, name, default, name in wanted) for i, (name, default) in enumerate((signature or {}).items())
        )

    def raw(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Raw:
        """The key of a call in this process; its items are hashable."""
        if self._made is not None:
            return (_hashable(self._made(*args, **kwargs)),)
        out: list[Any] = []
        count = len(args)
        for i, name, default, wanted in self._places:
            value = args[i] if i < count else kwargs.get(name, default)
            kind = value.__class__
            if kind in _SCALARS:
                if wanted:
                    out.append(value)
            elif kind in _TYPED:
                if wanted:
                    out += (kind, value)
            elif (dtype := getattr(value, "dtype", None)) is not None:
                out.append(dtype)
                if wanted:
                    out.append(value.shape)
                if getattr(value, "is_cuda", False):
                    out.append(value.device)
            elif wanted:
                out.append(_hashable(value))
        return tuple(out)

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The key as a JSON object.

        Raises:
            UserError: it holds a value other than numbers, strings, dtypes and lists of them.
        """
        if self._made is not None:
            try:
                made = self._made(*args, **kwargs)
            except Exception as error:
                raise UserError(f"{self._where}: key= failed: {first_line(error)}") from error
            items = (
                made.items()
                if isinstance(made, Mapping)
                else enumerate(made)
                if isinstance(made, (tuple, list))
                else [(0, made)]
            )
            return {str(name): self._json(value, str(name)) for name, value in items}
        found: dict[str, Any] = {}
        for i, name, default, wanted in self._places:
            value = args[i] if i < len(args) else kwargs.get(name, default)
            if getattr(value, "dtype", None) is not None:
                found[f"{name}.dtype"] = _dtype(value.dtype)
                if wanted:
                    found[name] = [int(n) for n in value.shape]
            elif wanted:
                found[name] = self._json(value, name)
        return found

    def _json(self, value: Any, name: str) -> Any:
        if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
            return value
        if isinstance(value, (tuple, list)):
            return [self._json(v, name) for v in value]
        if type(value).__name__ == "dtype" or "dtype" in type(value).__name__.lower():
            return _dtype(value)
        if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
            return self._json(value.item(), name)
        raise UserError(
            f"{self._where}: the key's {name} is a {type(value).__name__}; a key may have numbers, strings, types and"
            " lists of them: leave it out of key=, or give key= as a callable"
        )


def device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The device of a call's first CUDA tensor; "cpu" without one."""
    for value in (*args, *kwargs.values()):
        if getattr(value, "is_cuda", False):
            return str(value.device)
    return "cpu"


def _dtype(value: Any) -> str:
    return str(getattr(value, "name", None) or value).removeprefix("torch.")


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((name, _hashable(v)) for name, v in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return (value.__class__, value) if value.__class__ in _TYPED else value


def log_distance(a: Key, b: Key) -> float:
    """Distance of two keys: the largest ``|log2|`` of the ratio of two numbers; 1 is a factor of two.

    The distance is infinite if anything other than positive numbers differs.
    """
    if a.keys() != b.keys():
        return math.inf
    return max((_log_distance(a[name], b[name]) for name in a), default=0.0)


def _log_distance(x: Any, y: Any) -> float:
    if isinstance(x, list) and isinstance(y, list):
        return max(map(_log_distance, x, y), default=0.0) if len(x) == len(y) else math.inf
    if x == y and type(x) is type(y):
        return 0.0
    numbers = all(is_number(v) and v > 0 for v in (x, y))
    return abs(math.log2(x) - math.log2(y)) if numbers else math.inf


def extent_of(key: Key) -> int:
    """The product of a key's sizes, at most 2**62; a search starts from the best of keys of similar extent."""
    sizes = [n for value in key.values() for n in (value if isinstance(value, list) else [value])]
    numbers = [n for n in sizes if isinstance(n, int) and not isinstance(n, bool) and n > 0]
    return min(math.prod(numbers), 1 << 62)


def words(key: Key) -> str:
    """Format a key for display: ``M=512 N=512 x=4096x1024 float32``."""
    out = []
    types = {name.removesuffix(".dtype"): value for name, value in key.items() if name.endswith(".dtype")}
    for name, value in key.items():
        if name.endswith(".dtype"):
            continue
        text = "x".join(map(str, value)) if isinstance(value, list) else str(value)
        out.append(f"{name}={text}")
    out += dict.fromkeys(map(str, types.values()))
    return " ".join(out)

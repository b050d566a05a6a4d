"""``autotune.tunable``: kernels whose tuned parameters are filled in at each call, and the look-up behind them.

``exact``: this key was tuned on an equal device. ``nearest``: another key of the kernel, within the allowed distance,
was tuned. ``default``: neither; the kernel runs as it would without autotune. A database row is only data: a
configuration is used if it is in the current code's space, and a look-up never imports or calls anything from a row.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.device import DeviceIdentity, Environment
from autotune.domains.kernel.declare import file_of, from_converted, from_file, make_kernel
from autotune.domains.kernel.identity import kernel_name, target_of
from autotune.domains.kernel.kernel import DEFAULT, Call, Kernel, Objective, device_of, log_distance, words
from autotune.domains.kernel.triton import Converted, converted, is_autotuner
from autotune.errors import UserError, first_line
from autotune.runtime.deployment import deployment
from autotune.store.reading import Reader
from autotune.store.records import Schedule
from autotune.task import Config
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.tuner.result import Result

_KEPT = 1 << 16
"""Maximum number of keys that a kernel keeps in memory."""
_MISSES = 1000
"""Maximum number of keys without a schedule that a process records."""


class Tunable:
    """A callable whose tuned parameters are filled in; made by ``autotune.tunable``.

    The first call with a key looks up its configuration in the database; later calls find it in a dictionary. A
    parameter given by the caller overrides the configuration. A call never searches or measures.

    Attributes:
        kernel: the declaration.
        db: database for look-ups; None for $AUTOTUNE_DB or the default file.
    """

    def __init__(self, kernel: Kernel, db: str | None = None) -> None:
        self.kernel, self.db = kernel, db
        self._fn = kernel.fn
        self._raw = kernel.reader.raw
        names, tuned = kernel.positional, set(kernel.space.names)
        self._names = names or []
        self._most = sys.maxsize if names is None else next((i for i, n in enumerate(names) if n in tuned), len(names))
        self._configs: dict[Any, Config] = {}
        self._matches: dict[Any, KernelMatch] = {}
        self._lock = threading.Lock()
        functools.update_wrapper(self, kernel.fn, updated=())

    def __repr__(self) -> str:
        return f"<tunable {self.kernel.name} of {', '.join(self.kernel.space.names)}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) > self._most:
            args, kwargs = self._named(args, kwargs)
        config = self._configs.get(self._raw(args, kwargs))
        if config is None:
            config = self._decide(args, kwargs)
        if kwargs:
            return self._fn(*args, **{**config, **kwargs})
        return self._fn(*args, **config)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """Launch a Triton kernel, ``kernel[grid](...)``; the grid may be a callable of the parameters."""
        over = self._fn[grid]

        def launch(*args: Any, **kwargs: Any) -> Any:
            if len(args) > self._most:
                args, kwargs = self._named(args, kwargs)
            config = self._configs.get(self._raw(args, kwargs))
            if config is None:
                config = self._decide(args, kwargs)
            return over(*args, **{**config, **kwargs})

        return launch

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def config(self, *args: Any, **kwargs: Any) -> Config:
        """The configuration that a call with these arguments would run."""
        return dict(self.lookup(*args, **kwargs).config)

    def lookup(self, *args: Any, **kwargs: Any) -> KernelMatch:
        """The result of the look-up for these arguments."""
        args, kwargs = self._named(args, kwargs)
        raw = self._raw(args, kwargs)
        if raw not in self._configs:
            self._decide(args, kwargs)
        return self._matches[raw]

    def refresh(self) -> None:
        """Clear the cached look-ups, so that later calls use newly stored results."""
        with self._lock:
            self._configs.clear()
            self._matches.clear()

    def search(
        self,
        shapes: Sequence[Mapping[str, Any]] | None = None,
        *,
        device: str | Sequence[str] = "auto",
        db: str | None = None,
        **options: Any,
    ) -> list[Result]:
        """Search this kernel on this machine, as ``autotune search kernel`` does.

        Args:
            shapes: arguments of the inputs factory, one dict per key; None for the declared ones.
            device: "auto", "cpu", "cuda:N", or several equal GPUs.
            db: database; None for the kernel's, $AUTOTUNE_DB or the default file.
            options: options of :func:`autotune.api.tune_workloads`: ``trials``, ``timeout``, ``sampler``, ...

        Raises:
            UserError: the arguments or the declaration are invalid.
        """
        from autotune.api import tune_workloads
        from autotune.device import resolve_devices
        from autotune.domains.kernel.task import workloads_of
        from autotune.store import Store

        devices = resolve_devices(device)
        workloads = workloads_of(self.kernel, target_of(self, self.kernel.fn), shapes, devices[0])
        with Store.open(db or self.db) as store:
            results = tune_workloads(workloads, devices, store, **options)
        self.refresh()
        return results

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move the first tuned positional argument, and all after it, to keyword arguments."""
        return args[: self._most], {**dict(zip(self._names[self._most :], args[self._most :], strict=False)), **kwargs}

    def _decide(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Config:
        """Look up and cache the configuration of a call's key; a failing database gives the default and a warning."""
        from autotune.device import environment, identify

        raw = self._raw(args, kwargs)
        key, device = self.kernel.reader.read(args, kwargs), device_of(args, kwargs)
        try:
            match = find(self.kernel, key, deployment().store(self.db), identify(device), environment(device))
        except UserError as error:
            text = f"autotune: {self.kernel.name} runs with its default: {error}"
            deployment().warn_once(f"kernel {self.kernel.name}", text)
            match = KernelMatch(KernelLevel.DEFAULT, dict(self.kernel.space.default), key, reason=str(error))
        if match.changed:
            text = f"autotune: {self.kernel.name}: {match.reason}; until then it runs with its default"
            deployment().warn_once(f"changed {self.kernel.name}", text)
        if match.level is not KernelLevel.EXACT and self.kernel.inputs is not None and len(self._matches) < _MISSES:
            deployment().record_misses([(self.kernel.workload(key), match.reason)], device, self.db)
        with self._lock:
            if len(self._configs) >= _KEPT:
                self._configs.clear()
                self._matches.clear()
            self._matches[raw] = match
            self._configs[raw] = match.config
        return match.config


# ---- the decorator --------------------------------------------------------------------------------------------------


class _Tunable:
    """The decorator ``autotune.tunable`` and its variants for Triton."""

    def __call__(
        self,
        space: Mapping[str, Iterable[Any]] | Sequence[Mapping[str, Any]] | str | Path | None = None,
        *,
        key: Sequence[str] | Callable[..., Any] | None = None,
        reference: Callable[..., Any] | None = None,
        inputs: Callable[..., Any] | Sequence[Any] | None = None,
        shapes: Sequence[Mapping[str, Any]] = (),
        constraints: Sequence[str | Callable[..., bool]] = (),
        default: Mapping[str, Any] | None = None,
        outputs: Sequence[str] = (),
        metrics: Mapping[str, Callable[[Call], float]] | None = None,
        objective: Objective | None = None,
        distance: Callable[[Mapping[str, Any], Mapping[str, Any]], float] | None = None,
        within: float = 2.0,
        tolerance: float | None = None,
        grid: Any = None,
        name: str = "",
        db: str | None = None,
    ) -> Callable[[Any], Tunable]:
        """Make a kernel tunable.

        ::

            @autotune.tunable(space={"block": [32, 64, 128]}, key=["x"], reference=plain, inputs=make)
            def blur(x, block=64): ...

        Args:
            space: parameter name to choices; or a list of configurations; or a TOML file, found relative to the code.
            key: arguments that select a call's configuration, by name (a number counts by its value, an array by its
                shape), or a callable of the arguments that returns numbers and strings. None for all arguments.
                Arrays that are not named count by dtype.
            reference: takes the untuned arguments and returns the correct result, or writes it as the kernel does. None
                for the kernel's default configuration.
            inputs: makes arguments: a callable that returns a dict of them, a tuple or ``(args, kwargs)``; it is given
                ``device`` and ``seed`` if it takes them. Or a list of such arguments.
            shapes: arguments of ``inputs``, one dict per key to search.
            constraints: strings such as "A * B <= 1024", or callables that take parameters by name.
            default: the configuration without a search; None takes it from the function's signature.
            outputs: arguments that the kernel writes, if it returns nothing and the reference returns their values.
            metrics: name to a figure of a :class:`Call`, ``{"GB/s": lambda c: 8e-3 * c.arguments["n"] / c.us}``.
            objective: figure to minimise or maximise instead of time.
            distance: distance of two keys, for level ``nearest``; infinite if they are not comparable. None for the
                largest ``|log2|`` of the ratio of two numbers.
            within: largest distance for level ``nearest``; ignored with a custom ``distance``.
            tolerance: relative error allowed; None for one by dtype.
            grid: grid of a Triton kernel, for the search.
            name: name in the database; None for the module's last name and the function's.
            db: database for look-ups; None for $AUTOTUNE_DB or the default file.

        Raises:
            UserError: an argument is invalid; a one-line message.
        """
        given = {k: v for k, v in locals().items() if k not in ("self", "space", "db", "name")}
        if callable(space):
            raise UserError("autotune.tunable needs a space: write @autotune.tunable(space={...})")

        def declare(fn: Any) -> Tunable:
            if isinstance(space, (str, Path)):
                path = Path(space)
                if not path.is_absolute() and (code := file_of(fn)):
                    path = code.parent / path
                said = {k: v for k, v in given.items() if v is not _UNSET[k]}
                return Tunable(from_file(fn, path, said, name), db)
            return Tunable(make_kernel(fn, space=space, name=name, **given), db)

        return declare

    def from_triton(self, kernel: Any, **more: Any) -> Tunable:
        """Make a kernel with ``triton.autotune`` tunable: its configurations become the space, its key the key.

        ::

            matmul = autotune.tunable.from_triton(matmul, inputs=make, grid=grid)

        Args:
            kernel: the result of ``@triton.autotune``.
            more: arguments of ``autotune.tunable``; a search also needs ``inputs`` and ``grid``.

        Raises:
            UserError: the argument is not such a kernel, or it has a ``pre_hook``, which cannot be stored.
        """
        if not is_autotuner(kernel):
            raise UserError(f"{kernel_name(kernel)} has no triton.autotune: use autotune.tunable(space=...)")
        found = Converted.of(kernel)
        return Tunable(from_converted(kernel.fn, found, more), more.pop("db", None))

    def triton(
        self,
        configs: Sequence[Any],
        key: Sequence[str],
        *,
        prune_configs_by: Mapping[str, Any] | None = None,
        reset_to_zero: Sequence[str] | None = None,
        restore_value: Sequence[str] | None = None,
        pre_hook: Any = None,
        post_hook: Any = None,
        warmup: Any = None,
        rep: Any = None,
        use_cuda_graph: Any = None,
        do_bench: Any = None,
        cache_results: Any = None,
        **more: Any,
    ) -> Callable[[Any], Tunable]:
        """Replace ``@triton.autotune``: takes the same arguments, and those of ``autotune.tunable``.

        ``warmup``, ``rep``, ``use_cuda_graph``, ``do_bench`` and ``cache_results`` configure Triton's measurements in a
        call. They are ignored: a search measures by its own policy.

        Raises:
            UserError: a hook is given, which cannot be stored.
        """
        found = converted(configs, key, prune_configs_by, reset_to_zero, restore_value, pre_hook, post_hook)
        return lambda fn: Tunable(from_converted(fn, found, more), more.pop("db", None))


_UNSET: Mapping[str, Any] = {
    n: p.default for n, p in inspect.signature(_Tunable.__call__).parameters.items() if p.default is not p.empty
}
tunable = _Tunable()
triton_autotune = tunable.triton


# ---- look-ups -------------------------------------------------------------------------------------------------------


CHANGED = "the kernel changed since it was tuned"


class KernelLevel(StrEnum):
    """Match levels of a look-up, best first."""

    EXACT = "exact"
    NEAREST = "nearest"
    DEFAULT = "default"


@dataclass(frozen=True)
class KernelMatch:
    """The configuration found for a key.

    Attributes:
        level: the match level.
        config: the configuration that the kernel runs.
        key: the key of the look-up.
        tuned: the key that ``config`` was tuned for; None at level ``default``.
        distance: distance from ``key`` to ``tuned``; None at level ``default``.
        schedule: the schedule stored for ``tuned``.
        reason: reason why there is no better match; empty at level ``exact``.
        changed: True if nothing matched and schedules of an earlier version of the kernel are stored.
    """

    level: KernelLevel
    config: Config
    key: Mapping[str, Any]
    tuned: Mapping[str, Any] | None = None
    distance: float | None = None
    schedule: Schedule | None = None
    reason: str = ""
    changed: bool = False

    @property
    def latency_us(self) -> float | None:
        """Measured time of ``config``, in microseconds, for ``tuned``."""
        return self.schedule.latency_us if self.schedule else None


def find(
    kernel: Kernel,
    key: Mapping[str, Any],
    store: Reader | None,
    device: DeviceIdentity,
    env: Environment,
    *,
    strict: bool = False,
) -> KernelMatch:
    """Look up a key; always returns a match.

    Args:
        store: the database; None gives the default.
        strict: require the software of the tuning run exactly, instead of only the minor versions of torch and CUDA.

    Raises:
        UserError: the database, the kernel's own distance or a constraint failed.
    """
    default = dict(kernel.space.default)
    if store is None:
        return KernelMatch(KernelLevel.DEFAULT, default, key, reason="there is no database")
    how: Any = "strict" if strict else "loose"
    workload, why = kernel.workload(key), "not tuned on this device"
    schedule = store.get_schedule(workload.fingerprint, device.fingerprint, env, match=how)
    if schedule is not None:
        config, unfit = _usable(kernel, key, schedule, store.get_workload(workload.fingerprint))
        if not unfit:
            return KernelMatch(KernelLevel.EXACT, config, key, key, 0.0, schedule)
        why = f"what is stored cannot be used: {unfit}"
    others = store.family_schedules(workload.family, device.fingerprint, env, match=how, artifacts=False)
    schedules = {s.key.workload: s for s in others if s.key.workload != workload.fingerprint}
    known = store.get_workloads(schedules)
    same = [w for w in known.values() if w.spec.get("source") == kernel.source]
    for away, other in _by_distance(kernel, key, same):
        tuned = dict(other.spec["key"])
        config, unfit = _usable(kernel, key, schedules[other.fingerprint], other)
        if not unfit:
            reason = f"{why}; {words(tuned)} is the nearest tuned"
            return KernelMatch(KernelLevel.NEAREST, config, key, tuned, away, schedules[other.fingerprint], reason)
    changed = len(same) < len(known)
    if changed:
        why = f"{CHANGED}: search it again"
    elif same:
        why += "; no key that was tuned is near enough"
    return KernelMatch(KernelLevel.DEFAULT, default, key, reason=why, changed=changed)


def _by_distance(kernel: Kernel, key: Mapping[str, Any], tuned: list[Workload]) -> list[tuple[float, Workload]]:
    """Workloads of other keys within the allowed distance, nearest first."""
    near = []
    for other in tuned:
        its = other.spec.get("key")
        if not isinstance(its, Mapping):
            continue
        try:
            away = float((kernel.distance or log_distance)(key, its))
        except Exception as error:
            raise UserError(f"{kernel.name}: distance= failed: {first_line(error)}") from error
        if away <= (math.nextafter(math.inf, 0) if kernel.distance else kernel.within):
            near.append((away, other.label, other))
    return [(away, other) for away, _, other in sorted(near, key=lambda n: n[:2])]


def _usable(
    kernel: Kernel, key: Mapping[str, Any], schedule: Schedule, workload: Workload | None
) -> tuple[Config, str]:
    """The configuration of a schedule, and the reason why it cannot be used ("" if it can)."""
    config = schedule.config
    if config is None and schedule.winner == DEFAULT:
        then = workload.source.get(DEFAULT) if workload is not None else None
        config = dict(then) if isinstance(then, Mapping) else dict(kernel.space.default)
    if config is None:
        return {}, f"its winner {schedule.winner!r} is not known"
    if why := kernel.space.reject(config, key):
        return {}, why
    return dict(config), ""

"""The kernel as it is called: as before, with the configuration that was found for its key."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.domains.kernel.deploy.keys import device_of
from autotune.domains.kernel.deploy.match import KernelLevel, KernelMatch, find
from autotune.domains.kernel.kernel import Kernel
from autotune.task import Config

if TYPE_CHECKING:
    from autotune.tuner.result import Result


_KEPT = 1 << 16
"""Keys that a kernel remembers at most."""
_MISSES = 1000
"""Keys without a schedule that a process records at most."""


class Tunable:
    """A callable whose tuned parameters are filled in; made by ``autotune.tunable``.

    The first call with a key looks its configuration up in the database; later ones find it in a dictionary. A
    parameter that the caller gives is the caller's. Nothing is ever searched or measured in a call.

    Attributes:
        kernel: what was declared.
        db: database to look up in; None for $AUTOTUNE_DB or the default file.
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
        """A Triton kernel over a grid, ``kernel[grid](...)``; the grid may be a callable of the parameters."""
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
        """What the kernel would run with for these arguments."""
        return dict(self.lookup(*args, **kwargs).config)

    def lookup(self, *args: Any, **kwargs: Any) -> KernelMatch:
        """What was found for these arguments, and how well it is founded."""
        args, kwargs = self._named(args, kwargs)
        raw = self._raw(args, kwargs)
        if raw not in self._configs:
            self._decide(args, kwargs)
        return self._matches[raw]

    def refresh(self) -> None:
        """Forget what was looked up, so that the next calls see what was stored meanwhile."""
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
        """Search this kernel on this machine; what ``autotune search kernel`` does.

        Args:
            shapes: the arguments of the inputs factory, a dict for each key; None for the declared ones.
            device: "auto", "cpu", "cuda:N", or several equal GPUs.
            db: database; None for that of the kernel, $AUTOTUNE_DB or the default file.
            options: of :func:`autotune.api.tune_workloads`: ``trials``, ``timeout``, ``sampler``, ...

        Raises:
            UserError: a mistake in the arguments, or in what was declared.
        """
        from autotune.api import tune_workloads
        from autotune.device import resolve_devices
        from autotune.domains.kernel.identity import target_of
        from autotune.domains.kernel.workloads import workloads_of
        from autotune.store import Store

        devices = resolve_devices(device)
        workloads = workloads_of(self.kernel, target_of(self, self.kernel.fn), shapes, devices[0])
        with Store.open(db or self.db) as store:
            results = tune_workloads(workloads, devices, store, **options)
        self.refresh()
        return results

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call, with what is tuned, and all after it, by name."""
        return args[: self._most], {**dict(zip(self._names[self._most :], args[self._most :], strict=False)), **kwargs}

    def _decide(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Config:
        """Look a call's key up, and keep what was found; never fails for what is wrong with the database."""
        from autotune.device import environment, identify
        from autotune.errors import UserError
        from autotune.runtime.deployment import deployment

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

"""Triton support: convert the arguments of ``triton.autotune`` to a space, and compile kernels ahead of measurement.

The conversion does not import Triton: it reads the attributes of Triton's objects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.domains.kernel.kernel import Kernel
from autotune.errors import UserError, first_line
from autotune.task import Config, config_key

META = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""Launch parameters of every Triton kernel."""

Prune = Callable[[Mapping[str, Any], list[dict[str, Any]]], list[dict[str, Any]]]


@dataclass(frozen=True)
class Converted:
    """The arguments of ``triton.autotune``.

    Attributes:
        points: the configurations, in order.
        key: names of arguments.
        reset: arguments that are zeroed before each run.
        restore: arguments that are restored to their first values before each run.
        prune: maps arguments by name and configurations to the configurations worth trying; None keeps all.
    """

    points: tuple[dict[str, Any], ...]
    key: tuple[str, ...]
    reset: tuple[str, ...] = ()
    restore: tuple[str, ...] = ()
    prune: Prune | None = None

    @classmethod
    def of(cls, autotuner: Any) -> Converted:
        """Read the arguments from a Triton ``Autotuner``; raises UserError."""
        early = getattr(autotuner, "early_config_prune", None)
        model = getattr(autotuner, "perf_model", None)
        by = {"early_config_prune": early, "perf_model": model, "top_k": getattr(autotuner, "configs_top_k", None)}
        return converted(
            autotuner.configs,
            autotuner.keys,
            {k: v for k, v in by.items() if v is not None} if early or model else None,
            getattr(autotuner, "reset_to_zero", None),
            getattr(autotuner, "restore_value", None),
            getattr(autotuner, "user_defined_pre_hook", False),
            getattr(autotuner, "user_defined_post_hook", False),
        )


def is_triton(fn: Any) -> bool:
    """True for a kernel that Triton launches as ``kernel[grid](...)``, compiled or interpreted."""
    return type(fn).__module__.startswith("triton.") and hasattr(fn, "fn") and not is_autotuner(fn)


def is_autotuner(fn: Any) -> bool:
    """True for a Triton ``Autotuner``."""
    return type(fn).__module__.startswith("triton.") and hasattr(fn, "configs") and hasattr(fn, "keys")


def converted(
    configs: Sequence[Any],
    key: Sequence[str],
    prune_configs_by: Mapping[str, Any] | None = None,
    reset_to_zero: Sequence[str] | None = None,
    restore_value: Sequence[str] | None = None,
    pre_hook: Any = None,
    post_hook: Any = None,
) -> Converted:
    """Convert the arguments of ``triton.autotune``.

    Raises:
        UserError: there is a hook, which changes the code that runs and cannot be stored with a configuration.

    """
    if pre_hook or post_hook:
        raise UserError(
            "pre_hook and post_hook are not supported: write a function that also does their work, and make it tunable"
        )
    points, objects = [], {}
    for nth, config in enumerate(configs, 1):
        if getattr(config, "pre_hook", None) is not None:
            raise UserError(
                f"configuration {nth} has a pre_hook, which is not supported: write a function that also does its work"
                " and launches the kernel, and make it tunable"
            )
        point = point_of(config, nth)
        points.append(point)
        objects[config_key(point)] = config
    by = dict(prune_configs_by or {})
    if unknown := by.keys() - {"early_config_prune", "perf_model", "top_k"}:
        raise UserError(f"prune_configs_by has {sorted(unknown)[0]!r}, which is not supported: leave it out")
    prune = _pruning(objects, by) if by.get("early_config_prune") or by.get("perf_model") else None
    return Converted(_alike(points), tuple(key), tuple(reset_to_zero or ()), tuple(restore_value or ()), prune)


def point_of(config: Any, nth: int) -> dict[str, Any]:
    """Convert a ``triton.Config`` to a configuration."""
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(getattr(config, "kwargs", None), Mapping):
        raise UserError(f"configuration {nth} is {config!r}: give a triton.Config")
    if getattr(config, "ir_override", None) is not None:
        raise UserError(f"configuration {nth} has an ir_override, which is not supported: leave it out")
    meta = {name: getattr(config, name, None) for name in META}
    return {**config.kwargs, **{name: value for name, value in meta.items() if value is not None}}


def _alike(points: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Remove ``num_ctas`` and ``maxnreg`` where they are 1 in all configurations or absent."""
    for name in ("num_ctas", "maxnreg"):
        if len({p.get(name, 1) for p in points}) == 1 and points[0].get(name, 1) == 1:
            points = [{k: v for k, v in p.items() if k != name} for p in points]
    return tuple(points)


def _pruning(objects: Mapping[str, Any], by: Mapping[str, Any]) -> Prune:
    """Apply ``prune_configs_by`` as Triton does: first the early pruning, then the top configurations by the model."""
    early, model, top = by.get("early_config_prune"), by.get("perf_model"), by.get("top_k")

    def prune(arguments: Mapping[str, Any], points: list[dict[str, Any]]) -> list[dict[str, Any]]:
        by_point = {config_key(p): p for p in points}
        left = [_configured(objects, p) for p in points]
        try:
            if early is not None:
                left = list(early(left, dict(arguments)))
            if model is not None:
                many = max(1, int(len(left) * top)) if isinstance(top, float) and top <= 1.0 else int(top or len(left))
                times = {id(c): model(**{**arguments, **point_of(c, 0)}) for c in left}
                left = sorted(left, key=lambda c: times[id(c)])[:many]
        except Exception as error:
            raise UserError(f"prune_configs_by failed: {first_line(error)}") from error
        names = points[0].keys() if points else ()
        kept = [{n: v for n, v in point_of(c, 0).items() if n in names} for c in left]
        found = [by_point[k] for c in kept if (k := config_key(c)) in by_point]
        if not found:
            raise UserError("prune_configs_by returned no configuration: return at least one of its arguments")
        return found

    return prune


def _configured(objects: Mapping[str, Any], point: Mapping[str, Any]) -> Any:
    found = objects.get(config_key(point))
    if found is not None:
        return found
    return next(c for c in objects.values() if point.items() <= point_of(c, 0).items())


# ---- precompilation -------------------------------------------------------------------------------------------------


_ALIGNED = 16
_PLAIN = (bool, int, float, str, type(None))


def described(kernel: Kernel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The compilation inputs of a Triton kernel as JSON: target, and the dtype or value of each argument.

    Returns None for other kernels, and if these inputs do not describe the compilation completely.
    """
    if kernel.grid is None or not is_triton(kernel.fn):
        return None
    try:
        from triton.runtime.driver import driver

        target = driver.active.get_current_target()
        return {
            "target": [target.backend, target.arch, target.warp_size],
            "args": [_described(value) for value in args],
            "kwargs": {name: _described(value) for name, value in kwargs.items()},
        }
    except Exception:  # another version of Triton, no device, or arguments of other types
        return None


def _described(value: Any) -> dict[str, Any]:
    import torch

    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "off": value.data_ptr() % _ALIGNED}
    if isinstance(value, _PLAIN):
        return {"value": value}
    raise TypeError(f"a {type(value).__name__}")


class _Tensor:
    """The part of a tensor's interface that Triton uses."""

    def __init__(self, dtype: Any, off: int) -> None:
        self.dtype, self._off = dtype, off

    def data_ptr(self) -> int:
        return self._off

    @staticmethod
    def ptr_range() -> int:
        """For AMD's backend; a large value prevents assumptions about the range."""
        return 1 << 40


class _NoDevice:
    """The part of a driver's interface that Triton uses to compile."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def precompile(kernel: Kernel, description: Mapping[str, Any], config: Config) -> None:
    """Compile a candidate into Triton's cache for the inputs of :func:`described`; ignores failures.

    Call it only in a process that uses no device: it replaces Triton's active driver.

    """
    with contextlib.suppress(Exception):
        from triton.backends.compiler import GPUTarget
        from triton.runtime.driver import driver

        driver.set_active(_NoDevice(GPUTarget(*description["target"])))
        args = [_stand_in(one) for one in description["args"]]
        kwargs = {name: _stand_in(one) for name, one in description["kwargs"].items()}
        kernel.fn.run(*args, grid=None, warmup=True, **{**kwargs, **config})


def _stand_in(description: Mapping[str, Any]) -> Any:
    import torch

    return (
        description["value"]
        if "value" in description
        else _Tensor(getattr(torch, description["dtype"]), int(description["off"]))
    )

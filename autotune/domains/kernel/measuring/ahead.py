"""A Triton kernel compiled before it is measured, by a process without a device, into Triton's cache on disk.

Triton compiles a kernel for types of arguments, and for what it knows of numbers and addresses. The process that makes
the inputs writes that down. A process of the pool has Triton compile for stand-ins. The measuring process finds the
result. What cannot be compiled like this is compiled where it is measured, which tells what is wrong with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from autotune.domains.kernel.declare.triton import is_triton
from autotune.domains.kernel.kernel import Kernel
from autotune.domains.kernel.measuring.inputs import Arguments
from autotune.task import Config

_ALIGNED = 16
_PLAIN = (bool, int, float, str, type(None))


def described(kernel: Kernel, arguments: Arguments) -> dict[str, Any] | None:
    """JSON of what Triton compiles a kernel for: its target, and each argument's type, or number; None where that is
    not all, or the kernel is not Triton's."""
    if kernel.grid is None or not is_triton(kernel.fn):
        return None
    try:
        from triton.runtime.driver import driver

        target = driver.active.get_current_target()
        args = [_described(value) for value in arguments.args]
        kwargs = {name: _described(value) for name, value in arguments.kwargs.items()}
        return {"target": [target.backend, target.arch, target.warp_size], "args": args, "kwargs": kwargs}
    except Exception:  # Triton of another version, or without a device; arguments that are something else
        return None


def _described(value: Any) -> dict[str, Any]:
    import torch

    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "off": value.data_ptr() % _ALIGNED}
    if isinstance(value, _PLAIN):
        return {"value": value}
    raise TypeError(f"a {type(value).__name__}")


class _Tensor:
    """What Triton asks of a tensor."""

    def __init__(self, dtype: Any, off: int) -> None:
        self.dtype, self._off = dtype, off

    def data_ptr(self) -> int:
        return self._off

    @staticmethod
    def ptr_range() -> int:
        """Of AMD's backend: large, so that nothing is assumed."""
        return 1 << 40


class _NoDevice:
    """What Triton asks of a driver to compile."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_ahead(kernel: Kernel, told: Mapping[str, Any], config: Config) -> None:
    """Compile a candidate into Triton's cache, as :func:`described` told; silent where that cannot be done.

    For a process that uses no device, since it takes Triton's driver away.
    """
    with contextlib.suppress(Exception):
        from triton.backends.compiler import GPUTarget
        from triton.runtime.driver import driver

        driver.set_active(_NoDevice(GPUTarget(*told["target"])))
        args = [_stand_in(one) for one in told["args"]]
        kwargs = {name: _stand_in(one) for name, one in told["kwargs"].items()}
        kernel.fn.run(*args, grid=None, warmup=True, **{**kwargs, **config})


def _stand_in(told: Mapping[str, Any]) -> Any:
    import torch

    return told["value"] if "value" in told else _Tensor(getattr(torch, told["dtype"]), int(told["off"]))

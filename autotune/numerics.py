"""Torch's settings of precision, determinism and threads, which a program's step depends on.

They select its library kernels, and the threads of CPU kernels. A step with matrix products in TF32 takes half the time
of the same step without. So a verdict on a step holds under the settings that the step was timed under. A program sets
them at its start, often by ``torch.set_float32_matmul_precision``. The settings that differ from torch's defaults are
one record, plain JSON. The parent of a search reads the record, its processes restore it, and a verdict stores it.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from autotune.device import one_each_core

THREADS = "num_threads"
"""Name of ``torch.set_num_threads``. Its default is a thread on each usable core; more are read as that."""
MATMUL = ("highest", "high", "medium")
"""Arguments of ``torch.set_float32_matmul_precision``."""

Numerics = Mapping[str, Any]
"""Settings that differ from torch's defaults, by name."""

_Access = tuple[Callable[[], Any], Callable[[Any], Any]]
_MISSING = object()
_INHERITED, _PLAIN = "none", "ieee"
"""Precision of an operator without a setting, and fp32 itself, which is the default."""


class _Setting(NamedTuple):
    """One setting.

    Attributes:
        kinds: of the devices whose kernels depend on it; empty for an older name of other settings.
        default: torch's own; ``get`` and ``put`` read and write it.
    """

    name: str
    kinds: tuple[str, ...]
    default: Any
    get: Callable[[], Any]
    put: Callable[[Any], Any]


def read(devices: Iterable[str] | None = None) -> dict[str, Any]:
    """Read the settings in force that differ from torch's defaults.

    Args:
        devices: "cpu" or "cuda:N", for the settings that affect their kernels. None for all settings of
            :func:`restore`.
    """
    if "torch" not in sys.modules:
        return {}
    kinds = None if devices is None else {device.partition(":")[0] for device in devices}
    every = [s for s in _settings() if kinds is None or kinds.intersection(s.kinds)]
    found = ((s, _value(s)) for s in every)
    return {s.name: _plain(value) for s, value in found if value is not _MISSING and _plain(value) != _plain(s.default)}


def restore(numerics: Numerics) -> None:
    """Apply settings from :func:`read`, perhaps of another process; settings without an entry get torch's defaults."""
    if "torch" not in sys.modules and not numerics:
        return
    for s in _settings():
        wanted, now = numerics.get(s.name, s.default), _value(s)
        if now not in (wanted, _INHERITED) or _plain(now) != _plain(wanted):
            with warnings.catch_warnings(action="ignore"), contextlib.suppress(AttributeError):  # no such setting here
                s.put(wanted)


def set_matmul(name: str | None) -> None:
    """Set the precision of fp32 matrix products, one of :data:`MATMUL`; None leaves it unchanged."""
    if name is not None:
        import torch

        with warnings.catch_warnings(action="ignore"):
            torch.set_float32_matmul_precision(name)


def text(numerics: Numerics) -> str:
    """The settings as text."""
    return ", ".join(f"{name}={value}" for name, value in sorted(numerics.items()))


def _plain(value: Any) -> Any:
    return _PLAIN if value == _INHERITED else value


def _value(setting: _Setting) -> Any:
    """The value in force; :data:`_MISSING` if this torch lacks the setting or refuses to read it.

    Torch has two APIs to set TF32. It warns about the older one, and refuses to read it after the newer one was used.
    """
    # A deployment does not read the older ones: ignoring warnings changes the filters of all threads.
    older = contextlib.nullcontext() if setting.kinds else warnings.catch_warnings(action="ignore")
    try:
        with older:
            return setting.get()
    except (RuntimeError, AttributeError):
        return _MISSING


def _settings() -> Iterator[_Setting]:
    """Every setting. Older ones come first, since writing them also writes newer ones."""
    import torch
    import torch.utils.deterministic

    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    both, gpu, cpu, cores = ("cpu", "cuda"), ("cuda",), ("cpu",), len(one_each_core())

    def of(owner: Any, name: str) -> _Access:
        return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)

    def fp32(backend: str, operator: str) -> _Access:
        """The precision in force: the operator's own, else the inherited one."""
        raw: Any = torch._C

        def get() -> str:
            found: str = raw._get_fp32_precision_getter(backend, operator)
            return found

        def put(value: str) -> None:
            raw._set_fp32_precision_setter(backend, operator, value)
            if value == _INHERITED and get() not in (_INHERITED, _PLAIN):
                raw._set_fp32_precision_setter(backend, operator, _PLAIN)

        return get, put

    precision = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    yield _Setting("float32_matmul_precision", (), "highest", *precision)
    yield _Setting("cudnn.allow_tf32", (), True, *of(cudnn, "allow_tf32"))
    for name, backend in (("", "generic"), ("cudnn.", "cuda"), ("mkldnn.", "mkldnn")):
        yield _Setting(f"{name}fp32_precision", (), _INHERITED, *fp32(backend, "all"))
    yield _Setting("cuda.matmul.fp32_precision", gpu, _INHERITED, *fp32("cuda", "matmul"))
    for name in ("conv", "rnn"):
        yield _Setting(f"cudnn.{name}.fp32_precision", gpu, "tf32", *fp32("cuda", name))
    for name in ("matmul", "conv", "rnn"):
        yield _Setting(f"mkldnn.{name}.fp32_precision", cpu, _INHERITED, *fp32("mkldnn", name))
    for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
        yield _Setting(f"cuda.matmul.{name}", gpu, True, *_reduction(cuda.matmul, name))
    yield _Setting("cuda.matmul.allow_fp16_accumulation", gpu, False, *of(cuda.matmul, "allow_fp16_accumulation"))
    for name, value in (("enabled", True), ("benchmark", False), ("deterministic", False)):
        yield _Setting(f"cudnn.{name}", gpu, value, *of(cudnn, name))
    for name, value in (("enabled", True), ("deterministic", False)):
        yield _Setting(f"mkldnn.{name}", cpu, value, *of(mkldnn, name))
    yield _Setting("deterministic_debug_mode", both, 0, torch.get_deterministic_debug_mode,
                   torch.set_deterministic_debug_mode)  # fmt: skip
    yield _Setting("deterministic.fill_uninitialized_memory", both, True,
                   *of(torch.utils.deterministic, "fill_uninitialized_memory"))  # fmt: skip
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        switches = getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp")
        yield _Setting(f"{name}_sdp", both, True, *switches)
    yield _Setting(THREADS, cpu, cores, lambda: min(torch.get_num_threads(), cores), torch.set_num_threads)
    yield _Setting("allow_fp16_bf16_reduction_math_sdp", both, False, cuda.fp16_bf16_reduction_math_sdp_allowed,
                   cuda.allow_fp16_bf16_reduction_math_sdp)  # fmt: skip


def _reduction(owner: Any, name: str) -> _Access:
    """True or False, or [False, False] if split-K reductions are disabled too (torch 2.12 and later)."""

    def get() -> Any:
        allowed, split = getattr(owner, name), getattr(owner, f"{name}_split_k", True)
        return allowed if split else [allowed, split]

    return get, lambda value: setattr(owner, name, tuple(value) if isinstance(value, list) else value)

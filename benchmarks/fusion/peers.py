"""Contenders of the benchmark: eager mode, and Inductor by default and with the options that this torch has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autotune.compiler.capture.recording import fresh
from autotune.errors import UserError
from benchmarks.fusion.cases.case import Arguments

Call = Callable[..., object]
"""A contender bound to its inputs; called with others (equal in all but their values) it takes those."""
Options = Mapping[str, object]

_THOROUGH = {"max_autotune_pointwise": True, "coordinate_descent_tuning": True}

_CUDA_SETS: Mapping[str, Options] = {
    "max_autotune": {
        "max_autotune": True, "coordinate_descent_tuning": True, "combo_kernels": True, "benchmark_combo_kernel": True,
    },
    "pointwise": _THOROUGH,
    "combo": {**_THOROUGH, "combo_kernels": True},
    "cooperative": {**_THOROUGH, "triton.cooperative_reductions": True},
    "cooperative_all": {
        **_THOROUGH, "triton.cooperative_reductions": True, "triton.force_cooperative_reductions": True,
    },
    "looped": {**_THOROUGH, "triton.persistent_reductions": False},
    "multi_kernel": {"max_autotune_pointwise": True, "triton.multi_kernel": 1},
    "mix_order": {
        **_THOROUGH, "triton.mix_order_reduction": True, "triton.mix_order_reduction_non_strict_mode": True,
        "triton.mix_order_reduction_autotune_split_size": True,
    },
    "no_mix_order": {**_THOROUGH, "triton.mix_order_reduction": False},
    "tiled": {**_THOROUGH, "triton.tile_reductions": True, "triton.prefer_nd_tiling": True},
}  # fmt: skip
"""Option sets of ``torch.compile`` by name. An option that this torch does not have is left out of its set."""

_CPU_SETS: Mapping[str, Options] = {}
"""None of these options changes the C++ that Inductor writes for memory-intensive operators."""

GROUPS = ("eager", "inductor", "inductor-best", "xla")
"""What ``--peers`` takes besides the names of option sets: "inductor-best" is all of these."""


def option_sets(device: str) -> dict[str, dict[str, object]]:
    """The option sets that mean something on this device with this torch, each different from the default and others.

    Args:
        device: "cpu" or "cuda:N".
    """
    if torch.device(device).type == "cpu":
        return {name: dict(options) for name, options in _CPU_SETS.items()}
    from torch._inductor import config, list_options

    known, current = set(list_options()), config.get_config_copy()  # type: ignore[attr-defined, unused-ignore]
    found: dict[str, dict[str, object]] = {}
    for name, options in _CUDA_SETS.items():
        kept = {key: value for key, value in options.items() if key in known}
        changes = any(current.get(key) != value for key, value in kept.items())
        if changes and kept not in found.values():
            found[name] = kept
    return found


def wanted(peers: list[str] | None, device: str) -> tuple[set[str], dict[str, dict[str, object]]]:
    """The contenders to measure: the groups of :data:`GROUPS`, and the option sets by name.

    Args:
        peers: names; None for everything there is.

    Raises:
        UserError: a name that is neither.
    """
    sets = option_sets(device)
    if peers is None:
        return set(GROUPS), sets
    for peer in peers:
        if peer not in GROUPS and peer not in sets:
            names = ", ".join([*GROUPS, *sets])
            raise UserError(f"there is no peer {peer!r} on {device} with torch {torch.__version__}; there are {names}")
    chosen = sets if "inductor-best" in peers else {name: sets[name] for name in sets if name in peers}
    return set(peers) & set(GROUPS), chosen


def eager(fn: Callable[..., Any], args: Arguments) -> Call:
    """``fn`` as it is."""

    def call(given: Arguments = args) -> object:
        with torch.no_grad():
            return fn(*given)

    return call


def compiled(fn: Callable[..., Any], args: Arguments, **kwargs: Any) -> Call:
    """``torch.compile(fn, **kwargs)``, compiled by a first call.

    Each has a separate code object, so that Dynamo's caches of contenders are independent.
    """
    run = torch.compile(fresh(fn), dynamic=False, **kwargs)

    def call(given: Arguments = args) -> object:
        with torch.no_grad():
            return run(*given)

    call()
    return call


def inductor(fn: Callable[..., Any], args: Arguments, options: Options | None = None) -> Call:
    """Inductor with ``options`` besides its defaults."""
    return compiled(fn, args, backend="inductor", options=dict(options) if options else None)


def deployed(fn: Callable[..., Any], args: Arguments) -> Call:
    """The stored kernels, deployed as by a user: through ``torch.compile``, from the database of $AUTOTUNE_DB."""
    from autotune.runtime.backend import deploy_backend

    return compiled(fn, args, backend=deploy_backend)

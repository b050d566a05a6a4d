"""The backend "autotune" of ``torch.compile``, and ``autotune.compile``: deployment, with a search on request."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
import torch._inductor.compile_fx  # when torch.compile is called, as for torch's own backend, and not in the first step
from torch import fx

from autotune.errors import UserError
from autotune.in_program.options import asked, forget_breaks, is_enough, more_follow, predicts
from autotune.runtime.backend import Compiled, compile_graph, permits_kernels
from autotune.runtime.settings import Verify


def compile(model: Callable[..., Any], *, verify: Verify | None = None, **kwargs: Any) -> Callable[..., Any]:
    """``torch.compile(model, backend="autotune", **kwargs)``: run ``model`` with the kernels stored for it.

    Args:
        model: function or ``nn.Module``.
        verify: when a stored kernel's results are compared with those of the region's own operators: "first" (at its
            first call), "always", "never" or "auto"; None for the setting, see
            :class:`autotune.runtime.settings.Settings`.
        kwargs: those of ``torch.compile``; ``mode``, ``options`` and ``dynamic`` have their meaning for Inductor. Two
            options are autotune's. "search": seconds that a search of regions without schedules may add to the first
            step. "unsearched": "default" predicts schedules without a search, "leave" does not.

    Returns:
        The compiled model. Training works; ``autotune.counters()`` has how many regions were found.

    Raises:
        UserError: invalid ``verify``.
    """
    if verify is not None and verify not in get_args(Verify):
        raise UserError(f"verify={verify!r} must be one of {', '.join(get_args(Verify))}")
    backend = registered() if verify is None else _verifying(verify)
    compiled: Callable[..., Any] = torch.compile(model, backend=backend, **kwargs)
    return compiled


def registered() -> Compiled:
    """:func:`dynamo_backend`, known to Dynamo under its name.

    Dynamo releases the tensors that it traced only after compilations by backends that it knows.
    """
    from torch._dynamo.backends import registry

    with contextlib.suppress(AssertionError):  # it is known already, by its entry point or by an earlier call
        registry.register_backend(dynamo_backend, name="autotune")
    return dynamo_backend


@functools.cache
def _verifying(verify: Verify) -> Compiled:
    """A backend with a fixed ``verify``, cached, since Dynamo recompiles for another backend object."""

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Compiled:
        return _compiled(gm, example_inputs, options, verify)

    vars(backend)["reset"] = _reset
    return backend


def dynamo_backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Compiled:
    """The backend "autotune" of ``torch.compile``.

    Args:
        gm: a Dynamo graph.
        example_inputs: its inputs; symbolic integers among them mean dynamic shapes.
        options: ``mode`` and ``options`` as the user gave them to ``torch.compile``.
    """
    return _compiled(gm, example_inputs, options, "")


def _reset() -> None:
    """Release the state of compiled code; ``torch._dynamo.reset()`` calls this, and resets CUDA graph trees itself."""
    forget_breaks()
    search = sys.modules.get("autotune.in_program.search")  # without a search there is nothing to release
    if search is not None:
        search.reset()


vars(dynamo_backend)["reset"] = _reset


def _compiled(gm: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any], verify: str) -> Compiled:
    seconds, rest = asked(options)
    predicted, rest = predicts(rest)
    if not (seconds or predicted) or _ahead_of_time():
        return compile_graph(gm, inputs, rest, verify=verify)
    more = more_follow(gm)  # also for a graph whose code an earlier process has stored
    from autotune.runtime.inductor.code import device_of, earlier
    from autotune.runtime.inductor.verdict import base_mode

    if not permits_kernels(rest, device_of(inputs)):
        return compile_graph(gm, inputs, rest, verify=verify)
    mode = base_mode(rest.get("mode"))
    code = earlier(gm, inputs, mode)
    if code is not None and is_enough(code.budget_s, seconds):
        code.load()
        return compile_graph(gm, inputs, rest, verify=verify, code=code.name)
    # Imported for a search only: deployment does not need them.
    from autotune.in_program import search, unsearched

    def once(gm: fx.GraphModule, inputs: Sequence[Any], *, bare: bool = False, code: str = "") -> Compiled:
        return compile_graph(gm, inputs, rest, verify=verify, bare=bare, code=code)

    found: Compiled = (
        search.compiled(gm, inputs, seconds, mode, once, more=more)
        if seconds
        else unsearched.compiled(gm, inputs, mode, once)
    )
    return found


def _ahead_of_time() -> bool:
    """True if torch saves the compiled code, which then must be one code."""
    from torch._functorch import config

    return bool(config.bypass_autograd_cache_key)

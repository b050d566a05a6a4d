"""The torch.compile backend: Inductor's own compilation, with stored kernels in its graphs.

Dynamo, AOTAutograd, the joint-graph and post-grad passes, code generation, caches and CUDA graphs are Inductor's, with
all that the user asked for. autotune adds three passes: :mod:`autotune.compiler.capture.attention` before AOTAutograd,
:mod:`autotune.compiler.capture.joint` and :mod:`autotune.runtime.inductor.region_pass`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import fx

from autotune import numerics
from autotune.errors import UserError
from autotune.runtime.deployment import deployment
from autotune.runtime.settings import Verify

if TYPE_CHECKING:
    from autotune.runtime.inductor.verdict import Trial

Compiled = Callable[..., Any]

_NO_PLACE = ("fx_wrapper", "aot_inductor.use_runtime_constant_folding")
"""Settings under which Inductor writes code that cannot launch kernels of ours."""


def compile(model: Callable[..., Any], *, verify: Verify | None = None, **kwargs: Any) -> Callable[..., Any]:
    """``torch.compile(model, backend="autotune", **kwargs)``: run ``model`` with the kernels stored for it.

    Args:
        model: function or ``nn.Module``.
        verify: when a stored kernel's results are compared with those of the region's own operators: "first" (at its
            first call), "always", "never" or "auto"; None for the setting, see
            :class:`autotune.runtime.settings.Settings`.
        kwargs: those of ``torch.compile``; ``mode``, ``options`` and ``dynamic`` mean what they do for Inductor.

    Returns:
        The compiled model. Training works; ``autotune.counters()`` tells how many regions were found.
    """
    if verify is not None and verify not in get_args(Verify):
        raise UserError(f"verify={verify!r} is none of {', '.join(get_args(Verify))}")
    backend = dynamo_backend if verify is None else _verifying(verify)
    compiled: Callable[..., Any] = torch.compile(model, backend=backend, **kwargs)
    return compiled


@functools.cache
def _verifying(verify: Verify) -> Compiled:
    """The backend with a setting of its own; one for each, since Dynamo compiles anew for another backend."""

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Compiled:
        return _compiled(gm, example_inputs, options, None, verify)

    return backend


def dynamo_backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Compiled:
    """The backend "autotune" of ``torch.compile``.

    Args:
        gm: a graph of Dynamo's.
        example_inputs: its inputs; symbolic integers among them mean dynamic shapes.
        options: ``mode`` and ``options`` as the user gave them to ``torch.compile``.
    """
    return _compiled(gm, example_inputs, options, None)


def trial_backend(trial: Trial) -> Compiled:
    """A backend that leaves to Inductor what ``trial`` says, whatever verdicts are stored, and notes what it meets.

    Nothing it compiles is cached. Dynamo takes each such backend for another one.
    """

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Compiled:
        return _compiled(gm, example_inputs, options, trial)

    return backend


def _to_be_saved(compiled: Any) -> Compiled:
    """What was compiled, as compilation ahead of time wants it: torch 2.11 wraps what its own backends return."""
    from torch._functorch import config

    if config.bypass_autograd_cache_key and getattr(compiled, "serialize", None) is not None:
        from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable

        return BundledAOTAutogradSerializableCallable(compiled)
    return compiled  # type: ignore[no-any-return]


def _compiled(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, Any],
    trial: Trial | None,
    verify: str = "",
) -> Compiled:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    from autotune.compiler.capture.attention import rewrite_attention
    from autotune.runtime.inductor.agreement import ranks_agree
    from autotune.runtime.inductor.verdict import base_mode

    patches = inductor_settings(options)
    if takes_kernels(patches) and (trial is not None or ranks_agree(gm.graph, example_inputs)):
        cpp = bool(patches.get("cpp_wrapper", config.cpp_wrapper))
        patches |= passes(patches, base_mode(options.get("mode")), trial, verify, cpp=cpp)
    if _fuses_attention(patches):
        changed = rewrite_attention(gm)
        deployment().count("attention", changed)
        if trial is not None:
            trial.attention += changed
    compiled: Any = compile_fx(gm, list(example_inputs), config_patches=patches or None)
    return _to_be_saved(compiled)


def takes_kernels(patches: Mapping[str, Any]) -> bool:
    """Whether stored kernels have a place in what Inductor writes; says so once where they have none.

    Args:
        patches: Inductor's settings that differ from those of the process.
    """
    from torch._inductor import config

    with config.patch(dict(patches)):
        refused = next((name for name in _NO_PLACE if functools.reduce(getattr, name.split("."), config)), None)
    if refused is not None:
        deployment().warn_once(refused, f"autotune: stored kernels are not used with Inductor's {refused}")
    return refused is None


def _fuses_attention(patches: Mapping[str, Any]) -> bool:
    """Whether the setting and Inductor's options permit it. A variable of the environment that cannot be read must not
    end a program's compilation."""
    from torch._inductor import config

    from autotune.compiler.capture.options import requirements

    try:
        with config.patch(dict(patches)):
            return deployment().settings.attention == "fuse" and not requirements()
    except UserError as error:
        deployment().warn_once("settings", f"autotune: attention is left as written: {error}")
        return False


def inductor_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's settings from the ``mode`` and ``options`` that the user gave to ``torch.compile``."""
    patches: dict[str, Any] = {}
    if options.get("mode"):
        from torch._inductor import list_mode_options

        patches.update(list_mode_options(options["mode"]))
    patches.update(options.get("options") or {})
    return patches


def passes(
    patches: Mapping[str, Any], mode: str, trial: Trial | None = None, verify: str = "", *, cpp: bool = False
) -> dict[str, Any]:
    """Inductor's settings with which stored kernels come into its graphs.

    Args:
        patches: Inductor's settings that differ from those of the process, the user's passes among them.
        mode: of :func:`autotune.runtime.inductor.verdict.base_mode`.
        trial: as of :func:`trial_backend`.
        verify: as of :func:`compile`; "" for the setting.
        cpp: Inductor writes C++.
    """
    from torch._inductor import config

    from autotune.compiler.capture.channels_last import keep_as_laid_out
    from autotune.compiler.capture.hooks import Hook, hooked
    from autotune.runtime.inductor.region_call import WRITTEN

    deployment().load_from(state := deployment().state())

    def replace(graph: fx.Graph) -> None:
        # Imported when a graph is compiled: where Inductor's caches have it, nothing looks for regions.
        from autotune.runtime.inductor.region_pass import replace_regions

        keep_as_laid_out(graph)
        replace_regions(graph, mode=mode, trial=trial, verify=verify, cpp=cpp)

    with config.patch(dict(patches)):
        # Both go with the pass, not by a context: autograd compiles a backward pass later, in a thread of its own.
        how = f"{mode}{verify}{'cpp' * cpp}{numerics.text(numerics.read(('cpu', 'cuda')))}"
        identity = None if trial is not None else WRITTEN + state + how.encode()
        return hooked(Hook(replace, identity, config.post_grad_custom_post_pass))


__all__ = ["compile", "dynamo_backend", "inductor_settings", "passes", "takes_kernels", "trial_backend"]

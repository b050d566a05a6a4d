"""Compilation with stored kernels: the backend of ``torch.compile``.

Dynamo, AOTAutograd, the joint-graph and post-grad passes, code generation, caches and CUDA graphs are Inductor's, with
all of the user's options. autotune rewrites Dynamo's graph (:mod:`autotune.compiler.capture.attention`), and adds
passes for the joint graph (:mod:`autotune.compiler.capture.hooks`) and the post-grad graph
(:mod:`autotune.runtime.inductor.region_pass`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autotune import numerics
from autotune.errors import UserError
from autotune.runtime.deployment import deployment

if TYPE_CHECKING:
    from autotune.runtime.inductor.verdict import Trial

Compiled = Callable[..., Any]

_NO_PLACE = ("fx_wrapper", "aot_inductor.use_runtime_constant_folding")
"""Inductor's settings whose code cannot launch stored kernels."""


def deploy_backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Compiled:
    """Deployment as a backend of ``torch.compile``; :mod:`autotune.in_program.backend` also searches on request.

    Args:
        gm: a Dynamo graph.
        example_inputs: its inputs; symbolic integers among them mean dynamic shapes.
        options: ``mode`` and ``options`` as the user gave them to ``torch.compile``.
    """
    return compile_graph(gm, example_inputs, options)


def trial_backend(trial: Trial) -> Compiled:
    """A backend that leaves the regions of ``trial`` to Inductor, ignores stored verdicts, and records its graphs.

    Its code is not cached. Dynamo treats each such backend as a different one.
    """

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Compiled:
        return compile_graph(gm, example_inputs, options, trial=trial)

    return backend


def _to_be_saved(compiled: Any) -> Compiled:
    """Wrap compiled code for ahead-of-time compilation, as torch 2.11 does only for its own backends."""
    from torch._functorch import config

    if config.bypass_autograd_cache_key and getattr(compiled, "serialize", None) is not None:
        from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable

        return BundledAOTAutogradSerializableCallable(compiled)
    return compiled  # type: ignore[no-any-return]


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, Any],
    *,
    trial: Trial | None = None,
    verify: str = "",
    bare: bool = False,
    code: str = "",
) -> Compiled:
    """Compile a Dynamo graph by Inductor, with stored kernels.

    Args:
        options: ``mode`` and ``options`` as the user gave them to ``torch.compile``, without autotune's own.
        trial: as of :func:`trial_backend`.
        verify: when a stored kernel's results are compared; "" for the setting.
        bare: leave every region to Inductor, without an agreement of ranks.
        code: the name of the code in torch's caches (:mod:`autotune.runtime.inductor.code`); "" for the name that an
            earlier search gave it.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    from autotune.compiler.capture.attention import rewrite_attention
    from autotune.runtime.inductor.code import earlier
    from autotune.runtime.inductor.verdict import base_mode, ranks_agree

    patches = inductor_settings(options)
    if takes_kernels(patches) and (trial is not None or bare or ranks_agree(gm.graph, example_inputs)):
        cpp = bool(patches.get("cpp_wrapper", config.cpp_wrapper))
        mode = base_mode(options.get("mode"))
        if not code and trial is None:
            code = found.name if (found := earlier(gm, example_inputs, mode)) is not None else ""
            if found is not None:
                found.load()
        patches |= passes(patches, mode, trial, verify, cpp=cpp, bare=bare, code=code)
    compiling = _with_backward(gm, example_inputs, base_mode(options.get("mode"))) if code else contextlib.nullcontext()
    if _fuses_attention(patches):
        changed = rewrite_attention(gm)
        deployment().count("attention", changed)
        if trial is not None:
            trial.attention += changed
    with compiling:
        compiled: Any = compile_fx(gm, list(example_inputs), config_patches=patches or None)
    return _to_be_saved(compiled)


def _with_backward(gm: fx.GraphModule, inputs: Sequence[Any], mode: str) -> contextlib.ExitStack:
    """Context manager in which a backward graph is compiled with its forward graph, and not in the first backward pass.

    Named code includes the backward graph, whose regions must not wait for that. If a backward pass retains its graph,
    the code is not used by later processes: they compile without a name, in the first backward pass.
    """
    from torch._functorch import config as functorch

    from autotune.runtime.inductor.code import forget, path_of
    from autotune.runtime.inductor.saved import compiled_again

    path, made = path_of(gm, inputs, mode), contextlib.ExitStack()
    made.enter_context(functorch.patch(force_non_lazy_backward_lowering=True))
    made.enter_context(compiled_again(lambda: forget(path)))
    return made


def takes_kernels(patches: Mapping[str, Any]) -> bool:
    """True if Inductor's code can launch stored kernels; logs one warning if not.

    Args:
        patches: Inductor's settings that differ from those of the process.
    """
    from torch._inductor import config

    with config.patch(dict(patches)):
        refused = next((name for name in _NO_PLACE if functools.reduce(getattr, name.split("."), config)), None)
    if refused is not None:
        deployment().warn_once(refused, f"autotune: stored kernels are not used with Inductor's {refused}")
    return refused is None


def permits_kernels(options: Mapping[str, Any], device: str | None) -> bool:
    """True if no option of Inductor excludes every stored kernel; else a search would find no region.

    Args:
        options: ``mode`` and ``options`` as the user gave them to ``torch.compile``, without autotune's own.
        device: of :func:`autotune.runtime.inductor.code.device_of`.

    Raises:
        RuntimeError: of :func:`inductor_settings`.
    """
    from torch._inductor import config

    from autotune.compiler.capture.options import requirements
    from autotune.ir.nodes import asked

    patches = inductor_settings(options)
    try:
        precision = asked()
    except UserError:  # of an invalid variable, which the look-up reports
        precision = ""
    with config.patch(dict(patches)):
        return takes_kernels(patches) and not requirements(device or "", precision)


def _fuses_attention(patches: Mapping[str, Any]) -> bool:
    """True if the setting and Inductor's options permit it. An invalid variable must not end a compilation."""
    from torch._inductor import config

    from autotune.compiler.capture.options import requirements

    try:
        with config.patch(dict(patches)):
            return deployment().settings.attention == "fuse" and not requirements()
    except UserError as error:
        deployment().warn_once("settings", f"autotune: attention is not rewritten: {error}")
        return False


def inductor_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's settings from the ``mode`` and ``options`` that the user gave to ``torch.compile``.

    Raises:
        RuntimeError: Inductor's own message for an unknown mode, an unknown option, or an option of another type.
    """
    # What torch.compile makes of them for Inductor: names with hyphens, types, variables for CUDA graphs.
    made = torch._TorchCompileInductorWrapper(options.get("mode"), dict(options.get("options") or {}), None)  # type: ignore[no-untyped-call]
    return dict(made.config)


def passes(
    patches: Mapping[str, Any],
    mode: str,
    trial: Trial | None = None,
    verify: str = "",
    *,
    cpp: bool = False,
    bare: bool = False,
    code: str = "",
) -> dict[str, Any]:
    """Inductor's settings with the pass that puts stored kernels into its graphs.

    Args:
        patches: Inductor's settings that differ from those of the process, the user's passes among them.
        mode: of :func:`autotune.runtime.inductor.verdict.base_mode`.
        trial: as of :func:`trial_backend`.
        verify, bare, code: as of :func:`compile_graph`.
        cpp: Inductor generates C++.
    """
    from torch._inductor import config

    from autotune.compiler.capture.convolutions import keep_as_laid_out
    from autotune.compiler.capture.hooks import Hook, hooked
    from autotune.runtime.inductor.region_call import WRITTEN

    state = deployment().state(code=code)
    if not code:
        deployment().load_from(state)
    tensor_parallel = _tensor_parallel()

    def replace(graph: fx.Graph) -> None:
        # Imported when a graph is compiled: a graph from Inductor's caches does not need it.
        from autotune.runtime.inductor.region_pass import replace_regions

        keep_as_laid_out(graph)
        if tensor_parallel is not None and not bare and not cpp:
            tensor_parallel.join_products(graph)
        replace_regions(graph, mode=mode, trial=trial, verify=verify, cpp=cpp, bare=bare)

    with config.patch(dict(patches)):
        # Part of the pass instead of a context: autograd compiles a backward pass later, in another thread.
        joins = tensor_parallel.sites.identity() if tensor_parallel is not None else ""
        how = f"{mode}{verify}{'cpp' * cpp}{joins}{numerics.text(numerics.read(('cpu', 'cuda')))}"
        identity = WRITTEN + state + how.encode() if trial is None else None
        return hooked(Hook(replace, identity, config.post_grad_custom_post_pass))


def _tensor_parallel() -> Any:
    """The pass over collectives, in a program with several ranks; None in others. It belongs to a domain."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return importlib.import_module("autotune.domains.c3.tensor_parallel.rewriting")

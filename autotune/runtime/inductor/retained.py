"""Backward passes with ``retain_graph=True``, of code whose backward graph was compiled with its forward graph.

A backward graph may reuse the memory of tensors that autograd saved for it alone. So torch refuses to run it with
``retain_graph=True``. ``torch.compile`` compiles a backward graph in the first backward pass, and without such reuse if
that pass retains its graph. A search compiles it earlier (``force_non_lazy_backward_lowering``). Here it is compiled
again in such a pass. torch 2.11 and 2.12 do not compile it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch._functorch._aot_autograd import runtime_wrappers

_NAME = "_AutogradBackwardCompiler"
_COMPILABLE: Any = getattr(runtime_wrappers, "AutogradLazyBackwardCompileInfo", None)
"""torch's record of a backward graph that it can still compile; a graph from its caches has another record."""


@contextlib.contextmanager
def compiled_again(retained: Callable[[], object]) -> Iterator[None]:
    """Context manager: backward graphs compiled in it are compiled again in a backward pass that retains its graph.

    Args:
        retained: called in that backward pass.
    """
    real: Any = getattr(runtime_wrappers, _NAME, None)
    if real is None or _COMPILABLE is None:
        yield
        return

    class Compiler(real):  # type: ignore[misc]
        compiled_bw: Callable[..., Any] | None

        def get_or_compile(self, *, saved_tensors_use_once: bool) -> Callable[..., Any]:
            if saved_tensors_use_once and self.compiled_bw is not None:
                return self.compiled_bw  # as torch's, in each step
            donates = bool(getattr(self.fw_metadata, "bw_donated_idxs", None))
            may = isinstance(self.lazy_backward_info, _COMPILABLE) and self.bw_compiler is not None
            if self.compiled_bw is not None and donates and may:
                self.compiled_bw = None
                self.try_save_cache_entry = None
                retained()
            found: Callable[..., Any] = super().get_or_compile(saved_tensors_use_once=saved_tensors_use_once)
            return found

    setattr(runtime_wrappers, _NAME, Compiler)
    try:
        yield
    finally:
        setattr(runtime_wrappers, _NAME, real)

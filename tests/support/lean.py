"""torch.compile without parts that tests do not check: vectors, and torch's figures of its compilations."""

from __future__ import annotations

from typing import Any


def compile_lean() -> None:
    """Have torch compile with a third less processor time.

    Inductor writes loops over single elements, which g++ compiles in half the time: it reads no vector types. What
    tests check the calls of stored kernels in its C++, not its speed.
    """
    import torch._dynamo.config
    from torch._dynamo import guards
    from torch._inductor import config, cpp_builder, cpu_vec_isa

    config.cpp.simdlen = 1
    cpu_vec_isa.valid_vec_isa_list = list  # type: ignore[assignment]  # torch's compiles programs to see what runs
    # Dynamo would empty the caches of the processor, to log how long guards take then: 50 ms a compilation.
    guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]
    torch._dynamo.config.run_gc_after_compile = False
    cpp_builder._get_torch_related_args = _without_libraries(cpp_builder._get_torch_related_args)
    _write_no_traces()


def _without_libraries(libraries: Any) -> Any:
    """Kernels need none of torch's libraries; the linker would read them all, for a tenth of a kernel's build time."""
    from torch._inductor import config

    def found(include_pytorch: bool, aot_mode: bool) -> Any:
        with config.patch({"aot_inductor.link_libtorch": include_pytorch or aot_mode}):
            return libraries(include_pytorch, aot_mode)

    return libraries if libraries.__name__ == "found" else found


def _write_no_traces() -> None:
    """Disable torch's traces of each compilation, graphs printed as text included.

    torch prints none where nobody listens. pytest listens to all loggers that do not hand on to the root.
    """
    import logging

    traces = logging.getLogger("torch.__trace")
    traces.handlers.clear()
    traces.propagate = True

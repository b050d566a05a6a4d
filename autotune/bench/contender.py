"""What running a contender takes: a database to deploy from, templates compiled in time, a capture that is watched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


class Watched:
    """A contender that notices when it could not be captured: it is called plainly after it was called in a capture."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call, self.tried, self.refused = call, False, False

    def __call__(self) -> object:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self.tried = True
        elif self.tried:
            self.refused = True
        return self.call()


@contextlib.contextmanager
def templates_in_threads(wanted: bool = True) -> Iterator[None]:
    """Let Inductor compile the templates of matrix products in threads of this process; what it chooses is the same.

    In its compiling processes (torch 2.11) their results do not reach this one: each of the twenty of a product is
    compiled again when it is timed, one after the other, 10 s a product where threads take 2. All its other kernels
    stay with the processes: compiled in this one they were most of the time.

    Args:
        wanted: False changes nothing.
    """
    if not wanted:
        yield
        return
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    AsyncCompile.wait_pool_ready()  # until it is, everything compiles here, one kernel after the other
    begin = AlgorithmSelectorCache.make_precompile_fn

    def in_threads(*args: Any, **kwargs: Any) -> Any:
        with config.patch(compile_threads=1):
            return begin(*args, **kwargs)

    # Not by config.patch, which other threads do not see: autograd's compile backward passes.
    told = {name: getattr(config, name) for name in ("autotune_num_choices_displayed",) if hasattr(config, name)}
    AlgorithmSelectorCache.make_precompile_fn = in_threads  # type: ignore[method-assign]
    for name in told:
        setattr(config, name, 0)  # a table for each product otherwise
    try:
        yield
    finally:
        AlgorithmSelectorCache.make_precompile_fn = begin  # type: ignore[method-assign]
        for name, value in told.items():
            setattr(config, name, value)

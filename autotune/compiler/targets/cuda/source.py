"""What a CUDA kernel is printed for, and what is printed: a schedule's parameters, and a source in parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GENERATOR = "cuda-4"
"""Changes when emitted code changes meaning; part of an artifact."""
PREFIX = "autotune_"
"""What the names of all our kernels begin with, in profiles and cubins."""


@dataclass(frozen=True)
class CudaSchedule:
    """The parameters of ``search_spaces/fusion.toml`` under ``[cuda]``."""

    threads_per_row: int
    rows_per_block: int
    vector_bytes: int
    keep: str
    online: bool
    unroll: int
    max_registers: int
    load_hint: str
    store_hint: str
    blocks_per_sm: int
    cluster: int = 1
    finish: str = "kernel"
    prefetch: bool = False
    held: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> CudaSchedule:
        later = ("cluster", "finish", "prefetch", "held")  # what configurations stored by earlier versions lack
        return cls(**{name: config[name] for name in cls.__dataclass_fields__ if name in config or name not in later})

    @property
    def block(self) -> int:
        return self.threads_per_row * self.rows_per_block


@dataclass(frozen=True)
class CudaSource:
    """An emitted kernel, in parts, so that several may become one.

    Attributes:
        functions: text of its device functions, named ``f<n>`` and ``e<n>``.
        body: the kernel's lines. Block number and number of blocks are ``blk`` and ``nblk`` (int32) in them, never
            ``cuda.blockIdx`` and ``cuda.gridDim``; they return nowhere early.
        params: short storage names of its pointers ``p0``, ``p1``, ...; where ``launch["dynamic"]``, ``n0`` (int64)
            follows them.
        launch: the runtime's launch data.
        block: threads a block.
        max_registers: cap for ptxas; 0 for none.
        cluster: blocks a cluster.
        name: what profilers show it as, an identifier.
        fast: whether it is compiled with CUDA's fast math.
    """

    functions: tuple[str, ...]
    body: tuple[str, ...]
    params: tuple[str, ...]
    launch: Mapping[str, Any]
    block: int
    max_registers: int
    cluster: int = 1
    name: str = f"{PREFIX}kernel"
    fast: bool = True

    @property
    def text(self) -> str:
        """Numba source that defines ``kernel`` and its device functions."""
        args = [f"p{k}" for k in range(len(self.params))] + (["n0"] if self.launch["dynamic"] else [])
        head = ["blk = int32(cuda.blockIdx.x)"]
        if any("nblk" in line for line in self.body):
            head.append("nblk = int32(cuda.gridDim.x)")
        kernel = [f"def kernel({', '.join(args)}):"] + ["    " + line for line in (*head, *self.body)]
        return "\n\n".join([*self.functions, "\n".join(kernel)]) + "\n"

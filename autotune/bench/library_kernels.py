"""Which CUDA kernels are a library's for matrix products, convolutions, attention, recurrences or communication.

By name, as the profiler shows it. All others are launched for memory-intensive operators.
"""

from __future__ import annotations

import re

from autotune.compiler.lower.op_names import PRODUCTS
from autotune.compiler.targets.cuda.source import PREFIX

_TRITON = re.compile(r"triton_(tem|mm|bmm|convolution|flex|flash)")
"""Inductor's templates, whatever is fused into them. Its other kernels are named for all that they fuse or follow."""

_LIBRARY = re.compile(
    r"""gemm | gemv | cutlass | cublas | nvjet | xmma | splitk | wgmma | \bmma_ | _mma_
      | flash | fmha | attention | mha_
      | cudnn | conv(?!ert) | implicit_ | winograd | dgrad | wgrad | nchwtonhwc | nhwctonchw
      | rnn | nccl | memcpy | memset
    """,
    re.IGNORECASE | re.VERBOSE,
)
_NORM = re.compile(r"cudnn.*(bn_|batch_?norm)", re.IGNORECASE)


def is_library(name: str) -> bool:
    """Whether a kernel belongs to a library call (or is a copy), rather than to memory-intensive operators."""
    if name.startswith("triton_"):
        return bool(_TRITON.match(name))
    if name.startswith(PREFIX):
        return False
    return bool(_LIBRARY.search(name)) and not _NORM.search(name)


def has_product(name: str) -> bool:
    """Whether a kernel of autotune's computes a matrix product beside its memory-intensive operators.

    False for kernels stored by versions that called all of theirs ``autotune_kernel``.
    """
    return name.startswith(PREFIX) and not PRODUCTS.keys().isdisjoint(name.split("_"))

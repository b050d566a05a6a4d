"""CUDA kernels without approximations: what is emitted with the hardware's fast functions, turned into accurate ones.

All schemes print exponentials, divisions and roots by the same few names, so the finished text is changed in one place:
each name becomes one whose error is at most 2 units in the last place, and the kernel is compiled without fast math
(``/`` is then correctly rounded, and denormals are kept).
"""

from __future__ import annotations

import re
from dataclasses import replace

from autotune.compiler.kernel.nodes import Stmt
from autotune.compiler.targets.cuda.operators import LOG2E
from autotune.compiler.targets.cuda.source import CudaSource

_NAMES = {
    "ex2": "libdevice.exp2f",
    "rcp": "rcp_rn",
    "sqrt": "sqrt_rn",
    "rsqrt": "rsqrt_rn",
    "erf_": "libdevice.erff",
    "tanh_": "libdevice.tanhf",
    "sigmoid_": "sigmoid_rn",
}
_CALL = re.compile(rf"(?<![\w.])(?:{'|'.join(_NAMES)})(?=\()")


def strictly(source: CudaSource) -> CudaSource:
    """A kernel that computes the same without approximations; launch data and tensors stay."""
    return replace(
        source,
        functions=tuple(map(accurate, source.functions)),
        body=tuple(x if isinstance(x, Stmt) else accurate(x) for x in source.body),
        fast=False,
    )


def accurate(text: str) -> str:
    """Source text with accurate functions; ``ex2(x * log2(e))``, which rounds the product, becomes ``exp(x)``."""
    done, rest = "", text
    while found := _CALL.search(rest):
        end = _closing(rest, found.end())
        name, inside = _NAMES[found.group()], accurate(rest[found.end() + 1 : end])
        if found.group() == "ex2" and inside.endswith(f" * {LOG2E}"):
            name, inside = "libdevice.expf", inside.removesuffix(f" * {LOG2E}")
        done += f"{rest[: found.start()]}{name}({inside})"
        rest = rest[end + 1 :]
    return done + rest


def _closing(text: str, at: int) -> int:
    """The place of the parenthesis that closes the one at ``at``."""
    depth = 0
    for k in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[k], 0)
        if not depth:
            return k
    raise ValueError(f"a parenthesis that nothing closes in {text!r}")

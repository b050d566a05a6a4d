"""NaN and floats out of an integer's range: stored kernels convert them as eager mode does on the same GPU.

python tests/gpu/conversion_check.py
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import autotune
from autotune.runtime.backend import deploy_backend
from tests.endtoend.runtime.test_conversions import as_integers, clamped, read_again, special
from tests.gpu import command
from tests.gpu.index_check import stored


def differences(fn: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> list[str]:
    """Each element that a kernel converts differently from eager mode."""
    found = []
    for verify in ("never", "always"):  # a check must not take right results for wrong
        torch._dynamo.reset()
        autotune.configure(verify=verify)  # type: ignore[arg-type]
        got = torch.compile(fn, backend=deploy_backend, dynamic=False)(x)
        for ours, eager in zip(got, fn(x), strict=True):
            for k in (ours != eager).nonzero().flatten().tolist():
                found.append(f"{x[k].item()} as {ours.dtype}: {ours[k].item()}, {eager[k].item()} in eager mode")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda:0")
    device = parser.parse_args(argv).device
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOTUNE_DB"] = f"{folder}/tuned.db"
        for fn in (as_integers, clamped, read_again):
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                for length in (1, 7, 33, 4096):
                    x = special(length, dtype, first=22).to(device)
                    assert stored(os.environ["AUTOTUNE_DB"], fn, (x,), device), "no region"
                    found[f"{fn.__name__} {dtype} {length}"] = differences(fn, x)
    counted = dict(autotune.counters())
    wrong = {name: lines for name, lines in found.items() if lines}
    print("\n".join([f"{name}: {line}" for name, lines in wrong.items() for line in lines[:5]]), counted)
    command.keep("conversion_check", {"wrong": wrong, "counters": counted})
    return int(bool(wrong) or not counted["hits"] or bool(counted["wrong_results"] + counted["fallbacks"]))


if __name__ == "__main__":
    sys.exit(main())

"""Inductor's Triton kernels as text, printed for an H100 without a GPU."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv


@contextlib.contextmanager
def hopper() -> Iterator[None]:
    """Show Inductor a GPU that it prints code for; skips the test without Triton."""
    triton = pytest.importorskip("triton")
    target = __import__("triton.backends.compiler", fromlist=["GPUTarget"]).GPUTarget("cuda", 90, 32)
    numbers = {"multi_processor_count": 132, "major": 9, "regs_per_multiprocessor": 65536}
    numbers |= {"max_threads_per_multi_processor": 2048, "warp_size": 32}
    shown = SimpleNamespace(name="H100", minor=0, total_memory=80 << 30, **numbers)
    found = DeviceProperties(type="cuda", index=0, cc=90, **numbers)
    driver = triton.runtime.driver
    with contextlib.ExitStack() as stack:
        for name, value in (
            ("torch.cuda.get_device_properties", shown),
            ("torch.cuda.get_device_capability", (9, 0)),
            ("torch.cuda.current_device", 0),
            ("torch._inductor.scheduler.has_triton", True),
        ):
            stack.enter_context(mock.patch(name, lambda *_, value=value, **__: value))
        stack.enter_context(mock.patch.object(DeviceProperties, "create", return_value=found))
        stack.callback(setattr, driver, "_active", vars(driver).get("_active"))
        driver.set_active(SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0))
        yield


def kernels(compute: Callable[[Tensor], Any], like: Tensor) -> list[str]:
    """Print the Triton kernels of a function.

    Args:
        compute: a function of one tensor.
        like: a tensor of its shape and type, on a CPU.

    Returns:
        The kernels' bodies in their order.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        given = torch.empty(like.shape, dtype=like.dtype, device="cuda:0")
        graph = make_fx(compute)(given)
    lowering = GraphLowering(graph, shape_env=mode.shape_env, example_inputs=[given])
    with V.set_graph_handler(lowering), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        lowering.run(given)
        code: Any = lowering.codegen()[0]
    text = getattr(code, "value", code)
    return re.findall(r"(def triton_\w+\(.*?)\n'''", text, re.DOTALL)

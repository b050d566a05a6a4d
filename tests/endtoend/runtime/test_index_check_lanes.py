"""The assertion of an index check in Triton's code: lanes past the tensor's end never fail it.

No GPU is needed: Inductor's kernel is printed for one, and its text runs on NumPy arrays.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
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

from autotune.runtime.inductor import index_check

ROWS, EXTENT, BLOCK = 3, 1500, 1024


@pytest.fixture
def hopper() -> Iterator[None]:
    """A GPU that Inductor prints code for."""
    triton = pytest.importorskip("triton")
    target = __import__("triton.backends.compiler", fromlist=["GPUTarget"]).GPUTarget("cuda", 90, 32)
    numbers = {"multi_processor_count": 132, "major": 9, "regs_per_multiprocessor": 65536}
    numbers |= {"max_threads_per_multi_processor": 2048, "warp_size": 32}
    shown = SimpleNamespace(name="H100", minor=0, total_memory=80 << 30, **numbers)
    found = DeviceProperties(type="cuda", index=0, cc=90, **numbers)
    driver = triton.runtime.driver
    with ExitStack() as stack:
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


def kernels(compute: Callable[[Tensor], Any]) -> list[str]:
    """The bodies of the Triton kernels of a function of one int64 tensor of ``EXTENT`` elements."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        given = torch.empty(EXTENT, dtype=torch.int64, device="cuda:0")
        graph = make_fx(compute)(given)
    lowering = GraphLowering(graph, shape_env=mode.shape_env, example_inputs=[given])
    with V.set_graph_handler(lowering), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        lowering.run(given)
        code: Any = lowering.codegen()[0]
    text = getattr(code, "value", code)
    return re.findall(r"(def triton_\w+\(.*?)\n'''", text, re.DOTALL)


def run(kernel: str, given: np.ndarray, numel: int) -> None:
    """Run a kernel's text over all blocks; raises AssertionError where one of its assertions fails."""

    def device_assert(condition: Any, text: str) -> None:
        assert np.all(condition), text

    def load(at: Any, mask: Any, other: float = -1.0, **_: Any) -> Any:
        inside = np.broadcast_to(mask, at.shape)
        return np.where(inside, given[np.where(inside, at, 0)], int(other))

    program = [0]
    tl = SimpleNamespace(
        constexpr=None, int1=bool, int32=np.int32, int64=np.int64, where=np.where, device_assert=device_assert,
        program_id=lambda axis: program[0], arange=np.arange, load=load, store=lambda *_: None,
        full=lambda shape, value, dtype: np.full(shape, value, dtype),
    )  # fmt: skip
    names: dict[str, Any] = {"tl": tl}
    exec(re.sub(r"\.to\(tl\.(\w+)\)", r".astype(tl.\1)", kernel), names)
    (call,) = (value for name, value in names.items() if name.startswith("triton_"))
    known = {"xnumel": numel, "XBLOCK": BLOCK}
    arguments = [known.get(name, 0) for name in inspect.signature(call).parameters]  # a pointer is an offset
    for block in range(-(-numel // BLOCK)):
        program[0] = block
        call(*arguments)


def iota() -> Tensor:
    made: Tensor = torch.ops.prims.iota.default(
        EXTENT, start=0, step=1, dtype=torch.int64, device="cuda:0", requires_grad=False
    )
    return made


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("past", [0, 1])
@pytest.mark.parametrize(
    ("index", "first"),
    [
        pytest.param(lambda given: iota(), 0, id="positions"),
        pytest.param(lambda given: iota().expand(ROWS, EXTENT), 0, id="positions of rows"),
        pytest.param(lambda given: given + 0, 0, id="loaded"),
        pytest.param(lambda given: given - 1, 1, id="computed of what is loaded"),
    ],
)
def test_lanes_past_the_end_are_in_range(
    index: Callable[[Tensor], Tensor], first: int, past: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``first`` is the given tensor's first element. With ``past`` 1 one index is out of range, and is found."""
    index_check._register_lowering()
    monkeypatch.setitem(index_check._pending, "lanes", (0, EXTENT - past, "the index of a test"))
    numel: list[int] = []

    def compute(given: Tensor) -> Tensor:
        checked = index(given)
        numel.append(checked.numel())
        torch.ops.autotune.index_check(checked, "lanes")
        return given + 1

    asserting = [kernel for kernel in kernels(compute) if "device_assert" in kernel]
    assert len(asserting) == 1
    if past:
        with pytest.raises(AssertionError, match="the index of a test"):
            run(asserting[0], np.arange(first, first + EXTENT), numel[-1])
    else:
        run(asserting[0], np.arange(first, first + EXTENT), numel[-1])

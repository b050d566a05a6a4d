"""The device on which a graph is searched and timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.runtime.inductor.code import device_of


class Input(torch.Tensor):
    """A tensor that claims a device."""

    device = torch.device("cpu")


def on(*names: str) -> list[Any]:
    return [type("On", (Input,), {"device": torch.device(name)})() for name in names]


@pytest.mark.parametrize(
    ("names", "device"),
    [(["cpu"], "cpu"), (["cpu", "cuda:1"], "cuda:1"), (["cuda", "cpu"], "cuda:0"), (["meta"], None), ([], None)],
)
def test_a_gpu_comes_before_scalars_of_the_cpu(names: list[str], device: str | None) -> None:
    assert device_of([SimpleNamespace(), 3, *on(*names)]) == device

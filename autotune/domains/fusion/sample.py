"""A small region, with which the processes of a search import what they need before the first region of a program."""

from __future__ import annotations

from typing import Any

from autotune.workload import Workload

_COLUMNS = 256


def region(rows: int) -> Workload:
    """``x * x.sum(-1, keepdim=True)`` of ``rows`` rows of fp32 numbers, with its program."""
    shape, strides, dtype = [rows, _COLUMNS], [_COLUMNS, 1], "float32"
    whole = {"dtype": dtype, "axes": [0, 1]}
    spec = {
        "extents": shape,
        "values": [
            {"op": "load", **whole, "strides": strides, "slot": 0},
            {"op": "sum", "dtype": dtype, "args": [0], "axes": [0], "over": [1]},
            {"op": "mul", **whole, "args": [0, 1]},
        ],
        "inputs": [dtype],
        "outputs": [{"value": 2, **whole, "strides": strides, "offset": 0}],
    }
    calls: list[dict[str, Any]] = [
        {"op": "aten.sum.dim_IntList", "args": [{"node": 0}, [-1], True]},
        {"op": "aten.mul.Tensor", "args": [{"node": 0}, {"node": 1}]},
    ]
    source = {
        "format": 1,
        "inputs": [{"shape": shape, "strides": strides, "dtype": dtype, "device": "cuda"}],
        "calls": [{**call, "of": call["op"]} for call in calls],
        "result": [{"node": 2}],
        "slots": [0],
    }
    return Workload("fusion", spec, label=f"sample of {rows} rows", source=source)

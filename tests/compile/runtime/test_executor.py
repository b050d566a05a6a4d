"""The executor on real CPU kernels: what it accepts, copies, refuses; and the launch rule of CUDA kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from autotune.errors import BuildError
from autotune.ir.graph import Graph, Output, Value
from autotune.runtime.control import counters
from autotune.runtime.launch.executor import Executor, load_executor
from autotune.runtime.launch.prepared import RegionTensors, TensorSpec, grid_of
from autotune.store.records import Key, Schedule
from autotune.task import Artifact, Kernel

ROWS, COLS = 6, 40
CPU = torch.device("cpu")
CONFIG = {"row_block": 2, "column_tile": 0, "keep": "scratch", "online": False, "threads": 1}


def softmax_graph(rows: int = ROWS) -> Graph:
    v = Value
    graph = Graph(
        (rows, COLS),
        (
            v("load", axes=(0, 1), slot=0, strides=(COLS, 1)),
            v("max", (0,), (0,), over=(1,)),
            v("sub", (0, 1), (0, 1)),
            v("exp", (2,), (0, 1)),
            v("sum", (3,), (0,), over=(1,)),
            v("div", (3, 4), (0, 1)),
        ),
        ("float32",),
        (Output(5, (0, 1), (COLS, 1), "float32"), Output(4, (0,), (1,), "float32")),
    )
    graph.check()
    return graph


SPECS = [TensorSpec((ROWS, COLS), (COLS, 1), torch.float32), TensorSpec((ROWS,), (1,), torch.float32)]
SCHEDULE = Schedule(Key("", "", "", ""), dict(CONFIG), 1.0, {}, Artifact("cpu", (Kernel("cpu_0"),)))


def make(graph: Graph | None = None, results: tuple[int, ...] = (0, 1)) -> Executor:
    outputs = [SPECS[k] for k in results]
    return load_executor(graph or softmax_graph(), SCHEDULE, RegionTensors([0], results, SPECS[:1], outputs), CPU)


def want(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.softmax(x, -1), (x - x.max(-1, keepdim=True).values).exp().sum(-1)


def test_outputs_are_new_and_right() -> None:
    run, x = make(), torch.randn(ROWS, COLS)
    got, again = run(x), run(x)
    for a, b in zip(got, want(x), strict=True):
        torch.testing.assert_close(a, b)
    assert got[0].data_ptr() != again[0].data_ptr()


def test_straight_line_code_does_the_same() -> None:
    run, x = make(results=(1, 0)), torch.randn(ROWS, COLS)
    assert run.call != run.__call__
    for a, b in zip(run.call(x), run(x), strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)
    run.call(torch.randn(COLS, ROWS).t())
    assert counters().restrided == 1, "what is unusual goes the general way"


def test_values_between_groups_are_in_scratch_memory() -> None:
    config = {"plan": "r1 / r4,o1 / o0", **{f"g{k}.{name}": value for k in range(3) for name, value in CONFIG.items()}}
    schedule = replace(
        SCHEDULE, config=config, artifact=Artifact("cpu", (Kernel("cpu_0"),) * 3, (("float32", ROWS),) * 2)
    )
    run = load_executor(softmax_graph(), schedule, RegionTensors([0], (0, 1), SPECS[:1], SPECS), CPU)
    x, out = torch.randn(ROWS, COLS), [torch.full(s.size, float("nan")) for s in SPECS]
    run.writer(never)(x, *out)
    for found in (run.call(x), run(x), out, run.call(x.t().clone().t())):
        for a, b in zip(found, want(x), strict=True):
            torch.testing.assert_close(a, b)


def test_outputs_in_the_regions_order() -> None:
    run, x = make(results=(1, 0)), torch.randn(ROWS, COLS)
    total, values = run(x)
    torch.testing.assert_close(values, want(x)[0])
    torch.testing.assert_close(total, want(x)[1])


def test_other_strides_are_copied() -> None:
    run, x = make(), torch.randn(COLS, ROWS).t()
    torch.testing.assert_close(run(x)[0], want(x)[0])
    assert counters().restrided == 1


def test_strides_of_single_elements_do_not_matter() -> None:
    run = load_executor(
        softmax_graph(1), SCHEDULE, RegionTensors([0], (0, 1), [TensorSpec((1, COLS), (COLS, 1), torch.float32)],
        [TensorSpec((1, COLS), (COLS, 1), torch.float32), TensorSpec((1,), (1,), torch.float32)]), CPU,
    )  # fmt: skip
    x = torch.randn(COLS).as_strided((1, COLS), (7, 1))
    torch.testing.assert_close(run(x)[0], want(x)[0])
    assert counters().restrided == 0


def test_misaligned_inputs_are_copied() -> None:
    x = torch.randn(ROWS * COLS + 1)[1:].view(ROWS, COLS)
    run = make()
    run._inputs = tuple((i, stride, 15) for i, stride, _ in run._inputs)  # as a kernel with 16-byte loads has it
    assert x.data_ptr() % 16
    torch.testing.assert_close(run(x)[0], want(x)[0])
    assert counters().misaligned == 1


def test_misaligned_overlapping_inputs_are_copied() -> None:
    x = torch.randn(COLS + 1)[1:].expand(ROWS, COLS)
    graph = softmax_graph()
    graph = replace(graph, values=(replace(graph.values[0], strides=(0, 1)), *graph.values[1:]))
    spec = TensorSpec((ROWS, COLS), (0, 1), torch.float32)
    run = load_executor(graph, SCHEDULE, RegionTensors([0], (0, 1), [spec], SPECS), CPU)
    run._inputs = tuple((i, stride, 15) for i, stride, _ in run._inputs)
    torch.testing.assert_close(run(x)[0], want(x)[0])
    assert counters().misaligned == 1


def test_results_can_be_written_to_given_tensors() -> None:
    run, x = make(), torch.randn(ROWS, COLS)
    out = [torch.full(s.size, float("nan")) for s in SPECS]
    run.run_into([x], out)
    for a, b in zip(out, want(x), strict=True):
        torch.testing.assert_close(a, b)


def never(error: Exception) -> Callable[..., None]:
    raise error


@pytest.mark.parametrize("results", [(0, 1), (1, 0)])
def test_generated_code_hands_over_the_tensors_to_write(results: tuple[int, ...]) -> None:
    write, x = make(results=results).writer(never), torch.randn(ROWS, COLS)
    out = [torch.full(SPECS[k].size, float("nan")) for k in results]
    assert write(x, *out) is None
    for k, got in zip(results, out, strict=True):
        torch.testing.assert_close(got, want(x)[k])


def test_misaligned_tensors_are_copied_for_a_writer() -> None:
    run, x = make(), torch.randn(ROWS * COLS + 1)[1:].view(ROWS, COLS)
    run._inputs = tuple((i, stride, 15) for i, stride, _ in run._inputs)
    out = [torch.full(s.size, float("nan")) for s in SPECS]
    run.writer(never)(x, *out)
    torch.testing.assert_close(out[0], want(x)[0])
    assert counters().misaligned == 1


def test_executor_asks_for_the_replacement_once() -> None:
    """The launch that failed is not tried again."""
    run, x = make(), torch.randn(ROWS, COLS)
    launches, told, instead = [], [], []

    def broken(stream: int, pointers: object) -> None:
        launches.append(pointers)
        raise RuntimeError("refused")

    run._steps = tuple((broken, pick) for _, pick in run._steps)
    write = run.writer(lambda error: told.append(str(error)) or (lambda *tensors: instead.append(tensors)))
    out = [torch.empty(s.size) for s in SPECS]
    write(x, *out), write(x, *out)
    assert told == ["refused"]
    assert len(launches) == 1
    assert len(instead) == 2


def test_no_rows_write_nothing() -> None:
    specs = [TensorSpec((0, COLS), (COLS, 1), torch.float32), TensorSpec((0,), (1,), torch.float32)]
    run = load_executor(softmax_graph(0), SCHEDULE, RegionTensors([0], (0, 1), specs[:1], specs), CPU)
    run.writer(never)(torch.empty(0, COLS), torch.empty(0, COLS), torch.empty(0))


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (TensorSpec((ROWS - 1, COLS), (COLS, 1), torch.float32), "does not hold"),
        (TensorSpec((ROWS, COLS), (COLS, 1), torch.float64), "does not hold"),
    ],
)
def test_a_graph_that_would_reach_outside_its_tensors_is_refused(spec: TensorSpec, match: str) -> None:
    with pytest.raises(BuildError, match=match):
        load_executor(softmax_graph(), SCHEDULE, RegionTensors([0], (0, 1), [spec], SPECS), CPU)
    with pytest.raises(BuildError, match=match):
        load_executor(softmax_graph(), SCHEDULE, RegionTensors([0], (0, 1), SPECS[:1], [spec, SPECS[1]]), CPU)


def test_an_artifact_of_another_plan_is_refused() -> None:
    schedule = replace(SCHEDULE, artifact=Artifact("cpu", (Kernel("a"), Kernel("b"))))
    with pytest.raises(BuildError, match="2 kernels"):
        load_executor(softmax_graph(), schedule, RegionTensors([0], (0, 1), SPECS[:1], SPECS), CPU)


def test_no_rows_launch_nothing() -> None:
    specs = [TensorSpec((0, COLS), (COLS, 1), torch.float32), TensorSpec((0,), (1,), torch.float32)]
    run = load_executor(softmax_graph(0), SCHEDULE, RegionTensors([0], (0, 1), specs[:1], specs), CPU)
    values, total = run(torch.empty(0, COLS))
    assert values.shape == (0, COLS)
    assert total.shape == (0,)


@pytest.mark.parametrize(
    ("rule", "extent0", "grid"),
    [
        ({"dynamic": True, "inner": 1, "per_block": 4, "cap": 0}, 10, 3),
        ({"dynamic": True, "inner": 3, "per_block": 4, "cap": 0}, 10, 8),
        ({"dynamic": True, "inner": 1, "per_block": 4, "cap": 2}, 10, 2),
        ({"dynamic": True, "inner": 1, "per_block": 4, "cap": 2}, 4, 1),
        ({"dynamic": False, "inner": 1000, "per_block": 256, "cap": 0}, 10, 4),
        ({"dynamic": True, "inner": 1, "per_block": 4, "cap": 0}, 0, 0),
    ],
)
def test_grid(rule: dict[str, object], extent0: int, grid: int) -> None:
    assert grid_of(rule, extent0) == grid

"""Plans with phases: proposed where they may gain, left out by the method without grid barriers, drawn, deployed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "codegen"))

from cpu_graphs import Build
from many_parts import beside, task_of, update
from test_cuda_phases import EVERYTHING, columns_then_rows, softmax_of_everything
from test_plan import graph_of

from autotune.compiler.assemble import build_artifact
from autotune.compiler.planner import beam as search
from autotune.compiler.planner.ablation import METHODS
from autotune.compiler.planner.beam import confined, shape_us, shapes
from autotune.compiler.planner.cost import Costs, Figures, plan_us
from autotune.compiler.planner.packing import may_be_phases, pack
from autotune.compiler.planner.plan import build_plan, make_plan, read_text, write_text
from autotune.domains.fusion.compositions import Combined
from autotune.domains.fusion.drawing.anatomy import dissect
from autotune.domains.fusion.drawing.svg_layout import Drawing, lay_out
from autotune.domains.fusion.task import FusionTask
from autotune.ir.graph import Graph
from autotune.runtime.executor import grid_of
from autotune.runtime.match import _one_each
from autotune.task import Ranked

F = Figures()
LARGE = columns_then_rows(4096, 1024)


def proposed(graph: Graph, method: str = "full") -> list[str]:
    return [write_text(s) for s in shapes(graph, "cuda", METHODS[method], F, 8)]


@pytest.mark.parametrize("graph", [LARGE, softmax_of_everything(1024, 1024), graph_of("relu_statistics")])
def test_the_beam_proposes_phases(graph: Graph) -> None:
    with_barriers = [text for text in proposed(graph) if ">" in text]
    assert with_barriers
    for text in with_barriers:
        plan = build_plan(graph, read_text(text))
        assert plan.text == text
        assert text.replace(" > ", " / ") in proposed(graph)  # and the same groups by themselves
    assert not any(">" in text for text in proposed(graph, "no-grid"))


def test_no_phases_where_they_cannot_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = read_text("r1 / r3,r5 / o0")
    assert search._behind_barriers(LARGE, shape) == read_text("r1 > r3,r5 > o0")
    assert search._behind_barriers(LARGE, read_text("r1 > r3,r5 / o0")) is None
    monkeypatch.setattr(search, "MOST_PHASES", 2)
    assert search._behind_barriers(LARGE, shape) is None
    monkeypatch.undo()
    monkeypatch.setattr(search, "MOST_GRID_BYTES", 4 * (4096 + 1024 + 1024) - 1)
    assert search._behind_barriers(LARGE, shape) is None
    monkeypatch.undo()
    monkeypatch.setattr("autotune.compiler.planner.packing.MOST_POINTERS", 5)
    assert not may_be_phases(build_plan(LARGE, shape))


def test_packing_leaves_phases_as_they_are() -> None:
    graph = task_of(beside(columns_then_rows(40, 64), update(50))).graph
    apart = build_plan(graph, read_text(make_plan(graph).text)).text
    assert ">" not in apart
    text = "r1 > r3,r5 > o0"
    alone = task_of(columns_then_rows(40, 64)).graph
    assert pack(build_plan(alone, read_text(text))) == read_text(text)


def test_a_barrier_costs_about_what_a_launch_does() -> None:
    groups = [[5.0], [7.0], [3.0]]
    launches, phases = plan_us([[g] for g in groups], F), plan_us([groups], F)
    assert phases == pytest.approx(F.first_us + 15.0 + 2 * F.barrier_us)
    assert launches == pytest.approx(F.first_us + 15.0 + 2 * F.next_us)
    assert plan_us([groups], replace(F, barrier_us=0.5)) < launches


def test_parts_measured_with_the_launchs_blocks_come_first() -> None:
    """A phase whose blocks must be made those of another is not trusted to take what its part took."""
    task = FusionTask(task_of(LARGE).workload, "cuda:0", target="sm_90", sms=132)
    (made,) = (c for c in task.compositions(8) if c.name == "r1 > r3,r5 > o0")
    assert isinstance(made.combine, Combined)
    shapes: list[list[tuple[int, int]]] = [[(128, 4)], [(256, 1), (128, 4)], [(512, 1)]]
    choices: list[list[Ranked]] = []
    for part, blocks in zip(made.parts, shapes, strict=True):
        own = FusionTask(part, "cuda:0", target="sm_90", sms=132)
        configs = [own.default() | {"threads_per_row": t, "rows_per_block": r} for t, r in blocks]
        assert [own.normalize(c) for c in configs] == configs
        choices.append([(c, 20.0 + n / 10) for n, c in enumerate(configs)])
    found = list(made.combine(choices))
    assert len(found) == 2
    assert found[0][1] < found[1][1]
    for config, threads in zip((c for c, _ in found), (128, 256), strict=True):
        assert task.reject(config) is None
        assert task.space_for(config).contains(config)
        parts = task.parts_of(task.plan_of(config), config)
        assert [int(c["threads_per_row"]) * int(c["rows_per_block"]) for c in parts] == [512] * 3
        assert parts[1]["threads_per_row"] == threads


def test_the_artifact_is_deployed_for_its_own_rows_only() -> None:
    task = FusionTask(task_of(softmax_of_everything(64, 512)).workload, "cuda:0", target="sm_90", sms=132)
    config = task.joined(
        task.plan_of({"plan": EVERYTHING}),
        [on.default(g.graph) for on, g in task.sides(task.plan_of({"plan": EVERYTHING}))],
    )
    artifact = task.build(config)
    (kernel,) = artifact.kernels
    assert kernel.launch["cooperative"]
    assert not kernel.launch["dynamic"]
    assert grid_of(kernel.launch, 7) == kernel.launch["grid"] <= 132 * kernel.resources["blocks_per_sm"]
    assert not _one_each(task.plan_of(config), artifact.kernels)
    assert [n for _, n, state in artifact.scratch if state] == [32]


def test_the_picture_shows_phases() -> None:
    task = task_of(softmax_of_everything(64, 512))
    plan = task.plan_of({"plan": EVERYTHING})
    config = task.joined(plan, [on.default(g.graph) for on, g in task.sides(plan)])
    anatomy = dissect(task.graph, config, "cuda", 3)
    assert [len(launch) for launch in anatomy.launches] == [3]
    assert anatomy.kernels == 1
    page = lay_out([Drawing("softmax", "", "", anatomy)])
    (region,) = page.boxes
    (launch,) = region.inside
    assert [box.kind for box in launch.inside] == ["group", "barrier", "group", "barrier", "group"]
    from autotune.cli.plan import _launch

    assert next(iter(_launch(0, anatomy.launches[0]))).endswith("3 groups in 3 phases with a grid barrier between")


def test_phases_without_grid_barriers_are_launches() -> None:
    packed = read_text("r1 > r3,r5 > o0")
    assert write_text(confined(packed, METHODS["no-grid"])) == "r1 / r3,r5 / o0"


def strided_reductions(rows: int, cols: int) -> Graph:
    """Half precision: sums over rows and over columns of one tensor."""
    b = Build(rows, cols)
    x = b.load("bfloat16", 0, 1)
    b.out(b.reduce("sum", x, 0), "bfloat16")
    b.out(b.reduce("max", x, 1), "bfloat16")
    return b.graph()


def test_every_proposal_of_phases_compiles() -> None:
    task = FusionTask(task_of(strided_reductions(2048, 1024)).workload, "cuda:0", target="sm_90", sms=132)
    texts = [text for text in proposed(task.graph) if ">" in text]
    assert texts
    plan = make_plan(task.graph, "cuda", texts[0])
    config = task.joined(plan, [on.default(g.graph) for on, g in task.sides(plan)])
    assert task.reject(config) is None
    artifact = build_artifact(task.graph, plan, task.parts_of(plan, config), "sm_90", 132)
    assert [k.resources["stack"] for k in artifact.kernels] == [0]


def test_a_softmax_of_everything_is_taken_apart() -> None:
    """Its maximum and its sum are each shared by all blocks, which cannot be where something large waits for them."""
    graph = task_of(softmax_of_everything(1024, 1024)).graph
    costs = Costs(graph, F)
    whole, apart = ("r1,r4,o0", "r1 / r4 / o0")
    assert shape_us(graph, costs, read_text(apart)) < 0.5 * shape_us(graph, costs, read_text(whole))
    assert proposed(graph)[:2] == [apart, EVERYTHING]
    small = task_of(softmax_of_everything(16, 32)).graph  # one block is as fast
    assert shape_us(small, Costs(small, F), read_text(apart)) > shape_us(small, Costs(small, F), read_text(whole))

"""``autotune plan``: text, JSON, the picture's geometry, and mistakes. No GPU is needed for any of it."""

from __future__ import annotations

import itertools
import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autotune.cli.app import main
from autotune.cli.commands import plan
from autotune.domains.fusion.anatomy import Anatomy, dissect
from autotune.domains.fusion.inspection import Outside, planned
from autotune.domains.fusion.picture import draw
from autotune.domains.fusion.svg_layout import Box, Drawing, Page, lay_out
from autotune.domains.fusion.task import FusionTask
from autotune.ir.graph import Graph
from autotune.words import NARROW
from tests.support.read_back import cut as read_back_cut
from tests.support.read_back import mixer_norm, workload_of

SVG = "{http://www.w3.org/2000/svg}"
HERE = "tests.unit.cli.test_plan_command"


def normed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(F.layer_norm(x @ x.T, (64,)) * w, -1)


def normed_inputs(device: str) -> tuple[torch.Tensor, ...]:
    return torch.randn(64, 64, device=device), torch.randn(64, device=device)


def looks_at_data(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


def data_inputs(device: str) -> torch.Tensor:
    x = torch.ones(4, 8, device=device)
    return x if x.sum().item() > 0 else -x  # no fake tensor can answer that


class Block(nn.Module):
    """Needs a backward pass only if asked to train."""

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (64,), w).relu()


class Scaled(nn.Module):
    """Has a parameter, which requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * self.scale, -1) * w


def regions(target: str, inputs: str | None = None, device: str = "cuda", **kw: bool) -> list[plan.RegionPlan]:
    return plan.plan_target(target, inputs, device, **kw)[0]


def anatomy(target: str, inputs: str | None = None, device: str = "cuda") -> Anatomy:
    (region,) = regions(target, inputs, device)
    assert region.after is not None
    return region.after


def test_a_gpu_is_planned_for_with_its_sizes_and_without_it() -> None:
    after = anatomy("layer_norm")
    (group,) = after.groups
    assert group.scheme == "rows"
    assert after.kernels == 1
    assert after.bytes == 2 * 16384 * 1024 * 4 + 2 * 1024 * 4
    assert [o.name for o in group.operators if o.kind == "reduction"] == ["sum", "sum"]
    assert {o.home for o in group.operators if o.kind == "reduction"} == {"block"}
    assert [t.label for t in group.writes] == ["y0 f32 16384x1024"]


def test_scope_follows_the_schedule() -> None:
    (found,) = planned("layer_norm", None, "cuda").regions
    assert found.region.workload is not None
    task = FusionTask(found.region.workload, "cuda:0", "sm_90", 132)
    for threads, home in ((1, "thread"), (32, "warp"), (256, "block")):
        config = task.default() | {"threads_per_row": threads, "keep": "reload"}
        (group,) = dissect(task.graph, config, "cuda", 132).groups
        assert {o.home for o in group.operators if o.kind == "reduction"} == {home}
        assert {o.home for o in group.operators if o.name.startswith("x0")} == {"again"}


def backward(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return dy * torch.tanh(x), (dy * x).sum(0)


def backward_inputs(device: str) -> tuple[torch.Tensor, ...]:
    return torch.randn(4096, 128, device=device), torch.randn(4096, 128, device=device)


@pytest.mark.parametrize(("device", "scheme"), [("cpu", "cpu"), ("cuda", "columns")])
def test_results_over_all_rows_meet_in_global_memory(device: str, scheme: str) -> None:
    after = anatomy(f"{HERE}:backward", f"{HERE}:backward_inputs", device)
    (group,) = after.groups
    assert group.scheme == scheme
    assert (group.kernels, after.kernels) == (2, 2)
    assert {o.home for o in group.operators if o.kind == "reduction"} == {"grid"}
    assert after.scratch_bytes == group.private_bytes > 0
    assert after.bytes == (3 * 4096 * 128 + 128) * 4 + 2 * group.private_bytes


def outer(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, 0)


def outer_inputs(device: str) -> torch.Tensor:
    return torch.randn(512, 2048, device=device)


def test_reductions_over_outer_axes_meet_where_their_threads_do() -> None:
    (found,) = planned(f"{HERE}:outer", f"{HERE}:outer_inputs", "cuda").regions
    assert found.region.workload is not None
    task = FusionTask(found.region.workload, "cuda:0", "sm_90", 132)
    for rows, home in ((1, "thread"), (8, "block")):
        (group,) = dissect(task.graph, task.default() | {"rows_per_block": rows, "cluster": 1}, "cuda", 132).groups
        assert group.scheme == "outer"
        assert {o.home for o in group.operators if o.kind == "reduction"} == {home}


def with_transposed(x: torch.Tensor) -> torch.Tensor:
    return x + x.t()


def square(device: str) -> torch.Tensor:
    return torch.randn(128, 128, device=device)


def test_tiles_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "fusion", f"{HERE}:with_transposed", "--inputs", f"{HERE}:square"]) == 0
    text = capsys.readouterr().out
    assert "scheme transpose" in text
    assert "tiles of 32 x 32 through shared memory, 256 threads each, 16-byte accesses" in " ".join(text.split())


def test_groups_of_one_form_in_one_launch_are_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "fusion", f"{HERE}:step", "--inputs", f"{HERE}:step_inputs"]) == 0
    text = capsys.readouterr().out
    assert "with autotune: 1 kernel," in text
    assert "5 groups of this form" in text
    page = lay_out(drawings(f"{HERE}:step", f"{HERE}:step_inputs"))
    check_geometry(page)
    (box,) = [b for b in page.every() if b.kind == "group"]
    assert box.lines[0].startswith("5 x flat")


def step(params: list[torch.Tensor], grads: list[torch.Tensor]) -> list[torch.Tensor]:
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)]


def step_inputs(device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    sizes = (100, 1000, 64, 333, 5000)
    return [torch.randn(n, device=device) for n in sizes], [torch.randn(n, device=device) for n in sizes]


def test_before_counts_kernels_and_bytes_of_eager_mode() -> None:
    (region,) = regions("softmax_mask", device="cpu")
    n = 1
    for extent in region.after.groups[0].writes[0].extents:  # type: ignore[union-attr]
        n *= extent
    assert dict(region.before.operators) == {"mul": 1, "add": 1, "_softmax": 1}
    mask = region.before.bytes - 6 * n * 4
    assert 0 < mask < n * 4


def test_each_operator_is_there_once_and_edges_go_forward() -> None:
    for group in anatomy("bias_gelu_residual_layer_norm").groups:
        seen: set[int] = set()
        for o in group.operators:
            assert set(o.args) <= seen
            assert all(p.step <= o.step for p in group.operators if p.value in o.args)
            seen.add(o.value)
        assert {value for value, _ in group.stores} <= seen


def test_a_library_call_separates_regions_and_text_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "fusion", f"{HERE}:normed", "--inputs", f"{HERE}:normed_inputs"]) == 0
    out = capsys.readouterr().out
    assert "1 region" in out
    assert "native_layer_norm, mul, _softmax" in out
    assert "pass 1: read" in out
    *lines, advice = out.splitlines()
    assert max(map(len, lines)) <= plan.WIDTH == 80
    assert advice.startswith("`autotune search fusion"), "a command stays on one line"


@pytest.mark.parametrize(("device", "exists"), [("cpu", True), ("cuda", False)])
def test_the_last_line_names_a_device_that_this_machine_lacks(
    device: str, exists: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["plan", "fusion", "layer_norm", "--device", device]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("`autotune search fusion layer_norm")
    assert last.endswith("searches faster schedules") is exists
    assert last.endswith(", on a machine with a device cuda") is not exists


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_gpu_s_kernels_have_predicted_times(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "fusion", "layer_norm", "--train", "--device", device]
    assert main(words) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "predicted for an H200" in line]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["regions"]
    if device == "cpu":
        assert not lines
        assert all(region["predicted_us"] is None and region["bytes_us"] is None for region in found)
        return
    assert len(lines) == 1 + len(found)
    for region in found:  # both read and write 128 MiB or more, and compute little
        assert 30 < region["bytes_us"] < region["predicted_us"] < 2 * region["bytes_us"]


def test_kernels_without_a_model_have_the_time_of_their_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "fusion", f"{HERE}:outer", "--inputs", f"{HERE}:outer_inputs"]
    for found in (None, math.inf):
        monkeypatch.setattr(FusionTask, "predict", lambda *_, found=found: found)
        assert main(words) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if "predicted" in line]
        assert len(lines) == 2
        assert lines[0].endswith(" by bytes alone (1 without a model)")
        assert "for an H200: no model, " in lines[1]
        assert main([*words, "--json"]) == 0
        (region,) = json.loads(capsys.readouterr().out)["regions"]
        assert region["predicted_us"] is None
        assert region["bytes_us"] > 0


def test_inputs_that_need_data_are_made_for_real() -> None:
    (region,) = regions(f"{HERE}:looks_at_data", f"{HERE}:data_inputs")
    assert region.label == "relu f32 32"


def test_train_plans_the_backward_pass_too() -> None:
    names = (f"{HERE}:Block", f"{HERE}:normed_inputs")
    assert len(regions(*names)) == 1
    trained = regions(*names, train=True)
    assert len(trained) == 2
    assert any("native_layer_norm_backward" in r.before.operators for r in trained)


def made(width: int, *, training: bool = False) -> nn.Module:
    """A factory, as models come from."""
    return nn.Sequential(nn.LayerNorm(width), nn.ReLU()).train(training)


def rows(width: int, device: str) -> torch.Tensor:
    return torch.randn(32, width, device=device)


def test_a_factory_is_planned_and_told_as_it_was_named(capsys: pytest.CaptureFixture[str]) -> None:
    target = f"{HERE}:made(48, training=True)"
    assert main(["plan", "fusion", target, "--inputs", f"{HERE}:rows(width=48)", "--train", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["target"] == target
    assert any("32x48" in region["label"] for region in told["regions"])


def test_operators_outside_of_regions_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """The backward pass has separate counts; views and operators without inputs do not count."""

    def count(name: str, train: bool) -> dict[str, int]:
        return dict(planned(f"{HERE}:{name}", f"{HERE}:normed_inputs", "cpu", train=train).outside)

    assert count("normed", False) == {"mm": 1}  # on a GPU it is small enough to be in the region
    assert count("counted", False) == {"mm": 2, "cumsum": 1}
    assert count("counted", True)["mm"] > 2
    assert count("Block", False) == {}
    command = ["plan", "fusion", f"{HERE}:counted", "--inputs", f"{HERE}:normed_inputs", "--device", "cpu"]
    assert main(command) == 0
    assert "\noutside of regions, left to Inductor: 2 mm, cumsum\n" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outside"] == {"mm": 2, "cumsum": 1}


def mixed(x: torch.Tensor, small: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    state.add_(1)
    made = torch.relu(x @ x.T).cumsum(0).softmax(-1)
    return made, small * small


def mixed_inputs(device: str) -> tuple[torch.Tensor, ...]:
    x, state = torch.randn(512, 512, device=device), torch.zeros(8, device=device)
    return x, torch.ones(64, dtype=torch.int8, device=device), state


def only_mm(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def test_why_names_each_operator_outside_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """One without a rule, whole numbers that may wrap, a mutation and a library call; the most bytes first."""
    command = ["plan", "fusion", f"{HERE}:mixed", "--inputs", f"{HERE}:mixed_inputs", "--device", "cpu", "--why"]
    assert main(command) == 0
    out = capsys.readouterr().out
    table = out[out.index("operator  calls") : out.index("\n\n1. ")].splitlines()
    assert max(map(len, table)) <= NARROW
    assert [line.split(maxsplit=4) for line in table] == [
        ["operator", "calls", "moved", "why", "Inductor compiles it"],
        ["mm", "1", "3", "MiB", "a library call"],
        ["cumsum", "1", "2", "MiB", "an operator without a rule"],
        ["mul", "1", "128", "bytes", "mul in torch.int8 (it may wrap)"],
        ["add", "1", "64", "bytes", "its result is copied into an input"],
        ["copy_", "1", "64", "bytes", "it writes into its arguments"],
    ]
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["why"][1] == {
        "operator": "cumsum",
        "count": 1,
        "bytes": 2 << 20,
        "reason": "an operator without a rule",
    }
    assert {row["operator"]: row["count"] for row in told["why"]} == told["outside"]


def test_why_answers_for_a_target_without_any_region(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "fusion", f"{HERE}:only_mm", "--inputs", f"{HERE}:square", "--device", "cpu"]
    assert main(command) == 2
    assert "no memory-intensive region" in capsys.readouterr().err
    assert main([*command, "--why"]) == 0
    out = capsys.readouterr().out
    assert "0 regions" in out
    assert "a library call" in out


def test_an_option_of_inductor_is_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "fusion", f"{HERE}:normed", "--inputs", f"{HERE}:normed_inputs", "--device", "cpu", "--why"]
    with torch._inductor.config.patch(emulate_precision_casts=True):
        assert main(command) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "left to Inductor: option emulate_precision_casts of Inductor" in out
    assert "exp 1" in out
    assert main([*command, "--json"]) == 0
    assert "option" not in capsys.readouterr().out


def test_long_names_and_reasons_fit_into_80_columns() -> None:
    rows = [
        Outside(
            "triton_kernel_wrapper_functional_proxy_of_a_user", 1200, 5 << 30, "a concatenation of 17 tensors " * 4
        ),
        Outside("mm", 1, None, "a library call"),
    ]
    lines = list(plan.why_lines(rows))
    assert max(map(len, lines)) <= NARROW
    assert "unknown" in lines[-1]
    assert " ".join(" ".join(lines).split()).count("17 tensors") == 4
    assert list(plan.why_lines([])) == ["Inductor compiles only views"]


def test_a_target_that_requires_a_gradient_reports_two_captures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = "requires a gradient, so it is captured twice"
    for name, more, wanted in (("Scaled", [], True), ("Scaled", ["--train"], False), ("Block", [], False)):
        command = ["plan", "fusion", f"{HERE}:{name}", "--inputs", f"{HERE}:normed_inputs", "--device", "cpu"]
        assert main([*command, *more]) == 0
        assert (told in " ".join(capsys.readouterr().out.split())) == wanted


def counted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (torch.relu(x @ x.T).reshape(32, 128).cumsum(0).view(64, 64) @ x).exp() + torch.zeros(64)


def test_regions_are_those_that_a_search_finds() -> None:
    from autotune.domains.fusion.program_spec import captured

    for train in (False, True):
        names = (f"{HERE}:Block", f"{HERE}:normed_inputs", "cpu")
        tuned = [p.region.workload for p in planned(*names, train=train).regions]
        searched = captured(*names, train=train).workloads
        assert [w and w.fingerprint for w in tuned] == [w.fingerprint for w, _ in searched]


def test_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "fusion", "bert_layer", "--device", "cpu", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    for when in ("before", "after"):
        for what in ("kernels", "bytes"):
            assert answer[when][what] == sum(r["count"] * r[when][what] for r in answer["regions"])
    assert any(r["count"] == 2 for r in answer["regions"])
    for r in answer["regions"]:
        groups = [g for launch in r["after"]["launches"] for g in launch]
        assert r["after"]["bytes"] == sum(g["bytes"] for g in groups)


def test_the_stored_schedule_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from autotune.device import environment, identify
    from autotune.store import Store
    from autotune.store.records import Key, Schedule

    (found,) = planned("layer_norm", None, "cpu").regions
    workload = found.region.workload
    assert workload is not None
    config = FusionTask(workload, "cpu").default() | {"row_block": 2, "threads": 1}
    with Store.open(tmp_path / "t.db") as store:
        store.put_workload(workload)
        key = Key(
            workload.fingerprint, store.put_device(identify("cpu")), store.put_environment(environment("cpu")), "p"
        )
        assert store.put_schedule(Schedule(key, config, 12.5, {"eager": 20.0}))
    arguments = ["plan", "fusion", "layer_norm", "--device", "cpu"]
    assert main([*arguments, "--db", str(tmp_path / "t.db")]) == 0
    text = capsys.readouterr().out
    assert "stored, 12.5 us on" in text
    assert "1 thread, 2 rows at a time" in text
    assert main(arguments) == 0
    assert "(default)" in capsys.readouterr().out


# The picture --------------------------------------------------------------------------------------


def drawings(target: str, inputs: str | None = None, **kw: bool) -> list[Drawing]:
    return [Drawing(r.label, "a", "b", r.after) for r in regions(target, inputs, **kw) if r.after]


def two_launches() -> Drawing:
    """A region cut in two by its plan, so that a value travels through scratch."""
    (found,) = planned("rms_norm", None, "cuda").regions
    assert found.region.workload is not None
    graph = Graph.from_json(found.region.workload.spec)
    whole = dissect(graph, FusionTask(found.region.workload, "cuda:0", "sm_90", 132).default(), "cuda", 132)
    reduction, result = whole.plan.split(",")
    part = FusionTask(found.region.workload, "cuda:0", "sm_90", 132).default()
    cut = {f"g{k}.{name}": value for k in (0, 1) for name, value in part.items()}
    return Drawing("cut", "a", "b", dissect(graph, {"plan": f"{reduction} / {result}", **cut}, "cuda", 132))


def read_back() -> Drawing:
    """A region of two launches, the second of which reads a result of the first."""
    task = FusionTask(workload_of(mixer_norm, 2, 24, 64), "cuda:0", "sm_90", 132)
    made = task.plan_of({"plan": read_back_cut(task.graph)})
    config = task.joined(made, [on.default(g.graph) for on, g in task.sides(made)])
    return Drawing("read back", "a", "b", dissect(task.graph, config, "cuda", 132))


def inside(inner: Box, outer: Box) -> bool:
    eps = 1e-6
    return (
        inner.x >= outer.x - eps
        and inner.y >= outer.y - eps
        and inner.x + inner.w <= outer.x + outer.w + eps
        and inner.y + inner.h <= outer.y + outer.h + eps
    )


def apart(a: Box, b: Box) -> bool:
    return a.x + a.w <= b.x or b.x + b.w <= a.x or a.y + a.h <= b.y or b.y + b.h <= a.y


def check_geometry(page: Page) -> None:
    for outer in page.every():
        for box in outer.inside:
            assert inside(box, outer), (box.lines, outer.lines)
            assert box.y >= outer.y + outer.header - 1e-6, "a box covers the text of the one around it"
        for a, b in itertools.combinations(outer.inside, 2):
            assert apart(a, b), (a.lines, b.lines)
    for a, b in itertools.combinations(page.boxes, 2):
        assert apart(a, b)
    for box in page.boxes:
        assert box.x + box.w <= page.width
        assert box.y + box.h <= page.height
    placed = {id(box) for box in page.every()}
    for edge in page.edges:
        way = (edge.source, *edge.via, edge.sink)
        assert {id(box) for box in way} <= placed
        assert all(a.y + a.h <= b.y for a, b in itertools.pairwise(way)), "an edge that does not go down"


def test_a_result_that_is_read_back_is_drawn() -> None:
    drawing = read_back()
    page = lay_out([drawing])
    check_geometry(page)
    writes, reads = drawing.anatomy.groups
    assert [t.name for t in writes.writes] == ["y0"]
    assert "y0" in [t.name for t in reads.reads]
    ET.fromstring(draw("read back", [drawing]))


@pytest.mark.parametrize("target", ["layer_norm", "cross_entropy", "bert_layer"])
def test_boxes_nest_and_never_overlap(target: str) -> None:
    found = drawings(target)
    page = lay_out(found)
    check_geometry(page)
    shown = [b for b in page.every() if b.kind in ("load", "leaf", "pointwise", "reduction")]
    assert len(shown) == sum(len(g.operators) for d in found for g in d.anatomy.groups)


def test_scratch_is_drawn_between_launches() -> None:
    drawing = two_launches()
    assert drawing.anatomy.scratch_bytes == 8192 * 4
    page = lay_out([drawing])
    check_geometry(page)
    assert sum(b.kind == "launch" for b in page.every()) == 2
    (edge,) = [e for e in page.edges if e.source.kind == "scratch"]
    assert (edge.sink.kind, edge.home) == ("load", "grid")


def test_backward_passes_fit_too() -> None:
    check_geometry(lay_out(drawings(f"{HERE}:Block", f"{HERE}:normed_inputs", train=True)))


def test_svg_is_xml_escaped_and_the_same_every_time(tmp_path: Path) -> None:
    file = tmp_path / "p.svg"
    assert main(["plan", "fusion", "bert_layer", "--svg", str(file)]) == 0
    first = file.read_text()
    assert main(["plan", "fusion", "bert_layer", "--svg", str(file)]) == 0
    assert file.read_text() == first
    root = ET.fromstring(first)
    assert len([r for r in root.iter(f"{SVG}rect") if r.get("class") == "region"]) == 3
    assert root.findtext(f"{SVG}title") == "bert_layer on cuda"
    assert "shared memory of a block" in first

    (drawing,) = drawings("layer_norm", None)
    odd = ET.fromstring(draw('<a & "b">', [Drawing("x < y & z", "a", "b", drawing.anatomy)]))
    assert "x < y & z" in [t.text for t in odd.iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["layer_nrom"], "did you mean 'layer_norm'"),
        (["layer_norm", "--device", "tpu"], "unknown device 'tpu'"),
        (["layer_norm", "--svg", "no/such/p.svg"], "no/such"),
        (["layer_norm", "--svg", "p.png"], "name it p.svg"),
        (["layer_norm", "--svg", "/"], "is a folder"),
        (["layer_norm", "--db", "no_such.db"], "no database no_such.db"),
        (["no.such:f", "--inputs", "os:getcwd"], "no module 'no'"),
        ([f"{HERE}:normed"], "needs --inputs"),
        ([f"{HERE}:made(width)", "--inputs", f"{HERE}:rows(48)"], "width is not a literal"),
        ([f"{HERE}:made()", "--inputs", f"{HERE}:rows(48)"], "made() failed: TypeError"),
        (["os:getcwd", "--inputs", f"{HERE}:normed_inputs"], "failed on its inputs"),
    ],
)
def test_a_mistake_is_one_line(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "fusion", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1

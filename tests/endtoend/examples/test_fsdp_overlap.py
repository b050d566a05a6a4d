"""The FSDP example on two gloo ranks: the stored strategy gathers, training goes as it does with stock FSDP2."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune.bench import form
from autotune.device import environment
from autotune.domain import place
from autotune.domains.c3.collectives.base import Spec
from autotune.domains.c3.strategy import HostStrategy
from autotune.store import Store
from autotune.store.records import Key, Schedule
from autotune.task import Artifact
from examples import fsdp_gather, fsdp_overlap
from examples.fsdp_gather import TunedAllGather
from examples.fsdp_training import Trained, agree, scenario_of

SMALL = [
    "--device", "cpu", "--hidden", "48", "--inner", "80", "--heads", "4", "--kv-heads", "2", "--layers", "3",
    "--length", "8", "--dtype", "f32", "--steps", "2", "--warmup", "1", "--ranks", "2",
]  # fmt: skip
TUNED = HostStrategy(order="comm_first", engine="copy", copies=2).config()


def tuned_db(path: Path) -> str:
    """A database with a strategy for the layer of :data:`SMALL`."""
    scenario = scenario_of(fsdp_overlap.arguments(SMALL), 2)
    workload = scenario.workload()
    with Store.open(path) as store:
        device, env = store.put_device(place(workload, "cpu")), store.put_environment(environment("cpu"))
        key = Key(store.put_workload(workload), device, env, "by hand")
        store.put_schedule(
            Schedule(key, TUNED, 100.0, {"sequential": 150.0}, Artifact("cpu", ()), "autotune", workload.family,
                     workload.extent)
        )  # fmt: skip
    return str(path)


def test_all_modes_train_alike_and_the_stored_strategy_gathers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    code = fsdp_overlap.main([*SMALL, "--db", tuned_db(tmp_path / "c3.db"), "--out", str(out)])
    assert code == 0, capsys.readouterr().err
    result = form.read(out)
    modes = {case["name"]: case for case in result["cases"]}
    assert result["agree"]
    assert result["wrong"] == []
    assert result["strategy"]["level"] == "exact"
    assert result["strategy"]["config"] == TUNED
    assert set(modes) == {"fsdp2", "fsdp2_prefetch", "autotune"}
    assert result["skipped"] == {"fsdp2_copy": "there are no copy engines without GPUs"}
    for mode in modes.values():
        assert mode["losses"] == pytest.approx(modes["fsdp2"]["losses"], rel=1e-4)
        assert len(set(mode["losses"])) == 3  # it does train
        assert mode["ms"] > 0
    said = capsys.readouterr().out
    assert "8x384x48 f32 | all_gather" in said
    assert "engine=copy" in said


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--set", "engine=nccl"], "engine is one of gloo, copy"),
        (["--set", "colour=red"], "a strategy has order, engine"),
        (["--ranks", "1"], "2 ranks or more"),
        (["--device", "cuda", "--ranks", "64"], "64 ranks need a GPU each"),
    ],
)
def test_mistakes_are_one_line(more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fsdp_overlap.main([*SMALL, *more]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_sizes_that_make_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fsdp_overlap.main([*SMALL, "--heads", "5"])
    assert "multiple of --heads" in capsys.readouterr().err


class FakeGather:
    """A collective of one rank of two, that only notes what is asked of it."""

    engine = "fake"
    met = None

    def __init__(self, spec: Spec, in_place: bool) -> None:
        self.ran, self.closed = 0, False
        self.output = torch.zeros(spec.numel)
        self.input = self.output[: spec.numel // 2] if in_place else torch.zeros(spec.numel // 2)

    def enqueue(self, stream: Any = None) -> None:
        self.ran += 1

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[FakeGather]:
    made: list[FakeGather] = []

    def fake(spec: Spec, group: Any, config: Any, artifact: Any) -> FakeGather:
        made.append(FakeGather(spec, in_place=not made))
        return made[-1]

    monkeypatch.setattr(fsdp_gather, "open_collective", fake)
    return made


def ask(gather: TunedAllGather, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return gather.allocate((numel,), dtype=dtype, device=torch.device("cpu"))


def test_outputs_take_turns_whatever_becomes_of_them(opened: list[FakeGather]) -> None:
    group: Any = None
    gather = TunedAllGather(group, TUNED, depth=2)
    first, second = ask(gather, 8), ask(gather, 8)
    places = [c.output.data_ptr() for c in opened]
    assert [t.data_ptr() for t in (first, second)] == places
    with pytest.raises(RuntimeError, match="more than 2"):
        ask(gather, 8)
    del second
    assert ask(gather, 8).data_ptr() == places[1]  # its turn: the first is in use, and was not given away
    del first
    assert [ask(gather, 8).data_ptr() for _ in range(3)] == [places[0], places[1], places[0]]
    ask(gather, 16)
    assert [c.output.numel() for c in opened] == [8, 8, 16]
    gather.close()
    assert all(c.closed for c in opened)


def test_the_shard_is_copied_where_the_engine_does_not_gather_in_place(opened: list[FakeGather]) -> None:
    group: Any = None
    gather = TunedAllGather(group, TUNED)
    in_place, apart = ask(gather, 8), ask(gather, 8)
    for out in (in_place, apart):
        out[:4] = 3.0
        gather(out, out[:4], group)
    assert [c.ran for c in opened] == [1, 1]
    assert opened[1].input.tolist() == [3.0] * 4
    other = ask(gather, 8, torch.uint8)  # no collective is made for it
    assert other.dtype == torch.uint8
    assert len(opened) == 2


def trained(*losses: float) -> Trained:
    nothing: Any = None
    return replace(Trained("any", nothing, nothing, None), losses=list(losses))


def test_trainings_that_part_do_not_agree() -> None:
    assert agree([trained(2.0, 1.5), trained(2.0, 1.50001)], "f32")
    assert not agree([trained(2.0, 1.5), trained(2.0, 1.5), trained(2.0, 1.51)], "f32")
    assert not agree([trained(2.0, 1.5), trained(2.0, float("nan"))], "bf16")

"""Limits of devices: measured on ranks of a CPU, and computed from ranks that answer as GPUs do."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.domains.c3.scenario import COLLECTIVES, REDUCING
from autotune.domains.c3.strategy import Strategy
from autotune.errors import UserError
from autotune.measure.worker import WorkerFault
from autotune.task import Config
from benchmarks import c3_device, form, table
from benchmarks.c3_device import BESIDE, KIB, MIB, PARTED, SIZES, Measure, bandwidth, partition, parts_of, power
from benchmarks.c3_device_cases import crossover, summary
from benchmarks.c3_device_table import finding, findings, render
from benchmarks.c3_probe import Opened

RANKS = 8
SETTLED = {
    "random": {"gemm": (5000.0, 1500, 690.0), "copies": (1200.0, 1980, 300.0), "both": (5600.0, 1340, 700.0)},
    "zeros": {"gemm": (4000.0, 1980, 400.0), "copies": (1200.0, 1980, 300.0), "both": (4040.0, 1980, 450.0)},
}


class Gpus:
    """Ranks on paper: copies start late and are then faster than NCCL; 16 blocks of a kernel are too few.

    Args:
        dies: the ranks do so in calls whose name has this in it.
        sensors: whether there is NVML.
    """

    ranks = RANKS

    def __init__(self, dies: str = "nothing", sensors: bool = True) -> None:
        self.dies, self.sensors = dies, sensors

    def call(self, function: str, arguments: Mapping[str, Any], timeout_s: float) -> list[Any]:
        name = function.partition(":")[2]
        if self.dies in (arguments.get("probe") or {"name": name})["name"]:
            raise WorkerFault("rank 1 is gone")
        return [getattr(self, name)(rank, **arguments) for rank in range(RANKS)]

    def measure(self, rank: int, probe: Mapping[str, Any], policy: object, rounds: int) -> dict[str, Any]:
        us, skipped = {}, {}
        for run in probe["runs"]:
            if run["config"]["chunks"] == 4:
                skipped[run["name"]] = "no four chunks"
            elif run["parts"] == "compute":
                us[run["name"]] = 1000.0 * 132 / (132 - run["config"]["reserve"])
            else:
                nbytes, s = probe["collective"]["numel"] * 2, run["config"]
                start, rate = {"nccl": (12, 0.36e6), "copy": (26, 0.42e6), "sm": (10, 1e4 * s["ctas"])}[s["engine"]]
                us[run["name"]] = start + nbytes / min(rate, 0.3e6 if s["engine"] == "sm" else rate)
        return {"us": us, "skipped": skipped}

    def sms_left(self, rank: int, reserves: list[int]) -> list[int]:
        return [132 - -(-r // 8) * 8 for r in reserves]

    def back_to_back(self, rank: int, probe: object, policy: object, zeros: bool, seconds: float) -> dict[str, Any]:
        runs: dict[str, Any] = {}
        for name, (us, mhz, watt) in SETTLED["zeros" if zeros else "random"].items():
            runs[name] = {"us": us - rank, "first": 0.9 * us, "turns": 100}
            if self.sensors:
                held = {"power cap": rank / 10} if watt >= 690 else {}
                runs[name] |= {"mhz": mhz, "watt": None if rank == 3 else watt, "held": held}
        note = "" if self.sensors else "NVML is not there"
        return {"runs": runs, "note": note, "skipped": "", "limit_w": 700.0, "most_mhz": 1980}


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on paper need none, and there may be no GPU to build them for."""
    monkeypatch.setattr(c3_device, "kernels", lambda scenario, engine, device: None)


def made(gpus: Gpus) -> dict[str, Any]:
    """The file's content, as far as tables are made of it."""
    m = Measure(gpus, "cuda:0")
    cases = [*bandwidth(m), *power(m), *partition(m)]
    return {"device": "8 x GPU", "ranks": RANKS, "versions": {"torch": "2.11"}, "when": "2026-01-02", "cases": cases,
            "summary": summary(cases), "notes": m.notes}  # fmt: skip


def test_bus_bandwidth_ratios_and_the_crossover_are_those_of_the_times() -> None:
    cases = {c["name"]: c for c in made(Gpus())["cases"]}
    assert [c for c in cases if c.startswith("all_gather")] == [f"all_gather {n}" for n in (
        "64KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB", "256MiB", "1GiB")]  # fmt: skip
    big, reduce = cases["all_gather 1GiB"], cases["all_reduce 1GiB"]
    us = 26 + 2**30 / 0.42e6
    assert big["us"]["copy"] == pytest.approx(us, abs=0.01)
    assert big["gb_s"]["copy"] == pytest.approx(7 / 8 * 2**30 / us / 1e3, abs=0.01)
    assert reduce["gb_s"]["copy"] == pytest.approx(2 * big["gb_s"]["copy"], abs=0.02)
    assert set(big["us"]) == {"nccl", "copy"}
    assert {n for n in reduce["us"] if n.startswith("copy")} == {"copy", "copy, 2 chunks"}
    assert reduce["best"]["sm"] in ("sm 32", "sm 64", "sm 128")
    assert big["copy_over_base"] == pytest.approx(0.42 / 0.36, abs=0.01)
    # 26 + s / 0.42 = 12 + s / 0.36 MB: 35 MB
    found = summary(list(cases.values()))
    assert found == {op: {"crossover_bytes": 64 * MIB, "enough_from_64MiB": True} for op in COLLECTIVES}
    assert not cases["all_gather 64KiB"]["enough"]
    for case in cases.values():
        if case["part"] == "bandwidth" and case["collective"] not in REDUCING:
            assert case["nbytes"] == case["size"]


def test_copies_that_are_slower_at_the_largest_size_have_no_crossover() -> None:
    ratios = {64 * KIB: 1.2, MIB: 0.8, 64 * MIB: 1.0, 256 * MIB: 1.1}
    cases = [{"size": size, "copy_over_base": ratio} for size, ratio in ratios.items()]
    assert crossover(cases) == 64 * MIB
    assert crossover([*cases, {"size": 1024 * MIB, "copy_over_base": 0.99}]) is None
    assert crossover([*cases, {"size": 16 * MIB, "copy_over_base": None}]) == 64 * MIB


def test_the_clock_explains_the_slowdown_of_gemms_during_copies() -> None:
    data = made(Gpus())
    cases = [c for c in data["cases"] if c["part"] == "power"]
    assert len(cases) == 2 * len(BESIDE)
    random, zeros = cases[:2]
    assert (random["operands"], zeros["operands"]) == ("random", "zeros")
    assert random["us"] == {"gemm": 5000.0, "copies": 1200.0, "both": 5600.0}  # of the slowest rank
    assert random["slowdown"] == 1.12
    assert random["clock_drop"] == pytest.approx(1500 / 1340, abs=1e-4)
    assert random["slowdown_at_equal_clock"] == pytest.approx(1.12 * 1340 / 1500, abs=1e-4)
    assert random["watt"]["both"] == 700.0  # one rank had no figure
    assert random["held"] == {"gemm": {"power cap": 0.7}, "copies": {}, "both": {"power cap": 0.7}}
    assert "power cap 70% of the time" in finding(random)
    assert finding(random).endswith("the clock explains it")
    assert finding(zeros).endswith("1.010 times as long during copies, its clock 100.0% of that alone")
    slow = {**zeros, "slowdown": 1.1, "slowdown_at_equal_clock": 1.1}
    assert finding(slow).endswith("not the clock")
    assert finding({**random, "slowdown": 1.3, "slowdown_at_equal_clock": 1.16}).endswith("the clock explains a part")


def test_without_nvml_times_are_kept_and_the_clock_is_not_known() -> None:
    data = made(Gpus(sensors=False))
    case = next(c for c in data["cases"] if c["part"] == "power")
    assert case["slowdown"] == 1.12
    assert case["clock_drop"] is None
    assert any(line.endswith("the clock is not known") for line in findings(data))
    assert sum("NVML is not there" in note for note in data["notes"]) == 2 * len(BESIDE)
    assert "| – | – | – | – | – |" in render(data)


def test_tables_have_all_parts_and_the_missing_ones() -> None:
    text = render(made(Gpus()))
    assert text.count("| all_gather ") == 8
    assert "| 8192x8192x8192 bf16 on fewer SMs | 1000.0 (132) | 1031.2 (124) | 1064.5 (124) |" in text
    assert "- all_to_all by copies is as fast from 64MiB on; at least 90% of NCCL's bandwidth from 64 MiB up" in text
    assert "- all_reduce 64KiB, copy, 4 chunks: no four chunks" in text
    assert len([c for c in made(Gpus())["cases"] if c["part"] == "partition"]) == len(PARTED)


def test_dying_ranks_lose_one_case_and_after_three_times_the_rest() -> None:
    one = made(Gpus(dies="all_gather 16MiB"))
    names = {c["name"] for c in one["cases"]}
    assert "all_gather 16MiB" not in names
    assert {"all_gather 4MiB", "all_gather 64MiB", "all_reduce 16MiB"} <= names
    assert "all_gather 16MiB: rank 1 is gone" in one["notes"]
    many = made(Gpus(dies="all_to_all"))
    assert {c["collective"] for c in many["cases"]} == {"all_gather"}
    assert sum(note.endswith("rank 1 is gone") for note in many["notes"]) == 3
    assert any("left out" in note for note in many["notes"])


def test_parts_are_named_and_need_gpus() -> None:
    assert parts_of(None, "cuda") == ["bandwidth", "power", "partition"]
    assert parts_of("partition,bandwidth", "cuda") == ["bandwidth", "partition"]
    assert parts_of(None, "cpu") == ["bandwidth"]
    with pytest.raises(UserError, match="--parts power: needs GPUs"):
        parts_of("bandwidth,power", "cpu")
    with pytest.raises(UserError, match="--parts all: there are bandwidth"):
        parts_of("all", "cuda")


def test_a_cpu_has_the_first_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(c3_device.SIZES, "cpu", SIZES["cpu"][:2])
    out = tmp_path / "device.json"
    assert c3_device.main(["--device", "cpu", "--ranks", "2", "--out", str(out)]) == 0
    data = form.read(out)
    assert (data["suite"], data["ranks"], data["notes"]) == ("c3_device", 2, [])
    assert [c["name"] for c in data["cases"]] == [f"{op} {n}" for op in COLLECTIVES for n in ("64KiB", "256KiB")]
    for case in data["cases"]:
        assert set(case["us"]) == {"gloo", "copy", "copy x2"}
        assert min(case["us"].values()) > 0
        fastest = min(("copy", "copy x2"), key=lambda n: case["us"][n])
        assert case["best"] == {"gloo": "gloo", "copy": fastest}
        assert case["copy_over_base"] == pytest.approx(case["us"]["gloo"] / case["us"][fastest], rel=1e-3)
    said = capsys.readouterr().out
    assert said.endswith(render(data) + "\n")
    assert table.render(data) == render(data)
    assert c3_device.main(["--device", "cpu", "--parts", "power", "--out", str(out)]) == 2
    assert capsys.readouterr().err == "c3_device: --parts power: needs GPUs\n"


def test_a_collective_is_shared_by_strategies_that_it_cannot_tell_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of an all-to-all that stays on the device is copied first or last, by the order, and is not shared."""
    made: list[Config] = []

    def open_collective(spec: Any, group: Any, config: Config, artifact: Any) -> Any:
        made.append(config)
        return SimpleNamespace(close=lambda: None, input=torch.zeros(1))

    monkeypatch.setattr("autotune.domains.c3.collectives.nccl.open_collective", open_collective)
    probe = {"collective": {"op": "all_to_all", "numel": 64, "dtype": "bf16"}}
    with ExitStack() as stack:
        opened = Opened(SimpleNamespace(), probe, stack)  # type: ignore[arg-type]
        plain = Strategy("comm_first", "copy", priority="comm")
        runs = [
            plain,
            replace(plain, order="sequential"),
            replace(plain, reserve=8),
            replace(plain, order="gemm_first"),
        ]
        found = [opened.collective({"config": s.config(), "artifact": None}) for s in runs]
    assert found[0] is found[1] is found[2]
    assert found[3] is not found[0]
    assert [c["order"] for c in made] == ["comm_first", "gemm_first"]

"""The gate's statistics: how often it raises an alarm, and its file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from autotune.bench import gate
from autotune.bench.step import AUTOTUNE, EAGER
from autotune.cli import regression
from autotune.errors import UserError


def run(chance: np.random.Generator, n: int, us: float, *, drift: float = 0.0) -> dict[str, list[float]]:
    """Samples of a step on a machine that slows down and recovers, in both contenders alike."""
    machine = np.zeros(n)
    for k in range(1, n):
        machine[k] = 0.8 * machine[k - 1] + 0.05 * chance.standard_normal()
    own = 0.03 * chance.standard_normal((2, n)) + 0.2 * (chance.random((2, n)) < 0.05)
    return {
        EAGER: list(100.0 * np.exp(machine + own[0])),
        AUTOTUNE: list(us * (1 + drift) * np.exp(machine + own[1])),
    }


def alarms(slowdown: float, turns: int = 60, n: int = 120) -> float:
    """Share of alarms where the step is slower by so much than its record."""
    count = 0
    for seed in range(turns):
        chance = np.random.default_rng(seed)
        record = {"samples": run(chance, n, 50.0)}
        now = run(chance, n, 50.0 * (1 + slowdown))
        (change,) = gate.changes(record, now, [AUTOTUNE], relative=True, tolerance=gate.TOLERANCE)
        count += change.slower
    return count / turns


def test_alarms_are_as_rare_as_stated_and_a_tenth_is_seen() -> None:
    assert alarms(0.0) <= gate.ALPHA
    assert alarms(gate.TOLERANCE) <= 6 * gate.ALPHA  # at the edge, with so few turns
    assert alarms(0.10) >= 0.95
    assert alarms(-0.2, turns=20) == 0


def test_without_a_tolerance_the_stated_rate_is_that_of_the_bound() -> None:
    count = 0
    for seed in range(200):
        chance = np.random.default_rng(seed)
        first, second = np.exp(chance.standard_normal((2, 60)))
        count += gate.bounded([first], [second])[1] > 0
    assert count / 200 <= 3 * gate.ALPHA


def test_a_record_is_kept_in_a_file_with_others(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    record = {"device": "d", "samples": {EAGER: [2.0] * 6, AUTOTUNE: [1.0] * 6}}
    gate.save(file, "a", record)
    gate.save(file, "b", {**record, "device": "e"})
    gate.save(file, "a", {**record, "device": "f"})
    found = gate.read(file)
    assert {name: r["device"] for name, r in found.items()} == {"a": "f", "b": "e"}
    assert found["a"]["samples"] == record["samples"]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"form": "x", "steps": {}}', "nan"])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    file.write_text(text)
    with pytest.raises(UserError, match="not a file that"):
        gate.read(file)
    with pytest.raises(UserError, match="not a file that"):
        gate.save(file, "a", {})
    assert file.read_text() == text


def test_samples_that_are_no_times_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    gate.save(file, "a", {"device": "d", "samples": {EAGER: [1.0]}})
    data = json.loads(file.read_text())
    data["steps"]["a"]["samples"][EAGER] = [-1.0]
    file.write_text(json.dumps(data))
    with pytest.raises(UserError, match="not a file that"):
        gate.read(file)


def test_too_few_samples_are_reported() -> None:
    with pytest.raises(UserError, match="--rounds"):
        gate.bounded([[1.0] * 3], [[1.0] * 30])


def test_a_stored_verdict_is_a_record_too() -> None:
    chance = np.random.default_rng(0)
    verdict = {"ratio": 1.5, "noise": 0.03, "autotune_us": 50.0}

    def now(us: float) -> dict[str, list[float]]:
        return {"torch.compile": list(75 * np.exp(0.02 * chance.standard_normal(40))),
                AUTOTUNE: list(us * np.exp(0.02 * chance.standard_normal(40)))}  # fmt: skip

    same = gate.against_verdict(verdict, AUTOTUNE, now(50.0), "torch.compile", 0.03)
    assert same is not None
    assert not same.slower
    slow = gate.against_verdict(verdict, AUTOTUNE, now(56.0), "torch.compile", 0.03)
    assert slow is not None
    assert slow.slower
    assert slow.change == pytest.approx(0.12, abs=0.03)
    assert gate.against_verdict({**verdict, "autotune_us": None}, AUTOTUNE, now(50.0), "torch.compile", 0.03) is None


@pytest.mark.parametrize("relative", [True, False])
def test_an_unchanged_step_has_no_line_that_says_slower(relative: bool) -> None:
    samples = {EAGER: [10.0] * 40, AUTOTUNE: [5.0] * 40}
    changes = gate.changes({"samples": samples}, samples, [AUTOTUNE], relative=relative, tolerance=0.03)
    table = regression.lines(argparse.Namespace(save=None), changes)
    assert not any(line.startswith("SLOWER") for line in table)
    assert ("time over eager's" in table[-1]) is relative, "times alone do not explain a relative change"

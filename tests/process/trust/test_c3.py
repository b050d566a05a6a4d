"""C3 from a shared database: no program is imported by name, and a damaged strategy gives way to a default."""

from __future__ import annotations

import json
import logging
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.app import main
from autotune.device import DeviceIdentity, environment
from autotune.domain import identity_of
from autotune.domains.c3 import cli as c3_search
from autotune.domains.c3.match import C3Level, C3Match, match_scenario
from autotune.domains.c3.scenario import Gemm, Program, Scenario
from autotune.domains.c3.strategy import BASELINES, HostStrategy, Strategy, improper, limits
from autotune.space import load_space
from autotune.store import Key, Schedule, Store
from autotune.task import Artifact
from autotune.workload import Workload

SCENARIO = Scenario(Gemm(1024, 512, 256, "f32"), "all_gather", 1 << 22, 2, "f32")
HERE = DeviceIdentity("cpu", "some CPU", 8, 16384, count=2)
GPUS = DeviceIdentity("cuda", "some GPU", 132, 143360, count=2, links="NV18")
MODULE = "from pathlib import Path\nPath({mark!r}).write_text('called')\ndef call(*args): pass\ntest = inputs = call\n"


def missed(db: Path, *workloads: Workload) -> None:
    with Store.open(db) as store:
        for workload in workloads:
            where = identity_of(Workload("c3", {"ranks": 2}), "cpu")
            assert store.add_miss(workload, store.put_device(where), "missed workload")


@pytest.mark.parametrize("compute", [("evil_target", "evil_target:test"), ("evil_target:call", "evil_target:inputs"),
                                     ("layer_norm", "evil_target:test"), ("evil_target:call", "")])  # fmt: skip
def test_a_missed_program_is_not_imported(
    compute: tuple[str, str],
    db: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "evil_target.py").write_text(MODULE.format(mark=str(mark)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    missed(db, replace(SCENARIO, compute=Program(*compute)).workload())
    assert main(["search", "c3", "--missed", "--device", "cpu", "--db", str(db), "--timeout", "20"]) == 2
    told = capsys.readouterr().err
    assert "a search runs no program that a database names; if it is yours, run: autotune search c3" in told
    assert told.count("is skipped") == 1
    assert "Traceback" not in told
    assert not mark.exists()
    assert "evil_target" not in sys.modules


def test_gemms_and_built_in_programs_are_taken(db: Path) -> None:
    named = replace(SCENARIO, compute=Program("layer_norm"))
    missed(db, SCENARIO.workload(), named.workload())
    with Store.open(db) as store:
        assert {s.label for s in c3_search.missed(store, "cpu")} == {SCENARIO.label, named.label}


@pytest.mark.parametrize(
    "change",
    [{"ranks": "many"}, {"ranks": 10**6}, {"nbytes": -4}, {"nbytes": None}, {"compute": {"op": "gemm"}},
     {"compute": []}, {"version": 7}, {"collective": "rm -rf"}, {"ranks": 10**30}, {"compute": {"op": "program"}}],
)  # fmt: skip
def test_damaged_scenarios_are_left_out(change: dict[str, Any], db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missed(db, Workload("c3", {**SCENARIO.to_json(), **change}, label="\x1b[2Jhidden"))
    with Store.open(db) as store:
        assert c3_search.missed(store, "cpu") == []
    assert "\x1b" not in capsys.readouterr().err


@pytest.fixture
def store(db: Path) -> Iterator[Store]:
    with Store.open(db) as opened:
        yield opened


def put(store: Store, config: dict[str, Any], identity: DeviceIdentity) -> None:
    workload = SCENARIO.workload()
    key = Key(store.put_workload(workload), store.put_device(identity),
              store.put_environment(environment("cpu")), "by hand")  # fmt: skip
    made = Artifact("cpu" if identity.kind == "cpu" else "sm_90", ())
    schedule = Schedule(key, config, 100.0, {"sequential": 150.0}, made, "autotune", workload.family, workload.extent)
    store.put_schedule(schedule, replace=True)


def find(store: Store, identity: DeviceIdentity) -> C3Match:
    return match_scenario(SCENARIO, store, identity, environment("cpu"))


ODD: tuple[Any, ...] = (-1, 0, 2**31, 2**63, -(2**63), 100_000, 0.5, True, "", "x", "7")


@pytest.mark.parametrize("side", ["cpu", "cuda"])
def test_mutated_strategies_are_defaults_or_in_range(side: str, store: Store) -> None:
    plain = (HostStrategy(order="comm_first", engine="copy", copies=2) if side == "cpu" else Strategy()).config()
    identity = HERE if side == "cpu" else GPUS
    put(store, plain, identity)
    assert find(store, identity).level is C3Level.EXACT
    for name in plain:
        for value in ODD:
            put(store, {**plain, name: value}, identity)
            found = find(store, identity)
            assert improper(found.config, side) == ""
            low = limits(side)[name]
            harmless = not isinstance(low[0], str) and type(value) is int and low[0] <= value <= low[1]
            assert (found.level is C3Level.EXACT) == harmless, (name, value, found.reason)


@pytest.mark.parametrize(("name", "value"), [("copies", 0), ("threads", 100_000), ("copies", "2"), ("threads", -1)])
def test_the_default_takes_its_place_with_one_warning(
    name: str, value: object, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    plain = BASELINES["cpu"]["naive"]
    put(store, {**plain, "engine": "copy", name: value}, HERE)
    with caplog.at_level(logging.WARNING, logger="autotune"):
        found = find(store, HERE)
        find(store, HERE)
    assert (found.level, found.config, found.schedule) == (C3Level.DEFAULT, plain, None)
    assert f"{name} = {value!r} is out of range" in found.reason
    assert sum("is damaged and not used" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize("side", ["cpu", "cuda"])
def test_everything_that_a_search_tries_is_let_in(side: str) -> None:
    for parameter in load_space("c3", side):
        for choice in parameter.choices:
            assert improper({parameter.name: choice}, side) == ""


def test_the_command_to_search_by_hand_is_one_that_the_parser_takes() -> None:
    scenario = replace(SCENARIO, compute=Program("own.model:step", "own.model:inputs"))
    with pytest.raises(Exception, match="if it is yours, run") as refused:
        c3_search.check_program(scenario)
    words = str(refused.value).partition("autotune search c3 ")[2].split()
    from autotune.cli.app import build_parser

    args: Namespace = build_parser().parse_args(["search", "c3", *words])
    assert (args.compute, args.bytes, args.ranks) == ("own.model:step", str(SCENARIO.nbytes), 2)
    assert json.dumps(words)

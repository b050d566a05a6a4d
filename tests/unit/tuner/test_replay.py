"""Recordings, searches in them, and regret."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.task import config_key
from autotune.tuner.phases.explore import Explorer
from benchmarks.replay import search as replay
from benchmarks.replay.__main__ import main
from benchmarks.replay.recording import SUFFIX, Recording, load_all
from benchmarks.replay.regret import Regret, geometric
from benchmarks.replay.search import Trace, search
from tests.support.landscape import BEST, SPACE, latency, recording

NOTHING = ("seeds", "model", "neighbours", "pruning")


def test_a_file_holds_all_of_a_recording(tmp_path: Path) -> None:
    made = recording(model=2.0)
    made.save(tmp_path / f"a{SUFFIX}")
    read = Recording.load(tmp_path / f"a{SUFFIX}")
    assert read.space.fingerprint == made.space.fingerprint
    assert read.points == made.points
    assert [row.config for row in read.rows] == [row.config for row in made.rows]
    assert [row.status for row in read.rows] == [row.status for row in made.rows]
    assert [row.latency_us or 0 for row in read.rows] == pytest.approx([r.latency_us or 0 for r in made.rows], rel=1e-3)
    assert (read.default, read.seeds, read.workload) == (made.default, made.seeds, made.workload)
    assert load_all([tmp_path])[0].optimum_us == pytest.approx(latency(BEST))
    made.save(tmp_path / f"b{SUFFIX}")
    assert (tmp_path / f"a{SUFFIX}").read_bytes() == (tmp_path / f"b{SUFFIX}").read_bytes()


def test_points_that_mean_one_candidate_have_one_row() -> None:
    r = recording()
    same = [r.row({**BEST, "threads": 32, "vector": v}) for v in (1, 2, 8)]
    assert same[0] is not None
    assert same[0] is same[1] is same[2]
    assert r.row({**BEST, "hint": "evict", "unroll": 8}) is None


def _damage(name: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        if name == "version":
            data["recording"] = 99
        elif name == "points":
            data["points"] = data["points"][:-1]
        elif name == "row":
            data["points"][0] = 10**9
        elif name == "latency":
            data["latency_us"][0] = -1.0
        elif name == "status":
            data["status"][0] = "timeout"
        elif name == "config":
            data["configs"][0] = data["configs"][0][:-1]
        elif name == "nothing":
            data["latency_us"] = [None] * len(data["status"])
            data["status"] = ["crashed"] * len(data["status"])
        else:
            del data["space"]

    return change


@pytest.mark.parametrize(
    "name", ["version", "points", "row", "latency", "status", "config", "nothing", "space", "text", "cut", "absent"]
)
def test_a_damaged_file_is_refused_in_a_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"a{SUFFIX}"
    recording().save(path)
    if name == "text":
        path.write_text("{}")
    elif name == "cut":
        path.write_bytes(path.read_bytes()[:500])
    elif name == "absent":
        path.unlink()
    else:
        data = json.loads(gzip.decompress(path.read_bytes()))
        _damage(name)(data)
        path.write_bytes(gzip.compress(json.dumps(data).encode()))
    assert main(["search", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert str(path) in told
    assert name != "text" or "is no recording: `python -m benchmarks.replay record` makes one" in told


@pytest.mark.parametrize("sampler", ["tpe", "random", "brute"])
def test_a_search_measures_each_candidate_once_and_remembers_the_best(sampler: str) -> None:
    r = recording()
    trace = search(r, sampler, candidates=60, seed=1, without=NOTHING)
    assert len(trace.best_us) == len(trace.seconds) == 60
    assert list(trace.best_us) == sorted(trace.best_us, reverse=True)
    assert list(trace.seconds) == sorted(trace.seconds)
    assert trace.seconds[-1] >= 60 * 0.2  # building takes longer than measuring, in parallel to it
    assert search(r, sampler, candidates=60, seed=1, without=NOTHING).best_us == trace.best_us


@pytest.mark.slow
def test_a_search_ends_when_every_candidate_is_measured() -> None:
    r = recording()
    trace = search(r, "brute", candidates=10_000, without=NOTHING)
    assert len(trace.best_us) == len({k for k in r.points if k >= 0})
    assert trace.best_us[-1] == r.optimum_us


def test_replay_omits_requested_search_aids() -> None:
    r = recording(model=3.0)
    default = r.row(r.default)
    assert default is not None
    full = search(r, "random", candidates=8)
    assert full.best_us[0] == default.latency_us
    heuristic = latency({**BEST, "threads": 128})
    assert search(r, "random", candidates=8, without=("model",)).best_us[1] == heuristic
    assert full.best_us[1] < heuristic  # the model's first pick comes before it
    modelled = [search(r, "random", candidates=8, seed=k, without=("seeds",)).best_us for k in range(8)]
    alone = [search(r, "random", candidates=8, seed=k, without=("seeds", "model")).best_us for k in range(8)]
    assert len({us[0] for us in alone}) > 4  # it begins anywhere
    assert sum(us[-1] for us in modelled) < 0.9 * sum(us[-1] for us in alone)  # the model is right but for a factor
    asked = search(r, "random", candidates=3, without=("seeds", "model"), asked=[BEST])
    assert asked.best_us[1] == r.optimum_us


def test_without_an_unknown_help_or_sampler() -> None:
    with pytest.raises(UserError, match="there is no 'luck' to leave out"):
        search(recording(), "tpe", candidates=3, without=["luck"])
    with pytest.raises(UserError, match="unknown sampler"):
        search(recording(), "guess", candidates=3)


def test_regret() -> None:
    traces = (
        Trace((200.0, 103.0, 100.0), (1.0, 2.0, 3.0), 0.3),
        Trace((math.inf, 150.0, 110.0), (1.0, 2.0, 3.0), 0.3),
        Trace((120.0,), (1.5,), 0.1),
    )
    found = Regret(100.0, traces)
    assert found.at(1) == pytest.approx(1.0)
    assert found.at(2) == pytest.approx(0.2)  # one that ended early keeps what it had
    assert found.at(3) == pytest.approx(0.1)
    assert found.candidates() == math.inf  # in the median; one of three
    assert found.candidates(0.2) == 2.0
    assert found.seconds(0.2) == 2.0
    assert found.proposing_s == pytest.approx(0.1)
    assert geometric([0.1, 0.1]) == pytest.approx(0.1)
    assert geometric([0.1, math.inf]) == math.inf


def test_the_command_tells_of_every_recording_and_sampler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        recording().save(tmp_path / f"{name}{SUFFIX}")
    line = ["search", str(tmp_path), "--sampler", "random,tpe", "--seeds", "2", "--candidates", "25"]
    assert main([*line, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [(a["workload"], a["sampler"]) for a in answer["searches"]] == [
        ("formula", "random"),
        ("formula", "tpe"),
    ] * 2
    assert set(answer["searches"][0]["regret"]) == {"20", "25"}
    assert main(line) == 0
    assert "all (geometric mean" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--sampler", "guess"], "unknown sampler 'guess'; the samplers are tpe"),
        (["--without", "luck"], "there is no 'luck' to leave out"),
    ],
)
def test_the_command_refuses_unknown_names(
    wrong: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["search", str(tmp_path), *wrong]) == 2
    assert said in capsys.readouterr().err
    assert main(["search", str(tmp_path)]) == 2
    assert "has no recording" in capsys.readouterr().err


def test_formula_has_its_best_where_it_says() -> None:
    every = {config_key(row.config): row.latency_us for row in recording().rows if row.latency_us}
    assert min(every, key=lambda key: every[key]) == config_key(BEST)
    assert len(every) < SPACE.size


def test_neighbours_of_the_best_come_when_something_is_known() -> None:
    """Ten random candidates say where the best may be; the steps from the first one say nothing."""
    r = recording()
    for seed in range(3):
        alone = search(r, "tpe", candidates=40, seed=seed, without=NOTHING).best_us
        polished = search(r, "tpe", candidates=40, seed=seed, without=("seeds", "model", "pruning")).best_us
        assert polished[:10] == alone[:10]
        assert polished[10:] != alone[10:]


def test_neighbours_of_the_best_are_followed_by_those_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    r = recording()
    kept: list[Explorer] = []

    class Kept(Explorer):
        def run(self) -> str:
            kept.append(self)
            return super().run()

    monkeypatch.setattr(replay, "Explorer", Kept)
    search(r, "tpe", candidates=20, without=("seeds", "model", "pruning"))
    (explorer,) = kept
    while (found := explorer._neighbour()) is not None:
        explorer._flying[config_key(found.config)] = found
    steps = [r.row(config) for m in explorer.s.ranking() for config in r.space.neighbours(m.config)]
    assert all(explorer._met(config_key(row.config)) for row in steps if row is not None)


@pytest.mark.parametrize(("seeds", "first"), [(True, 14), (False, 10)])
def test_guesses_wait_for_results_and_suggestions_do_not(
    seeds: bool, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty processes compile; a sampler's proposals without results are no better for being many."""
    made = recording()
    suggested = [row.config for row in made.rows[:13]]
    begun, under_way = 0, list[int]()
    submit, measure = replay._Pool.submit, replay._Measurer.measure

    def submitted(pool: Any, *args: Any) -> Any:
        nonlocal begun
        begun += 1
        return submit(pool, *args)

    def measured(measurer: Any, *args: Any, **kwargs: Any) -> Any:
        under_way.append(begun - len(under_way))
        return measure(measurer, *args, **kwargs)

    monkeypatch.setattr(replay._Pool, "submit", submitted)
    monkeypatch.setattr(replay._Measurer, "measure", measured)
    search(made, "tpe", candidates=60, asked=suggested if seeds else (), without=NOTHING, processes=30)
    assert under_way[0] == first
    for known, waiting in enumerate(under_way):
        assert waiting <= 3 + max(first - known, 10, known), "some are known by another name, one is being measured"
    assert max(under_way) > 20, "later so many are ahead as processes compile, for as many are known"

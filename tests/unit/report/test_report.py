"""A report's pages: what they say, and that nothing stored becomes a part of the page."""

from __future__ import annotations

import html
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune import charts
from autotune.cli.app import main
from autotune.domains.c3.scenario import Gemm, Scenario
from autotune.report.database import pages as database_pages
from autotune.report.site import Page, page_id
from autotune.store import Saving, Store, Verdict
from autotune.store.records import Key, Measurement
from autotune.task import Status
from autotune.tuner.studies import importances
from autotune.workload import Workload
from benchmarks import pages, pictures
from tests.support import ROOT
from tests.support import searched as stored
from tests.support.rows import ENVIRONMENT

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>{{ 7 * 7 }}"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("report") / "t.db"
    with Store.open(file) as store:
        stored.calibrated(store)
        labels = ["center f32 64x64", HOSTILE, "center f32 256x64"]
        keys = [
            stored.searched(store, stored.region(64 << (2 * n), label=label), seed=n) for n, label in enumerate(labels)
        ]
        stored.step(store, keys, labels, target=f"models.mine:{HOSTILE}")
        stored.scenario(store)
    return file


@pytest.fixture(scope="module")
def site(database: Path) -> Path:
    out = database.parent / "report"
    assert main(["report", "--db", str(database), "-o", str(out)]) == 0
    return out


def pages_of(site: Path) -> dict[str, str]:
    return {file.relative_to(site).as_posix(): file.read_text() for file in site.rglob("*.html")}


def charts_of(text: str) -> list[dict[str, Any]]:
    found = re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    return [json.loads(chart) for chart in found]


def test_every_kind_of_page_is_written_and_linked(site: Path) -> None:
    every = pages_of(site)
    assert sorted({name.partition("/")[0] for name in every}) == ["index.html", "models", "scenarios", "workloads"]
    assert len(every) == 1 + 1 + 1 + 3
    for name, text in every.items():
        for link in re.findall(r'(?:href|src)="([^"#]+)', text):
            if not link.startswith("data:"):
                assert (site / name).parent.joinpath(link).resolve().is_file(), (name, link)
        assert not re.findall(r'(?:href|src)="(?:https?:)?//', text)


def test_a_step_links_to_a_scenario_where_its_page_is(tmp_path: Path) -> None:
    workload = Scenario(Gemm(256, 256, 256, "f32"), "all_gather", 1 << 20, 2, "f32").workload()
    with Store.open(tmp_path / "t.db") as store:
        stored.step(store, [stored.searched(store, workload)], ["a scenario"])
    out = tmp_path / "report"
    assert main(["report", "--db", str(tmp_path / "t.db"), "-o", str(out)]) == 0
    (page,) = (out / "models").glob("*.html")
    (link,) = re.findall(r'href="(\.\./[a-z]+/[^"#]+)"', page.read_text().partition("<main")[2])
    assert (out / "models" / link).resolve().is_file()


def test_each_search_in_a_program_has_a_page_if_its_step_was_timed(tmp_path: Path) -> None:
    took = {"first": {"compile_us": 3000.0}, "second": {"compile_us": 2000.0}, "untimed": {}}
    with Store.open(tmp_path / "t.db") as store:
        on = (store.put_device(stored.CPU), store.put_environment(ENVIRONMENT), "default", ())
        for graph, times in took.items():
            store.put_verdicts([Verdict(graph, *on, {"command": "search in the program", **times})])
        titles = [page.title for page in database_pages(store)]
    assert sorted(titles) == ["first, mode default", "second, mode default"]


def test_a_workload_of_which_every_candidate_failed_has_a_page(tmp_path: Path) -> None:
    with Store.open(tmp_path / "t.db") as store:
        workload = stored.region(64)
        key = Key(store.put_workload(workload), store.put_device(stored.CPU), store.put_environment(ENVIRONMENT), "p")
        store.add_measurement(Measurement(key, {"a": 1}, Status.CRASHED, reason="why"))
        (page,) = database_pages(store)
    assert "1, of which 1 failed" in str(page.facts)


def test_a_program_that_counted_its_steps_has_a_page_of_its_savings(tmp_path: Path) -> None:
    with Store.open(tmp_path / "t.db") as store:
        key = stored.searched(store, stored.region(64, label="center f32 64x64"), seed=0)
        of = ("p" * 32, "g" * 64, key.device, key.environment, "default")
        one = Saving(*of, "2026-11-23", HOSTILE, steps=3_600_000, alone_us=500.0)
        store.put_savings([one, replace(one, week="2026-11-30", steps=1_800_000)])
        (page,) = (page for page in database_pages(store) if page.kind == "saved")
    assert page.cells["hours saved"].value == pytest.approx(0.75)
    assert page.cells["of these measured"].value == 0.0
    assert [row[:2] for row in page.exhibits[0].rows] == [("2026-11-30", 1_800_000), ("2026-11-23", 3_600_000)]
    out = tmp_path / "report"
    assert main(["report", "--db", str(tmp_path / "t.db"), "-o", str(out)]) == 0
    written = pages_of(out)
    assert page.path in written
    assert HOSTILE not in written[page.path]


def test_stored_strings_are_only_ever_text(site: Path) -> None:
    for text in pages_of(site).values():
        assert "<script>window" not in text
        assert "<img src=x" not in text
        assert "49" not in re.findall(r"\{\{|49\b", text)
    assert html.escape(HOSTILE, quote=False).replace("'", "&#39;") in (site / "index.html").read_text()
    for picture in (site / "pictures").glob("*.svg"):
        assert "<script" not in picture.read_text()


def test_a_workload_shows_its_search(site: Path) -> None:
    (text,) = [t for name, t in pages_of(site).items() if name.startswith("workloads/center-f32-64x64")]
    for section in ("plan", "bytes-by-kernel", "search", "what-became-of-candidates", "reasons-of-failures",
                    "importance-of-parameters", "place-on-the-roofline"):  # fmt: skip
        assert f'<section id="{section}">' in text
    assert "spills 128 bytes" in text
    assert "20 GB/s" in text
    important = next(c for c in charts_of(text) if "share" in json.dumps(c))
    shares = {row["name"]: row["value"] for row in important["data"]["values"]}
    assert min(shares["threads"], shares["row_block"]) > 2 * shares["stream"]
    history = next(c for c in charts_of(text) if "best so far" in json.dumps(c))
    best = [
        row["us"] for layer in history["layer"] for row in layer["data"]["values"] if row["series"] == "best so far"
    ]
    assert best == sorted(best, reverse=True)


def test_report_shows_the_objective_of_a_kernel_in_its_unit(tmp_path: Path) -> None:
    objective = {"name": "rate", "unit": "rows/s", "direction": "max"}
    workload = Workload("kernel", {"kernel": "m:k", "source": "0" * 64, "key": {}, "objective": objective})
    with Store.open(tmp_path / "k.db") as store:
        stored.searched(store, workload)
        (page,) = database_pages(store)
        rates = [1 / m.latency_us for m in store.measurements() if m.latency_us]
    every = json.dumps([e.chart for e in page.exhibits])
    assert ("microseconds" in every, page.point, "µs" in str(page.facts)) == (False, None, False)
    (final,) = [e.chart for e in page.exhibits if e.title == "Final comparison"]
    assert final["encoding"]["x"]["title"] == "rows/s"
    shown = [row["value"] for row in final["data"]["values"]]
    assert shown == sorted(shown, reverse=True)
    assert shown[0] == pytest.approx(max(rates), rel=1e-4)
    (history,) = [e.chart for e in page.exhibits if e.title == "Search"]
    rows = [row for layer in history["layer"] for row in layer["data"]["values"]]
    best = [row["us"] for row in rows if row["series"] == "best so far"]
    assert (best, best[-1]) == (sorted(best), pytest.approx(max(rates), rel=1e-4))


def test_report_pages_of_a_step_and_a_scenario_show_stored_results(site: Path) -> None:
    every = pages_of(site)
    (step,) = [t for name, t in every.items() if name.startswith("models/")]
    assert "left to Inductor" in step
    assert len(re.findall(r'href="\.\./workloads/', step)) == 3
    (scenario,) = [t for name, t in every.items() if name.startswith("scenarios/")]
    chart = charts_of(scenario)[0]
    ideal = (1400 + 1100) / 1400
    assert chart["layer"][1]["data"]["values"][0]["speedup"] == pytest.approx(ideal, abs=1e-4)
    assert chart["layer"][0]["data"]["values"][-1] == {"family": "tuned", "speedup": round(2500 / 1500, 4)}


def distinct(found: Iterator[Page]) -> list[dict[str, Any]]:
    """The charts of pages, one for each form and kind of page."""
    every = {(p.kind, e.title.split(":")[0]): dict(e.chart) for p in found for e in p.exhibits if e.chart}
    return list(every.values())


def test_every_form_of_chart_is_vega_lite(site: Path) -> None:
    own = [chart for text in pages_of(site).values() for chart in charts_of(text)]
    committed = distinct(pages.pages(ROOT / "benchmarks/results"))
    assert len(own) > 12
    assert len(committed) >= 8
    for chart in [*own, *committed]:
        assert pictures.compiled({**chart, "config": charts.theme(dark=True)})["marks"]


def test_the_repositorys_own_results_have_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "h200"
    assert main(["report", "--results", str(ROOT / "benchmarks/results"), "-o", str(out)]) == 0
    text = (out / "index.html").read_text()
    for section in ("models", "workloads", "scenarios", "results"):
        assert f'<section id="{section}">' in text
    assert "NVIDIA H200" in text
    model = next((out / "models").glob("bert-train-*.html")).read_text()
    assert "Kernels of the step" in model
    assert any("What ran when: naive" in f.read_text() for f in (out / "scenarios").iterdir())
    assert "pages, " in capsys.readouterr().err


def test_a_report_is_written_again_and_nothing_else_is(
    database: Path, site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "stale.html").write_text("old")
    assert main(["report", "--db", str(database), "-o", str(site)]) == 0
    assert not (site / "stale.html").exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    assert main(["report", "--db", str(database), "-o", str(mine)]) == 2
    assert "the folder has other files than a report" in capsys.readouterr().err
    assert (mine / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--results", "nowhere"], "no such folder"),
        (["--results", "."], "no result file"),
        (["--db", "none.db"], "there is no database"),
        (["--db", "empty.db"], "there is nothing to report"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Store.open(tmp_path / "empty.db").close()
    assert main(["report", *arguments, "-o", "out"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_without_the_extra_one_line_names_the_package(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vl_convert", None)
    assert main(["report", "--db", str(database), "-o", str(tmp_path / "out")]) == 2
    assert "pip install 'autotune-torch[report]'" in capsys.readouterr().err


def test_a_workload_that_cannot_be_drawn_costs_its_picture_only(tmp_path: Path) -> None:
    from tests.support.rows import put_key, workload

    with Store.open(tmp_path / "t.db") as store:
        store.add_measurement(Measurement(put_key(store, workload()), {"threads": 1}, Status.OK, latency_us=5.0))
    assert main(["report", "--db", str(tmp_path / "t.db"), "-o", str(tmp_path / "out")]) == 0
    (text,) = [t for name, t in pages_of(tmp_path / "out").items() if name.startswith("workloads/")]
    assert "It cannot be shown" in text


def test_report_shows_a_domains_own_figures_with_their_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(tmp_path / "t.db") as store:
        key = stored.searched(store, stored.region(64))
        (schedule,) = store.schedules(key.device)
        config = schedule.config or {}
        figures = {"GB/s": 1234.56}
        final = Measurement(key, config, Status.OK, "final", latency_us=schedule.latency_us, metrics=figures)
        store.add_measurement(final, replace=True)
        (page,) = database_pages(store)
        assert ("GB/s", "1235") in page.facts
        assert page.facts[0][1].startswith(page.cells["tuned"].text)
        assert "s" in page.cells["tuned"].text
        monkeypatch.setattr("autotune.domains.fusion.domain.Fusion.figure", lambda self, w, cost: (3.0, "J"))
        (page,) = database_pages(store)
        assert page.cells["tuned"].text == "3 J"


def test_the_importance_of_a_parameter() -> None:
    chance = random.Random(1)
    key = Key("w", "d", "e", "p")

    def measured(n: int) -> list[Measurement]:
        found = []
        for _ in range(n):
            config = {"matters": chance.choice([1, 2, 4, 8]), "not": chance.choice(["a", "b"]), "same": True}
            us = 100.0 * int(config["matters"]) + chance.random()
            found.append(Measurement(key, config, Status.OK, latency_us=us))
        return found

    shares = importances(measured(80))
    assert list(shares) == ["matters", "not"]
    assert shares["matters"] > 0.8
    assert sum(shares.values()) == pytest.approx(1.0)
    assert importances(measured(5)) == {}
    assert importances([]) == {}


def test_equal_labels_have_pages_of_their_own() -> None:
    assert page_id("layer_norm f32", "a") != page_id("layer_norm f32", "b")
    assert re.fullmatch(r"[a-z0-9-]+", page_id("../../etc/<passwd>", "x"))
    assert page_id("\u4e2d", "x").startswith("page-")

"""The README's table and picture of users' programs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import pictures
from benchmarks.form import read
from benchmarks.user_programs import summary

CASES: list[dict[str, Any]] = [
    {"about": "one", "search_s": 60.0, "compile_ms": 12.0, "search_ms": 10.0, "again_ms": 8.0, "compile_again_ms": 10.0,
     "ratios": {"search": [1.1, 1.3, 1.2]},
     "contenders": {"again": {"first_s": 5.0}, "compile again": {"first_s": 2.0}}},
    {"about": "two", "search_s": 60.0, "compile_ms": 9.0, "search_ms": None, "again_ms": None, "ratios": {},
     "contenders": {}},
]  # fmt: skip
DATA = {"device": "a GPU", "versions": {"torch": "2.11.0"}, "when": "2026-01-02T03:04:05+00:00", "cases": CASES}


def test_the_table_has_times_and_gains() -> None:
    text = summary.markdown(DATA)
    assert "| one | 12.0 | 10.0 | 1.20x | 1.25x |\n" in text, "the median of rounds, and second processes of both"
    assert "| two | 9.0 | – | – | – |\n" in text
    assert "| geometric mean of 1 | | | 1.20x | 1.25x |\n" in text
    assert text.endswith(
        "a GPU, torch 2.11.0, 2026-01-02; searches of 60 s.\n"
        "The first step of a later process took 5.0 to 5.0 s. In 1 program torch.compile's was timed too:"
        " autotune's differs by +3.0 to +3.0 s.\n"
    )


def test_a_later_process_is_compared_with_the_first_one_of_torch_compile_where_there_is_no_other() -> None:
    assert summary.later_gain({**CASES[0], "compile_again_ms": None}) == pytest.approx(1.5)
    assert summary.later_gain(CASES[1]) is None
    assert "first step" not in summary.markdown({**DATA, "cases": CASES[1:]})


@pytest.mark.skipif(not pictures.installed(), reason="vl-convert is not installed")
def test_the_picture_has_a_bar_for_each_gain() -> None:
    chart = summary.chart(DATA)
    assert [(v["program"], v["gain"]) for v in chart["data"]["values"]] == [("one", 1.2), ("one", 1.25)]
    assert pictures.compiled(chart)["marks"]
    light, dark = (pictures.svg(summary.chart(read(pictures.PROGRAMS)), mode) for mode in (False, True))
    assert light.startswith("<svg")
    assert 'fill="white"' in light
    assert 'fill="white"' not in dark

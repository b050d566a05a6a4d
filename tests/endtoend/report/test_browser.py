"""A report in Chromium: clicks, on a phone, and in the dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.app import main
from autotune.store import Store
from tests.support import chromium
from tests.support import searched as stored

pytestmark = pytest.mark.skipif(bool(chromium.missing()), reason=chromium.missing() or "there")
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("report") / "t.db"
    with Store.open(file) as store:
        stored.calibrated(store)
        labels = [f"center f32 {64 << n}x64" for n in range(5)]
        labels[2] = HOSTILE
        keys = [stored.searched(store, stored.region(64 << n, label=v), seed=n) for n, v in enumerate(labels)]
        stored.step(store, keys[:3], labels[:3])
        stored.scenario(store)
    assert main(["report", "--db", str(file), "-o", str(file.parent / "report")]) == 0
    return file.parent / "report"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium.browser(tmp_path_factory.mktemp("wide")) as driver:
        yield driver


@pytest.fixture(scope="module")
def phone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium.browser(tmp_path_factory.mktemp("phone"), width=390, height=844, dark=True) as driver:
        yield driver


def names(driver: Any) -> list[str]:
    """Of the workloads shown, from top to bottom."""
    script = (
        "return [...document.querySelectorAll('#workloads tbody tr')].filter(r => !r.hidden)"
        ".map(r => r.cells[0].textContent)"
    )
    return [str(name) for name in driver.execute_script(script)]


def column(driver: Any, head: str) -> Any:
    return driver.find_element("xpath", f"//section[@id='workloads']//th/button[.='{head}']")


def test_search_sort_and_links(site: Path, wide: Any) -> None:
    wide.get((site / "index.html").as_uri())
    assert len(names(wide)) == 5
    assert HOSTILE in names(wide)
    wide.find_element("id", "find").send_keys("center 256")
    assert names(wide) == []
    assert wide.find_element("id", "nothing").is_displayed()
    wide.find_element("id", "find").clear()
    wide.find_element("id", "find").send_keys("center 128")
    assert names(wide) == ["center f32 128x64"]

    wide.get((site / "index.html").as_uri())
    column(wide, "name").click()
    ascending = names(wide)
    column(wide, "name").click()
    assert names(wide) == ascending[::-1] != ascending
    column(wide, "tuned").click()
    values = wide.execute_script(
        "return [...document.querySelectorAll('#workloads tbody tr')].map(r => Number(r.cells[1].dataset.value))"
    )
    assert values == sorted(values, reverse=True)
    shared, shown = wide.current_url, names(wide)
    wide.get("about:blank")
    wide.get(shared)  # as somebody else would open it
    assert names(wide) == shown

    wide.find_element("link text", "center f32 128x64").click()
    assert wide.find_element("tag name", "h1").text == "center f32 128x64"
    assert wide.execute_script("return window.hacked === undefined")
    assert chromium.complaints(wide) == []


def test_every_chart_of_every_page_is_drawn(site: Path, wide: Any) -> None:
    total = 0
    for file in sorted(site.rglob("*.html")):
        wide.get(file.as_uri())
        total += chromium.drawn(wide)
        assert wide.execute_script("return window.hacked === undefined")
        decoded = "Promise.all([...document.images].map(i => { i.loading = 'eager'; return i.decode(); }))"
        assert wide.execute_async_script(
            f"const done = arguments[0]; {decoded}.then(() => done(true), () => done(false))"
        )
        assert chromium.complaints(wide) == [], file.name
    assert total > 25


def test_the_roofline_shows_all_workloads_of_the_device(site: Path, wide: Any) -> None:
    wide.get(next((site / "workloads").glob("center-f32-64x64-*.html")).as_uri())
    chromium.drawn(wide)
    script = "return document.querySelectorAll('#place-on-the-roofline .mark-symbol path[aria-label]').length"
    assert wide.execute_script(script) >= 5 + 3  # all, and this one's with its baselines


def test_a_phone_in_the_dark(site: Path, phone: Any) -> None:
    for file in (
        site / "index.html",
        *(next((site / kind).iterdir()) for kind in ("models", "workloads", "scenarios")),
    ):
        phone.get(file.as_uri())
        assert chromium.drawn(phone) > 0
        assert phone.execute_script("return document.documentElement.scrollWidth <= innerWidth"), file.name
        assert _brightness(phone.execute_script("return getComputedStyle(document.body).backgroundColor")) < 40
        label = "return getComputedStyle(document.querySelector('.chart text')).fill"
        assert _brightness(phone.execute_script(label)) > 180
        sizes = "return [...document.querySelectorAll('p, dd, td')].map(e => parseFloat(getComputedStyle(e).fontSize))"
        assert min(phone.execute_script(sizes)) >= 13
        assert chromium.complaints(phone) == []


def test_charts_follow_a_change_of_colours(site: Path, wide: Any) -> None:
    wide.get(next((site / "scenarios").iterdir()).as_uri())
    chromium.drawn(wide)
    label = "return getComputedStyle(document.querySelector('.chart text')).fill"
    assert _brightness(wide.execute_script(label)) < 80
    for value, dark in (("dark", True), ("light", False)):
        scheme = {"name": "prefers-color-scheme", "value": value}
        wide.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        wide.set_script_timeout(20)
        wide.execute_async_script(
            "const done = arguments[1], wanted = arguments[0];"
            "(function look() { const t = document.querySelector('.chart text');"
            "const c = t && getComputedStyle(t).fill.match(/\\d+/g).map(Number);"
            "if (c && (c[0] > 128) === wanted) done(); else setTimeout(look, 50); })()",
            dark,
        )


def _brightness(colour: str) -> float:
    """Of ``rgb(r, g, b)``, from 0 to 255."""
    numbers = [float(n) for n in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    return sum(numbers) / 3

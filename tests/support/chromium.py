"""A headless Chromium for tests of pages: it reaches no network, and its console's messages are kept."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    # Nothing is to be fetched: a page that tried would fail, and its console say so.
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


def _chromium() -> str | None:
    """The browser's path; distributions name it differently, and Google's own build drives the same."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


def missing() -> str:
    """Why there is no browser, or ""."""
    if _chromium() is None:
        return "chromium is not installed"
    if shutil.which("chromedriver") is None:
        return "chromedriver is not installed"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    return ""


@contextmanager
def browser(profile: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> Iterator[Any]:
    """A Selenium driver, with a window of that size in CSS pixels.

    Args:
        profile: a new folder for the browser's own files.
    """
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(_chromium())
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(shutil.which("chromedriver"))))
    try:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield driver
    finally:
        driver.quit()


def complaints(driver: Any) -> list[Mapping[str, Any]]:
    """The console's errors since the last call."""
    return [line for line in driver.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]


def drawn(driver: Any, seconds: float = 30.0) -> int:
    """Scroll to each chart and wait until all are drawn; how many there are."""
    from selenium.webdriver.support.ui import WebDriverWait

    driver.execute_script("document.querySelectorAll('.chart').forEach(c => c.scrollIntoView())")
    count = "return document.querySelectorAll('.chart').length"
    done = "return document.querySelectorAll('.chart svg.marks').length"
    total = int(driver.execute_script(count))

    def all_drawn(_: Any) -> bool:
        driver.execute_script(
            "const c = [...document.querySelectorAll('.chart')].find(c => !c.querySelector('svg.marks'));"
            "if (c) c.scrollIntoView(); else scrollTo(0, 0);"
        )
        return bool(driver.execute_script(done) == total)

    WebDriverWait(driver, seconds).until(all_drawn)
    return total

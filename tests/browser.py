"""A headless Chromium for tests of pages, or a skip that says why there is none."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")


@contextmanager
def chromium(width: int = 1280, height: int = 900, flags: Sequence[str] = ()) -> Iterator[Any]:
    """Selenium's driver of a window of that size; below 500 pixels `set_viewport` gives the page its width."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed here")
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("no chromium and chromedriver are installed here")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (*FLAGS, f"--window-size={width},{height}", *flags):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        set_viewport(browser, width, height)
        yield browser
    finally:
        browser.quit()


def set_viewport(browser: Any, width: int, height: int, *, dark: bool = False) -> None:
    """Lay pages out at that size, as a telephone or a wide screen would, light or dark."""
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def console_errors(browser: Any) -> list[str]:
    """What pages have complained of in the console since the last call."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]

"""A headless Chromium without network access, and queries about a page in it."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np
import pytest

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

PATIENCE_S = 60.0  # everything is drawn by the processor, which others use too
WEBGL = ("--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--disable-gpu-sandbox")  # without a GPU
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-background-networking",
    "--no-first-run",
    "--force-device-scale-factor=1",
    "--window-size=1280,940",
)


def skip_without_a_browser() -> None:
    """Skips the tests of this machine or environment that cannot be run here, and says what is missing."""
    for package, extra in (("nicegui", "dashboard"), ("selenium", "dev")):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (pip install 'esper-grow[{extra}]')")
    for program, package in (("chromium", "chromium"), ("chromedriver", "chromium-driver")):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program} (Debian: apt-get install {package})")


def start_chromium(profile: Path, *, webgl: bool = True) -> WebDriver:
    """Start the browser. Without `webgl` it draws as a browser on a machine without a GPU does, which takes less time."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert chromium is not None
    assert driver is not None
    options = ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, *(WEBGL if webgl else ("--disable-gpu",)), f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return Chrome(options=options, service=Service(driver))  # with its path given, selenium looks for no driver online


class Page:
    """One page in the browser, as a user sees it."""

    def __init__(self, driver: WebDriver) -> None:
        self.driver = driver

    def text(self, selector: str) -> str:
        return str(self.driver.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def texts(self, selector: str) -> list[str]:
        found = self.driver.execute_script("return [...document.querySelectorAll(arguments[0])].map((item) => item.innerText)", selector)
        return [str(item) for item in found]

    @property
    def frame(self) -> int:
        return int(self.text("[data-frame]"))

    def box(self, selector: str) -> dict[str, float]:
        script = "const {x, y, width, height} = document.querySelector(arguments[0]).getBoundingClientRect(); return {x, y, width, height}"
        return dict(self.driver.execute_script(script, selector))

    def wait(self, what: Callable[[], bool], message: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < end, f"{message}, after {PATIENCE_S:.0f} s: {self.errors()}"
            time.sleep(0.05)

    def settle(self) -> None:
        """Waits until what was changed has been drawn."""
        self.driver.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))")

    def press(self, key: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(key).perform()

    def click(self, x: float, y: float) -> None:
        from selenium.webdriver.common.actions.action_builder import ActionBuilder

        actions = ActionBuilder(self.driver)
        actions.pointer_action.move_to_location(round(x), round(y)).click()
        actions.perform()

    def click_on(self, selector: str) -> None:
        box = self.box(selector)
        self.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)

    def picture(self) -> np.ndarray:
        """Return the pixels of the screen, [height, width, 3] of 0 to 255."""
        from PIL import Image

        return np.asarray(Image.open(io.BytesIO(self.driver.get_screenshot_as_png())).convert("RGB"))

    def errors(self) -> list[str]:
        """Return the messages of the browser since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def hosts(self) -> set[str]:
        """Return the hosts that were requested since the last call. The browser's own pages have other schemes than the web."""
        found = set()
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
                address = urlsplit(message["params"].get("url") or message["params"]["request"]["url"])
                if address.scheme in ("http", "https", "ws", "wss", "ftp"):
                    found.add(address.hostname or "")
        return found


def keep(page: Page, name: str) -> None:
    """Keep a picture of the page in the folder that ESPER_SCREENSHOTS names, if it exists."""
    folder = Path(os.environ.get("ESPER_SCREENSHOTS", "screenshots"))
    if folder.is_dir():
        page.driver.save_screenshot(str(folder / f"{name}.png"))

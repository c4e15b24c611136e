"""The browsers of all tests of pages: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dashboard.chromium import Page, skip_without_a_browser, start_chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A browser without WebGL, which draws pages in half of the time."""
    yield from started(tmp_path_factory, webgl=False)


@pytest.fixture(scope="session")
def browser_with_webgl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    yield from started(tmp_path_factory, webgl=True)


def started(tmp_path_factory: pytest.TempPathFactory, *, webgl: bool) -> Iterator[Page]:
    skip_without_a_browser()
    driver = start_chromium(tmp_path_factory.mktemp("profile"), webgl=webgl)
    try:
        yield Page(driver)
    finally:
        driver.quit()

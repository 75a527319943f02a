"""A real browser for the tests of pages: Chromium or Chrome, wherever it is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# No sandbox: containers run tests as root, where Chromium refuses one. The others keep it from calling home.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


def find_browser() -> str:
    """The path of $HNCLIP_BROWSER, or of the first browser that is installed. Without one the test is skipped, or fails
    if $HNCLIP_REQUIRE_BROWSER is set."""
    named = os.environ.get("HNCLIP_BROWSER")
    for name in [named] if named else NAMES:
        if path := shutil.which(name):
            return path
    missing = (
        f"no browser found as {named or ', '.join(NAMES)}: install Chromium or Chrome (on Debian: apt-get install "
        "chromium), or set HNCLIP_BROWSER to the path of one"
    )
    if os.environ.get("HNCLIP_REQUIRE_BROWSER"):
        pytest.fail(missing)
    pytest.skip(missing)


@contextmanager
def open_browser() -> Iterator[Browser]:
    path = find_browser()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()

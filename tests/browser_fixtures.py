"""A headless Chromium, and a page in it that fails its test on any error the browser reports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = ["--no-sandbox", "--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"]
UNNAMED = """all => all.filter(one => !one.closest("dialog") && !one.getAttribute("aria-label")
  && !one.labels?.length && !one.innerText?.trim() && one.checkVisibility()).map(one => one.outerHTML)"""
"""Controls without a name for screen readers, of the elements that a locator finds."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM.is_file():
        pytest.skip(f"no {CHROMIUM}")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield launched
        launched.close()


class BrowserTab:
    """A page in a context of its own."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **options})
        self.page, self.errors = self.context.new_page(), []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda line: self.errors.append(line.text) if line.type == "error" else None)
        self.page.goto(address)
        self.page.wait_for_selector("body[data-ready=yes]")

    def keys(self, *names: str) -> None:
        for name in names:
            self.page.keyboard.press(name)

    def saved(self, text: str) -> None:
        self.shows("status", text)

    def shows(self, name: str, text: str) -> None:
        """Wait until an element has a text."""
        self.page.wait_for_function(
            "([name, text]) => document.getElementById(name).textContent.includes(text)", arg=[name, text]
        )

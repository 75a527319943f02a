"""A page with every kind of block in a real browser: from disk, wide and on a phone, light and dark, hostile text."""

from __future__ import annotations

from pathlib import Path

from every_block import HOSTILE, every_block

from browser import open_browser

# What reaches over the right edge of the window, except inside blocks that scroll.
OVERFLOWING = """() => [...document.querySelectorAll("body *")]
  .filter(e => !e.closest(".scroll > *") && e.getBoundingClientRect().right > innerWidth + 0.5)
  .map(e => e.outerHTML.slice(0, 80))"""


def test_page_opens_without_errors_requests_or_overflow(tmp_path: Path) -> None:
    every_block().write(tmp_path, formats=("html",), figures=())
    address = (tmp_path / "report.html").as_uri()
    backgrounds = set()
    with open_browser() as browser:
        for width, scheme in ((1280, "light"), (375, "dark")):
            messages: list[str] = []
            requests: list[str] = []
            page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
            page.on("request", lambda request: requests.append(request.url))  # noqa: B023
            page.on("console", lambda message: messages.append(message.text))  # noqa: B023
            page.on("pageerror", lambda error: messages.append(str(error)))  # noqa: B023
            page.goto(address)
            assert (messages, [url for url in requests if not url.startswith("data:")]) == ([], [address])
            assert page.evaluate(OVERFLOWING) == []
            assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
            assert page.title() == HOSTILE
            assert page.evaluate("document.scripts.length") == 0
            backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2  # light and dark

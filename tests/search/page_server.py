"""What tests of the page share: the real server on an index of scenes, and visits of a real browser to it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, Request, expect
from serve_helpers import Live
from small_index import bundled, small_index

from browser import open_browser
from hnclip.core import Record
from hnclip.data.image_sources import FileImage
from hnclip.data.scenes import scene_records

EVIL = "<img src=x onerror=\"document.title = 'owned'\"><script>document.title = 'owned'</script> & {}"
ENDLESS = "w" * 400
ARABIC = "قارب أحمر عند الرصيف 🎉"
WIDE = (400, 160)  # a picture of which the model sees the middle alone
PATIENCE = 30  # seconds: a busy machine is slow

expect.set_options(timeout=1000 * PATIENCE)


def scenes() -> list[Record]:
    """In families of four that are nearly the same."""
    return scene_records("park", "validation", families=8)


def page_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenes as files, a wide picture, and scenes with hostile names and captions that are no files; made once."""
    directory = tmp_path_factory.getbasetemp() / "page"
    path, files = directory / "Park pictures.hnc", directory / "pictures"
    if not directory.exists():
        model = bundled()
        small_index(path, model, scenes(), files=files)
        Image.linear_gradient("L").resize(WIDE).convert("RGB").save(files / "wide.png")
        captions = (EVIL, f"{ENDLESS} {EVIL}", ARABIC)
        hostile = [
            Record(f"{caption}{number}.jpg", record.image, (caption,), None)
            for number, (caption, record) in enumerate(zip(captions, scene_records("shelf", "validation", families=1)))
        ]
        wide = Record("folder/wide.png", FileImage(files / "wide.png"), ("a wide grey gradient",), None)
        small_index(path, model, [wide, *hostile])
    return path


@dataclass
class Visit:
    """A page that was opened, and what happened on the way."""

    page: Page
    server: Live
    requests: list[str] = field(default_factory=list)
    gone: list[Request] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def search(self, text: str) -> None:
        """Write a description and wait for what is found."""
        self.page.fill("#box", text)
        self.page.press("#box", "Enter")
        self.settle()

    def settle(self) -> None:
        """Wait for the answer to what was asked."""
        expect(self.page.locator("#progress")).to_be_hidden()
        expect(self.page.locator("#found")).not_to_have_attribute("aria-busy", "true")

    def first(self) -> str:
        """The name of the best result."""
        return self.page.locator(".tile-name").first.inner_text()

    def until(self, condition: str) -> None:
        """Wait for it. Playwright's own way evaluates text inside the page, which the page's policy forbids."""
        end = time.monotonic() + PATIENCE
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"not within {PATIENCE} seconds: {condition}"
            self.page.wait_for_timeout(20)

    def api(self, path: str, **asked: Any) -> Any:
        """The server's own answer, past the page."""
        return self.page.request.post(f"{self.server.address}api/{path}", data=asked).json()


class Visits:
    """Opens pages in one browser, each as another visitor."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self.open: list[Visit] = []

    def __call__(
        self, server: Live, *, width: int = 1280, scheme: str = "light", phone: bool = False, at: str = ""
    ) -> Visit:
        context = self.browser.new_context(
            viewport={"width": width, "height": 800},
            color_scheme=scheme,
            reduced_motion="reduce",
            has_touch=phone,
            is_mobile=phone,
        )
        context.set_default_timeout(1000 * PATIENCE)
        visit = Visit(context.new_page(), server)
        visit.page.on("request", lambda request: visit.requests.append(request.url))
        visit.page.on("requestfailed", lambda request: visit.gone.append(request))
        visit.page.on("console", lambda message: visit.complaints.append(message.text))
        visit.page.on("pageerror", lambda error: visit.complaints.append(str(error)))
        visit.page.on("dialog", lambda dialog: visit.complaints.append(dialog.message))
        self.open.append(visit)
        visit.page.goto(server.address + at)
        return visit

    def close(self) -> None:
        """What holds for every visit: it asked this server alone, and the policy forbade nothing."""
        seen, self.open = self.open, []
        for visit in seen:
            visit.page.context.close()
        for visit in seen:
            own = (visit.server.address, f"blob:{visit.server.address}", "data:image/svg+xml")
            assert [url for url in visit.requests if not url.startswith(own)] == []
            assert [text for text in visit.complaints if "Content Security Policy" in text] == []


@contextmanager
def visits() -> Iterator[Visits]:
    with open_browser() as browser:
        yield Visits(browser)

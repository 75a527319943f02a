"""The page in a real browser: searches, near-duplicates, the viewer, heat maps, errors; names stay text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect
from serve_helpers import PATIENCE, Live, live, scenes, until
from small_index import small_index
from store_helpers import continue_index

from browser import open_browser
from hnclip.core import Problem, Record
from hnclip.data.image_sources import FileImage
from hnclip.data.scenes import scene_records

# Scenes that the bundled model finds first, with a lead of 0.01 or more, and the captions of which it finds.
TEXT, OTHER = scenes()[15].captions[0], scenes()[17].captions[0]
NAME, OTHER_NAME = "park-validation-0-3-3.png", "park-validation-0-4-1.png"
EVIL = "<img src=x onerror=\"document.title = 'owned'\"><script>document.title = 'owned'</script> & {}"
HOSTILE = (EVIL, f"{'w' * 400} {EVIL}")
WIDE = (400, 160)  # an image of which the model sees the middle alone
K = 30


@dataclass
class Visit:
    """A page that was opened, its requests, and its errors and violations of its policy."""

    page: Page
    server: Live
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: "Policy" in message.text and self.errors.append(message.text))

    def search(self, text: str) -> None:
        self.page.fill("#box", text)
        self.page.press("#box", "Enter")
        expect(self.page.locator("#progress")).to_be_hidden()
        expect(self.page.locator("#found")).not_to_have_attribute("aria-busy", "true")

    def shows(self, selector: str, text: str) -> None:
        """Wait until the first element of a selector contains a text."""
        expect(self.page.locator(selector).first).to_contain_text(text)

    def api(self, path: str, **asked: Any) -> Any:
        """The response of the server."""
        return self.page.request.post(f"{self.server.address}api/{path}", data=asked).json()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Scenes as files, a wide image, scenes that are no files and have hostile names and captions, and a problem."""
    expect.set_options(timeout=1000 * PATIENCE)
    directory = tmp_path_factory.mktemp("page")
    path, files = directory / "Park images.hnc", directory / "images"
    small_index(path, scenes(), files=files)
    Image.linear_gradient("L").resize(WIDE).convert("RGB").save(files / "wide.png")
    records = [Record("folder/wide.png", FileImage(files / "wide.png"), ("a wide grey gradient",), None)]
    for number, (text, scene) in enumerate(zip(HOSTILE, scene_records("shelf", "validation", families=1))):
        records.append(Record(f"{text}{number}.jpg", scene.image, (text,), None))
    small_index(path, records)
    with continue_index(path) as writer:
        name = f"{EVIL}.jpg"
        writer.finish((), {name: (Problem("corrupt image", name, f"{name} is empty"), "a stamp")})
    with live(path, max_k=K) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as found:
        yield found


@pytest.fixture
def visit(browser: Browser, server: Live) -> Iterator[Any]:
    """Opens the page, which may only send requests to its own server, and must follow its policy."""
    visits = list[Visit]()

    def opened(server: Live = server) -> Visit:
        context = browser.new_context(reduced_motion="reduce")
        context.set_default_timeout(1000 * PATIENCE)
        visits.append(Visit(context.new_page(), server))
        visits[-1].page.goto(server.address)
        return visits[-1]

    yield opened
    for one in visits:
        one.page.context.close()
        own = (one.server.address, f"blob:{one.server.address}", "data:image/svg+xml")
        assert [url for url in one.requests if not url.startswith(own)] == []
        assert one.errors == []


def test_searches_by_text_and_image_and_the_history(visit: Any) -> None:
    here = visit()
    here.search(TEXT)
    tiles = {tile.get_attribute("data-id"): tile for tile in here.page.locator(".tile").all()}
    assert {number: tile.locator(".score").inner_text() for number, tile in tiles.items()} == {
        str(hit["id"]): f"{hit['score']:.2f}" for hit in here.api("search", text=TEXT, k=24)["hits"]
    }
    here.page.check("#rerank", force=True)
    best = here.api("search", text=TEXT, k=24, rerank=True)["hits"][0]
    here.shows(f".tile[data-id='{best['id']}'] .score", f"{best['token_score']:.2f}")
    here.search(OTHER)
    here.shows(".tile-name", OTHER_NAME)
    for go in (here.page.go_back, here.page.reload):
        go()
        here.shows(f".tile[data-id='{best['id']}'] .score", f"{best['token_score']:.2f}")
        assert here.page.input_value("#box") == TEXT
    here.page.set_input_files("#file", here.server.index.parent / "images" / OTHER_NAME)
    here.shows(".tile-name", OTHER_NAME)
    here.page.mouse.wheel(0, 100_000)
    until(lambda: here.page.evaluate(f"document.querySelectorAll('.tile').length === {K}"))


def test_near_duplicates_are_shown_with_the_words_that_separate_them(visit: Any) -> None:
    here = visit()
    here.search(TEXT)
    group, band = here.api("search", text=TEXT, k=24)["groups"][0], here.page.locator(".band").first
    assert [int(tile.get_attribute("data-id")) for tile in band.locator(".tile").all()] == group["ids"]
    band.get_by_role("button", name="What separates them").click()
    separators = here.api("separate", text=TEXT, ids=group["ids"])["separators"]
    expect(band.locator("tbody th")).to_have_text([one["word"] for one in separators])
    assert band.locator("td").all_inner_texts() == [f"{score:.2f}" for one in separators for score in one["scores"]]


def test_the_viewer_is_used_by_keyboard_and_keeps_its_place(visit: Any) -> None:
    here = visit()
    here.search(TEXT)
    tiles, keys = here.page.locator(".tile"), here.page.keyboard
    names = here.page.locator(".tile-name").all_inner_texts()
    for key, number in (("ArrowDown", 0), ("ArrowRight", 1), ("Home", 0)):
        keys.press(key)
        expect(tiles.nth(number)).to_be_focused()
    keys.press("Enter")
    until(lambda: here.page.evaluate("document.getElementById('viewer-image').src.match(/images.[0-9]+$/)"))
    for name in names[1:4]:
        keys.press("ArrowRight")
        here.shows("#viewer-name", name)
    here.page.reload()
    here.shows("#viewer-name", names[3])
    keys.press("Escape")
    expect(here.page.locator(".tile", has_text=names[3])).to_be_focused()


def test_the_heat_map_of_a_word_covers_what_the_model_sees(visit: Any) -> None:
    """Of a wide image it sees the middle."""
    here, text = visit(), "🎉🎉 a wide, grey gradient"
    hits = here.api("search", text=text, k=K)["hits"]
    number = next(hit["id"] for hit in hits if hit["name"] == "folder/wide.png")
    explained = here.api("explain", text=text, id=number)
    word, (left, _, right, _) = explained["words"][-1], explained["box"]
    assert right - left < 0.5
    here.search(text)
    here.page.locator(f".tile[data-id='{number}']").click()
    words = here.page.locator(".word")
    expect(words).to_have_text([word["text"] for word in explained["words"]])
    glow = words.evaluate_all("words => words.map((word) => word.style.getPropertyValue('--share'))")
    assert [share != "0%" for share in glow] == [word["content"] for word in explained["words"]]
    words.last.click()
    here.page.mouse.move(1, 1)  # the word under the mouse would be shown instead of the chosen one
    here.shows("#legend-word", word["text"])
    image, heat = (here.page.locator(name).bounding_box() for name in ("#viewer-image", "#heat"))
    assert heat["x"] == pytest.approx(image["x"] + left * image["width"], abs=1)
    assert heat["width"] == pytest.approx((right - left) * image["width"], abs=1)


def test_names_captions_and_problems_stay_text(visit: Any) -> None:
    here = visit()
    here.page.click("#show-problems")
    here.shows("#problem-list", f"{EVIL}.jpg is empty")
    here.page.keyboard.press("Escape")
    here.page.check("input[value=captions]", force=True)
    for number, text in enumerate(HOSTILE):
        here.search(text)
        expect(here.page.locator(".caption-text").first).to_have_text(text)
        here.page.locator(".tile").first.click()
        here.shows("#viewer-name", f"{number}.jpg")
        here.shows("#viewer-captions", text)
        expect(here.page.locator(".word").first).to_be_visible()
        here.page.keyboard.press("Escape")
        until(lambda: here.page.evaluate("!document.querySelector('#viewer').open && history.state?.opened !== true"))
    assert here.page.locator("img[src=x], main script").count() == 0
    assert "owned" not in here.page.title()


def test_errors_are_shown_and_a_search_can_be_tried_again(visit: Any) -> None:
    here = visit()
    here.page.route("**/api/search", lambda route: route.abort())
    here.search(TEXT)
    here.shows("#notice", "cannot be reached")
    here.page.unroute("**/api/search")
    here.page.click("#notice button")
    here.shows(".tile-name", NAME)
    here.page.fill("#box", "x" * 20_001)
    here.shows("#note", "1 character too many")
    expect(here.page.locator("#submit")).to_be_disabled()
    form, results = (here.page.locator(name).bounding_box() for name in ("#composer", "#found"))
    assert form["y"] + form["height"] <= results["y"]


def test_the_thumbnail_of_an_image_larger_than_an_upload_is_searched_with(visit: Any) -> None:
    here = visit()
    info = here.page.request.get(f"{here.server.address}api/index").json()
    info["limits"]["upload"] = 1
    here.page.route("**/api/index", lambda route: route.fulfill(json=info))
    here.page.reload()
    with here.page.expect_request("**/api/search/image?*") as sent:
        here.page.goto(f"{here.server.address}#like=1")
    thumbnail = here.page.request.get(f"{here.server.address}api/images/1/thumbnail")
    assert sent.value.header_value("content-type") == thumbnail.headers["content-type"] == "image/jpeg"
    expect(here.page.locator(".tile")).not_to_have_count(0)


def test_a_locked_index_is_opened_with_its_token(visit: Any, server: Live) -> None:
    with live(server.index, token="sesame") as locked:
        here = visit(locked)
        for token in ("wrong", "sesame"):
            here.page.fill("#token", token)
            here.page.press("#token", "Enter")
            if token == "wrong":
                here.shows("#unlock-error", "wrong")
        expect(here.page.locator("#unlock")).to_be_hidden()
        here.search(TEXT)
        until(lambda: here.page.evaluate("document.querySelector('.tile img')?.naturalWidth > 0"))
        here.page.context.close()

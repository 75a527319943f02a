"""The page in a real browser: searches, near-duplicates, captions, the viewer, heat maps, keys, errors, phones."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, Route, expect
from serve_helpers import PATIENCE, Live, live, scenes
from small_index import small_index

from browser import open_browser
from hnclip.core import Problem, Record
from hnclip.data.image_sources import FileImage
from hnclip.data.scenes import scene_records
from hnclip.search.reader import IndexReader
from hnclip.search.writer import Change, open_writer

# Scenes that the bundled model finds first, with a lead of 0.01 or more, and the captions of which it finds.
TEXT, OTHER = scenes()[15].captions[0], scenes()[17].captions[0]
NAME, OTHER_NAME = "park-validation-0-3-3.png", "park-validation-0-4-1.png"
EVIL = "<img src=x onerror=\"document.title = 'owned'\"><script>document.title = 'owned'</script> & {}"
HOSTILE = (EVIL, f"{'w' * 400} {EVIL}", "قارب أحمر عند الرصيف 🎉")
WIDE = (400, 160)  # an image of which the model sees the middle alone
K, UPLOAD, LETTERS = 30, 100_000, 1500

# What reaches over the right edge of the window and is not inside something that scrolls.
OUTSIDE = """() => [...document.querySelectorAll("body *")]
  .filter(e => e.checkVisibility() && !e.closest(".members, .scroll"))
  .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 80))"""

# What can be touched and is smaller than a finger.
SMALL = """() => [...document.querySelectorAll("button, label:not(.unseen), a, textarea")]
  .filter(e => e.checkVisibility()).map(e => [e.outerHTML.slice(0, 60), e.getBoundingClientRect()])
  .filter(([, r]) => r.right > 0 && (r.width < 44 || r.height < 44)).map(([e, r]) => [e, r.width, r.height])"""

# The contrast of each piece of visible text with all that is painted behind it, by WCAG 2.2.
CONTRASTS = """() => {
  const context = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const paint = (...colours) => {
    context.clearRect(0, 0, 1, 1);
    for (const colour of colours) { context.fillStyle = colour; context.fillRect(0, 0, 1, 1); }
    const parts = [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map(v => v / 255);
    const [r, g, b] = parts.map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.data.trim(), behind = [];
    if (!text || !element.checkVisibility() || element.closest(":disabled, .unseen")) continue;
    for (let e = element; e; e = e.matches("dialog") ? null : e.parentElement) {
      behind.unshift(getComputedStyle(e).backgroundColor);
    }
    const back = paint(...behind), ink = paint(...behind, getComputedStyle(element).color);
    found.push([(Math.max(ink, back) + 0.05) / (Math.min(ink, back) + 0.05), element.className, text.slice(0, 30)]);
  }
  return found;
}"""

# A file that is dropped on the page, or pasted into it.
GIVE = """([how, name, type, text]) => {
  const given = new DataTransfer();
  given.items.add(new File([Uint8Array.from(atob(text), c => c.charCodeAt(0))], name, {type}));
  const send = event => document.body.dispatchEvent(event);
  if (how === "paste") return send(new ClipboardEvent("paste", {clipboardData: given, bubbles: true}));
  for (const kind of ["dragover", "drop"]) {
    send(new DragEvent(kind, {dataTransfer: given, bubbles: true, cancelable: true}));
  }
}"""


@dataclass
class Visit:
    """A page that was opened, and what happened on the way."""

    page: Page
    server: Live
    requests: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))

    def search(self, text: str) -> None:
        self.page.fill("#box", text)
        self.page.press("#box", "Enter")
        self.settle()

    def settle(self) -> None:
        """Wait for the answer of a search."""
        expect(self.page.locator("#progress")).to_be_hidden()
        expect(self.page.locator("#found")).not_to_have_attribute("aria-busy", "true")

    def first(self) -> str:
        return self.page.locator(".tile-name").first.inner_text()

    def give(self, how: str, content: bytes, name: str = "query.png", kind: str = "image/png") -> None:
        self.page.evaluate(GIVE, [how, name, kind, base64.b64encode(content).decode()])

    def until(self, condition: str) -> None:
        """Playwright's own way evaluates text inside the page, which the page's policy forbids."""
        end = time.monotonic() + PATIENCE
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"not within {PATIENCE} seconds: {condition}"
            self.page.wait_for_timeout(20)

    def api(self, path: str, **asked: Any) -> Any:
        """The server's own answer."""
        return self.page.request.post(f"{self.server.address}api/{path}", data=asked).json()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Of scenes as files, a wide image, scenes with hostile names and captions that are no files, and a problem."""
    expect.set_options(timeout=1000 * PATIENCE)
    directory = tmp_path_factory.mktemp("page")
    path, files = directory / "Park images.hnc", directory / "images"
    small_index(path, scenes(), files=files)
    Image.linear_gradient("L").resize(WIDE).convert("RGB").save(files / "wide.png")
    records = [Record("folder/wide.png", FileImage(files / "wide.png"), ("a wide grey gradient",), None)]
    for number, (text, scene) in enumerate(zip(HOSTILE, scene_records("shelf", "validation", families=1))):
        records.append(Record(f"{text}{number}.jpg", scene.image, (text,), None))
    small_index(path, records)
    with IndexReader(path) as reader:
        about = reader.about
    with open_writer(path, about) as writer:
        writer.commit(Change(problems=[(Problem("corrupt image", f"{EVIL}.jpg", f"{EVIL}.jpg is empty"), "a stamp")]))
    with live(path, max_k=K, max_text=LETTERS, max_upload=UPLOAD) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as found:
        yield found


@pytest.fixture
def visit(browser: Browser, server: Live) -> Iterator[Any]:
    """Opens the page. It may send requests to its own server only, and do nothing that its policy forbids."""
    visits = list[Visit]()

    def opened(at: str = "", *, server: Live = server, **options: Any) -> Visit:
        context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 800}, "reduced_motion": "reduce", **options}
        )
        context.set_default_timeout(1000 * PATIENCE)
        visits.append(Visit(context.new_page(), server))
        visits[-1].page.goto(server.address + at)
        return visits[-1]

    yield opened
    for one in visits:
        one.page.context.close()
        own = (one.server.address, f"blob:{one.server.address}", "data:image/svg+xml")
        assert [url for url in one.requests if not url.startswith(own)] == []
        assert [text for text in one.messages if "Content Security Policy" in text] == []


def image_file(server: Live, name: str = NAME) -> Path:
    return server.index.parent / "images" / name


def fail(route: Route) -> None:
    route.fulfill(status=500, json={"error": "it broke"})


def test_a_description_finds_its_scene_and_stays_in_the_history(visit: Any) -> None:
    here = visit()
    expect(here.page.locator("#index-name")).to_have_text("Park images")
    expect(here.page.locator("#welcome-text")).to_contain_text("36 images")
    here.page.fill("#box", "first line")
    here.page.press("#box", "Shift+Enter")
    assert "\n" in here.page.input_value("#box")
    here.search(TEXT)
    hits = here.api("search", text=TEXT, k=24)["hits"]
    tiles = {tile.get_attribute("data-id"): tile for tile in here.page.locator(".tile").all()}
    assert {number: tile.locator(".score").inner_text() for number, tile in tiles.items()} == {
        str(hit["id"]): f"{hit['score']:.2f}" for hit in hits
    }
    assert here.first() == NAME
    here.page.check("#rerank", force=True)
    expect(here.page.locator("#found-legend")).to_contain_text("best 100")
    best = here.api("search", text=TEXT, k=24, rerank=True)["hits"][0]
    shown = here.page.locator(f".tile[data-id='{best['id']}'] .score")
    expect(shown).to_have_text(f"{best['token_score']:.2f}")
    here.page.go_back()
    expect(here.page.locator("#rerank")).not_to_be_checked()
    here.search(OTHER)
    assert here.first() == OTHER_NAME
    assert here.page.title().startswith(OTHER[:40])
    sent = len(here.requests)
    here.page.go_back()
    here.settle()
    assert (here.page.input_value("#box"), here.first()) == (TEXT, NAME)
    assert not any(url.endswith("/api/search") for url in here.requests[sent:])  # it was kept
    here.page.reload()
    here.settle()
    assert (here.page.input_value("#box"), here.first()) == (TEXT, NAME)
    here.page.mouse.wheel(0, 100_000)
    here.until(f"document.querySelectorAll('.tile').length === {K}")
    expect(here.page.locator("#tail")).to_contain_text("6 more")
    here.page.click("#compact")
    expect(here.page.locator("#box")).to_be_focused()
    assert here.messages == []


def test_images_are_dropped_pasted_and_chosen(visit: Any, server: Live) -> None:
    here = visit()
    here.give("drop", image_file(server).read_bytes())
    expect(here.page.locator("#chip-name")).to_have_text("query.png")
    here.settle()
    assert here.first() == NAME
    expect(here.page.locator(".tile .score").first).to_have_text("1.00")
    here.give("paste", image_file(server, OTHER_NAME).read_bytes())
    expect(here.page.locator(".tile-name").first).to_have_text(OTHER_NAME)
    here.page.go_back()
    expect(here.page.locator(".tile-name").first).to_have_text(NAME)
    here.page.set_input_files("#file", image_file(server, OTHER_NAME))
    expect(here.page.locator(".tile-name").first).to_have_text(OTHER_NAME)
    here.page.check("input[value=captions]", force=True)
    expect(here.page.locator(".caption-text").first).to_have_text(OTHER)
    here.page.locator(".small-tile").first.click()
    expect(here.page.locator("#viewer-name")).to_have_text(OTHER_NAME)
    expect(here.page.locator("#words-part")).to_be_hidden()  # there are no words
    here.page.keyboard.press("Escape")
    here.page.click("#chip-remove")
    expect(here.page.locator("#welcome")).to_be_visible()
    assert here.messages == []
    for content, kind, word in ((b"words", "text/plain", "not an image"), (bytes(UPLOAD + 1), "image/png", "0.1 MB")):
        here.give("drop", content, kind=kind)
        expect(here.page.locator("#note")).to_contain_text(word)
    here.give("drop", b"not a PNG")
    expect(here.page.get_by_role("alert")).to_contain_text("format")
    expect(here.page.locator("#notice button")).to_have_count(0)  # it would fail again
    here.page.reload()
    expect(here.page.locator("#notice")).to_contain_text("Choose the image again")


def test_characters_are_counted_as_the_server_counts(visit: Any) -> None:
    here, note = visit(), "#note"
    expect(here.page.locator("#index-name")).not_to_be_empty()
    for text, shown in (
        ("🎉" * 500, ""),
        ("🎉" * (LETTERS - 7), "7 characters left"),
        ("a tree " * 250, "249 characters"),
    ):
        here.page.fill("#box", text)
        expect(here.page.locator(note)).to_contain_text(shown)
    expect(here.page.locator("#submit")).to_be_disabled()
    here.search("a red tree " * 130)
    expect(here.page.locator(note)).to_contain_text("longer than the model")


def test_near_duplicates_are_side_by_side_with_what_separates_them(visit: Any) -> None:
    here = visit()
    here.search(TEXT)
    group, band = here.api("search", text=TEXT, k=24)["groups"][0], here.page.locator(".band").first
    tiles = band.locator(".tile")
    assert [int(tile.get_attribute("data-id")) for tile in tiles.all()] == group["ids"]
    boxes = [image.bounding_box() for image in band.locator(".image").all()]
    assert len({(round(box["y"]), round(box["width"]), round(box["height"])) for box in boxes}) == 1
    different = [piece for caption in group["captions"] for piece, highlighted in caption["pieces"] if highlighted]
    assert different
    assert band.locator("mark").all_inner_texts() == different
    band.get_by_role("button", name="Full captions").click()
    texts = ["".join(piece for piece, _ in caption["pieces"]) for caption in group["captions"]]
    assert band.locator(".band-caption").all_inner_texts() == texts
    here.page.route("**/api/separate", fail)
    band.get_by_role("button", name="What separates them").click()
    expect(band.locator(".separation")).to_contain_text("It broke")
    here.page.unroute("**/api/separate")
    band.get_by_role("button", name="Try again").click()
    separators = here.api("separate", text=TEXT, ids=group["ids"])["separators"]
    expect(band.locator("tbody th")).to_have_text([one["word"] for one in separators])
    assert band.locator("td").all_inner_texts() == [f"{score:.2f}" for one in separators for score in one["scores"]]
    expect(band.locator(".separation")).to_contain_text("start at zero")
    bar = band.locator("tr:nth-child(1) td.best .bar").first.evaluate("bar => bar.style.getPropertyValue('--share')")
    highest = max(score for one in separators for score in one["scores"])
    assert float(bar) == pytest.approx(max(separators[0]["scores"]) / highest)
    tiles.nth(1).click()
    here.page.locator("#group button").first.click()
    expect(here.page.locator("#viewer-name")).to_have_text(NAME)
    assert here.page.locator("#group button").first.get_attribute("aria-current") == "true"


def test_the_viewer_and_the_way_back(visit: Any, server: Live) -> None:
    here = visit()
    here.search(TEXT)
    names = here.page.locator(".tile-name").all_inner_texts()
    name = here.page.locator("#viewer-name")
    here.page.locator(".tile").first.click()
    expect(name).to_have_text(NAME)
    expect(here.page.locator("#previous")).to_be_disabled()
    expect(here.page.locator("#viewer-facts")).to_contain_text("192 × 192")
    here.until("document.getElementById('viewer-image').src.match(/images.[0-9]+$/)")  # the original, in the end
    for number in range(1, 12):
        here.page.keyboard.press("ArrowRight")
        expect(name).to_have_text(names[number])
    here.page.reload()
    expect(name).to_have_text(names[11])
    here.page.keyboard.press("Escape")
    expect(here.page.locator(".tile", has_text=names[11])).to_be_focused()
    expect(here.page.locator(".tile", has_text=names[11])).to_be_in_viewport()
    assert "open" not in here.page.url
    here.page.locator(".tile").nth(1).click()
    here.page.click("#similar")
    expect(here.page.locator("#chip-name")).to_have_text(names[1])
    here.settle()
    assert here.first() == names[1]
    here.page.go_back()
    expect(name).to_have_text(names[1])
    here.page.go_back()
    expect(here.page.locator("#viewer")).to_be_hidden()
    here.page.fill("#box", OTHER)
    here.page.locator(".tile").first.click()
    # A search in the same moment in which the way back from the viewer begins.
    here.page.evaluate("document.getElementById('viewer').addEventListener('close', () => submit.click())")
    here.page.keyboard.press("Escape")
    expect(here.page.locator(".tile-name").first).to_have_text(OTHER_NAME)
    assert here.messages == []


def pixel(here: Visit, right: float, down: float) -> list[int]:
    """The colour of the heat map at a place given in shares of its width and height."""
    return here.page.evaluate(
        """([x, y]) => {
          const heat = document.getElementById("heat"), {width, height} = heat;
          const copy = new OffscreenCanvas(width, height).getContext("2d");
          copy.drawImage(heat, 0, 0);
          return [...copy.getImageData(Math.floor(x * width), Math.floor(y * height), 1, 1).data];
        }""",
        [right, down],
    )


def test_each_word_has_its_heat_map(visit: Any) -> None:
    here = visit()
    here.search(TEXT)
    here.page.locator(".tile").first.click()
    hit = here.api("search", text=TEXT, k=1)["hits"][0]
    answer = here.api("explain", text=TEXT, id=hit["id"])
    words, chips = answer["words"], here.page.locator(".word")
    expect(chips).to_have_text([word["text"] for word in words])
    assert "".join(here.page.locator("#words").inner_text().split()) == "".join(TEXT.split())
    expect(here.page.locator("#words-hint")).to_contain_text("may not show where")
    spread = [max(word["patches"]) - sorted(word["patches"])[len(word["patches"]) // 2] for word in words]
    for at in sorted(range(len(spread)), key=lambda at: -spread[at])[:2]:
        chips.nth(at).click()
        here.page.mouse.move(1, 1)  # the word under the mouse would be shown instead of the chosen one
        expect(here.page.locator("#legend-word")).to_have_text(words[at]["text"])
        expect(here.page.locator("#legend-high")).to_have_text(f"{max(words[at]['patches']):.2f}")
        for patch, colour in ((max, [255, 226, 110, 128]), (min, [14, 18, 44, 150])):
            row, column = divmod(words[at]["patches"].index(patch(words[at]["patches"])), answer["columns"])
            place = ((column + 0.5) / answer["columns"], (row + 0.5) / answer["rows"])
            assert pixel(here, *place) == pytest.approx(colour, abs=12)
    chips.nth(at).click()  # once more: it goes
    here.page.mouse.move(1, 1)
    expect(here.page.locator("#heat")).to_be_hidden()
    shares = chips.evaluate_all("chips => chips.map(chip => parseInt(chip.style.getPropertyValue('--share')))")
    assert max(shares) == 100
    assert {share for share, word in zip(shares, words) if not word["content"]} == {0}  # function words do not glow
    assert here.messages == []


def test_the_heat_map_covers_what_the_model_sees_of_a_wide_image(visit: Any, server: Live) -> None:
    here, text = visit(), "🎉🎉 a wide, grey gradient"
    hits = here.api("search", text=text, k=K)["hits"]
    number = next(hit["id"] for hit in hits if hit["name"] == "folder/wide.png")
    left, _, right, _ = here.api("explain", text=text, id=number)["box"]
    assert right - left < 0.5
    here.search(text)
    here.page.locator(f".tile[data-id='{number}']").click()
    here.page.locator(".word").last.click()
    assert "".join(here.page.locator("#words").inner_text().split()) == "".join(text.split())
    expect(here.page.locator("#viewer-folder")).to_have_text("folder/")
    image, heat = (here.page.locator(name).bounding_box() for name in ("#viewer-image", "#heat"))
    assert image["width"] / image["height"] == pytest.approx(WIDE[0] / WIDE[1], rel=0.01)
    assert heat["x"] == pytest.approx(image["x"] + left * image["width"], abs=1)
    assert heat["width"] == pytest.approx((right - left) * image["width"], abs=1)
    assert (heat["y"], heat["height"]) == pytest.approx((image["y"], image["height"]), abs=1)


def test_all_of_it_is_done_without_a_mouse(visit: Any) -> None:
    here = visit()
    keys, tiles, words = here.page.keyboard, here.page.locator(".tile"), here.page.locator(".word")
    keys.press("?")
    expect(here.page.locator("#help")).to_be_visible()
    keys.press("Escape")
    keys.press("/")
    keys.insert_text(TEXT)
    keys.type("/?")
    keys.press("Enter")
    here.settle()
    assert here.page.input_value("#box") == f"{TEXT}/?"
    keys.press("ArrowDown")
    expect(tiles.first).to_be_focused()
    keys.press("ArrowRight")
    expect(tiles.nth(1)).to_be_focused()
    keys.press("ArrowDown")
    lower = here.page.evaluate("document.activeElement.getBoundingClientRect().top")
    assert lower > tiles.nth(1).bounding_box()["y"]
    keys.press("Home")
    keys.press("Enter")
    expect(words.first).to_be_visible()
    for _ in range(30):
        if here.page.evaluate("document.activeElement.classList.contains('word')"):
            break
        keys.press("Tab")
    expect(words.first).to_have_attribute("aria-pressed", "true")
    keys.press("ArrowRight")
    keys.press("ArrowDown")  # the same word in the next image
    expect(here.page.locator("#viewer-place")).to_contain_text("2 of")
    expect(words.nth(1)).to_be_focused()
    expect(here.page.locator("#heat")).to_be_visible()
    keys.press("Escape")
    expect(tiles.nth(1)).to_be_focused()
    keys.press("Home")
    keys.press("ArrowUp")
    expect(here.page.locator("#box")).to_be_focused()
    assert here.messages == []


def test_names_captions_and_problems_stay_text(visit: Any) -> None:
    here = visit(viewport={"width": 320, "height": 800})
    here.page.click("#show-problems")
    expect(here.page.locator("#problem-list")).to_contain_text(f"{EVIL}.jpg is empty")
    assert here.page.evaluate(OUTSIDE) == []
    here.page.keyboard.press("Escape")
    here.page.check("input[value=captions]", force=True)
    for number, text in enumerate(HOSTILE):
        here.search(text)
        expect(here.page.locator(".caption-text").first).to_have_text(text)
        assert here.page.evaluate(OUTSIDE) == []
        here.page.locator(".tile").first.click()
        expect(here.page.locator("#viewer-name")).to_contain_text(f"{number}.jpg")
        expect(here.page.locator("#viewer-captions")).to_contain_text(text)
        expect(here.page.locator(".word").first).to_be_visible()
        expect(here.page.locator("#original")).to_be_hidden()  # a scene that is no file
        expect(here.page.locator("#words-hint")).to_contain_text("thumbnail")
        assert here.page.evaluate(OUTSIDE) == []
        here.page.keyboard.press("Escape")
        here.until("!document.querySelector('#viewer').open && history.state?.opened !== true")
    assert here.page.locator("img[src=x], main script").count() == 0
    assert "owned" not in here.page.title()
    assert [text for text in here.messages if "404" not in text] == []


def test_errors_are_visible_and_tried_again(visit: Any, server: Live) -> None:
    here, tries, alert = visit(), list[Route](), "#notice[role=alert]"

    def busy_twice(route: Route) -> None:
        tries.append(route)
        if len(tries) > 2:
            route.continue_()
        else:
            route.fulfill(status=503, headers={"Retry-After": "0"}, json={"error": "busy"})

    here.page.route("**/api/search", busy_twice)
    here.search(TEXT)
    assert (len(tries), here.first()) == (3, NAME)
    for status, buttons in ((502, 1), (422, 0)):
        here.page.unroute_all()
        here.page.route("**/api/search", partial(Route.fulfill, status=status, body="<html>of a proxy</html>"))
        here.search(OTHER)
        expect(here.page.locator(alert)).to_contain_text(str(status))
        expect(here.page.locator(f"{alert} button")).to_have_count(buttons)
    here.page.unroute_all()
    here.search("?!")
    expect(here.page.locator(alert)).to_contain_text("no words")
    expect(here.page.locator("#found")).to_be_hidden()
    here.page.route("**/api/problems", fail)
    here.page.click("#show-problems")
    expect(here.page.locator("#problem-list")).to_contain_text("It broke")
    here.page.unroute_all()
    here.page.get_by_role("button", name="Try again").click()
    expect(here.page.locator("#problem-list li")).to_have_count(1)
    here.page.keyboard.press("Escape")
    with live(server.index) as own:
        other = visit(server=own)
        other.search(TEXT)
        own.stop()
        other.search(OTHER)
        expect(other.page.locator(alert)).to_contain_text("cannot be reached")
        own.start()
        other.page.get_by_role("button", name="Try again").click()
        expect(other.page.locator(".tile-name").first).to_have_text(OTHER_NAME)
        expect(other.page.locator("#notice")).to_be_hidden()
        other.page.context.close()


def test_a_new_search_ends_the_one_before(visit: Any) -> None:
    here, held = visit(), list[Route]()

    def hold(route: Route) -> None:
        if route.request.post_data_json["text"] == TEXT:
            held.append(route)
        else:
            route.continue_()

    here.page.route("**/api/search", hold)
    here.page.fill("#box", TEXT)
    here.page.press("#box", "Enter")
    expect(here.page.locator(".placeholder").first).to_be_attached()
    here.search(OTHER)
    held[0].fulfill(json=here.api("search", text=TEXT, k=24))
    here.page.wait_for_timeout(50)
    assert here.first() == OTHER_NAME


def test_a_locked_index_is_opened_with_its_token(visit: Any, server: Live) -> None:
    with live(server.index, token="sesame") as locked:
        here = visit("#q=a+tree", server=locked)
        here.page.fill("#token", "wrong")
        here.page.press("#token", "Enter")
        expect(here.page.locator("#unlock-error")).to_contain_text("wrong")
        here.page.keyboard.press("Escape")
        expect(here.page.locator("#notice")).to_contain_text("locked")
        here.page.get_by_role("button", name="Try again").click()
        here.page.fill("#token", "sesame")
        here.page.press("#token", "Enter")
        here.until("document.querySelector('.tile img')?.naturalWidth > 0")  # images need the cookie
        here.page.reload()
        here.settle()
        expect(here.page.locator("#unlock")).to_be_hidden()
        here.page.context.close()


def test_an_empty_index_is_said_to_be_empty(visit: Any, tmp_path: Path) -> None:
    small_index(tmp_path / "empty.hnc", [], files=tmp_path)
    with live(tmp_path / "empty.hnc") as server:
        here = visit(server=server)
        expect(here.page.locator("#welcome-text")).to_contain_text("no images yet")
        expect(here.page.locator("#find-what")).to_be_hidden()
        here.search(TEXT)
        expect(here.page.locator("#found")).to_be_hidden()
        expect(here.page.locator("#notice")).to_contain_text("no images yet")
        assert here.messages == []
        here.page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_has_room_and_contrast(scheme: str, visit: Any) -> None:
    phone = {"width": 320, "height": 800}
    here = visit(viewport=phone, color_scheme=scheme, has_touch=True, is_mobile=True)

    def look() -> None:
        assert here.page.evaluate("document.documentElement.scrollWidth") == phone["width"]
        assert here.page.evaluate(OUTSIDE) == []
        assert here.page.evaluate(SMALL) == []
        contrasts = here.page.evaluate(CONTRASTS)
        assert len(contrasts) > 10
        assert [one for one in contrasts if one[0] < 4.5] == []

    expect(here.page.locator("#index-model")).not_to_be_empty()
    look()
    here.page.fill("#box", TEXT)
    here.page.tap("#submit")
    here.settle()
    here.page.get_by_role("button", name="What separates them").first.tap()
    expect(here.page.locator("td").first).to_be_visible()
    look()
    here.page.locator(".tile").first.tap()
    here.page.locator(".word").nth(3).tap()
    expect(here.page.locator("#heat")).to_be_visible()
    look()
    box = here.page.locator("#viewer").bounding_box()
    assert (box["width"], box["height"]) == tuple(phone.values())
    here.page.tap("#viewer-close")
    here.page.locator("#find-what label").last.tap()
    expect(here.page.locator(".caption-result").first).to_be_visible()
    look()
    background = here.page.evaluate("getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/g)")
    assert (sum(map(int, background)) > 600) == (scheme == "light")
    assert here.messages == []

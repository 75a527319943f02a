"""The page in a real browser: opening what was found, its words over the picture, near-twins, keys, phones, colours."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from page_server import ARABIC, ENDLESS, EVIL, WIDE, Visit, Visits, page_index, scenes, visits
from playwright.sync_api import expect
from serve_helpers import Live, live

TEXT, NAME = scenes()[15].captions[0], "park-validation-0-3-3.png"  # found first, with a lead of 0.01

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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(page_index(tmp_path_factory)) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Visits]:
    with visits() as opened:
        yield opened


@pytest.fixture
def visit(browser: Visits) -> Iterator[Visits]:
    yield browser
    browser.close()


def pixel(here: Visit, right: float, down: float) -> list[int]:
    """The colour of the heat map at a place given in shares of its width and height."""
    return here.page.evaluate(
        """([x, y]) => {
          const heat = document.getElementById("heat"), {width, height} = heat;
          const copy = new OffscreenCanvas(width, height).getContext("2d", {willReadFrequently: true});
          copy.drawImage(heat, 0, 0);
          return [...copy.getImageData(Math.floor(x * width), Math.floor(y * height), 1, 1).data];
        }""",
        [right, down],
    )


def open_word(here: Visit, at: int) -> str:
    """Choose a word of the open result; its heat map."""
    here.page.locator(".word").nth(at).click()
    here.page.mouse.move(1, 1)  # the word under the mouse would be shown instead of the chosen one
    expect(here.page.locator("#heat")).to_be_visible()
    return here.page.evaluate("document.getElementById('heat').toDataURL()")


def explained(here: Visit, text: str, name: str) -> dict[str, Any]:
    found = here.api("search", text=text, k=50)["results"]
    return here.api("explain", text=text, id=next(one["id"] for one in found if one["name"].endswith(name)))


def test_a_result_opens_and_arrows_go_on_from_it(visit: Visits, server: Live) -> None:
    here = visit(server)
    here.search(TEXT)
    shown = here.page.locator(".tile-name").all_inner_texts()
    here.page.locator(".tile").first.click()
    expect(here.page.locator("#viewer-name")).to_have_text(NAME)
    expect(here.page.locator("#before")).to_be_disabled()
    expect(here.page.locator("#viewer-facts")).to_contain_text("192 × 192")
    here.until("document.getElementById('viewer-picture').src.match(/pictures.[0-9]+$/)")  # the original, in the end
    for number in range(1, 12):
        here.page.keyboard.press("ArrowRight")
        expect(here.page.locator("#viewer-name")).to_have_text(shown[number])
    here.page.keyboard.press("ArrowLeft")
    expect(here.page.locator("#viewer-name")).to_have_text(shown[10])
    here.page.reload()
    expect(here.page.locator("#viewer-name")).to_have_text(shown[10])
    here.page.keyboard.press("Escape")
    expect(here.page.locator("#viewer")).to_be_hidden()
    expect(here.page.locator(".tile", has_text=shown[10])).to_be_focused()
    expect(here.page.locator(".tile", has_text=shown[10])).to_be_in_viewport()
    assert "open" not in here.page.url
    here.page.fill("#box", "what is being written")
    here.page.locator(".tile").first.click()
    here.page.go_back()
    expect(here.page.locator("#viewer")).to_be_hidden()
    assert (here.first(), here.page.input_value("#box")) == (NAME, "what is being written")
    here.page.locator(".tile").first.click()
    # A search in the same moment in which the way back from the viewer begins.
    here.page.evaluate("document.getElementById('viewer').addEventListener('close', () => submit.click())")
    here.page.keyboard.press("Escape")
    expect(here.page).to_have_url(f"{server.address}#q=what+is+being+written")
    expect(here.page.locator("#viewer")).to_be_hidden()
    assert here.complaints == []


def test_a_word_is_shown_where_the_model_sees_it(visit: Visits, server: Live) -> None:
    here = visit(server)
    here.search(TEXT)
    here.page.locator(".tile").first.click()
    told = explained(here, TEXT, NAME)
    chips = here.page.locator(".word")
    expect(chips).to_have_text([word["text"] for word in told["words"]])
    assert "".join(here.page.locator("#words").inner_text().split()) == "".join(told["text"].split())
    expect(here.page.locator("#heat")).to_be_hidden()
    spread = [max(word["patches"]) - sorted(word["patches"])[len(word["patches"]) // 2] for word in told["words"]]
    strong = sorted(range(len(spread)), key=lambda at: -spread[at])[:2]
    maps = {open_word(here, at) for at in strong}
    assert len(maps) == 2
    for at in strong:
        open_word(here, at)
        patches = told["words"][at]["patches"]
        best, worst = patches.index(max(patches)), patches.index(min(patches))
        middle = [
            ((place % told["columns"] + 0.5) / told["columns"], (place // told["columns"] + 0.5) / told["rows"])
            for place in (best, worst)
        ]
        assert pixel(here, *middle[0]) == pytest.approx([255, 226, 110, 128], abs=12)
        assert pixel(here, *middle[1]) == pytest.approx([14, 18, 44, 150], abs=12)
        expect(here.page.locator("#legend")).to_contain_text(f"{max(patches):.2f}")
    chips.nth(strong[1]).click()  # once more: it goes
    here.page.mouse.move(1, 1)
    expect(here.page.locator("#heat")).to_be_hidden()
    assert here.complaints == []


def test_the_heat_map_lies_on_what_the_model_sees_of_a_wide_picture(visit: Visits, server: Live) -> None:
    here, text = visit(server), "🎉🎉 a wide, grey gradient"
    told = explained(here, text, "wide.png")
    here.page.goto(f"{server.address}#q=🎉🎉 a wide, grey gradient&open={told['id']}")
    if here.page.locator("#viewer").is_hidden():  # not among the first
        here.page.reload()
    open_word(here, len(told["words"]) - 1)
    assert "".join(here.page.locator("#words").inner_text().split()) == "".join(text.split())
    expect(here.page.locator("#viewer-folder")).to_have_text("folder/")
    picture, heat = (here.page.locator(name).bounding_box() for name in ("#viewer-picture", "#heat"))
    assert picture is not None
    assert heat is not None
    assert picture["width"] / picture["height"] == pytest.approx(WIDE[0] / WIDE[1], rel=0.01)
    left, _, right, _ = told["box"]
    assert right - left < 0.5
    assert heat["x"] == pytest.approx(picture["x"] + left * picture["width"], abs=1)
    assert heat["width"] == pytest.approx((right - left) * picture["width"], abs=1)
    assert (heat["y"], heat["height"]) == pytest.approx((picture["y"], picture["height"]), abs=1)


def test_near_twins_stand_side_by_side_with_what_separates_them(visit: Visits, server: Live) -> None:
    here = visit(server)
    here.search(TEXT)
    answer = here.api("search", text=TEXT, k=24)
    group, band = answer["groups"][0], here.page.locator(".band").first
    tiles = band.locator(".tile")
    assert [int(tile.get_attribute("data-id") or 0) for tile in tiles.all()] == group["ids"]
    sizes = [picture.bounding_box() or {} for picture in band.locator(".picture").all()]
    assert len({(round(size["y"]), round(size["width"]), round(size["height"])) for size in sizes}) == 1
    expected = [piece for caption in group["captions"] for piece, highlighted in caption["pieces"] if highlighted]
    assert expected
    assert band.locator("mark").all_inner_texts() == expected
    band.get_by_role("button", name="Whole captions").click()
    said = ["".join(piece for piece, _ in caption["pieces"]) for caption in group["captions"]]
    assert band.locator(".twin-caption").all_inner_texts() == said
    told = here.api("separate", text=TEXT, ids=group["ids"])["separators"]
    here.page.route("**/api/separate", lambda route: route.fulfill(status=500, json={"error": "it broke"}))
    band.get_by_role("button", name="What separates them").click()
    expect(band.locator(".apart")).to_contain_text("It broke")
    here.page.unroute("**/api/separate")
    band.get_by_role("button", name="Try again").click()
    rows = band.locator(".apart tbody tr")
    expect(rows.locator("th")).to_have_text([one["word"] for one in told])
    assert rows.locator("td").all_inner_texts() == [f"{value:.2f}" for one in told for value in one["scores"]]
    best = [place == one["scores"].index(max(one["scores"])) for one in told for place in range(len(one["scores"]))]
    assert rows.locator("td").evaluate_all("cells => cells.map(cell => cell.className === 'best')") == best
    tiles.nth(1).click()
    here.page.locator(".twin").first.click()
    expect(here.page.locator("#viewer-name")).to_have_text(NAME)
    expect(here.page.locator(".twin").first).to_have_attribute("aria-current", "true")


def test_similar_pictures_are_found_from_an_open_one(visit: Visits, server: Live) -> None:
    here = visit(server)
    here.search(TEXT)
    here.page.locator(".tile").nth(1).click()
    name = here.page.locator("#viewer-name").inner_text()
    here.page.click("#similar")
    expect(here.page.locator("#chip-name")).to_have_text(name)
    expect(here.page.locator("#viewer")).to_be_hidden()
    assert here.first() == name
    here.page.locator(".tile").first.click()
    expect(here.page.locator("#words-part")).to_be_hidden()  # there are no words
    here.page.go_back()
    here.page.go_back()
    expect(here.page.locator("#viewer-name")).to_have_text(name)
    assert here.complaints == []


def test_all_of_it_is_done_without_a_mouse(visit: Visits, server: Live) -> None:
    here = visit(server)
    keys = here.page.keyboard
    keys.press("?")
    expect(here.page.locator("#help")).to_be_visible()
    keys.press("Escape")
    keys.press("/")
    expect(here.page.locator("#box")).to_be_focused()
    keys.insert_text(TEXT)
    keys.type("/?")
    keys.press("Enter")
    here.settle()
    assert here.page.input_value("#box") == f"{TEXT}/?"
    keys.press("ArrowDown")
    tiles = here.page.locator(".tile")
    expect(tiles.first).to_be_focused()
    keys.press("ArrowRight")
    expect(tiles.nth(1)).to_be_focused()
    keys.press("ArrowDown")
    lower = here.page.evaluate("document.activeElement.getBoundingClientRect().top")
    assert lower > (tiles.nth(1).bounding_box() or {})["y"]
    keys.press("ArrowUp")
    keys.press("Home")
    expect(tiles.first).to_be_focused()
    keys.press("Enter")
    expect(here.page.locator(".word").first).to_be_visible()
    for _ in range(30):
        if here.page.evaluate("document.activeElement.classList.contains('word')"):
            break
        keys.press("Tab")
    expect(here.page.locator(".word").first).to_have_attribute("aria-pressed", "true")
    keys.press("ArrowRight")
    keys.press("ArrowDown")  # the same word in the next picture
    expect(here.page.locator("#viewer-place")).to_contain_text("2 of")
    expect(here.page.locator(".word").nth(1)).to_be_focused()
    expect(here.page.locator("#heat")).to_be_visible()
    keys.press("Escape")
    expect(tiles.nth(1)).to_be_focused()
    keys.press("Home")
    keys.press("ArrowUp")
    expect(here.page.locator("#box")).to_be_focused()
    assert here.complaints == []


def test_names_and_captions_stay_text(visit: Visits, server: Live) -> None:
    here = visit(server, width=320)
    here.search(EVIL)
    here.until("scrollTo(0, 1e6), document.querySelectorAll('.tile').length === 36")
    for number, text in enumerate((EVIL, f"{ENDLESS} {EVIL}", ARABIC)):
        expect(here.page.locator(".tile-caption", has_text=text).first).to_be_attached()
        expect(here.page.locator(".tile-line", has_text=f"{number}.jpg")).to_be_attached()
    assert here.page.evaluate(OUTSIDE) == []
    here.page.evaluate("scrollTo(0, 0)")
    here.page.check("input[value=captions]", force=True)
    for text in (EVIL, f"{ENDLESS} {EVIL}", ARABIC):
        here.search(text)
        expect(here.page.locator(".caption-text").first).to_have_text(text)
        assert here.page.evaluate(OUTSIDE) == []
        here.page.locator(".tile").first.click()
        expect(here.page.locator("#viewer-captions")).to_contain_text(text)
        expect(here.page.locator(".word").first).to_be_visible()
        expect(here.page.locator("#original")).to_be_hidden()  # a scene of no file
        expect(here.page.locator("#words-hint")).to_contain_text("thumbnail")
        assert here.page.evaluate(OUTSIDE) == []
        here.page.keyboard.press("Escape")
        here.until("!document.querySelector('#viewer').open && history.state?.opened !== true")
    here.page.locator(".tile").first.click()
    here.page.click("#similar")
    expect(here.page.locator("#chip-name")).to_contain_text(ARABIC)
    assert here.page.evaluate(OUTSIDE) == []
    assert here.page.locator("img[src=x], main script").count() == 0
    assert "owned" not in here.page.title()
    assert [text for text in here.complaints if "404" not in text] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_has_room_and_contrast_for_all_of_it(visit: Visits, server: Live, scheme: str) -> None:
    here = visit(server, width=320, phone=True, scheme=scheme)
    stages = []

    def look() -> None:
        assert here.page.evaluate("document.documentElement.scrollWidth") == 320
        assert here.page.evaluate(OUTSIDE) == []
        assert here.page.evaluate(SMALL) == []
        found = here.page.evaluate(CONTRASTS)
        assert len(found) > 10
        assert [one for one in found if one[0] < 4.5] == []
        stages.append(len(found))

    expect(here.page.locator("#footer")).not_to_be_empty()
    look()
    here.page.fill("#box", TEXT)
    here.page.tap("#submit")
    here.settle()
    here.page.get_by_role("button", name="What separates them").first.tap()
    expect(here.page.locator(".apart td").first).to_be_visible()
    look()
    here.page.locator(".tile").first.tap()
    here.page.locator(".word").nth(3).tap()
    expect(here.page.locator("#heat")).to_be_visible()
    look()
    box = here.page.locator("#viewer").bounding_box()
    assert box is not None
    assert (box["width"], box["height"]) == (320, 800)
    here.page.tap("#viewer-close")
    here.page.locator("#find label").last.tap()
    expect(here.page.locator(".caption-result").first).to_be_visible()
    look()
    luminance = here.page.evaluate(
        "getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/g).map(Number)"
    )
    assert (math.fsum(luminance) > 600) == (scheme == "light")
    assert here.complaints == []

"""The page in a real browser: searching by words and pictures, what is found, and what is said when it fails."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from page_server import Visit, Visits, page_index, scenes, visits
from playwright.sync_api import Locator, Page, Route, expect
from serve_helpers import Live, live
from small_index import bundled, small_index

# Scenes that the bundled model finds first, with a lead of 0.01 or more, and the captions of which it finds.
TEXT, OTHER = scenes()[15].captions[0], scenes()[17].captions[0]
NAME, OTHER_NAME = "park-validation-0-3-3.png", "park-validation-0-4-1.png"
LIMIT, TEXT_LIMIT, UPLOAD_LIMIT = 30, 1500, 100_000

# A file that is dragged over the page and dropped, or pasted into it.
GIVE = """([how, name, type, text]) => {
  const given = new DataTransfer();
  given.items.add(new File([Uint8Array.from(atob(text), c => c.charCodeAt(0))], name, {type}));
  const send = event => document.body.dispatchEvent(event);
  if (how === "paste") return send(new ClipboardEvent("paste", {clipboardData: given, bubbles: true}));
  const drag = kind => send(new DragEvent(kind, {dataTransfer: given, bubbles: true, cancelable: true}));
  drag("dragover");
  const covered = document.getElementById("drop").matches(":popover-open");
  drag("drop");
  return covered && !document.getElementById("drop").matches(":popover-open");
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    index = page_index(tmp_path_factory)
    with live(index, max_k=LIMIT, max_text=TEXT_LIMIT, max_upload=UPLOAD_LIMIT) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Visits]:
    with visits() as opened:
        yield opened


@pytest.fixture
def visit(browser: Visits) -> Iterator[Visits]:
    yield browser
    browser.close()


def picture(server: Live, name: str = NAME) -> Path:
    return server.options.index.parent / "pictures" / name


def give(page: Page, how: str, content: bytes, name: str = "query.png", kind: str = "image/png") -> bool:
    return page.evaluate(GIVE, [how, name, kind, base64.b64encode(content).decode()])


def shown_tiles(here: Visit) -> list[Locator]:
    return here.page.locator(".tile").all()


def busy(route: Route) -> None:
    route.fulfill(status=503, headers={"Retry-After": "0"}, json={"error": "others are being answered"})


def test_a_first_visit_says_what_can_be_asked_and_of_how_much(visit: Visits, server: Live) -> None:
    here = visit(server)
    expect(here.page.locator("#welcome-count")).to_contain_text("36 pictures")
    expect(here.page.locator("#index-name")).to_have_text("Park pictures")
    assert here.page.title() == "Find a picture · Park pictures"
    here.page.click("#examples")
    here.settle()
    assert here.page.locator(".tile").count() >= 24
    assert here.page.input_value("#box").startswith("Two people")
    assert here.complaints == []


def test_a_description_finds_its_scene_and_stays_in_the_address(visit: Visits, server: Live) -> None:
    here = visit(server)
    here.page.fill("#box", "first line")
    here.page.press("#box", "Shift+Enter")
    assert "\n" in here.page.input_value("#box")
    here.search(TEXT)
    assert here.first() == NAME
    answer = here.api("search", text=TEXT, k=24)
    scores = {str(found["id"]): f"{found['score']:.2f}" for found in answer["results"]}
    shown = {tile.get_attribute("data-id"): tile.locator(".score").inner_text() for tile in shown_tiles(here)}
    assert shown == scores
    here.page.check("#rerank", force=True)
    expect(here.page.locator("#found-legend")).to_contain_text("words and parts")
    closely = here.api("search", text=TEXT, k=24, rerank=True)["results"]
    tokens = {tile.get_attribute("data-id"): tile.locator(".score").inner_text() for tile in shown_tiles(here)}
    assert tokens == {str(found["id"]): f"{found['tokens']:.2f}".replace("-", "−") for found in closely}
    here.page.go_back()
    expect(here.page.locator("#rerank")).not_to_be_checked()
    here.search(OTHER)
    assert here.first() == OTHER_NAME
    assert here.page.title().startswith(OTHER[:40])
    asked = len(here.requests)
    here.page.go_back()
    here.settle()
    assert (here.page.input_value("#box"), here.first()) == (TEXT, NAME)
    assert not any(url.endswith("/api/search") for url in here.requests[asked:])  # it was remembered
    here.page.reload()
    here.settle()
    assert (here.page.input_value("#box"), here.first()) == (TEXT, NAME)
    here.page.go_forward()
    here.settle()
    assert here.first() == OTHER_NAME
    assert here.complaints == []


def test_more_comes_with_scrolling_and_nothing_jumps(visit: Visits, server: Live) -> None:
    here, held = visit(server), []
    here.page.route("**/thumbnail", lambda route: held.append(route))
    places = "[...document.querySelectorAll('.tile')].slice(0, 20).map(t => JSON.stringify(t.getBoundingClientRect()))"
    here.search(TEXT)
    here.until("document.querySelectorAll('.tile').length === 24")
    before = here.page.evaluate(places)
    for route in held:
        route.continue_()
    here.page.unroute("**/thumbnail")
    here.until("document.querySelector('.tile img').naturalWidth > 0")
    assert here.page.evaluate(places) == before
    images = here.page.locator(".tile img")
    assert {image.get_attribute("loading") for image in images.all()} == {"lazy"}
    here.page.mouse.wheel(0, 100_000)
    here.until(f"document.querySelectorAll('.tile').length === {LIMIT}")
    expect(here.page.locator("#tail")).to_contain_text("6 more are not shown")
    expect(here.page.locator("#compact")).to_be_visible()
    here.page.click("#compact")
    expect(here.page.locator("#box")).to_be_focused()
    assert here.complaints == []


def test_pictures_are_dropped_pasted_and_chosen(visit: Visits, server: Live) -> None:
    here, content = visit(server), picture(server).read_bytes()
    assert give(here.page, "drop", content)
    here.settle()
    assert here.first() == NAME
    expect(here.page.locator("#chip-name")).to_have_text("query.png")
    here.until("document.getElementById('chip-picture').naturalWidth === 192")
    expect(here.page.locator(".tile .score").first).to_have_text("1.00")
    give(here.page, "paste", picture(server, OTHER_NAME).read_bytes())
    here.until("document.querySelector('.tile-name').textContent === " + repr(OTHER_NAME))
    here.page.set_input_files("#file", picture(server))
    here.until("document.querySelector('.tile-name').textContent === " + repr(NAME))
    here.page.check("input[value=captions]", force=True)
    expect(here.page.locator(".caption-text").first).to_have_text(TEXT)
    here.page.locator(".small-tile").first.click()
    expect(here.page.locator("#viewer-name")).to_have_text(NAME)
    here.page.keyboard.press("Escape")
    here.page.click("#chip-remove")
    expect(here.page.locator("#welcome")).to_be_visible()
    expect(here.page.locator("#box")).to_be_focused()
    assert here.complaints == []


def test_pictures_that_were_chosen_are_kept_for_the_way_back_but_not_all_of_them(visit: Visits, server: Live) -> None:
    here, content = visit(server), picture(server).read_bytes()
    for number in range(9):
        give(here.page, "drop", content, f"{number}.png")
        expect(here.page.locator("#chip-name")).to_have_text(f"{number}.png")
        here.settle()
    for number in range(7, 0, -1):
        here.page.go_back()
        expect(here.page.locator("#chip-name")).to_have_text(f"{number}.png")
        here.until("document.getElementById('chip-picture').naturalWidth === 192")
    here.page.go_back()
    expect(here.page.locator("#notice")).to_contain_text("choose it once more")


def test_a_picture_that_is_none_or_too_large_is_not_sent(visit: Visits, server: Live) -> None:
    here = visit(server)
    expect(here.page.locator("#index-name")).not_to_be_empty()
    give(here.page, "drop", b"words", "notes.txt", "text/plain")
    expect(here.page.locator("#composer-note")).to_contain_text("no picture")
    give(here.page, "drop", bytes(UPLOAD_LIMIT + 1))
    expect(here.page.locator("#composer-note")).to_contain_text("0.1 MB")
    assert not any("/api/search" in url for url in here.requests)
    give(here.page, "drop", b"no PNG at all")
    expect(here.page.locator("#notice p")).to_be_visible()
    assert "{" not in here.page.inner_text("#notice")
    expect(here.page.locator("#notice button")).to_have_count(0)  # it would fail again
    here.page.reload()
    expect(here.page.locator("#notice")).to_contain_text("choose it once more")
    assert "#" not in here.page.url


def test_characters_are_counted_near_the_limit_as_the_server_counts(visit: Visits, server: Live) -> None:
    here, note = visit(server), "#composer-note"
    expect(here.page.locator("#index-name")).not_to_be_empty()
    here.page.fill("#box", "🎉" * 500)
    expect(here.page.locator(note)).to_have_text("")
    here.page.fill("#box", "🎉" * (TEXT_LIMIT - 7))
    expect(here.page.locator(note)).to_have_text("7 characters left")
    here.page.fill("#box", "a tree " * 250)
    expect(here.page.locator(note)).to_contain_text("249 characters too many")
    expect(here.page.locator("#submit")).to_be_disabled()
    here.page.press("#box", "Enter")
    here.page.fill("#box", "a red tree " * 130)
    expect(here.page.locator("#submit")).to_be_enabled()
    here.page.press("#box", "Enter")
    expect(here.page.locator(note)).to_contain_text("longer than the model reads")
    assert sum(url.endswith("/api/search") for url in here.requests) == 1


def test_a_new_search_gives_up_the_one_before(visit: Visits, server: Live) -> None:
    here, held = visit(server), []

    def hold(route: Route) -> None:
        if (route.request.post_data_json or {}).get("text") == TEXT:
            held.append(route)
        else:
            route.continue_()

    here.page.route("**/api/search", hold)
    here.page.fill("#box", TEXT)
    here.page.press("#box", "Enter")
    expect(here.page.locator(".bone").first).to_be_attached()
    here.search(OTHER)
    assert here.first() == OTHER_NAME
    assert [request.post_data_json["text"] for request in here.gone] == [TEXT]
    held[0].fulfill(json=here.api("search", text=TEXT, k=24))
    here.page.wait_for_timeout(50)
    assert here.first() == OTHER_NAME


def test_a_busy_server_is_asked_again_and_then_by_hand(visit: Visits, server: Live) -> None:
    here, tries = visit(server), []

    def twice(route: Route) -> None:
        tries.append(route)
        if len(tries) <= 2:
            busy(route)
        else:
            route.continue_()

    here.page.route("**/api/search", twice)
    here.search(TEXT)
    assert (len(tries), here.first()) == (3, NAME)
    here.page.unroute("**/api/search")
    here.page.route("**/api/search", busy)
    here.page.fill("#box", OTHER)
    here.page.press("#box", "Enter")
    expect(here.page.get_by_role("alert")).to_contain_text("Others are being answered")
    here.page.unroute("**/api/search")
    here.page.get_by_role("button", name="Try again").click()
    here.settle()
    assert here.first() == OTHER_NAME
    expect(here.page.locator("#notice")).to_be_hidden()


def test_what_is_not_the_servers_json_is_never_shown(visit: Visits, server: Live) -> None:
    here = visit(server)
    for status, again in ((502, 1), (422, 0)):
        here.page.unroute_all()
        here.page.route("**/api/search", partial(Route.fulfill, status=status, body="<html>{'detail': 1}</html>"))
        here.page.fill("#box", TEXT)
        here.page.press("#box", "Enter")
        expect(here.page.locator("#notice p")).to_have_text("The server could not answer this.")
        expect(here.page.locator("#notice button")).to_have_count(again)


def test_what_has_no_word_finds_nothing_and_the_next_search_does(visit: Visits, server: Live) -> None:
    here = visit(server)
    here.page.fill("#box", "\0")
    here.page.press("#box", "Enter")
    expect(here.page.locator("#notice")).to_contain_text("Nothing was found for this")
    expect(here.page.locator("#found")).to_be_hidden()
    here.search(TEXT)
    expect(here.page.locator("#notice")).to_be_hidden()
    expect(here.page.locator("#found")).to_be_visible()
    assert here.complaints == []


def test_an_empty_index_is_said_to_be_empty(visit: Visits, tmp_path: Path) -> None:
    small_index(tmp_path / "empty.hnc", bundled(), [], files=tmp_path)
    with live(tmp_path / "empty.hnc") as server:
        here = visit(server)
        expect(here.page.locator("#welcome-count")).to_contain_text("no pictures yet")
        expect(here.page.locator("#find")).to_be_hidden()
        here.search(TEXT)
        expect(here.page.locator("#found")).to_be_hidden()
        expect(here.page.locator("#notice")).to_contain_text("no pictures yet")
        assert here.complaints == []
        visit.close()


def test_an_index_that_grows_is_counted_anew(visit: Visits, tmp_path: Path) -> None:
    path = tmp_path / "growing.hnc"
    small_index(path, bundled(), scenes()[:3])
    with live(path) as server:
        here = visit(server)
        expect(here.page.locator("#footer")).to_contain_text("3 pictures")
        small_index(path, bundled(), scenes()[3:28])
        server.service.keeper.look()
        here.search(TEXT)
        expect(here.page.locator("#footer")).to_contain_text("28 pictures")
        here.page.mouse.wheel(0, 100_000)
        here.until("document.querySelectorAll('.tile').length === 28")
        asked = sum(url.endswith("/api/index") for url in here.requests)
        here.search(OTHER)  # fits to what is known
        assert sum(url.endswith("/api/index") for url in here.requests) == asked
        assert [text for text in here.complaints if "404" not in text] == []
        visit.close()


def test_a_server_that_stops_is_missed_and_found_again(visit: Visits, server: Live) -> None:
    own = Live(server.options.index)
    own.start()
    here = visit(own)
    here.search(TEXT)
    own.stop()
    here.page.fill("#box", OTHER)
    here.page.press("#box", "Enter")
    expect(here.page.get_by_role("alert")).to_contain_text("cannot be reached")
    expect(here.page.locator(".tile")).to_have_count(0)
    own.start(load=False)
    try:
        other = visit(own)
        expect(other.page.locator("#notice")).to_contain_text("still being loaded")
        other.page.fill("#box", TEXT)
        other.page.press("#box", "Enter")
        expect(other.page.locator(".bone").first).to_be_attached()
        assert not any(url.endswith("/api/search") for url in other.requests)
        own.load()
        here.page.get_by_role("button", name="Try again").click()
        here.settle()
        assert here.first() == OTHER_NAME
        other.settle()
        assert other.first() == NAME
        expect(other.page.locator("#notice")).to_be_hidden()
        visit.close()
    finally:
        own.stop()


def test_a_locked_server_is_opened_with_its_token(visit: Visits, server: Live) -> None:
    with live(server.options.index, token="sesame") as locked:
        here = visit(locked, at="#q=a+tree")
        expect(here.page.get_by_role("heading", name="asks for a token")).to_be_visible()
        here.page.fill("#token", "wrong")
        here.page.press("#token", "Enter")
        expect(here.page.get_by_role("alert")).to_have_text("This is not the token.")
        here.page.keyboard.press("Escape")
        expect(here.page.get_by_role("alert")).to_contain_text("locked")
        here.page.get_by_role("button", name="Try again").click()
        here.page.fill("#token", "sesame")
        here.page.press("#token", "Enter")
        here.until("document.querySelector('.tile img')?.naturalWidth > 0")  # pictures need the cookie
        here.page.reload()
        here.settle()
        expect(here.page.locator("#unlock")).to_be_hidden()
        here.page.context.clear_cookies()
        here.page.route("**/api/session", lambda route: route.fulfill(status=204))  # a cookie that is not kept
        here.page.fill("#box", TEXT)
        here.page.press("#box", "Enter")
        here.page.fill("#token", "sesame")
        here.page.press("#token", "Enter")
        expect(here.page.locator("#notice")).to_contain_text("does not keep the cookie")
        expect(here.page.locator("#unlock")).to_be_hidden()
        visit.close()

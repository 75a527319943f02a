"""The report in a real browser: from disk, on a wide screen and on a phone, light and dark, also with hostile text."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from playwright.sync_api import Browser, Page

import browser as browser_module
from browser import find_browser, open_browser
from hnclip.analysis.report import Companions, Drawing, Findings, Gap, Section, Table, Text, write_report
from hnclip.analysis.shown import CompanionRow, Finding, Shown

WIDE, PHONE = 1280, 390
VARIANTS = [(width, scheme) for width in (WIDE, PHONE) for scheme in ("light", "dark")]
EVIL = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\"> ' \" & {}"
WORD = "w" * 10_000
ARABIC, CHINESE = "قارب أحمر عند الرصيف الخشبي", "一艘红色的小船停在木码头旁边"

# What reaches over the right edge of the window, and cells and captions that are wider than their column.
OUTSIDE = """() => [...document.querySelectorAll("body *")].filter(e => e.closest(".scroll")
  ? e.matches("th, td, .shown p") && e.scrollWidth > e.clientWidth + 1
  : e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 80))"""

# The contrast of each piece of visible text with the nearest opaque background behind it, by WCAG 2.2.
CONTRASTS = """() => {
  const parts = colour => {
    const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number);
    return {rgb: [r, g, b], a};
  };
  const luminance = rgb => {
    const [r, g, b] = rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = element => {
    for (let e = element; e; e = e.parentElement) {
      const {rgb, a} = parts(getComputedStyle(e).backgroundColor);
      if (a === 1) return rgb;
      if (a !== 0) throw new Error(`half transparent background of ${e.outerHTML.slice(0, 80)}`);
    }
    throw new Error("the page has no background");
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim(), element = walker.currentNode.parentElement;
    if (!text || !element.checkVisibility()) continue;
    const ink = luminance(parts(getComputedStyle(element).color).rgb), back = luminance(ground(element));
    const ratio = (Math.max(ink, back) + 0.05) / (Math.min(ink, back) + 0.05);
    found.push([element.tagName.toLowerCase(), text.slice(0, 40), ratio]);
  }
  return found;
}"""


@dataclass
class Visit:
    """A page that was opened, and what happened on the way."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


Open = Callable[..., Visit]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def visit(chromium: Browser) -> Iterator[Open]:
    contexts = []

    def open_page(path: Path, width: int = WIDE, scheme: str = "light") -> Visit:
        context = chromium.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion="reduce"
        )
        contexts.append(context)
        found = Visit(context.new_page())
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.on("console", lambda message: found.complaints.append(message.text))
        found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
        found.page.on("dialog", lambda dialog: found.complaints.append(dialog.message))
        found.page.goto(path.as_uri())
        return found

    yield open_page
    for context in contexts:
        context.close()


def until(page: Page, condition: str) -> None:
    """Wait for it. Playwright's own way evaluates text inside the page, which the page's policy forbids."""
    for _ in range(250):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(20)
    pytest.fail(f"not within 5 seconds: {condition}")


def drawing(name: str) -> Drawing:
    figure = Figure(figsize=(9, 3), layout="constrained")
    panels = figure.subplots(1, 2)
    panels[0].plot([0, 1, 4, 9])
    panels[1].imshow(np.eye(8))
    return Drawing(name, figure, "Left: squares. Right: the unit matrix.")


def photo(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (240, 400, 3), dtype=np.uint8))


def shown(label: str, picture: Image.Image | None = None) -> Shown:
    pieces = ("a long ", "wooden pier ", "reaches into a calm ", "grey lake ", "under a low and ", "overcast sky")
    return Shown(label, tuple((piece, index % 2 > 0) for index, piece in enumerate(pieces)), picture)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of everything."""
    findings = [
        Finding("act", "Captions are near-duplicates", "0.913", "Companions are close.", "Use the margin."),
        Finding("note", "Sampled, not exact", "± 0.2 %", "Shares come from random pairs.", "Nothing."),
        Finding("good", "No picture is missing", "0 of 5,000", "All can be opened.", ""),
    ]
    table = [["model", *[f"R@{k} text→image" for k in (1, 5, 10, 50)]], ["HN-CLIP", *["41.3 [39.0, 43.5]"] * 4]]
    companions = (
        shown("cosine 0.971", photo(1)),
        shown("cosine 0.958", Image.new("RGB", (9, 9), "teal")),
        shown("0.9"),
    )
    return write_report(
        tmp_path_factory.mktemp("report"),
        title="Caption geometry",
        summary=["What was found.", "And what to do."],
        sections=[
            Section("Findings", [Findings(findings)]),
            Section("Similarity", [Text("Every caption was compared with every other."), drawing("Similarity")]),
            Section(
                "Recall", [Table(table, "On the test split."), Table([["text", "n"], ["a cat on a mat " * 9, "1"]])]
            ),
            Section(
                "Near-duplicates", [Companions([CompanionRow(shown("caption 7", photo(0)), companions)], "By cosine.")]
            ),
            Section("Gradients", [Gap("the model has no image tower")]),
        ],
        data={},
    )


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text that would run, overflow, or turn the page around, and rows in which things are missing."""
    texts = (EVIL, WORD, ARABIC, CHINESE)
    row = CompanionRow(
        Shown(EVIL, ((EVIL, True),)),
        tuple(Shown(text, ((text, False), (text, True)), Image.new("RGB", (4000, 1))) for text in texts[1:]),
    )
    empty = CompanionRow(Shown("", ()), ())
    return write_report(
        tmp_path_factory.mktemp("hostile"),
        title=EVIL + WORD,
        summary=texts,
        sections=[
            *[Section(text, [Text(text), Gap(text)]) for text in texts],
            Section("Tables", [Table([[*texts], [*texts]], WORD), Table([["head only"]]), Table([[WORD], [""]])]),
            Section("Findings", [Findings([Finding("act", *[text] * 4) for text in texts]), Findings([])]),
            Section("Rows", [Companions([row, empty], WORD), Companions([])]),
            Section("Figure", [Drawing(EVIL, drawing("").figure, WORD)]),
            Section("Nothing", []),
        ],
        data={},
    )


@pytest.mark.parametrize(("width", "scheme"), VARIANTS)
def test_a_screenshot_shows_the_report(report, visit, tmp_path, width, scheme):
    found = visit(report, width, scheme)
    found.page.screenshot(path=tmp_path / "report.png", full_page=True)
    picture = Image.open(tmp_path / "report.png").convert("RGB")
    assert picture.size == (width, found.page.evaluate("document.documentElement.scrollHeight"))
    assert picture.height > 1000
    corner = picture.getpixel((1, 1))
    assert min(corner) > 230 if scheme == "light" else max(corner) < 40
    pixels = np.asarray(picture)
    background = (np.abs(pixels.astype(int) - corner).max(2) < 3).mean()
    assert 0.1 < background < 0.95
    assert len(np.unique(pixels @ [65536, 256, 1])) > 1000  # the photos and the figure are on it
    for top in range(0, picture.height - 500, 500):
        assert pixels[top : top + 500].std() > 3, f"blank from {top}"


@pytest.mark.parametrize(("width", "scheme"), VARIANTS)
@pytest.mark.parametrize("kind", ["report", "hostile"])
def test_the_page_holds_in_every_window(kind, visit, request, width, scheme):
    path = request.getfixturevalue(kind)
    found = visit(path, width, scheme)
    assert [url for url in found.requests if not url.startswith("data:")] == [path.as_uri()]
    assert found.complaints == []
    assert found.page.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [width, width]
    assert found.page.evaluate(OUTSIDE) == []
    images = found.page.evaluate("[...document.images].map(i => [i.complete, i.naturalWidth, i.alt])")
    assert len(images) == 4
    assert all(complete and size > 0 and alt.strip() for complete, size, alt in images)
    contrasts = found.page.evaluate(CONTRASTS)
    assert {"h1", "p", "mark", "th", "td", "figcaption", "a", "footer"} <= {tag for tag, _, _ in contrasts}
    assert [(tag, text, ratio) for tag, text, ratio in contrasts if ratio < 4.5] == []


def test_the_contrast_is_that_of_the_style(report, visit):
    page = visit(report).page
    page.add_style_tag(content=":root { --mark-ink: #777777 !important; --mark: #ffffff !important; }")
    ratios = {tag: ratio for tag, _, ratio in page.evaluate(CONTRASTS)}
    assert ratios["mark"] == pytest.approx(4.48, abs=0.01)


def test_the_policy_blocks_what_a_page_could_ask_for(report, visit, tmp_path):
    """Also shows that a request or a complaint would have been seen."""
    text = report.read_text(encoding="utf-8")
    (tmp_path / "other.png").write_bytes((report.parent / "similarity.png").read_bytes())
    added = '<img alt="x" src="other.png"><script>document.title = "owned"</script><main>'
    (tmp_path / "asks.html").write_text(text.replace("<main>", added), encoding="utf-8")
    found = visit(tmp_path / "asks.html")
    assert len(found.complaints) == 2
    assert all("Content Security Policy" in complaint for complaint in found.complaints)
    assert found.page.title() == "Caption geometry"
    assert found.page.evaluate("document.images[0].naturalWidth") == 0

    start, end = text.index("<meta http-equiv"), text.index("<title>")
    (tmp_path / "free.html").write_text((text[:start] + text[end:]).replace("<main>", added), encoding="utf-8")
    found = visit(tmp_path / "free.html")
    assert (tmp_path / "other.png").as_uri() in found.requests
    assert found.page.title() == "owned"


def test_hostile_text_is_shown_as_it_is(hostile, visit):
    page = visit(hostile).page
    assert page.title() == page.text_content("h1") == EVIL + WORD
    assert page.evaluate("document.scripts.length") == 0
    assert page.locator("h2").all_text_contents()[:4] == [EVIL, WORD, ARABIC, CHINESE]
    assert page.locator(".shown mark").all_text_contents() == [EVIL, ARABIC, CHINESE]  # of the long word the end is cut
    directions = page.locator(".shown p[dir]").evaluate_all("all => all.map(p => getComputedStyle(p).direction)")
    assert directions == ["ltr", "ltr", "rtl", "ltr"]
    assert page.get_by_text("no picture").count() == 2
    assert page.locator(".gap").count() == 4 + 1 + 1 + 1 + 1 + 2  # texts, table, findings, companions, rows, pictures


def test_boxes_scroll_by_keyboard(report, visit):
    page = visit(report, PHONE).page
    page.locator("nav a").last.focus()
    names = page.locator(".scroll").evaluate_all("all => all.map(box => box.getAttribute('aria-label'))")
    assert len(names) == 4
    scrolled = []
    for name in names:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == name
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        if page.evaluate("document.activeElement.scrollWidth > document.activeElement.clientWidth"):
            page.keyboard.press("ArrowRight")
            until(page, "document.activeElement.scrollLeft > 0")
            scrolled.append(name)
    assert scrolled == ["Similarity", "Recall", "Near-duplicates, row 1 of 1"]  # the table of texts fits


def test_contents_are_large_enough_for_a_thumb_and_lead_there(report, visit):
    page = visit(report, PHONE).page
    heights = page.locator("nav a").evaluate_all("all => all.map(link => link.getBoundingClientRect().height)")
    assert len(heights) == 5
    assert min(heights) >= 44
    page.locator("nav a").nth(1).click()
    until(page, "Math.abs(document.querySelector('#section-2').getBoundingClientRect().top) < 40")


def test_contents_stay_in_sight_on_a_wide_screen(report, visit):
    page = visit(report).page
    page.evaluate("scrollTo({top: 900, behavior: 'instant'})")
    assert 0 <= page.locator("nav").bounding_box()["y"] < 100
    assert page.locator("nav").bounding_box()["x"] < page.locator("main").bounding_box()["x"] - 150


def test_figures_do_not_glare_in_the_dark(report, visit, tmp_path):
    """White paper becomes grey, and dark lines on it stay dark."""
    brightest = {}
    for scheme in ("light", "dark"):
        page = visit(report, WIDE, scheme).page
        page.locator(".paper").screenshot(path=tmp_path / f"{scheme}.png")
        grey = np.asarray(Image.open(tmp_path / f"{scheme}.png").convert("L"))
        brightest[scheme] = np.median(grey)
        assert grey.min() < 40
    assert brightest["light"] == 255
    assert 150 < brightest["dark"] < 210


def test_paper_gets_everything_and_no_dark_ink(report, visit):
    page = visit(report, 560, "dark").page
    page.emulate_media(media="print", color_scheme="dark")
    corner = Image.open(io.BytesIO(page.screenshot())).convert("RGB").getpixel((559, 1))
    assert corner == (255, 255, 255)
    assert min(ratio for _, _, ratio in page.evaluate(CONTRASTS)) >= 4.5
    assert page.locator("nav").is_hidden()
    overflows = page.locator(".scroll").evaluate_all("all => all.map(box => getComputedStyle(box).overflowX)")
    assert overflows == ["visible"] * 4
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


class TestFindingABrowser:
    @pytest.fixture(autouse=True)
    def bare(self, monkeypatch, tmp_path):
        for name in ("HNCLIP_BROWSER", "HNCLIP_REQUIRE_BROWSER"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))

    @staticmethod
    @contextmanager
    def outcome(kind: type[BaseException]) -> Iterator[None]:
        with pytest.raises(kind, match=r"apt-get install chromium.*HNCLIP_BROWSER"):
            yield

    def make(self, path: Path) -> str:
        path.write_text("")
        path.chmod(0o755)
        return str(path)

    def test_none_is_a_skip_that_says_what_to_install(self):
        with self.outcome(pytest.skip.Exception):
            find_browser()

    def test_none_is_a_failure_where_one_is_required(self, monkeypatch):
        monkeypatch.setenv("HNCLIP_REQUIRE_BROWSER", "1")
        with self.outcome(pytest.fail.Exception):
            find_browser()

    @pytest.mark.parametrize("name", browser_module.NAMES)
    def test_each_name_is_found(self, tmp_path, name):
        path = self.make(tmp_path / name)
        assert find_browser() == path

    def test_a_named_one_is_taken_or_nothing(self, monkeypatch, tmp_path):
        self.make(tmp_path / "chromium")
        other = self.make(tmp_path / "other")
        monkeypatch.setenv("HNCLIP_BROWSER", other)
        assert find_browser() == other
        monkeypatch.setenv("HNCLIP_BROWSER", str(tmp_path / "missing"))
        with self.outcome(pytest.skip.Exception):
            find_browser()

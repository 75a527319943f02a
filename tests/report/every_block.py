"""A report with every kind of block, with text that means something to HTML, Markdown and LaTeX, and long words."""

from __future__ import annotations

from PIL import Image

from hnclip.report.document import (
    CaptionedImage,
    CaptionRow,
    CaptionRows,
    Figure,
    Finding,
    Findings,
    Missing,
    Report,
    Section,
    Table,
    Text,
)
from hnclip.report.run_figures import sample_efficiency_figure
from hnclip.util.tables import Marked

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)> ' \" & {{ 7 * 7 }} {best}"
LONG_WORD = "w" * 400


def caption_row() -> CaptionRow:
    def image(colour: str, width: int, height: int) -> Image.Image:
        return Image.new("RGB", (width, height), colour)

    text = (("A red bicycle leans ", False), ("against a green fence", True), (" near the canal. " * 6, False))
    return CaptionRow(
        CaptionedImage("caption", text, image("#aa3333", 320, 240)),
        (
            CaptionedImage("cosine 0.953", text, image("#33aa55", 240, 320)),
            CaptionedImage("cosine 0.934", ((LONG_WORD, False), (HOSTILE, True)), image("#3355aa", 640, 200)),
            CaptionedImage("cosine 0.921", (("一艘红色的小船停在木码头旁边", True),), None),
        ),
    )


def every_block() -> Report:
    figure = Figure(
        "efficiency",
        "R@1 over training pairs",
        lambda: sample_efficiency_figure({"InfoNCE": [(5, 20), (100, 50)], "HN-CLIP": [(5, 30), (100, 60)]}),
        "Average of both directions.",
    )
    headers = ["model", *(f"{arrow} R@{k}" for arrow in ("T→I", "I→T") for k in (1, 5, 10, 25, 50))]
    first, *row = ["30.00 [25.1, 35.2]", "50.00", "60.00", "70.00", "80.00"] * 2
    rows = [
        ["InfoNCE", Marked(first, "second"), *row],
        ["HN-CLIP", Marked(first, "best"), *row],
        [],
        ["paper, Table 1: Long-CLIP, released checkpoint", *["–"] * 10],
    ]
    spans = [("scenes/park", 5), ("scenes/street", 5)]
    table = Table(headers, rows, "Recall in percent", spans, ["The best number is {best}."])
    finding = Finding("act", "Equal captions", "12 of 340", "Two images share a caption.", "Group them by scene.")
    return Report(
        HOSTILE,
        ["What was measured, on which data, and with which model.", HOSTILE],
        [
            Section("Findings", [Findings([finding, Finding("note", HOSTILE, HOSTILE, HOSTILE, HOSTILE)])]),
            Section("Recall", [table, Text("One paragraph.", HOSTILE, LONG_WORD)]),
            Section("Words", [Table(["word", "caption"], [["boat", "a long caption " * 20], [HOSTILE, LONG_WORD]])]),
            Section("Figures", [figure, Missing("the run was not evaluated after its epochs")]),
            Section("Near-duplicates", [CaptionRows([caption_row(), caption_row()])]),
            Section("Nothing", [Table(["a", "b"], []), Findings([]), CaptionRows([])]),
        ],
        {"recall": 30.0, "name": HOSTILE},
    )

"""The page of a report, from sections of blocks, and the files that are written with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from hnclip.util.files import replace_file

from .blocks import Block, Text
from .style import STYLE

HTML, JSON = "report.html", "report.json"
FEW = 3  # sections that a reader oversees without a table of contents

# The policy forbids every request, so the page cannot come to depend on a network unnoticed.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; \
base-uri 'none'; form-action 'none'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1 dir="auto">{title}</h1>
{summary}
</header>
{contents}
<main>
{sections}
</main>
<footer>Beside this page: {beside}.</footer>
</body>
</html>
"""


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading of its own."""

    heading: str
    blocks: Sequence[Block]


def write_report(
    out: Path,
    *,
    title: str,
    summary: str | Sequence[str],
    sections: Sequence[Section],
    data: Mapping[str, Any],
) -> Path:
    """Write `report.html`, `report.json` and one PNG per drawing into `out`, and return the path of the page.

    Everything is rendered before the first file is written, and each file is replaced in one step, the page last: a
    failure leaves an older report as it was, or at worst its page with newer files beside it.

    Args:
        out: a directory, made if it does not exist.
        title, summary: plain text, like all text here; several strings are several paragraphs.
        sections: the rest of the page. More than a few are listed in a table of contents.
        data: the numbers behind the report, finite and ready for JSON.
    """
    files: dict[str, bytes] = {}
    rendered = [_section(number, section, files) for number, section in enumerate(sections, start=1)]
    page = _PAGE.format(
        title=escape(title),
        style=STYLE,
        summary=Text(*[summary] if isinstance(summary, str) else summary).html("", files),
        contents=_contents(sections) if len(sections) > FEW else "",
        sections="\n".join(rendered),
        beside=escape(", ".join([JSON, *files])),
    )
    # Captions may hold halves of characters, which UTF-8 has no bytes for; in JSON `\udc00` is such a half.
    numbers = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    files[JSON] = numbers.encode(errors="backslashreplace")
    files[HTML] = page.encode(errors="replace")
    for name, content in files.items():
        with replace_file(out / name) as partial:
            partial.write_bytes(content)
    return out / HTML


def _section(number: int, section: Section, files: dict[str, bytes]) -> str:
    blocks = "\n".join(block.html(section.heading, files) for block in section.blocks)
    heading = f'<h2 dir="auto">{escape(section.heading)}</h2>'
    return f'<section id="section-{number}">\n{heading}\n{blocks}\n</section>'


def _contents(sections: Sequence[Section]) -> str:
    items = "\n".join(
        f'<li><a href="#section-{number}" dir="auto">{escape(section.heading)}</a></li>'
        for number, section in enumerate(sections, start=1)
    )
    return f'<nav aria-label="Contents">\n<p>Contents</p>\n<ol>\n{items}\n</ol>\n</nav>'

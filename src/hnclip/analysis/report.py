"""A report as one HTML file that needs nothing else, with its figures and numbers as files beside it."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hnclip.files import replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HTML, JSON = "report.html", "report.json"
DPI = 180  # sharp on a dense screen at the full width of the page

Table = Sequence[Sequence[str]]

_STYLE = """
:root { color-scheme: light dark; --ink: #1d1f23; --quiet: #5c626b; --line: #d9dce1; --page: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6ea; --quiet: #a0a6b0; --line: #3a3f47; --page: #16181c; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 1rem/1.6 system-ui, sans-serif; }
main { max-width: 70rem; margin: 0 auto; padding: 2rem 1.25rem 3rem; overflow-wrap: break-word; }
h1 { font-size: 1.75rem; line-height: 1.25; margin: 0 0 1rem; text-wrap: balance; }
h2 { font-size: 1.15rem; line-height: 1.3; margin: 2.5rem 0 .75rem; }
p, figcaption { max-width: 44rem; margin: 0 0 .75rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem 1.5rem .4rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child { text-align: left; }
th:last-child, td:last-child { padding-right: 0; }
thead th { color: var(--quiet); font-weight: 600; border-bottom-color: var(--quiet); }
tbody th { font-weight: 400; }
figure { margin: 0; }
figure .scroll { background: #fff; border: 1px solid var(--line); border-radius: .5rem; padding: .75rem; }
img { display: block; width: 100%; min-width: 40rem; height: auto; }
figcaption, footer { color: var(--quiet); font-size: .9rem; margin: .6rem 0 0; }
footer { margin-top: 3rem; padding-top: .75rem; border-top: 1px solid var(--line); }
"""

# The policy forbids every request, so the page cannot come to depend on a network unnoticed.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<header>
<h1>{title}</h1>
{summary}
</header>
{sections}
<footer>Beside this page: its numbers in {json}, its figures as PNG files.</footer>
</main>
</body>
</html>
"""


def write_report(
    out: Path,
    *,
    title: str,
    summary: str | Sequence[str],
    tables: Mapping[str, Table],
    figures: Mapping[str, tuple[Figure, str]],
    data: Mapping[str, Any],
) -> Path:
    """Write `report.html`, `report.json` and one PNG per figure into `out`, and return the path of the page.

    Everything is rendered before the first file is written, and each file is replaced in one step, the page last: a
    failure leaves an older report as it was, or at worst its page with newer files beside it.

    Args:
        out: a directory, made if it does not exist.
        title, summary: plain text, like all text here; several strings are several paragraphs.
        tables: rows of cells by heading. The first row names the columns, the first column names the rows, and all
            others are aligned to the right, as in `text_table`.
        figures: figure and caption by heading. The heading also names the file: "First steps" is first-steps.png.
        data: the numbers behind the report, finite and ready for JSON.
    """
    pictures = {heading: _png(figure) for heading, (figure, _) in figures.items()}
    files = {_file_name(heading): png for heading, png in pictures.items()}
    if len(files) < len(pictures):
        raise ValueError(f"figures need headings that differ in more than signs and case, got {list(figures)}")
    sections = [_table_section(heading, rows) for heading, rows in tables.items()]
    sections += [_figure_section(heading, pictures[heading], caption) for heading, (_, caption) in figures.items()]
    page = _PAGE.format(
        title=escape(title),
        style=_STYLE,
        summary="\n".join(f"<p>{escape(text)}</p>" for text in ([summary] if isinstance(summary, str) else summary)),
        sections="\n".join(sections),
        json=JSON,
    )
    files[JSON] = (json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
    files[HTML] = page.encode()
    for name, content in files.items():
        with replace_file(out / name) as partial:
            partial.write_bytes(content)
    return out / HTML


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def _file_name(heading: str) -> str:
    return re.sub(r"\W+", "-", heading.lower()).strip("-") + ".png"


def _table_section(heading: str, rows: Table) -> str:
    if not rows or any(len(row) != len(rows[0]) for row in rows):
        raise ValueError(f"table {heading!r} needs a first row of column names and rows of the same length")
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    body = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows[1:]
    )
    table = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    return f"<section>\n<h2>{escape(heading)}</h2>\n{_scroll(heading, table)}\n</section>"


def _figure_section(heading: str, png: bytes, caption: str) -> str:
    image = f'<img alt="{escape(heading)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
    figure = f"<figure>\n{_scroll(heading, image)}\n<figcaption>{escape(caption)}</figcaption>\n</figure>"
    return f"<section>\n<h2>{escape(heading)}</h2>\n{figure}\n</section>"


def _scroll(heading: str, content: str) -> str:
    """A box that scrolls sideways on a narrow screen, also by keyboard."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(heading)}">\n{content}\n</div>'

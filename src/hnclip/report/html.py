"""A report as one HTML page that works offline: figures and images are inside it, and it may request nothing."""

from __future__ import annotations

import base64
import re
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape
from PIL.Image import Image

from hnclip.data.images import to_rgb
from hnclip.report.document import Report
from hnclip.util.tables import LONG_CELL, mark_of
from hnclip.util.text import Passage

THUMBNAIL = 320  # pixels of the longer side: sharp in a column of the page, small in the file
_SCREEN_DPI = 100  # an inch of a figure on the page, in CSS pixels


def render_page(report: Report) -> str:
    return _template().render(report=report)


@cache
def _template() -> Template:
    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "kind": lambda block: type(block).__name__,
        "png": lambda png: f"data:image/png;base64,{base64.b64encode(png).decode()}",
        "thumbnail": _thumbnail,
        "passage": _passage,
        "options": _options,
        "mark": mark_of,
        "is_long": lambda column: any(len(cell) > LONG_CELL for cell in column),
    }
    environment.globals |= {
        "css": Markup((here / "report.css").read_text(encoding="utf-8")),
        "screen_dpi": _SCREEN_DPI,
        "zip": zip,
    }
    return environment.get_template("report.html.j2")


def _thumbnail(image: Image) -> dict[str, Any]:
    """Address and size of a small copy, upright and on white."""
    small = to_rgb(image)
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = BytesIO()
    small.save(buffer, "WEBP", quality=85)
    address = f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"address": address, "width": small.width, "height": small.height}


def _passage(text: Passage) -> Markup:
    """Highlighted pieces marked."""
    return Markup().join(Markup("<mark>{}</mark>").format(piece) if marked else piece for piece, marked in text)


def _options(text: str) -> Markup:
    """Options of commands as code: they are to be copied, so lines do not break after their hyphens."""
    return Markup(re.sub(r"(?<!\S)--[\w.-]*\w", r"<code>\g<0></code>", str(escape(text))))

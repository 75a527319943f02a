"""The files of the page, which come with the package."""

from __future__ import annotations

from importlib.resources import files

from hnclip.search.serve.pictures import Shown, tagged

TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}


def page_files() -> dict[str, Shown]:
    """By path, all that the page is made of; no other path leads to a file."""
    found = {}
    for file in (files("hnclip.search.serve") / "page").iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in TYPES:
            found[f"/page/{file.name}"] = tagged(file.read_bytes(), TYPES[suffix])
        elif file.name == "index.html":
            found["/"] = tagged(file.read_bytes(), "text/html; charset=utf-8")
    return found

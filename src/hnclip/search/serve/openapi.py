"""The OpenAPI description, with the limits of this server in it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from hnclip.search.options import ServeOptions
from hnclip.search.serve.guard import OPEN

UPLOADED = ("image/jpeg", "image/png", "image/webp", "image/gif", "image/bmp", "image/tiff", "image/avif")
BINARY = {"schema": {"type": "string", "format": "binary"}}


def picture_body() -> dict[str, Any]:
    """A request whose body is a picture."""
    return {"requestBody": {"required": True, "content": dict.fromkeys(UPLOADED, BINARY)}}


def picture_answer(*types: str) -> dict[int | str, dict[str, Any]]:
    """An answer whose body is a picture."""
    return {
        200: {"description": "The picture", "content": dict.fromkeys(types, BINARY)},
        304: {"description": "It is the one that the client has"},
    }


def describe(app: FastAPI, options: ServeOptions, *, locked: bool) -> dict[str, Any]:
    """What the API takes and gives; `locked` if that needs a token."""
    schema = app.openapi()
    models = schema["components"]["schemas"]
    for name in ("SearchRequest", "ExplainRequest", "SeparateRequest"):
        models[name]["properties"]["text"]["maxLength"] = options.max_text
    models["SearchRequest"]["properties"]["k"]["maximum"] = options.max_k
    for methods in schema["paths"].values():
        for operation in methods.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == "k":
                    parameter["schema"]["maximum"] = options.max_k
    if locked:
        schema["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for path, methods in schema["paths"].items():
            for operation in methods.values():
                operation["security"] = [] if path in OPEN else [{"token": []}]
    return schema

"""What goes wrong, told to the client: always JSON with one sentence, never anything of the inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from hnclip.search.serve.schema import Failure

LONGEST = 500  # characters of a sentence: some repeat what the client wrote
SENTENCES = {
    400: "the request is malformed",
    401: "a token is needed: Authorization: Bearer TOKEN, or the cookie of POST /api/session",
    404: "there is nothing here",
    405: "this address does not know that method",
    408: "the request took too long to arrive",
    410: "the picture is gone, or was changed since it was indexed",
    413: "the request is larger than this server takes",
    415: "the content type is none that this address takes",
    421: "this server answers to addresses and its own names only, not to this one",
    422: "a value is missing or is not allowed",
    500: "the server failed; its log says how",
    503: "the server is busy or still starting: try again soon",
    504: "the answer took too long and was given up",
}


class Refused(HTTPException):
    """A request that is not answered, and why."""

    def __init__(self, status: int, sentence: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, sentence or SENTENCES[status], dict(headers or {}))


def busy(sentence: str | None = None, seconds: int = 1) -> Refused:
    return Refused(503, sentence, {"Retry-After": str(seconds)})


def failure(status: int, sentence: str | None = None, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The answer to a request that failed."""
    said = sentence or SENTENCES.get(status) or HTTPStatus(status).phrase.lower()
    if len(said) > LONGEST:
        said = f"{said[: LONGEST - 1]}…"
    plain = said.encode("utf-8", "backslashreplace").decode()  # JSON may bring half a surrogate pair
    return JSONResponse({"error": plain}, status, headers=dict(headers or {}))


def invalid(errors: Sequence[Mapping[str, Any]]) -> tuple[int, str]:
    """Status and sentence of what pydantic found wrong with a request."""
    if any(error["type"] == "json_invalid" for error in errors):
        return 400, "the body is no JSON"
    return 422, "; ".join(_told(error) for error in errors[:3])


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Statuses of failures, for the OpenAPI description of a route."""
    return {status: {"model": Failure, "description": SENTENCES[status].capitalize()} for status in statuses}


def _told(error: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in error["loc"][1:]) or "body"
    return f"{place}: {error['msg'][:1].lower()}{error['msg'][1:]}"

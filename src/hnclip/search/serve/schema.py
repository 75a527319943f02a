"""What requests to the server may contain. Responses are the dictionaries of the library."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Kind = Literal["images", "captions"]
Id = Annotated[int, Field(ge=0, le=2**53 - 1)]  # JavaScript does not distinguish larger ones
K = 24  # hits, if a request does not say how many and the server gives so many


class StrictModel(BaseModel):
    """Neither unknown fields, of which a misspelt one would be ignored, nor other types, such as "24" for a number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class SearchRequest(StrictModel):
    text: str = Field(description="The description; what exceeds the model's context is cut.")
    k: int | None = Field(None, ge=1, description=f"Number of hits; {K} if not given.")
    find: Kind = "images"
    rerank: bool = Field(False, description="Re-rank the best images by words and patches; not for captions.")


class ExplainRequest(StrictModel):
    text: str
    id: Id


class SeparateRequest(StrictModel):
    text: str
    ids: list[Id] = Field(min_length=2, max_length=8)


class SessionRequest(StrictModel):
    token: str


class ErrorResponse(BaseModel):
    """Why a request failed, in one sentence."""

    error: str

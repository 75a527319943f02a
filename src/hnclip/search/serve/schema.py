"""What the API takes and gives, as it stands in its OpenAPI description."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _whole(value: Any) -> Any:
    """To JSON 24.0 is a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def plain(value: Any) -> Any:
    """A number in an address has digits and nothing else: pydantic would read "1_0" and " 10" too."""
    if isinstance(value, str) and not (value.isascii() and value.isdecimal()):
        raise ValueError("it must be a whole number")
    return value


Piece = tuple[str, bool]  # a piece of a text, and whether it is highlighted
Whole = Annotated[int, BeforeValidator(_whole)]
# Of a picture; larger ones JavaScript would not tell apart. The limits stand first, else they are not described.
Id = Annotated[int, Field(ge=0, le=2**53 - 1), BeforeValidator(_whole)]


class _Strict(BaseModel):
    """No field that is not known: a misspelt one must not be overlooked."""

    model_config = ConfigDict(extra="forbid")


class _Asked(_Strict):
    """Nor a value of another type, as "24" for a number."""

    model_config = ConfigDict(strict=True)


class SearchRequest(_Asked):
    text: str = Field(
        min_length=1,
        description="The description; what is beyond the model's context is cut, and without a word it finds nothing.",
    )
    k: Whole = Field(24, ge=1, description="How many results.")
    find: Literal["images", "captions"] = "images"
    rerank: bool = Field(
        False, description="Put the best 100 pictures into another order, by words and patches; not captions."
    )


class Result(_Strict):
    """A picture that was found. Its thumbnail is at /api/pictures/ID/thumbnail, itself at /api/pictures/ID."""

    id: int
    name: str
    score: float = Field(description="Cosine of picture and query.")
    tokens: float | None = Field(description="Late interaction of words and patches, if it was re-ranked.")
    captions: list[str]
    width: int
    height: int
    group: int | None = Field(description="Number of its group of near-twins in `groups`, if it has some.")


class CaptionResult(_Strict):
    """A caption that was found, and the pictures that it belongs to."""

    text: str
    score: float
    pictures: list[Result]


class TwinCaption(_Strict):
    """A caption of one member, in pieces; highlighted are words that no other member's caption has."""

    id: int
    pieces: list[Piece]


class Separator(_Strict):
    """A word of the description, and how well each picture shows it."""

    word: str
    scores: list[float] = Field(description="In the order of the ids.")


class TwinGroup(_Strict):
    """Results that are nearly the same, best first. What of a description separates them is at /api/separate."""

    ids: list[int]
    similarity: float = Field(description="Smallest cosine of a member with the first one.")
    captions: list[TwinCaption]


class SeparateRequest(_Asked):
    text: str = Field(min_length=1)
    ids: list[Id] = Field(min_length=2, max_length=8, description="Members of a group of near-twins.")


class SeparateAnswer(_Strict):
    separators: list[Separator] = Field(description="Most separating first.")


class SearchAnswer(_Strict):
    results: list[Result] = Field(description="Pictures, best first; empty when captions were asked for.")
    captions: list[CaptionResult] = Field(description="Captions, best first; empty when pictures were asked for.")
    groups: list[TwinGroup]
    cut: bool = Field(description="Whether the description was longer than the model's context.")
    seconds: float


class ExplainRequest(_Asked):
    text: str = Field(min_length=1)
    id: Id = Field(description="The picture's.")


class Word(_Strict):
    """A word of the description, and how well each patch shows it."""

    text: str
    start: int = Field(description="Where it begins in `text` of the explanation.")
    stop: int
    score: float = Field(description="Its best patch's.")
    patches: list[float] = Field(description="Cosines, row by row from the top left.")


class Explanation(_Strict):
    id: int
    text: str = Field(description="The description as the model reads it.")
    words: list[Word]
    rows: int = Field(description="Of patches.")
    columns: int
    box: tuple[float, float, float, float] = Field(
        description="What the model sees of the picture: left, top, right, bottom as shares of its width and height."
    )
    approximate: bool = Field(description="The thumbnail was looked at: the picture itself cannot be read any more.")


class Limits(_Strict):
    k: int
    text: int
    upload: int
    pixels: int


class Info(_Strict):
    """The index that is served."""

    name: str
    pictures: int
    captions: int
    left_out: int = Field(description="Files that could not be indexed.")
    model: str
    engine: str
    storage: str
    ready: bool = Field(description="Whether the model is loaded: searches wait for it.")
    limits: Limits


class Health(_Strict):
    ready: bool = Field(description="Whether the model is loaded: searches wait for it.")


class SessionRequest(_Asked):
    """For pages, whose pictures cannot send a header: the token, once, for a cookie."""

    token: str


class Failure(_Strict):
    """Why a request was not answered."""

    error: str

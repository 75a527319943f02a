"""What requests to the server may contain. Responses are the dictionaries of the library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Kind = Literal["images", "captions"]
Id = Annotated[int, Field(ge=0, le=2**53 - 1)]  # JavaScript does not distinguish larger ones
K = 24  # hits, if a request does not say how many


@dataclass(frozen=True)
class Settings:
    """Where the server listens and how much it accepts.

    Args:
        waiting: searches that wait for a thread; further ones get status 503.
        timeout: seconds after which a request is given up.
        max_k: hits of a search.
        max_text: characters of a description.
        max_upload, max_pixels: bytes and pixels of an uploaded image.
        threads: CPU threads of the model; 0 leaves the choice to torch.
    """

    host: str = "127.0.0.1"
    port: int = 8765
    waiting: int = 32
    timeout: float = 30.0
    max_k: int = 200
    max_text: int = 20_000
    max_upload: int = 20_000_000
    max_pixels: int = 50_000_000
    threads: int = 0

    def __post_init__(self) -> None:
        if not self.host.strip():
            raise ValueError("--host must be an address; 0.0.0.0 is for all interfaces")
        if not 0 <= self.port < 65536:
            raise ValueError(f"--port must be between 0 and 65535, got {self.port}")
        for name in ("waiting", "max_k", "max_text", "max_upload", "max_pixels"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.timeout < float("inf"):
            raise ValueError(f"--timeout must be a number of seconds above 0, got {self.timeout}")
        if self.threads < 0:
            raise ValueError(f"--threads must not be negative, got {self.threads}")

    @property
    def max_json(self) -> int:
        """Bytes of a request that is JSON, in which a character takes at most 12."""
        return 12 * self.max_text + 10_000


class StrictModel(BaseModel):
    """Neither unknown fields, of which a misspelt one would be ignored, nor other types, such as "24" for a number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class SearchRequest(StrictModel):
    text: str = Field(description="The description; what exceeds the model's context is cut.")
    k: int = Field(K, ge=1, description="Number of hits.")
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

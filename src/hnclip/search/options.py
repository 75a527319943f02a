"""The options of `hnclip index`, `hnclip search` and `hnclip serve`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hnclip.config import ReadConfig
from hnclip.options import Opening, Output
from hnclip.search.index.layout import EngineName, Storage


@dataclass(frozen=True)
class IndexOptions:
    """Index pictures, and their captions where there are any, so that they are found by description. Run it again to
    take in what is new, changed, moved or gone; after a kill the same command goes on."""

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FOLDER|DATA")]
    """A folder of pictures, or data as for `hnclip train` (docs/data.md)."""
    out: Path
    """The index: a directory, by custom NAME.hnc."""
    opening: Annotated[Opening, tyro.conf.arg(name="")]
    read: ReadConfig
    model: str = "bundled"
    """As for `hnclip eval` (docs/models.md); of a run its best epoch."""
    split: str = "all"
    """all, or one split of the data."""
    storage: Storage = "bf16"
    """int8 takes a third of the room of bf16, and finds nearly the same (docs/search.md)."""
    tokens: bool = False
    """Keep the vectors of all patches: re-ranking and explanations need no picture then, but each one takes as much
    room as all its patches have numbers."""
    engine: EngineName | None = None
    """exact needs nothing else; faiss-ivf and faiss-hnsw are for millions on one machine (pip install
    'hnclip[faiss]'); milvus is for more than one machine (pip install 'hnclip[milvus]'). Left out, it stays the
    index's own, which is exact at first."""
    uri: str | None = None
    """Of Milvus: a file, or a server as http://HOST:PORT; a file beside the index when left out."""
    replace: bool = False
    """Make the index anew where one of another model or of other data lies there."""
    batch: int = 64
    """Pictures or captions encoded at once."""
    workers: int = 0
    """Threads that read and decode pictures; 0 for as many as processors."""
    threads: int = 0
    """Threads of the encoder; 0 leaves it to torch."""
    device: str = "auto"
    """auto takes an accelerator if there is one; or cpu, cuda, mps …"""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"--batch must be at least 1, got {self.batch}")
        for name in ("workers", "threads"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name} must not be negative, got {getattr(self, name)}")
        if self.uri is not None and self.engine != "milvus":
            raise ValueError("--uri is for --engine milvus")


@dataclass(frozen=True)
class SearchOptions:
    """Find pictures by a description, or pictures and captions by a picture."""

    index: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="INDEX")]
    """What `hnclip index` made."""
    text: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="TEXT")] = None
    """The description, the longer the better; - reads it from standard input."""
    image: Path | None = None
    """Search by this picture instead."""
    find: Literal["images", "captions"] = "images"
    """What is to be found."""
    k: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 20
    """How many."""
    explain: bool = False
    """Which words matched which parts of the pictures, which results are near-twins, and what separates them."""
    rerank: bool = False
    """Put the best 100 into another order, by words and patches (docs/search.md)."""
    engine: EngineName | None = None
    """Another than the index's own."""
    model: str | None = None
    """Where the index's model lies now, if it has moved."""
    device: str = "auto"
    """auto takes an accelerator if there is one; or cpu, cuda, mps …"""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def __post_init__(self) -> None:
        if (self.text is None) == (self.image is None):
            raise ValueError("give a description, or a picture with --image")
        if self.k < 1:
            raise ValueError(f"-k must be at least 1, got {self.k}")
        if self.rerank and (self.text is None or self.find != "images"):
            raise ValueError("--rerank orders pictures by the words of a description: it needs TEXT and --find images")


@dataclass(frozen=True)
class ServeOptions:
    """Serve an index: a page to search it, and an HTTP API (its OpenAPI description is at /openapi.json)."""

    index: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="INDEX")]
    """What `hnclip index` made."""
    host: str = "127.0.0.1"
    """Address to listen on; with another than this machine's own anyone who reaches it can search: set a token. Without
    one it answers to addresses and the machine's own name only."""
    port: int = 8765
    """0 takes any that is free."""
    token: str | None = None
    """Whoever asks must know it; also from $HNCLIP_TOKEN, where other users of the machine do not see it."""
    engine: EngineName | None = None
    """Another than the index's own."""
    model: str | None = None
    """Where the index's model lies now, if it has moved."""
    device: str = "auto"
    """auto takes an accelerator if there is one; or cpu, cuda, mps …"""
    threads: int = 0
    """Threads that compute; 0 leaves it to torch."""
    waiting: int = 32
    """Requests that may wait for their turn; more are answered with 503 at once."""
    timeout: float = 30.0
    """Seconds after which a request is given up."""
    max_k: int = 200
    """Most results of a request."""
    max_text: int = 20_000
    """Most characters of a description."""
    max_upload: int = 20_000_000
    """Most bytes of a picture."""
    max_pixels: int = 50_000_000
    """Most pixels of a picture."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def __post_init__(self) -> None:
        if not self.host.strip():
            raise ValueError("--host must be an address, 0.0.0.0 for all of this machine's")
        for name in ("waiting", "max_k", "max_text", "max_upload", "max_pixels"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.timeout < float("inf"):
            raise ValueError(f"--timeout must be seconds, more than 0, got {self.timeout}")
        if self.threads < 0:
            raise ValueError(f"--threads must not be negative, got {self.threads}")
        if not 0 <= self.port < 65536:
            raise ValueError(f"--port must lie between 0 and 65535, got {self.port}")

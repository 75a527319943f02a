"""`hnclip index`, `hnclip search`, `hnclip serve`."""

from __future__ import annotations

import sys
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from pydantic.dataclasses import dataclass

from hnclip.cli.options import ModelOpening, Output, OutputGroup, arguments_of
from hnclip.config import Count, Number, Opening, ReadConfig
from hnclip.search.database import EngineName
from hnclip.search.serve.run import Settings
from hnclip.util.optional import large_import

if TYPE_CHECKING:
    from hnclip.search.render import IndexResult, SearchResult


@dataclass(frozen=True)
class Index:
    """Index images, and their captions if there are any, for search by text. Run it again to update the index with new,
    changed, moved and deleted files; the same command resumes an interrupted one."""

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """A folder of images, or data as for `hnclip train` (hnclip docs data)."""
    out: Path
    """Directory of the index, by convention NAME.hnc."""
    model: str | None = None
    """As for `hnclip eval` (hnclip docs models). Required for a new index of your own images; an existing index
    remembers its model."""
    split: str = "all"
    """all, or one split of the data."""
    engine: EngineName | None = None
    """exact scans all vectors; faiss-ivf and faiss-hnsw are for millions of images on one machine; milvus is a server
    (pip install 'hnclip[milvus]'). If not given, the engine of the index, or exact for a new index."""
    uri: str | None = None
    """Milvus only: http://HOST:PORT, or a file of milvus-lite."""
    replace: bool = False
    """Build a new index, for example with another model; until it is complete the old one is searched."""
    text_encoder: bool = True
    """Export the model's text tower into the index, so that a search starts without importing torch. Needs pip install
    'hnclip[search]'."""
    batch: Count = 64
    """Images or captions encoded at once."""
    workers: Number = 0
    """Threads that read and decode images; 0 for the number of CPUs."""
    threads: Number = 0
    """CPU threads of the encoder; 0 leaves the choice to torch."""
    device: str = "auto"
    """auto uses an accelerator if there is one; or cpu, cuda, mps …"""
    opening: ModelOpening = field(default_factory=Opening)
    read: ReadConfig = field(default_factory=ReadConfig)
    output: OutputGroup = field(default_factory=Output)

    def run(self) -> IndexResult:
        with large_import():
            from hnclip.search.indexer import build_index

        return build_index(**arguments_of(self))


@dataclass(frozen=True)
class Search:
    """Find images by a description, or images and captions by an image."""

    index: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="INDEX")]
    """An index of `hnclip index`."""
    text: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="TEXT")] = None
    """The description; long ones work best. - reads it from standard input."""
    image: Path | None = None
    """Search by this image instead."""
    find: Literal["images", "captions"] = "images"
    """Kind of hits."""
    k: Annotated[Count, tyro.conf.arg(aliases=["-k"])] = 20
    """Number of hits."""
    explain: bool = False
    """Show which words match which parts of the images, which hits are near-duplicates, and how these differ."""
    rerank: bool = False
    """Re-rank the best 100 by word and patch similarity (hnclip docs search)."""
    engine: EngineName | None = None
    """Engine to use instead of the index's own."""
    model: str | None = None
    """Path of the index's model, if it has moved."""
    device: str = "auto"
    """auto uses an accelerator if there is one; or cpu, cuda, mps …"""
    output: OutputGroup = field(default_factory=Output)

    def __post_init__(self) -> None:
        if (self.text is None) == (self.image is None):
            raise ValueError("give either a description or an image with --image")
        if self.rerank and (self.text is None or self.find != "images"):
            raise ValueError("--rerank requires TEXT and --find images")

    def run(self) -> SearchResult:
        from hnclip.search.searcher import open_index

        image = None
        if self.image is not None:
            from hnclip.data.image_sources import FileImage

            image = FileImage(self.image).load()
        with open_index(self.index, engine=self.engine, model=self.model, device=self.device) as opened:
            return opened.search(
                _standard_input() if self.text == "-" else self.text,
                image=image,
                k=self.k,
                find=self.find,
                rerank=self.rerank,
                explain=self.explain,
                name=str(self.image),
            )


@dataclass(frozen=True)
class Serve:
    """Serve a web page to search an index, and an HTTP API (OpenAPI schema at /openapi.json)."""

    index: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="INDEX")]
    """An index of `hnclip index`."""
    token: str | None = None
    """Token that requests must present; also read from $HNCLIP_TOKEN, which other users of the machine cannot see."""
    engine: EngineName | None = None
    """Engine to use instead of the index's own."""
    model: str | None = None
    """Path of the index's model, if it has moved."""
    device: str = "auto"
    """auto uses an accelerator if there is one; or cpu, cuda, mps …"""
    settings: tyro.conf.OmitArgPrefixes[Settings] = field(default_factory=Settings)
    output: OutputGroup = field(default_factory=Output)

    def run(self) -> None:
        from hnclip.search.serve.run import serve as run

        run(**arguments_of(self))


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is no text in {(sys.stdin.encoding or '').upper()}: {error}") from error

"""`hnclip index`: creates or updates an index of images and their captions."""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from hnclip.config import Opening, ReadConfig, option_words
from hnclip.data.decoding import cpu_count
from hnclip.data.sources import SCENES, local_path
from hnclip.encode.fingerprint import model_fingerprint
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import BUNDLED, load
from hnclip.search.database import COMMAND, KINDS, About, EngineName, published_database
from hnclip.search.engines import check_engine, import_faiss, update_engine
from hnclip.search.query_encoder import update_text_encoder
from hnclip.search.reader import IndexReader
from hnclip.search.render import IndexResult
from hnclip.search.scan import Source, open_source
from hnclip.search.update import Update
from hnclip.search.writer import IndexWriter, open_writer, refuse_second_writer
from hnclip.util.console import progress
from hnclip.util.optional import import_extra
from hnclip.util.text import counted

log = logging.getLogger(__name__)


def build_index(
    data: str | Path,
    out: str | Path,
    *,
    model: str | Path | None = None,
    opening: Opening | None = None,
    read: ReadConfig | None = None,
    split: str = "all",
    engine: EngineName | None = None,
    uri: str | None = None,
    replace: bool = False,
    text_encoder: bool = True,
    batch: int = 64,
    workers: int = 0,
    threads: int = 0,
    device: str = "auto",
) -> IndexResult:
    """Create an index of images and their captions, or bring it up to date.

    Args:
        data: a folder of images, or any data that `hnclip train` takes.
        model: as for `hnclip.load`, or a run; if not given, that of the existing index, opened in the same way.
        engine: exact, faiss-ivf, faiss-hnsw or milvus (at `uri`); if not given, that of the existing index.
        replace: rebuild the index, for example with another model; until it is complete the old one is searched.
        text_encoder: export the text tower into the index, so that queries need no torch.
        workers: threads that read and decode; 0 for the number of CPUs.
        threads: CPU threads of torch during the call; 0 leaves them as they are.

    Raises:
        ValueError: there are no images, or the index is of another model or other data; it is as it was.
        OSError: the disk is full or fails; what was committed is kept, and the same call continues.
    """
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    start, out, read = time.monotonic(), Path(out), read or ReadConfig()
    data, model = str(data), None if model is None else str(model)
    _check_place(out, local_path(data))
    refuse_second_writer(out)
    existing = None
    if not replace and (published_database(out) or (out / COMMAND).is_file()):  # damaged, if it has no database
        with IndexReader(out) as reader:
            existing = reader.about
    name, opening = _choose_model(data, model, opening or Opening(), existing)
    engine, uri = _choose_engine(engine, uri, existing)
    source = open_source(data, read, split=split)
    opened = load(name, **vars(opening), device=device)
    opened.require_trained("an index")
    about = _make_about(opened, source, read, opening, split=split, model=name, engine=engine, uri=uri)
    log.info(f"model: {opened.source}; data: {counted(len(source.records), 'image')} of {source.data}")
    with _torch_threads(threads), open_writer(out, about, replace=replace) as writer:
        _check_same(writer, about, source)
        with progress("verifying checksums"):
            writer.verify()
        if writer.about != about:  # the folder or the model has moved, or another engine is wanted
            writer.set_about(about)
        began = time.monotonic()
        result = IndexResult(out=out, data=source.data, model=opened.source)
        Update(writer, opened, source, batch, result).run(workers or cpu_count())
        result.working = time.monotonic() - began
        result.compacted = writer.compact()
        update_text_encoder(writer, opened if text_encoder else None)
        writer.publish()
        for kind in KINDS:
            update_engine(writer, kind, engine, uri)
        result.images, result.captions = writer.counts()
    result.seconds = time.monotonic() - start
    return result


def _check_place(out: Path, data: Path | None) -> None:
    """An index may be inside the folder that it is of, but must not be the folder, or contain it."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file, but an index is a directory: choose another --out")
    if data is not None:
        place, real = out.resolve(), data.resolve()
        if place == real or place in real.parents:
            raise ValueError(f"--out {out} would mix the index with {data}, which is indexed: choose another --out")


def _choose_model(data: str, model: str | None, opening: Opening, existing: About | None) -> tuple[str, Opening]:
    """The model and how it is opened, as given or as the index says; paths are absolute, since searches start in other
    directories."""
    if model is None and existing is not None:
        model = existing.model
        opening = Opening(**existing.opening) if opening == Opening() else opening
    if model is None and data not in SCENES:
        raise ValueError(
            f"give a --model to index {data} with: a run, the folder or hub name of a CLIP model, or a checkpoint file "
            "(hnclip docs models); --model bundled is a small model of drawings, for trials"
        )
    if model is None or model == BUNDLED:
        model = BUNDLED
    else:
        towers = model.split("+") if model.count("+") == 1 and not Path(model).exists() else [model]
        model = "+".join(map(_absolute, towers))
    if opening.tokenizer is not None:
        opening = replace(opening, tokenizer=_absolute(opening.tokenizer))
    return model, opening


def _absolute(name: str | Path) -> str:
    """The absolute path of what exists here; other names are of the hub."""
    path = Path(name).expanduser()
    return os.path.abspath(path) if path.exists() else str(name)


def _choose_engine(engine: EngineName | None, uri: str | None, existing: About | None) -> tuple[EngineName, str | None]:
    """The engine and its URI, as given or as the index says. Refuses what would fail after hours of encoding."""
    if existing is not None and engine in (None, existing.engine):
        engine, uri = existing.engine, uri or existing.uri
    engine = engine or "exact"
    check_engine(engine)
    if engine.startswith("faiss"):
        import_faiss()
    if (uri is not None) != (engine == "milvus"):
        raise ValueError("--engine milvus requires --uri, and no other engine has one")
    if uri is not None and "@" in uri:
        raise ValueError(
            "the URI is stored in the index: give user and password as USER:PASSWORD in $HNCLIP_MILVUS_TOKEN"
        )
    if uri is not None:
        import_extra("pymilvus", "indexes in Milvus", "milvus")
        uri = uri if "://" in uri else os.path.abspath(uri)  # a file of milvus-lite
    return engine, uri


def _make_about(
    opened: DualEncoder, source: Source, read: ReadConfig, opening: Opening, *, split: str, **given: Any
) -> About:
    """
    Args:
        given: model, engine and URI.
    """
    words = ["hnclip", "index", source.data, "--model", given["model"]]
    words += ["--split", split] if split != "all" else []
    words += ["--engine", given["engine"]] if given["engine"] != "exact" else []
    words += ["--uri", given["uri"]] if given["uri"] else []
    words += [*option_words(opening, Opening()), *option_words(read, ReadConfig(), "read.")]
    return About(
        source=opened.source,
        fingerprint=model_fingerprint(opened, opened.name),
        opening=asdict(opening),
        width=opened.width,
        data=source.data,
        root=None if source.root is None else str(source.root),
        split=split,
        command=shlex.join(words),
        **given,
    )


def _check_same(writer: IndexWriter, about: About, source: Source) -> None:
    """ValueError if the index is of another model, split or data."""
    own = writer.about
    command = f"{own.command} --out {shlex.quote(str(writer.path))}"
    again = f"Update it with\n  {command}\nor add --replace, or choose another --out"
    if own.fingerprint != about.fingerprint:
        raise ValueError(f"{writer.path} was made with another model, {own.source}. {again}")
    if own.split != about.split:
        raise ValueError(f"{writer.path} holds split {own.split}, not {about.split}. {again}")
    if not _is_same_data(writer, about, source):
        raise ValueError(f"{writer.path} is an index of {own.data}, not of {about.data}. {again}")


def _is_same_data(writer: IndexWriter, about: About, source: Source) -> bool:
    own = writer.about
    if own.data == about.data:
        return True
    if own.root is None or about.root is None:
        return False
    if os.path.exists(own.data):
        return os.path.samefile(own.data, about.data)
    # The folder may have moved. But another folder by mistake must not empty an index.
    known = writer.known()
    return 2 * sum(record.id in known for record in source.records) >= len(known)


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads inside the block; 0 changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)

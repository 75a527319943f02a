"""What an index is made with: chosen from the arguments and the existing index; and whether that index fits."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict, replace
from pathlib import Path

from hnclip.config import Opening, ReadConfig, option_words
from hnclip.data.sources import SCENES
from hnclip.encode.fingerprint import model_fingerprint
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import BUNDLED
from hnclip.search.database import About, EngineName, database_files
from hnclip.search.engines import check_engine, import_faiss
from hnclip.search.reader import IndexReader
from hnclip.search.scan import Source
from hnclip.search.writer import IndexWriter
from hnclip.util.optional import import_extra


def existing_about(out: Path) -> About | None:
    if not database_files(out):
        return None
    with IndexReader(out) as reader:
        return reader.about


def check_apart(out: Path, data: Path | None) -> None:
    """An index may be inside the folder that it is of, but must not be the folder, or contain it."""
    if data is not None:
        place, real = out.resolve(), data.resolve()
        if place == real or place in real.parents:
            raise ValueError(f"--out {out} would mix the index with {data}, which is indexed: choose another --out")


def choose_model(data: str, model: str | None, opening: Opening, existing: About | None) -> tuple[str, Opening]:
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


def choose_engine(engine: EngineName | None, uri: str | None, existing: About | None) -> tuple[EngineName, str | None]:
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


def make_about(
    opened: DualEncoder,
    source: Source,
    read: ReadConfig,
    *,
    model: str,
    opening: Opening,
    engine: EngineName,
    uri: str | None,
    split: str,
) -> About:
    words = ["hnclip", "index", source.data, "--model", model]
    words += ["--split", split] if split != "all" else []
    words += ["--engine", engine] if engine != "exact" else []
    words += ["--uri", uri] if uri else []
    words += [*option_words(opening, Opening()), *option_words(read, ReadConfig(), "read.")]
    return About(
        model=model,
        source=opened.source,
        fingerprint=model_fingerprint(opened, opened.name),
        opening=asdict(opening),
        width=opened.width,
        data=source.data,
        root=None if source.root is None else str(source.root),
        engine=engine,
        uri=uri,
        split=split,
        command=shlex.join(words),
    )


def check_same(writer: IndexWriter, about: About, source: Source) -> None:
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
    return 2 * sum(entry.name in known for entry in source.entries()) >= len(known)

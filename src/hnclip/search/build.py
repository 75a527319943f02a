"""`hnclip index`: make an index, or bring it up to date."""

from __future__ import annotations

import logging
import os
import time
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from hnclip.data.decoding import cpu_count, decoding_threads, in_order
from hnclip.encode.fingerprint import model_fingerprint
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import BUNDLED, load, models_of
from hnclip.search.index.compact import compact
from hnclip.search.index.generations import check_place
from hnclip.search.index.layout import KINDS, About
from hnclip.search.index.opening import open_writer
from hnclip.search.index.writer import IndexWriter
from hnclip.search.indexing.built import Built
from hnclip.search.indexing.pictures import Pictures
from hnclip.search.indexing.plan import make_plan
from hnclip.search.indexing.run import Run
from hnclip.search.indexing.source import IndexSource, data_path, open_index_source
from hnclip.search.options import IndexOptions
from hnclip.util.console import progress
from hnclip.util.device import find_device
from hnclip.util.text import counted

log = logging.getLogger(__name__)

AHEAD = 2  # batches that are decoded before the encoder asks for them
DEAD_SHARE = 0.25  # of rows or items: with more of them, and not few, the index is written anew without them
DEAD_LEAST = 1000


def build_index(options: IndexOptions) -> Built:
    """Make an index, or bring it up to date with its folder or data: what has not changed is not even read.

    Raises:
        ValueError: there is no picture, or what lies at `options.out` is of another model or of other data, or no
            index; it is as it was.
        OSError: the disk is full or fails; what was committed is there, and the same call goes on.
    """
    start = time.monotonic()
    if options.threads:
        torch.set_num_threads(options.threads)
    # All that can be said before the model is opened, and some of it before hours of encoding.
    _check_apart(options.out, data_path(options.data))
    check_place(options.out)
    options = _lasting(_checked_engine(options))
    source = open_index_source(options.data, options.read, split=options.split)
    device = find_device(options.device)
    model = load(models_of(options.model)[0][1], **vars(options.opening)).eval().to(device)
    model.require_trained("an index")
    about = _about(options, source, model)
    log.info(f"model: {model.source}; data: {counted(len(source), 'image')} of {source.data}")

    def check(writer: IndexWriter) -> str:
        return _why_not(writer, about, source)

    with open_writer(options.out, about, check=check, replace=options.replace) as writer:
        source = replace(source, captions={**source.captions, **writer.captions_of(source.unread)})
        now = replace(about, engine=writer.about.engine, uri=writer.about.uri)
        if writer.about != now:  # the folder or the model was moved
            writer.set_about(now)
        began = time.monotonic()
        run = _bring_in(writer, model, source, options)
        working = time.monotonic() - began
        writer.publish()
        compacted = _compact(writer)
        _make_engine(writer, options)
        pictures, captions = writer.living()
    return Built(
        out=options.out,
        data=source.data,
        model=model.source,
        pictures=pictures,
        captions=captions,
        counts=run.counts,
        seconds=time.monotonic() - start,
        working=working,
        compacted=compacted,
        problems=tuple(problem for problem, _ in run.problems.values()),
    )


def _bring_in(writer: IndexWriter, model: DualEncoder, source: IndexSource, options: IndexOptions) -> Run:
    known, problems = dict(writer.known()), writer.problems()
    with decoding_threads(options.workers or cpu_count()) as pool:
        # Pillow warns of odd metadata, picture by picture.
        warnings.filterwarnings("ignore", module="PIL")
        with progress("comparing", len(source)) as bar:
            plan = make_plan(source, known, problems, pool, bar.advance)
        pictures = Pictures(source, known, writer.contents(), model.image_transform)
        with progress("images and captions", plan.steps) as bar:
            run = Run(writer, model, pictures, known, plan, batch=options.batch, advance=bar.advance)
            try:
                work = plan.work
                while work:  # a second time only for copies of pictures that could not be decoded
                    run.take(in_order(pool, pictures.look, work, AHEAD * options.batch))
                    work = run.turn()
                run.finish(problems)
            finally:
                run.close()
    return run


def _about(options: IndexOptions, source: IndexSource, model: DualEncoder) -> About:
    opening = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options.opening).items()}
    patches = 0
    if options.tokens:
        blank = torch.zeros((1, 3, model.image_size, model.image_size), dtype=torch.uint8, device=model.device)
        with torch.no_grad():
            tokens = model.encode_images(blank, tokens=True).tokens  # [1, P, D]
        assert tokens is not None
        patches = tokens.shape[1]
    return About(
        model=options.model,
        source=model.source,
        fingerprint=model_fingerprint(model, model.name),
        opening=opening,
        width=model.width,
        storage=options.storage,
        patches=patches,
        data=source.data,
        root=None if source.root is None else str(source.root),
        split=options.split,
    )


def _why_not(writer: IndexWriter, about: About, source: IndexSource) -> str:
    """Why an index cannot be gone on with; nothing if it can."""
    own = writer.about
    again = f"Go on with\n  {own.command(writer.path)}\nor make it anew by --replace, or choose another --out"
    if own.fingerprint != about.fingerprint:
        return f"{writer.path} was made with another model, {own.source}. {again}"
    if own.storage != about.storage:
        return f"{writer.path} stores vectors as {own.storage}, not as {about.storage}. {again}"
    if own.patches != about.patches:
        return f"{writer.path} was made {'with' if own.patches else 'without'} --tokens. {again}"
    if own.split != about.split:
        return f"{writer.path} holds split {own.split}, not {about.split}. {again}"
    if not _same_data(writer, about, source):
        return f"{writer.path} is an index of {own.data}, not of {about.data}. {again}"
    return ""


def _same_data(writer: IndexWriter, about: About, source: IndexSource) -> bool:
    own = writer.about
    if own.data == about.data:
        return True
    if own.root is None or about.root is None:
        return False
    if os.path.exists(own.data):
        return os.path.samefile(own.data, about.data)
    # It may have moved. But a disk that is not mounted and another folder by mistake must not empty an index.
    known = {name for name, _ in writer.known()}
    found = sum(source.entry(number).name in known for number in range(len(source)))
    return 2 * found >= len(known)


def _compact(writer: IndexWriter) -> bool:
    """Write the index anew if that is worth it."""
    dead = [(writer.dead(kind), getattr(writer.state, kind)) for kind in KINDS]
    if not any(gone >= DEAD_LEAST and gone > DEAD_SHARE * total for gone, total in [*dead, writer.ended()]):
        return False
    try:
        compact(writer)
    except OSError as error:  # nothing is lost, it only takes more room than it needs
        log.warning(f"what is gone stays in the files for now: {error}")
        return False
    return True


def _check_apart(out: Path, data: Path | None) -> None:
    """An index may lie in the folder that it is of, but must not be the folder, or hold it."""
    if data is None:
        return
    place, real = out.resolve(), data.resolve()
    if place == real or place in real.parents:
        raise ValueError(f"--out {out} would mix the index with {data}, which is indexed: choose another --out")


def _checked_engine(options: IndexOptions) -> IndexOptions:
    """The URI as it is kept.

    Raises:
        ValueError: the engine's package is missing, or the URI is none.
    """
    if options.engine in ("faiss-ivf", "faiss-hnsw"):
        from hnclip.search.engines.faiss_engine import import_faiss

        import_faiss()
    elif options.engine == "milvus":
        from hnclip.search.engines.milvus_server import import_milvus, plain_uri

        import_milvus()
        if options.uri is not None:
            return replace(options, uri=plain_uri(options.uri))
    return options


def _lasting(options: IndexOptions) -> IndexOptions:
    """The model and its tokenizer as whoever searches from elsewhere needs them: files by their absolute paths."""
    model, tokenizer = options.model, options.opening.tokenizer
    if model != BUNDLED:
        towers = [model] if Path(model).exists() or model.count("+") != 1 else model.split("+")
        model = "+".join(map(_absolute, towers))
    if tokenizer is not None:
        tokenizer = Path(_absolute(str(tokenizer)))
    return replace(options, model=model, opening=replace(options.opening, tokenizer=tokenizer))


def _absolute(name: str) -> str:
    """Of what exists; other names mean something elsewhere."""
    path = Path(name).expanduser()
    return os.path.abspath(path) if path.exists() else name


def _make_engine(writer: IndexWriter, options: IndexOptions) -> None:
    """The engine that was asked for, else the index's own; with the URI that it had if none is given."""
    engine = options.engine or writer.about.engine
    uri = options.uri or (writer.about.uri if engine == writer.about.engine else None)
    if engine != "exact":
        from hnclip.search.engines.open import make_engine

        make_engine(writer, engine, uri)
    about = replace(writer.about, engine=engine, uri=uri)
    if writer.about != about:
        writer.set_about(about)

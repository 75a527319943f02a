"""`hnclip index`: creates or updates an index. Unchanged files are not read, known content is not encoded again.

Threads read, hash and decode images ahead of the encoder, and a thread writes commits while the next batch is encoded.
"""

from __future__ import annotations

import io
import logging
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hnclip.config import Opening, ReadConfig, option_words
from hnclip.core import InvalidImage, Problem, ViewEmbeddings, upright_shape
from hnclip.data.decoding import cpu_count, decoding_threads, in_order
from hnclip.data.images import preprocess_image, to_rgb
from hnclip.data.records import printable
from hnclip.data.sources import SCENES, local_path
from hnclip.encode.fingerprint import model_fingerprint
from hnclip.encode.loop import caption_batches, encode_batches
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import BUNDLED, load, models_of
from hnclip.search.database import KINDS, About, EngineName, content_hash, database_files
from hnclip.search.engines import check_engine, import_faiss, update_engine
from hnclip.search.query_encoder import update_text_encoder
from hnclip.search.reader import IndexReader
from hnclip.search.render import IndexResult, UpdateCounts
from hnclip.search.scan import Entry, Source, UpdatePlan, compare, is_unreachable, open_source
from hnclip.search.writer import Change, IndexWriter, Known, NewFile, NewImage, captions_hash, open_writer
from hnclip.util.console import progress
from hnclip.util.device import find_device
from hnclip.util.optional import import_extra
from hnclip.util.text import counted

log = logging.getLogger(__name__)

TOGETHER, SECONDS = 256, 5.0  # files of a commit, and seconds after which there is one with fewer
AHEAD = 2  # batches that are decoded ahead
THUMBNAIL, QUALITY = 320, 80  # pixels of the longer side, and quality of the JPEG
NO_PIXELS = torch.empty(0)


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
        replace: make the index anew, for example with another model; until it is complete the old one is searched.
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
    _check_apart(out, local_path(data))
    existing = None
    if not replace and database_files(out):
        with IndexReader(out) as reader:
            existing = reader.about
    name, opening = _choose_model(data, model, opening or Opening(), existing)
    engine, uri = _choose_engine(engine, uri, existing)
    source = open_source(data, read, split=split)
    opened = load(models_of(name)[0][1], **vars(opening)).eval().to(find_device(device))
    opened.require_trained("an index")
    about = _make_about(opened, source, read, opening, split=split, model=name, engine=engine, uri=uri)
    log.info(f"model: {opened.source}; data: {counted(len(source), 'image')} of {source.data}")
    with _torch_threads(threads), open_writer(out, about, replace=replace) as writer:
        _check_same(writer, about, source)
        with progress("verifying checksums"):
            writer.verify()
        if writer.about != about:  # the folder or the model has moved, or another engine is wanted
            writer.set_about(about)
        began = time.monotonic()
        update = _Update(writer, opened, source, batch)
        update.run(workers or cpu_count())
        working = time.monotonic() - began
        writer.delete_unused()
        compacted = writer.compact()
        update_text_encoder(writer, opened if text_encoder else None)
        writer.publish()
        for kind in KINDS:
            update_engine(writer, kind, engine, uri)
        indexed = writer.counts()
    return IndexResult(
        out=out,
        data=source.data,
        model=opened.source,
        **indexed,
        **vars(update.counts),
        seconds=time.monotonic() - start,
        working=working,
        compacted=compacted,
        problems=tuple(problem for problem, _ in update.plan.problems.values()),
    )


def _check_apart(out: Path, data: Path | None) -> None:
    """An index may be inside the folder that it is of, but must not be the folder, or contain it."""
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
    return 2 * sum(entry.name in known for entry in source.entries()) >= len(known)


@dataclass(frozen=True)
class _Found:
    """A file that was read; with pixels, size and thumbnail if its content may be new.

    Shape:
        pixels: [3, S, S] uint8, or [0]
    """

    file: NewFile
    pixels: Tensor = NO_PIXELS
    size: tuple[int, int] = (0, 0)
    thumbnail: bytes = b""


@dataclass(frozen=True)
class _Failed:
    """An entry that cannot be indexed, until its stamp changes; `unreachable` if it may exist as it was."""

    problem: Problem
    stamp: str
    unreachable: bool = False


class _Update:
    """One update of an index: compares, reads, encodes, commits."""

    def __init__(self, writer: IndexWriter, model: DualEncoder, source: Source, batch: int) -> None:
        self.counts, self.plan = UpdateCounts(), UpdatePlan()
        self._writer, self._model, self._batch_size = writer, model, batch
        captions = {**source.captions, **{name: writer.captions_of(name) for name in source.unread}}
        self._source = replace(source, captions=captions)
        self._known, self._noted, self._hashes = writer.known(), writer.problems(), writer.hashes()
        self._committed_at = time.monotonic()

    def run(self, workers: int) -> None:
        with decoding_threads(workers) as pool, ThreadPoolExecutor(1) as self._writing:
            with progress("comparing", len(self._source)) as bar:
                self.plan = compare(self._source, self._known, self._noted, pool, bar.advance)
            with progress("images", len(self.plan.work)) as self._bar:
                found = in_order(pool, self._read, self.plan.work, AHEAD * self._batch_size)
                for _ in in_order(self._writing, self._writer.commit, self._changes(found), 1):
                    pass
        self.counts.unchanged += self.plan.unchanged
        self.counts.deleted = len(self.plan.deleted)

    def _read(self, entry: Entry) -> _Found | _Failed:
        """Read and hash an image, and decode it if its content is new; in a thread."""
        stamp = ""
        try:
            stamp = entry.stamp()  # before reading: a change in between is noticed by the next update
            known = self._known.get(entry.name)
            if known is not None and (known.stamp, known.place) == (stamp, entry.place):
                return _Found(NewFile(entry.name, known.hash, entry.place, stamp, entry.captions))
            content = entry.image.read()
            file = NewFile(entry.name, content_hash(content), entry.place, stamp, entry.captions)
            if file.hash in self._hashes:
                return _Found(file)
            image = entry.image.decode(content)
            pixels = preprocess_image(image, self._model.image_transform)
            return _Found(file, pixels, upright_shape(image), make_thumbnail(image))
        except InvalidImage as error:
            kind, detail, unreachable = error.kind, str(error), is_unreachable(error)
            if kind == "missing image":
                stamp = ""  # it is looked for each time
        except MemoryError:
            kind, detail, unreachable, stamp = "oversized image", "there is not enough memory to decode it", False, ""
        except Exception as error:  # Pillow raises many types; one image must not end the update
            kind, detail, unreachable = "unusual image", str(error) or type(error).__name__, False
        return _Failed(Problem(kind, entry.name, printable(detail)), stamp, unreachable)

    def _changes(self, found: Iterable[_Found | _Failed]) -> Iterator[Change]:
        """What to commit: files with their images and captions when these are encoded, at the end what else differs."""
        files: list[NewFile] = []
        images: list[NewImage] = []
        for (some, new), encoded in encode_batches(self._model, self._encode, self._batches(found)):
            files += some
            vectors = encoded.vectors.float().cpu().numpy()  # [B, D]
            images += [NewImage(one.file.hash, vector, one.size, one.thumbnail) for one, vector in zip(new, vectors)]
            self.counts.encoded += len(new)
            if len(files) >= TOGETHER or self._commit_is_due():
                yield from self._with_captions(files, images)
                files, images = [], []
        yield from self._with_captions(files, images)
        if self.plan.deleted or self.plan.problems != self._noted:
            yield Change(deleted=self.plan.deleted, problems=self.plan.problems.values())

    def _batches(
        self, found: Iterable[_Found | _Failed]
    ) -> Iterator[tuple[tuple[list[NewFile], list[_Found]], Tensor]]:
        """Files, those of them whose content is new, and the pixels of these, [B, 3, S, S] or [0]."""
        files: list[NewFile] = []
        new: list[_Found] = []
        for one in found:
            self._bar.advance()
            if isinstance(one, _Failed):
                name = one.problem.where
                self.plan.problems[name] = one.problem, one.stamp
                if name in self._known and one.unreachable:
                    self.plan.unchanged += 1
                elif name in self._known:
                    self.plan.deleted.append(name)
                continue
            files.append(one.file)
            if len(one.pixels) and one.file.hash not in self._hashes:  # copies may have been decoded at the same time
                self._hashes.add(one.file.hash)
                new.append(one)
            # Images that arrive slowly are not waited for.
            if len(new) >= self._batch_size or len(files) >= TOGETHER or self._commit_is_due():
                yield (files, new), _stack(new)
                files, new = [], []
        yield (files, new), _stack(new)

    def _encode(self, pixels: Tensor) -> ViewEmbeddings:
        return self._model.encode_images(pixels) if len(pixels) else ViewEmbeddings(pixels)

    def _commit_is_due(self) -> bool:
        return time.monotonic() > self._committed_at + SECONDS

    def _with_captions(self, files: Sequence[NewFile], images: Sequence[NewImage]) -> Iterator[Change]:
        """Encode the new captions of files. If that takes long, the images and captions are committed before the
        files, so that a kill does not lose what was encoded."""
        files = list(self._changed(self._readable(files)))
        texts = list(dict.fromkeys(text for file in files for text in file.captions))
        known = self._writing.submit(self._writer.known_texts, texts).result()  # when the last commit is done
        texts = [text for text in texts if text not in known]
        tokens = self._model.text_transform(texts)
        self.counts.truncated += tokens.truncated
        self.counts.encoded_captions += len(texts)
        captions: dict[str, np.ndarray] = {}
        batches = caption_batches(self._model, tokens, batch=self._batch_size)
        for rows, encoded in encode_batches(self._model, self._model.encode_texts, batches):
            captions.update(zip((texts[row] for row in rows), encoded.vectors.float().cpu().numpy()))  # [n, D]
            if self._commit_is_due():
                yield Change(images=images, captions=captions)
                self._committed_at = time.monotonic()
                images, captions = [], {}
        if files:
            yield Change(images=images, captions=captions, files=files)
        self._committed_at = time.monotonic()

    def _changed(self, files: Iterable[NewFile]) -> Iterator[NewFile]:
        """Those that the index does not have like this; all are counted."""
        for file in files:
            before = self._known.get(file.name)
            now = Known(file.stamp, file.place, file.hash, captions_hash(file.captions))
            if before is None:
                self.counts.added += 1
            elif replace(before, stamp=now.stamp) == now:
                self.counts.unchanged += 1
            else:
                self.counts.updated += 1
            if before != now:
                yield file

    def _readable(self, files: Sequence[NewFile]) -> Iterator[NewFile]:
        """Files without the captions that the model cannot read; these are noted."""
        texts = list(dict.fromkeys(text for file in files for text in file.captions))
        reasons = self._model.text_transform.validate(texts)
        bad = {text: reason for text, reason in zip(texts, reasons) if reason}
        for file in files:
            if found := [text for text in file.captions if text in bad]:
                detail = "; ".join(f"the caption is {text!r}: {bad[text]}" for text in found)
                self.plan.problems[file.name] = Problem("empty caption", file.name, detail), ""
                file = replace(file, captions=tuple(text for text in file.captions if text not in bad))
            yield file


def make_thumbnail(image: Image.Image) -> bytes:
    """A small JPEG of a decoded image: upright, on white, without metadata such as where it was taken."""
    if image.mode in ("RGB", "L") and "transparency" not in image.info:
        image = _shrink(image)  # first, so that few pixels are turned; other modes must be flattened before
    small = _shrink(to_rgb(image))
    small.info.clear()  # Pillow would write comments and XMP of the original
    content = io.BytesIO()
    small.save(content, "JPEG", quality=QUALITY)
    return content.getvalue()


def _shrink(image: Image.Image) -> Image.Image:
    scale = THUMBNAIL / max(image.size)
    if scale >= 1:
        return image
    width, height = (max(1, round(scale * side)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=1.0)  # a fraction of the time


def _stack(found: Sequence[_Found]) -> Tensor:
    return torch.stack([one.pixels for one in found]) if found else NO_PIXELS


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads inside the block; 0 changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)

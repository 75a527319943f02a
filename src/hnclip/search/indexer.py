"""`hnclip index`: creates or updates an index. Unchanged files are not read, known content is not encoded again.

Threads read, hash and decode images ahead of the encoder, and a thread writes commits while the next batch is encoded.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hnclip.config import Opening, ReadConfig, option_words
from hnclip.core import InvalidImage, Problem, ViewEmbeddings, upright_shape
from hnclip.data.decoding import cpu_count, decoding_threads, in_order
from hnclip.data.images import preprocess_image, to_rgb
from hnclip.data.sources import SCENES, local_path
from hnclip.encode.fingerprint import model_fingerprint
from hnclip.encode.loop import caption_batches, encode_batches
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import BUNDLED, load, models_of
from hnclip.search.engines import check_engine, import_faiss, update_engine
from hnclip.search.query_encoder import update_text_encoder
from hnclip.search.render import IndexResult
from hnclip.search.scan import Entry, Source, compare, is_unreachable, open_source
from hnclip.search.store import KINDS, About, EngineName, Store, content_hash, database_files
from hnclip.search.writer import (
    Change,
    IndexWriter,
    NewFile,
    NewImage,
    Noted,
    captions_hash,
    open_writer,
    write_command,
)
from hnclip.util.console import progress
from hnclip.util.device import find_device
from hnclip.util.text import counted

log = logging.getLogger(__name__)

TOGETHER, SECONDS = 256, 5.0  # files of a commit, and seconds after which there is one with fewer
AHEAD = 2  # batches that are decoded ahead
PART = 4096  # deletions of a commit
THUMBNAIL, QUALITY = 320, 80  # pixels of the longer side, and quality of the JPEG

Value = TypeVar("Value")


def build_index(
    data: str,
    out: str | Path,
    *,
    model: str | None = None,
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
        model: as for `hnclip.load`, or a run; if not given, that of the existing index.
        engine: exact, faiss-ivf, faiss-hnsw or milvus (at `uri`); if not given, that of the existing index.
        replace: make the index anew, beside the old one, for example with another model.
        text_encoder: export the text tower into the index, so that queries need no torch.
        workers: threads that read and decode; 0 for the number of CPUs.
        threads: CPU threads of torch during the call; 0 leaves them as they are.

    Raises:
        ValueError: there are no images, or the index is of another model or other data; it is as it was.
        OSError: the disk is full or fails; what was committed is kept, and the same call continues.
    """
    start, before = time.monotonic(), torch.get_num_threads()
    out, read, opening = Path(out), read or ReadConfig(), opening or Opening()
    _check_apart(out, local_path(data))
    existing = _existing_about(out) if not replace else None
    name = model or (existing.model if existing else BUNDLED if data in SCENES else None)
    if name is None:
        raise ValueError(
            f"give a --model to index {data} with: a run, the folder or hub name of a CLIP model, or a checkpoint file "
            "(docs/models.md); --model bundled is a small model of drawings, for trials"
        )
    _check_engine(engine or (existing.engine if existing else "exact"), uri)
    source = open_source(data, read, split=split)
    opened = load(models_of(name)[0][1], **vars(opening)).eval().to(find_device(device))
    opened.require_trained("an index")
    about = About(
        model=name if name == BUNDLED or not Path(name).exists() else os.path.abspath(name),
        source=opened.source,
        fingerprint=model_fingerprint(opened, opened.name),
        opening={key: str(value) if isinstance(value, Path) else value for key, value in vars(opening).items()},
        width=opened.width,
        data=source.data,
        root=None if source.root is None else str(source.root),
        engine=engine or (existing.engine if existing else "exact"),
        uri=uri or (existing.uri if existing and engine in (None, existing.engine) else None),
        split=split,
    )
    words = ["hnclip", "index", about.data, "--model", about.model]
    words += ["--split", split] if split != "all" else []
    words += ["--engine", about.engine] if about.engine != "exact" else []
    words += ["--uri", about.uri] if about.uri else []
    words += [*option_words(opening, Opening()), *option_words(read, ReadConfig(), "read.")]
    about = dataclasses.replace(about, command=shlex.join(words))
    log.info(f"model: {opened.source}; data: {counted(len(source), 'image')} of {source.data}")
    try:
        if threads:
            torch.set_num_threads(threads)
        with open_writer(out, about, replace=replace) as writer:
            _check_same(writer, about, source)
            with progress("verifying checksums"):
                writer.verify()
            if writer.about != about:  # the folder or the model has moved, or another engine is wanted
                writer.set_about(about)
            write_command(out, about)
            began = time.monotonic()
            update = _Update(writer, opened, source, batch)
            update.run(workers or cpu_count())
            working = time.monotonic() - began
            writer.delete_unused()
            compacted = writer.compact()
            update_text_encoder(writer, opened if text_encoder else None)
            writer.publish()
            for kind in KINDS:
                update_engine(writer, kind, about.engine, about.uri)
            counts = writer.counts()
    finally:
        torch.set_num_threads(before)
    return IndexResult(
        out=out,
        data=source.data,
        model=opened.source,
        images=counts["images"],
        captions=counts["captions"],
        **vars(update.counts),
        seconds=time.monotonic() - start,
        working=working,
        compacted=compacted,
        problems=tuple(problem for problem, _ in update.problems.values()),
    )


@dataclass
class UpdateCounts:
    """Files that were added, updated, deleted, left as they were; images and captions that were encoded."""

    added: int = 0
    updated: int = 0
    deleted: int = 0
    unchanged: int = 0
    encoded: int = 0
    encoded_captions: int = 0
    truncated: int = 0


@dataclass(frozen=True)
class _Found:
    """An entry that was read; `image` if its content may be new. `problem` if it cannot be indexed.

    Shape:
        pixels: [3, S, S] uint8
    """

    entry: Entry
    stamp: str
    hash: bytes = b""
    pixels: Tensor | None = None
    size: tuple[int, int] = (0, 0)
    thumbnail: bytes = b""
    problem: Problem | None = None
    unreachable: bool = False


@dataclass
class _Batch:
    """New images to encode, and files that can be committed when they are."""

    new: list[_Found] = field(default_factory=list)
    files: list[NewFile] = field(default_factory=list)

    def pixels(self) -> Tensor:
        """[B, 3, S, S], or [0] if no image is new."""
        found = [one.pixels for one in self.new if one.pixels is not None]
        return torch.stack(found) if found else torch.empty(0)


class _Update:
    """One update of an index: compares, reads, encodes, commits."""

    def __init__(self, writer: IndexWriter, model: DualEncoder, source: Source, batch: int) -> None:
        self.counts, self.problems = UpdateCounts(), Noted()
        self._writer, self._model, self._batch_size = writer, model, batch
        captions = {**source.captions, **{name: writer.captions_of(name) for name in source.unread}}
        self._source = dataclasses.replace(source, captions=captions)
        self._known, self._noted, self._hashes = writer.known(), writer.problems(), writer.hashes()
        self._deleted: list[str] = []
        self._encoded: list[NewImage] = []
        self._ready: list[NewFile] = []
        self._committed_at = time.monotonic()
        self._thread = ThreadPoolExecutor(1)
        self._commit: Future[None] | None = None

    def run(self, workers: int) -> None:
        try:
            with decoding_threads(workers) as pool:
                with progress("comparing", len(self._source)) as bar:
                    plan = compare(self._source, self._known, self._noted, pool, bar.advance)
                self.counts.unchanged, self.problems = plan.unchanged, dict(plan.problems)
                self._deleted = list(plan.deleted)
                total = sum(1 + len(entry.captions) for entry in plan.work)
                with progress("images and captions", total) as bar:
                    self._advance = bar.advance
                    found = in_order(pool, self._read, plan.work, AHEAD * self._batch_size)
                    for batch, encoded in encode_batches(self._model, self._encode, self._batches(found)):
                        self._collect(batch, encoded)
                        if len(self._ready) >= TOGETHER or self._commit_is_due():
                            self._commit_ready()
                    self._commit_ready()
            self._finish()
        finally:
            self._thread.shutdown()

    def _read(self, entry: Entry) -> _Found:
        """Read and hash an image, and decode it if its content is new; in a thread."""
        stamp = ""
        try:
            stamp = entry.stamp()  # before reading: a change in between is noticed by the next update
            known = self._known.get(entry.name)
            if known is not None and (known.stamp, known.place) == (stamp, entry.place):
                return _Found(entry, stamp, known.hash)  # its captions have changed
            content = entry.image.read()
            digest = content_hash(content)
            if digest in self._hashes:
                return _Found(entry, stamp, digest)
            image = entry.image.decode(content)
            pixels = preprocess_image(image, self._model.image_transform)
            return _Found(entry, stamp, digest, pixels, upright_shape(image), make_thumbnail(image))
        except InvalidImage as error:
            # A missing image is looked for each time, a damaged one again when its file changes.
            kind, detail, missing = error.kind, str(error), error.kind == "missing image"
            return _Found(
                entry,
                "" if missing else stamp,
                problem=_problem(kind, entry.name, detail),
                unreachable=is_unreachable(error),
            )
        except MemoryError:
            problem = _problem("oversized image", entry.name, "there is not enough memory to decode it")
            return _Found(entry, "", problem=problem)
        except Exception as error:  # Pillow raises many types; one image must not end the update
            problem = _problem("unusual image", entry.name, str(error) or type(error).__name__)
            return _Found(entry, stamp, problem=problem)

    def _batches(self, found: Iterable[_Found]) -> Iterator[tuple[_Batch, Tensor]]:
        batch = _Batch()
        for one in found:
            self._advance(1)
            if one.problem is not None:
                self._note(one)
                continue
            if one.pixels is not None and one.hash not in self._hashes:
                self._hashes.add(one.hash)
                batch.new.append(one)
            batch.files.append(NewFile(one.entry.name, one.hash, one.entry.place, one.stamp, one.entry.captions))
            # Images that arrive slowly are not waited for.
            if len(batch.new) >= self._batch_size or len(batch.files) >= TOGETHER or self._commit_is_due():
                yield batch, batch.pixels()
                batch = _Batch()
        yield batch, batch.pixels()

    def _note(self, found: _Found) -> None:
        assert found.problem is not None
        self.problems[found.entry.name] = found.problem, found.stamp
        if found.entry.name in self._known:
            if found.unreachable:
                self.counts.unchanged += 1
            else:
                self._deleted.append(found.entry.name)
        self._advance(len(found.entry.captions))

    def _encode(self, pixels: Tensor) -> ViewEmbeddings:
        return self._model.encode_images(pixels) if len(pixels) else ViewEmbeddings(pixels)

    def _collect(self, batch: _Batch, encoded: ViewEmbeddings) -> None:
        self._ready += batch.files
        vectors = encoded.vectors.float().cpu().numpy()  # [B, D]
        self._encoded += [
            NewImage(one.hash, vector, one.size, one.thumbnail) for one, vector in zip(batch.new, vectors)
        ]
        self.counts.encoded += len(batch.new)

    def _commit_is_due(self) -> bool:
        return time.monotonic() > self._committed_at + SECONDS

    def _commit_ready(self) -> None:
        """Encode the captions of the files that are ready, and commit both."""
        files, self._ready = self._readable(self._ready), []
        images, self._encoded = self._encoded, []
        changed = [file for file in files if not self._is_same(file)]
        stamps = {file.name: file.stamp for file in files if self._is_same(file)}
        for file in files:
            kind = "updated" if file.name in self._known else "added"
            setattr(self.counts, kind, getattr(self.counts, kind) + 1)
        texts = list(dict.fromkeys(text for file in changed for text in file.captions))
        self._wait()
        known = self._writer.known_texts(texts)
        new = [text for text in texts if text not in known]
        self._advance(sum(len(file.captions) for file in files) - len(new))
        captions: dict[str, np.ndarray] = {}
        for some, vectors in self._encode_texts(new):
            captions.update(zip(some, vectors))
            if self._commit_is_due():  # so that a kill does not lose what was encoded
                self._write(Change(images=images, captions=captions))
                images, captions = [], {}
        if images or captions or changed or stamps:
            self._write(Change(images=images, captions=captions, files=changed, stamps=stamps))
        self._committed_at = time.monotonic()

    def _is_same(self, file: NewFile) -> bool:
        """Whether the index has it, except for its stamp."""
        known = self._known.get(file.name)
        own = (file.hash, file.place, captions_hash(file.captions))
        return known is not None and (known.hash, known.place, known.captions) == own

    def _readable(self, files: Sequence[NewFile]) -> list[NewFile]:
        """Files without the captions that the model cannot read; these are noted."""
        texts = list(dict.fromkeys(text for file in files for text in file.captions))
        reasons = self._model.text_transform.validate(texts)
        bad = {text: reason for text, reason in zip(texts, reasons) if reason}
        kept = []
        for file in files:
            if found := [text for text in file.captions if text in bad]:
                detail = "; ".join(f"the caption is {text!r}: {bad[text]}" for text in found)
                self.problems[file.name] = _problem("empty caption", file.name, detail), ""
                readable = tuple(text for text in file.captions if text not in bad)
                file = NewFile(file.name, file.hash, file.place, file.stamp, readable)
            kept.append(file)
        return kept

    def _encode_texts(self, texts: Sequence[str]) -> Iterator[tuple[list[str], np.ndarray]]:
        """Texts and their vectors [n, D], a batch at a time."""
        if not texts:
            return
        tokens = self._model.text_transform(texts)
        self.counts.truncated += tokens.truncated
        batches = caption_batches(self._model, tokens, batch=self._batch_size)
        for rows, encoded in encode_batches(self._model, self._model.encode_texts, batches):
            self.counts.encoded_captions += len(rows)
            self._advance(len(rows))
            yield [texts[row] for row in rows], encoded.vectors.float().cpu().numpy()

    def _finish(self) -> None:
        """Delete files that are gone, and update the problems; a part at a time, since readers wait for a commit."""
        self.counts.deleted = len(self._deleted)
        for deleted in _parts(self._deleted):
            self._write(Change(deleted=deleted))
        for noted in _parts([found for name, found in self.problems.items() if self._noted.get(name) != found]):
            self._write(Change(problems=noted))
        for solved in _parts([name for name in self._noted if name not in self.problems]):
            self._write(Change(solved=solved))
        self._wait()

    def _write(self, change: Change) -> None:
        self._wait()
        self._commit = self._thread.submit(self._writer.commit, change)
        self._committed_at = time.monotonic()

    def _wait(self) -> None:
        """Wait for the last commit."""
        if self._commit is not None:
            self._commit.result()
            self._commit = None


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


def _problem(kind: str, name: str, detail: str) -> Problem:
    return Problem(
        kind, name, detail.encode(errors="backslashreplace").decode()
    )  # it may name a path that is not UTF-8


def _parts(values: Sequence[Value]) -> Iterator[Sequence[Value]]:
    for start in range(0, len(values), PART):
        yield values[start : start + PART]


def _existing_about(out: Path) -> About | None:
    if not database_files(out):
        return None
    with Store(out) as store:
        return store.about


def _check_apart(out: Path, data: Path | None) -> None:
    """An index may be inside the folder that it is of, but must not be the folder, or contain it."""
    if data is not None:
        place, real = out.resolve(), data.resolve()
        if place == real or place in real.parents:
            raise ValueError(f"--out {out} would mix the index with {data}, which is indexed: choose another --out")


def _check_engine(engine: str, uri: str | None) -> None:
    """What would fail after hours of encoding."""
    check_engine(engine)
    if engine.startswith("faiss"):
        import_faiss()
    if uri is not None and engine != "milvus":
        raise ValueError("--uri requires --engine milvus")
    if uri is not None and "@" in uri:
        raise ValueError(
            "the URI is stored in the index: give user and password as USER:PASSWORD in $HNCLIP_MILVUS_TOKEN"
        )


def _check_same(writer: IndexWriter, about: About, source: Source) -> None:
    """ValueError if the index is of another model, split or data."""
    own = writer.about
    again = f"Update it with\n  {own.command} --out {writer.path}\nor add --replace, or choose another --out"
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

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

import torch
from PIL import Image
from torch import Tensor

from hnclip.config import Opening, ReadConfig, option_words
from hnclip.core import ImageSource, InvalidImage, Problem, Record, upright_shape
from hnclip.data.decoding import cpu_count, decoding_threads, in_order
from hnclip.data.image_sources import FileImage, TarImage
from hnclip.data.images import preprocess_image, to_rgb
from hnclip.data.records import printable
from hnclip.data.sources import SCENES, local_path
from hnclip.encode.fingerprint import model_fingerprint
from hnclip.encode.loop import caption_batches, encode_batches
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import BUNDLED, load, models_of
from hnclip.search.database import KINDS, About, EngineName, content_hash, published_database, text_hash
from hnclip.search.engines import check_engine, import_faiss, update_engine
from hnclip.search.query_encoder import update_text_encoder
from hnclip.search.reader import IndexReader, place_of, source_at
from hnclip.search.render import IndexResult
from hnclip.search.scan import Source, is_unreachable, lies_in, open_source
from hnclip.search.writer import (
    Change,
    IndexWriter,
    Known,
    NewFile,
    NewImage,
    Noted,
    captions_hash,
    open_writer,
)
from hnclip.util.console import progress
from hnclip.util.device import find_device
from hnclip.util.optional import import_extra
from hnclip.util.text import counted

log = logging.getLogger(__name__)

TOGETHER, SECONDS = 256, 5.0  # files of a commit, as many are decoded ahead; seconds until there is one with fewer
THUMBNAIL, QUALITY = 320, 80  # pixels of the longer side, and quality of the JPEG


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
    start, out, read = time.monotonic(), Path(out), read or ReadConfig()
    _check_place(out, local_path(data))
    existing = None
    if not replace and published_database(out):
        with IndexReader(out) as reader:
            existing = reader.about
    name, opening = _choose_model(data, model, opening or Opening(), existing)
    engine, uri = _choose_engine(engine, uri, existing)
    source = open_source(data, read, split=split)
    opened = load(models_of(name)[0][1], **vars(opening)).eval().to(find_device(device))
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
        _Update(writer, opened, source, batch, result).run(workers or cpu_count())
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


@dataclass(frozen=True)
class _ReadFile:
    """A file that was read; with pixels, size and thumbnail if its content may be new.

    Args:
        problem: why it cannot be indexed, until its stamp changes; `unreachable` if it may exist as it was.

    Shape:
        pixels: [3, S, S] uint8
    """

    file: NewFile
    pixels: Tensor | None = None
    size: tuple[int, int] = (0, 0)
    thumbnail: bytes = b""
    problem: Problem | None = None
    unreachable: bool = False


class _Update:
    """One update of an index: compares, reads, encodes, commits."""

    def __init__(
        self, writer: IndexWriter, model: DualEncoder, source: Source, batch: int, result: IndexResult
    ) -> None:
        self._writer, self._model, self._source, self._result = writer, model, source, result
        self._batch, self._chunk = batch, max(batch, TOGETHER)
        self._known, self._noted = writer.known(), writer.problems()
        self._images, self._texts = writer.hashes("images"), writer.hashes("captions")
        self._problems = _by_place(source.problems)
        self._deleted: list[str] = []
        self._committed_at = time.monotonic()

    def run(self, workers: int) -> None:
        with decoding_threads(workers) as pool, ThreadPoolExecutor(1) as writing:
            work = self._compare(pool)
            with progress("images", len(work)) as self._bar:
                read = in_order(pool, self._read, work, self._chunk)
                for _ in in_order(writing, self._writer.commit, self._changes(read), 1):
                    pass
        self._writer.finish(self._deleted, self._problems)
        self._result.deleted = len(self._deleted)
        self._result.problems = tuple(problem for problem, _ in self._problems.values())

    def _compare(self, pool: ThreadPoolExecutor) -> list[Record]:
        """The records to read: new ones, and those with another stamp, place or captions. No image is read."""
        captions = {name: self._writer.captions_of(name) for name in self._source.unread}
        records = [
            replace(record, captions=captions[record.id]) if record.id in captions else record
            for record in self._source.records
        ]
        parts = (records[start : start + TOGETHER] for start in range(0, len(records), TOGETHER))
        work = list[Record]()
        with progress("comparing", len(records)) as bar:
            for part, same in in_order(pool, lambda part: (part, list(map(self._is_same, part))), parts, 64):
                work += [record for record, is_same in zip(part, same) if not is_same]
                bar.advance(len(part))
        left = {record.id for record in records} - {record.id for record in work}
        self._problems.update((name, self._noted[name]) for name in left - self._known.keys())
        absent = self._known.keys() - {record.id for record in records}
        self._deleted = [name for name in absent if not self._may_exist(name)]
        self._result.unchanged = len((left | absent) & self._known.keys()) - len(self._deleted)
        return work

    def _is_same(self, record: Record) -> bool:
        """Whether a record is as the index has it, or as bad as it was."""
        name = record.id
        if name not in self._known and name not in self._noted:
            return False
        try:
            stamp = stamp_of(record.image)
        except InvalidImage:
            return False
        if known := self._known.get(name):
            place = place_of(record.image, self._source.root)
            return (known.stamp, known.place, known.captions) == (stamp, place, captions_hash(record.captions))
        return self._noted[name][1] == stamp

    def _may_exist(self, name: str) -> bool:
        """Whether a file of the index that the source does not list may be there as it was."""
        if lies_in(name, self._source.hidden):
            return True
        image = source_at(self._known[name].place, self._source.root)
        try:
            if image is not None:
                image.stamp()
        except InvalidImage as error:
            if is_unreachable(error):
                self._problems[name] = Problem(error.kind, name, str(error)), ""
                return True
        return False

    def _read(self, record: Record) -> _ReadFile:
        """Read and hash an image, and decode it if its content is new; in a thread."""
        place, known = place_of(record.image, self._source.root), self._known.get(record.id)
        file, unreachable = NewFile(record.id, b"", place, "", record.captions), False
        try:
            # Before reading: a change in between is noticed by the next update.
            file = replace(file, stamp=stamp_of(record.image))
            if known is not None and (known.stamp, known.place) == (file.stamp, place):
                return _ReadFile(replace(file, hash=known.hash))
            content = record.image.read()
            file = replace(file, hash=content_hash(content))
            if file.hash in self._images:
                return _ReadFile(file)
            image = record.image.decode(content)
            pixels = preprocess_image(image, self._model.image_transform)
            return _ReadFile(file, pixels, upright_shape(image), make_thumbnail(image))
        except InvalidImage as error:
            kind, detail, unreachable = error.kind, str(error), is_unreachable(error)
            if kind == "missing image":
                file = replace(file, stamp="")  # it is looked for each time
        except MemoryError:
            kind, detail = "oversized image", "there is not enough memory to decode it"
            file = replace(file, stamp="")
        except Exception as error:  # Pillow raises many types; one image must not end the update
            kind, detail = "unusual image", str(error) or type(error).__name__
        return _ReadFile(file, problem=Problem(kind, record.id, printable(detail)), unreachable=unreachable)

    def _changes(self, read: Iterable[_ReadFile]) -> Iterator[Change]:
        """What to commit: files with their new images and captions. If encoding these takes long, they are committed
        before the files, so that a kill does not lose them."""
        for chunk in self._chunks(read):
            new = {one.file.hash: one for one in chunk if one.pixels is not None and one.file.hash not in self._images}
            files = [file for file in self._readable([one.file for one in chunk]) if self._differs(file)]
            texts = dict.fromkeys(text for file in files for text in file.captions)
            change = Change()
            for encoded in self._encode([*new.values()], [one for one in texts if text_hash(one) not in self._texts]):
                change.images += encoded.images
                change.captions |= encoded.captions
                if self._commit_is_due():
                    yield change
                    change, self._committed_at = Change(), time.monotonic()
            self._images |= new.keys()
            self._texts.update(map(text_hash, texts))
            if files:
                change.files = files
                yield change
            self._committed_at = time.monotonic()

    def _chunks(self, read: Iterable[_ReadFile]) -> Iterator[list[_ReadFile]]:
        """Files that can be indexed, as many as are committed together; problems are noted."""
        chunk: list[_ReadFile] = []
        for one in read:
            self._bar.advance()
            name = one.file.name
            if one.problem is None:
                chunk.append(one)
            else:
                self._problems[name] = one.problem, one.file.stamp
                if name in self._known and one.unreachable:
                    self._result.unchanged += 1
                elif name in self._known:
                    self._deleted.append(name)
            if len(chunk) >= self._chunk or self._commit_is_due():  # images that arrive slowly are not waited for
                yield chunk
                chunk = []
        yield chunk

    def _encode(self, images: Sequence[_ReadFile], texts: Sequence[str]) -> Iterator[Change]:
        """The images and captions to insert, a batch at a time."""
        model, result = self._model, self._result
        parts = (images[start : start + self._batch] for start in range(0, len(images), self._batch))
        pixels = ((part, torch.stack([one.pixels for one in part if one.pixels is not None])) for part in parts)
        for some, encoded in encode_batches(model, model.encode_images, pixels):
            vectors = encoded.vectors.float().cpu().numpy()  # [B, D]
            yield Change(
                [NewImage(one.file.hash, vector, one.size, one.thumbnail) for one, vector in zip(some, vectors)]
            )
            result.encoded += len(some)
        tokens = model.text_transform(texts)
        result.truncated += tokens.truncated
        for rows, encoded in encode_batches(
            model, model.encode_texts, caption_batches(model, tokens, batch=self._batch)
        ):
            vectors = encoded.vectors.float().cpu().numpy()  # [B, D]
            yield Change(captions=dict(zip((texts[row] for row in rows), vectors)))
            result.encoded_captions += len(rows)

    def _commit_is_due(self) -> bool:
        return time.monotonic() > self._committed_at + SECONDS

    def _differs(self, file: NewFile) -> bool:
        """Whether the index does not have a file like this; each file is counted."""
        before = self._known.get(file.name)
        now = Known(file.stamp, file.place, file.hash, captions_hash(file.captions))
        if before is None:
            self._result.added += 1
        elif replace(before, stamp=now.stamp) == now:
            self._result.unchanged += 1
        else:
            self._result.updated += 1
        return before != now

    def _readable(self, files: Sequence[NewFile]) -> Iterator[NewFile]:
        """Files without the captions that the model cannot read; these are noted."""
        texts = list(dict.fromkeys(text for file in files for text in file.captions))
        reasons = self._model.text_transform.validate(texts)
        bad = {text: reason for text, reason in zip(texts, reasons) if reason}
        for file in files:
            if found := [text for text in file.captions if text in bad]:
                detail = "; ".join(f"the caption is {text!r}: {bad[text]}" for text in found)
                self._problems[file.name] = Problem("empty caption", file.name, detail), ""
                file = replace(file, captions=tuple(text for text in file.captions if text not in bad))
            yield file


def stamp_of(image: ImageSource) -> str:
    """Changes when the image may have changed; InvalidImage if there is none."""
    if isinstance(image, FileImage | TarImage):
        return image.stamp()  # without its path: the folder may move
    return f"{image.key} {image.stamp()}"


def _by_place(problems: Iterable[Problem]) -> Noted:
    """Problems of the source by place, those of one place joined; without a stamp, since they are found each time."""
    found: Noted = {}
    for problem in problems:
        if problem.where in found:
            first = found[problem.where][0]
            problem = replace(first, detail=f"{first.detail}; {problem.detail}")
        found[problem.where] = problem, ""
    return found


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


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads inside the block; 0 changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)

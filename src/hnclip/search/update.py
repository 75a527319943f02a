"""One update of an index: unchanged files are not read, known content is not encoded again.

Threads read, hash and decode images ahead of the encoder, and a thread writes commits while the next batch is encoded.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from PIL import Image
from torch import Tensor

from hnclip.core import ImageSource, InvalidImage, Problem, Record, ViewEmbeddings, upright_shape
from hnclip.data.decoding import decoding_threads, in_order
from hnclip.data.image_sources import FileImage, TarImage
from hnclip.data.images import preprocess_image, to_rgb
from hnclip.data.records import printable
from hnclip.encode.loop import caption_batches, encode_batches
from hnclip.models.dual_encoder import DualEncoder
from hnclip.search.database import content_hash, text_hash
from hnclip.search.reader import place_of, source_at
from hnclip.search.render import IndexResult
from hnclip.search.scan import Source, is_unreachable, lies_in
from hnclip.search.writer import Change, IndexWriter, Known, NewFile, NewImage, Noted, captions_hash
from hnclip.util.console import progress

TOGETHER, SECONDS = 256, 5.0  # files of a commit, and seconds after which there is one with fewer
AHEAD = 2  # batches that are decoded ahead
THUMBNAIL, QUALITY = 320, 80  # pixels of the longer side, and quality of the JPEG


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


class Update:
    """One update of an index: compares, reads, encodes, commits."""

    def __init__(
        self, writer: IndexWriter, model: DualEncoder, source: Source, batch: int, result: IndexResult
    ) -> None:
        self._writer, self._model, self._source, self._result = writer, model, source, result
        self._batch = batch
        self._known, self._noted = writer.known(), writer.problems()
        self._images, self._texts = writer.hashes("images"), writer.hashes("captions")
        self._problems = _by_place(source.problems)
        self._deleted: list[str] = []
        self._committed_at = time.monotonic()

    def run(self, workers: int) -> None:
        with decoding_threads(workers) as pool, ThreadPoolExecutor(1) as writing:
            work = self._compare(pool)
            with progress("images", len(work)) as self._bar:
                read = in_order(pool, self._read, work, AHEAD * self._batch)
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
                for record, is_same in zip(part, same):
                    if not is_same:
                        work.append(record)
                    elif record.id in self._known:
                        self._result.unchanged += 1
                    else:
                        self._problems[record.id] = self._noted[record.id]
                bar.advance(len(part))
        absent = self._known.keys() - {record.id for record in records}
        self._deleted = [name for name in absent if not self._may_exist(name)]
        self._result.unchanged += len(absent) - len(self._deleted)
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
        known, place = self._known.get(record.id), place_of(record.image, self._source.root)
        stamp, unreachable = "", False
        try:
            stamp = stamp_of(record.image)  # before reading: a change in between is noticed by the next update
            if known is not None and (known.stamp, known.place) == (stamp, place):
                return _ReadFile(NewFile(record.id, known.hash, place, stamp, record.captions))
            content = record.image.read()
            file = NewFile(record.id, content_hash(content), place, stamp, record.captions)
            if file.hash in self._images:
                return _ReadFile(file)
            image = record.image.decode(content)
            pixels = preprocess_image(image, self._model.image_transform)
            return _ReadFile(file, pixels, upright_shape(image), make_thumbnail(image))
        except InvalidImage as error:
            kind, detail, unreachable = error.kind, str(error), is_unreachable(error)
        except MemoryError:
            kind, detail, stamp = "oversized image", "there is not enough memory to decode it", ""
        except Exception as error:  # Pillow raises many types; one image must not end the update
            kind, detail = "unusual image", str(error) or type(error).__name__
        if kind == "missing image":
            stamp = ""  # it is looked for each time
        problem = Problem(kind, record.id, printable(detail))
        return _ReadFile(NewFile(record.id, b"", place, stamp), problem=problem, unreachable=unreachable)

    def _changes(self, read: Iterable[_ReadFile]) -> Iterator[Change]:
        """What to commit: files with their new images and captions."""
        files, images = list[NewFile](), list[NewImage]()
        for some, encoded in encode_batches(self._model, self._encode_images, self._batches(read)):
            files += [one.file for one in some]
            new = [one for one in some if one.pixels is not None]
            vectors = encoded.vectors.float().cpu().numpy()  # [B, D]
            images += [NewImage(one.file.hash, vector, one.size, one.thumbnail) for one, vector in zip(new, vectors)]
            self._result.encoded += len(new)
            if len(files) >= TOGETHER or self._commit_is_due():
                yield from self._with_captions(files, images)
                files, images = [], []
        yield from self._with_captions(files, images)

    def _batches(self, read: Iterable[_ReadFile]) -> Iterator[tuple[list[_ReadFile], Tensor]]:
        """Files that can be indexed, and the pixels of those whose content is new, [B, 3, S, S] or [0]; problems are
        noted."""
        files, pixels = list[_ReadFile](), list[Tensor]()
        for one in read:
            self._bar.advance()
            name = one.file.name
            if one.problem is not None:
                self._problems[name] = one.problem, one.file.stamp
                if name in self._known and one.unreachable:
                    self._result.unchanged += 1
                elif name in self._known:
                    self._deleted.append(name)
            elif one.pixels is None or one.file.hash in self._images:  # copies may be decoded at the same time
                files.append(replace(one, pixels=None))
            else:
                self._images.add(one.file.hash)
                files.append(one)
                pixels.append(one.pixels)
            # Images that arrive slowly are not waited for.
            if len(pixels) >= self._batch or len(files) >= TOGETHER or self._commit_is_due():
                yield files, torch.stack(pixels) if pixels else torch.empty(0)
                files, pixels = [], []
        yield files, torch.stack(pixels) if pixels else torch.empty(0)

    def _encode_images(self, pixels: Tensor) -> ViewEmbeddings:
        return self._model.encode_images(pixels) if len(pixels) else ViewEmbeddings(pixels)

    def _with_captions(self, files: Sequence[NewFile], images: list[NewImage]) -> Iterator[Change]:
        """Encode the new captions of files. If that takes long, the images and captions are committed before the
        files, so that a kill does not lose what was encoded."""
        files = [file for file in self._readable(files) if self._differs(file)]
        texts = list(dict.fromkeys(text for file in files for text in file.captions))
        texts = [text for text in texts if text_hash(text) not in self._texts]
        tokens = self._model.text_transform(texts)
        self._result.truncated += tokens.truncated
        self._result.encoded_captions += len(texts)
        self._texts.update(map(text_hash, texts))
        change, batches = Change(images), caption_batches(self._model, tokens, batch=self._batch)
        for rows, encoded in encode_batches(self._model, self._model.encode_texts, batches):
            change.captions.update(zip((texts[row] for row in rows), encoded.vectors.float().cpu().numpy()))  # [n, D]
            if self._commit_is_due():
                yield change
                change, self._committed_at = Change(), time.monotonic()
        if files:
            change.files = files
            yield change
        self._committed_at = time.monotonic()

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
